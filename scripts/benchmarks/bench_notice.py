"""Measure how long a ring takes to notice what happened to one of its nodes, and what it ignores.

Three node processes, each in a network namespace of its own (root and iproute2 are needed),
generate without end. Each fault befalls the middle one; `noticed` is when the head's request fails
or its log tells of the loss, `-` where the text went on for the whole time instead. Blocking the
GIL: the process sleeps in a call into C that never gives it back.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.system.netns import Host, open_network
from support.system.nodes import Command, Machine, NodeProcess
from support.system.parrot import LONG, make_parrots

BLOCKS_THE_GIL = """\
import ctypes, signal
signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep({seconds}))
"""
"""What a node imports at its start, as sitecustomize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Three nodes and the request that uses them; faults befall the second node."""

    hosts: list[Host]
    nodes: list[NodeProcess]
    running: Command

    @property
    def victim(self) -> NodeProcess:
        """The node in the middle."""
        return self.nodes[1]


def drop_from(host: Host, other: Host) -> None:
    """Let everything vanish that comes to `host` from `other`, and nothing on the way back."""
    rules = ["ip", "-n", host.namespace, "rule"]
    for line in (
        f"add pref 10 iif eth0 from {other.address} blackhole",
        "add pref 100 lookup local",
        "del pref 0",
    ):
        subprocess.run([*rules, *line.split()], check=True)


def shape(host: Host, *discipline: str) -> None:
    """Delay, lose or slow down what `host` sends."""
    run = ["tc", "-n", host.namespace, "qdisc", "replace", "dev", "eth0", "root", *discipline]
    subprocess.run(run, check=True)


def pause(ring: Ring, seconds: float) -> None:
    """Stop the node for a moment."""
    ring.victim.freeze()
    time.sleep(seconds)
    ring.victim.thaw()


def unplug_for(ring: Ring, seconds: float) -> None:
    """Pull its cable for a moment."""
    ring.hosts[1].unplug()
    time.sleep(seconds)
    ring.hosts[1].plug_in()


FAULTS: dict[str, Callable[[Ring], None]] = {
    "killed": lambda ring: ring.victim.signal(signal.SIGKILL),
    "frozen": lambda ring: ring.victim.freeze(),
    "cable out": lambda ring: ring.hosts[1].unplug(),
    "head to node cut": lambda ring: drop_from(ring.hosts[1], ring.hosts[0]),
    "node to head cut": lambda ring: drop_from(ring.hosts[0], ring.hosts[1]),
    "node to next cut": lambda ring: drop_from(ring.hosts[2], ring.hosts[1]),
    "next to node cut": lambda ring: drop_from(ring.hosts[1], ring.hosts[2]),
    "GIL blocked": lambda ring: ring.victim.signal(signal.SIGUSR1),
    "frozen for 3 s": lambda ring: pause(ring, 3.0),
    "cable out for 1 s": lambda ring: unplug_for(ring, 1.0),
    "1 Mbit/s": lambda ring: shape(
        ring.hosts[1], *["tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms"]
    ),
}
"""What can happen, from the most to the least serious."""


@contextmanager
def ring_of_three(folder: Path, model: Path, blocked_s: int) -> Iterator[Ring]:
    """Start nodes on three hosts, and a request that goes on for minutes."""
    with ExitStack() as stack:
        network = stack.enter_context(open_network(3))
        (folder / "start").mkdir(parents=True)
        code = BLOCKS_THE_GIL.format(seconds=blocked_s)
        (folder / "start" / "sitecustomize.py").write_text(code)
        environment = {
            "SHARDNET_NO_MDNS": "1",
            "PYTHONPATH": f"{folder / 'start'}:{os.environ.get('PYTHONPATH', '')}",
        }
        nodes = []
        for host, name in zip(network.hosts, ("anna", "bert", "cleo"), strict=True):
            machine = Machine(
                folder / name, prefix=host.prefix, environment=environment, makes_copies=False
            )
            stack.callback(_end, machine)
            nodes += machine.start_nodes(name, arguments=["--insecure", "--host", host.address])
        client = Machine(
            folder / "client",
            prefix=network.hosts[0].prefix,
            environment=environment,
            makes_copies=False,
        )
        stack.callback(_end, client)
        running = client.begin(
            *("generate", "a", "--model", str(model), "--context", str(LONG)),
            *("--nodes", ",".join(node.address for node in nodes), "--max-tokens", str(LONG - 1)),
            "--insecure",
        )
        running.stdout.wait_for("xyz")
        time.sleep(1.0)  # so that no measurement is under way
        yield Ring(hosts=network.hosts, nodes=nodes, running=running)


def _end(machine: Machine) -> None:
    """Kill what was started for a machine, frozen or not."""
    for process in machine.processes():
        process.kill()


def noticed_s(ring: Ring, fault: Callable[[Ring], None], most_s: float) -> tuple[float | None, str]:
    """Return when the head noticed (s) and what was told, None if the text still goes on."""
    head, running = ring.nodes[0], ring.running
    before = len(head.log)
    began = time.perf_counter()
    fault(ring)
    n_text = 0
    while (passed := time.perf_counter() - began) < most_s:
        n_text = len(running.stdout.text)
        told = head.log[before:] + running.stderr.text.partition("error: ")[2]
        if told.strip():
            return passed, told.strip().splitlines()[0]
        time.sleep(0.01)
    time.sleep(1.0)
    went_on = len(running.stdout.text) > n_text
    return None, "the text went on" if went_on else "the text stands still"


def main() -> None:
    """Measure every fault, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--most", type=float, default=15.0, help="how long to watch, in s")
    parser.add_argument("--blocked", type=int, default=3, help="how long the GIL is held, in s")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = make_parrots(Path(place) / "parrots").alphabet
        print(f"{'fault':20}{'noticed s':>10}  what was told", flush=True)
        for name in asked.faults:
            times, told = [], ""
            for number in range(asked.rounds):
                folder = Path(place) / f"{name}-{number}".replace(" ", "-")
                with ring_of_three(folder, model, asked.blocked) as ring:
                    took_s, told = noticed_s(ring, FAULTS[name], asked.most)
                times += [took_s] if took_s is not None else []
            shown = f"{statistics.median(times):.2f}" if times else "-"
            print(f"{name:20}{shown:>10}  {told}", flush=True)


if __name__ == "__main__":
    main()
