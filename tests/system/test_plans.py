"""Plans of real nodes: one at the end of a slow way, two with little memory.

On hosts of their own, where namespaces and netem are there, and on loopback, which always works:
there a proxy makes the way slow.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from netns import Host, NotPermittedError, open_network
from nodes import Crew, Machine, NodeProcess
from parrot import Parrots, make_parrot
from proxy import Proxy

DELAY_S = 0.02
"""One way to the node that is far; a step of the model takes a fraction of it."""

MEMORY = {"anna": "42MiB", "bert": "30MiB", "cleo": "38MiB"}
FITS_ANNA, NEEDS_TWO, NEEDS_CLEO = 512, 4096, 9216
"""Contexts: the model fits on anna alone; on anna and bert; only with cleo, who is far."""


@contextlib.contextmanager
def machine(folder: Path, host: Host | None, **environment: str) -> Iterator[Machine]:
    folder.mkdir()
    prefix = host.prefix if host else ()
    made = Machine(folder, prefix=prefix, environment={"SHARDNET_NO_MDNS": "1", **environment})
    try:
        yield made
    finally:
        made.close()


def start(machine: Machine, name: str, *arguments: str) -> NodeProcess:
    [node] = machine.start_nodes(name, arguments=["--memory", MEMORY[name], *arguments])
    return node


def meet(node: NodeProcess, *names: str) -> None:
    for name in names:
        node.stderr.wait_for(f"node {name} (")


@contextlib.contextmanager
def on_loopback(folder: Path) -> Iterator[Machine]:
    """Start the nodes; the others reach cleo through proxies. Gives the machine of anna.

    They compute at one speed, measured once: what keeps the test's machine busy shall not count.
    """
    cache = str(folder / "cache")
    with contextlib.ExitStack() as stack:
        a, b, c = (
            stack.enter_context(machine(folder / name, None, SHARDNET_CACHE_DIR=cache))
            for name in ("a", "b", "c")
        )
        cleo = start(c, "cleo")
        ways = [
            stack.enter_context(Proxy("127.0.0.1", cleo.ready["port"], delay_s=DELAY_S))
            for _ in range(2)
        ]
        bert = start(b, "bert", "--peer", f"127.0.0.1:{ways[0].port}")
        meet(bert, "cleo")
        anna = start(a, "anna", "--peer", f"127.0.0.1:{ways[1].port}")
        meet(anna, "cleo", "bert")
        yield a


@contextlib.contextmanager
def in_namespaces(folder: Path) -> Iterator[Machine]:
    """Start the nodes on hosts of their own, cleo's with a slow interface. Gives anna's machine."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(open_network(3)).hosts
        except NotPermittedError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        delay = f"tc qdisc add dev eth0 root netem delay {2 * DELAY_S * 1e3:.0f}ms".split()
        done = subprocess.run(
            [*hosts[2].prefix, *delay], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"this kernel has no netem to slow a link with: {done.stderr.strip()}")
        key = str(folder / "cluster.key")
        machines = [
            stack.enter_context(machine(folder / name, host, SHARDNET_KEY_FILE=key))
            for name, host in zip("abc", hosts, strict=True)
        ]
        assert machines[0].run("key", "new").code == 0
        cleo = start(machines[2], "cleo")
        there = f"{hosts[2].address}:{cleo.ready['port']}"
        bert = start(machines[1], "bert", "--peer", there)
        anna = start(machines[0], "anna", "--peer", there)
        meet(bert, "cleo")
        meet(anna, "cleo", "bert")
        yield machines[0]


@pytest.fixture(params=["namespaces", "loopback"])
def anna(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """The machine of anna; the other two nodes run on others."""
    folder = tmp_path / "machines"
    folder.mkdir()
    site = in_namespaces if request.param == "namespaces" else on_loopback
    with site(folder) as machine:
        yield machine


def test_a_node_that_would_slow_the_ring_is_used_only_where_nothing_fits_without_it(
    anna: Machine, tmp_path: Path
) -> None:
    model = make_parrot(
        tmp_path / "model", "abc", ends=False, layers=8, intermediate=2048, positions=16384
    )

    def plan(context: int) -> tuple[dict[str, Any], list[str], dict[str, str]]:
        arguments = ["--model", str(model), "--context", str(context), "--json"]
        told = anna.run("plan", *arguments).json
        names = [stage["name"] for stage in told["stages"]]
        return told, names, {out["name"]: out["why"] for out in told["left_out"]}

    told, names, left_out = plan(FITS_ANNA)
    assert names == ["anna"], told["why"]
    assert told["why"].startswith("alone on anna: ")
    assert left_out["cleo"].startswith("with it "), left_out
    assert left_out.keys() == {"bert", "cleo"}
    _check_measured(told)

    told, names, left_out = plan(NEEDS_TWO)
    assert sorted(names) == ["anna", "bert"], told["why"]
    assert "Split only because it does not fit on " in told["why"]
    assert left_out.keys() == {"cleo"}
    assert left_out["cleo"].startswith("with it "), left_out
    fast_tok_s = told["predicted_tok_s"]

    told, names, left_out = plan(NEEDS_CLEO)
    assert "cleo" in names, told["why"]
    assert "Split only because it does not fit on " in told["why"]
    assert told["predicted_tok_s"] < 1 / (2 * DELAY_S) < fast_tok_s

    arguments = ["--model", str(model), "--context", str(NEEDS_TWO), "--max-tokens", "8"]
    assert anna.run("generate", "a", *arguments).stdout == "bcabcabc\n"
    last = anna.run("plan", "--last", "--json").json
    assert sorted(stage["name"] for stage in last["stages"]) == ["anna", "bert"]
    for stage in last["stages"]:
        assert min(stage["predicted_compute_ms"], stage["compute_ms"]) > 0
        assert min(stage["predicted_hop_ms"], stage["hop_ms"]) > 0
        assert stage["predicted_hop_ms"] < DELAY_S * 1e3


def test_a_plan_does_not_measure_beside_a_generation(trio: Crew, parrots: Parrots) -> None:
    """Nor does it fail: what is not known is not needed."""
    running = trio.begin(parrots.big, trio.addresses(0, 1))
    arguments = ["--model", str(parrots.signs), "--threads", "3", "--nodes", trio.addresses(0, 1)]
    told = trio.machine.run("plan", "--json", *arguments).json
    assert running.process.poll() is None
    running.signal(signal.SIGINT)
    assert running.wait().code == 130
    assert len(told["stages"]) == 2
    assert told["predicted_tok_s"] is None
    for node in told["measured"]["nodes"]:
        assert "is generating with" in node["why_not"]
        assert node["layer_ms"] is None


def _check_measured(told: dict[str, Any]) -> None:
    """Check that every node and link was measured, and that the slow links are known as such."""
    nodes = {node["node"]: node for node in told["measured"]["nodes"]}
    assert [node["why_not"] for node in nodes.values()] == [None] * 3
    trips_ms = {
        frozenset(nodes[link[end]]["name"] for end in ("from", "to")): link["round_trip_ms"]
        for link in told["measured"]["links"]
    }
    assert len(trips_ms) == 3
    for pair, trip_ms in trips_ms.items():
        assert (trip_ms >= 2 * DELAY_S * 1e3) == ("cleo" in pair), trips_ms
