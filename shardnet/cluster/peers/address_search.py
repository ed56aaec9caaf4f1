"""Find nodes that multicast does not reach: on machines of the tailnet, at remembered addresses.

Knows which addresses are tried, and when. A node counts only once it has proved in a handshake that
it is a member. Must not know how links are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from shardnet.cluster.machine.addresses import NODE_PORT, format_addresses, is_loopback
from shardnet.cluster.machine.virtual_networks import Tailnet, ask_tailscale
from shardnet.cluster.peers.peer_table import NAMED, TAILNET, KnownNode
from shardnet.cluster.peers.peers import Peers
from shardnet.cluster.peers.rtt_probe import DialAsClient, ProbeAnswer, probe_rtt
from shardnet.cluster.peers.sleepers import REMEMBERED_S, OnDisk
from shardnet.errors import ConfigurationError, ShardnetError
from shardnet.files import read_own, write_whole
from shardnet.transport.address import host_of
from shardnet.transport.loop import cancel_all
from shardnet.types import NodeId

FIRST_S: Final = 10.0
LONGEST_S: Final = 300.0
"""First and longest pause between searches; each is twice the last. A node that starts later
searches itself, so later searches only restore links that were cut."""
PROBES_AT_ONCE: Final = 16
SEARCH_S: Final = 30.0
"""Deadline of one search over all addresses. Most that do not answer take a whole handshake
timeout."""

MAX_REMEMBERED: Final = 32
"""Addresses remembered per cluster; the one that answered longest ago is dropped first."""


def tailnet_addresses(tailnet: Tailnet) -> list[str]:
    """Return where nodes of the user's other machines in a tailnet would listen."""
    return [address for hosts in tailnet.machines for address in format_addresses(hosts, NODE_PORT)]


async def probe_all(
    addresses: Iterable[str], dial_as_client: DialAsClient, *, longest_s: float
) -> list[ProbeAnswer]:
    """Return the nodes of this cluster that answer at `addresses` within `longest_s` seconds."""
    slots = asyncio.Semaphore(PROBES_AT_ONCE)
    found: list[ProbeAnswer] = []

    async def ask(address: str) -> None:
        async with slots:
            with contextlib.suppress(ShardnetError):
                found.append(await probe_rtt(address, dial_as_client))

    asking = [asyncio.create_task(ask(address)) for address in addresses]
    if asking:
        try:
            await asyncio.wait(asking, timeout=longest_s)
        finally:
            await cancel_all(*asking)
    return found


class RememberedPeers:
    """Addresses named with --peer at which a node of this cluster has answered, in a file.

    `clusters` returns the fingerprints of the keys, the newest first. Reads and writes on the
    caller's thread. An unusable file counts as empty, and failed writes are ignored.
    """

    def __init__(self, folder: Path, clusters: Callable[[], Sequence[str]]) -> None:
        self.path = folder / "peers.json"
        self._clusters = clusters

    def load(self) -> list[str]:
        """Return the addresses, the one that answered last first."""
        seen = self._seen(self._read())
        return sorted(seen, key=lambda address: -seen[address])

    def add(self, *addresses: str) -> None:
        """Remember that nodes answered at `addresses` now, and all others by the newest key."""
        clusters = self._read()
        seen = self._seen(clusters) | dict.fromkeys(addresses, time.time())
        latest = sorted(seen, key=lambda known: -seen[known])[:MAX_REMEMBERED]
        clusters[self._clusters()[0]] = {known: seen[known] for known in latest}
        with contextlib.suppress(OSError):
            write_whole(self.path, msgspec.json.encode(clusters))

    def _seen(self, clusters: dict[str, dict[str, float]]) -> dict[str, float]:
        seen: dict[str, float] = {}
        for cluster in reversed(self._clusters()):
            seen |= clusters.get(cluster, {})
        return seen

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            clusters = msgspec.json.decode(read_own(self.path), type=dict[str, dict[str, float]])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}
        oldest = time.time() - REMEMBERED_S
        return {
            cluster: {address: at for address, at in seen.items() if at > oldest}
            for cluster, seen in clusters.items()
        }


@dataclass(kw_only=True, eq=False, repr=False)
class AddressSearch:
    """Probes addresses periodically, and proposes the nodes that answer to `peers`.

    It probes the addresses in `remembered` (None for no file) and, with `tailnet`, the machines of
    the user's tailnet. Remembered addresses in `named` are skipped: `peers` keeps links to those.
    `probe` dials as a client, `on_disk` runs jobs on files, `log` takes lines for people.
    """

    peers: Peers
    probe: DialAsClient
    on_disk: OnDisk
    remembered: RememberedPeers | None
    tailnet: bool
    named: Sequence[str]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._said: set[str] = set()

    async def run(self) -> None:
        """Search at once and again after each pause, until cancelled."""
        pause_s = FIRST_S
        while True:
            before = await self._before()
            await self._try(before, source=NAMED)
            if self.tailnet:
                await self._try(await self._machines(), source=TAILNET)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)

    def remember(self, address: str) -> None:
        """Remember a named address at which a node has answered, unless it is on this machine."""
        if self.remembered is not None and not is_loopback(host_of(address)):
            self.on_disk(self.remembered.path, partial(self.remembered.add, address))

    def remember_all(self) -> None:
        """Remember what is remembered by the cluster's newest key."""
        if self.remembered is not None:
            self.on_disk(self.remembered.path, self.remembered.add)

    async def _before(self) -> list[str]:
        """Return the addresses named at earlier starts."""
        if self.remembered is None:
            return []
        with contextlib.suppress(ShardnetError):  # the disk does not answer
            known = await self.on_disk(self.remembered.path, self.remembered.load)
            before = [address for address in known if address not in self.named]
            if before:
                self._say(f"asking the peers of earlier starts too: {', '.join(before)}")
            return before
        return []

    async def _machines(self) -> list[str]:
        """Return the addresses of the tailnet's machines; say once why there are none."""
        try:
            tailnet = await ask_tailscale(os.environ)
        except ConfigurationError as error:
            self._say(f"warning: --tailnet finds no nodes: {error}")
            return []
        if tailnet.n_left_out:
            self._say(
                f"warning: --tailnet: {len(tailnet.machines)} machines that are online are asked, "
                f"{tailnet.n_left_out} more are not: name their nodes with --peer"
            )
        return tailnet_addresses(tailnet)

    async def _try(self, addresses: Sequence[str], *, source: str) -> None:
        """Probe the addresses of no linked node; propose nodes found, withdraw those gone."""
        used = {at for known in self._linked() for at in (known.address, *known.addresses)}
        fresh = [address for address in addresses if address not in used]
        answers = await probe_all(fresh, self.probe, longest_s=SEARCH_S)
        by_node: dict[NodeId, list[ProbeAnswer]] = {}
        for answer in answers:
            by_node.setdefault(answer.node, []).append(answer)
        for node, found in by_node.items():
            self.peers.propose(node, found[0].name, [a.address for a in found], source=source)
        there = {*by_node, *(known.node for known in self._linked())}
        self.peers.withdraw_others(there, source=source)

    def _linked(self) -> list[KnownNode]:
        return [known for known in self.peers.known() if known.is_linked]

    def _say(self, line: str) -> None:
        """Log a line once."""
        if line not in self._said:
            self._said.add(line)
            self.log(line)
