"""Nodes as real processes, the switch between them, and what can be done to both.

Knows how a fault is inflicted and lifted. On loopback, or in network namespaces where they are
permitted: there a cable is pulled for real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.chaos.faults import DRAINS, ENDING, Fault, Kind
from support.chaos.switch import VARIABLE, Switch, Way, changed
from support.system.netns import Host, Network, NotPermittedError
from support.system.nodes import FIGURES_VARIABLE, Command, Machine, NodeProcess
from support.system.warm_start import WarmProcess, is_possible

from shardnet.cluster.machine.folders import ClusterKey, store_key
from shardnet.cluster.measuring.figure_cache import FOLDER

MODULE = "support.chaos.troubled_node"
TESTS = Path(__file__).parents[2]
FIRST_PORT = 7433
"""That of the first node, where each has a network of its own."""
FLAPPING = 0.05
DESCRIPTORS = 64
SWITCHES = {
    Kind.SWALLOW: "swallow",
    Kind.WRONG: "overflow",
    Kind.SLOW_CLOCK: "slow",
    Kind.THREAD: "stand still",
    Kind.TMP: "fill",
}
"""What a process does to itself while a fault lasts (troubled_node.py)."""
SHAPES = {
    Kind.DELAY: "netem delay 200ms",
    Kind.LOSS: "netem loss 1%",
    Kind.SLOW: "tbf rate 1mbit burst 16kb latency 400ms",
}
"""What the system does to a cable; a kernel may lack it."""
DELAY_S = 0.2
LOSS = 0.01
BYTES_PER_S = 1e6 / 8
FLIPPED = 3
ORDER_S = 60.0
"""How long a node may take to obey, frozen or busy ones included."""
TRIES = 3
DRAINED_S = 60.0
"""How long a node may take to end once it is empty."""
NAMES = ("anna", "bert", "cleo", "dora", "emil", "fina", "gert", "hugo")


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a node runs, whichever process it is at the time."""

    number: int
    name: str
    host: str
    port: int
    folder: Path
    process: NodeProcess | None = None
    n_starts: int = 0
    draining: Command | None = None
    logs: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self.host}:{self.port}"

    @property
    def key_file(self) -> Path:
        """Where its cluster key is, if it has one."""
        return self.folder / "cluster.key"

    @property
    def lives(self) -> bool:
        """Whether its process runs, frozen or not."""
        return self.process is not None and self.process.process.poll() is None


class Lab:
    """Some nodes with a switch between. Node 0 is the one that clients ask.

    In a `network` each is a host of its own, and this process, with the switch, is the last one:
    there cables of whole nodes are pulled, slowed and made lossy by the system. With a `key` each
    node has it in a file of its own, and listens on all interfaces.
    """

    def __init__(
        self,
        folder: Path,
        n_nodes: int,
        chance: random.Random,
        network: Network | None = None,
        *,
        key: ClusterKey | None = None,
    ):
        self._key = key
        self.machine = Machine(folder / "machine")
        self._folder = folder
        self._network = network
        self._host = "127.0.0.1" if network is None else network.hosts[-1].address
        hosts = [self._host] * n_nodes if network is None else [h.address for h in network.hosts]
        self.places = [
            Place(
                number=n,
                name=NAMES[n],
                host=hosts[n],
                port=free_port(hosts[n]) if network is None else FIRST_PORT + n,
                folder=folder / str(n),
            )
            for n in range(n_nodes)
        ]
        figures = os.environ.get(FIGURES_VARIABLE)
        for place in self.places:
            (place.folder / "cache").mkdir(parents=True)
            if key is not None:
                store_key(key, place.key_file)
            if figures:  # all nodes are this machine, which was measured before
                (place.folder / "cache" / FOLDER).symlink_to(figures)
        targets = {place.number: (place.host, place.port) for place in self.places}
        self.switch = Switch(self._host, targets, chance)
        self._tasks: set[asyncio.Task[None]] = set()
        self._lifts = asyncio.Event()

    @property
    def addresses(self) -> list[str]:
        """Where the nodes listen, in order."""
        return [place.address for place in self.places]

    # --- processes

    async def start(self) -> None:
        """Start the switch and all nodes, the one that clients ask first."""
        await self.switch.start()
        await self.start_node(0)
        await asyncio.gather(*(self.start_node(place.number) for place in self.places[1:]))

    async def start_node(self, number: int) -> None:
        """Start a node, or start it again, and wait until it is ready."""
        place = self.places[number]
        place.process = NodeProcess(self._launch(place))
        place.n_starts += 1
        await asyncio.to_thread(place.process.wait_until_ready)

    def _launch(self, place: Place) -> subprocess.Popen[bytes] | WarmProcess:
        control = place.folder / f"control-{place.n_starts}"
        host_name = place.host if self._key is None else "0.0.0.0"
        arguments = ["node", "--json", "--host", host_name, "--port", str(place.port)]
        arguments += ["--name", place.name, "--threads", "1", "--memory", "256MB"]
        if place.number:
            arguments += ["--peer", self.places[0].address]
        if self._key is not None:
            arguments += ["--key-file", str(place.key_file)]
        about = {
            "number": place.number,
            "switch": (self._host, self.switch.port),
            "control": str(control),
        }
        environment = self.machine.environment | {
            VARIABLE: json.dumps(about),
            "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
            "SHARDNET_CACHE_DIR": str(place.folder / "cache"),
        }
        host = None if self._network is None else self._network.hosts[place.number]
        if host is not None:
            arguments.append("--insecure")
        if is_possible():
            namespace = "" if host is None else host.namespace
            return WarmProcess(arguments, environment, place.folder, namespace, module=MODULE)
        return subprocess.Popen(
            [*(() if host is None else host.prefix), sys.executable, "-m", MODULE, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=place.folder,
        )

    async def kill(self, number: int) -> None:
        """End a process on the spot, and keep what it said."""
        place = self.places[number]
        assert place.process is not None
        process, place.process = place.process, None
        await asyncio.to_thread(process.kill)
        place.logs.append(process.stderr.text)

    async def drain(self, number: int) -> None:
        """Begin to drain a node, as `shardnet drain` does; it ends by itself when it is empty."""
        place = self.places[number]
        told = ["drain", place.name, "--peer", self.places[0].address]
        if self._key is not None:
            told += ["--key-file", str(self.places[0].key_file)]
        place.draining = self.machine.begin_copy(*told)

    async def until_drained(self) -> list[str]:
        """Wait for drains to end, and for the nodes that are empty; return what went wrong."""
        wrong = []
        for place in self.places:
            draining, place.draining = place.draining, None
            if draining is None:
                continue
            try:
                result = await asyncio.to_thread(draining.wait)
                if result.code == 0 and place.process is not None:
                    await asyncio.to_thread(place.process.process.wait, DRAINED_S)
                    await self.kill(place.number)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                wrong.append(f"{place.name} was not drained: {error}")
        return wrong

    async def close(self) -> list[str]:
        """End everything; return what was not as it should be."""
        for task in self._tasks:
            task.cancel()
        wrong = []
        for place in reversed(self.places):
            if place.process is None:
                continue
            if place.lives:
                place.process.thaw()
                try:
                    await asyncio.to_thread(place.process.stop)
                except AssertionError as error:
                    wrong.append(f"{place.name} did not leave properly: {str(error)[-2000:]}")
            else:
                wrong.append(f"{place.name} had ended by itself: {place.process.log[-2000:]}")
            await self.kill(place.number)
        await self.switch.close()
        await asyncio.to_thread(self.machine.close)
        for place in self.places:
            (self._folder / f"{place.name}.log").write_text("\n---\n".join(place.logs))
        return wrong

    async def order(self, number: int, do: str, seconds: float = 0.0) -> Any:
        """Have a node's process do something to itself."""
        place = self.places[number]
        path = place.folder / f"control-{place.n_starts - 1}"
        for _ in range(TRIES):
            told = await asyncio.to_thread(_order, path, do, seconds)
            if "answer" in told:
                return told["answer"]
        raise AssertionError(f"{place.name} cannot {do}: {told['error']}")

    def resident(self) -> dict[str, int]:
        """Return the bytes that each node has resident, by name."""
        return {
            place.name: psutil.Process(place.process.pid).memory_info().rss
            for place in self.places
            if place.process is not None
        }

    # --- faults

    async def inflict(self, fault: Fault) -> None:
        """Begin a fault; those that last end by themselves. A killed node stays away."""
        victim = self.places[fault.victim]
        if not victim.lives:
            return
        assert victim.process is not None
        if fault.kind in ENDING:
            await self.kill(fault.victim)
        elif fault.kind in DRAINS:
            await self.drain(fault.victim)
        elif fault.kind is Kind.FLIP:
            for way in self.switch.ways(fault.victim, fault.other, inward=fault.inward):
                way.to_flip = FLIPPED
        else:
            begun = asyncio.Event()
            task = asyncio.create_task(self._last(fault, begun))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await begun.wait()

    async def until_lifted(self) -> None:
        """Have no fault last any more, and wait for that."""
        self._lifts.set()
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self._lifts.clear()

    async def _last(self, fault: Fault, begun: asyncio.Event) -> None:
        async with self._inflicted(fault):
            begun.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fault.seconds):
                    await self._lifts.wait()

    @contextlib.asynccontextmanager
    async def _inflicted(self, fault: Fault) -> AsyncIterator[None]:
        process, switch = self.places[fault.victim].process, self.switch
        assert process is not None
        if self._network is not None and fault.other is None:
            host = self._network.hosts[fault.victim]
            if fault.kind is Kind.CABLE:
                host.unplug()
                try:
                    yield
                finally:
                    host.plug_in()
                return
            if fault.kind in SHAPES and _can_shape(host, SHAPES[fault.kind]):
                try:
                    yield
                finally:
                    host.unshape()
                return
        both = [*switch.ways(fault.victim, fault.other)]
        both += switch.ways(fault.victim, fault.other, inward=False)
        match fault.kind:
            case Kind.FREEZE | Kind.HEAD_FREEZE:
                process.freeze()
                try:
                    yield
                finally:
                    process.thaw()
            case Kind.BLOCK:
                blocking = asyncio.create_task(self.order(fault.victim, "block", fault.seconds))
                yield
                with contextlib.suppress(OSError):
                    await blocking
            case Kind.CABLE:
                with changed(iter(both), lambda way: way.passes.clear()):
                    yield
            case Kind.ONE_WAY:
                ways = switch.ways(fault.victim, fault.other, inward=fault.inward)
                with changed(ways, lambda way: way.passes.clear()):
                    yield
            case Kind.DELAY:
                with changed(iter(both), lambda way: _set(way, delay_s=DELAY_S)):
                    yield
            case Kind.LOSS:
                with changed(iter(both), lambda way: _set(way, loss=LOSS)):
                    yield
            case Kind.SLOW:
                with changed(iter(both), lambda way: _set(way, bytes_per_s=BYTES_PER_S)):
                    yield
            case Kind.FLAP:
                ways = switch.ways(fault.victim, None, inward=False)
                with changed(ways, lambda way: _set(way, flipped=FLAPPING)):
                    yield
            case _ if fault.kind in SWITCHES:
                await self.order(fault.victim, SWITCHES[fault.kind], 1.0)
                yield
                with contextlib.suppress(OSError):
                    await self.order(fault.victim, SWITCHES[fault.kind], 0.0)
            case Kind.DISK:
                with _limited(process.pid, resource.RLIMIT_FSIZE, 0):  # "File too large"
                    yield
            case Kind.FILES:
                with _limited(process.pid, resource.RLIMIT_NOFILE, DESCRIPTORS):
                    yield
            case Kind.CLOCK:
                await self.order(fault.victim, "jump", fault.jump_s)
                yield
            case _:
                raise AssertionError(fault.kind)


def _can_shape(host: Host, discipline: str) -> bool:
    """Shape the cable of a host, unless this kernel cannot: then the switch does it."""
    try:
        host.shape(*discipline.split())
    except NotPermittedError:
        return False
    return True


def free_port(host: str) -> int:
    """A port that nothing listens at."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _set(way: Way, **values: float) -> None:
    for name, value in values.items():
        setattr(way, name, value)


@contextlib.contextmanager
def _limited(pid: int, what: int, most: int) -> Iterator[None]:
    """Allow a process only so much of something within the context."""
    soft, hard = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (most, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, (soft, hard))


def _order(path: Path, do: str, seconds: float) -> Any:
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(ORDER_S)
        asker.connect(os.fspath(path))
        asker.sendall(json.dumps({"do": do, "seconds": seconds}).encode())
        answer = b""
        while piece := asker.recv(1 << 16):
            answer += piece
    return json.loads(answer)


def differences(
    before: dict[str, int], now: dict[str, int], slack: dict[str, int]
) -> Sequence[str]:
    """What a process has open beyond what it had, and beyond what varies."""
    return [
        f"{kind}: {before[kind]} before, {now[kind]} now"
        for kind, room in slack.items()
        if now[kind] > before[kind] + room
    ]
