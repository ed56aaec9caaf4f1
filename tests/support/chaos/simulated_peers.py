"""Real `Peers` in virtual time, in a town whose nodes crash, move and are cut off from each other.

However it went: once all is well again, every node is linked to every other one that lives, over
one link, and to nobody else. One seed is one schedule.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import combinations
from types import SimpleNamespace
from unittest import mock

from support.chaos.virtual_time import run_virtually
from support.cluster.town import Member, Town

from shardnet.cluster.peers import peers as peers_module
from shardnet.cluster.peers.peer_table import RETRY_S
from shardnet.cluster.peers.peers import PeerTimes

NAMES = ("anna", "bert", "cleo", "dora", "emil")
WELL_S = 30.0
"""How long a town that is well may take to be linked; far more than the longest delay."""
DIAL_S = (0.0, 0.05, 2.0)
"""How long dialling a node takes; so long that two may dial each other at the same time."""
assert 4 * RETRY_S[-1] < WELL_S


class TroubledTown:
    """One schedule."""

    def __init__(self, seed: int, tasks: asyncio.TaskGroup) -> None:
        self._chance = random.Random(seed)
        self._tasks = tasks
        self._town = Town()
        self._n_born = 0
        self._n_moves = 0
        self.members: dict[str, Member] = {}
        self.ends: Counter[str] = Counter()

    async def run(self) -> None:
        chance = self._chance
        for name in NAMES[: chance.randint(2, len(NAMES))]:
            self._be_born(name)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 3)
        for _ in range(chance.randint(1, 8)):
            await asyncio.sleep(chance.choice([0.0, chance.random(), chance.random() * 20]))
            what = chance.choice([self._crash, self._move, self._cut, self._heal, self._record])
            self.ends[what.__name__.strip("_")] += 1
            await what()
        await self._heal()
        for name in NAMES:
            if name in self.members and not self.members[name].is_up:
                self._be_born(name)
        await asyncio.sleep(WELL_S)
        self._check()
        for member in self.members.values():
            await member.close()

    def _be_born(self, name: str) -> None:
        """Start a node; one that was there before has another id, and the same address."""
        self._n_born += 1
        node = f"{self._chance.randrange(1 << 16):04x}{self._n_born}"
        member = Member(self._town, name, self._tasks, node=node, times=PeerTimes())
        if name in self.members:
            member.take(self.members[name].addresses)
        self._town.slow_s[member.address] = self._chance.choice(DIAL_S)
        self.members[name] = member
        first = next(iter(self.members.values()))
        member.run(*([first.address] if first is not member else []))

    async def _crash(self) -> None:
        name = self._chance.choice(list(self.members))
        member = self.members[name]
        if name != next(iter(self.members)) and member.is_up:
            member.crash()
            if self._chance.random() < 0.7:
                await asyncio.sleep(self._chance.random() * 5)
                self._be_born(name)

    async def _move(self) -> None:
        """Give a node another address, which it tells its peers."""
        name = self._chance.choice(list(self.members)[1:])
        member = self.members[name]
        if member.is_up:
            self._n_moves += 1
            member.take([f"10.0.1.{self._n_moves}:7433"])
            member.peers.addresses_changed()

    async def _cut(self) -> None:
        """Cut the town in two, or one pair."""
        inside = {name for name in self.members if self._chance.random() < 0.5}
        pair = set(self._chance.sample(list(self.members), 2))
        in_two = self._chance.random() < 0.5

        def closed(a: Member, b: Member) -> bool:
            if in_two:
                return (a.name in inside) != (b.name in inside)
            return {a.name, b.name} == pair

        self._town.cut(closed)

    async def _heal(self) -> None:
        self._town.cut(_never)

    async def _record(self) -> None:
        """Have one node find another one's record, which may be old."""
        one, other = self._chance.sample(list(self.members), 2)
        target = self.members[other]
        self.members[one].peers.propose(target.node, target.name, target.addresses)
        if self._chance.random() < 0.3:
            self.members[one].peers.withdraw(target.node)

    def _check(self) -> None:
        up = {member.name for member in self.members.values()}
        for member in self.members.values():
            assert member.linked == up - {member.name}, (
                f"{member.name} is linked to {sorted(member.linked)} of {sorted(up)}"
            )
        for one, other in combinations(self.members.values(), 2):
            links = [link for link in self._town.open_links(one, other) if not link.closed]
            assert len(links) == 1, f"{len(links)} links between {one.name} and {other.name}"


def _never(a: Member, b: Member) -> bool:
    return False


def simulate(seed: int) -> Counter[str]:
    """Run the schedule of a seed. Raises whatever is not as it should be."""

    async def main() -> Counter[str]:
        loop = asyncio.get_running_loop()
        clock = SimpleNamespace(monotonic=loop.time, perf_counter=loop.time)
        with mock.patch.object(peers_module, "time", clock):
            async with asyncio.TaskGroup() as tasks:
                troubled = TroubledTown(seed, tasks)
                await troubled.run()
            return troubled.ends

    return run_virtually(main())
