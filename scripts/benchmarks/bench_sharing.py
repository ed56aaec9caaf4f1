#!/usr/bin/env python3
"""Measure weight sharing: three nodes with one copy among them, and what a transfer costs a ring.

    python scripts/benchmarks/bench_sharing.py --rate 50MiB    capped by the node that has the copy
    python scripts/benchmarks/bench_sharing.py --mbit 400      capped by `tc` between namespaces

First: the time until three nodes answer, of which two have to fetch their range, against 1.3 times
(bytes to move / bandwidth) plus the time the same takes when nothing has to be fetched. Then: the
decode speed of a ring of two nodes, in turns without and with a third node that fetches from one of
them. Everything in one run; each figure of the second part is the median over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))  # real nodes, and networks to put them in

from support.system.netns import Host, open_network  # noqa: E402
from support.system.nodes import Command, Machine, NodeProcess, Result  # noqa: E402

from shardnet_cli.flags.options import parse_size  # noqa: E402

MODEL = "/proc/self/cwd/model"
NAMES = ("anna", "bert", "cleo")
MIB = 2**20
COMMAND_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Three machines, of which the first has the checkpoint."""

    machines: list[Machine]
    hosts: list[Host]
    nodes: list[NodeProcess]

    def address(self, number: int) -> str:
        """Where the others reach a node."""
        node = self.nodes[number]
        return f"{self.hosts[number].address if self.hosts else '127.0.0.1'}:{node.ready['port']}"

    def generate(self, asked: int, numbers: Sequence[int], n_tokens: int) -> Result:
        """Have nodes make tokens; the first is asked."""
        nodes = ",".join(self.address(number) for number in numbers)
        result = self.machines[asked].run(
            *("generate", "Once", "--model", MODEL, "--nodes", nodes, "--json", "--ignore-eos"),
            *("--max-tokens", str(n_tokens), "--context", "1024"),
            deadline_s=COMMAND_S,
        )
        if result.code:
            raise SystemExit(result.stderr)
        return result

    def forget(self, number: int) -> None:
        """Free what a node has loaded, and what it has fetched."""
        for arguments in (("unload", "--nodes", self.address(number)), ("cache", "rm", "--all")):
            self.machines[number].run(*arguments)

    def fetched_bytes(self, number: int) -> int:
        """What is in the cache of a machine."""
        models = self.machines[number].run("cache", "ls", "--json").json
        return sum(int(model["bytes"]) for model in models)


def main() -> None:
    """Measure what the command line asks for and print it as lines and as one JSON object."""
    options = _parse_options()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-sharing-")))
        checkpoint = options.checkpoint or _make_checkpoint(folder / "checkpoint", options.layers)
        site = _open_site(stack, folder, checkpoint.resolve(), options)
        bytes_per_s = options.mbit * 1e6 / 8 if options.mbit else parse_size(options.rate, "--rate")
        results = {
            "machine": platform.processor() or platform.machine(),
            "ready": _measure_ready(site, bytes_per_s),
            "decode": _measure_decode(site, options.rounds, options.tokens),
        }
    print(json.dumps(results))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="default: random, TinyLlama's shape")
    parser.add_argument("--layers", type=int, default=10, help="of the random checkpoint")
    parser.add_argument("--rate", default="50MiB", help="bytes per second that a node gives")
    parser.add_argument("--mbit", type=float, help="bandwidth in namespaces instead of --rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=60, help="of each round")
    return parser.parse_args()


def _make_checkpoint(folder: Path, n_layers: int) -> Path:
    make = ROOT / "scripts" / "make_checkpoint.py"
    subprocess.run([sys.executable, str(make), str(folder), "--layers", str(n_layers)], check=True)
    return folder


def _open_site(
    stack: contextlib.ExitStack, folder: Path, checkpoint: Path, options: argparse.Namespace
) -> Site:
    hosts: list[Host] = []
    environment = {"SHARDNET_NO_MDNS": "1"}
    arguments = ["--share-rate", options.rate]
    if options.mbit:
        hosts = stack.enter_context(open_network(3)).hosts
        environment |= {"SHARDNET_KEY_FILE": str(folder / "cluster.key")}
        arguments = []
        for host in hosts:
            _limit(host, options.mbit)
    machines = []
    for number, name in enumerate(NAMES):
        (folder / name).mkdir()
        prefix = hosts[number].prefix if hosts else ()
        machine = Machine(folder / name, prefix=prefix, environment=environment)
        stack.callback(machine.close)
        machines.append(machine)
    if hosts:
        machines[0].run("key", "new")
    (machines[0].folder / "model").symlink_to(checkpoint)

    def start(machine: Machine, name: str, *more: str) -> NodeProcess:
        [node] = machine.start_nodes(name, arguments=[*arguments, *more], cwd=machine.folder)
        return node

    site = Site(machines=machines, hosts=hosts, nodes=[start(machines[0], NAMES[0])])
    with ThreadPoolExecutor() as pool:
        peer = ("--peer", site.address(0))
        site.nodes.extend(pool.map(lambda m, name: start(m, name, *peer), machines[1:], NAMES[1:]))
    for node in site.nodes[1:]:
        node.stderr.wait_for(f"node {NAMES[0]} (")
    return site


def _limit(host: Host, mbit: float) -> None:
    """Slow down what a host sends, as a switch port of this speed would."""
    line = f"tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 512k latency 50ms"
    subprocess.run([*host.prefix, *line.split()], check=True)


def _measure_ready(site: Site, bytes_per_s: float) -> dict[str, float]:
    """Time a request to all three nodes: when two have to fetch, and when they have fetched.

    Before, the nodes measure themselves and each other, which they do once per model shape.
    """
    began = time.perf_counter()
    site.generate(0, (0, 1, 2), 1)
    first_s = time.perf_counter() - began
    for number in (0, 1, 2):
        site.forget(number)
    began = time.perf_counter()
    site.generate(0, (0, 1, 2), 1)
    cold_s = time.perf_counter() - began
    n_bytes = sum(site.fetched_bytes(number) for number in (1, 2))
    site.machines[0].run("unload", "--nodes", site.address(0))
    began = time.perf_counter()
    site.generate(0, (0, 1, 2), 1)
    warm_s = time.perf_counter() - began
    bound_s = 1.3 * n_bytes / bytes_per_s + warm_s
    print(
        f"{n_bytes / MIB:.0f} MiB to move at {bytes_per_s / MIB:.1f} MiB/s: {cold_s:.1f} s until "
        f"the first token; {warm_s:.1f} s with everything in place; bound {bound_s:.1f} s "
        f"({'kept' if cold_s <= bound_s else 'broken'}); moving alone takes "
        f"{n_bytes / bytes_per_s:.1f} s at least, and took {cold_s - warm_s:.1f} s; the very first "
        f"request, with measuring, took {first_s:.1f} s",
        flush=True,
    )
    return {
        "bytes": n_bytes,
        "first_s": first_s,
        "cold_s": cold_s,
        "warm_s": warm_s,
        "bound_s": bound_s,
    }


def _measure_decode(site: Site, n_rounds: int, n_tokens: int) -> dict[str, dict[str, float]]:
    """Let anna and bert decode, in turns alone and while cleo fetches from anna.

    What cleo computes would not disturb the ring if she were a machine of her own: where there are
    two cores, the ring computes on the first and cleo, who gives way to everybody, on the second,
    which anna may use too. One sequence keeps one stage busy at a time.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for node, allowed in zip(site.nodes, (cores, cores[:1], cores[-1:]), strict=True):
        _place(node, allowed, niceness=19 if node is site.nodes[-1] else 0)
    site.generate(0, (0, 1), 2)
    rounds: dict[str, list[dict[str, float]]] = {"alone": [], "with a transfer": []}
    for _ in range(n_rounds):
        rounds["alone"].append(_decode(site, n_tokens))
        site.forget(2)
        log_length = len(site.nodes[2].log)
        fetching = _begin_fetch(site)
        rounds["with a transfer"].append(_decode(site, n_tokens))
        lasted = "fetched" not in site.nodes[2].log[log_length:]
        fetching.wait(COMMAND_S)
        if not lasted:
            print("note: the transfer ended before the decoding; raise --layers", flush=True)
    medians = {
        what: {figure: statistics.median(one[figure] for one in turns) for figure in turns[0]}
        for what, turns in rounds.items()
    }
    for what, median in medians.items():
        each = ", ".join(f"{one['tok_s']:.2f}" for one in rounds[what])
        print(
            f"decode {what}: {median['tok_s']:.2f} tokens/s ({each}); of a token both stages "
            f"compute {median['compute_ms']:.1f} ms, all hops take {median['hops_ms']:.2f} ms, "
            f"waiting for a stage {median['queue_ms']:.2f} ms",
            flush=True,
        )
    return medians


def _place(node: NodeProcess, cores: Sequence[int], niceness: int) -> None:
    """Keep all threads of a node on some cores and let them give way, where the system can."""
    for task in Path(f"/proc/{node.pid}/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
            os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)


def _begin_fetch(site: Site) -> Command:
    """Have cleo fetch the whole checkpoint, and wait until bytes come."""
    running = site.machines[2].begin(
        *("generate", "Once", "--model", MODEL, "--nodes", site.address(2)),
        *("--max-tokens", "1", "--context", "1024"),
    )
    running.stderr.wait_for("fetching", deadline_s=60)
    return running


def _decode(site: Site, n_tokens: int) -> dict[str, float]:
    """Generate, and say how fast, and where the time of a token went."""
    timing = site.generate(0, (0, 1), n_tokens).json["timing"]
    stages = timing["per_stage"]
    return {
        "tok_s": timing["decode_tok_s"],
        "compute_ms": sum(stage["compute_ms"] for stage in stages),
        "hops_ms": sum(stage["wire_ms"] for stage in stages),
        "queue_ms": sum(stage["queue_ms"] for stage in stages),
    }


if __name__ == "__main__":
    main()
