"""Another version for this node: a wheel comes over a bulk link, and the node ends for its keeper.

Code that comes over a network is what a node must fear most. It is taken where the owner has said
so (--allow-update), from who proves of this very wheel that they hold the cluster key, and is run
by nobody before the order to. The keeper installs it (cli/services/keeper.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import shlex
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardnet import installation
from shardnet.cluster.node.pressure import NodeDrain
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.sharing.bulk_client import BulkAsker
from shardnet.errors import (
    BusyError,
    ConfigurationError,
    RemoteProtocolError,
    UsageError,
)
from shardnet.transport.identity import Identity
from shardnet.transport.link import Link
from shardnet.wire.messages import bulk, updates
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.diagnostics import DeputyState
from shardnet.wire.messages.handshake import explanation

UNASKED: Final = "its owner has not allowed it (--allow-update)"


@dataclass(kw_only=True, eq=False, repr=False)
class NodeUpdates:
    """Takes other versions for one node, whose process has a `keeper`, None without one.

    `deputy` returns who would go on with what this node leads; `cut_off` are those, in words, whom
    its end would cut off, "" for nobody.
    """

    keeper: installation.KeeperFolder | None
    identity: Identity | None
    drain: NodeDrain
    deputy: Callable[[], DeputyState | None]
    cut_off: str
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._taken: tuple[str, Path] | None = None
        """Digest and place of the wheel that came last."""
        self._is_taking = False
        if self.keeper is not None and (successor := self.keeper.read("successor")):
            self.drain.head.was_succeeded(successor)
        self.is_ordered = False
        """Whether this node ends for its keeper to install another version."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register what is asked and ordered."""
        handlers.register(updates.DescribeUpdate, self._describe)
        handlers.register(updates.Update, self._update)
        handlers.register(updates.KeepUpdate, self._keep)

    async def _describe(self, control: ControlLink, message: updates.DescribeUpdate) -> None:
        refusal, deputy = await asyncio.to_thread(self._refusal), self.deputy()
        install = shlex.join([sys.executable, "-m", "pip", "install"])
        described = updates.UpdateDescribed(
            request=message.request,
            keeper=self.keeper.path.name if self.keeper is not None else "",
            refusal=explanation(refusal),
            remedy=f"`{install} WHEEL`, and start it again" if refusal else "",
            platform=sysconfig.get_platform(),
            failure=explanation(self.keeper.read("failure") if self.keeper is not None else ""),
            deputy=deputy.node if deputy is not None else "",
            cut_off=self.cut_off,
        )
        control.send(described)

    def _refusal(self) -> str:
        """Return why no other version is taken here, "" if one is."""
        if self.keeper is None:
            return UNASKED
        if self.identity is None:
            return "it has no cluster key, by which others could prove that they may"
        return installation.why_fixed()

    async def receive(self, link: Link, offer: bulk.OfferWheel) -> None:
        """Take the wheel that a bulk link offers, and see whether it can be installed here.

        Raises UsageError where this node takes none, or without the proof, BusyError while another
        one comes, ConfigurationError for one that cannot be installed here,
        RemoteProtocolError if its bytes are not those of the digest.
        """
        if why := await asyncio.to_thread(self._refusal):
            raise UsageError(f"this node takes no other version: {why}")
        assert self.keeper is not None
        assert self.identity is not None
        proofs = self.identity.wheel_proofs(offer.name, offer.sha256)
        if not any(hmac.compare_digest(proof, offer.proof) for proof in proofs):
            raise UsageError("the wheel does not come from a holder of the cluster key")
        if not installation.WHEEL_NAME.fullmatch(offer.name):
            raise UsageError(f"{offer.name!r} is no wheel of {installation.PACKAGE}")
        if self._is_taking or self.is_ordered:
            raise BusyError("this node takes another wheel just now", remedy="ask again later")
        path, self._taken, self._is_taking = self.keeper.path / offer.name, None, True
        try:
            self.keeper.drop("*.whl")
            link.send(bulk.bulk_frame(bulk.WheelState(request=offer.request, is_whole=False)))
            await self._write(link, offer, path)
            await asyncio.to_thread(installation.check, path)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            self._is_taking = False
        self._taken = offer.sha256, path
        self.log(f"{link.peer_address} has sent {offer.name} (SHA-256 {offer.sha256})")
        link.send(bulk.bulk_frame(bulk.WheelState(request=offer.request, is_whole=True)))

    async def _write(self, link: Link, offer: bulk.OfferWheel, path: Path) -> None:
        """Write the pieces that come. Raises as `receive`."""
        digest, left, failure = hashlib.sha256(), offer.size_bytes, None
        asker = BulkAsker(link)
        with path.open("wb") as file:
            while left:
                piece = await asker.piece(offer.request, left)
                digest.update(piece)
                left -= len(piece)
                try:
                    await asyncio.to_thread(file.write, piece)
                except OSError as error:  # the others still come
                    failure = error
        if failure is not None:
            raise failure
        if digest.hexdigest() != offer.sha256:
            raise RemoteProtocolError("the wheel has changed on the way")

    async def _update(self, control: ControlLink, message: updates.Update) -> None:
        """Make room for the other version. Raises BusyError where requests need this node."""
        if self.keeper is None or self._taken is None or self._taken[0] != message.sha256:
            raise UsageError("no such wheel was sent here", remedy="send it first")
        pauses_s = message.within_s if message.may_pause else 0.0
        draining = asyncio.ensure_future(self.drain.drain(message.deadline_s, pauses_s))
        try:
            await control.report_until(message.request, draining)
        except BaseException:  # nobody waits for it any more
            draining.cancel()
            self.drain.stay()
            raise
        if not draining.result():
            self.drain.stay()
            raise BusyError(
                f"requests still need this node after {message.deadline_s:g} s, and it goes on",
                remedy="ask when fewer run, or with a longer --deadline",
            )
        successor = self.drain.head.successor_address
        self.keeper.order(self._taken[1], message.within_s, successor)
        self.is_ordered = True
        try:
            control.send(Done(request=message.request))
            await control.link.drain()
        finally:
            self.drain.is_over.set()

    async def _keep(self, control: ControlLink, message: updates.KeepUpdate) -> None:
        if self.keeper is not None:
            self.keeper.write("kept", "")
        control.send(Done(request=message.request))
