"""HTTP servers as real processes, heard by a process that browses for services."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.soak import cases
from support.system.nodes import Command
from support.system.sites import Site, open_site

from shardnet.cluster.machine.addresses import rank, read_interfaces, usable

BROWSER = """
import json, sys, threading
from zeroconf import ServiceBrowser, ServiceStateChange, Zeroconf

def changed(zeroconf, service_type, name, state_change):
    told = {"change": state_change.name, "name": name}
    if state_change is not ServiceStateChange.Removed:
        found = zeroconf.get_service_info(service_type, name, 60_000)
        told |= {"port": found.port, "txt": found.decoded_properties}
        told["addresses"] = found.parsed_addresses()
    print(json.dumps(told), flush=True)

with Zeroconf(interfaces=sys.argv[1:]) as zeroconf:
    ServiceBrowser(zeroconf, ["_http._tcp.local.", "_ollama._tcp.local."], handlers=[changed])
    sys.stdin.read()
"""


@pytest.fixture(params=cases(["loopback"], ["namespaces"]))
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Two machines. On loopback they tell of an address of this machine on a network."""
    if request.param == "loopback" and not usable(rank(read_interfaces())):
        pytest.skip("this machine is in no network: there is no address to announce")
    with open_site(request.param, 2, tmp_path) as site:
        yield site


@contextmanager
def browsing(site: Site) -> Iterator[Command]:
    """Browse on the second machine."""
    host = site.hosts[1] if site.hosts else None
    prefix, at = (host.prefix, host.address) if host else ((), "127.0.0.1")
    command = Command(
        subprocess.Popen(
            [*prefix, sys.executable, "-c", BROWSER, at],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )
    try:
        yield command
    finally:
        command.kill()
        assert command.process.stdin is not None
        command.process.stdin.close()


def told(browser: Command, port: int) -> list[dict[str, Any]]:
    """What was announced at a port, in the order in which it was heard."""
    lines = browser.stdout.text.splitlines()
    return [one for one in map(json.loads, lines) if one.get("port") == port]


def test_a_server_with_a_key_is_found_and_others_are_not(site: Site) -> None:
    """Programs learn where it is, whose APIs it has, and that it wants a key; then that it is gone.

    A node's server is one too. One without a key and one with --no-mdns are not.
    """
    key, machine = ("--api-key", "secret"), site.machines[0]
    everywhere = ("--http", "0.0.0.0:0", *key)
    with browsing(site) as browser:
        hidden = [
            *machine.start_nodes("open", arguments=["--http", "127.0.0.1:0"]),
            *machine.start_nodes("shy", arguments=[*everywhere, "--no-mdns"]),
        ]
        found = site.start(0, "attic", *everywhere)
        port = int(found.ready["http"].rpartition(":")[2])
        for kind in ("_http", "_ollama"):
            browser.stdout.wait_for(f'"Added", "name": "shardnet on attic.{kind}._tcp.local."')
        browser.stdout.wait_for(f'"port": {port}')
        [heard, *_] = told(browser, port)
        assert heard["txt"]["api"] == "openai,anthropic,ollama"
        assert (heard["txt"]["path"], heard["txt"]["auth"]) == ("/", "1")
        if site.hosts:
            assert heard["addresses"] == [site.hosts[0].address]
        ports = [int(node.ready["http"].rpartition(":")[2]) for node in hidden]
        assert not any(told(browser, port) for port in ports)
        assert all("announced by mDNS" not in node.log for node in hidden)
        found.stderr.wait_for("announced by mDNS as shardnet on attic._http._tcp.local")

        found.tell_to_leave()
        browser.stdout.wait_for('"Removed", "name": "shardnet on attic._http._tcp.local."')

        serve = machine.begin("serve", "--host", "0.0.0.0", "--port", "0", *key, "--json")
        port = json.loads(serve.stdout.wait_for("\n"))["port"]
        browser.stdout.wait_for(f'"port": {port}')
        serve.signal(signal.SIGINT)
        assert serve.wait().code == 0
