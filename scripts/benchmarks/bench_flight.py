"""Benchmark one request whose drafts fly over two nodes, beside drafts that wait and none.

The drafter knows the text, which is the model's own, and errs at a given rate; or drafts are looked
up, and the text is a given one (--script). One node alone takes part with --alone: plain, and with
the same drafts. Figures are medians over rounds of one run, in which the contestants take turns. A
delay of the links is made at the head: answers are held back for two.

With --drafters DIR, in whose folders are drafters of scripts/train_drafters.py: every kind of
drafts, waiting and in flight, on prose, edits of code, JSON, chat and what the bundled model says
itself. A cell has the times of plain decoding, of the same drafts that wait, and of one node with
the same drafts. What the drafters draft at every place is recorded, then replayed over stages whose
time is simulated; with --nodes N the bundled model goes on behind the prompts on N real nodes too.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench_drafts import records
from bench_engine import PROMPT_MARK, TEXTS, Forcing
from bench_rig import Stream, follow, make_prompt, open_ring, request
from bench_ring import random_1b
from drafted_rings import measure
from drafters.recording import Recorded, Text
from timed_flights import WaitingNgrams, table

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import Speculation
from shardnet.runtime.ring.pipeline import Pipeline, StepAnswer
from shardnet.runtime.scheduling.drafting import DraftSource, NgramDrafts
from shardnet.runtime.stage.compute import StepFailed
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.transport.loop import run

Make = Callable[[], DraftSource]
Contestant = tuple[Engine, Make | None]
"""What computes, and what drafts for it."""


class Erring:
    """Knows the text, and errs at a rate, at the same places whoever asks."""

    kinds: Sequence[int] = [0] * 64

    def __init__(self, text: Sequence[int], right: float, *, flies: bool) -> None:
        self.flies = flies
        self._drafts = [
            token if random.Random(f"{right} {place}").random() < right else token ^ 1
            for place, token in enumerate(text)
        ]

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Return True."""
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return what comes, or nearly."""
        start = len(tokens) + len(ahead)
        return self._drafts[start : start + limit]

    def close(self) -> None:
        """Do nothing."""


def delay_answers(delay_s: float) -> None:
    """Hold all answers back at the head for as long as two links take."""
    real = Pipeline.answer

    def later(pipeline: Pipeline, answer: StepAnswer | StepFailed) -> None:
        asyncio.get_running_loop().call_later(2 * delay_s, real, pipeline, answer)

    Pipeline.answer = later  # type: ignore[method-assign, assignment]


async def main() -> None:
    """Measure and print one JSON object."""
    options = _parse_options()
    if options.drafters is not None:
        await _trained(options)
        return
    if options.delay_ms:
        delay_answers(options.delay_ms / 1000)
    async with AsyncExitStack() as stack:
        rings = [
            await stack.enter_async_context(
                open_ring(options.checkpoint, n_stages, options.threads)
            )
            for n_stages in (options.stages, *([1] if options.alone else []))
        ]
        found = await (_scripts if options.script else _rates)(rings, options)
    print(json.dumps({"stages": options.stages, "delay_ms": options.delay_ms, **found}, indent=2))


async def _trained(options: argparse.Namespace) -> None:
    """Measure trained drafters, and print a table or one JSON object."""
    texts: dict[str, Text] = {}
    found: dict[str, dict[str, Recorded]] = {}
    for name, kind, text, recorded in records(options.drafters, options.most_tokens):
        texts[kind] = text
        found.setdefault(kind, {})[name] = recorded
    rows = table(texts, found, options.timed or [1, 2, 4], options.row or [0.016, 0.05, 0.2])
    prompts = {kind: text.ids[: text.n_prompt] for kind, text in texts.items() if "own" not in kind}
    nodes = {n: await measure(options.drafters / "mtp", n, prompts, options) for n in options.nodes}
    if options.json:
        print(json.dumps({"simulated": rows, "nodes": nodes}, indent=2))
        return
    _print_table(rows)
    for n_nodes, kinds in nodes.items():
        named = (
            {"nodes": n_nodes, "text": kind, "drafts": name, **cells}
            for kind, some in kinds.items()
            for name, cells in some.items()
        )
        _print_table([*named])


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        cells = (
            ", ".join(map(str, cell)) if isinstance(cell, list) else str(cell)
            for cell in row.values()
        )
        print(f"| {' | '.join(cells)} |")


async def _rates(rings: Sequence[Engine], options: argparse.Namespace) -> dict[str, Any]:
    """Measure drafters that err at given rates, on what the model says by itself."""
    prompt = make_prompt(3, 16, 1000)
    said = (await follow(rings[0], request(prompt, options.tokens))).tokens
    text = [*prompt, *said]
    report = {}
    for right in options.rate:
        waits = functools.partial(Erring, text, right, flies=False)
        flies = functools.partial(Erring, text, right, flies=True)
        contestants = _contestants(rings, waits, flies)
        report[f"right {right:g}"] = await _by_turns(contestants, prompt, options)
    return report


async def _scripts(rings: Sequence[Engine], options: argparse.Namespace) -> dict[str, Any]:
    """Measure look-up on given texts: what is sampled is replaced by the text's tokens."""
    tokenizer = Tokenizer.load(DEFAULT_MODEL_PATH)
    report = {}
    for path in options.script:
        parts = path.read_text(encoding="utf-8").partition(PROMPT_MARK)
        prompt, said = (tokenizer.encode(part, bos="off") for part in (parts[0], parts[2]))
        options.tokens = min(len(said), options.most_tokens)
        contestants = _contestants(rings, WaitingNgrams, NgramDrafts)
        with _forced(rings, [*prompt, *said]):
            report[path.stem] = await _by_turns(contestants, prompt, options)
    tokenizer.close()
    return report


def _contestants(rings: Sequence[Engine], waits: Make, flies: Make) -> dict[str, Contestant]:
    ring, *alone = rings
    found: dict[str, Contestant] = {
        "plain": (ring, None),
        "waits": (ring, waits),
        "flies": (ring, flies),
    }
    for node in alone:
        found |= {"alone, plain": (node, None), "alone, drafts": (node, waits)}
    return found


@contextmanager
def _forced(rings: Sequence[Engine], text: Sequence[int]) -> Iterator[None]:
    real = [engine._scheduler for engine in rings]
    for engine in rings:
        engine._scheduler = Forcing(engine._scheduler, text)  # type: ignore[assignment]
    yield
    for engine, scheduler in zip(rings, real, strict=True):
        engine._scheduler = scheduler


async def _by_turns(
    contestants: dict[str, Contestant], prompt: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    streams: dict[str, list[Stream]] = {name: [] for name in contestants}
    costs: dict[str, list[float]] = {}
    flown = {name: [0, 0] for name in contestants}
    for _ in range(options.rounds):
        for name, (engine, make) in contestants.items():
            totals = engine.totals
            speculation = Speculation(make_draft_source=lambda wake, make=make: make())  # type: ignore[misc]
            asked = request(prompt, options.tokens, speculation=speculation if make else None)
            before = totals.n_flown, totals.n_wasted
            streams[name].append(await follow(engine, asked))
            flown[name] = [totals.n_flown - before[0], totals.n_wasted - before[1]]
            cost = engine._step_cost
            costs[name] = [cost.extra(1), cost.slowest, cost.company, cost.plain_s]
    return {
        name: {
            "flown_and_wasted": flown[name],
            "row_slowest_company_plain_s": [round(figure, 3) for figure in costs[name]],
            "tok_s": round(statistics.median(one.tok_s for one in some), 2),
            **{
                f"to {other}": _ratio(some, streams[other])
                for other in streams
                if other not in ("flies", name)
            },
            "accepted": round(
                sum(s.n_accepted for s in some) / max(1, sum(s.n_drafted for s in some)), 3
            ),
            "same_text": all(one.tokens == streams["plain"][0].tokens for one in some),
        }
        for name, some in streams.items()
    }


def _ratio(some: Sequence[Stream], others: Sequence[Stream]) -> float:
    pairs = zip(some, others, strict=True)
    return round(statistics.median(one.tok_s / other.tok_s for one, other in pairs), 3)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench flight")
    parser.add_argument("--checkpoint", type=Path, help="instead of the 1.1B shape")
    parser.add_argument("--bundled", action="store_true", help="the bundled model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="one node alone beside them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, action="append", help="repeatable")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each link, one way")
    parser.add_argument("--script", type=Path, action="append", help="a text to force; repeatable")
    parser.add_argument("--scripts", action="store_true", help="all texts of scripts/benchmarks")
    parser.add_argument("--most-tokens", type=int, default=400, help="of a forced text")
    parser.add_argument("--drafters", type=Path, metavar="DIR", help="compare trained drafters")
    parser.add_argument("--timed", type=int, action="append", help="simulated stages; repeatable")
    parser.add_argument("--row", type=float, action="append", help="what a row more costs, of one")
    parser.add_argument("--nodes", type=int, action="append", default=[], help="real ones, too")
    parser.add_argument("--also", action="append", default=[], help="a --speculate for real nodes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.rate = options.rate or [0.6, 0.8, 0.9]
    if options.scripts:
        options.script = sorted(TEXTS.glob("*.txt"))
    if options.bundled:
        options.checkpoint = DEFAULT_MODEL_PATH
    if options.drafters is not None:
        options.drafters = options.drafters.absolute()
    else:
        options.checkpoint = (options.checkpoint or random_1b()).absolute()
    return options


if __name__ == "__main__":
    run(main())
