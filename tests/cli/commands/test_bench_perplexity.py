"""The pieces of a text that `bench --perplexity` scores, and what it says of them; speeds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import UsageError
from shardnet.wire.messages.plans import PlanReply
from shardnet_cli.commands.bench import BenchOptions, Quality, _Bench, cut_text, quality_words

QUALITY = Quality(
    text="novel.txt",
    perplexity=5.28431,
    bits_per_byte=0.81236,
    n_tokens=440,
    n_pieces=2,
    most_tokens=301,
    n_bytes=1800,
    took_s=3.21,
)
PLAN = PlanReply(
    request=1,
    model="/models/small.gguf",
    model_id="ab" * 32,
    dtype="float32",
    wire_dtype="float32",
    context=512,
    stages=[],
    why="because",
)


@given(st.text(alphabet="ab \n", max_size=300), st.integers(min_value=1, max_value=40))
def test_pieces_are_the_whole_text_and_no_longer_than_asked(text: str, n_characters: int) -> None:
    pieces = cut_text(text, n_characters)
    joined = "".join(pieces)
    assert text.startswith(joined)
    assert not text[len(joined) :].strip()
    assert all(0 < len(piece) <= n_characters for piece in pieces)


def test_pieces_end_behind_a_space_where_there_is_one() -> None:
    assert cut_text("one two three", 8) == ["one two ", "three"]
    assert cut_text("one two three", 7) == ["one ", "two ", "three"]
    assert cut_text("unbroken text", 5) == ["unbro", "ken ", "text"]
    assert cut_text("short", 100) == ["short"]
    assert cut_text(" \n ", 100) == []


def test_a_line_says_text_tokens_pieces_and_form() -> None:
    told = quality_words(QUALITY, PLAN)
    assert told == (
        "perplexity 5.284, 0.8124 bits per byte of novel.txt: 440 tokens in 2 pieces of up to 301; "
        "/models/small.gguf in float32, weights as stored (3.2 s)"
    )
    quantised = quality_words(
        replace(QUALITY, n_tokens=1, n_pieces=1), msgspec.structs.replace(PLAN, quant="int8")
    )
    assert "1 token in 1 piece of" in quantised
    assert "in float32 with int8 weights (" in quantised


@pytest.mark.parametrize("n_generated", [1, 5])
def test_no_speed_is_told_of_tokens_that_the_context_had_no_room_for(n_generated: int) -> None:
    async def generate(*_: Any) -> Any:
        timing = SimpleNamespace(ttft_s=1.0, decode_tok_s=5.0 if n_generated > 1 else 0.0)
        return [SimpleNamespace(usage=SimpleNamespace(n_generated=n_generated), timing=timing)]

    job: Any = SimpleNamespace(options=BenchOptions(prompt=510, tokens=9), as_json=True)
    bench = _Bench(job, job)
    bench._plan, bench._generate = PLAN, generate  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="a context of 512 has no room for 510 tokens and 9 more"):
        asyncio.run(bench.measure(1))
