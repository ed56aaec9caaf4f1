"""Recorded drafts over stages whose time is simulated: figures that no noise can touch.

Scheduler and policy are the real ones, and so are texts and drafts (drafters.recording): only what
steps, hops and drafts take is made up, in parts of the time that one row takes through all layers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from drafters.recording import Recorded, Text
from support.rings.timed_ring import TimedRing

from shardnet.cluster.head.drafts import MOST_BY_MTP
from shardnet.runtime.scheduling.drafting import (
    AdaptiveDrafter,
    DraftSource,
    NgramDrafts,
    RingDrafts,
)
from shardnet.types import MicroBatch

STEP_S, HOP_S = 0.1, 0.001
"""What one row takes through all layers, and a step from machine to machine."""
LAYER_S, BLOCK_S, MODEL_S = 0.02 * STEP_S, 0.04 * STEP_S, 0.1 * STEP_S
"""What one draft takes an EAGLE-3 head or a layer for MTP, a block a block drafter, and one draft a
small model."""
PATIENCE, PAUSE, RECENT, JUDGED = 2, 16, 8, 6
"""As the tail has them (runtime.stage.mtp_drafts)."""


@dataclass
class TextRing(TimedRing):
    """Says a given text. Its last stage drafts where `drafts_here`, as many as the tail would."""

    text: Text = field(kw_only=True)
    drafts_here: bool = False
    n_made: int = 0
    """Drafts that came with the last answer."""
    n_right: deque[int] = field(default_factory=lambda: deque(maxlen=JUDGED))
    """How many of the last drafts were right."""
    _sent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    _n_without: int = 0
    _made: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = self.text.ids
        self.prompt = ids[: self.text.n_prompt]
        self.says = lambda tokens: ids[len(tokens)] if len(tokens) < len(ids) else 0

    def said_per_s(self, drafter: AdaptiveDrafter | None) -> float:
        """Return tokens a second of the whole text."""
        return self.speed(drafter, len(self.text.ids) - self.text.n_prompt)

    def _beside_s(self, batch: MicroBatch) -> float:
        (group,) = batch.groups
        n_made = 0
        if self.drafts_here and group.n_sampled:
            self._sent.append(group.n_drafts)
            longest = max(self.n_right) if len(self.n_right) == JUDGED else MOST_BY_MTP
            self._n_without = 0 if group.n_drafts and longest else self._n_without + 1
            if self._n_without <= PATIENCE or self._n_without % PAUSE == 0:
                n_made = min(max(self._sent) + 1, MOST_BY_MTP, longest + 2)
        self._made[batch.step] = n_made
        return LAYER_S * n_made

    def _take(self, batch: MicroBatch) -> None:
        self.n_made = self._made.pop(batch.step)


class Tail(RingDrafts):
    """What the last stage drafts with every answer."""

    def __init__(self, recorded: Recorded, ring: TextRing) -> None:
        super().__init__()
        self._recorded, self._of = recorded, ring

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """See RingDrafts."""
        if len(tokens) - 2 < len(self._recorded.ids) and len(tokens) > self._position:
            self._judge(tokens)
            chain = self._recorded.chain(len(tokens) - 2)
            self.take(len(tokens), chain[: self._of.n_made])
        return super().draft(tokens, limit, ahead)

    def _judge(self, tokens: Sequence[int]) -> None:
        """Count how many of the drafts before were right, as the tail does."""
        if self._token_ids and (came := tokens[self._position :]):
            pairs = enumerate(zip(self._token_ids, came, strict=False))
            right = (n for n, (draft, token_id) in pairs if draft != token_id)
            self._of.n_right.append(next(right, len(self._token_ids)))


class WaitingTail(Tail):
    """Drafts of the last stage that wait for each other."""

    flies = False


class Elsewhere:
    """Drafts that are made beside the ring, while it verifies others (drafting.DraftSource).

    Each job drafts behind one place, `first_s` for its first draft and `each_s` for each further
    one; `rereads` where it begins again with the states of every answer.
    """

    flies = True

    def __init__(
        self, recorded: Recorded, ring: TimedRing, *, first_s: float, each_s: float, rereads: bool
    ) -> None:
        self._chains = [recorded.chain(place) for place in range(len(recorded.ids))]
        self._ring, self._first_s, self._each_s, self._rereads = ring, first_s, each_s, rereads
        self._jobs: deque[tuple[int, float]] = deque(maxlen=4)
        """Places, and when the first draft behind them is there; the newest first."""
        self.kinds: Sequence[int] = ()

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Let time pass until drafts are there."""
        if limit and not self.draft(tokens, 1) and self._jobs:
            ready_s = self._jobs[0][1] + (limit - 1) * self._each_s
            self._ring.now_s = max(self._ring.now_s, ready_s)
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return the drafts that are there of the newest job that has any."""
        self._follow(tokens)
        self.kinds = ()
        for place, first_s in self._jobs:
            passed_s = self._ring.now_s - first_s
            if passed_s > -1e-9:
                n_made = 1 + int(passed_s / self._each_s + 1e-9) if self._each_s else None
                chain, known = self._chains[place][:n_made], [*tokens[place + 2 :], *ahead]
                drafts = chain[len(known) :][:limit] if chain[: len(known)] == known else []
                if drafts:
                    self.kinds = range(len(known), len(known) + len(drafts))
                    return drafts
        return []

    def close(self) -> None:
        """Do nothing."""

    def _follow(self, tokens: Sequence[int]) -> None:
        place = len(tokens) - 2
        if place >= len(self._chains) or (self._jobs and self._jobs[0][0] == place):
            return
        if self._jobs and not self._rereads:
            last, first_s = self._jobs[0]
            passed = place - last
            if self._chains[last][:passed] == [*tokens[last + 2 :]]:  # it goes on where it is
                self._jobs.appendleft((place, first_s + passed * self._each_s))
                return
        self._jobs.appendleft((place, self._ring.now_s + 2 * HOP_S + self._first_s))


@dataclass(frozen=True)
class Case:
    """Stages that are simulated: how many, and what a row more costs."""

    n_stages: int
    row_cost: float

    def ring(self, text: Text, *, drafts_here: bool = False) -> TextRing:
        """Make a ring."""
        stages_s = [STEP_S / self.n_stages] * self.n_stages
        hop_s = HOP_S if self.n_stages > 1 else 0.0
        return TextRing(stages_s, self.row_cost, hop_s=hop_s, text=text, drafts_here=drafts_here)


class WaitingNgrams(NgramDrafts):
    """Look-up whose drafts wait for each other."""

    flies = False


Make = Callable[[TextRing], DraftSource]


def contestants(records: dict[str, Recorded]) -> dict[str, tuple[bool, Make | None]]:
    """Say of each whether the last stage drafts, and what makes its drafts."""
    found: dict[str, tuple[bool, Make | None]] = {
        "plain": (False, None),
        "n-gram, waits": (False, lambda ring: WaitingNgrams()),
        "n-gram, flies": (False, lambda ring: NgramDrafts()),
    }
    if mtp := records.get("mtp"):
        found["MTP, waits"] = True, lambda ring: WaitingTail(mtp, ring)
        found["MTP, flies"] = True, lambda ring: Tail(mtp, ring)
    for name, title, first_s, each_s, rereads in (
        ("eagle3", "EAGLE-3", LAYER_S, LAYER_S, True),
        ("dflash", "block drafter", BLOCK_S, 0.0, True),
        ("model", "draft model elsewhere", MODEL_S, MODEL_S, False),
    ):
        if recorded := records.get(name):
            found[title] = False, _elsewhere(recorded, first_s, each_s, rereads=rereads)
    return found


def _elsewhere(recorded: Recorded, first_s: float, each_s: float, *, rereads: bool) -> Make:
    return lambda ring: Elsewhere(recorded, ring, first_s=first_s, each_s=each_s, rereads=rereads)


def drafter_of(ring: TextRing, source: DraftSource) -> AdaptiveDrafter:
    """Make the policy over a source, with look-up behind and beside it, if it is not look-up."""
    if isinstance(source, NgramDrafts):
        return AdaptiveDrafter(draft_source=source, cost=ring.cost, clock=lambda: ring.now_s)
    return AdaptiveDrafter(
        draft_source=source,
        name="trained",
        look_up=NgramDrafts() if source.flies else WaitingNgrams(),
        cost=ring.cost,
        clock=lambda: ring.now_s,
    )


def tokens_per_s(case: Case, text: Text, records: dict[str, Recorded]) -> dict[str, float]:
    """Return the speed of each contestant on one text."""
    found = {}
    for name, (drafts_here, make) in contestants(records).items():
        ring = case.ring(text, drafts_here=drafts_here)
        found[name] = ring.said_per_s(drafter_of(ring, make(ring)) if make else None)
    return found


def table(
    texts: dict[str, Text],
    records: dict[str, dict[str, Recorded]],
    stages: Sequence[int],
    row_costs: Sequence[float],
) -> list[dict[str, Any]]:
    """Compare all contestants on all texts and stages.

    Each is told by how many times as fast it is as plain decoding, as the same drafts that wait,
    and as one node with the same drafts.
    """
    rows = []
    for row_cost in row_costs:
        for kind, text in texts.items():
            alone = tokens_per_s(Case(1, row_cost), text, records[kind])
            for n_stages in stages:
                speeds = tokens_per_s(Case(n_stages, row_cost), text, records[kind])
                ratios = {
                    name: [
                        round(speed / other, 2)
                        for other in (
                            speeds["plain"],
                            speeds.get(_waiting(name), speed),
                            alone[name],
                        )
                    ]
                    for name, speed in speeds.items()
                }
                rows.append({"row": row_cost, "text": kind, "stages": n_stages, **ratios})
    return rows


def _waiting(name: str) -> str:
    return name.replace("flies", "waits")
