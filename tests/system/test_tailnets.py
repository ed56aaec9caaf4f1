"""Nodes that find each other without multicast, as real processes: in a tailnet, and again by where
they were before."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.system.netns import Host
from support.system.sites import Site, here, meet, open_site

from shardnet.cluster.machine.addresses import NODE_PORT


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two machines in one tailnet, and no multicast."""
    path = f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"
    with open_site("namespaces", 2, tmp_path, SHARDNET_NO_MDNS="1", PATH=path) as site:
        for host in site.hosts:
            for address in (f"{tailnet_host(host)}/10", f"fd7a:115c:a1e0::{host.number}/48"):
                add = ["ip", "-n", host.namespace, "addr", "add", address, "dev", "eth0"]
                subprocess.run(add, check=True)
        yield site


def tailnet_host(host: Host) -> str:
    return f"100.64.0.{host.number}"


def install_tailscale(folder: Path, site: Site) -> None:
    """Have a `tailscale` that says the same on every machine, as far as shardnet reads it."""
    peers = [
        {"UserID": 7, "Online": True, "TailscaleIPs": [tailnet_host(host), f"fd7a:115c:a1e0::{n}"]}
        for n, host in enumerate(site.hosts, start=1)
    ]
    nobody = {"UserID": 7, "Online": True, "TailscaleIPs": ["100.64.9.9"]}
    status = {
        "BackendState": "Running",
        "Self": {"UserID": 7, "TailscaleIPs": []},
        "Peer": {f"nodekey:{n}": peer for n, peer in enumerate([*peers, nobody])},
    }
    script = folder / "tailscale"
    script.write_text(f"#!/bin/sh\necho '{json.dumps(status)}'\n")
    script.chmod(0o755)


def test_nodes_and_commands_find_nodes_in_a_tailnet(tmp_path: Path, site: Site) -> None:
    install_tailscale(tmp_path, site)
    anna = site.start(0, "anna", "--tailnet", "--port", str(NODE_PORT))
    assert site.nodes_with(1, arguments=["--no-mdns"]) == {}
    listed = site.nodes_with(1, "anna", arguments=["--tailnet"])
    assert listed["anna"]["node"] == anna.ready["node"]
    said = site.machines[1].run("doctor", "--tailnet").stdout
    assert f"{tailnet_host(site.hosts[0])}:{NODE_PORT} answers" in said
    assert "start nodes with --tailnet" in said

    site.machines[1].config_path.write_text("tailnet = true\n")
    bert = site.start(1, "bert", "--port", str(NODE_PORT))
    meet(anna, bert)
    assert "in a tailnet as 100.64.0.2" in site.machines[1].run("doctor").stdout
    for node in (anna, bert):
        node.stop()
        assert "warning" not in node.log


def test_a_node_without_tailscale_says_so_once_and_serves(site: Site) -> None:
    anna = site.start(0, "anna", "--tailnet")
    anna.stderr.wait_for("warning: --tailnet finds no nodes: there is no `tailscale` program here")
    result = site.machines[1].run("nodes", "--tailnet")
    assert "there is no `tailscale` program here" in result.stderr
    assert "no nodes found" in result.stdout
    anna.stop()


def test_a_peer_named_once_is_asked_again_at_the_next_start(site: Site) -> None:
    anna = site.start(0, "anna")
    address = f"{site.hosts[0].address}:{anna.ready['port']}"
    bert = site.start(1, "bert", "--peer", address)
    meet(anna, bert)
    bert.stop()
    seen = len(anna.log)
    bert = site.start(1, "bert")
    here(anna, "bert", after=seen)
    assert f"asking the peers of earlier starts too: {address}" in bert.log
    kept = site.machines[1].folder / "cache" / "peers.json"
    assert list(next(iter(json.loads(kept.read_bytes()).values()))) == [address]
