"""The program of scripts/chaos: rounds of faults, a ledger line for each, a summary."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from support.chaos.faults import Moment, draw_rounds
from support.chaos.lab import Lab
from support.chaos.ledger import HEAD, Entry, read_ledger, summary
from support.chaos.memory import MemoryBook
from support.chaos.models import CONTEXT, MAKERS, made_model
from support.chaos.rounds import Rounds
from support.chaos.simulate import SIMULATIONS, run_schedules
from support.chaos.streams import make_prompts
from support.system.netns import Network, NotPermittedError, open_network
from support.system.warm_start import is_possible, server

from shardnet.transport.loop import run
from shardnet_cli.commands import nodes

NETWORK = "CHAOS_NETWORK"
"""Names the network whose last host this process is."""
MOST_TOLD = 20
"""Failed schedules that are named."""


def main(arguments: Sequence[str]) -> int:
    """Run rounds until the time is over; return 1 if a round was not as it should be."""
    asked = _parse(arguments)
    if asked.table:
        print(summary(read_ledger(asked.table.read_text())))
        return 0
    if asked.simulate:
        return _simulate(asked)
    if asked.namespaces and NETWORK not in os.environ:
        return _in_namespaces(asked.nodes, arguments)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if is_possible():
        with server():
            entries, wrong = run(_run(asked, folder))
    else:
        entries, wrong = run(_run(asked, folder))
    print("\n" + summary(entries))
    for line in wrong:
        print(line)
    print(f"logs: {folder}")
    return 1 if wrong or not all(entry.is_good for entry in entries) else 0


def _in_namespaces(n_nodes: int, arguments: Sequence[str]) -> int:
    """Run the same in a network in which each node is a host, and this process another one."""
    try:
        with open_network(n_nodes + 1) as network:
            command = [*network.hosts[-1].prefix, sys.executable, "-m", "support.chaos.chaos"]
            environment = {**os.environ, NETWORK: network.name}
            return subprocess.run([*command, *arguments], env=environment, check=False).returncode
    except NotPermittedError as error:
        print(f"--namespaces: {error}", file=sys.stderr)
        return 1


def _simulate(asked: argparse.Namespace) -> int:
    n_failed = 0
    for what, ends, failures in run_schedules(asked.simulate, asked.seed, only=asked.what):
        told = ", ".join(f"{many} {end}" for end, many in ends.items())
        print(f"{what}, seeds from {asked.seed}: {told}; {len(failures)} failed", flush=True)
        for failure in failures[:MOST_TOLD]:
            print(failure)
        n_failed += len(failures)
    return 1 if n_failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    moments = [moment.name.lower() for moment in Moment]
    if not hasattr(nodes, "drain"):
        moments.remove(Moment.DRAINING.name.lower())
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="what draws the faults")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--rounds", type=int, default=None, help="at most so many rounds")
    parser.add_argument("--faults", type=int, default=None, help="at most so many faults")
    parser.add_argument("--only", type=int, nargs="*", help="only the rounds of these numbers")
    parser.add_argument("--nodes", type=int, default=4, help="how many nodes (default 4)")
    parser.add_argument("--streams", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--tokens", type=int, default=200, help="longest request (default 200)")
    parser.add_argument("--namespaces", action="store_true", help="give each node its network")
    parser.add_argument(
        "--nodes-per-stage", type=int, default=1, help="let so many nodes share each layer"
    )
    parser.add_argument(
        "--standby", choices=("", "kv", "auto"), default="", help="let nodes stand by for others"
    )
    parser.add_argument(
        "--deputy", choices=("off", "auto"), default="off", help="copy answers to a second node"
    )
    parser.add_argument(
        "--model",
        default="bundled",
        help=f"{', '.join(MAKERS)} (default bundled), all with a context of {CONTEXT} tokens, or "
        "another one of yours",
    )
    parser.add_argument(
        "--longest", type=int, default=8000, help="tokens of the longest prompts (default 8000)"
    )
    parser.add_argument(
        "--pause", type=float, default=None, metavar="S",
        help="call a round wrong in which a text paused this much longer than the fault lasted; by "
        "default pauses are only told",
    )  # fmt: skip
    parser.add_argument(
        "--schemas", action="store_true", help="have every fourth answer be JSON of a schema"
    )
    parser.add_argument("--ledger", type=Path, help="append a JSON object for each round here")
    parser.add_argument("--table", type=Path, help="only print the summary of such a file")
    parser.add_argument(
        "--moments", nargs="*", default=moments, choices=moments, help="when faults happen",
    )  # fmt: skip
    parser.add_argument(
        "--memory",
        action="store_true",
        help="end no process, and say each minute what every node has resident; more than 2 %% of "
        "growth after ten minutes is wrong",
    )
    parser.add_argument("--simulate", type=int, default=0, help="so many schedules instead")
    parser.add_argument("--what", default="", choices=["", *SIMULATIONS], help="only of this kind")
    asked = parser.parse_args(arguments)
    if asked.seed is None:
        asked.seed = int(time.time())
    return asked


async def _run(asked: argparse.Namespace, folder: Path) -> tuple[list[Entry], list[str]]:
    moments = frozenset(Moment[name.upper()] for name in asked.moments)
    entries: list[Entry] = []
    memory = MemoryBook(time.monotonic())
    name = os.environ.get(NETWORK)
    network = Network(asked.nodes + 1, name) if name else None
    lab = Lab(folder, asked.nodes, random.Random(asked.seed), network)
    try:
        await lab.start()
        async with Rounds(
            lab,
            asked.seed,
            model=made_model(asked.model, folder / "models"),
            prompts=make_prompts(
                asked.streams, asked.tokens, longest=asked.longest, has_schemas=asked.schemas
            ),
            standby=asked.standby,
            nodes_per_stage=asked.nodes_per_stage,
            most_pause_s=asked.pause,
        ) as rounds:
            await rounds.record_undisturbed()
            print(f"seed {asked.seed}, undisturbed texts recorded\n{HEAD}", flush=True)
            ends, n_faults = time.monotonic() + 60 * asked.minutes, 0
            for drawn in islice(
                draw_rounds(asked.seed, asked.nodes, moments=moments), asked.rounds
            ):
                if asked.only and drawn.number > max(asked.only):
                    break
                if asked.only and drawn.number not in asked.only:
                    continue
                if asked.memory and drawn.ends_process:
                    continue
                if time.monotonic() > ends or n_faults >= (asked.faults or n_faults + 1):
                    break
                n_faults += len(drawn.faults)
                entry = await rounds.run(drawn, has_deputy=asked.deputy == "auto")
                entries.append(entry)
                print(entry.row, flush=True)
                if asked.memory and memory.is_due(now_s := time.monotonic()):
                    print(memory.take(now_s, lab.resident()), flush=True)
                if asked.ledger:
                    with asked.ledger.open("a") as file:
                        file.write(json.dumps(entry.json) + "\n")
    finally:
        wrong = await lab.close()
    return entries, wrong + memory.wrong()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
