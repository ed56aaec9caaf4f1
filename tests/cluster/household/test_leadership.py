"""Who leads a household: one of two who say so, and another one for a leader that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.household.leadership import SUCCEED_S, Leadership
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.peer_links import PeerLinks
from shardnet.errors import LinkError
from shardnet.types import NodeId
from shardnet.wire.messages.household import HouseholdLed, HouseholdModel, LedModel
from shardnet.wire.messages.plans import ModelChoice


def models(*names: str) -> list[LedModel]:
    choice = ModelChoice(model="m")
    return [LedModel(model=HouseholdModel(name=name, choice=choice)) for name in names]


class Home:
    """Nodes by their ids, whose links carry what they say when a test asks for that."""

    def __init__(self, *nodes: str) -> None:
        self.now_s = 100.0
        self.cut: set[frozenset[str]] = set()
        self.nodes = {node: Place(self, node) for node in nodes}

    def look(self, seconds: float = 0.0) -> None:
        """Let time go by, and have every node look."""
        self.now_s += seconds
        for place in self.nodes.values():
            place.leadership.look()

    @property
    def leaders(self) -> dict[str, list[str]]:
        """What each node leads, of those that lead something."""
        return {
            node: [one.model.name for one in place.own]
            for node, place in self.nodes.items()
            if place.own
        }


class Place:
    """One node: what it leads, and what it was told."""

    def __init__(self, home: Home, node: str) -> None:
        self.home, self.node = home, node
        self.own: list[LedModel] = []
        self.named: list[list[str]] = []
        self.links: dict[str, ControlLink] = {}
        self.leadership = Leadership(
            node=NodeId(node),
            links=cast(PeerLinks, self),
            own=lambda: self.own,
            lead=self._lead,
            give_up=self._give_up,
            named=lambda given: self.named.append([one.model.name for one in given]),
            log=lambda line: None,
            clock=lambda: home.now_s,
        )

    def _lead(self, given: Iterable[LedModel]) -> None:
        self.own = [*given]

    def _give_up(self, leader: object) -> None:
        self.own = []

    def linked(self) -> list[ControlLink]:
        found = [self.link_of(node) for node in self.home.nodes]
        return [one for one in found if one is not None]

    def link_of(self, node: str) -> ControlLink | None:
        if node == self.node or frozenset((node, self.node)) in self.home.cut:
            return None
        if node not in self.links:
            self.links[node] = cast(ControlLink, Linked(self, self.home.nodes[node]))
        return self.links[node]


class Linked:
    """A link from one node to another one."""

    def __init__(self, near: Place, far: Place) -> None:
        self.near, self.far = near, far
        self.link = SimpleNamespace(peer=_peer(far.node))

    def tell(self, message: HouseholdLed) -> None:
        back = cast(ControlLink, Linked(self.far, self.near))
        asyncio.run(self.far.leadership.take(back, message))


def _peer(node: str) -> Any:
    return SimpleNamespace(node=node, name=node, lacking=lambda *wanted: ())


def cut(home: Home, *nodes: str) -> None:
    """Take nodes off the network."""
    home.cut = {frozenset((one, other)) for one in nodes for other in home.nodes}
    for place in home.nodes.values():
        place.links.clear()


def test_the_first_of_the_peers_leads_in_place_of_one_that_is_gone() -> None:
    home = Home("a", "b", "c")
    home.nodes["b"].own = models("large", "titles")
    home.look()
    assert home.nodes["c"].named == [["large", "titles"]]
    cut(home, "b")
    home.look(SUCCEED_S)
    assert home.leaders == {"b": ["large", "titles"]}, "it may be back in a moment"
    with pytest.raises(LinkError, match="b led the household"):
        home.nodes["c"].leadership.link  # noqa: B018
    home.look(0.1)
    assert home.leaders == {"a": ["large", "titles"], "b": ["large", "titles"]}
    home.look(10 * SUCCEED_S)
    assert "c" not in home.leaders


def test_a_leader_that_comes_back_gives_way_to_the_one_in_its_place() -> None:
    home = Home("a", "b", "c")
    home.nodes["c"].own = models("large")
    home.look()
    cut(home, "c")
    home.look(SUCCEED_S)
    home.look(SUCCEED_S)
    assert [*home.leaders] == ["a", "c"]
    cut(home)
    home.look()
    home.look()
    assert home.leaders == {"a": ["large"]}
    assert home.nodes["b"].leadership.link.link.peer.node == "a"
    home.nodes["a"].own = models()  # the last one is dropped
    home.look()
    assert not home.leaders
    assert [home.nodes[node].named[-1] for node in "abc"] == [[], [], []]


def test_of_two_that_begin_at_once_one_leads() -> None:
    home = Home("a", "b", "c")
    home.nodes["a"].own, home.nodes["b"].own = models("large"), models("titles")
    home.look()
    home.look()
    assert home.leaders == {"b": ["titles"]}
    assert home.nodes["c"].named[-1] == ["titles"]
    assert home.nodes["a"].named == [["large"]], "the models are handed over first"
