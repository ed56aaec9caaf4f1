"""Draft tokens for requests: by n-gram look-up, by a drafter beside the ring, or by the tail.

Must not know how drafts are verified, nor where a drafter is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from shardnet.cluster.head.drafters import Drafters
from shardnet.cluster.head.lent_drafters import OnBytes
from shardnet.errors import UsageError
from shardnet.runtime.engine.requests import Speculation
from shardnet.runtime.scheduling.drafting import (
    MAX_DRAFT_TOKENS,
    MTP,
    NGRAM,
    NgramDrafts,
    check_drafts,
)
from shardnet.wire.messages.drafting import LoadDrafter

OFF, AUTO = "off", "auto"
MOST_BY_MTP = 12
"""Drafts of the tail where as many are wanted as pay: each is less likely than the one before, and
those of all frames in flight are among them. What is looked up goes behind them."""

_MOST_TEXTS = 4
"""Texts that have ended in which drafts are looked up, too."""


@dataclass(kw_only=True, eq=False, repr=False)
class Drafts:
    """Makes the speculation of requests. `drafters` loads what drafts beside the ring."""

    drafters: Drafters | None = None

    def __post_init__(self) -> None:
        self._texts: deque[NgramDrafts] = deque(maxlen=_MOST_TEXTS)
        self._texts_vocab_size = 0

    async def speculation(
        self,
        order: LoadDrafter,
        most: int,
        *,
        rewinds: bool,
        has_mtp: bool = False,
        on_progress: OnBytes = lambda done, total: None,
    ) -> Speculation | None:
        """Make the speculation that an order's `drafter` asks for: off, ngram, mtp, auto, another.

        Text is looked up beside and behind whatever else drafts. With auto the tail drafts if it
        can. At most `most` tokens are drafted at once; 0 adapts the number to the acceptance rate.
        `rewinds` says whether the model's slots can be rewound, `has_mtp` whether the ring's tail
        can draft; `on_progress` is told of a download. Raises UsageError if `most` is above 31 and
        where slots cannot be rewound, and what loading a drafter raises.
        """
        how, vocab_size = order.drafter, order.vocab_size
        if most > MAX_DRAFT_TOKENS:
            raise UsageError(f"--draft-tokens {most}: at most {MAX_DRAFT_TOKENS} are verified")
        if how == OFF:
            return None
        if how == AUTO:
            if not rewinds:
                return None
            how = MTP if has_mtp else NGRAM
        if vocab_size != self._texts_vocab_size:  # what was said may be no tokens of this model
            self._texts = deque(maxlen=_MOST_TEXTS)
            self._texts_vocab_size = vocab_size
        look_up = partial(NgramDrafts, before=self._texts)
        if how == MTP:
            if not has_mtp:
                raise UsageError(
                    "--speculate mtp: this ring was made without the layer that predicts further "
                    "tokens",
                    remedy="ask again with --mtp, which makes another one",
                )
            return Speculation(
                make_draft_source=None,
                look_up=look_up,
                most=most or MAX_DRAFT_TOKENS,
                most_by_ring=most or MOST_BY_MTP,
            )
        most = most or MAX_DRAFT_TOKENS
        check_drafts(rewinds=rewinds)
        host = None
        if how != NGRAM:
            assert self.drafters is not None
            name, host = await self.drafters.load(order, on_progress)
        if host is None:
            return Speculation(make_draft_source=lambda wake: look_up(), most=most)
        return Speculation(
            make_draft_source=host.draft_source,
            name=name,
            look_up=look_up,
            most=most,
            layers=host.layers,
        )

    def close(self) -> None:
        """Unload what drafts beside the ring."""
        if self.drafters is not None:
            self.drafters.close()
