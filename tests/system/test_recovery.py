"""Nodes that die while requests run: the very same texts go on over those that are left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.servers.proxy import slow_link
from support.system.nodes import Machine, NodeProcess, open_machine

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationResult, RequestState
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.constraints import Constraint
from shardnet.model.kernels import library
from shardnet.output_params import OutputParams
from shardnet.runtime.ring.shard_links import PART_S
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.activity import RecoveryReport
from shardnet.wire.messages.plans import ModelChoice

N_TOKENS = 60
N_FEW = 15
"""Where only bits are asked for, of a stage whose nodes have half a core each."""
N_TIMES = 7
"""How many times as many of a text of which a step may make many, and of the first one, which has
to go on until all have begun.
"""
SLOW_S = 0.02
"""What a link takes, one way, over which texts take seconds: a busy client sees tokens late."""
Request = tuple[str, SamplingParams, dict[str, Any]]

REQUESTS: Sequence[Request] = (
    ("Once upon a time", SamplingParams(), {}),
    (
        "A story about a dog",
        SamplingParams(temperature=0.9, top_p=0.95, seed=3, n_logprobs=2, repetition_penalty=1.2),
        {"outputs": OutputParams(n_prompt_logprobs=1)},
    ),
    ("The cat and the", SamplingParams(temperature=0.7, seed=5), {"speculate": "ngram"}),
    (
        "A list of words: ",
        SamplingParams(temperature=1.0, seed=9),
        {"constraint": Constraint(kind="regex", text="([a-z]+, ){200}")},
    ),
)


async def run_all(
    client: Client,
    choice: ModelChoice,
    at_token: Callable[[int, int], None] = lambda n_tokens, n_resumed: None,
    most_tokens: int | None = None,
) -> tuple[list[tuple[object, ...]], list[list[RequestState]]]:
    """Run all requests at once; return what they gave, and the states that each went through.

    `at_token` is called with the number of tokens of the first one so far, and how often it was
    resumed, once all have begun that are computed at a time. Each has `most_tokens`, or the usual
    number.
    """
    # Only the compiled library gives a replayed row its bits without being asked to; being asked
    # to, requests are computed one after another without it.
    is_asked = library.find_kernels(os.environ) is None
    states: list[list[RequestState]] = [[] for _ in REQUESTS]
    counts = [0 for _ in REQUESTS]
    is_compiled = asyncio.Event()

    async def run(number: int, request: Request) -> GenerationResult:
        prompt, sampling, more = request
        if "constraint" not in more:  # the others would be done where a grammar takes long
            await is_compiled.wait()
        n_times = N_TIMES if number == 0 or "speculate" in more else 1
        events = client.generate(
            prompt,
            sampling,
            model=choice,
            max_tokens=most_tokens or n_times * N_TOKENS,
            ignore_eos=True,
            deterministic=is_asked,
            **more,
        )
        async for event in events:
            if event.error is not None:
                raise event.error
            if not event.token_ids and event.state not in states[number][-1:]:
                states[number].append(event.state)
            counts[number] += len(event.token_ids)
            if counts[number]:
                is_compiled.set()
            if number == 0 and event.token_ids and (is_asked or all(counts)):
                at_token(counts[0], states[0].count(RequestState.RESUMED))
            if event.result is not None:
                return event.result
        raise AssertionError("no result")

    results = await asyncio.gather(*(run(*one) for one in enumerate(REQUESTS)))
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, one.prompt_logprobs)
        for one in results
    ], states


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A node that leads all rings, on a machine of its own.

    `undisturbed` is what it gives alone: of a ring of its own, else all drafts would be had from
    its answer.
    """

    machine: Machine
    node: NodeProcess
    undisturbed: list[tuple[object, ...]]


@contextlib.contextmanager
def open_survivor(folder: Path) -> Iterator[Survivor]:
    """Start it on a machine in `folder`, and have it say alone what rings are to say."""

    async def alone(address: str) -> list[tuple[object, ...]]:
        async with connect(address) as client:
            choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=[address], context=512)
            undisturbed, states = await run_all(client, choice)
            assert RequestState.RECOVERING not in states[0]
            return undisturbed

    with open_machine(folder) as machine:
        [node] = machine.start_nodes("anna")
        undisturbed = asyncio.run(alone(node.address))
        yield Survivor(machine=machine, node=node, undisturbed=undisturbed)


@pytest.fixture(scope="module")
def anna(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Survivor]:
    with open_survivor(tmp_path_factory.mktemp("anna") / "machine") as survivor:
        yield survivor


async def until_over(client: Client, n_before: int, n_recoveries: int) -> list[RecoveryReport]:
    """Return what became of so many recoveries, after some before, when all are over."""
    while True:
        found = (await client.activity()).recoveries[n_before:]
        if len(found) >= n_recoveries and all(one.is_over for one in found):
            return found
        await asyncio.sleep(0.01)


def test_a_ring_that_loses_its_middle_and_its_tail_says_the_same(anna: Survivor) -> None:
    """One after the other while requests run: greedy, sampled, drafted, constrained; and a request
    that names nodes which are gone is served by those that are left.
    """
    nodes = anna.machine.start_nodes("bert", "cleo")
    links = contextlib.ExitStack()  # slow ones: no text ends before the client has seen its tokens
    ports = [node.ready["port"] for node in nodes]
    addresses = [
        anna.node.address,
        *(links.enter_context(slow_link(port, SLOW_S)) for port in ports),
    ]
    choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=addresses, context=512)
    victims = [*nodes]
    n_logged = anna.node.log.count("recovered in ")

    resumed_at = [0, 0, 0]

    def kill(n_tokens: int, n_resumed: int) -> None:
        """Not by tokens alone: a late client sees many at once, before a loss is noticed. Nor at
        once when the first one has resumed: others catch up, and two losses would be one.
        """
        resumed_at[n_resumed] = resumed_at[n_resumed] or n_tokens
        is_time = n_tokens >= (8, resumed_at[1] + 50, 0)[n_resumed]
        if victims and is_time and n_resumed == len(nodes) - len(victims):
            victims.pop(0).process.kill()

    first_error: list[str] = []

    async def main() -> None:
        async with connect(addresses[0]) as client:
            n_before = len((await client.activity()).recoveries)
            disturbed, states = await run_all(client, choice, kill)
            assert disturbed == anna.undisturbed
            assert [state.value for state in states[0]] == [
                *("running", "recovering", "resumed", "recovering", "resumed", "finished")
            ]
            first, second = await until_over(client, n_before, 2)
            assert (first.lost, first.nodes) == (["bert"], ["anna", "cleo"])
            assert (second.lost, second.nodes) == (["cleo"], ["anna"])
            # A fast ring may be done with one before its tokens of the kill are here.
            n_recovered = sum(RequestState.RECOVERING in seen for seen in states)
            assert 1 <= first.n_requests <= n_recovered
            if first.error:  # the tail was lost before all had caught up
                assert "cleo" in first.error
                first_error.append(first.error)
            plan = (await client.activity()).plan
            assert plan is not None
            assert {out.name for out in plan.left_out} == {"bert", "cleo"}
            [result] = await client.complete("Once upon a time", model=choice, max_tokens=5)
            assert result.token_ids == anna.undisturbed[0][0][:5]  # type: ignore[index]

    with links:
        asyncio.run(main())
    for node in nodes:
        node.kill()
    assert anna.node.log.count("recovered in ") - n_logged == (1 if first_error else 2)


@pytest.mark.parametrize("lose", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
def test_a_stage_that_spans_two_nodes_says_the_same_and_outlives_one_of_them(
    anna: Survivor, lose: signal.Signals
) -> None:
    """Every layer is cut over two nodes: bits are those of one node, and one of them dies, or
    stands still amid a gather: that is noticed as on any link, long before a part is overdue.
    """
    [dora] = anna.machine.start_nodes("dora")
    both = ModelChoice(
        model=DEFAULT_MODEL_NAME,
        nodes=[anna.node.address, dora.address],
        nodes_per_stage=2,
        context=512,
    )

    def lose_it(n_tokens: int, _: int) -> None:
        if n_tokens >= N_TOKENS // 3:
            dora.signal(lose)

    async def main() -> None:
        async with connect(anna.node.address) as client:
            n_before = len((await client.activity()).recoveries)
            disturbed, states = await run_all(client, both, lose_it)
            assert disturbed == anna.undisturbed
            assert [state.value for state in states[0]] == [
                *("running", "recovering", "resumed", "finished")
            ]
            [seen] = await until_over(client, n_before, 1)
            assert (seen.lost, seen.nodes, seen.error) == (["dora"], ["anna"], "")
            assert seen.notice_s < PART_S / 2

    asyncio.run(main())
    dora.kill()


def test_a_stage_that_spans_three_unequal_nodes_says_the_same(anna: Survivor) -> None:
    """One has memory for a small part only; heads do not come out even. Then that one has a stage
    of its own behind one that spans the others.
    """
    [emma] = anna.machine.start_nodes("emma")
    [lena] = anna.machine.start_nodes("lena", arguments=["--memory", "16MiB"])
    addresses = [anna.node.address, emma.address, lena.address]
    choice = ModelChoice(
        model=DEFAULT_MODEL_NAME,
        nodes=addresses,
        nodes_per_stage=3,
        context=512,
        dtype="float32",  # as large on every machine
    )
    alone = structs.replace(choice, nodes=addresses[:1], nodes_per_stage=1)

    async def main() -> None:
        async with connect(anna.node.address) as client:
            [stage] = (await client.plan(choice)).stages
            assert [shard.name for shard in stage.shards] == ["emma", "lena"]
            first, second, third = stage.shares
            assert min(first, second) > third
            undisturbed, _ = await run_all(client, alone, most_tokens=N_FEW)
            said, _ = await run_all(client, choice, most_tokens=N_FEW)
            assert said == undisturbed
            two = structs.replace(choice, nodes_per_stage=2)
            stages = (await client.plan(two)).stages
            assert [len(stage.shards) for stage in stages] == [1, 0]
            said, _ = await run_all(client, two, most_tokens=N_FEW)
            assert said == undisturbed

    asyncio.run(main())
    for node in (emma, lena):
        node.kill()


def test_a_model_whose_layers_keep_a_state_recovers_amid_drafts(
    anna: Survivor, tmp_path: Path
) -> None:
    """Looked up, made by the model itself on the head, or forced: texts are those without."""
    config = CASES["qwen3_5_text"] | {"num_hidden_layers": 4}
    folder = str(make_decoder(tmp_path, "qwen3_5_text", **config))
    nodes = anna.machine.start_nodes("emil", "fritz")
    addresses = [anna.node.address, *(node.address for node in nodes)]
    name = "a name so long that one of its forced tokens is drafted on a busy machine, too " * 2
    schema = {"type": "object", "properties": {name: {"enum": [17, 71]}}}
    schema |= {"required": [name], "additionalProperties": False}
    forced = {"constraint": Constraint(kind="json_schema", text=json.dumps(schema))}
    drafted: tuple[dict[str, Any], ...] = ({"speculate": "ngram"}, {"speculate": folder}, forced)

    async def said(
        client: Client, more: dict[str, Any], n_nodes: int, victim: NodeProcess | None = None
    ) -> GenerationResult:
        """Ask a ring of the first nodes, of which the victim dies after some tokens.

        A busy client may see them all at once, when nothing is left to recover: it asks again.
        """
        n_tokens, is_over = 0, victim is None
        async for event in client.generate(
            "Once upon a time",
            SamplingParams(n_logprobs=2),
            model=ModelChoice(model=folder, nodes=addresses[:n_nodes], context=512),
            max_tokens=300,
            ignore_eos="constraint" not in more,
            **more,
        ):
            n_tokens += len(event.token_ids)
            if event.error is not None:
                raise event.error
            if event.result is not None:
                return event.result if is_over else await said(client, more, n_nodes, victim)
            if victim is not None and n_tokens > 20:
                victim.process.kill()
                is_over = True
        raise AssertionError("no result")

    async def main() -> None:
        async with connect(addresses[0]) as client:
            n_before = len((await client.activity()).recoveries)
            plain = [await said(client, more, 1) for more in ({}, {}, forced)]
            looked_up = await said(client, drafted[0], 1)  # the next one drafts from its text
            assert looked_up.token_ids == plain[0].token_ids
            found = [await said(client, drafted[0], 3, nodes[1])]
            rest = (said(client, drafted[1], 2, nodes[0]), said(client, forced, 2))
            found += await asyncio.gather(*rest)
            assert [each.token_ids for each in found] == [each.token_ids for each in plain]
            assert [each.logprobs for each in found] == [each.logprobs for each in plain]
            assert any(each.timing.n_accepted for each in found)  # a busy machine finds some dear
            assert len(await until_over(client, n_before, 2)) == 2

    asyncio.run(main())
    for node in nodes:
        node.kill()
