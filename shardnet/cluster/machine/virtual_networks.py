"""Networks that pass no multicast: those of WSL2, and tailnets; asks the programs that know them.

Knows where these programs are and what they print. What they print is not trusted: its size is
bounded, and every address is checked. Must not dial.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shardnet.cluster.machine.addresses import Verdict, is_in_tailnet, rank, read_interfaces
from shardnet.cluster.machine.programs import ask
from shardnet.errors import ConfigurationError

ANSWER_S: Final = 3.0
"""Deadline for each program's answer."""
MAX_HOSTS: Final = 64
"""Most machines of a tailnet that are looked at."""

_PLACES: Final = MappingProxyType(
    {
        "win32": r"%ProgramFiles%\Tailscale\tailscale.exe",
        "darwin": "/Applications/Tailscale.app/Contents/MacOS/Tailscale",
    }
)
"""Where Tailscale's installers put the program beside PATH, by sys.platform."""
_AS_PROGRAM: Final = MappingProxyType({"TAILSCALE_BE_CLI": "1"})
"""Has macOS' app answer as the program does, in place of opening a window."""
_WSL_NAT: Final = ip_network("172.16.0.0/12")

Texts = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=1024)]


class _Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as `tailscale status --json` describes it."""

    addresses: Texts | None = msgspec.field(name="TailscaleIPs", default=None)
    is_online: bool = msgspec.field(name="Online", default=False)
    user: int = msgspec.field(name="UserID", default=0)
    tags: Texts | None = msgspec.field(name="Tags", default=None)


class _Status(msgspec.Struct, frozen=True, kw_only=True):
    state: str = msgspec.field(name="BackendState", default="")
    own: _Machine | None = msgspec.field(name="Self", default=None)
    peers: dict[str, _Machine] | None = msgspec.field(name="Peer", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tailnet:
    """The machines of a tailnet to look for nodes on.

    `machines` has the addresses of each of the user's own machines and the tagged ones that are
    online, at most MAX_HOSTS; `n_left_out` more were left out.
    """

    machines: tuple[tuple[str, ...], ...]
    n_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualNetworks:
    """What doctor asks of this machine's networks.

    `wsl` is the networking mode of WSL2, "" elsewhere; `tailnet_hosts` are this machine's addresses
    in a tailnet; `tailnet_failure` says why Tailscale does not work here, "" where it does or is
    not there.
    """

    wsl: Literal["", "nat", "mirrored", "other"] = ""
    wsl_hosts: tuple[str, ...] = ()
    tailnet_hosts: tuple[str, ...] = ()
    tailnet_failure: str = ""


async def look_at_networks(environment: Mapping[str, str]) -> VirtualNetworks:
    """Ask what is known of WSL2 and of a tailnet here. Raises nothing; takes ANSWER_S at most."""
    local = rank(read_interfaces())
    hosts = tuple(a.host for a in local if a.verdict is Verdict.LAN and a.net.version == 4)
    tailnet = tuple(a.host for a in local if is_in_tailnet(a.host))
    wsl, failure = await asyncio.gather(
        _wsl_mode(platform.release(), hosts), _tailnet_failure(environment, has_hosts=bool(tailnet))
    )
    return VirtualNetworks(wsl=wsl, wsl_hosts=hosts, tailnet_hosts=tailnet, tailnet_failure=failure)


async def ask_tailscale(environment: Mapping[str, str]) -> Tailnet:
    """Ask the local tailscaled for this user's machines.

    Raises ConfigurationError where it cannot be asked, does not answer or is not logged in.
    """
    program = _tailscale(environment)
    if not program:
        raise ConfigurationError(
            "there is no `tailscale` program here",
            remedy="install Tailscale, or name the nodes with --peer",
        )
    asked = [program, "status", "--json"]
    return read_tailnet(await ask(asked, {**environment, **_AS_PROGRAM}, answer_s=ANSWER_S))


def read_tailnet(output: bytes) -> Tailnet:
    """Read what `tailscale status --json` prints. Raises ConfigurationError."""
    try:
        status = msgspec.json.decode(output, type=_Status)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"`tailscale status --json` printed what cannot be read ({error})",
            remedy="update Tailscale, or name the nodes with --peer",
        ) from error
    if status.state != "Running" or status.own is None:
        state = "".join(c for c in status.state if c.isprintable())[:40] or "unknown"
        raise ConfigurationError(
            f"Tailscale is not connected (its state is {state})", remedy="run `tailscale up`"
        )
    ours = [
        machine
        for machine in (status.peers or {}).values()
        if machine.is_online and (machine.user == status.own.user or machine.tags)
    ]
    found = [hosts for machine in ours if (hosts := _hosts(machine))]
    return Tailnet(
        machines=tuple(found[:MAX_HOSTS]),
        n_left_out=max(0, len(found) - MAX_HOSTS),
    )


def _hosts(machine: _Machine) -> tuple[str, ...]:
    """Return the first IPv4 and the first IPv6 address of a machine that are in a tailnet."""
    by_version = {
        ip_address(host).version: host
        for host in reversed(machine.addresses or [])
        if is_in_tailnet(host)
    }
    return tuple(by_version[version] for version in sorted(by_version))


def _tailscale(environment: Mapping[str, str]) -> str:
    """Return the path of the `tailscale` program, "" without one.

    The current folder, which Windows searches too, does not count.
    """
    programs = environment.get("ProgramFiles", r"C:\Program Files")
    place = _PLACES.get(sys.platform, "").replace("%ProgramFiles%", programs)
    if place and Path(place).is_file():
        return place
    for name in ("tailscale", "tailscale.exe"):  # the latter is Windows' own, seen from WSL
        found = shutil.which(name, path=environment.get("PATH"))
        if found and Path(found).is_absolute():
            return found
    return ""


async def _tailnet_failure(environment: Mapping[str, str], *, has_hosts: bool) -> str:
    """Return why a `tailscale` that is installed gives this machine no address, "" otherwise."""
    if has_hosts or not _tailscale(environment):
        return ""
    try:
        await ask_tailscale(environment)
    except ConfigurationError as error:
        return str(error)
    return ""


async def _wsl_mode(release: str, hosts: Sequence[str]) -> Literal["", "nat", "mirrored", "other"]:
    """Return the networking mode of WSL2: as it says, else by this machine's addresses."""
    if "microsoft" not in release.lower():
        return ""
    said = b""
    if program := shutil.which("wslinfo"):
        with contextlib.suppress(ConfigurationError):
            said = await ask([program, "--networking-mode"], os.environ, answer_s=ANSWER_S)
    match said.decode(errors="replace").strip().lower():
        case "nat":
            return "nat"
        case "mirrored":
            return "mirrored"
        case "":
            is_nat = hosts and all(ip_address(host) in _WSL_NAT for host in hosts)
            return "nat" if is_nat else "other"
        case _:
            return "other"
