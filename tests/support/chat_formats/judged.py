"""The fixtures of canitoolcall, read by the parsers of shardnet/api/chat_formats.

A fixture has the ids of an output and its whole text. Which text each id has is made up here, but
for tokens that are marks: those are known, and stand where the text has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, split
from canitoolcall.fixtures import Fixture
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from shardnet.api.chat_formats.choice import FORMATS, ChatFormat
from shardnet.api.chat_formats.marks import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    TokenText,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.chat_formats.reader import HOLD

QWEN = {151657: "<tool_call>", 151658: "</tool_call>", 151667: "<think>", 151668: "</think>"}
QWEN_35 = {248058: "<tool_call>", 248059: "</tool_call>", 248068: "<think>", 248069: "</think>"}
GLM = {
    151350: "<think>",
    151351: "</think>",
    151352: "<tool_call>",
    151353: "</tool_call>",
    151356: "<arg_key>",
    151357: "</arg_key>",
    151358: "<arg_value>",
    151359: "</arg_value>",
}
GLM_5 = {
    154841: "<think>",
    154842: "</think>",
    154843: "<tool_call>",
    154844: "</tool_call>",
    154847: "<arg_key>",
    154848: "</arg_key>",
    154849: "<arg_value>",
    154850: "</arg_value>",
}
DEEPSEEK = {
    128806: "<｜tool▁calls▁begin｜>",
    128807: "<｜tool▁calls▁end｜>",
    128808: "<｜tool▁call▁begin｜>",
    128809: "<｜tool▁call▁end｜>",
    128814: "<｜tool▁sep｜>",
}
DSML = {128793: "｜DSML｜", 128798: "<think>", 128799: "</think>"}
DSML_4 = {128825: "｜DSML｜", 128821: "<think>", 128822: "</think>"}
KIMI = {
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163606: "<think>",
    163607: "</think>",
}
KIMI_3 = {163587: "<|open|>", 163588: "<|close|>", 163589: "<|sep|>"}
MISTRAL = {
    9: "[TOOL_CALLS]",
    32: "[ARGS]",
    33: "[CALL_ID]",
    34: "[THINK]",
    35: "[/THINK]",
}
LLAMA = {128006: "<|start_header_id|>", 128007: "<|end_header_id|>", 128010: "<|python_tag|>"}
LLAMA_4 = {200016: "<|python_start|>", 200017: "<|python_end|>"}
GEMMA = {
    48: "<|tool_call>",
    49: "<tool_call|>",
    52: '<|"|>',
    100: "<|channel>",
    101: "<channel|>",
}
HARMONY = {
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200002: "<|return|>",
}

KNOWN: Sequence[tuple[str, str, Mapping[int, str]]] = (
    ("Qwen3-Coder", "qwen-xml", QWEN),
    ("Qwen3.", "qwen-xml", QWEN_35),
    ("Qwen3-", "hermes", QWEN),
    ("GLM-5", "glm", GLM_5),
    ("GLM-", "glm", GLM),
    ("DeepSeek-V3.2", "deepseek-dsml", DSML),
    ("DeepSeek-V4", "deepseek-dsml", DSML_4),
    ("DeepSeek-V3", "deepseek", DEEPSEEK),
    ("Kimi-K3", "kimi-k3", KIMI_3),
    ("Kimi-K2", "kimi-k2", KIMI),
    ("Mistral-7B", "mistral", {5: "[TOOL_CALLS]"}),
    ("tral-", "mistral", MISTRAL),
    ("Llama-4", "llama", LLAMA_4),
    ("Llama-3", "llama", LLAMA),
    ("gemma-4", "gemma", GEMMA),
    ("gpt-oss", "harmony", HARMONY),
)
"""Part of a model's name, the format that it writes, and the ids of its marks."""

NO_SPECIAL = {"<think>", "</think>", "<tool_call>", "</tool_call>"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge says of one fixture: the worst of all parses, and why."""

    status: str
    why: str
    got: ParseResult


def format_of(fixture: Fixture) -> tuple[ChatFormat, Mapping[int, TokenText]]:
    """The format that a fixture is written in, and its model's marks."""
    model = fixture.models[0].partition("/")[2]
    for part, name, ids in KNOWN:
        if part in model or (part == "tral-" and "stral" in model):
            found = next(each for each in FORMATS if each.name == name)
            return found, {n: TokenText(text, text not in NO_SPECIAL) for n, text in ids.items()}
    raise AssertionError(f"{fixture.id}: no format for {model}")


def prompt_tail(fixture: Fixture) -> str:
    """What a prompt for this output ends with."""
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    family = family_for(fixture)
    assert family is not None
    model = next(each for each in family.reference_models if each.repo == fixture.models[0])
    return model.default_generation_prompt or ""


def events_of(fixture: Fixture) -> list[tuple[int, str]]:
    """Each id with the text that it completes."""
    _, tokens = format_of(fixture)
    ids = list(fixture.output_token_ids or ())
    marks = [(place, tokens[n].text) for place, n in enumerate(ids) if n in tokens]
    found: list[tuple[int, str]] = []
    done, read = 0, 0
    for (place, text), start in zip(marks, _places(fixture, marks, len(ids)), strict=True):
        found += _spread(ids[done:place], fixture.raw_output[read:start])
        found.append((ids[place], text))
        done, read = place + 1, start + len(text)
    found += _spread(ids[done:], fixture.raw_output[read:])
    assert "".join(text for _, text in found) == fixture.raw_output
    return found


def has_spelled_marks(fixture: Fixture) -> bool:
    """Whether the text has a mark that is written with other tokens."""
    _, tokens = format_of(fixture)
    ids = [n for n in fixture.output_token_ids or () if n in tokens]
    return sum(fixture.raw_output.count(text.text) for text in tokens.values()) > len(ids)


def _places(fixture: Fixture, marks: list[tuple[int, str]], n_ids: int) -> list[int]:
    """Where in the text each mark stands.

    Where the text has more of them, written with other tokens, those are taken that leave about as
    many characters for each of the tokens between them.
    """
    raw = fixture.raw_output
    texts = {text for _, text in marks}
    found = sorted((place, text) for text in texts for place in _all(raw, text))
    wanted = [text for _, text in marks]
    if [text for _, text in found] == wanted:
        return [place for place, _ in found]
    best: tuple[float, list[int]] | None = None
    n_left = len(found) - len(wanted)
    for left in combinations(range(len(found)), n_left):
        kept = [each for number, each in enumerate(found) if number not in left]
        if [text for _, text in kept] == wanted:
            cost = _uneven(raw, kept, marks, n_ids)
            if best is None or cost < best[0]:
                best = cost, [place for place, _ in kept]
    assert best is not None, fixture.id
    return best[1]


def _uneven(
    raw: str, kept: list[tuple[int, str]], marks: list[tuple[int, str]], n_ids: int
) -> float:
    """How far the lengths of the text between marks are from 3.5 characters for each token."""
    cost, read, done = 0.0, 0, 0
    for (start, text), (place, _) in zip(kept, marks, strict=True):
        cost += _off(start - read, place - done)
        read, done = start + len(text), place + 1
    return cost + _off(len(raw) - read, n_ids - done)


def _off(n_characters: int, n_tokens: int) -> float:
    if n_tokens == 0 or n_characters < n_tokens / 4:
        return 1000.0 * (n_characters > 0 or n_tokens > 0)
    return float(abs(n_characters - 3.5 * n_tokens))


def _all(raw: str, text: str) -> Iterator[int]:
    place = raw.find(text)
    while place >= 0:
        yield place
        place = raw.find(text, place + 1)


def _spread(ids: Sequence[int], text: str) -> list[tuple[int, str]]:
    """Give each id about as much of the text; the last completes the rest."""
    size = -(-len(text) // len(ids)) if ids else 0
    return [(n, text[i * size : (i + 1) * size]) for i, n in enumerate(ids)]


def parse(
    fixture: Fixture, groups: Sequence[Sequence[tuple[int, str]]], hold: int | None
) -> ParseResult:
    """Parse an output that comes in these groups of tokens; put the pieces together as clients."""
    written, tokens = format_of(fixture)
    parser = written.parser(
        tokens=tokens, tools=fixture.to_dict()["tools"], prompt_tail=prompt_tail(fixture), hold=hold
    )
    deltas: list[OutputDelta] = []
    for group in groups:
        deltas += parser.feed([n for n, _ in group], "".join(text for _, text in group))
    return joined([*deltas, *parser.finish()])


def joined(deltas: Sequence[OutputDelta]) -> ParseResult:
    """Put pieces together as clients do."""
    prose = {ContentDelta: "", ReasoningDelta: ""}
    calls: list[list[str]] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text) | ReasoningDelta(text):
                assert text
                prose[type(delta)] += text
            case ToolCallStarted(index, _, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ToolCallDelta(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    return ParseResult(
        content=prose[ContentDelta] or None,
        reasoning_content=prose[ReasoningDelta] or None,
        tool_calls=tuple(ParsedToolCall(name, text) for name, text in calls),
    )


def judge(fixture: Fixture, *, hold: int | None = HOLD, only: Sequence[str] = ()) -> Verdict:
    """Have the judge look at one fixture: at once as an answer, and streamed in every way."""
    tokens = events_of(fixture)
    special = {place for place, (n, _) in enumerate(tokens) if n in format_of(fixture)[1]}
    streams = {}
    for strategy in DEFAULT_STRATEGIES:
        if only and strategy.id not in only:
            continue
        groups = [
            [tokens[place] for place in group]
            for group in split(list(range(len(tokens))), strategy, special=special)
        ]
        if has_spelled_marks(fixture):  # as a node sends them: a token an event
            groups = [[token] for group in groups for token in group]
        streams[strategy.id] = parse(fixture, groups, hold)
    whole = parse(fixture, [[token] for token in tokens], None)
    rows = run_checks(fixture, family_for(fixture), Observation(nonstream=whole, streams=streams))
    bad = [row for row in rows if row.status not in (Status.PASS, Status.SOFT_PASS)]
    why = "; ".join(f"{row.check}/{row.strategy}: {row.detail}" for row in bad[:3])
    return Verdict(case_status(rows).value, why, whole)
