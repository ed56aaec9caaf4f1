"""What a Windows machine is set to that keeps other nodes from this one: firewall, networks, sleep.

Knows whom to ask for that, by names and numbers that no language of the system changes. Must not
judge. What is not told is not known, and costs no more than that.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import sys
import uuid
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from shardnet.cluster.machine.programs import ask
from shardnet.errors import ConfigurationError
from shardnet.windows import library

ANSWER_S: Final = 15.0
"""How long PowerShell may take; to start takes it seconds on a busy machine."""

ALL_PORTS: Final = ("", "*")
_ANY_PROTOCOL: Final = 256
PROTOCOLS: Final = {"tcp": 6, "udp": 17}
_PROFILES: Final = (1, 2, 4)
"""Of networks: of a domain, private, public; sums of these name several."""


class Rule(msgspec.Struct, frozen=True):
    """A rule of the firewall about what comes in, for this program or for any.

    `profiles` are the kinds of networks where it holds, `ports` numbers and ranges with commas.
    """

    allows: bool
    protocol: int
    ports: str
    profiles: int

    def is_about(self, port: int, protocol: str, profile: int) -> bool:
        """Whether it is about such packets on such a network."""
        return (
            bool(self.profiles & profile)
            and self.protocol in (_ANY_PROTOCOL, PROTOCOLS[protocol])
            and (self.ports in ALL_PORTS or port in _ports(self.ports))
        )


def _ports(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):  # others are names, as RPC
            found.update(range(int(first), min(int(last or first), 65535) + 1))
    return found


class Firewall(msgspec.Struct, frozen=True):
    """The rules, the kinds of networks that are connected, and those where the firewall is on.

    `public` names the interfaces whose networks are public.
    """

    current: int
    on: list[int]
    rules: list[Rule]
    public: list[Annotated[str, msgspec.Meta(max_length=256)]]

    def shut(self, port: int, protocol: str) -> list[bool]:
        """Say for each connected kind of network that lets nothing in whether a rule forbids it."""
        found = []
        for profile in _PROFILES:
            if profile & self.current and profile in self.on:
                about = [rule for rule in self.rules if rule.is_about(port, protocol, profile)]
                if not all(rule.allows for rule in about) or not about:
                    found.append(bool(about))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsSystem:
    """How this machine is set: None is what it did not tell.

    `program` is the file that listens, `sleeps_after_s` how long without input on mains power, 0
    for never.
    """

    program: str
    firewall: Firewall | None = None
    sleeps_after_s: int | None = None
    has_long_paths: bool | None = None


async def read_windows_system() -> WindowsSystem | None:
    """Ask this machine; None on another system. Takes ANSWER_S at most."""
    if sys.platform != "win32":
        return None
    program = getattr(sys, "_base_executable", "") or sys.executable  # what a venv's python starts
    return WindowsSystem(
        program=program,
        firewall=await read_firewall(program),
        sleeps_after_s=_sleeps_after_s(),
        has_long_paths=_has_long_paths(),
    )


_ASK: Final = """
[Console]::OutputEncoding = [Text.Encoding]::UTF8
$ErrorActionPreference = 'SilentlyContinue'
$firewall = New-Object -ComObject HNetCfg.FwPolicy2
$rules = foreach ($rule in $firewall.Rules) {
    $is_ours = $rule.ApplicationName -eq '%s'
    $names = $rule.ApplicationName, $rule.serviceName, $rule.LocalAppPackageId
    $is_anyones = -not ($names | Where-Object { $_ })
    if ($rule.Enabled -and $rule.Direction -eq 1 -and ($is_ours -or $is_anyones)) {
        @{ allows = $rule.Action -eq 1; protocol = [int]$rule.Protocol
            ports = [string]$rule.LocalPorts; profiles = [int]$rule.Profiles }
    }
}
$public = Get-NetConnectionProfile | Where-Object { [int]$_.NetworkCategory -eq 0 }
ConvertTo-Json -Compress -Depth 4 @{
    current = [int]$firewall.CurrentProfileTypes
    on = @(1, 2, 4 | Where-Object { $firewall.FirewallEnabled($_) })
    rules = @($rules)
    public = @($public | ForEach-Object { [string]$_.InterfaceAlias })
}
"""
"""PowerShell: `netsh` answers in the language of the system."""


async def read_firewall(program: str) -> Firewall | None:
    """Ask for the rules about `program`, None where PowerShell does not tell them."""
    script = (_ASK % program.replace("'", "''")).encode("utf-16-le")
    flags = ["-NoProfile", "-NonInteractive", "-EncodedCommand"]
    windows = os.environ.get("SYSTEMROOT", r"C:\Windows")  # by its name it might be the folder's
    program = rf"{windows}\System32\WindowsPowerShell\v1.0\powershell.exe"
    asked = [program, *flags, base64.b64encode(script).decode()]
    with contextlib.suppress(ConfigurationError, msgspec.DecodeError):
        printed = await ask(asked, os.environ, answer_s=ANSWER_S)
        return msgspec.json.decode(printed.removeprefix(b"\xef\xbb\xbf"), type=Firewall)
    return None


_SLEEP: Final = uuid.UUID("238c9fa8-0aad-41ed-83f4-97be242c8f20")
_SLEEP_AFTER: Final = uuid.UUID("29f6c1db-86da-48c5-9fdb-f2b67b1f44da")
"""GUID_SLEEP_SUBGROUP and GUID_STANDBY_TIMEOUT"""


def _sleeps_after_s() -> int | None:
    """Read after how many seconds without input the machine sleeps on mains power."""
    scheme, seconds = ctypes.c_void_p(), ctypes.c_uint32()
    with contextlib.suppress(OSError):
        power = library("powrprof")
        if power.PowerGetActiveScheme(None, ctypes.byref(scheme)) == 0:
            group, setting = _SLEEP.bytes_le, _SLEEP_AFTER.bytes_le
            failed = power.PowerReadACValueIndex(
                None, scheme, group, setting, ctypes.byref(seconds)
            )
            library("kernel32").LocalFree(scheme)
            return None if failed else seconds.value
    return None


def _has_long_paths() -> bool | None:
    """Read whether programs may open files whose names have more than 260 characters."""
    if sys.platform != "win32":
        return None
    import winreg

    with contextlib.suppress(OSError):
        folder = r"SYSTEM\CurrentControlSet\Control\FileSystem"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, folder) as key:
            return bool(winreg.QueryValueEx(key, "LongPathsEnabled")[0])
    return None
