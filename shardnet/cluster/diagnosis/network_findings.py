"""Findings about networks of this machine that pass no multicast: WSL2's, and tailnets.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import HERE, Facts, Finding, Severity, good, hint, listed
from shardnet.cluster.machine.addresses import NODE_PORT
from shardnet.cluster.peers.peer_table import TAILNET

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
        yield hint(
            "wsl",
            HERE,
            f"{what}, where mDNS often does not pass and Windows' firewall keeps others out",
            f"name nodes with --peer; others come in after {_HYPER_V}",
        )


def _tailnet(facts: Facts) -> Iterator[Finding]:
    networks = facts.networks
    if networks.tailnet_failure:
        yield hint("tailnet", HERE, networks.tailnet_failure)
    if not networks.tailnet_hosts:
        return
    what = f"it is in a tailnet as {listed(networks.tailnet_hosts)}"
    views = [v for r in facts.replies if r.report is not None for v in r.report.peers]
    if any(TAILNET in view.told_by for view in views):
        yield good("tailnet", HERE, f"{what}, where nodes find each other")
    else:
        yield hint(
            "tailnet",
            HERE,
            f"{what}, where mDNS does not pass",
            "start nodes with --tailnet for them to find each other there",
        )
