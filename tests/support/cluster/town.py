"""Peers over in-memory links, for tests and simulations.

A `Town` is a network in which any address can be given to any node, and any two nodes can be cut
off from each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from shardnet.cluster.machine.addresses import Interface, rank
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.peers.peer_table import KnownNode
from shardnet.cluster.peers.peers import Peers, PeerTimes
from shardnet.cluster.peers.sleepers import Sleepers
from shardnet.errors import PeerUnreachableError
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.types import NodeId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose
from shardnet.wire.messages.membership import PeersKnown, Ping

T = TypeVar("T")

TIMES = PeerTimes(redial_s=0.01, compare_s=20.0, retire_s=0.02, ping_s=0.05, gather_s=0.0)
HERE = rank([Interface(name="eth0", is_up=True, addresses=("10.0.0.99/24",))])


def make_sleepers(
    log: Callable[[str], None] = lambda line: None, path: Path | None = None, wait_s: float = 60.0
) -> Sleepers:
    """What a node of this town knows of those that sleep, in a file or in none."""

    def on_disk(place: object, job: Callable[[], T]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        done.set_result(job())
        return done

    return Sleepers(
        path=path, cluster="town", own=lambda: HERE, wait_s=wait_s, on_disk=on_disk, log=log
    )


class Member:
    """A node's peers, and what becomes of them."""

    def __init__(
        self,
        town: Town,
        name: str,
        tasks: asyncio.TaskGroup,
        *,
        node: str = "",
        times: PeerTimes = TIMES,
    ) -> None:
        self.town = town
        self.name = name
        self.node = NodeId(node or name)
        self.addresses = [f"10.0.0.{ord(name[0])}:7433"]
        self.links: list[str] = []
        self.members: list[str] = []
        self.n_heard = 0
        self.tasks = tasks
        self._is_gone = False
        self._running: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.peers = Peers(
            node=self.node,
            name=name,
            dial=lambda address: town.dial(self, address, PeerRole.NODE),
            dial_as_client=lambda address: town.dial(self, address, PeerRole.CLIENT),
            handler=self._handle,
            tasks=tasks,
            own_hosts=lambda: HERE,
            own_addresses=lambda: self.addresses,
            log=self._log,
            sleepers=make_sleepers(self._log),
            on_member=self.members.append,
            times=times,
        )
        for address in self.addresses:
            town.owners[address] = self

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def linked(self) -> set[str]:
        """The names of the peers it is linked to."""
        return {control.link.peer.name for control in self.peers.links.linked()}

    def run(self, *named: str) -> None:
        """Begin to look for peers."""
        self._running = self.tasks.create_task(self.peers.run(named))

    @property
    def is_up(self) -> bool:
        """Whether it has not crashed."""
        return not self._is_gone

    def take(self, addresses: Sequence[str]) -> None:
        """Have other addresses from now on."""
        for address in self.addresses:
            if self.town.owners.get(address) is self:
                del self.town.owners[address]
        self.addresses = [*addresses]
        for address in addresses:
            self.town.owners[address] = self

    def crash(self) -> None:
        """End without a word: its links break."""
        self._is_gone = True
        if self._running is not None:
            self._running.cancel()
        for address in self.addresses:
            self.town.owners.pop(address, None)
        for one, other, link in self.town.links:
            if self in (one, other):
                link.abort("crashed")

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self.peers.close()

    async def accept(self, link: Link) -> None:
        if link.peer.role is PeerRole.NODE:
            self.peers.adopt(link)
        else:
            self.tasks.create_task(ControlLink(link, self._handle).serve_to_the_end())

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until something is so; looked at whenever anything is heard, and now and then."""
        while not happened():
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await self._news.wait()

    async def until_linked(self, *names: str) -> None:
        await self.until(lambda: self.linked == set(names))

    def known(self, name: str) -> KnownNode:
        [known] = [known for known in self.peers.known() if known.node == name]
        return known

    def said(self, part: str) -> int:
        """How many lines say so."""
        return sum(part in line for line in self.links)

    async def _handle(self, control: ControlLink, message: Incoming) -> None:
        match message:
            case Ping(request=request):
                control.send(Done(request=request))
            case PeersKnown():
                self.n_heard += 1
                self.peers.heard(control, message)
        self._news.set()

    def _log(self, line: str) -> None:
        self.links.append(line)
        self._news.set()


class Town:
    """Addresses and who has them, and the links between the members."""

    def __init__(self) -> None:
        self.owners: dict[str, Member] = {}
        self.slow_s: dict[str, float] = {}
        self.links: list[tuple[Member, Member, Link]] = []
        self.dialled: list[tuple[str, str]] = []
        self.closed: Callable[[Member, Member], bool] = lambda a, b: False

    async def dial(self, who: Member, address: str, role: PeerRole) -> Link:
        self.dialled.append((who.name, address))
        owner = self.owners.get(address)
        if owner is None or self.closed(who, owner):
            raise PeerUnreachableError(f"{address}: nothing listens there")
        await asyncio.sleep(self.slow_s.get(address, 0.0))
        near, far = await memory_pair(hello(who, role), hello(owner, PeerRole.NODE))
        await owner.accept(far)
        if role is PeerRole.NODE:
            self.links.append((who, owner, near))
        return near

    def cut(self, closed: Callable[[Member, Member], bool]) -> None:
        """End the links between members for which `closed` holds, and allow no new ones."""
        self.closed = closed
        for a, b, link in self.links:
            if closed(a, b):
                link.abort("cut")

    def open_links(self, a: Member, b: Member) -> list[Link]:
        """The links between two members that live."""
        return [link for x, y, link in self.links if {x, y} == {a, b} and not link.closed]


def hello(member: Member, role: PeerRole) -> Hello:
    return Hello(
        purpose=Purpose.CONTROL, role=role, node=member.node, name=member.name, version="0"
    )


@asynccontextmanager
async def town(*names: str) -> AsyncIterator[list[Member]]:
    """Members of a new town. They find nobody before they `run`."""
    async with asyncio.TaskGroup() as tasks:
        place = Town()
        members = [Member(place, name, tasks) for name in names]
        try:
            yield members
        finally:
            for member in members:
                await member.close()
