"""Benchmark a hop: where the time of a token goes between the stages' computing.

Every node is a process of its own, in which the ends of each part note the time. One sequence is
generated, so that one step is in flight and all notes of a token follow each other; the clock is
the same in all processes of a machine. A part is named by the notes at its ends; medians.
"""

from __future__ import annotations

import argparse
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
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench_ring import random_1b

from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.transport.loop import run
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.flags.cluster_access import Access

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


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench hop")
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_MODEL_PATH)
    parser.add_argument("--random-1b", action="store_true", help="as in scripts/bench")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="compute threads per stage")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--key-file", default="", help="a cluster key: links are TLS")
    parser.add_argument("--node-option", action="append", default=[], help="for example --no-spin")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = random_1b() if arguments.random_1b else arguments.checkpoint.absolute()
    report = run(_measure(checkpoint, arguments))
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))


async def _measure(checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    access = Access(key_file=arguments.key_file, insecure=not arguments.key_file)
    options = [*access.node_arguments(), *arguments.node_option]
    with (
        tempfile.TemporaryDirectory() as folder,
        _nodes(Path(folder), arguments.stages, arguments.threads, options) as nodes,
    ):
        choice = ModelChoice(model=str(checkpoint), nodes=[node.address for node in nodes])
        rounds = []
        async with connect(nodes[0].address, access.identity()) as client:
            for turn in range(arguments.rounds + 1):
                used_s = sum(node.cpu_s() for node in nodes)
                began = time.perf_counter_ns()
                [result] = await client.complete(
                    [turn + 1, 5, 7, 9],
                    model=choice,
                    max_tokens=arguments.tokens,
                    ignore_eos=True,
                )
                took_s = (time.perf_counter_ns() - began) / 1e9
                used_s = sum(node.cpu_s() for node in nodes) - used_s
                notes = sorted(note for node in nodes for note in node.notes(began))
                if turn:
                    rounds.append((notes, result.timing.decode_tok_s, used_s / took_s))
                    c = sum(stage.compute_ms for stage in result.timing.per_stage)
                    print(
                        "plain",
                        round(result.timing.decode_tok_s, 1),
                        "compute",
                        round(c, 3),
                        "hop_us",
                        round((1e6 / result.timing.decode_tok_s - 1e3 * c) / arguments.stages),
                        "cores",
                        round(used_s / took_s, 2),
                    )
    if os.environ.get("NO_NOTES"):
        return {"parts_us": {}}
    return _report(rounds)


def _report(rounds: Sequence[tuple[list[Note], float, float]]) -> dict[str, Any]:
    """Return the parts of a token in the order in which they come, in µs, and sums of them."""
    parts: dict[str, list[float]] = defaultdict(list)
    hops: list[list[float]] = []
    n_nodes = 1 + max(note.node for note in rounds[0][0])
    for notes, _, _ in rounds:
        ends = [at for at, note in enumerate(notes) if note.place == "computing ends"]
        first = next(at for at in ends[8 * n_nodes :] if notes[at].node == n_nodes - 1)
        hops.append([])
        is_hop = False  # else a stage computes, whatever others do meanwhile
        for before, after in pairwise(notes[first : ends[-1] + 1]):
            if before.place == "computing ends":
                hops[-1].append(0.0)
                is_hop = True
            elif before.place == "computing begins":
                is_hop = False
            took_us = (after.time_ns - before.time_ns) / 1e3
            if is_hop:
                hops[-1][-1] += took_us
                parts[_name(before, after)].append(took_us)
            elif (before.place, after.place) == ("computing begins", "computing ends"):
                parts[_name(before, after)].append(took_us)
    n_tokens = sum(map(len, hops)) / n_nodes
    return {
        "tok_s": round(statistics.median(tok_s for _, tok_s, _ in rounds), 1),
        "cores_used": round(statistics.median(cores for _, _, cores in rounds), 2),
        "hop_us": round(statistics.median(us for hop in hops for us in hop), 1),
        "hop_us_each_round": [round(statistics.median(hop), 1) for hop in hops],
        "parts_us": {
            name: round(statistics.median(times), 1)
            for name, times in parts.items()
            if len(times) > n_tokens / 4
        },
    }


def _name(before: Note, after: Note) -> str:
    there = "" if before.node == after.node else f"{after.node}: "
    return f"{before.node}: {before.place} -> {there}{after.place}"


def _as_text(report: dict[str, Any]) -> str:
    lines = [f"{key}: {value}" for key, value in report.items() if key != "parts_us"]
    return "\n".join(
        [*lines, *(f"{us:9.1f} µs  {name}" for name, us in report["parts_us"].items())]
    )


# --- the nodes


class _Node:
    """A node process and its notes."""

    def __init__(self, number: int, notes: Path, process: subprocess.Popen[bytes]) -> None:
        self._number = number
        self._notes = notes
        self._process = process
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        self.address = f"{ready['host']}:{ready['port']}"

    def notes(self, since_ns: int) -> list[Note]:
        """Return what was noted since then."""
        found = NOTE.iter_unpack(self._notes.read_bytes())
        return [Note(at, PLACES[place], self._number) for at, place in found if at >= since_ns]

    def cpu_s(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _nodes(
    folder: Path, n_nodes: int, threads: int, options: Sequence[str]
) -> Iterator[list[_Node]]:
    processes = []
    try:
        for number in range(n_nodes):
            notes = folder / str(number)
            notes.write_bytes(bytes(NOTE.size * MAX_NOTES))
            command = [sys.executable, __file__, "--notes-of-node", str(notes), "node", "--json"]
            command += ["--host", "127.0.0.1", "--port", "0", "--name", f"hop-{number}"]
            command += ["--threads", str(threads), "--no-mdns", "--until-stdin-closes", *options]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            processes.append((notes, process))
        yield [_Node(number, *each) for number, each in enumerate(processes)]
    finally:
        for _, process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for _, process in processes:
            process.wait()


def _be_node(path: Path, arguments: list[str]) -> None:
    """Be a node that notes when it passes through PLACES."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    count = 0

    def note(place: int) -> None:
        nonlocal count
        NOTE.pack_into(memory, NOTE.size * (count % MAX_NOTES), time.perf_counter_ns(), place)
        count += 1

    for owner, method, before, after in _ways() if not os.environ.get("NO_NOTES") else []:
        setattr(owner, method, _noting(getattr(owner, method), note, before, after))
    from shardnet_cli.main import main as command_line

    sys.argv = ["shardnet", *arguments]
    command_line()


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
        _be_node(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
