"""A node that computes what is no number, or not of its model: it is named and done without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.cluster.machines import Machine, machines
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt
from support.soak import cases

from shardnet.api.client import Client, connect
from shardnet.errors import NumericalError, ShardnetError
from shardnet.model.kernels.codec import pack_rows
from shardnet.runtime.ring.links import LinkSink
from shardnet.runtime.stage.compute import Activations, Samples, StageOutput, StepComputed
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.sampling_params import SamplingParams
from shardnet.types import MicroBatch, WireDType
from shardnet.wire.framing.frames import Frame
from shardnet.wire.messages.plans import ModelChoice

N_TOKENS, DEADLINE_S = 40, 120.0
LONG = 33
"""Rows of the prompt with which the model of the second test overflows."""
SAMPLED = SamplingParams(temperature=0.8, seed=4)
PROMPTS = [random_prompt(n, 300, seed=n) for n in (9, 20)]
Given = Activations | Samples


def of_value(
    value: float, n_rows: int | None = None
) -> Callable[[MicroBatch, Activations], Activations]:
    """Return what makes a number of each group of a step another one; of those of `n_rows` only."""

    def changed(batch: MicroBatch, given: Activations) -> Activations:
        rows, end = torch.ones(batch.n_rows, given.width), 0
        for group in batch.groups:
            end += group.n_rows
            if n_rows in (None, group.n_rows):
                rows[end - 1, -1] = value
        return replace(given, payload=pack_rows(rows.to(torch.bfloat16), given.dtype))

    return changed


WRONG: dict[str, Callable[[MicroBatch, Activations], Activations]] = {
    "not a number": of_value(float("nan")),
    "infinite": of_value(float("-inf")),
    "too large together": lambda batch, given: replace(
        given, payload=pack_rows(torch.full((batch.n_rows, given.width), 3e38), given.dtype)
    ),
    "too wide": lambda batch, given: replace(given, width=given.width + 2),
    "too few": lambda batch, given: replace(given, payload=bytes(given.payload)[:-2]),
    "another dtype": lambda batch, given: replace(
        given, dtype=WireDType.FLOAT16, payload=bytes(2 * batch.n_rows * given.width)
    ),
}
USUAL = ["not a number", "too few", "another dtype"]


async def say(
    client: Client,
    choice: ModelChoice,
    prompts: list[list[int]],
    at_token: Callable[[], None] = lambda: None,
) -> list[list[int] | ShardnetError]:
    """Generate from all prompts; each gives its tokens, or its error. `at_token` is called once."""
    made: list[list[int]] = [[] for _ in prompts]
    errors: list[ShardnetError | None] = [None] * len(prompts)
    called = False
    events = client.generate(prompts, SAMPLED, model=choice, max_tokens=N_TOKENS, ignore_eos=True)
    async with aclosing(events):
        async for event in events:
            made[event.index] += event.token_ids
            errors[event.index] = errors[event.index] or event.error
            if not called and min(map(len, made)) > 4:
                called = True
                at_token()
    return [error or tokens for error, tokens in zip(errors, made, strict=True)]


def perturb(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[TorchCompute, MicroBatch, Given], Given],
) -> None:
    """Have every stage give `change` of what it computes."""
    plain = TorchCompute.compute

    def compute(self: TorchCompute, batch: MicroBatch, activations: Activations | None) -> Given:
        return change(self, batch, plain(self, batch, activations))

    monkeypatch.setattr(TorchCompute, "compute", compute)


@asynccontextmanager
async def ring(
    folder: Path, *names: str
) -> AsyncIterator[tuple[Sequence[Machine], Callable[..., Awaitable[Any]], list[Any]]]:
    """Nodes in a ring; what asks it, and what it says of PROMPTS undisturbed."""
    model = make_llama(folder / "model")
    async with (
        asyncio.timeout(DEADLINE_S),
        machines(folder, *names) as nodes,
        connect(nodes[0].node.address) as client,
    ):
        choice = ModelChoice(model=str(model), nodes=[one.node.address for one in nodes])
        ask = partial(say, client, choice)
        yield nodes, ask, await ask(PROMPTS)


def used(node: Machine) -> set[str]:
    """Name the nodes of the ring that a node leads."""
    lead = node.node.head.latest
    assert lead is not None
    return {each.name for each in lead.plan.ring_nodes}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", cases(USUAL, sorted(WRONG.keys() - set(USUAL))))
def test_a_node_that_computes_wrong_values_is_left_out_and_texts_go_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = WRONG[kind]
    told = "its payload has" if kind in ("too wide", "too few") else "computed wrong values"

    async def main() -> None:
        async with ring(tmp_path, "anna", "bert", "cleo") as ([anna, bert, _], ask, whole):
            loaded = bert.node.stage.host.loaded
            assert loaded is not None

            def begin() -> None:
                perturb(
                    monkeypatch,
                    lambda compute, batch, given: (
                        wrong(batch, given)
                        if compute is loaded.compute and isinstance(given, Activations)
                        else given
                    ),
                )

            assert await ask(PROMPTS, begin) == whole
            assert used(anna) == {"anna", "cleo"}
            assert any("bert" in line and told in line for line in anna.lines)

    asyncio.run(main())


@pytest.mark.usefixtures("unmeasured")
def test_a_node_that_takes_steps_and_keeps_them_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and says that it has completed them: its neighbour waits in vain."""
    sends = LinkSink._frames

    async def main() -> None:
        async with ring(tmp_path, "anna", "bert", "cleo") as ([anna, bert, _], ask, whole):
            membership = bert.node.stage.host.membership
            assert membership is not None

            def swallowed(self: LinkSink, output: StageOutput) -> Sequence[Frame]:
                is_kept = self._link in membership._links and isinstance(output, StepComputed)
                return () if is_kept else sends(self, output)

            def begin() -> None:
                monkeypatch.setattr(LinkSink, "_frames", swallowed)

            assert await ask(PROMPTS, begin) == whole
            assert used(anna) == {"anna", "cleo"}
            assert any("bert" in line and "none came" in line for line in anna.lines)

    asyncio.run(main())


@pytest.mark.usefixtures("unmeasured")
def test_what_every_node_computes_wrong_is_the_model_s_and_ends_the_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def main() -> None:
        async with ring(tmp_path, "anna", "bert", "cleo", "dora") as (nodes, ask, whole):
            heads = nodes[0].node.stage.host
            overflow = of_value(float("nan"), LONG)

            def change(compute: TorchCompute, batch: MicroBatch, given: Given) -> Given:
                is_long = any(group.n_rows == LONG for group in batch.groups)
                is_head = heads.loaded is not None and compute is heads.loaded.compute
                if is_long and not is_head and isinstance(given, Activations):
                    return overflow(batch, given)
                return given

            perturb(monkeypatch, change)
            running = asyncio.create_task(ask(PROMPTS))
            [error] = await ask([random_prompt(LONG, 300, seed=3)])
            assert isinstance(error, NumericalError)
            assert "no number" in error.message
            assert await running == whole
            lead = nodes[0].node.head.latest
            assert lead is not None
            assert not nodes[0].node.recovery.left_out(lead)

    asyncio.run(main())
