"""Benchmark a hop: where the time of a token goes between the stages' computing.

Every node is a process of its own, in which the ends of each part note the time. One sequence is
generated, so that one step is in flight and all notes of a token follow each other; the clock is
the same in all processes of a machine. A part is named by the notes at its ends; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench_ring import random_1b

from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.cluster.machine.folders import ClusterKey, store_key
from shardnet.transport.loop import run
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.flags.options import Access

NOTE = struct.Struct("<qq")
"""When, in nanoseconds, and which of PLACES."""
MAX_NOTES = 1 << 16

PLACES = (
    "bytes are read",
    "step is taken",
    "job is posted",
    "thread begins",
    "computing begins",
    "computing ends",
    "sending begins",
    "frames are written",
    "answer is taken",
    "step is scheduled",
)


class Note(NamedTuple):
    """Something that happened at a node."""

    time_ns: int
    place: str
    node: int


class Round(NamedTuple):
    """One generation: its notes, and what its own timing says."""

    notes: list[Note]
    tok_s: float
    compute_us: float
    cores: float


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench hop")
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_MODEL_PATH)
    parser.add_argument("--random-1b", action="store_true", help="as in scripts/bench")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="compute threads per stage")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        choices=("no-spin", "tls", "one-node"),
        help="measure this too, in turns with the ring; may be given several times",
    )
    parser.add_argument("--pin", action="store_true", help="bind each node to cores of its own")
    parser.add_argument("--no-notes", action="store_true", help="note no parts: they cost time")
    parser.add_argument("--node-option", action="append", default=[], help="for all nodes")
    parser.add_argument("--idle", type=float, default=3.0, help="seconds to watch idle nodes")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = random_1b() if arguments.random_1b else arguments.checkpoint.absolute()
    report = run(_measure(checkpoint, arguments))
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))


async def _measure(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as started:
        folder = Path(started.enter_context(tempfile.TemporaryDirectory()))
        key_file = folder / "key"
        store_key(ClusterKey.make(), key_file)
        rings: dict[str, tuple[list[_Node], Access]] = {}
        for name in ("ring", *arguments.against):
            is_secured = name == "tls"
            access = Access(key_file=str(key_file) if is_secured else "", insecure=not is_secured)
            options = [*access.node_arguments(), *arguments.node_option]
            options += ["--no-spin"] if name == "no-spin" else []
            n_nodes = 1 if name == "one-node" else arguments.stages
            notes = None if arguments.no_notes else folder / name
            nodes = started.enter_context(
                _nodes(notes, n_nodes, arguments.threads, options, pin=arguments.pin)
            )
            rings[name] = (nodes, access)
        rounds: dict[str, list[Round]] = {name: [] for name in rings}
        for turn in range(arguments.rounds + 1):
            for name, (nodes, access) in rings.items():
                made = await _turn(nodes, access, str(checkpoint), turn, arguments.tokens)
                if turn:
                    rounds[name].append(made)
        idle = await _idle(rings, arguments.idle)
    report = {name: _report(len(rings[name][0]), rounds[name]) for name in rings}
    for name, cores in idle.items():
        report[name]["cores_idle"] = cores
    for name in arguments.against:
        pairs = [*zip(rounds["ring"], rounds[name], strict=True)]
        ratio = statistics.median(ours.tok_s / theirs.tok_s for ours, theirs in pairs)
        report["ring"][f"tok_s_to_{name}"] = round(ratio, 3)
    return report


async def _turn(
    nodes: Sequence[_Node], access: Access, model: str, turn: int, n_tokens: int
) -> Round:
    choice = ModelChoice(model=model, nodes=[node.address for node in nodes])
    async with connect(nodes[0].address, access.identity()) as client:
        used_s = sum(node.cpu_s() for node in nodes)
        began = time.perf_counter_ns()
        [result] = await client.complete(
            [turn + 1, 5, 7, 9], model=choice, max_tokens=n_tokens, ignore_eos=True
        )
        took_s = (time.perf_counter_ns() - began) / 1e9
        used_s = sum(node.cpu_s() for node in nodes) - used_s
    return Round(
        notes=sorted(note for node in nodes for note in node.notes(began)),
        tok_s=result.timing.decode_tok_s,
        compute_us=1e3 * sum(stage.compute_ms for stage in result.timing.per_stage),
        cores=used_s / took_s,
    )


async def _idle(rings: dict[str, tuple[list[_Node], Access]], idle_s: float) -> dict[str, float]:
    """Return the cores that the nodes of each ring use while nothing is asked of them."""
    await asyncio.sleep(2.0)
    before = {name: sum(node.cpu_s() for node in nodes) for name, (nodes, _) in rings.items()}
    await asyncio.sleep(idle_s)
    return {
        name: round((sum(node.cpu_s() for node in nodes) - before[name]) / idle_s, 3)
        for name, (nodes, _) in rings.items()
    }


def _report(n_nodes: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """Return medians of the rounds, and the parts of a hop in the order in which they come, in µs.

    A hop is what a token takes beside computing, divided by the hops, which are as many as nodes:
    a mean, in which every preemption counts. With notes there is the median hop too.
    """
    hops = [(1e6 / made.tok_s - made.compute_us) / n_nodes for made in rounds]
    to_compute = [n_nodes * hop / made.compute_us for hop, made in zip(hops, rounds, strict=True)]
    report: dict[str, Any] = {
        "tok_s": round(statistics.median(made.tok_s for made in rounds), 1),
        "compute_us": round(statistics.median(made.compute_us for made in rounds)),
        "mean_hop_us": round(statistics.median(hops)),
        "mean_hop_us_each_round": [round(hop) for hop in hops],
        "all_hops_to_compute": round(statistics.median(to_compute), 3),
        "cores_used": round(statistics.median(made.cores for made in rounds), 2),
    }
    each_round = [statistics.median(times) for times in map(_hops, rounds) if times]
    if each_round and n_nodes > 1:
        report["median_hop_us"] = round(statistics.median(each_round))
        report["median_hop_us_each_round"] = [round(hop) for hop in each_round]
        report["parts_us"] = _parts(n_nodes, rounds)
    return report


def _hops(made: Round) -> list[float]:
    """Return for each hop the time from the end of computing to the next beginning, in µs."""
    times = []
    ended_ns = 0
    for note in made.notes:
        if note.place == "computing ends":
            ended_ns = note.time_ns
        elif note.place == "computing begins" and ended_ns:
            times.append((note.time_ns - ended_ns) / 1e3)
            ended_ns = 0
    return times[16:]  # the first ones are those of the prompt, and of what is not warm yet


def _parts(n_nodes: int, rounds: Sequence[Round]) -> dict[str, float]:
    """Return the medians of what lies between two notes, where that comes with most tokens."""
    parts: dict[str, list[float]] = defaultdict(list)
    n_tokens = 0
    for notes in [made.notes for made in rounds]:
        ends = [at for at, note in enumerate(notes) if note.place == "computing ends"]
        later = [at for at in ends[8 * n_nodes :] if notes[at].node == n_nodes - 1]
        if n_nodes == 1 or not later:
            continue
        n_tokens += len(later)
        is_hop = False  # else a stage computes, whatever others do meanwhile
        for before, after in pairwise(notes[later[0] : ends[-1] + 1]):
            if before.place == "computing ends":
                is_hop = True
            elif before.place == "computing begins":
                is_hop = False
            computes = (before.place, after.place) == ("computing begins", "computing ends")
            if is_hop or computes:
                parts[_name(before, after)].append((after.time_ns - before.time_ns) / 1e3)
    return {
        name: round(statistics.median(times), 1)
        for name, times in parts.items()
        if len(times) > n_tokens / 4
    }


def _name(before: Note, after: Note) -> str:
    there = "" if before.node == after.node else f"{after.node}: "
    return f"{before.node}: {before.place} -> {there}{after.place}"


def _as_text(report: dict[str, Any]) -> str:
    lines = []
    for name, figures in report.items():
        parts = figures.pop("parts_us", {})
        lines += [name, *(f"  {key}: {value}" for key, value in figures.items())]
        lines += [f"{us:11.1f} µs  {part}" for part, us in parts.items()]
    return "\n".join(lines)


# --- the nodes


class _Node:
    """A node process and its notes."""

    def __init__(self, number: int, notes: Path | None, process: subprocess.Popen[bytes]) -> None:
        self._number = number
        self._notes = notes
        self._process = process
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        self.address = f"{ready['host']}:{ready['port']}"

    def notes(self, since_ns: int) -> list[Note]:
        """Return what was noted since then."""
        if self._notes is None:
            return []
        found = NOTE.iter_unpack(self._notes.read_bytes())
        return [Note(at, PLACES[place], self._number) for at, place in found if at >= since_ns]

    def cpu_s(self) -> float:
        """Seconds of processor time so far."""
        fields = (
            Path(f"/proc/{self._process.pid}/stat")
            .read_text(encoding="utf-8")
            .rpartition(")")[2]
            .split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _nodes(
    notes: Path | None, n_nodes: int, threads: int, options: Sequence[str], *, pin: bool
) -> Iterator[list[_Node]]:
    """Start nodes, which note what they do in files whose names begin with `notes`."""
    processes: list[tuple[Path | None, subprocess.Popen[bytes]]] = []
    try:
        for number in range(n_nodes):
            path = None if notes is None else notes.with_name(f"{notes.name}-{number}")
            if path is not None:
                path.write_bytes(bytes(NOTE.size * MAX_NOTES))
            command = [sys.executable, __file__, "--notes-of-node", str(path or ""), "node"]
            command += ["--json", "--host", "127.0.0.1", "--port", "0", "--name", f"hop-{number}"]
            command += ["--threads", str(threads), "--no-mdns", "--until-stdin-closes", *options]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            processes.append((path, process))
            if pin:
                os.sched_setaffinity(process.pid, _cores_of(number, n_nodes))
        yield [_Node(number, *each) for number, each in enumerate(processes)]
    finally:
        for _, process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for _, process in processes:
            process.wait()


def _cores_of(number: int, n_nodes: int) -> list[int]:
    """Return the cores of one node: each its share, as if it had a machine of its own."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores) :: n_nodes]


def _be_node(path: Path | None, arguments: list[str]) -> None:
    """Be a node that notes when it passes through PLACES, or a plain one."""
    if path is not None:
        _note_in(path)
    from shardnet_cli.main import main as command_line

    sys.argv = ["shardnet", *arguments]
    command_line()


def _note_in(path: Path) -> None:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    count = 0

    def note(place: int) -> None:
        nonlocal count
        NOTE.pack_into(memory, NOTE.size * (count % MAX_NOTES), time.perf_counter_ns(), place)
        count += 1

    for owner, method, before, after in _ways():
        setattr(owner, method, _noting(getattr(owner, method), note, before, after))


def _ways() -> list[tuple[type, str, str, str]]:
    """Return what is called on a step's way, with what is noted before and after."""
    from shardnet.runtime.ring.links import LinkSink
    from shardnet.runtime.ring.pipeline import Pipeline
    from shardnet.runtime.stage.executor import Executor
    from shardnet.runtime.stage.torch_compute import TorchCompute
    from shardnet.runtime.stage.worker import StageWorker
    from shardnet.transport.asyncio_link import AsyncioLink

    return [
        (AsyncioLink, "buffer_updated", "bytes are read", ""),
        (Executor, "post", "step is taken", "job is posted"),
        (StageWorker, "_process", "thread begins", ""),
        (TorchCompute, "compute", "computing begins", "computing ends"),
        (LinkSink, "send", "sending begins", "frames are written"),
        (LinkSink, "send_now", "sending begins", "frames are written"),
        (Pipeline, "answer", "answer is taken", ""),
        (Pipeline, "send", "step is scheduled", ""),
    ]


def _noting(
    call: Callable[..., Any], note: Callable[[int], None], before: str, after: str
) -> Callable[..., Any]:
    first = PLACES.index(before)
    last = PLACES.index(after) if after else -1

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(first)
        result = call(*args, **kwargs)
        if last >= 0:
            note(last)
        return result

    return noted


if __name__ == "__main__":
    if sys.argv[1:2] == ["--notes-of-node"]:
        _be_node(Path(sys.argv[2]) if sys.argv[2] else None, sys.argv[3:])
    else:
        main()
