"""Draft tokens for requests: by n-gram look-up, by a small model on this node, or by the tail.

Knows which draft model this head has loaded. Must not know how drafts are verified.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import CheckpointError, UsageError
from shardnet.runtime.engine.requests import Speculation
from shardnet.runtime.loading.model_facts import Stamp, find_folder, stamp
from shardnet.runtime.scheduling.drafting import (
    MAX_DRAFT_TOKENS,
    MTP,
    NGRAM,
    NgramDrafts,
    check_drafts,
)

if TYPE_CHECKING:  # it imports torch, which a node without a draft model may never need
    from shardnet.runtime.engine.draft_model import DraftModel

OFF, AUTO = "off", "auto"
MOST_BY_MTP = 12
"""Drafts of the tail where as many are wanted as pay: each is less likely than the one before, and
those of all frames in flight are among them. What is looked up goes behind them."""

_MOST_TEXTS = 4
"""Texts that have ended in which drafts are looked up, too."""


@dataclass(kw_only=True, eq=False, repr=False)
class Drafts:
    """Makes the speculation of requests. Holds one draft model at most, that asked for last.

    Requests that run go on without the one before.
    `disk` reads it. `spare_bytes` returns the memory that a draft model may take, `threads` its
    compute threads.
    """

    disk: DiskJobs
    device: str
    spare_bytes: Callable[[], int]
    threads: Callable[[], int]

    def __post_init__(self) -> None:
        self._changing = asyncio.Lock()
        self._model: DraftModel | None = None
        self._key: tuple[object, ...] = ()
        self._texts: deque[NgramDrafts] = deque(maxlen=_MOST_TEXTS)
        self._texts_vocab_size = 0

    async def speculation(
        self,
        how: str,
        most: int,
        *,
        vocab_size: int,
        context: int,
        rewinds: bool,
        has_mtp: bool = False,
        ignore_unknown_config: bool = False,
    ) -> Speculation | None:
        """Make the speculation that `how` asks for: off, ngram, mtp, auto or the path of a draft
        model. Text is looked up beside and behind whatever else drafts.

        With auto the tail drafts if it can. At most `most` tokens are drafted at once; 0 adapts the
        number to the acceptance rate. `rewinds` says whether the model's slots can be rewound,
        `has_mtp` whether the ring's tail can draft, `ignore_unknown_config` whether unknown keys of
        a draft model's config are ignored. Raises UsageError if `most` is above 31 and where slots
        cannot be rewound, and what loading a draft model raises.
        """
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
                name=MTP,
                look_up=look_up,
                most=most or MAX_DRAFT_TOKENS,
                most_by_ring=most or MOST_BY_MTP,
            )
        most = most or MAX_DRAFT_TOKENS
        check_drafts(rewinds=rewinds)
        if how == NGRAM:
            return Speculation(make_draft_source=lambda wake: look_up(), most=most)
        model = await self._load(how, vocab_size, context, ignore_unknown_config)
        return Speculation(
            make_draft_source=model.draft_source,
            name=Path(how).name,
            look_up=look_up,
            most=most,
        )

    def close(self) -> None:
        """Free the draft model."""
        if self._model is not None:
            self._model.close()
            self._model = None

    async def _load(
        self, name: str, vocab_size: int, context: int, ignore_unknown_config: bool
    ) -> DraftModel:
        from shardnet.runtime.engine.draft_model import load_draft_model

        async with self._changing:
            path, stamped = await self.disk.run(name, lambda: _find(name))
            key = (path, stamped, vocab_size, context, ignore_unknown_config)
            if self._model is None or self._key != key:
                self.close()
                spare_bytes, threads = self.spare_bytes(), self.threads()
                self._model = await self.disk.run(
                    name,
                    lambda: load_draft_model(
                        path,
                        vocab_size=vocab_size,
                        device=self.device,
                        context=context,
                        memory_bytes=spare_bytes,
                        threads=threads,
                        ignore_unknown_config=ignore_unknown_config,
                    ),
                )
                self._key = key
            return self._model


def _find(name: str) -> tuple[Path, Stamp]:
    """Return the folder of a draft model and its stamp. Raises CheckpointError if there is none."""
    path = find_folder(name)
    if path is None:
        raise CheckpointError(
            f"--speculate {name}: there is no such checkpoint folder on the head",
            remedy="name one that is there, or give off, ngram, mtp or auto",
        )
    return path, stamp(path)
