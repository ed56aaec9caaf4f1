"""Plans of real nodes: two with little memory, and a third one that is far away, or slow itself.

On hosts of their own, where namespaces and netem are there, and on loopback, which always works:
there a proxy makes the way slow.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from netns import Host, NotPermittedError, open_network
from nodes import Crew, Machine, NodeProcess
from parrot import Parrots, make_parrot
from proxy import Proxy

DELAY_S = 0.02
"""One way to the node that is far; a step of the model takes a fraction of it."""

SHARE = 0.1
"""How much of the time the node runs that is slow."""
PERIOD_S = 0.02
"""Short: a step that is measured must not fit into the time that the node runs."""

MEMORY = {"anna": "42MiB", "bert": "30MiB", "cleo": "38MiB"}
FITS_ANNA, NEEDS_TWO, NEEDS_CLEO = 512, 4096, 9216
"""Contexts: the model fits on anna alone; on anna and bert; only with cleo."""

Trouble = Literal["far", "slow"]
"""What is the matter with cleo."""


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
def limited(node: NodeProcess) -> Iterator[None]:
    """Let the node run for `SHARE` of each `PERIOD_S`, as a limit of its processor time would."""
    ended = threading.Event()

    def limit() -> None:
        while not ended.wait(SHARE * PERIOD_S):
            node.freeze()
            ended.wait((1 - SHARE) * PERIOD_S)
            node.thaw()

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def on_loopback(folder: Path, trouble: Trouble) -> Iterator[Machine]:
    """Start the nodes; the others reach a far cleo through proxies. Gives anna's machine.

    Nodes that are not slow compute at one speed, measured once: what keeps the test's machine busy
    shall not count.
    """
    cache = {"SHARDNET_CACHE_DIR": str(folder / "cache")}
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(machine(folder / name, None, **cache)) for name in "ab")
        own = {} if trouble == "slow" else cache
        c = stack.enter_context(machine(folder / "c", None, **own))
        cleo = start(c, "cleo")
        if trouble == "slow":
            stack.enter_context(limited(cleo))
            ways = [cleo.address] * 2
        else:
            proxies = [
                stack.enter_context(Proxy("127.0.0.1", cleo.ready["port"], delay_s=DELAY_S))
                for _ in range(2)
            ]
            ways = [f"127.0.0.1:{proxy.port}" for proxy in proxies]
        bert = start(b, "bert", "--peer", ways[0])
        meet(bert, "cleo")
        anna = start(a, "anna", "--peer", ways[1])
        meet(anna, "cleo", "bert")
        yield a


@contextlib.contextmanager
def in_namespaces(folder: Path, trouble: Trouble) -> Iterator[Machine]:
    """Start the nodes on hosts of their own, a far cleo's with a slow interface. Gives anna's.

    Every host measures itself.
    """
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(open_network(3)).hosts
        except NotPermittedError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        if trouble == "far":
            slow_down(hosts[2])
        key = str(folder / "cluster.key")
        machines = [
            stack.enter_context(machine(folder / name, host, SHARDNET_KEY_FILE=key))
            for name, host in zip("abc", hosts, strict=True)
        ]
        assert machines[0].run("key", "new").code == 0
        cleo = start(machines[2], "cleo")
        if trouble == "slow":
            stack.enter_context(limited(cleo))
        there = f"{hosts[2].address}:{cleo.ready['port']}"
        bert = start(machines[1], "bert", "--peer", there)
        anna = start(machines[0], "anna", "--peer", there)
        meet(bert, "cleo")
        meet(anna, "cleo", "bert")
        yield machines[0]


def slow_down(host: Host) -> None:
    delay = f"tc qdisc add dev eth0 root netem delay {2 * DELAY_S * 1e3:.0f}ms".split()
    done = subprocess.run([*host.prefix, *delay], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this kernel has no netem to slow a link with: {done.stderr.strip()}")


SITES = {"namespaces": in_namespaces, "loopback": on_loopback}


@pytest.mark.parametrize("trouble", ["far", "slow"])
@pytest.mark.parametrize("site", SITES)
def test_a_node_that_would_slow_the_ring_is_used_only_where_nothing_fits_without_it(
    site: str, trouble: Trouble, tmp_path: Path
) -> None:
    folder = tmp_path / "machines"
    folder.mkdir()
    with SITES[site](folder, trouble) as anna:
        _check_plans(anna, trouble, tmp_path, measured_once=site == "loopback")


def _check_plans(anna: Machine, trouble: Trouble, tmp_path: Path, *, measured_once: bool) -> None:
    model = make_parrot(
        tmp_path / "model", "abc", ends=False, layers=8, intermediate=2048, positions=16384
    )

    def plan(context: int) -> tuple[dict[str, Any], list[str], dict[str, str]]:
        arguments = ["--model", str(model), "--context", str(context), "--json"]
        told = anna.run("plan", *arguments).json
        names = [stage["name"] for stage in told["stages"]]
        return told, names, {out["name"]: out["why"] for out in told["left_out"]}

    # Anna alone first: bert then takes her figures, instead of measuring beside her.
    [address] = [n["address"] for n in anna.run("nodes", "--json").json if n["name"] == "anna"]
    alone = ["--context", str(FITS_ANNA), "--nodes", address]
    assert anna.run("plan", "--model", str(model), *alone).code == 0
    told, names, left_out = plan(FITS_ANNA)
    assert left_out["cleo"].startswith("with it "), left_out
    if measured_once:  # hosts of their own measure, and what else runs can make anna the slower one
        assert names == ["anna"], told["why"]
        assert told["why"].startswith("alone on anna: ")
        assert left_out.keys() == {"bert", "cleo"}
    _check_measured(told, trouble)

    told, names, left_out = plan(NEEDS_TWO)
    assert sorted(names) == ["anna", "bert"], told["why"]
    assert "Split only because it does not fit on " in told["why"]
    assert left_out.keys() == {"cleo"}
    assert left_out["cleo"].startswith("with it "), left_out
    fast_tok_s = told["predicted_tok_s"]

    told, names, left_out = plan(NEEDS_CLEO)
    assert "cleo" in names, told["why"]
    assert "Split only because it does not fit on " in told["why"]
    assert told["predicted_tok_s"] < fast_tok_s
    if trouble == "far":
        assert told["predicted_tok_s"] < 1 / (2 * DELAY_S) < fast_tok_s

    arguments = ["--model", str(model), "--context", str(NEEDS_TWO), "--max-tokens", "8"]
    assert anna.run("generate", "a", *arguments).stdout == "bcabcabc\n"
    last = anna.run("plan", "--last", "--json").json
    assert sorted(stage["name"] for stage in last["stages"]) == ["anna", "bert"]
    for stage in last["stages"]:
        assert min(stage["predicted_compute_ms"], stage["compute_ms"]) > 0
        assert min(stage["predicted_hop_ms"], stage["hop_ms"]) > 0
        assert trouble == "slow" or stage["predicted_hop_ms"] < DELAY_S * 1e3


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


def _check_measured(told: dict[str, Any], trouble: Trouble) -> None:
    """Check that every node and link was measured, and that what is slow is known as such."""
    nodes = {node["node"]: node for node in told["measured"]["nodes"]}
    assert [node["why_not"] for node in nodes.values()] == [None] * 3
    trips_ms = {
        frozenset(nodes[link[end]]["name"] for end in ("from", "to")): link["round_trip_ms"]
        for link in told["measured"]["links"]
    }
    assert len(trips_ms) == 3
    if trouble == "slow":
        layer_ms = {node["name"]: node["layer_ms"] for node in nodes.values()}
        assert layer_ms["cleo"] > 2 * max(layer_ms["anna"], layer_ms["bert"]), layer_ms
        return
    for pair, trip_ms in trips_ms.items():
        assert (trip_ms >= 2 * DELAY_S * 1e3) == ("cleo" in pair), trips_ms
