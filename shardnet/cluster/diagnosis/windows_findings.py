"""Findings about a Windows machine's firewall, networks, sleep and long names of files.

Pure. Commands that are named work in cmd and in PowerShell.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardnet.cluster.diagnosis.facts import HERE, MDNS_PORT, Facts, Finding, age, hint, problem
from shardnet.cluster.machine.windows_system import WindowsSystem

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
        yield hint(
            "node",
            HERE,
            f"it goes to sleep after {age(found.sleeps_after_s)} without input, and its node too",
            "`powercfg /change standby-timeout-ac 0` keeps it awake on mains power",
        )
    if found.has_long_paths is False:
        yield hint(
            "node",
            HERE,
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
        yield problem(
            "port",
            HERE,
            f"a rule of Windows' firewall keeps others from {words} of {system.program}, as after "
            "Cancel in its question",
            f"{_AS_ADMINISTRATOR} {forget}, then {allow}",
        )
    elif words:
        yield problem(
            "port",
            HERE,
            f"Windows' firewall lets nobody in to {words} of {system.program}",
            f"{_AS_ADMINISTRATOR} {allow}",
        )
    for name in firewall.public:
        yield hint(
            "multicast",
            HERE,
            f"Windows takes the network of {name} for a public one, and hides this machine there",
            f"if it is your home's, {_AS_ADMINISTRATOR} `powershell Set-NetConnectionProfile "
            f"-InterfaceAlias '{name}' -NetworkCategory Private`",
        )
