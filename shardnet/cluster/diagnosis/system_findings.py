"""Findings about this machine's system: Windows' firewall, networks, sleep and long names of files,
and networks that pass no multicast (WSL2's, and tailnets).

Pure. Commands that are named work in cmd and in PowerShell.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import (
    HERE,
    MDNS_PORT,
    Facts,
    Finding,
    Severity,
    age,
    at,
    listed,
)
from shardnet.cluster.machine.addresses import NODE_PORT
from shardnet.cluster.machine.windows_system import WindowsSystem
from shardnet.cluster.peers.peer_table import TAILNET

_AS_ADMINISTRATOR = "in a terminal that was opened as administrator run"
_LONG = r"reg add HKLM\SYSTEM\CurrentControlSet\Control\FileSystem /v LongPathsEnabled /t REG_DWORD"


def windows_findings(facts: Facts) -> Iterator[Finding]:
    """Judge how this machine is set, if it runs Windows."""
    found = facts.windows
    if found is None:
        return
    if facts.key.fingerprint:  # else nobody is to come in
        yield from _firewall(found, facts.ports)
    if found.sleeps_after_s:
        yield at("node", HERE).hint(
            f"it goes to sleep after {age(found.sleeps_after_s)} without input, and its node too",
            "`powercfg /change standby-timeout-ac 0` keeps it awake on mains power",
        )
    if found.has_long_paths is False:
        yield at("node", HERE).hint(
            "files whose names have more than 260 characters cannot be opened",
            f"{_AS_ADMINISTRATOR} `{_LONG} /d 1 /f`",
        )


def _firewall(system: WindowsSystem, ports: tuple[int, ...]) -> Iterator[Finding]:
    firewall, program = system.firewall, f'program="{system.program}"'
    if firewall is None:
        return
    asked = [(port, "tcp") for port in ports] + [(MDNS_PORT, "udp")]
    shut = {(port, protocol): firewall.shut(port, protocol) for port, protocol in asked}
    words = " and ".join(
        f"{protocol.upper()} port {port}" for port, protocol in asked if shut[port, protocol]
    )
    allow = f"`netsh advfirewall firewall add rule name=shardnet dir=in action=allow {program}`"
    if any(is_forbidden for found in shut.values() for is_forbidden in found):
        forget = f"`netsh advfirewall firewall delete rule name=all dir=in {program}`"
        yield at("port", HERE).problem(
            f"a rule of Windows' firewall keeps others from {words} of {system.program}, as after "
            "Cancel in its question",
            f"{_AS_ADMINISTRATOR} {forget}, then {allow}",
        )
    elif words:
        yield at("port", HERE).problem(
            f"Windows' firewall lets nobody in to {words} of {system.program}",
            f"{_AS_ADMINISTRATOR} {allow}",
        )
    for name in firewall.public:
        yield at("multicast", HERE).hint(
            f"Windows takes the network of {name} for a public one, and hides this machine there",
            f"if it is your home's, {_AS_ADMINISTRATOR} `powershell Set-NetConnectionProfile "
            f"-InterfaceAlias '{name}' -NetworkCategory Private`",
        )


_HYPER_V = (
    "`New-NetFirewallHyperVRule -Name shardnet -DisplayName shardnet -Direction Inbound -Protocol "
    f"TCP -LocalPorts {NODE_PORT} -VMCreatorId '{{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}}'` in a "
    "PowerShell of an administrator"
)
"""Lets others in through the firewall that Windows has before WSL2, whose id this is."""
_MIRROR = (
    "in Windows, write networkingMode=mirrored under [wsl2] in %UserProfile%\\.wslconfig, run `wsl "
    f"--shutdown`, then {_HYPER_V}; or run shardnet on Windows itself; or install Tailscale here "
    "and start nodes with --tailnet"
)


def network_findings(facts: Facts) -> Iterator[Finding]:
    """Report WSL2 and tailnets, and what to do for nodes to find and reach each other there."""
    yield from _wsl(facts)
    yield from _tailnet(facts)


def _wsl(facts: Facts) -> Iterator[Finding]:
    networks = facts.networks
    if networks.wsl == "nat":
        hosts = listed(networks.wsl_hosts) or "its address"
        is_cut_off = facts.key.fingerprint and not networks.tailnet_hosts
        yield Finding(
            severity=Severity.PROBLEM if is_cut_off else Severity.INFO,
            topic="wsl",
            where=HERE,
            what=f"it is WSL2 behind NAT: other machines do not reach {hosts}, and mDNS does not "
            "pass",
            remedy=_MIRROR,
        )
    elif networks.wsl:
        what = "it is WSL2 in mirrored mode" if networks.wsl == "mirrored" else "it is WSL2"
        yield at("wsl", HERE).hint(
            f"{what}, where mDNS often does not pass and Windows' firewall keeps others out",
            f"name nodes with --peer; others come in after {_HYPER_V}",
        )


def _tailnet(facts: Facts) -> Iterator[Finding]:
    networks = facts.networks
    if networks.tailnet_failure:
        yield at("tailnet", HERE).hint(networks.tailnet_failure)
    if not networks.tailnet_hosts:
        return
    what = f"it is in a tailnet as {listed(networks.tailnet_hosts)}"
    if any(TAILNET in view.told_by for *_, view in facts.views):
        yield at("tailnet", HERE).good(f"{what}, where nodes find each other")
    else:
        yield at("tailnet", HERE).hint(
            f"{what}, where mDNS does not pass",
            "start nodes with --tailnet for them to find each other there",
        )
