"""Programs that know of WSL2 and of tailnets, and what they print, whatever it is."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shardnet.cluster.machine import programs, virtual_networks
from shardnet.cluster.machine.virtual_networks import (
    MAX_HOSTS,
    Tailnet,
    ask_tailscale,
    look_at_networks,
    read_tailnet,
)
from shardnet.errors import ConfigurationError

OWN = {"UserID": 7, "TailscaleIPs": ["100.64.0.1", "fd7a:115c:a1e0::1"], "Online": True}


def status(*peers: dict[str, Any], state: str = "Running") -> str:
    named = {f"nodekey:{number}": peer for number, peer in enumerate(peers)}
    return json.dumps({"BackendState": state, "Self": OWN, "Peer": named, "Version": "1.90"})


def machine(*hosts: str, **more: Any) -> dict[str, Any]:
    return {"UserID": 7, "TailscaleIPs": list(hosts), "Online": True, **more}


def test_the_users_machines_and_tagged_ones_that_are_online_are_looked_at() -> None:
    found = read_tailnet(
        status(
            machine("100.64.0.2", "fd7a:115c:a1e0::2"),
            machine("100.64.0.3", Online=False),
            machine("100.64.0.4", UserID=8),
            machine("100.64.0.5", UserID=9, Tags=["tag:lab"]),
            machine("192.168.1.1", "example.org", "100.64.0.6", "100.64.0.66"),
            {"Online": True, "UserID": 7, "TailscaleIPs": None},
        ).encode()
    )
    assert found == Tailnet(
        machines=(("100.64.0.2", "fd7a:115c:a1e0::2"), ("100.64.0.5",), ("100.64.0.6",)),
    )


def test_of_ten_thousand_machines_so_many_are_looked_at() -> None:
    peers = [machine(f"100.{64 + n // 65536}.{n // 256 % 256}.{n % 256}") for n in range(10_000)]
    found = read_tailnet(status(*peers).encode())
    assert len(found.machines) == MAX_HOSTS
    assert found.n_left_out == 10_000 - MAX_HOSTS


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (f"echo '{status(state='NeedsLogin')}'", "not connected (its state is NeedsLogin)"),
        ("echo '{\"BackendState\": 3}'", "printed what cannot be read"),
        ("printf '\\377\\376'", "printed what cannot be read"),
        ("echo failed to connect to local tailscaled >&2; exit 1", "failed to connect to local"),
        ("exit 3", "its exit code is 3"),
        ("exec sleep 60", "did not answer within 0.3 s"),
        ("exec yes", "printed more than 1000 bytes"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="a script of sh")
def test_a_program_that_does_not_answer_well_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, error: str
) -> None:
    monkeypatch.setattr(virtual_networks, "ANSWER_S", 0.3 if "sleep" in program else 30.0)
    monkeypatch.setattr(programs, "MAX_OUTPUT_BYTES", 1000)
    install(tmp_path, "tailscale", program)
    with pytest.raises(ConfigurationError) as raised:
        asyncio.run(ask_tailscale({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}))
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_the_program_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no `tailscale` program.*--peer"):
        asyncio.run(ask_tailscale({"PATH": str(tmp_path)}))


def test_windows_and_macos_have_it_where_their_installers_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of that name in the current folder is not run."""
    monkeypatch.setattr(sys, "platform", "darwin")
    here = tmp_path / "Tailscale"
    here.touch()
    monkeypatch.setattr(virtual_networks, "_PLACES", {"darwin": str(here)})
    assert virtual_networks._tailscale({"PATH": ""}) == str(here)
    here.unlink()
    monkeypatch.setattr(virtual_networks.shutil, "which", lambda name, path: f"./{name}")
    assert virtual_networks._tailscale({"PATH": ""}) == ""


@pytest.mark.parametrize(
    ("release", "says", "hosts", "mode"),
    [
        ("6.1.0-amd64", "nat", ["172.20.0.2"], ""),
        ("5.15.153.1-microsoft-standard-WSL2", "nat", ["172.20.0.2"], "nat"),
        ("5.15.153.1-microsoft-standard-WSL2", "mirrored", ["192.168.1.5"], "mirrored"),
        ("5.15.153.1-microsoft-standard-WSL2", "bridged", ["192.168.1.5"], "other"),
        ("4.19.84-microsoft-standard", "", ["172.20.0.2"], "nat"),
        ("4.19.84-microsoft-standard", "", ["192.168.1.5"], "other"),
    ],
)
def test_the_mode_of_wsl2_is_what_it_says_else_what_its_addresses_show(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    says: str,
    hosts: list[str],
    mode: str,
) -> None:
    if says:
        install(tmp_path, "wslinfo", f'[ "$1" = --networking-mode ] && echo {says}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert asyncio.run(virtual_networks._wsl_mode(release, hosts)) == mode


def test_a_tailscale_that_is_logged_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_networks, "read_interfaces", lambda: ())
    assert asyncio.run(look_at_networks({"PATH": str(tmp_path)})).tailnet_failure == ""
    install(tmp_path, "tailscale", f"echo '{status(state='Stopped')}'")
    seen = asyncio.run(look_at_networks({**os.environ, "PATH": f"{tmp_path}:/bin:/usr/bin"}))
    assert seen.tailnet_failure.startswith("Tailscale is not connected (its state is Stopped)")


def install(folder: Path, name: str, body: str) -> None:
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
