"""What a node gives back, and when: others take memory, and owners come and go."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from support.soak import cases

from shardnet.cluster.pressure.policy import (
    AWAY_S,
    DROP_S,
    N_BUSY,
    N_SHORT,
    RELIEF_S,
    REST_S,
    SHORT_OF_MEMORY,
    Action,
    MemoryLook,
    MemoryStrain,
    OwnerLook,
    OwnerWatch,
    PressurePolicy,
    Strain,
)

GIB = 1 << 30
LOOK_S = 2.0


def look(available: float, stalled: float | None = None) -> MemoryLook:
    """Make the look at a machine of 16 GiB, of which some GiB are available."""
    return MemoryLook(available_bytes=int(available * GIB), total_bytes=16 * GIB, stalled=stalled)


def strains(*looks: MemoryLook) -> list[Strain]:
    """Take looks at their interval."""
    strain = MemoryStrain()
    return [strain.look(place * LOOK_S, one) for place, one in enumerate(looks)]


def test_short_memory_costs_caches_and_then_layers() -> None:
    n_caches = int(RELIEF_S / LOOK_S)
    short = strains(look(8), *[look(0.2)] * (N_SHORT + n_caches), look(4), look(0.2))
    expected = [Strain.NONE] * N_SHORT + [Strain.CACHES] * n_caches
    assert short == [*expected, Strain.LAYERS, Strain.NONE, Strain.NONE]


@pytest.mark.parametrize(
    ("before", "now", "is_short"),
    [
        (look(0.2), look(0.2), False),  # a model that fills the machine on purpose
        (look(0.2), look(0.09), True),
        (look(8), look(0.6), False),
        (look(8), look(0.6, 0.05), False),
        (look(8), look(0.6, 0.5), True),
        (look(8), look(5, 0.9), False),  # somebody else's container is at its limit
        (look(3), look(1.6, 0.9), False),
    ],
)
def test_what_is_left_and_what_waits_for_it_count(
    before: MemoryLook, now: MemoryLook, is_short: bool
) -> None:
    assert (strains(before, *[now] * N_SHORT)[-1] is Strain.CACHES) is is_short


def test_an_owner_is_there_by_any_sign_and_away_after_a_while() -> None:
    watch, idle = OwnerWatch(), OwnerLook(n_cores=8, other_cores=0.4, has_input=False, gpu=0.0)
    busy = OwnerLook(n_cores=8, other_cores=2.5, gpu=0.1)
    unknown = OwnerLook(n_cores=8)
    assert [watch.look(n, each) for n, each in enumerate((idle, busy, unknown, idle))] == [""] * 4
    assert [watch.look(10.0 + n, busy) for n in range(N_BUSY)] == [
        *[""] * (N_BUSY - 1),
        "other programs use 2.5 of its 8 processors",
    ]
    seen_s = 10.0 + N_BUSY - 1
    assert watch.look(seen_s + AWAY_S - 1, idle)
    assert watch.look(seen_s + AWAY_S, idle) == ""
    typed = OwnerLook(n_cores=8, has_input=True)
    assert watch.look(1000.0, typed) == "its keyboard or mouse is used"
    assert watch.look(1200.0, typed)
    assert watch.look(1200.0 + AWAY_S - 1, idle)
    assert watch.look(1200.0 + AWAY_S, idle) == ""
    game = OwnerLook(n_cores=8, gpu=0.9)
    assert [watch.look(2000.0, game) for _ in range(N_BUSY)][-1] == "other programs use its GPU"


def test_a_node_rests_for_its_owner_and_comes_back() -> None:
    policy = PressurePolicy()
    assert policy.look(0, None, "", GIB) is Action.NOTHING
    assert policy.look(1, None, "its owner types", GIB) is Action.REST
    assert policy.look(2, look(8), "its owner types", 0) is Action.NOTHING
    assert policy.why == "its owner types"
    assert policy.look(3, look(8), "", GIB) is Action.NOTHING  # it is not empty yet
    assert policy.look(4, look(8), "", 0) is Action.BACK
    assert policy.why == ""


def test_what_was_freed_instead_is_no_rest() -> None:
    policy = PressurePolicy()
    actions = [policy.look(0, look(8), "", GIB)]
    while actions[-1] is not Action.REST:
        actions.append(policy.look(len(actions) * LOOK_S, look(0.1), "", GIB))
    assert actions.count(Action.DROP) == 1
    policy.relieved()
    assert policy.look(100, look(0.1), "", 0) is Action.NOTHING
    assert policy.why == ""


def test_a_model_that_fills_what_another_one_left_is_no_shortage() -> None:
    policy = PressurePolicy()
    held = [(8.0, GIB), (15.0, 0), (3.0, 12 * GIB), *[(0.2, 15 * GIB)] * 20]
    actions = [policy.look(n * LOOK_S, look(free), "", had) for n, (free, had) in enumerate(held)]
    assert set(actions) == {Action.NOTHING}


def test_rests_for_an_owner_make_none_for_memory_longer() -> None:
    policy = PressurePolicy()
    for n in range(5000):
        assert policy.look(2 * n, look(8), "its owner types", GIB) is Action.REST
        assert policy.look(2 * n + 1, look(8), "", 0) is Action.BACK
    now_s = 10_000.0
    policy.look(now_s, look(8), "", GIB)
    while not policy.why:
        now_s += LOOK_S
        policy.look(now_s, look(0.1), "", GIB)
    assert policy.why == SHORT_OF_MEMORY
    assert policy.look(now_s + REST_S - 1, look(8), "", 0) is Action.NOTHING
    assert policy.look(now_s + REST_S, look(8), "", 0) is Action.BACK


class Machine:
    """A machine of 16 GiB on which others take memory; its node holds `layers` GiB or none."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.layers = self.chance.uniform(0.5, 6)
        self.caches = self.chance.uniform(0, 2)
        self.others = self.chance.uniform(0, 4)
        self.held = True
        self.is_owner_there = False

    def available(self) -> float:
        """Return what is available, in GiB."""
        own = self.layers + self.caches if self.held else 0.0
        return max(0.0, 16 - 0.5 - self.others - own)

    def live(self) -> None:
        """Let others begin and end programs, and the owner come and go."""
        if self.chance.random() < 0.02:
            self.others = self.chance.choice([0, 1, 4, 9, 12, 15.4])
        if self.chance.random() < 0.01:
            self.is_owner_there = not self.is_owner_there


@pytest.mark.parametrize("seed", cases(range(20), range(20, 2000)))
def test_simulated_machines_get_their_memory_back_and_nodes_do_not_flap(seed: int) -> None:
    machine, policy = Machine(seed), PressurePolicy()
    rests: list[float] = []
    dropped_s, short_s, rest_why, now_s, at_most = -1e9, 0.0, "", 0.0, 0
    for _ in range(3000):
        now_s += LOOK_S
        machine.live()
        owner = "its owner types" if machine.is_owner_there else ""
        memory = look(machine.available())
        held = int(machine.layers * GIB) if machine.held else 0
        at_most = max(at_most, memory.available_bytes) if machine.held else 0
        is_wanted = memory.available_bytes < memory.short_bytes <= at_most // 2
        short_s = short_s + LOOK_S if is_wanted else 0.0
        assert short_s <= N_SHORT * LOOK_S + RELIEF_S + LOOK_S
        action = policy.look(now_s, memory, owner, held)
        match action:
            case Action.DROP:
                assert machine.held
                assert now_s - dropped_s >= DROP_S
                dropped_s, machine.caches = now_s, 0.0
            case Action.REST:
                rest_why = policy.why
                if rest_why == SHORT_OF_MEMORY:
                    assert dropped_s > now_s - DROP_S - RELIEF_S  # caches went first
                    rests.append(now_s)
                machine.held = False
            case Action.BACK:
                assert not owner
                if rest_why == SHORT_OF_MEMORY:
                    assert now_s - rests[-1] >= REST_S
                    assert machine.available() >= machine.layers
                machine.held, machine.caches = True, 0.5
            case Action.NOTHING:
                pass
    assert all(later - before >= REST_S for before, later in pairwise(rests))
