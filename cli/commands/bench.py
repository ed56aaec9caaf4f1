"""`shardnet bench`: how fast a ring is, and how well its model predicts a text."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from shardnet.api.client import GREEDY
from shardnet.errors import UsageError
from shardnet.files import read_text
from shardnet.output_params import NO_OUTPUTS, OutputParams
from shardnet.wire.messages.plans import PlanReply

from ..finding.target import Target, open_target
from ..flags.lazy_group import examples
from ..flags.options import Access, Json, flag, reading, takes_groups
from ..flags.ring_options import OnlineRingOptions, Wanted
from ..output.exit_codes import counted, one_line, run_command, say, write_json, write_out
from ..output.generation_output import joule_words
from ..output.plan_text import dtype_words
from ..output.progress import LoadBars

if TYPE_CHECKING:
    from shardnet.api.events import GenerationResult

AT_ONCE: Final = 16
"""Pieces of a text that are scored in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Throughput of `sequences` concurrent sequences, in tokens per second of all together.

    `ttft_s` is the mean time to the first token, `prefill_tok_s` the rate at which all prompts were
    processed, `joules_per_token` what the nodes took meanwhile, None where that is not known.
    """

    sequences: int
    n_prompt: int
    n_tokens: int
    ttft_s: float
    prefill_tok_s: float
    decode_tok_s: float
    joules_per_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Perplexity per scored token, and bits per byte of the text.

    Of `n_pieces` pieces all tokens but the first are scored, `n_tokens` in all; the longest piece
    has `most_tokens`, which is the context of its last one.
    """

    text: str
    perplexity: float
    bits_per_byte: float
    n_tokens: int
    n_pieces: int
    most_tokens: int
    n_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is measured: the flags, in the order in which --help shows them."""

    prompt: int = flag(256, "--prompt N", "Tokens per prompt.", min=2)
    tokens: int = flag(64, "--tokens N", "Tokens to generate per sequence.", min=2)
    parallel: list[int] | None = flag(
        None,
        "--parallel N",
        "Sequences at once; may be given several times. Default: 1 and 4.",
        min=1,
    )
    rounds: int = flag(2, "--rounds N", "Times to measure; the best one counts.", min=1)
    static: bool = flag(
        False,
        "--static",
        "Run sequences in fixed sets of 16, each in lockstep: the same steps each time.",
    )
    perplexity: str = flag(
        "", "--perplexity FILE", "Score this text instead: perplexity and bits per byte."
    )
    piece: int = flag(
        2000, "--piece N", "Characters per piece; each piece is scored on its own.", min=100
    )


@examples(
    "shardnet bench --model ~/models/Qwen3-4B",
    "shardnet bench --local 2 --parallel 1 --parallel 8",
    "shardnet bench --perplexity chapter.txt --quant int8",
)
@takes_groups
def bench(
    *, ring: OnlineRingOptions, options: BenchOptions, access: Access, as_json: Json = False
) -> None:
    """Measure the ring: time to the first token and tokens per second, or --perplexity of a text.

    The text is cut into pieces, each of which is a prompt of its own: all its tokens but the first
    are scored. Compare results of the same file and --piece only.
    """
    job = _Job(
        wanted=ring.wanted(access).adapted(),
        options=options,
        pieces=_pieces(options.perplexity, options.piece) if options.perplexity else [],
        as_json=as_json,
    )
    run_command(_run(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    wanted: Wanted
    options: BenchOptions
    pieces: Sequence[str]
    as_json: bool


def cut_text(text: str, n_characters: int) -> list[str]:
    """Cut a text into pieces of at most `n_characters`, behind spaces where there are any.

    Joined they are the text, without what is blank at its end and fills a piece by itself.
    """
    pieces = []
    while text.strip():
        end = len(text)
        if end > n_characters:
            end = text.rfind(" ", 1, n_characters) + 1 or n_characters
        pieces.append(text[:end])
        text = text[end:]
    return pieces


def _pieces(file: str, n_characters: int) -> list[str]:
    """Cut a file's text into pieces; see `cut_text`.

    Raises typer.BadParameter for a file that cannot be read, is not UTF-8 or holds no text.
    """
    with reading(file, "--perplexity"):
        text = read_text(Path(file))
    pieces = cut_text(text, n_characters)
    if not pieces:
        raise typer.BadParameter(f"{file} holds no text", param_hint="--perplexity")
    return pieces


async def _run(job: _Job) -> None:
    async with open_target(job.wanted) as target:
        bench = _Bench(job, target)
        if job.pieces:
            quality = await bench.score()
            bench.show({"perplexity": asdict(quality)})
            if not job.as_json:
                write_out(quality_words(quality, bench.plan))
            return
        speeds = [
            await bench.measure(n_sequences) for n_sequences in job.options.parallel or [1, 4]
        ]
        bench.show({"speeds": [asdict(speed) for speed in speeds]})


def quality_words(quality: Quality, plan: PlanReply) -> str:
    """Describe what was scored, of which text, and the model's dtypes."""
    stored = "" if plan.quant else ", weights as stored"
    return one_line(
        f"perplexity {quality.perplexity:.3f}, {quality.bits_per_byte:.4f} bits per byte of "
        f"{quality.text}: {counted(quality.n_tokens, 'token')} in "
        f"{counted(quality.n_pieces, 'piece')} of up to {quality.most_tokens}; "
        f"{plan.model} in {dtype_words(plan)}{stored} ({quality.took_s:.1f} s)"
    )


class _Bench:
    """Measures through one client; keeps the plan of the first request for --json."""

    def __init__(self, job: _Job, target: Target) -> None:
        self._job = job
        self._target = target
        self._plan: PlanReply | None = None
        self._numbers = itertools.count()

    @property
    def plan(self) -> PlanReply:
        """The plan of the first request."""
        assert self._plan is not None
        return self._plan

    async def measure(self, n_sequences: int) -> Speed:
        """Run `n_sequences` at once, repeatedly; return the round that decoded fastest."""
        if self._plan is None:
            await self._generate([self._prompt()], 2)  # loads the model
        speeds = [await self._round(n_sequences) for _ in range(self._job.options.rounds)]
        best = max(speeds, key=lambda speed: speed.decode_tok_s)
        if not self._job.as_json:
            write_out(
                f"{counted(n_sequences, 'sequence'):>13}: "
                f"first token after {best.ttft_s * 1e3:.0f} ms "
                f"({best.prefill_tok_s:.0f} prompt tokens/s), "
                f"{best.decode_tok_s:.1f} tokens/s{joule_words(best.joules_per_token)}"
            )
        return best

    async def _round(self, n_sequences: int) -> Speed:
        prompts = [self._prompt() for _ in range(n_sequences)]
        results = await self._generate(prompts, self._job.options.tokens)
        if any(result.usage.n_generated < self._job.options.tokens for result in results):
            raise UsageError(
                f"a context of {self.plan.context} has no room for {self._job.options.prompt} "
                f"tokens and {self._job.options.tokens} more",
                remedy="give a smaller --prompt or --tokens, or a larger --context",
            )
        told = [result.timing.joules_per_token for result in results]
        joules = [each for each in told if each is not None]
        decode_s = max((self._job.options.tokens - 1) / r.timing.decode_tok_s for r in results)
        return Speed(
            sequences=n_sequences,
            n_prompt=self._job.options.prompt,
            n_tokens=self._job.options.tokens,
            ttft_s=sum(result.timing.ttft_s for result in results) / n_sequences,
            prefill_tok_s=n_sequences
            * self._job.options.prompt
            / max(result.timing.ttft_s for result in results),
            decode_tok_s=n_sequences * (self._job.options.tokens - 1) / decode_s,
            joules_per_token=statistics.fmean(joules) if joules else None,
        )

    async def score(self) -> Quality:
        """Score every piece of the text."""
        began = time.perf_counter()
        total, n_tokens, most_tokens = 0.0, 0, 0
        for start in range(0, len(self._job.pieces), AT_ONCE):
            some = self._job.pieces[start : start + AT_ONCE]
            for result in await self._generate(some, 0, OutputParams(n_prompt_logprobs=0)):
                scored = [entry.logprob for entry in result.prompt_logprobs or () if entry]
                total += math.fsum(scored)
                n_tokens += len(scored)
                most_tokens = max(most_tokens, len(result.prompt_token_ids))
            if not self._job.as_json:
                say(f"{start + len(some)} of {counted(len(self._job.pieces), 'piece')}")
        n_bytes = sum(len(piece.encode()) for piece in self._job.pieces)
        return Quality(
            text=self._job.options.perplexity,
            perplexity=math.exp(-total / max(1, n_tokens)),
            bits_per_byte=-total / math.log(2) / n_bytes,
            n_tokens=n_tokens,
            n_pieces=len(self._job.pieces),
            most_tokens=most_tokens,
            n_bytes=n_bytes,
            took_s=time.perf_counter() - began,
        )

    def show(self, figures: dict[str, object]) -> None:
        """Print plan and figures as one JSON object, with --json."""
        if self._job.as_json and self._plan is not None:
            plan = self._plan
            write_json(
                {
                    "model": plan.model,
                    "dtype": plan.dtype,
                    "quant": plan.quant or "none",
                    "kv_dtype": plan.kv_dtype,
                    "stages": [{"name": s.name, "layers": list(s.layers)} for s in plan.stages],
                    **figures,
                }
            )

    def _prompt(self) -> list[int]:
        """Make a prompt that shares no prefix with an earlier one: no KV cache is reused."""
        number = next(self._numbers)
        return [
            3 + (number + 7 * place * (1 + number)) % 97
            for place in range(self._job.options.prompt)
        ]

    async def _generate(
        self, prompts: Sequence[list[int] | str], n_tokens: int, outputs: OutputParams = NO_OUTPUTS
    ) -> list[GenerationResult]:
        with LoadBars() as bars:

            def on_plan(plan: PlanReply) -> None:
                if self._plan is None:
                    bars.expect(plan)
                self._plan = plan

            results = []
            events = self._target.client.generate(
                list(prompts),
                GREEDY,
                model=self._target.choice,
                on_plan=on_plan,
                on_loading=bars.update,
                max_tokens=n_tokens,
                ignore_eos=True,
                outputs=outputs,
                lockstep=self._job.options.static,
            )
            async with contextlib.aclosing(events):
                async for event in events:
                    if event.error is not None:
                        raise event.error
                    if event.result is not None:
                        results.append(event.result)
        return results
