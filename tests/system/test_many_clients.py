"""Sixteen clients at once on three node processes with little memory, who come, leave and vanish.

In the suite each case goes on for seconds, in scripts/soak as long as one says.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_llama
from support.soak import cases, soak_s
from support.system.nodes import Crew, open_machine

from shardnet.api import (
    ActiveRequest,
    Client,
    GenerationEvent,
    GenerationOptions,
    ModelChoice,
    Prompt,
    RequestState,
    SamplingParams,
)
from shardnet.api.client import connect
from shardnet.errors import DeadlineError
from shardnet.wire.messages.diagnostics import RingLoad

SOAK_S = soak_s(1)
N_CLIENTS = 16
N_TEXTS = 12
WAYS = ("stay", "close", "cancel", "deadline", "list", "vanish")
USUAL_WAYS = ("stay",) * 5 + WAYS
PATIENCE_S = 120.0
"""How long one request may take before it counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in the dtype that it is served in."""

    choice: ModelChoice
    deterministic: bool


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Three nodes with room for a few sequences."""
    with open_machine(tmp_path_factory.mktemp("crowd") / "machine") as machine:
        nodes = machine.start_nodes("dick", "emma", "fred", arguments=["--memory", "44MB"])
        yield Crew(machine=machine, nodes=nodes)


@pytest.fixture(params=cases(["float32"], ["bfloat16"]))
def case(request: pytest.FixtureRequest, crew: Crew, tmp_path: Path) -> Case:
    """A model whose keys and values weigh more than it does: 1.5 MiB a block of two layers."""
    dtype = request.param
    folder = make_llama(
        tmp_path / "model",
        dtype=getattr(torch, dtype),
        head_dim=64 if dtype == "float32" else 128,
        num_key_value_heads=6,
    )
    choice = ModelChoice(
        model=str(folder),
        nodes=[node.address for node in crew.nodes],
        layers=[(0, 1), (1, 2), (2, 4)],
        dtype=dtype,
    )
    return Case(choice=choice, deterministic=dtype == "bfloat16")


def make_prompts(case: Case) -> list[Prompt]:
    """Prompts that share beginnings, of all lengths; every other one is sampled."""
    chance = random.Random(7)
    stem = [chance.randrange(2, 300) for _ in range(300)]
    prompts = []
    for number in range(N_TEXTS):
        own = [chance.randrange(2, 300) for _ in range(chance.randrange(1, 100))]
        options: GenerationOptions = {
            "max_tokens": chance.choice([1, 4, 12, 30]),
            "ignore_eos": True,
            "deterministic": case.deterministic,
            "priority": chance.choice([0, 0, 1]),
        }
        sampling = SamplingParams(temperature=0.9 * (number % 2), seed=3)
        content = stem[: chance.choice([0, 0, 100, 250, 300])] + own
        prompts.append(Prompt(content, sampling=sampling, sample_index=number, options=options))
    return prompts


class Guest:
    """A client that asks, and now and then leaves in one of the ways there are."""

    def __init__(
        self, number: int, case: Case, prompts: Sequence[Prompt], texts: Sequence[tuple[int, ...]]
    ) -> None:
        self._chance = random.Random(number)
        self._ways = [WAYS[number % len(WAYS)]]  # so that all come, however slow the machine is
        self._case = case
        self._prompts = prompts
        self._texts = texts
        self.ends: Counter[str] = Counter()

    async def stay(self, until_s: float) -> None:
        while self._ways or time.monotonic() < until_s:
            async with asyncio.timeout(PATIENCE_S + SOAK_S), AsyncExitStack() as stack:
                client = await stack.enter_async_context(connect(self._case.choice.nodes[0]))
                while self._ways or time.monotonic() < until_s:
                    way = self._ways.pop() if self._ways else self._chance.choice(USUAL_WAYS)
                    await getattr(self, f"_{way}")(client)
                    self.ends[way] += 1
                    if way == "vanish":
                        break

    def _any(self) -> int:
        return self._chance.randrange(len(self._prompts))

    def _check(self, number: int, events: Sequence[GenerationEvent]) -> None:
        """What came is what the prompt says, as far as it came, and it ended once at most."""
        tokens = tuple(token for event in events for token in event.token_ids)
        assert tokens == self._texts[number][: len(tokens)]
        finals = [event for event in events if event.state.is_end]
        assert len(finals) <= 1
        if finals and finals[0].result is not None:
            assert finals[0].result.token_ids == self._texts[number]
        for event in events:
            self.ends[event.state.value] += event.state in (
                RequestState.QUEUED,
                RequestState.PAUSED,
                RequestState.FAILED,
            )

    async def _stay(self, client: Client) -> None:
        number = self._any()
        events = [
            event async for event in client.generate(self._prompts[number], model=self._case.choice)
        ]
        assert events[-1].state is RequestState.FINISHED
        self._check(number, events)

    async def _close(self, client: Client) -> None:
        number, leave_after, events = self._any(), self._chance.randrange(1, 20), []
        asking = client.generate(self._prompts[number], model=self._case.choice)
        async with aclosing(asking):
            async for event in asking:
                events.append(event)
                if len(events) == leave_after:
                    break
        self._check(number, events)

    async def _cancel(self, client: Client) -> None:
        asking = asyncio.create_task(self._stay(client))
        for _ in range(self._chance.randrange(40)):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled() or asking.exception() is None

    async def _deadline(self, client: Client) -> None:
        number = self._any()
        prompt, deadline_s = self._prompts[number], self._chance.choice([0.0, 0.01, 0.1])
        events = []
        asked = client.generate([prompt], model=self._case.choice, deadline_s=deadline_s)
        async for event in asked:
            events.append(event)
            assert event.error is None or isinstance(event.error, DeadlineError)
        assert events[-1].state.is_end
        self._check(number, events)

    async def _list(self, client: Client) -> None:
        """Three prompts at once, one of which is ended from outside."""
        numbers = [self._any() for _ in range(3)]

        def should_stop(active: Sequence[ActiveRequest]) -> list[int]:
            return [g.request_id for g in active if g.index == 1 and len(g.token_ids) >= 5]

        prompts = [self._prompts[number] for number in numbers]
        found: list[list[GenerationEvent]] = [[], [], []]
        async for event in client.generate(
            prompts, model=self._case.choice, should_stop=should_stop
        ):
            found[event.index].append(event)
        for number, events in zip(numbers, found, strict=True):
            assert events[-1].state in (RequestState.FINISHED, RequestState.CANCELLED)
            self._check(number, events)

    async def _vanish(self, client: Client) -> None:
        """Drop the connection in the middle of a text."""
        number, events = self._any(), []
        async for event in client.generate([self._prompts[number]], model=self._case.choice):
            events.append(event)
            if len(events) == 3:
                client._control.link.abort("the machine went to sleep")
        assert events[-1].state.is_end
        self._check(number, events)


async def one_by_one(
    client: Client, case: Case, prompts: Sequence[Prompt]
) -> list[tuple[int, ...]]:
    return [
        result.token_ids
        for prompt in prompts
        for result in await client.complete(prompt, model=case.choice)
    ]


async def until_idle(client: Client) -> RingLoad:
    """Ask until nobody is served any more; the nodes hear of the last one's leaving meanwhile."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            load = (await client.status(with_peers=False)).load
            assert load is not None
            if not (load.running or load.waiting or load.paused):
                return load


@pytest.mark.timeout(600 + 2 * SOAK_S)
def test_sixteen_clients_come_and_go(case: Case) -> None:
    async def main() -> None:
        prompts = make_prompts(case)
        async with connect(case.choice.nodes[0]) as client:
            texts = await one_by_one(client, case, prompts)
            guests = [Guest(number, case, prompts, texts) for number in range(N_CLIENTS)]
            until_s = time.monotonic() + SOAK_S
            await asyncio.gather(*(guest.stay(until_s) for guest in guests))
            ends: Counter[str] = sum((guest.ends for guest in guests), Counter())
            print(f"{case.choice.dtype}: {dict(sorted(ends.items()))}")
            assert {*WAYS} <= ends.keys()
            assert ends["queued"] > 0
            assert await one_by_one(client, case, prompts[:4]) == texts[:4]
            load = await until_idle(client)
            assert load.used_blocks == load.warm_blocks
            await client.unload()

    asyncio.run(main())
