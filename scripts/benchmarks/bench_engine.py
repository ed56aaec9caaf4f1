"""Benchmark the engine: many sequences, long prompts beside streams, speculation, second turns.

Every ratio compares figures of one run, the contestants taking turns. The defaults are those of
docs/benchmarks.md: the TinyLlama-1.1B shape in bfloat16, 2 stages, 1 compute thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench_rig import Alone, Stream, follow, follow_all, make_prompt, open_ring, request
from bench_ring import random_1b
from shape_files import SHAPES, write_shape

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.requests import Speculation
from shardnet.runtime.scheduling.drafting import NgramDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import (
    Outcome,
    SendStep,
    SequenceRequest,
    TokenSampled,
)
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.executor import Executor
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.transport.loop import run
from shardnet.types import Epoch, SequenceId, StepId

TEXTS = Path(__file__).with_name("texts")
PROMPT_MARK = "\n=====\n"
"""Parts a forced text's prompt from what is said."""


class Bench:
    """The checkpoint, the layers alone and the settings."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.checkpoint: Path = arguments.checkpoint
        self.threads: int = arguments.threads
        self.rounds: int = arguments.rounds
        self.tokens: int = arguments.tokens
        self.turn_tokens: int = arguments.turn_tokens
        self.company_tokens: list[int] = arguments.company_tokens
        self.scripts: list[Path] = arguments.script or sorted(TEXTS.glob("*.txt"))
        self.executor = Executor("alone")
        self._alone: Alone | None = None

    async def alone(self) -> Alone:
        """Load the whole model for the contestants without a ring."""
        if self._alone is None:
            self._alone = await self.executor.run(lambda: Alone(self.checkpoint, self.threads))
        return self._alone

    def prompts(self, n_prompts: int, n_tokens: int, turn: int) -> list[list[int]]:
        """Prompts that no earlier turn has used."""
        vocab = 32_000 if self._alone is None else self._alone.vocab_size
        return [make_prompt(turn * 1000 + i, n_tokens, vocab) for i in range(n_prompts)]


async def many(bench: Bench) -> dict[str, Any]:
    """Throughput against the number of sequences, and the share of time the stages compute."""
    alone = await bench.alone()
    report: dict[str, Any] = {"alone": {}, "ring": {}}
    for n_rows in (1, 8, 16):
        steps, products = [], []
        for _ in range(bench.rounds):
            steps.append(await bench.executor.run(partial(alone.step_s, n_rows, 40, 6)))
            products.append(await bench.executor.run(partial(alone.products_s, n_rows, 4)))
        report["alone"][n_rows] = {
            "tok_s": round(n_rows / statistics.median(steps), 2),
            "products_tok_s": round(n_rows / statistics.median(products), 2),
        }
    alone.free()
    for n_stages in (1, 2, 3):
        async with open_ring(bench.checkpoint, n_stages, bench.threads) as engine:
            rows = report["ring"][n_stages] = {}
            for n_sequences in (1, 2, 4, 8, 16, 32):
                turns = [
                    await _together(engine, bench.prompts(n_sequences, 8, turn), bench.tokens)
                    for turn in range(n_sequences * 10, n_sequences * 10 + bench.rounds)
                ]
                rows[n_sequences] = {
                    "tok_s": round(statistics.median(tok_s for tok_s, _ in turns), 2),
                    "utilisation": round(statistics.median(share for _, share in turns), 3),
                }
    two, single = report["ring"][2], report["alone"]
    report["ratios"] = {
        "32 sequences to one stage at 16 rows": round(two[32]["tok_s"] / single[16]["tok_s"], 3),
        "16 sequences to one stage at 8 rows": round(two[16]["tok_s"] / single[8]["tok_s"], 3),
        "32 sequences to twice the bare products at 16 rows": round(
            two[32]["tok_s"] / (2 * single[16]["products_tok_s"]), 3
        ),
        "16 sequences to twice the bare products at 8 rows": round(
            two[16]["tok_s"] / (2 * single[8]["products_tok_s"]), 3
        ),
        "1 sequence to one process": round(two[1]["tok_s"] / single[1]["tok_s"], 3),
    }
    return report


async def _together(
    engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int
) -> tuple[float, float]:
    """Tokens per second and utilisation while all of the sequences decode."""
    streams = [Stream(time.perf_counter()) for _ in prompts]
    window: list[tuple[float, int, float]] = []

    def look() -> None:
        done = sum(len(stream.times_s) for stream in streams)
        busy_s = sum(engine.totals.compute_us.values()) / 1e6 / len(engine.totals.compute_us)
        window.append((time.perf_counter(), done, busy_s))

    def on_token() -> None:
        if (not window and all(len(stream.times_s) > 1 for stream in streams)) or (
            len(window) == 1 and any(len(stream.times_s) == n_tokens for stream in streams)
        ):
            look()

    await asyncio.gather(
        *(
            follow(engine, request(prompt, n_tokens), stream, on_token)
            for prompt, stream in zip(prompts, streams, strict=True)
        )
    )
    (start_s, n_start, busy_start), (end_s, n_end, busy_end) = window
    took_s = end_s - start_s
    return (n_end - n_start) / took_s, (busy_end - busy_start) / took_s


async def prompt_beside(bench: Bench) -> dict[str, Any]:
    """What a prompt of 2000 tokens costs eight running streams, and they cost it."""
    async with open_ring(bench.checkpoint, 2, bench.threads) as engine:
        turns = []
        for turn in range(1, bench.rounds + 1):
            long, alone_long = bench.prompts(2, 2000, 700 + turn)
            alone = await follow(engine, request(alone_long, 1))
            streams = [Stream(time.perf_counter()) for _ in range(8)]
            under_way = asyncio.Event()

            def on_token(streams: list[Stream] = streams, set_off: Any = under_way.set) -> None:
                if all(len(stream.times_s) > 20 for stream in streams):
                    set_off()

            following = [
                asyncio.create_task(follow(engine, request(prompt, 160), stream, on_token))
                for prompt, stream in zip(bench.prompts(8, 32, 800 + turn), streams, strict=True)
            ]
            await under_way.wait()
            began = time.perf_counter()
            beside = await follow(engine, request(long, 1))
            ended = time.perf_counter()
            await asyncio.gather(*following)
            quiet = [gap for s in streams for gap in s.gaps_s(s.times_s[4], began)]
            during = [gap for s in streams for gap in s.gaps_s(began, ended)]
            turns.append(
                {
                    "median": statistics.median(during) / statistics.median(quiet),
                    "p99": _p99(during) / statistics.median(quiet),
                    "p99_to_p99": _p99(during) / _p99(quiet),
                    "ttft": beside.ttft_s / alone.ttft_s,
                    "quiet_ms": 1000 * statistics.median(quiet),
                    "ttft_alone_s": alone.ttft_s,
                }
            )
    return {key: round(statistics.median(t[key] for t in turns), 3) for key in turns[0]}


async def company(bench: Bench) -> dict[str, Any]:
    """A text beside a prompt over one and two nodes, in small shapes as Q4_K_M files.

    All times are to those alone in the same turn: of the text between tokens, of the prompt to its
    first token.
    """
    folder = Path(tempfile.gettempdir()) / "shardnet-bench-shapes"
    folder.mkdir(exist_ok=True)
    report = {}
    for shape in COMPANY_SHAPES:
        file = folder / f"{shape.name}-{shape.n_layers}.gguf"
        if not file.exists():
            write_shape(shape, file)
        for n_stages in (1, 2):
            ring = open_ring(file, n_stages, bench.threads, most_positions=32_768)
            async with ring as engine:
                await follow(engine, request(bench.prompts(1, 300, 1500)[0], 20))
                for n_tokens in bench.company_tokens:
                    turns = [
                        await _in_company(bench, engine, n_tokens, turn)
                        for turn in range(1, bench.rounds + 1)
                    ]
                    key = f"{shape.name}, {n_stages} nodes, {n_tokens} tokens"
                    report[key] = {
                        name: round(statistics.median(turn[name] for turn in turns), 3)
                        for name in turns[0]
                    }
    return report


async def _in_company(bench: Bench, engine: Engine, n_tokens: int, turn: int) -> dict[str, float]:
    """Time a prompt alone, then a text alone and beside another prompt as long."""
    short, alone_long, long = bench.prompts(3, n_tokens, 1600 + 10 * turn + n_tokens)
    alone = await follow(engine, request(alone_long, 1))
    text, under_way = Stream(time.perf_counter()), asyncio.Event()

    def on_token() -> None:
        if len(text.times_s) == 60:
            under_way.set()

    asked = request(short[:32], 20_000)
    following = asyncio.create_task(follow(engine, asked, text, on_token))
    await under_way.wait()
    began = time.perf_counter()
    beside = await follow(engine, request(long, 1))
    ended = time.perf_counter()
    following.cancel()
    await asyncio.wait([following])
    engine.drop_warm()
    quiet_s = statistics.median(text.gaps_s(text.times_s[9], began))
    during = text.gaps_s(began, ended)
    return {
        "text_ms": 1000 * quiet_s,
        "beside_ms": 1000 * statistics.median(during),
        "median": statistics.median(during) / quiet_s,
        "worst": max(during) / quiet_s,
        "prompt_s": alone.ttft_s,
        "beside_s": beside.ttft_s,
        "prompt": beside.ttft_s / alone.ttft_s,
    }


COMPANY_SHAPES = (
    replace(
        SHAPES["Llama-8B"],
        name="Llama-0.1B",
        n_layers=12,
        hidden=768,
        vocab=32_000,
        heads=(12, 4, 64),
        inner=2048,
    ),
    replace(
        SHAPES["Llama-8B"],
        name="Llama-1.1B",
        n_layers=22,
        hidden=2048,
        vocab=32_000,
        heads=(32, 4, 64),
        inner=5632,
    ),
)


async def prefill(bench: Bench) -> dict[str, Any]:
    """Prefill of 2000 tokens on two stages against one stage at its best chunk size."""
    alone = await bench.alone()
    chunks: dict[int, list[float]] = {rows: [] for rows in (128, 256, 512)}
    ring = []
    async with open_ring(bench.checkpoint, 2, bench.threads) as engine:
        for turn in range(1, bench.rounds + 1):
            [prompt] = bench.prompts(1, 2000, 900 + turn)
            for rows, times in chunks.items():
                times.append(await bench.executor.run(partial(alone.prefill_s, prompt, rows)))
            ring.append((await follow(engine, request(prompt, 1))).ttft_s)
    alone.free()
    best = min(chunks, key=lambda rows: statistics.median(chunks[rows]))
    return {
        "alone_tok_s": {rows: round(2000 / statistics.median(t), 1) for rows, t in chunks.items()},
        "ring_tok_s": round(2000 / statistics.median(ring), 1),
        "ratio": round(
            statistics.median(a / b for a, b in zip(chunks[best], ring, strict=True)), 3
        ),
    }


async def second_turn(bench: Bench) -> dict[str, Any]:
    """Time to the first token of a chat's second turn, against the same rows alone."""
    async with open_ring(bench.checkpoint, 2, bench.threads) as engine:
        warm, cold = [], []
        for turn in range(1, bench.rounds + 1):
            first, other, more = bench.prompts(3, 500, 1000 + turn)
            said = await follow(engine, request(first, 16))
            again = await follow(engine, request([*first, *said.tokens, *more[:64]], 1))
            warm.append(again.ttft_s)
            # The same rows at the same position: a prompt that is there already, and 64 more.
            await follow(engine, request([*other, *said.tokens], 1))
            rows = await follow(engine, request([*other, *said.tokens, *more[100:164]], 1))
            cold.append(rows.ttft_s)
            full = await follow(engine, request([*more[200:], *first[:280]], 1))
    return {
        "second_turn_s": round(statistics.median(warm), 4),
        "same_rows_s": round(statistics.median(cold), 4),
        "whole_prompt_s": round(full.ttft_s, 4),
        "ratio": round(statistics.median(w / c for w, c in zip(warm, cold, strict=True)), 3),
    }


async def hybrid_turn(bench: Bench) -> dict[str, Any]:
    """Time to the first token of a long chat's second turn: a hybrid beside a dense model.

    The turn goes on behind the answer, or, as where a template leaves out what was thought, behind
    all of the prompt but its last tokens. Both models have the widths of Qwen3.5-4B, 4 layers.
    """
    hybrid = SHAPES["Qwen3.5-4B"]
    dense = replace(hybrid, name="Qwen3.5-4B-dense", architecture="qwen3", rotated=0, more={})
    folder = Path(tempfile.gettempdir()) / "shardnet-bench-shapes"
    folder.mkdir(exist_ok=True)
    n_tokens = bench.turn_tokens
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        engines = {}
        for shape in (hybrid, dense):
            file = write_shape(shape, folder / f"{shape.name}-{shape.n_layers}.gguf")
            ring = open_ring(file, 1, bench.threads, most_positions=n_tokens + 512)
            engines[shape.architecture] = await stack.enter_async_context(ring)
        for turn in range(1, bench.rounds + 1):
            first, other, more = bench.prompts(3, n_tokens, 1300 + turn)
            for name, engine in engines.items():
                whole = await follow(engine, request(first, 16))
                behind = [*first, *whole.tokens, *more[:64]]
                answered = await follow(engine, request(behind, 1))
                engine.drop_warm()
                await follow(engine, request(other, 16))
                thought = await follow(engine, request([*other[:-4], *more[:64]], 1))
                engine.drop_warm()
                for kind, stream in zip(KINDS, (whole, answered, thought), strict=True):
                    times.setdefault(f"{name}_{kind}_s", []).append(stream.ttft_s)
    report = {key: round(statistics.median(each), 4) for key, each in times.items()}
    for kind in KINDS:
        both = zip(times[f"qwen35_{kind}_s"], times[f"qwen3_{kind}_s"], strict=True)
        report[f"{kind}_ratio"] = round(statistics.median(h / d for h, d in both), 3)
    return report


KINDS = ("whole", "behind_answer", "without_thoughts")


async def shared_prefix(bench: Bench) -> dict[str, Any]:
    """Sixteen requests at once that begin with the same 2,000 tokens, against one such request."""
    ratios, lasts, blocks = [], [], []
    async with open_ring(bench.checkpoint, 2, bench.threads) as engine:
        for turn in range(1, bench.rounds + 1):
            system, other = bench.prompts(2, 2000, 1200 + turn)
            alone = await follow(engine, request([*other, 7], 1))
            engine.drop_warm()
            streams = [Stream(time.perf_counter()) for _ in range(16)]

            def on_token(streams: list[Stream] = streams) -> None:
                if all(stream.times_s for stream in streams):
                    blocks.append(engine.counters.used_blocks)

            await asyncio.gather(
                *(
                    follow(engine, request([*system, 100 + place], 64), stream, on_token)
                    for place, stream in enumerate(streams)
                )
            )
            first = [stream.ttft_s for stream in streams]
            ratios.append(statistics.mean(first) / alone.ttft_s)
            lasts.append(max(first) / alone.ttft_s)
    return {
        "mean_first_token_to_alone": round(statistics.median(ratios), 3),
        "last_first_token_to_alone": round(statistics.median(lasts), 3),
        "blocks_of_sixteen": max(blocks),
        "blocks_of_sixteen_unshared": 16 * 9,
    }


async def deterministic(bench: Bench) -> dict[str, Any]:
    """What --deterministic costs, with one stream and with eight."""
    report = {}
    async with open_ring(bench.checkpoint, 2, bench.threads) as engine:
        for n_sequences in (1, 8):
            ratios = []
            for turn in range(1, bench.rounds + 1):
                rates = []
                for exact in (False, True):
                    prompts = bench.prompts(n_sequences, 300, 1100 + 10 * turn + exact)
                    began = time.perf_counter()
                    await follow_all(
                        engine, [request(p, bench.tokens, deterministic=exact) for p in prompts]
                    )
                    rates.append(n_sequences * bench.tokens / (time.perf_counter() - began))
                ratios.append(rates[1] / rates[0])
            report[f"{n_sequences} sequences"] = round(statistics.median(ratios), 3)
    return report


async def speculation(bench: Bench) -> dict[str, Any]:
    """Look-up on given texts: the sampled tokens are replaced by the text's, all else is real."""
    report = {}
    tokenizer = Tokenizer.load(DEFAULT_MODEL_PATH)
    async with open_ring(bench.checkpoint, 2, bench.threads) as engine:
        for path in bench.scripts:
            prompt, _, said = path.read_text(encoding="utf-8").partition(PROMPT_MARK)
            texts = [tokenizer.encode(part, bos="off") for part in (prompt, said)]
            report[path.stem] = await _forced(engine, texts[0], texts[1], bench.rounds)
    async with open_ring(DEFAULT_MODEL_PATH, 2, bench.threads) as engine:
        opening = tokenizer.encode("It is a truth universally acknowledged", bos="auto")
        plain = await follow(engine, request(opening, 300))
        guessed = await follow(engine, request(opening, 300, speculation=LOOK_UP))
        report["bundled model, its own greedy text"] = _spec_row([plain], [guessed])
    tokenizer.close()
    return report


async def hybrid_drafts(bench: Bench) -> dict[str, Any]:
    """Look-up on an editing task by a hybrid, and by a dense model, each against itself without.

    Both have the widths of Qwen3.5-4B, 8 layers. The text is forced, all else is real; what the
    models themselves would say at each place is compared with what they would without drafts.
    """
    hybrid = replace(SHAPES["Qwen3.5-4B"], n_layers=8)
    dense = replace(hybrid, name="Qwen3.5-4B-dense", architecture="qwen3", rotated=0, more={})
    folder = Path(tempfile.gettempdir()) / "shardnet-bench-shapes"
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer.load(DEFAULT_MODEL_PATH)
    parts = (TEXTS / "edit.txt").read_text(encoding="utf-8").partition(PROMPT_MARK)
    prompt, said = (tokenizer.encode(part, bos="off") for part in (parts[0], parts[2]))
    tokenizer.close()
    report = {}
    for shape in (hybrid, dense):
        file = write_shape(shape, folder / f"{shape.name}-{shape.n_layers}.gguf")
        streams: dict[bool, list[Stream]] = {False: [], True: []}
        choices: list[dict[int, int]] = []
        async with open_ring(file, 1, bench.threads) as engine:
            forcing = Forcing(engine._scheduler, [*prompt, *said])
            engine._scheduler = forcing  # type: ignore[assignment]
            for _ in range(bench.rounds):
                for drafts, some in streams.items():
                    forcing.own = {}
                    asked = request(prompt, len(said), speculation=LOOK_UP if drafts else None)
                    some.append(await follow(engine, asked))
                    choices.append(forcing.own)
                    engine.drop_warm()
            engine._scheduler = forcing._real
        row = _spec_row(streams[False], streams[True])
        plain = statistics.median(stream.tok_s for stream in streams[False])
        same = all(own == choices[0] for own in choices)
        report[shape.architecture] = row | {"plain_tok_s": round(plain, 2), "same_choices": same}
    return report


LOOK_UP = Speculation(make_draft_source=lambda wake: NgramDrafts())


async def _forced(
    engine: Engine, prompt: list[int], said: list[int], rounds: int
) -> dict[str, float]:
    script = [*prompt, *said]
    plain, guessed = [], []
    real, engine._scheduler = engine._scheduler, Forcing(engine._scheduler, script)  # type: ignore[assignment]
    for turn in range(rounds):
        begin = [5 + turn, *prompt[1:]]  # another first token: no slot holds this prompt yet
        plain.append(await follow(engine, request(begin, len(said))))
        begin = [105 + turn, *prompt[1:]]
        guessed.append(await follow(engine, request(begin, len(said), speculation=LOOK_UP)))
    engine._scheduler = real
    return _spec_row(plain, guessed)


def _spec_row(plain: Sequence[Stream], guessed: Sequence[Stream]) -> dict[str, float]:
    return {
        "tokens": len(guessed[0].tokens),
        "acceptance": round(
            sum(s.n_accepted for s in guessed) / max(1, sum(s.n_drafted for s in guessed)), 3
        ),
        "tok_s": round(statistics.median(s.tok_s for s in guessed), 2),
        "speedup": round(
            statistics.median(g.tok_s / p.tok_s for g, p in zip(guessed, plain, strict=True)), 3
        ),
    }


class Forcing:
    """A scheduler whose sampled tokens are replaced by those of `script`, by position.

    `own` are those that were sampled behind the text, by the position that they are behind.
    """

    def __init__(self, real: Scheduler, script: Sequence[int]) -> None:
        self._real = real
        self._script = script
        self.own: dict[int, int] = {}

    def on_tokens(self, step: StepId, token_ids: Sequence[int]) -> list[Outcome]:
        """Take what the script says in the place of `token_ids`."""
        last = len(self._script) - 1
        positions = [
            position
            for group, _, _ in self._real._steps[step]
            for position in range(
                group.position + group.n_rows - group.n_sampled, group.position + group.n_rows
            )
        ]
        forced = [self._script[min(position + 1, last)] for position in positions]
        outcomes = self._real.on_tokens(step, forced)
        for each in outcomes:
            if isinstance(each, TokenSampled):
                self.own[positions[each.row]] = token_ids[each.row]
        return outcomes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def scheduler(bench: Bench) -> dict[str, Any]:
    """The scheduler's own time per step at 32 sequences of 2 stages, without any ring."""
    one = Scheduler(
        RingLimits(
            epoch=Epoch(1),
            n_stages=2,
            room_blocks=1000,
            context=4096,
            max_slots=64,
            limits=StepLimits(),
        )
    )
    for number, prompt in enumerate(bench.prompts(32, 200, 1)):
        one.submit(
            SequenceRequest(sequence_id=SequenceId(number), prompt=tuple(prompt), max_tokens=1000)
        )
    in_flight, times = [], []
    for _ in range(1500):
        began = time.perf_counter()
        instructions = one.next_instructions()
        times.append(time.perf_counter() - began)
        in_flight += [i.batch for i in instructions if isinstance(i, SendStep)]
        batch = in_flight.pop(0)
        began = time.perf_counter()
        one.on_tokens(batch.step, [7] * batch.n_sampled)
        times[-1] += time.perf_counter() - began
    return {"us_per_step": round(1e6 * statistics.median(times[500:]), 1)}


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


EXPERIMENTS: dict[str, Callable[[Bench], Awaitable[dict[str, Any]]]] = {
    "scheduler": scheduler,
    "many": many,
    "prompt-beside": prompt_beside,
    "company": company,
    "prefill": prefill,
    "second-turn": second_turn,
    "hybrid-turn": hybrid_turn,
    "hybrid-drafts": hybrid_drafts,
    "shared-prefix": shared_prefix,
    "speculation": speculation,
    "deterministic": deterministic,
}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench engine")
    parser.add_argument("--checkpoint", type=Path, help="default: the TinyLlama-1.1B shape, random")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="comma-separated")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per stage")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--turn-tokens", type=int, default=8000, help="of hybrid-turn's prompt")
    parser.add_argument(
        "--company-tokens", type=int, nargs="+", default=[1500, 4000], help="of company's prompts"
    )
    parser.add_argument("--script", type=Path, action="append", help="a text to force; repeatable")
    arguments = parser.parse_args()
    arguments.checkpoint = (arguments.checkpoint or random_1b()).absolute()
    bench = Bench(arguments)

    async def measure() -> dict[str, Any]:
        return {name: await EXPERIMENTS[name](bench) for name in arguments.only.split(",")}

    print(json.dumps(run(measure()), indent=2))


if __name__ == "__main__":
    main()
