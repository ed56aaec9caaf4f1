"""The input and output of a diagnosis: facts, findings, and what to do about closed ports.

Pure.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from shardnet.cluster.machine.addresses import NODE_PORT
from shardnet.cluster.machine.virtual_networks import VirtualNetworks
from shardnet.cluster.machine.windows_system import WindowsSystem
from shardnet.cluster.placement.figures import HeldModel, ModelShape
from shardnet.errors import UsageError
from shardnet.transport.address import split_address
from shardnet.transport.tls import SHARE_KEY
from shardnet.types import DType, NodeId
from shardnet.wire.messages.diagnostics import AddressView, MdnsRecord, NodeReport, PeerView, Seen
from shardnet.wire.messages.membership import NodeInfo, ReportReply

Topic = Literal[
    "key",
    "node",
    "name",
    "version",
    "link",
    "port",
    "address",
    "multicast",
    "wsl",
    "tailnet",
    "mtu",
    "clock",
    "model",
    "kernels",
    "memory",
    "bits",
    "power",
    "gpu",
]

HERE = "this machine"
MDNS_PORT = 5353
_UNITS = ((1, "s", 120), (60, "min", 120), (3600, "h", 48), (86400, "days", 730))
"""Units of time spans: seconds in one, its name, and how many of it are given at most."""
LISTED = 8
"""How many names a finding lists."""


class Severity(enum.Enum):
    """The severity of a finding. The value is the word shown to people and programs."""

    OK = "ok"
    INFO = "info"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a diagnosis: `where` names a node, a pair of nodes or this machine."""

    severity: Severity = Severity.OK
    topic: Topic
    where: str
    what: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The finding without its severity, in one printable line.

        Names and reasons come from other nodes: control characters are replaced.
        """
        end = f"; {self.remedy}" if self.remedy else ""
        words = " ".join(f"{self.where}: {self.what}{end}".split())
        return "".join(c if c.isprintable() else "?" for c in words)


class Place(NamedTuple):
    """Where a finding is made, and of what."""

    topic: Topic
    where: str

    def problem(self, what: str, remedy: str = "") -> Finding:
        """Make a finding with the severity PROBLEM."""
        return Finding(severity=Severity.PROBLEM, **self._asdict(), what=what, remedy=remedy)

    def good(self, what: str) -> Finding:
        """Make a finding of something that is as it should be."""
        return Finding(**self._asdict(), what=what)

    def hint(self, what: str, remedy: str = "") -> Finding:
        """Make a finding with the severity INFO."""
        return Finding(severity=Severity.INFO, **self._asdict(), what=what, remedy=remedy)


at = Place
"""It is read with what follows: at("port", where).problem(...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """The key file of this machine: its cluster's `fingerprint`, "" without a key.

    `failure` says why the file cannot be used, `remedy` how to fix that; `is_set_aside`: --insecure
    was given.
    """

    path: str
    fingerprint: str = ""
    failure: str = ""
    remedy: str = ""
    is_set_aside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAsked:
    """The model to check the nodes for.

    `held` says how nodes would hold it, where that is not as `shape` says and with the memory that
    they report. `failure` says why it is unknown here, `remedy` how to fix that.
    """

    model: str
    model_id: str = ""
    shape: ModelShape | None = None
    held: Mapping[NodeId, HeldModel] = field(default_factory=dict)
    dtype: DType | None = None
    failure: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A node that has answered this process at an address given on the command line."""

    node: str
    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The input of a diagnosis. `software` and `protocol` are the versions of this process.

    `asked` names the node `asked_node` whose report and whose peers' reports are the `replies`, ""
    without one; `failure` says why that failed. `is_asked_here`: it is one of this machine. `deaf`
    are nodes of this machine that do not answer. `named` has the results for the addresses given on
    the command line, and `unknown` the nodes there that the asked one is not linked to; their
    reports are among the replies. `found` are the mDNS records seen by this process; None if it did
    not browse. `has_kernels`: the compiled kernels of this installation were built. `networks` are
    those of this machine that pass no multicast. `windows` says how this machine is set, where it
    runs Windows, and `ports` where its nodes listen.
    """

    key: KeyFacts
    software: str
    protocol: int
    asked: str = ""
    asked_node: str = ""
    is_asked_here: bool = True
    failure: str = ""
    replies: tuple[ReportReply, ...] = ()
    deaf: tuple[AddressView, ...] = ()
    named: tuple[AddressView, ...] = ()
    unknown: tuple[Answered, ...] = ()
    found: tuple[MdnsRecord, ...] | None = None
    model: ModelAsked | None = None
    has_kernels: bool = True
    networks: VirtualNetworks = field(default_factory=VirtualNetworks)
    windows: WindowsSystem | None = None
    ports: tuple[int, ...] = (NODE_PORT,)

    @property
    def infos(self) -> list[NodeInfo]:
        """The status of the nodes that answered."""
        return [reply.info for reply in self.replies if reply.info is not None]

    @property
    def views(self) -> Iterator[tuple[ReportReply, NodeReport, PeerView]]:
        """What each report says of each other node."""
        for reply in self.replies:
            if reply.report is not None:
                for view in reply.report.peers:
                    yield reply, reply.report, view

    @property
    def asked_reply(self) -> ReportReply | None:
        """The reply of the asked node itself, None without one."""
        return next((reply for reply in self.replies if reply.node == self.asked_node), None)

    @property
    def others_found(self) -> list[MdnsRecord]:
        """The mDNS records seen of nodes that no other fact is about."""
        deaf = {view.address for view in self.deaf}
        return [
            record
            for record in self.found or ()
            if record.node not in self.live and record.address not in deaf
        ]

    @cached_property
    def live(self) -> dict[str, str]:
        """Names of all running nodes, by id: those that answered, and those they are linked to."""
        live = {reply.node: reply.name for reply in self.replies}
        for *_, view in self.views:
            if view.is_linked:
                live.setdefault(view.node, view.name)
        return live

    @cached_property
    def versions(self) -> dict[str, str]:
        """The shardnet version of all running nodes, by id; "" if unknown."""
        versions = {info.node: info.version for info in self.infos}
        for *_, view in self.views:
            if view.is_linked:
                versions.setdefault(view.node, view.version)
        return versions

    def label(self, node: str, name: str = "") -> str:
        """Return a node's name, with the start of its id if others have the same name."""
        name = self.live.get(node, name)
        same = Counter(self.live.values())[name]
        return name if same + (node not in self.live) < 2 else f"{name} ({node[:6]})"


def listed(names: Iterable[str]) -> str:
    """Join names for people, the first LISTED of them."""
    names = list(names)
    n_more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {n_more} more" if n_more > 0 else "")


def age(seconds: float) -> str:
    """Format a time span for people."""
    for unit_s, name, most in _UNITS:
        if seconds < most * unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds / (365.25 * 86400):.1f} years"


_REMEDIES: Mapping[Seen, str] = MappingProxyType(
    {
        "answers": "",
        "refused": (
            "start `shardnet node` there, and see that it listens on that address (--host) and port"
        ),
        "hangs": "read that node's output, or restart it: it may be frozen",
        "unreachable": "check address, cable and routes between the two machines",
        "other key": SHARE_KEY,
        "other version": "update the older one: a release speaks with the one before it",
        "other node": "",
        "failed": "see whether a node of shardnet listens there",
        "not tried": "",
    }
)

TOPICS: Mapping[Seen, Topic] = MappingProxyType({"other key": "key", "other version": "version"})
"""The topic of an address that does not answer, if it is not the port."""


def remedy_for(view: AddressView) -> str:
    """Return the remedy for an address that does not answer, "" if none is known.

    For a wrong key it comes with the error, which knows the side that lacks it.
    """
    if view.seen == "other key" and view.remedy:
        return view.remedy
    if view.seen == "dropped":
        port = port_of(view.address)
        return (
            f"{open_port(port, 'tcp')} in the firewall of that machine, and in that of the network "
            "between"
        )
    return _REMEDIES[view.seen] or view.remedy or ""


def open_port(port: int, protocol: str) -> str:
    """Say how a port is opened: `protocol` is tcp or udp."""
    rule = f"{port}/{protocol}"
    return (
        f"open {protocol.upper()} port {port} (`sudo ufw allow {rule}`, or "
        f"`sudo firewall-cmd --add-port={rule}`; on Windows `shardnet doctor` says how)"
    )


def port_of(address: str) -> int:
    """Return the port of an address, the usual one where it names none."""
    try:
        return split_address(address)[1]
    except UsageError:
        return NODE_PORT
