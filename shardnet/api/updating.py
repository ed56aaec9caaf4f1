"""Bring another version to nodes, one after the other: wheels, the order, what is waited for.

Knows which node is when due, and when one is back. Must not know how a node installs, nor how
people are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shardnet.api.client import connect, dial
from shardnet.cluster.sharing.bulk_client import SourceRefused, WheelClient, ended
from shardnet.errors import (
    ConfigurationError,
    PeerFailedError,
    PeerSilentError,
    PlanError,
    ShardnetError,
    UsageError,
)
from shardnet.installation import INSTALL_S, PACKAGE, WHEEL_NAME
from shardnet.transport.identity import Identity
from shardnet.wire.messages.bulk import MAX_WHEEL_BYTES, OfferWheel
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Capability, Purpose
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.updates import (
    DescribeUpdate,
    KeepUpdate,
    Rearrange,
    Rearranged,
    Update,
    UpdateDescribed,
)

LOOK_S: Final = 0.2
"""Interval of the looks at whether a node is back."""
END_S: Final = 10.0
"""How long a node whose version does not work may take to get empty."""
AGAIN_S: Final = 60.0
"""How long installing may take, beside what a node may take to be back."""
GLIBCS: Final = range(17, 45)
MACS: Final = range(11, 27)
"""Versions of systems that wheels are named after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A file with a version for the platforms that `tag` names."""

    path: Path
    version: str
    tag: str
    size_bytes: int
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Look at a file. Raises UsageError if it is no wheel of shardnet, or cannot be read."""
        if not WHEEL_NAME.fullmatch(path.name):
            raise UsageError(f"{path.name} is no wheel of {PACKAGE}", remedy="name a file *.whl")
        try:
            with path.open("rb") as file:
                sha256, size_bytes = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        if size_bytes > MAX_WHEEL_BYTES:
            raise UsageError(f"{path} is larger than {MAX_WHEEL_BYTES >> 20} MiB")
        _, version, *_, tag = path.stem.split("-")
        return cls(path=path, version=version, tag=tag, size_bytes=size_bytes, sha256=sha256)

    def suits(self, platform: str) -> bool:
        """Say whether it is for machines of a platform, as Python's sysconfig names that."""
        system, machine = _parts(platform)
        return any(
            name == "any" or (system in name and name.endswith((machine, "universal2")))
            for name in self.tag.split(".")
        )


def _parts(platform: str) -> tuple[str, str]:
    """Return system and machine of `linux-x86_64`, `macosx-14.0-arm64` or `win-amd64`."""
    system, _, rest = platform.partition("-")
    return system, rest.rpartition("-")[2]


def download(version: str, index: str, platforms: Sequence[str], folder: Path) -> list[Wheel]:
    """Download the wheels of a version, "" for the latest, from an index, "" for pip's own.

    Raises ConfigurationError with what pip says. Blocks.
    """
    wanted = f"{PACKAGE}=={version}" if version else PACKAGE
    for platform in platforms:
        system, machine = _parts(platform)
        linux = [f"linux_{machine}", *(f"manylinux_2_{n}_{machine}" for n in GLIBCS)]
        macs = [f"macosx_{n}_0_{machine}" for n in MACS]
        tags = {"linux": linux, "macosx": macs}.get(system, [platform.replace("-", "_")])
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", wanted]
        command += ["--only-binary", ":all:", "--dest", str(folder)]
        command += [word for tag in tags for word in ("--platform", tag)]
        command += ["--index-url", index] if index else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise ConfigurationError(
                f"no wheel of {wanted} for {platform}: {said}", remedy="name --index, or a file"
            )
    return [Wheel.read(path) for path in sorted(folder.glob("*.whl"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A node, the `wheel` that it is to get, and what is in the way.

    `refusal` says why it takes no version from here, `remedy` what to do there, and `pause` why
    requests would wait for it. `leads` says whether it is a head, `ring` where other nodes are
    that have layers.
    """

    info: NodeInfo
    keeper: str = ""
    platform: str = ""
    refusal: str = ""
    remedy: str = ""
    pause: str = ""
    leads: bool = False
    ring: tuple[str, ...] = ()
    wheel: Wheel | None = None

    @property
    def name(self) -> str:
        """As people call it."""
        return f"{self.info.name} ({self.info.address})"


def in_order(nodes: Sequence[Due]) -> list[Due]:
    """Put nodes in order: heads last, when those that could lead in their place are done."""
    return sorted(nodes, key=lambda due: (due.leads, due.info.name, due.info.address))


def with_wheels(nodes: Sequence[Due], wheels: Sequence[Wheel]) -> list[Due]:
    """Give each node that takes one the wheel for its platform; not those that run it already.

    Raises UsageError for a node without one, wheels of two versions, and one that no node runs.
    """
    versions = sorted({wheel.version for wheel in wheels})
    if len(versions) > 1:
        raise UsageError(f"these are wheels of {' and '.join(versions)}", remedy="name one version")
    able = [due for due in nodes if not due.refusal]
    for wheel in wheels:
        if able and not any(wheel.suits(due.platform) for due in able):
            platforms = ", ".join(sorted({due.platform for due in able}))
            raise UsageError(f"no node runs {wheel.path.name}: they are {platforms}")
    fits = {due.name: [wheel for wheel in wheels if wheel.suits(due.platform)] for due in able}
    for due in able:
        if not fits[due.name]:
            raise UsageError(f"{due.name} is {due.platform}, and no wheel is named for that")
    old = [due.name for due in able if due.info.version not in versions]
    return [replace(due, wheel=fits[due.name][0] if due.name in old else None) for due in nodes]


@dataclass(frozen=True, kw_only=True)
class Updater:
    """Updates nodes over links of `identity`. `say` takes lines for people.

    A node may take `deadline_s` to get empty, and `within_s` to be back.
    """

    identity: Identity
    deadline_s: float
    within_s: float
    may_pause: bool
    say: Callable[[str], None]

    async def look(self, info: NodeInfo) -> Due:
        """Ask a node how it comes to run another version, and its ring whether it can be spared."""
        async with connect(info.address, self.identity) as client:
            if Capability.UPDATE not in client.capabilities:
                refusal = f"shardnet {info.version} takes no version from here"
                return Due(info=info, refusal=refusal, remedy="install the wheel there with pip")
            status = await client.status(with_peers=True)
            told = await client.ask(DescribeUpdate(request=0), UpdateDescribed)
            stage, load, pause = status.node.stage, status.load, told.cut_off
            is_in_ring = stage is not None and stage.rank is not None
            if is_in_ring:
                try:
                    await client.ask(Rearrange(request=0, without=status.node.node), Rearranged)
                except PlanError as error:
                    pause = f"its ring cannot do without it: {error.message}"
            if load and load.running + load.waiting + load.paused and not told.deputy:
                pause = "it leads requests, and no deputy (`--deputy auto`) goes on with them"
        others = [peer.address for peer in status.peers if peer.stage is not None]
        return Due(
            info=status.node,
            keeper=told.keeper,
            platform=told.platform,
            refusal=told.refusal,
            remedy=told.remedy,
            pause=pause,
            leads=load is not None,
            ring=tuple(others) if is_in_ring else (),
        )

    async def send(self, due: Due, on_progress: Callable[[int, int], None]) -> None:
        """Send a node its wheel, which it looks at. Raises PeerFailedError if that does not fit."""
        assert due.wheel is not None
        wheel, name = due.wheel, due.wheel.path.name
        *_, proof = self.identity.wheel_proofs(name, wheel.sha256)
        offer = OfferWheel(
            request=1, name=name, size_bytes=wheel.size_bytes, sha256=wheel.sha256, proof=proof
        )
        async with ended(await dial(due.info.address, self.identity, purpose=Purpose.BULK)) as link:
            try:
                with wheel.path.open("rb") as file:
                    await WheelClient(link, answer_s=INSTALL_S).send(offer, file, on_progress)
            except SourceRefused as error:
                raise PeerFailedError(f"{name} is not for {error}") from None

    async def update(self, due: Due) -> None:
        """Have a node run the version that it was sent; wait until it is back where it was.

        Raises PeerFailedError where it is not: then it runs the version before again, as far as is
        known. BusyError where requests did not let go of it: then it has not changed.
        """
        assert due.wheel is not None
        version, began_s = due.wheel.version, time.monotonic()
        self.say(f"{due.name}: draining")
        order = Update(
            request=0,
            sha256=due.wheel.sha256,
            deadline_s=self.deadline_s,
            within_s=self.within_s,
            may_pause=self.may_pause,
        )
        async with connect(due.info.address, self.identity) as client:
            await client.ask(order, Done)
        self.say(f"{due.name}: installing {version}")
        node = await self._back(due)
        try:
            async with asyncio.timeout(self.within_s):
                place = await self._in_ring(due, node)
                async with connect(due.info.address, self.identity) as client:
                    await client.ask(KeepUpdate(request=0), Done)
        except (ShardnetError, TimeoutError) as error:
            why = str(error) or f"it is not in its ring within {self.within_s:g} s"
            self.say(f"{due.name}: {why}; it goes back to {due.info.version}")
            with contextlib.suppress(ShardnetError):
                async with connect(due.info.address, self.identity) as client:
                    await client.drain(END_S)
            await self._back(due)  # raises, with what became of it
            raise PeerFailedError(f"{due.name} does not work with {version}: {why}") from error
        self.say(f"{due.name}: runs {version}, {place}, after {time.monotonic() - began_s:.1f} s")

    async def _back(self, due: Due) -> str:
        """Wait until a node runs its version; return its id, which is another one.

        Raises PeerFailedError when it runs the former one again, PeerSilentError if it is gone.
        """
        assert due.wheel is not None
        limit_s = 2 * self.within_s + AGAIN_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    info, failure = await self._state(due)
                    if failure:
                        raise PeerFailedError(
                            f"{due.name} does not run {due.wheel.version}: {failure}; it runs "
                            f"{due.info.version} again",
                            remedy="look at its log",
                        )
                    if info is not None and info.version == due.wheel.version:
                        return info.node
                    await asyncio.sleep(LOOK_S)
        raise PeerSilentError(f"{due.name} has not come back within {limit_s:.0f} s")

    async def _state(self, due: Due) -> tuple[NodeInfo | None, str]:
        """Return what a node is now, None while it does not answer, and why an update failed."""
        with contextlib.suppress(ShardnetError):
            async with connect(due.info.address, self.identity) as client:
                told = await client.ask(DescribeUpdate(request=0), UpdateDescribed)
                if told.keeper == due.keeper:
                    return (await client.status()).node, told.failure
        return None, ""

    async def _in_ring(self, due: Due, node: str) -> str:
        """Wait until the ring of a node has considered it again; say in words what came of it.

        Raises the error that the head has met last, where there is one, at the end of the wait.
        """
        failure: BaseException = asyncio.CancelledError()
        try:
            while due.ring:
                for address in due.ring:
                    try:
                        async with connect(address, self.identity) as client:
                            ring = await client.ask(Rearrange(request=0), Rearranged)
                    except ShardnetError as error:  # it recovers, or does not know the node yet
                        failure = error
                        continue
                    if node in ring.nodes:
                        return "back in its ring"
                    if node in ring.known or not ring.nodes:
                        return "back, and the plan does without it"
                await asyncio.sleep(LOOK_S)
        except asyncio.CancelledError:
            raise failure from None
        return "back"
