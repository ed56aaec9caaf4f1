"""The faults that scripts/chaos inflicts, and the order in which a seed draws them. Pure.

Knows what can happen to whom and when, not how it is done (lab.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from shardnet.transport.link import SILENCE_S


class Kind(Enum):
    """What happens to a node, to its cable or to its disk."""

    KILL = "killed"
    FREEZE = "frozen"
    BLOCK = "GIL blocked"
    CABLE = "cable out"
    ONE_WAY = "one direction cut"
    DELAY = "200 ms delay"
    LOSS = "1 % loss"
    SLOW = "1 Mbit/s"
    FLIP = "bytes flipped"
    FLAP = "5 % of writes changed"
    SWALLOW = "steps kept to itself"
    WRONG = "no numbers computed"
    DISK = "disk full"
    CLOCK = "clock jumped"
    SLOW_CLOCK = "clock at half speed"
    THREAD = "compute thread frozen"
    TMP = "/tmp full"
    FILES = "64 descriptors allowed"
    DRAIN = "drained and started again"
    HEAD = "head killed"
    HEAD_DRAIN = "head drained and started again"
    HEAD_FREEZE = "head frozen"


class Moment(Enum):
    """When a fault happens."""

    RUNNING = "while texts run"
    LOADING = "while the ring loads"
    RECOVERING = "during recovery"
    DRAINING = "during a drain"
    BESIDE = "at the same time"
    AGAIN = "once it is back"


SECONDS: dict[Kind, tuple[float, ...]] = {
    Kind.KILL: (0.0,),
    Kind.FREEZE: (1.0, 5.0, 30.0),
    Kind.BLOCK: (1.0, 3.0, 5.0),
    Kind.CABLE: (1.0, 3.0, 20.0),
    Kind.ONE_WAY: (1.0, 3.0, 20.0),
    Kind.DELAY: (3.0,),
    Kind.LOSS: (5.0,),
    Kind.SLOW: (5.0,),
    Kind.FLIP: (0.0,),
    Kind.FLAP: (1.5,),
    Kind.SWALLOW: (5.0,),
    Kind.WRONG: (5.0,),
    Kind.DISK: (5.0,),
    Kind.CLOCK: (5.0,),
    Kind.SLOW_CLOCK: (10.0,),
    Kind.THREAD: (1.0, 5.0),
    Kind.TMP: (5.0,),
    Kind.FILES: (5.0,),
    Kind.DRAIN: (0.0,),
    Kind.HEAD: (0.0,),
    Kind.HEAD_DRAIN: (0.0,),
    Kind.HEAD_FREEZE: (1.0, 8.0),
}
"""How long each kind may last, unless all texts have ended before; 0 for a moment."""

CLOCK_JUMPS_S = (-86_400.0, -60.0, 60.0, 86_400.0)
LONE: dict[Kind, int] = {Kind.DRAIN: 2, Kind.HEAD: 1, Kind.HEAD_DRAIN: 1, Kind.HEAD_FREEZE: 1}
"""What happens alone only, while texts run."""
OF_HEAD = frozenset({Kind.HEAD, Kind.HEAD_DRAIN, Kind.HEAD_FREEZE})
"""What happens to the node that clients ask."""
DRAINS = frozenset({Kind.DRAIN, Kind.HEAD_DRAIN})
WEIGHTS: dict[Kind, int] = {
    kind: {Kind.KILL: 5, Kind.FREEZE: 2}.get(kind, 1) for kind in Kind if kind not in LONE
}
PLANS: dict[tuple[Moment, ...], int] = {
    (Moment.RUNNING,): 12,
    (Moment.LOADING,): 3,
    (Moment.RUNNING, Moment.BESIDE): 3,
    (Moment.RUNNING, Moment.RECOVERING): 3,
    (Moment.RUNNING, Moment.AGAIN): 2,
    (Moment.DRAINING,): 2,
}
"""How often each sequence of moments is drawn, among as many."""
ENDING = frozenset({Kind.KILL, Kind.HEAD})
"""What kills a node: it has to be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to the node of number `victim`, for `seconds`.

    Of a cable, `other` is the node at its other end, None for all; with ONE_WAY `inward` says that
    what goes to the victim is lost, else what it sends. `jump_s` is what the clock jumps by.
    """

    kind: Kind
    moment: Moment
    victim: int
    seconds: float = 0.0
    other: int | None = None
    inward: bool = False
    jump_s: float = 0.0

    def __str__(self) -> str:
        for_s = f" {self.seconds:g} s" if self.seconds else ""
        by_s = f" by {self.jump_s:+g} s" if self.jump_s else ""
        way = (" (to it)" if self.inward else " (from it)") if self.kind is Kind.ONE_WAY else ""
        return f"{self.kind.value}{for_s}{by_s}{way}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The faults of one round of requests, in order; the first comes after `after_tokens`."""

    number: int
    faults: tuple[Fault, ...]
    after_tokens: int

    @property
    def loses_head(self) -> bool:
        """Whether the node that clients ask is lost: without a deputy each request then fails."""
        return any(
            fault.kind is Kind.HEAD
            or (fault.kind is Kind.HEAD_FREEZE and fault.seconds > SILENCE_S)
            for fault in self.faults
        )

    @property
    def freezes_head(self) -> bool:
        """Whether the node that clients ask stands still for a while."""
        return any(fault.kind is Kind.HEAD_FREEZE for fault in self.faults)

    @property
    def ends_process(self) -> bool:
        """Whether any process ends by it."""
        return any(fault.kind in ENDING | DRAINS for fault in self.faults) or any(
            fault.moment is Moment.DRAINING for fault in self.faults
        )

    @property
    def ends_head(self) -> bool:
        """Whether it ends that node, politely or not."""
        return any(fault.kind in OF_HEAD for fault in self.faults)


def shortened(drawn: Round, longest_s: float, most_tokens: int) -> Round:
    """Make a round of one whose faults last no longer, and begin after fewer tokens."""
    return replace(
        drawn,
        faults=tuple(replace(f, seconds=min(f.seconds, longest_s)) for f in drawn.faults),
        after_tokens=drawn.after_tokens % most_tokens,
    )


def draw_rounds(
    seed: int, n_nodes: int, *, moments: frozenset[Moment] = frozenset(Moment)
) -> Iterator[Round]:
    """Draw rounds without end. Node 0 is the head, the victim of one kind. Draws from `moments`.

    A round is drawn from its own number, so that one of them can be run again alone.
    """
    plans = {plan: weight for plan, weight in PLANS.items() if moments.issuperset(plan)}
    number = 0
    while True:
        number += 1
        yield draw_round(random.Random(f"{seed}-{number}"), number, n_nodes, plans)


def draw_round(
    chance: random.Random, number: int, n_nodes: int, plans: dict[tuple[Moment, ...], int]
) -> Round:
    """Draw one round."""
    [plan] = chance.choices(list(plans), list(plans.values()))
    victims = chance.sample(range(1, n_nodes), min(2, n_nodes - 1))
    faults: list[Fault] = []
    for place, moment in enumerate(plan):
        again = moment is Moment.AGAIN
        victim = faults[0].victim if again else victims[place % len(victims)]
        weights = WEIGHTS | LONE if plan == (Moment.RUNNING,) else WEIGHTS
        [kind] = chance.choices(list(weights), list(weights.values()))
        victim = 0 if kind in OF_HEAD else victim
        if moment is Moment.RECOVERING or plan[place + 1 : place + 2] == (Moment.RECOVERING,):
            kind = Kind.KILL if place == 0 else kind  # so that there is a recovery
        if again or plan[place + 1 : place + 2] == (Moment.AGAIN,):
            kind = Kind.KILL
        faults.append(_draw_fault(chance, kind, moment, victim, n_nodes))
    return Round(number=number, faults=tuple(faults), after_tokens=chance.randrange(8, 400))


def _draw_fault(
    chance: random.Random, kind: Kind, moment: Moment, victim: int, n_nodes: int
) -> Fault:
    others = [node for node in range(n_nodes) if node != victim]
    is_one_cable = kind in (Kind.CABLE, Kind.ONE_WAY, Kind.DELAY, Kind.LOSS, Kind.SLOW)
    return Fault(
        kind=kind,
        moment=moment,
        victim=victim,
        seconds=chance.choice(SECONDS[kind]),
        other=chance.choice([None, *others]) if is_one_cable else None,
        inward=chance.random() < 0.5,
        jump_s=chance.choice(CLOCK_JUMPS_S) if kind is Kind.CLOCK else 0.0,
    )
