"""The program of `scripts/soak --months`: what months bring to a cluster, in minutes.

Clocks jump, by years too; machines are suspended for an hour; DHCP gives other addresses; cables
come out; disks and /tmp fill; the cluster key is replaced; nodes leave and return: a seed draws
what, to whom and when, while clients ask all the time. Every answer is compared with the
undisturbed one, and none may fail; at the end it is said what grew or was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.chaos.faults import Fault, Kind, Moment
from support.chaos.lab import Lab, Place, differences
from support.chaos.memory import SETTLED_S, verdict
from support.chaos.models import made_model
from support.chaos.owner import N_CLIENTS, Owner
from support.chaos.rounds import REST_S, SLACK
from support.chaos.streams import make_prompts
from support.system.warm_start import is_possible, server
from support.waiting import until

from shardnet.api.connections import load_identity
from shardnet.cluster.machine.folders import ClusterKey, load_key, store_key
from shardnet.transport.link import SILENCE_S
from shardnet.transport.loop import run

N_PROMPTS = 8
N_TOKENS = 40
LONGEST = 300
"""Tokens of the longest prompts."""
YEAR_S = 365 * 86_400.0
JUMPS_S = (-10 * YEAR_S, -YEAR_S, -86_400.0, -60.0, 60.0, 86_400.0, YEAR_S, 100 * YEAR_S)
HOUR_S = 3600.0
DISTURBS_S = 3.0
PAUSE_S = 1.0


OF_OTHERS = frozenset({"suspend", "cable", "away"})
"""What spares the head, whose clients would be told that it is lost."""


@dataclass(slots=True, kw_only=True)
class Months(Owner):
    """A lab to which months happen. `key_file` is that of the clients' machine."""

    key_file: Path
    happened: Counter[str] = field(default_factory=Counter)
    opened: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    key_is_new: bool = False

    def events(self) -> dict[str, Callable[[Place], Awaitable[object]]]:
        """What can happen to a node, by name."""
        return {
            "clock": lambda place: self.lab.order(
                place.number, "jump", self.chance.choice(JUMPS_S)
            ),
            "address": self.move,
            "disk": lambda place: self.last(place, Kind.DISK),
            "tmp": lambda place: self.last(place, Kind.TMP),
            "key": self.replace_key,
            "suspend": self.suspend,
            "cable": lambda place: self.last(place, Kind.CABLE),
            "away": self.leave,
        }

    async def happen(self, what: str) -> None:
        """Have something happen to a node that is drawn, and be over."""
        place = self.chance.choice(self.lab.places[what in OF_OTHERS :])
        print(
            f"{time.monotonic() - self._began_s:6.1f} s, {self.n_answers} answers: {what}", end=" "
        )
        print(f"at {place.name}", flush=True)
        await self.events()[what](place)
        self.happened[what] += 1

    async def draw_events(self, seconds: float) -> None:
        """Have one after the other happen for so long."""
        names, ends = [*self.events()], time.monotonic() + seconds
        while time.monotonic() < ends:
            await self.happen(self.chance.choice(names))
            await asyncio.sleep(self.chance.random() * PAUSE_S)

    async def answered(self) -> None:
        """Wait until every client has had an answer since."""
        n_answers = self.n_answers + N_CLIENTS
        await until(lambda: self.n_answers >= n_answers)

    async def last(self, place: Place, kind: Kind) -> None:
        """Have a fault of chaos last for a while."""
        seconds = self.chance.uniform(0.5, DISTURBS_S)
        fault = Fault(kind=kind, moment=Moment.RUNNING, victim=place.number, seconds=seconds)
        await self.lab.inflict(fault)
        await asyncio.sleep(seconds)
        await self.lab.until_lifted()

    async def move(self, place: Place) -> None:
        """Give a machine another address: what was connected to the old one hears nothing more."""
        await self.lab.order(place.number, "move", float(self.chance.randrange(2, 250)))
        if place.number:
            await self.last(place, Kind.CABLE)

    async def suspend(self, place: Place) -> None:
        """Suspend a machine for an hour: its links are given up elsewhere, and its clock jumps."""
        assert place.process is not None
        place.process.freeze()
        await asyncio.sleep(SILENCE_S + 1.0)
        place.process.thaw()
        await self.lab.order(place.number, "jump", HOUR_S)

    async def leave(self, place: Place) -> None:
        """Have a node leave, politely or not, and return."""
        if self.chance.random() < 0.5:
            await self.lab.drain(place.number)
            self.wrong += await self.lab.until_drained()
        if place.process is not None:
            await self.lab.kill(place.number)
        await self.lab.start_node(place.number)
        self.opened.pop((place.number, place.n_starts - 1), None)

    async def replace_key(self, place: Place) -> None:
        """Replace the cluster key, or end the time in which both count, from a node's machine."""
        more = ["--finish"] if self.key_is_new else []
        arguments = ["key", "rotate", *more, "--peer", place.address]
        command = self.lab.machine.begin_copy(*arguments, "--key-file", str(place.key_file))
        result = await asyncio.to_thread(command.wait)
        if result.code == 0:
            self.key_is_new = not self.key_is_new
        else:
            self.happened["key refused"] += 1
            self.key_is_new |= "still accepts the key before" in result.stderr

    def keys(self) -> set[bytes]:
        """The keys in the files of all nodes."""
        found = [load_key(place.key_file) for place in self.lab.places]
        return {key.secret for key in found if key is not None}

    async def until_at_rest(self, *, is_first: bool = False) -> list[str]:
        """Wait until nodes hold no more than they did first; return what they do."""
        ends = time.monotonic() + REST_S
        while True:
            left = [f"unlike keys: {len(self.keys())}"] if len(self.keys()) > 1 else []
            for place in self.lab.places:
                now = await self.lab.order(place.number, "count")
                names = now.pop("names")
                if is_first:
                    self.opened[place.number, place.n_starts] = now
                before = self.opened.get((place.number, place.n_starts))
                more = differences(before, now, SLACK) if before is not None else []
                left += [f"{place.name}: {line} ({names})" for line in more]
                unfinished = [p.name for p in place.folder.rglob(".*") if p.is_file()]
                left += [f"{place.name}: {name} was left behind" for name in unfinished]
            if not left or time.monotonic() > ends:
                return left
            await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def months(
    folder: Path, n_nodes: int, seed: int, data: Path, *, minute_s: float
) -> AsyncIterator[Months]:
    """Give a lab that is asked all the time; afterwards `wrong` has all that was."""
    chance, key = random.Random(seed), ClusterKey.make()
    lab = Lab(folder, n_nodes, chance, key=key)
    key_file = folder / "laptop.key"
    store_key(key, key_file)
    lived = Months(
        lab=lab,
        chance=chance,
        models=[made_model("bundled", folder / "models")],
        minute_s=minute_s,
        identity=load_identity(str(key_file)),
        key_file=key_file,
        prompts=make_prompts(N_PROMPTS, N_TOKENS, longest=LONGEST),
    )
    try:
        await lab.start()
        await lived.record()
        async with asyncio.TaskGroup() as tasks:
            work = [lived.be_client() for _ in range(N_CLIENTS)]
            running = [tasks.create_task(one) for one in (*work, lived.sample(data))]
            await lived.until_at_rest(is_first=True)
            yield lived
            for task in running:
                task.cancel()
        lived.wrong += await lived.until_at_rest()
    finally:
        lived.wrong += await lab.close()
    if lived.n_refused:
        lived.wrong.append(f"{lived.n_refused} requests failed: {lived.errors}")


async def live(asked: argparse.Namespace, folder: Path) -> list[str]:
    """Live for some minutes; return what was wrong."""
    minute_s = 60.0
    async with months(folder, asked.nodes, asked.seed, asked.data, minute_s=minute_s) as lived:
        await lived.draw_events(60 * asked.minutes)
    print(f"{lived.n_answers} answers, {lived.n_left} clients left; {dict(lived.happened)}")
    return lived.wrong + verdict(lived.samples, SETTLED_S)


def main(arguments: Sequence[str]) -> int:
    """Live as the command line says; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="scripts/soak --months", description=__doc__)
    parser.add_argument("minutes", type=float, help="how long")
    parser.add_argument("--data", type=Path, default=Path("soak-months.jsonl"), help="samples")
    parser.add_argument("--seed", type=int, default=61, help="what draws events")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes (default 3)")
    asked = parser.parse_args(arguments)
    asked.data = asked.data.absolute()
    folder = Path(tempfile.mkdtemp(prefix="months-"))
    with server() if is_possible() else contextlib.nullcontext():
        wrong = run(live(asked, folder))
    print("\n".join(wrong) or "every answer as undisturbed, and nothing left behind")
    print(f"samples: {asked.data}\nlogs: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
