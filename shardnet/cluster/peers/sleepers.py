"""The nodes that sleep: what they were before, also over this node's own restart; they are woken.

A node counts as asleep when it has said so itself, and until it has a link to this one. Must not
know plans, nor how links are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from shardnet.cluster.machine import wake_on_lan
from shardnet.cluster.machine.addresses import LocalAddress
from shardnet.errors import LinkError, ShardnetError
from shardnet.files import read_own, write_whole
from shardnet.transport.loop import at_most
from shardnet.types import NodeId, remember
from shardnet.wire.framing.schema import LinkFigures
from shardnet.wire.messages.measurements import NodeMeasured
from shardnet.wire.messages.membership import Asleep, NodeInfo
from shardnet.wire.messages.plans import LeftOut

T = TypeVar("T")

REMEMBERED_S: Final = 90 * 86400.0
"""How long what a node has said is remembered."""
SEND_S: Final = 1.0
"""Interval of the packets: they are lost easily, and an interface that is just losing its link to
the switch sees none."""
AGAIN_S: Final = 600.0
"""A node that did not wake is planned without for so long."""
MAX_SLEEPERS: Final = 32
MAX_FIGURES: Final = 512
"""Of nodes, and of links."""

OnWaking = Callable[[str, float, float], None]
"""Takes a node, for how many seconds it has been waited for, and for how many as a rule, or 0."""


class OnDisk(Protocol):
    """Runs jobs that use the disk, on a thread for each place."""

    def __call__(self, place: object, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue the job; the future has its result, or what it raised."""


class Remembered(msgspec.Struct):
    """What the file has of one cluster: who sleeps, and what was measured, by names of nodes."""

    nodes: list[NodeInfo] = []
    speeds: dict[str, NodeMeasured] = {}
    links: dict[str, LinkFigures] = {}


@dataclass(kw_only=True, eq=False, repr=False)
class Sleepers:
    """The nodes of the cluster `cluster`, a fingerprint, that sleep; `path` is None for no file.

    `own` returns the addresses of this machine. A node that is woken is waited for `wait_s`
    seconds. `on_disk` runs jobs on files, `log` takes lines for people.
    """

    path: Path | None
    cluster: str
    own: Callable[[], Sequence[LocalAddress]]
    wait_s: float
    on_disk: OnDisk
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.figures = Remembered()
        """What was measured of nodes, those that are awake too."""
        self.woke_s: dict[str, float] = {}
        """How long nodes took to wake, by name, when this one woke them."""
        self.on_waking: Callable[[Collection[NodeId]], None] = lambda nodes: None
        """Called with nodes that are woken from now on."""
        self._known: dict[str, NodeInfo] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        self._waking: dict[str, float] = {}
        self._change = asyncio.Event()

    async def load(self) -> None:
        """Read who was asleep when this node ran last. A damaged file counts as empty."""
        if self.path is not None:
            with contextlib.suppress(ShardnetError):  # the disk does not answer
                found = (await self.on_disk(self.path, self._read)).get(self.cluster, Remembered())
                self._known = {info.node: info for info in found.nodes} | self._known
                self.figures.speeds = found.speeds | self.figures.speeds
                self.figures.links = found.links | self.figures.links

    def listed(self) -> list[NodeInfo]:
        """Return the nodes that sleep, as they described themselves."""
        return [*self._known.values()]

    def infos(self) -> list[NodeInfo]:
        """Return those that may be woken: all but the `left_out`."""
        out = {told.node for told in self.left_out()}
        return [info for info in self.listed() if info.node not in out]

    def left_out(self) -> list[LeftOut]:
        """Name the nodes that did not wake lately, and why they are not woken now."""
        late_s = time.monotonic() - AGAIN_S
        failed = [(self._known.get(node), *told) for node, told in self._failed.items()]
        return [
            LeftOut(node=info.node, name=info.name, why=why)
            for info, at_s, why in failed
            if info is not None and at_s > late_s
        ]

    def words_of(self, node: NodeId) -> str:
        """Say that a node sleeps, "" if it does not."""
        return words(self._known[node]) if node in self._known else ""

    def at(self, address: str) -> NodeInfo | None:
        """Return the node that was reached at `address` and sleeps, None without one.

        Raises LinkError for one that did not wake lately.
        """
        found = next((info for info in self.listed() if info.address == address), None)
        for out in self.left_out():
            if found is not None and out.node == found.node:
                raise LinkError(f"{out.name} ({address}) sleeps: {out.why}")
        return found

    def fell_asleep(self, info: NodeInfo) -> None:
        """Take what a node says of itself before it sleeps."""
        self._failed.pop(info.node, None)
        remember(self._known, info.node, info, MAX_SLEEPERS)
        self.log(words(info))
        self._keep()

    def woke(self, node: NodeId, name: str) -> None:
        """Note that a node has a link; it may have been started again, with another id."""
        for other in [
            info.node for info in self.listed() if name == info.name or node == info.node
        ]:
            del self._known[other]
            if (began_s := self._waking.pop(other, None)) is not None:
                self.woke_s[name] = took_s = time.monotonic() - began_s
                self.log(f"{name} is awake, after {took_s:.1f} s")
            self._keep()
        self._change.set()

    async def wake(
        self, nodes: Collection[str], on_waking: OnWaking = lambda node, waited_s, rule_s: None
    ) -> None:
        """Send what wakes `nodes` until each has a link to this one, for `wait_s` at most.

        `left_out` has those that do not come. `on_waking` is called every SEND_S seconds.
        """
        began_s, failed = time.monotonic(), dict[str, str]()
        self._waking |= {node: began_s for node in nodes if node in self._known}
        self.on_waking([NodeId(node) for node in nodes])
        self.log(f"waking {', '.join(self._known[node].name for node in self._waking)}")
        while left := [self._known[node] for node in nodes if node in self._known]:
            waited_s = time.monotonic() - began_s
            if waited_s >= self.wait_s:
                break
            self._change.clear()
            for info in left:
                asleep = info.asleep or Asleep()
                on_waking(info.node, waited_s, asleep.wake_s)
                try:
                    wake_on_lan.send_magic(asleep, self.own())
                except (ShardnetError, OSError, ValueError) as error:  # what the peer said is wrong
                    failed[info.node] = str(error)
            async with at_most(min(SEND_S, self.wait_s - waited_s)):
                await self._change.wait()
        for info in left:
            del self._waking[info.node]
            why = failed.get(info.node, f"it did not wake within {self.wait_s:g} s")
            self._failed[info.node] = time.monotonic(), f"{why}; {wake_on_lan.REMEDY}"
            self.log(f"{info.name} sleeps on: {why}; {wake_on_lan.REMEDY}")

    def _keep(self) -> None:
        if self.path is not None:
            now = Remembered(self.listed(), {**self.figures.speeds}, {**self.figures.links})
            self.on_disk(self.path, partial(self._write, self.path, now))

    def _write(self, path: Path, now: Remembered) -> None:
        """Write what is remembered. Failed writes are ignored."""
        with contextlib.suppress(OSError):
            write_whole(path, msgspec.json.encode(self._read() | {self.cluster: now}))

    def _read(self) -> dict[str, Remembered]:
        assert self.path is not None
        try:
            clusters = msgspec.json.decode(read_own(self.path), type=dict[str, Remembered])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}
        oldest_s = time.time() - REMEMBERED_S
        for one in clusters.values():
            one.nodes = [info for info in one.nodes if (info.asleep or Asleep()).since_s > oldest_s]
        return clusters


def words(info: NodeInfo) -> str:
    """Say that a node sleeps, and how long it takes to wake."""
    wake_s = math.ceil((info.asleep or Asleep()).wake_s)
    how_long = f"{wake_s} s to wake" if wake_s else "not known yet how long it takes to wake"
    return f"{info.name} sleeps: {how_long}"
