"""The policy of recoveries in a simulated cluster whose nodes come, go and hang.

A world of nodes that each hold so much of a model stands for planner and builder. However it went:
a decision comes to an end within a bounded time, nobody who hung is asked before his time is over,
and where nodes enough to hold the model are well all along, no request is given up. One seed is one
schedule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from shardnet.cluster.recovery.policy import (
    DELAYS_S,
    MOST_IN_VAIN,
    STUCK_S,
    Attempt,
    Blame,
    Decision,
    GiveUp,
    RecoveryPolicy,
)
from shardnet.errors import PeerFailedError, PlanError, ShardnetError
from shardnet.types import NodeId

N_LAYERS = 8
BUILD_S = 3.0
"""How long an attempt may take."""


@dataclass(slots=True, kw_only=True)
class SimulatedNode:
    """A node that holds up to `layers`; from some moments on it is gone, hung, or well again."""

    node: NodeId
    layers: int
    is_reliable: bool
    state: str = "well"


@dataclass(slots=True)
class World:
    """The nodes, the clock, and what happens to them."""

    chance: random.Random
    nodes: list[SimulatedNode]
    now_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    hung: dict[NodeId, float] = field(default_factory=dict)
    """When each was blamed for hanging."""

    def trouble(self) -> None:
        """Have something happen to a node, or not."""
        node = self.chance.choice(self.nodes)
        if not node.is_reliable:
            node.state = self.chance.choice(["well", "well", "gone", "hung", "refuses"])

    def plan(self, without: Collection[NodeId]) -> list[SimulatedNode]:
        """Choose nodes that hold the model, as far as a head can see: a hung one looks well."""
        free = [n for n in self.nodes if n.state != "gone" and n.node not in without]
        self.chance.shuffle(free)
        chosen: list[SimulatedNode] = []
        for node in free:
            chosen.append(node)
            if sum(n.layers for n in chosen) >= N_LAYERS:
                return chosen
        raise PlanError(f"{len(free)} nodes cannot hold the model")


def simulate(seed: int) -> Counter[str]:
    """Run the schedule of a seed. Raises whatever is not as it should be."""
    chance = random.Random(seed)
    world = World(chance, _draw_nodes(chance))
    policy = RecoveryPolicy()
    sufficient = sum(n.layers for n in world.nodes if n.is_reliable) >= N_LAYERS
    ring = world.plan(())
    n_in_vain = 0
    for _ in range(chance.randint(1, 6)):
        world.now_s += chance.random() * chance.choice([1.0, 1000.0])
        world.trouble()
        if chance.random() < 0.7 and n_in_vain:
            policy.went_on()
            n_in_vain = 0
        n_in_vain += 1
        lost, blamed = _loss(world, ring)
        decision = policy.broke(world.now_s, lost, blamed)
        ended = _recover(world, policy, decision)
        if ended is None:
            if sufficient and n_in_vain <= MOST_IN_VAIN:
                raise AssertionError("given up, though nodes enough were well")
            world.ends["given up"] += 1
            return world.ends
        ring = ended
        world.ends["recovered"] += 1
    return world.ends


def _draw_nodes(chance: random.Random) -> list[SimulatedNode]:
    nodes = [
        SimulatedNode(
            node=NodeId(f"n{number}"),
            layers=chance.choice([2, 4, 8]),
            is_reliable=number == 0 or chance.random() < 0.5,
        )
        for number in range(chance.randint(2, 5))
    ]
    nodes[-1].layers = max(nodes[-1].layers, N_LAYERS - sum(n.layers for n in nodes[:-1]))
    return nodes


def _loss(world: World, ring: list[SimulatedNode]) -> tuple[ShardnetError, list[Blame]]:
    """What the head sees of the end of a ring."""
    victim = world.chance.choice(ring)
    if victim.is_reliable:
        return PeerFailedError("a link broke"), []
    victim.state = world.chance.choice(["gone", "hung"])
    error = PeerFailedError(f"{victim.node} is {victim.state}")
    is_stuck = victim.state == "hung"
    if is_stuck:
        world.hung[victim.node] = world.now_s
    return error, [Blame(node=victim.node, error=error, kind="stuck" if is_stuck else "refused")]


def _recover(
    world: World, policy: RecoveryPolicy, decision: Decision
) -> list[SimulatedNode] | None:
    """Do as the policy says until a ring is built. Returns its nodes; None: it was given up."""
    began_s, n_attempts = world.now_s, 0
    while isinstance(decision, Attempt):
        n_attempts += 1
        assert n_attempts <= len(DELAYS_S), "attempts without an end"
        world.now_s += decision.after_s
        assert world.now_s - began_s <= sum(DELAYS_S) + BUILD_S * n_attempts
        for node, at_s in world.hung.items():
            is_over = world.now_s - at_s >= STUCK_S
            assert is_over or node in decision.without, f"{node} hung {world.now_s - at_s:g} s ago"
        if world.chance.random() < 0.2:
            world.trouble()
        try:
            chosen = world.plan(decision.without)
        except PlanError as error:
            decision = policy.failed(world.now_s, error, [])
            continue
        assert not {n.node for n in chosen} & decision.without.keys(), "a node left out is used"
        world.now_s += world.chance.random() * BUILD_S
        bad = next((n for n in chosen if n.state != "well"), None)
        if bad is None:
            return chosen
        error = PeerFailedError(f"{bad.node} is {bad.state}")
        is_stuck = bad.state == "hung"
        if is_stuck:
            world.hung[bad.node] = world.now_s
        decision = policy.failed(
            world.now_s,
            error,
            [Blame(node=bad.node, error=error, kind="stuck" if is_stuck else "refused")],
        )
    assert isinstance(decision, GiveUp)
    assert decision.error.message, "given up without a word"
    return None
