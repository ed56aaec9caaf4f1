"""Plans of real nodes: two with little memory, and a third one that is far away, or slow itself.

On hosts of their own, where namespaces and netem are there, and on loopback, which always works:
there a proxy makes the way slow. Only anna measures herself. The others find her figures in their
caches, a slow node finds larger ones: so what else keeps the test's machine busy does not count.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from support.servers.proxy import Proxy
from support.soak import cases
from support.system.netns import Host, NotPermittedError, open_network
from support.system.nodes import Crew, Machine, NodeProcess
from support.system.parrot import Parrots, make_parrot
from support.system.weighing import shape_here

from shardnet.cluster.measuring.figure_cache import FOLDER, Figure, FigureCache, FigureKey
from shardnet.cluster.placement.figures import HeldModel
from shardnet.cluster.placement.room import context_that_fits, fits_somehow
from shardnet.runtime.loading.measuring import StageFigures

DELAY_S = 0.1
"""One way to the node that is far: much longer than a busy machine needs for a way on loopback."""

SLOWER = 1000
"""How many times as long the node needs that is slow: more than what busy links can cost."""

SHARES = {"anna": 1.0, "bert": 0.7, "cleo": 0.9}
"""The memory of each node, as shares of anna's."""

BY_LAYERS = ["--nodes-per-stage", "1"]
"""On loopback, nodes that share each layer may be faster than any ring."""

FITS_ANNA = 512
"""A context with which the model fits on anna alone."""

POSITIONS = 16384
MIB = 2**20

Trouble = Literal["far", "slow"]
"""What is the matter with cleo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much memory the nodes have, as --memory takes it, and two contexts.

    `needs_two` fits on anna and bert, and on no node alone; `needs_cleo` only where cleo helps.
    """

    memory: dict[str, str]
    needs_two: int
    needs_cleo: int

    @classmethod
    def of(cls, model: Path) -> Sizes:
        """Choose them for what the model takes on this machine."""
        least = shape_here(model, FITS_ANNA)
        anna_mib = least.memory_bytes(least.whole) // MIB + 2
        mib = {name: int(share * anna_mib) for name, share in SHARES.items()}
        shape = shape_here(model, POSITIONS)

        def most(*names: str) -> int:
            memory = [mib[name] * MIB for name in names]
            held = [HeldModel(shape=shape, memory_bytes=n_bytes) for n_bytes in memory]
            context = context_that_fits(held, fits_somehow)
            assert context is not None
            return context

        alone, two, three = most("anna"), most("anna", "bert"), most("anna", "bert", "cleo")
        return cls(
            memory={name: f"{size}MiB" for name, size in mib.items()},
            needs_two=(alone + two) // 2,
            needs_cleo=(two + three) // 2,
        )


@contextlib.contextmanager
def machine(folder: Path, host: Host | None, **environment: str) -> Iterator[Machine]:
    folder.mkdir()
    prefix = host.prefix if host else ()
    environment = {"SHARDNET_NO_MDNS": "1", **environment}
    made = Machine(folder, prefix=prefix, environment=environment, is_measured=False)
    try:
        yield made
    finally:
        made.close()


def start(machine: Machine, name: str, memory: str, *arguments: str) -> NodeProcess:
    [node] = machine.start_nodes(name, arguments=["--memory", memory, *arguments])
    return node


def meet(node: NodeProcess, *names: str) -> None:
    for name in names:
        node.stderr.wait_for(f"node {name} (")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """The three machines, by the names of their nodes, and the hosts where these are their own."""

    machines: dict[str, Machine]
    hosts: dict[str, Host]

    def host_id(self, name: str) -> str:
        """What a node takes its machine to be."""
        code = "from shardnet.cluster.machine.profile import machine_name as i; print(i(), end='')"
        prefix = self.hosts[name].prefix if self.hosts else ()
        command = [*prefix, sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def give_figures(self, name: str, *, times: int) -> None:
        """Have a node, which has not measured itself, know anna's figures `times` so large."""
        [file] = (self.machines["anna"].folder / "cache" / FOLDER).iterdir()
        known = json.loads(file.read_text())
        stage = StageFigures(**known["figure"]["stage"])
        slower = msgspec.structs.replace(
            stage,
            layer_s=times * stage.layer_s,
            layer_256_s=times * stage.layer_256_s,
            embed_s=times * stage.embed_s,
            head_s=times * stage.head_s,
            is_steady=True,
        )
        key = msgspec.convert(known["key"] | {"host": self.host_id(name)}, FigureKey)
        figure = Figure(stage=slower, measured_at_s=known["figure"]["measured_at_s"])
        FigureCache(self.machines[name].folder / "cache", pytest.fail).put(key, figure)


@contextlib.contextmanager
def on_loopback(folder: Path, trouble: Trouble, memory: dict[str, str]) -> Iterator[Lab]:
    """Start the nodes; the others reach a far cleo through proxies."""
    with contextlib.ExitStack() as stack:
        machines = {name: stack.enter_context(machine(folder / name, None)) for name in memory}
        cleo = start(machines["cleo"], "cleo", memory["cleo"])
        if trouble == "far":
            proxies = [
                stack.enter_context(Proxy("127.0.0.1", cleo.ready["port"], delay_s=DELAY_S))
                for _ in range(2)
            ]
            ways = [f"127.0.0.1:{proxy.port}" for proxy in proxies]
        else:
            ways = [cleo.address] * 2
        bert = start(machines["bert"], "bert", memory["bert"], "--peer", ways[0])
        meet(bert, "cleo")
        anna = start(machines["anna"], "anna", memory["anna"], "--peer", ways[1])
        meet(anna, "cleo", "bert")
        yield Lab(machines=machines, hosts={})


@contextlib.contextmanager
def in_namespaces(folder: Path, trouble: Trouble, memory: dict[str, str]) -> Iterator[Lab]:
    """Start the nodes on hosts of their own, a far cleo's with a slow interface."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(open_network(3))
        except NotPermittedError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        hosts = dict(zip(memory, network.hosts, strict=True))
        if trouble == "far":
            slow_down(hosts["cleo"])
        key = str(folder / "cluster.key")
        machines = {
            name: stack.enter_context(machine(folder / name, host, SHARDNET_KEY_FILE=key))
            for name, host in hosts.items()
        }
        assert machines["anna"].run("key", "new").code == 0
        cleo = start(machines["cleo"], "cleo", memory["cleo"])
        there = f"{hosts['cleo'].address}:{cleo.ready['port']}"
        bert = start(machines["bert"], "bert", memory["bert"], "--peer", there)
        anna = start(machines["anna"], "anna", memory["anna"], "--peer", there)
        meet(bert, "cleo")
        meet(anna, "cleo", "bert")
        yield Lab(machines=machines, hosts=hosts)


def slow_down(host: Host) -> None:
    delay = f"tc qdisc add dev eth0 root netem delay {2 * DELAY_S * 1e3:.0f}ms".split()
    done = subprocess.run([*host.prefix, *delay], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this kernel has no netem to slow a link with: {done.stderr.strip()}")


SITES = {"namespaces": in_namespaces, "loopback": on_loopback}


@pytest.mark.parametrize("trouble", cases(["far"], ["slow"]))
@pytest.mark.parametrize("site", cases(["loopback"], ["namespaces"]))
def test_a_node_that_would_slow_the_ring_is_used_only_where_nothing_fits_without_it(
    site: str, trouble: Trouble, tmp_path: Path
) -> None:
    folder = tmp_path / "machines"
    folder.mkdir()
    model = make_parrot(
        tmp_path / "model", "abc", ends=False, layers=8, intermediate=2048, positions=POSITIONS
    )
    sizes = Sizes.of(model)
    with SITES[site](folder, trouble, sizes.memory) as lab:
        _check_plans(lab, trouble, model, sizes)


def _check_plans(lab: Lab, trouble: Trouble, model: Path, sizes: Sizes) -> None:
    anna = lab.machines["anna"]

    def plan(context: int) -> tuple[dict[str, Any], list[str], dict[str, str]]:
        """What is planned over all three and their links, once nobody was late.

        On a busy machine a node may not be thought of, and a link be given up while it is measured.
        """
        arguments = ["--model", str(model), "--context", str(context), *BY_LAYERS, "--json"]
        while True:
            told = anna.run("plan", *arguments).json
            if [len(told["measured"][key]) for key in ("nodes", "links")] == [3, 3]:
                break
        names = [stage["name"] for stage in told["stages"]]
        return told, names, {out["name"]: out["why"] for out in told["left_out"]}

    address = anna.nodes_with("anna")["anna"]["address"]
    alone = ["--context", str(FITS_ANNA), "--nodes", address]
    assert anna.run("plan", "--model", str(model), *alone).code == 0
    lab.give_figures("bert", times=1)
    lab.give_figures("cleo", times=SLOWER if trouble == "slow" else 1)
    told, names, left_out = plan(FITS_ANNA)
    assert names == ["anna"], told["why"]
    assert told["why"].startswith("alone on anna: ")
    assert left_out.keys() == {"bert", "cleo"}
    assert left_out["cleo"].startswith("with it "), left_out
    _check_measured(told, trouble)

    told, names, left_out = plan(sizes.needs_two)
    assert sorted(names) == ["anna", "bert"], told["why"]
    assert "Split only because it does not fit on " in told["why"]
    assert left_out.keys() == {"cleo"}
    assert left_out["cleo"].startswith("with it "), left_out
    fast_tok_s = told["predicted_tok_s"]

    told, names, left_out = plan(sizes.needs_cleo)
    assert "cleo" in names, told["why"]
    assert "Split only because it does not fit on " in told["why"]
    assert told["predicted_tok_s"] < fast_tok_s
    if trouble == "far":
        assert told["predicted_tok_s"] < 1 / (2 * DELAY_S)

    arguments = ["--model", str(model), "--context", str(sizes.needs_two), "--max-tokens", "8"]
    arguments += BY_LAYERS
    names = []
    while "bert" not in names:  # nor here
        assert anna.run("unload").code == 0
        assert anna.run("generate", "a", *arguments).stdout == "bcabcabc\n"
        last = anna.run("plan", "--last", "--json").json
        names = [stage["name"] for stage in last["stages"]]
    assert sorted(names) == ["anna", "bert"]
    for stage in last["stages"]:
        assert min(stage["predicted_compute_ms"], stage["compute_ms"]) > 0
        assert min(stage["predicted_hop_ms"], stage["hop_ms"]) > 0


def test_a_plan_does_not_measure_beside_a_generation(trio: Crew, parrots: Parrots) -> None:
    """Nor does it fail: what is not known is not needed."""
    running = trio.begin(parrots.big, trio.addresses(0, 1))
    arguments = [
        "--model",
        str(parrots.signs),
        "--threads",
        "2",
        "--dtype",
        "float16",
        "--nodes",
        trio.addresses(0, 1),
    ]
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
    layer_ms = {node["name"]: node["layer_ms"] for node in nodes.values()}
    assert layer_ms["bert"] == layer_ms["anna"]
    if trouble == "slow":
        assert layer_ms["cleo"] == pytest.approx(SLOWER * layer_ms["anna"])
        return
    far_ms = [trip_ms for pair, trip_ms in trips_ms.items() if "cleo" in pair]
    near_ms = [trip_ms for pair, trip_ms in trips_ms.items() if "cleo" not in pair]
    assert min(far_ms) >= 2 * DELAY_S * 1e3
    assert max(near_ms) < min(far_ms), trips_ms
