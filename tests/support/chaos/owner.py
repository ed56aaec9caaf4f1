"""The program of `scripts/soak --owner`: a home lab as its owner uses it, for hours.

Clients come, ask and leave, some in the middle of an answer; a node a minute leaves or returns; the
model is another one now and then. Every answer is compared with the undisturbed one. What each node
holds is written to a file of data each minute; at the end it is said what grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from support.chaos.lab import Lab, Place
from support.chaos.memory import SETTLED_S, Sample, verdict
from support.chaos.models import made_model
from support.chaos.streams import Heard, listen, make_prompts
from support.system.warm_start import is_possible, server

from shardnet.api import ModelChoice, Prompt
from shardnet.api.client import connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import ShardnetError
from shardnet.transport.identity import Identity
from shardnet.transport.loop import run

N_CLIENTS = 4
N_PROMPTS = 12
N_TOKENS = 120
LONGEST = 600
"""Tokens of the longest prompts."""
MODELS = (DEFAULT_MODEL_NAME, "mixture")
RETURNS_EACH = 3
"""One model is asked until so many nodes have returned, and all are here."""
LEAVES = 0.25
"""The share of clients that leave in the middle of an answer."""
LEAVES_S = 2.0
"""After how long at most."""
AGAIN_S = 0.5
"""When a client whose request was refused asks again."""


@dataclass(slots=True, kw_only=True)
class Owner:
    """A lab in use: what was asked of it, and what came of that."""

    lab: Lab
    chance: random.Random
    models: Sequence[str]
    minute_s: float
    identity: Identity | None = None
    prompts: Sequence[Prompt] = field(
        default_factory=lambda: make_prompts(N_PROMPTS, N_TOKENS, longest=LONGEST)
    )
    undisturbed: dict[str, list[Heard]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    n_answers: int = 0
    n_left: int = 0
    n_refused: int = 0
    n_returns: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    _began_s: float = field(default_factory=time.monotonic)

    async def record(self) -> None:
        """Have every answer of every model undisturbed."""
        for model in self.models:
            async with connect(self.lab.places[0].address, self.identity) as client:
                choice = self._choice(model)
                self.undisturbed[model] = [await listen(client, p, choice) for p in self.prompts]
                if errors := [one.error for one in self.undisturbed[model] if one.error]:
                    raise AssertionError(f"{model} failed undisturbed: {errors[0]}")
                await client.unload()
        self._began_s = time.monotonic()

    def _choice(self, model: str) -> ModelChoice:
        return ModelChoice(model=model, nodes=self.lab.addresses)

    async def be_client(self) -> None:
        """Be one client after the other, without end."""
        while True:
            model = self.models[self.n_returns // RETURNS_EACH % len(self.models)]
            number = self.chance.randrange(len(self.prompts))
            asking = asyncio.create_task(self._ask(model, number))
            leaves_s = self.chance.random() * LEAVES_S if self.chance.random() < LEAVES else None
            try:
                await asyncio.wait([asking], timeout=leaves_s)
                self.n_left += not asking.done()
            finally:
                asking.cancel()
                await asyncio.wait([asking])
            if not asking.cancelled():
                asking.result()

    async def _ask(self, model: str, number: int) -> None:
        try:
            async with connect(self.lab.places[0].address, self.identity) as client:
                heard = await listen(client, self.prompts[number], self._choice(model))
        except ShardnetError as error:
            heard = Heard(error=error)
        if heard.error is not None:  # most often the other model is still in use
            self.n_refused += 1
            self.errors[str(heard.error)] += 1
            await asyncio.sleep(AGAIN_S)
            return
        self.n_answers += 1
        if difference := heard.difference(self.undisturbed[model][number]):
            self.wrong.append(f"{model}, prompt {number}: {difference}")

    async def change_nodes(self) -> None:
        """Have a node leave, politely or not, or the one that left return: one a minute."""
        away: Place | None = None
        while True:
            await asyncio.sleep(self.minute_s)
            if away is not None:
                await self.lab.start_node(away.number)
                away, self.n_returns = None, self.n_returns + 1
                continue
            away = self.chance.choice(self.lab.places[1:])
            if self.chance.random() < 0.5:
                await self.lab.drain(away.number)
                self.wrong += await self.lab.until_drained()
            if away.process is not None:
                await self.lab.kill(away.number)

    async def sample(self, data: Path) -> None:
        """Write down each minute what the nodes that run hold."""
        while True:
            for place in self.lab.places:
                if place.process is None:
                    continue
                with contextlib.suppress(psutil.Error):
                    sample = taken(place, time.monotonic() - self._began_s)
                    self.samples.append(sample)
                    with data.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(sample)) + "\n")
            await asyncio.sleep(self.minute_s)


def taken(place: Place, at_s: float) -> Sample:
    """Look at what a node holds now."""
    assert place.process is not None
    process = psutil.Process(place.process.pid)
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    return Sample(
        at_s=round(at_s, 1),
        node=place.name,
        resident_bytes=process.memory_info().rss,
        n_descriptors=process.num_fds(),
        n_threads=process.num_threads(),
        disk_bytes=sum(path.stat().st_size for path in files if path.exists()),
    )


async def use(asked: argparse.Namespace, folder: Path) -> list[str]:
    """Use a lab for some hours; return what was wrong."""
    chance = random.Random(asked.seed)
    lab = Lab(folder, asked.nodes, chance)
    models = [made_model(name, folder / "models") for name in MODELS]
    owner = Owner(lab=lab, chance=chance, models=models, minute_s=asked.minute)
    try:
        await lab.start()
        await owner.record()
        work = [owner.be_client() for _ in range(N_CLIENTS)]
        work += [owner.change_nodes(), owner.sample(asked.data)]
        tasks = [asyncio.create_task(one) for one in work]
        done, _ = await asyncio.wait(
            tasks, timeout=3600 * asked.hours, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
    finally:
        owner.wrong += await lab.close()
    print(f"{owner.n_answers} answers, {owner.n_left} clients left, {owner.n_refused} were refused")
    return owner.wrong + verdict(owner.samples, SETTLED_S * asked.minute / 60)


def main(arguments: Sequence[str]) -> int:
    """Use a lab as the command line says; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="scripts/soak --owner", description=__doc__)
    parser.add_argument("hours", type=float, help="how long")
    parser.add_argument("--data", type=Path, default=Path("soak-owner.jsonl"), help="samples")
    parser.add_argument("--seed", type=int, default=28, help="what draws clients and nodes")
    parser.add_argument("--nodes", type=int, default=4, help="how many nodes (default 4)")
    parser.add_argument("--minute", type=float, default=60.0, help="seconds of a minute")
    asked = parser.parse_args(arguments)
    asked.data = asked.data.absolute()
    folder = Path(tempfile.mkdtemp(prefix="owner-"))
    with server() if is_possible() else contextlib.nullcontext():
        wrong = run(use(asked, folder))
    print("\n".join(wrong) or "flat: no node holds more than it did")
    print(f"samples: {asked.data}\nlogs: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
