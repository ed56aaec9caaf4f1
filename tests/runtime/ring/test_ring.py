"""Rings of workers and links: in order, complete, and never waiting on themselves."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import aclosing
from dataclasses import replace
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_llama
from support.needs import needs_library
from support.rings.fake_ring import expected_tokens, fake_ring
from support.rings.rings import NoText, running_ring
from support.rings.stage_chain import even_split
from support.rings.torch_rings import limits_of, load_stages
from support.rings.torch_rings import request as request_of
from support.rings.traced_steps import Trace
from support.soak import cases
from support.source import ROOT

from shardnet.errors import CapacityError, SamplingError, ShardnetError, UsageError
from shardnet.runtime.engine.requests import GenerationRequest, TokenGenerated
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.sampling_params import SamplingParams
from shardnet.tokenizers.detokenizer import TextStream
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.transport.link import LinkOptions

DEADLINE_S = 60.0

PAGE = (ROOT / "docs" / "one_decode_step.md").read_text(encoding="utf-8")
MOST_FILES = {"head": 35, "stage": 22, "last stage": 30}
"""That one decode step runs in. They are to become 25, 14 and few more."""
PLACES = {"all": {0, 1, 2}, "head": {0}, "last": {2}, "not head": {1, 2}, "not last": {0, 1}}
"""The ranks of a ring of three that a row of the page is of."""


def prompt(number: int, n_tokens: int) -> list[int]:
    return [(number * 7 + place * 3) % 50 for place in range(n_tokens)]


@pytest.mark.parametrize("over", ["memory", "tcp"])
@pytest.mark.parametrize(
    ("n_stages", "n_sequences"),
    [(stages, n) for stages in cases([1, 3], [2, 4]) for n in range(1, stages + 2)],
)
def test_the_ring_never_waits_on_itself(n_stages: int, n_sequences: int, over: str) -> None:
    """Queues of one frame, the smallest buffers, frames larger than both; first and later steps."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(n_stages, over=over) as ring:
            prompts = [prompt(number, 9 + number) for number in range(n_sequences)]
            texts = await asyncio.gather(*(ring.generate(ids, 5) for ids in prompts))
            assert texts == [expected_tokens(ids, 5) for ids in prompts]
            again = await ring.generate(prompts[0], 3)
            assert again == expected_tokens(prompts[0], 3)

    asyncio.run(main())


def test_timings_of_every_stage_come_with_the_tokens() -> None:
    async def main() -> None:
        async with fake_ring(3, over="memory") as ring:
            await ring.generate([1, 2, 3], 4)
            assert [stage.rank for stage in ring.timing.per_stage] == [0, 1, 2]
            assert all(stage.compute_ms > 0 for stage in ring.timing.per_stage)

    asyncio.run(main())


def test_a_step_that_a_stage_cannot_compute_fails_its_request_alone() -> None:
    async def main() -> None:
        async with fake_ring(3, over="memory") as ring:
            ring.computes[1].fail_at = 49
            good, bad = await asyncio.gather(
                ring.generate([1, 2, 3], 4), ring.generate([1, 49], 4), return_exceptions=True
            )
            assert isinstance(bad, ShardnetError)
            assert "rank 1 met token 49" in str(bad)
            tokens = expected_tokens([1, 2, 3], 4)
            assert good == tokens or 49 in tokens
            ring.computes[1].fail_at = None
            assert await ring.generate([1, 49], 2) == expected_tokens([1, 49], 2)

    asyncio.run(main())


def test_giving_up_early_frees_the_slot_on_every_stage() -> None:
    async def main() -> None:
        async with fake_ring(3, over="memory") as ring:
            request = GenerationRequest(
                prompt=(1, 2, 3),
                sampling=SamplingParams(),
                max_tokens=500,
                stop_ids=frozenset(),
                text=NoText(),
            )
            async with aclosing(ring.engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, TokenGenerated):
                        break
            assert ring.engine.n_active == 0
            await ring.generate([5, 6], 2)
            assert all(len(compute.owners) <= 1 for compute in ring.computes)

    asyncio.run(main())


def test_bad_requests_take_no_slot() -> None:
    async def main() -> None:
        async with fake_ring(2, over="memory") as ring:
            with pytest.raises(UsageError):
                await ring.generate([], 2)
            with pytest.raises(CapacityError):
                await ring.generate(prompt(0, 1024), 2)
            bad = GenerationRequest(
                prompt=(1,),
                sampling=SamplingParams(temperature=-1),
                max_tokens=1,
                stop_ids=frozenset(),
                text=NoText(),
            )
            with pytest.raises(SamplingError, match="temperature"):
                await anext(ring.engine.generate(bad))
            assert ring.engine.n_active == 0
            assert not any(compute.owners for compute in ring.computes)

    asyncio.run(main())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_link_ends_every_request_with_its_cause(lost: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(3, over="tcp") as ring:
            running = [asyncio.create_task(ring.generate([n], 900)) for n in (1, 2)]
            await ring.generate([3], 2)
            ring.links[2 * lost].abort("pulled out")
            ends = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(end, ShardnetError) for end in ends)
            with pytest.raises(ShardnetError, match="broken"):
                await ring.generate([4], 1)

    asyncio.run(main())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_link_that_is_lost_while_a_prompt_is_read_ends_the_request(lost: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(3, over="tcp") as ring:
            reading = asyncio.create_task(ring.generate(prompt(0, 700), 2))
            await asyncio.sleep(0)
            assert (ring.engine.counters.running, ring.engine.totals.n_steps) == (1, 0)
            ring.links[2 * lost].abort("pulled out")
            with pytest.raises(ShardnetError, match=r"pulled out|closed|broke"):
                await reading

    asyncio.run(main())


def rows_of_page() -> list[tuple[int, bool, str, str]]:
    """Return what the page lists, in order: its rank, whether on the loop, file, function."""
    rows = []
    for section in PAGE.split("\n## ")[1:]:
        on_loop = not section.startswith("Every stage")
        place = {0} if section.startswith("The head") else {1, 2}
        for where, path, name in re.findall(
            r"^\|(?: ([a-z ]+) \|)? `([\w/]+\.py)` \| `([\w.]+)` \|", section, re.M
        ):
            assert bool(where) is not on_loop, name
            rows += [(r, on_loop, path, name) for r in (PLACES[where] if where else place)]
    return rows


def values_of_page() -> set[str]:
    """Return the files that only hold values."""
    return set(re.findall(r"`([\w/]+\.py)`", PAGE[PAGE.index("Not counted") : PAGE.index("\n## ")]))


def files_of_page(rank: int) -> set[str]:
    return {path for of, _, path, _ in rows_of_page() if of == rank}


def test_a_decode_step_has_few_files() -> None:
    assert re.findall(r"^\| ([a-z ]+) \| (\d+) \|", PAGE, re.M) == [
        (who, str(n)) for who, n in MOST_FILES.items()
    ]
    assert [len(files_of_page(rank)) for rank in range(3)] == list(MOST_FILES.values())


def test_the_functions_of_a_decode_step_exist() -> None:
    for _, _, path, name in rows_of_page():
        module = import_module(f"shardnet.{path.removesuffix('.py').replace('/', '.')}")
        found = reduce(getattr, name.split("."), module)
        assert found.__module__ == module.__name__, f"{name} is not of {path}"


async def decode(folder: Path, trace: Trace) -> None:
    """Run a ring of three stages, and trace 20 of its decode steps."""
    stages = load_stages(folder, even_split(4, 3))
    scheduler = Scheduler(limits_of(stages, chunk_rows=16, room_blocks=64))
    tokenizer = Tokenizer.load(folder)
    wanted = replace(
        request_of(prompt(0, 9), 60, SamplingParams(temperature=1.0, seed=1)),
        text=TextStream(tokenizer),
        stops_by_text=False,
    )
    ring = running_ring(
        stages.computes,
        scheduler,
        vocab_size=stages.vocab_size,
        over="tcp",
        options=LinkOptions(),
        is_alert=True,
    )
    async with asyncio.timeout(DEADLINE_S), ring as (engine, links):
        trace.links, n_tokens = links, 0
        async for event in engine.generate(wanted):
            n_tokens += isinstance(event, TokenGenerated)
            trace.is_recording = 8 <= n_tokens < 28
    tokenizer.close()


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="threads write to sockets otherwise there")
def test_a_decode_step_runs_what_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that order, and nothing in another file."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # with one the loop computes
    trace, values = Trace(), values_of_page()
    with trace.watching():
        asyncio.run(decode(make_llama(tmp_path), trace))
    for rank, calls in sorted(trace.calls.items()):
        assert {call.path for call in calls} - values == files_of_page(rank), rank
        assert {call.path for call in calls if call.caller in values} <= values
        for on_loop, first in (
            (True, "AsyncioLink.buffer_updated"),
            (False, "StageWorker._process"),
        ):
            ran = [(call.path, call.function) for call in calls if call.on_loop is on_loop]
            ran = ran[[function for _, function in ran].index(first) :]
            listed = [row[2:] for row in rows_of_page() if row[:2] == (rank, on_loop)]
            assert set(listed) <= set(ran)
            assert listed == sorted(listed, key=ran.index)
