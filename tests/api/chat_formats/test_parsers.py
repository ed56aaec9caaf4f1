"""Parsers: how ids and text are divided changes nothing, nothing is lost, nothing is raised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import soak
from support.chat_formats.judged import joined

from shardnet.api.chat_formats import json_text
from shardnet.api.chat_formats.choice import (
    FORMATS,
    PLAIN,
    ChatFormat,
    EqualCalls,
    ToolChoice,
    choose_format,
    with_ids,
)
from shardnet.api.chat_formats.glm import hunyuan_reader
from shardnet.api.chat_formats.json_text import json_of, read_tools
from shardnet.api.chat_formats.marks import (
    CallDelta,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    TokenText,
    ToolCallCut,
    ToolCallDelta,
    ToolCallStarted,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "x": {}},
            },
        },
    }
    for name in ("f", "g")
]
BY_NAME = {each.name: each for each in [*FORMATS, PLAIN]}
BY_NAME["hy:x"] = replace(BY_NAME["hy"], reader=hunyuan_reader(":x"))

Events = list[tuple[int, str]]

CALLS = {
    "hermes": ["<tool_call>", '{"name": "f", "arguments": {"a": "é", "n": [1]}}', "</tool_call>"],
    "qwen-xml": ["<tool_call>", "<function=f>\n<parameter=a>\né\n</parameter>\n</function>"],
    "minimax": [
        "<minimax:tool_call>",
        '<invoke name="f">\n<parameter name="a">é</parameter>\n</invoke>',
    ],
    "seed": ["<seed:tool_call>", "<function=f>\n<parameter=a>é</parameter>\n</function>"],
    "glm": ["<tool_call>", "f", "<arg_key>", "a", "</arg_key>", "<arg_value>", "é", "</arg_value>"],
    "hy": [
        *("<tool_calls>", "<tool_call>", "f", "<tool_sep>", "<arg_key>", "a", "</arg_key>"),
        *("<arg_value>", "é", "</arg_value>", "</tool_call>", "</tool_calls>"),
    ],
    "hy:x": [
        "<tool_calls:x>",
        "<tool_call:x>",
        "f",
        "</tool_call:x>",
        "<tool_call>",
        "</tool_calls:x>",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "f",
        "<｜tool▁sep｜>",
        '{"a": 1}',
    ],
    "deepseek-dsml": ['<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a">é'],
    "mistral": ["[TOOL_CALLS]", "f", "[ARGS]", '{"a": "é"}', ' [{"name": "g"}]'],
    "list": ["<|tool_call|>", '[{"name": "f", "arguments": {}}]'],
    "lfm2": ["<|tool_call_start|>", "[f(a='é', n=[1]), g()]", "<|tool_call_end|>", "[f()]"],
    "olmo": ["<function_calls>", '\nf(a="é", n=[true])\ng()\n', "</function_calls>", "f()"],
    "command": ["<|START_ACTION|>", '[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]'],
    "apertus": ["<|tools_prefix|>", '[{"f": {"a": "é"}}, {"g": {}}]', "<|tools_suffix|>"],
    "hunyuan": ["<answer>", "<tool_calls>", '[{"name": "f", "arguments": {}}]', "</tool_calls>"],
    "glm-4": ["f\n", '{"a": "é"}', "\n", "g\n", "f"],
    "llama": ["<|python_tag|>", '{"name": "f", "parameters": {"a": 1}}', "[g(a='x', n=[1])]", ";"],
    "harmony": [
        "<|channel|>",
        "commentary to=functions.f",
        "<|message|>",
        '{"a": "é"}',
        "<|call|>",
    ],
    "gemma": ["<|tool_call>", "call:f{a:", '<|"|>', "é", ",x:[1,{b:true}]", "}", "<tool_call|>"],
    "kimi-k2": [
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"),
        *("<|tool_call_argument_begin|>", '{"a": 1}'),
    ],
    "kimi-k3": [
        "<|open|>",
        'call tool="f"',
        "<|sep|>",
        'argument key="a" type="string"',
        "<|close|>",
    ],
    "plain": ["<think>"],
}
"""Pieces of calls of each format, of which outputs are made."""
TEXTS = {"<function=", '<invoke name="', "<｜DSML｜", "</｜DSML｜"}
"""Marks that no tokenizer has as tokens."""
PARTS = {"deepseek-dsml": ["｜DSML｜"]}
ANYTHING = ["text", " ", "\n", "{", "}", '"', "</", "x<", '{"a": 1}', "ÿ", "<|im_end|>"]


def tokens_of(written: ChatFormat) -> dict[int, TokenText]:
    """The marks of a format as tokens, and one special token of another kind."""
    texts = [*sorted({*written.reader.MARKS} - TEXTS), *PARTS.get(written.name, ()), "<|im_end|>"]
    return {n: TokenText(text, text == "<|im_end|>") for n, text in enumerate(texts)}


def events_of(written: ChatFormat, pieces: Sequence[str]) -> Events:
    """Each piece as one token, marks as their own."""
    ids = {token.text: n for n, token in tokens_of(written).items()}
    return [(ids.get(piece, 1000), piece) for piece in pieces]


def read(
    written: ChatFormat,
    feeds: Sequence[tuple[Sequence[int], str]],
    *,
    tools: Sequence[dict[str, Any]] = TOOLS,
    **options: Any,
) -> list[OutputDelta]:
    parser = written.parser(tokens=tokens_of(written), tools=tools, **options)
    deltas = [delta for ids, text in feeds for delta in parser.feed(ids, text)]
    return [*deltas, *parser.finish()]


def read_pieces(name: str, pieces: Sequence[str], **options: Any) -> list[OutputDelta]:
    written = BY_NAME[name]
    return read(written, [([n], text) for n, text in events_of(written, pieces)], **options)


outputs = st.sampled_from(sorted(CALLS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(
            st.one_of(
                st.sampled_from([*CALLS[name], *BY_NAME[name].reader.MARKS]),
                st.sampled_from(ANYTHING),
            ),
            max_size=14,
        ),
    )
)


@pytest.mark.parametrize(("name", "n_read"), [("hermes", 0), ("qwen-xml", 1)])
def test_schemas_are_read_of_tools_that_are_called(
    name: str, n_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a value's type is asked: agents offer many tools with each request."""
    read: list[Any] = []
    monkeypatch.setattr(
        json_text, "own_definitions", lambda schema, **_: read.append(schema) or schema
    )
    parser = BY_NAME[name].parser(tokens={}, tools=TOOLS)
    deltas = [*parser.feed([], "".join(CALLS[name]) * 2), *parser.finish()]
    assert sum(isinstance(delta, ToolCallStarted) for delta in deltas) == 2
    assert len(read) == n_read


@given(outputs, st.data(), st.sampled_from([0, 5, 512, None]))
@settings(max_examples=soak.examples(60), deadline=None)
def test_how_it_is_divided_changes_nothing(
    output: tuple[str, list[str]], data: st.DataObject, hold: int | None
) -> None:
    """Tokens one by one, in groups, and with text that comes later than its ids."""
    name, pieces = output
    written = BY_NAME[name]
    events = events_of(written, pieces)
    expected = joined(read(written, [([n], text) for n, text in events], hold=hold))
    feeds: list[tuple[list[int], str]] = []
    late = ""
    for n, text in events:
        late += text
        size = data.draw(st.integers(0, len(late)))
        joins = feeds and data.draw(st.booleans())
        ids = [*feeds.pop()[0], n] if joins and not feeds[-1][1] else [n]
        feeds.append((ids, late[:size]))
        late = late[size:]
    feeds.append(([], late))
    assert joined(read(written, feeds, hold=hold)) == expected


@given(outputs)
@settings(max_examples=soak.examples(60), deadline=None)
def test_without_tools_nothing_is_lost(output: tuple[str, list[str]]) -> None:
    """But marks of reasoning and around content, headers, other special tokens, and space."""
    name, pieces = output
    if name in ("harmony", "kimi-k3"):
        return  # their headers and tags are no text
    deltas = read_pieces(name, pieces, tools=[])
    assert all(isinstance(delta, ContentDelta | ReasoningDelta) for delta in deltas)
    shown = "".join(d.text for d in deltas if isinstance(d, ContentDelta | ReasoningDelta))
    dropped = [mark for pair in getattr(BY_NAME[name].reader, "THINK", ()) for mark in pair]
    written = "".join(pieces)
    around = getattr(BY_NAME[name].reader, "AROUND", ())
    for mark in (*dropped, *around, "<|im_end|>"):
        shown, written = shown.replace(mark, ""), written.replace(mark, "")
    assert "".join(shown.split()) == "".join(written.split())


def test_arguments_come_as_they_are_written() -> None:
    """Where nothing is held back: each piece of text that a token completes."""
    pieces = ["<tool_call>", '{"name": "f", "arguments": ', '{"a": "b', "c", 'd", "n": 1', "}}"]
    deltas = read_pieces("hermes", pieces, hold=0)
    assert deltas == [
        ToolCallStarted(0, None, "f"),
        ToolCallDelta(0, '{"a": "b'),
        ToolCallDelta(0, "c"),
        ToolCallDelta(0, 'd", "n": '),
        ToolCallDelta(0, "1}"),
    ]


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("hermes", r"""<tool_call>{"name": "f", "arguments": "{\"s\": \"\ud83d\"}"}</tool_call>"""),
        ("hermes", r"""<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>"""),
        (
            "qwen-xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n"
            r"""["\ud83d"]"""
            "\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_half_a_surrogate_pair_can_be_sent(name: str, output: str) -> None:
    """It is an escape in JSON, and no character that UTF-8 has."""
    properties = {"a": {"type": "array"}, "s": {"type": "string"}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    parser = BY_NAME[name].parser(tokens={}, tools=[{"type": "function", "function": tool}])
    deltas = [*parser.feed([], output), *parser.finish()]
    assert deltas
    for delta in deltas:
        assert msgspec.json.decode(msgspec.json.encode(delta))
    called = "".join(delta.text for delta in deltas if isinstance(delta, ToolCallDelta))
    assert not called or r"\ud83d" in called


def test_a_long_call_is_not_held_back_to_its_end() -> None:
    parser = BY_NAME["qwen-xml"].parser(tokens=tokens_of(BY_NAME["qwen-xml"]), tools=TOOLS)
    ids = {token.text: n for n, token in tokens_of(BY_NAME["qwen-xml"]).items()}
    assert parser.feed([ids["<tool_call>"]], "<tool_call>") == []
    assert parser.feed([1000], "<function=") == []
    assert parser.feed([1000], "f>\n<parameter=a>\n" + "x" * 400) == []
    started, *rest = parser.feed([1000], "y" * 400)
    assert started == ToolCallStarted(0, None, "f")
    assert "".join(d.text for d in rest if isinstance(d, ToolCallDelta)).endswith("y" * 400)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("hermes", ["<tool_call>", "no JSON", "</tool_call>"]),
        ("hermes", ["<tool_call>", '{"name": "f", "arguments": {"a" 1}}', "</tool_call>"]),
        ("hermes", ["<tool_call>", '{"name": "f", "arguments": [1]}', "</tool_call>"]),
        ("mistral", ["[TOOL_CALLS]", "f", "[ARGS]", "{1}"]),
        ("glm", ["<tool_call>", "f", "<arg_value>", "1", "</tool_call>"]),
        ("deepseek", ["<｜tool▁calls▁begin｜>", "f", "<｜tool▁sep｜>", "{}"]),
        ("llama", ['{"name": "unknown", "parameters": {}}']),
        ("llama", ['{"a": 1} is an object']),
        ("llama", ["[1] says that"]),
        ("gemma", ["<|tool_call>", "call:f no brace", "<tool_call|>"]),
        (
            "kimi-k2",
            ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "f", "<|tool_call_end|>"],
        ),
        ("qwen-xml", ["<tool_call>", "<function=f>", "no parameter", "</tool_call>"]),
        ("list", ["<|tool_call|>", "text"]),
    ],
)
@pytest.mark.parametrize("hold", [512, None])
def test_what_is_no_call_is_content(name: str, pieces: list[str], hold: int | None) -> None:
    result = joined(read_pieces(name, [*pieces, " And so on."], hold=hold))
    assert result.tool_calls == ()
    assert result.content == "".join(pieces) + " And so on."


def test_a_mark_that_is_spelled_with_other_tokens_is_text() -> None:
    """Even where all of it comes in the same event as the token itself."""
    written = BY_NAME["mistral"]
    ids = {token.text: n for n, token in tokens_of(written).items()}
    parser = written.parser(tokens=tokens_of(written), tools=TOOLS)
    deltas = [
        *parser.feed([1000], "Write [TOOL_CALLS]f[ARGS]{} or "),
        *parser.feed([ids["[TOOL_CALLS]"]], "[TOOL_CALLS][TOOL_CALLS]"),
        *parser.feed([1000], "g"),
        *parser.feed([ids["[ARGS]"]], "[ARGS]"),
        *parser.feed([1000], '{"a": "[ARGS]"}'),
        *parser.finish(),
    ]
    result = joined(deltas)
    assert result.content == "Write [TOOL_CALLS]f[ARGS]{} or [TOOL_CALLS]"
    assert [(c.name, c.arguments_raw) for c in result.tool_calls] == [("g", '{"a": "[ARGS]"}')]


def test_a_stop_token_without_text_keeps_nothing_back() -> None:
    written = BY_NAME["hermes"]
    ids = {token.text: n for n, token in tokens_of(written).items()}
    parser = written.parser(tokens=tokens_of(written), tools=TOOLS)
    deltas = [*parser.feed([1000], "Hi <|im"), *parser.feed([ids["<|im_end|>"]], "")]
    assert joined([*deltas, *parser.finish()]).content == "Hi <|im"


@pytest.mark.parametrize(
    ("tail", "pieces", "reasoning", "content"),
    [
        ("<|im_start|>assistant\n<think>\n", ["why", "\n", "</think>", "\n\nso"], "why", "so"),
        ("<|im_start|>assistant\n", ["<think>", "\nwhy", "</think>", "so"], "why", "so"),
        ("<think>\n\n</think>\n\n", ["so"], None, "so"),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", ["so"], None, "so"),
        ("", ["<think>", "cut off "], "cut off ", None),
    ],
)
def test_reasoning_is_told_apart(
    tail: str, pieces: list[str], reasoning: str | None, content: str | None
) -> None:
    result = joined(read_pieces("hermes", pieces, prompt_tail=tail))
    assert (result.reasoning_content, result.content) == (reasoning, content)


def test_at_most_one_call_where_there_may_be_one() -> None:
    pieces = ["<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"]
    choice = ToolChoice(is_parallel=False)
    calls = joined(read_pieces("hermes", pieces * 3, choice=choice)).tool_calls
    assert [call.name for call in calls] == ["f"]
    assert len(joined(read_pieces("hermes", pieces * 3)).tool_calls) == 3


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        (
            "minimax",
            [
                *("<think>", "why\n", "</think>", "\n\n", "<minimax:tool_call>"),
                '\n<invoke name="f">\n<parameter name="a">x\ny</parameter>\n'
                '<parameter name="n">1</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n',
                "</minimax:tool_call>",
            ],
        ),
        (
            "seed",
            [
                *("<seed:think>", "why", "</seed:think>", "<seed:tool_call>"),
                "\n<function=f>\n<parameter=a>x\ny</parameter>\n<parameter=n>1</parameter>\n"
                "</function>\n<function=g>\n</function>\n",
                "</seed:tool_call>",
            ],
        ),
        (
            "lfm2",
            [
                *("<think>", "why", "</think>", "<|tool_call_start|>"),
                """[f(a="x\\ny", n=1), g()]""",
                "<|tool_call_end|>",
            ],
        ),
        (
            "olmo",
            [
                *("<think>", "why", "</think>", "<function_calls>"),
                """\nf(a="x\\ny", n=1)\ng()\n""",
                "</function_calls>",
            ],
        ),
        (
            "command",
            [
                *("<|START_THINKING|>", "why", "<|END_THINKING|>", "<|START_ACTION|>"),
                '[\n    {"tool_call_id": "0", "tool_name": "f", '
                '"parameters": {"a": "x\\ny", "n": 1}},\n    '
                '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]',
                "<|END_ACTION|>",
            ],
        ),
        (
            "apertus",
            [
                *("<|inner_prefix|>", "why", "<|tools_prefix|>"),
                '[{"f": {"a": "x\\ny", "n": 1}}, {"g": {}}]',
                "<|tools_suffix|>",
            ],
        ),
        (
            "hy",
            [
                *("<think>", "why", "</think>", "\n", "<tool_calls>", "\n", "<tool_call>", "f"),
                *("<tool_sep>", "\n", "<arg_key>", "a", "</arg_key>", "\n", "<arg_value>", "x\ny"),
                *("</arg_value>", "\n", "<arg_key>", "n", "</arg_key>", "\n", "<arg_value>", "1"),
                *("</arg_value>", "\n", "</tool_call>", "\n", "<tool_call>", "g", "<tool_sep>"),
                *("\n", "</tool_call>", "\n", "</tool_calls>"),
            ],
        ),
        (
            "hy:x",
            [
                *("<think:x>", "why", "</think:x>", "<tool_calls:x>", "<tool_call:x>", "f"),
                *("<arg_key:x>", "a", "</arg_key:x>", "<arg_value:x>", "x\ny", "</arg_value:x>"),
                *("<arg_key:x>", "n", "</arg_key:x>", "<arg_value:x>", "1", "</arg_value:x>"),
                *("</tool_call:x>", "<tool_call:x>", "g", "</tool_call:x>", "</tool_calls:x>"),
            ],
        ),
        (
            "deepseek-dsml",
            [
                *(
                    "<think>",
                    "why",
                    "</think>",
                    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n',
                ),
                '<｜DSML｜ parameter name="a" string="true">x\ny</｜DSML｜ parameter>\n',
                '<｜DSML｜ parameter name="n" string="false">1</｜DSML｜ parameter>\n',
                '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="g">\n\n</｜DSML｜ invoke>\n',
                "</｜DSML｜ calls>",
            ],
        ),
        (
            "hunyuan",
            [
                *("<think>", "\nwhy\n", "</think>", "\n", "<answer>", "\n", "<tool_calls>"),
                '[{"name": "f", "arguments": {"a": "x\\ny", "n": 1}}, {"name": "g"}]',
                *("</tool_calls>", "\n", "</answer>"),
            ],
        ),
    ],
)
def test_two_calls_of_this_years_families(name: str, pieces: list[str]) -> None:
    result = joined(read_pieces(name, pieces))
    calls = [(call.name, json.loads(call.arguments_raw)) for call in result.tool_calls]
    assert calls == [("f", {"a": "x\ny", "n": 1}), ("g", {})]
    assert (result.reasoning_content, result.content) == ("why", None)
    assert not joined(read_pieces(name, ["[f(a=1)]"])).tool_calls


def test_calls_of_glm_4_have_no_marks() -> None:
    """They stand at the beginning, a name and an object; anything else is content."""
    result = joined(read_pieces("glm-4", ['f\n{"a": "x\\ny", "n": 1}', "\n", "g\n{}"]))
    calls = [(call.name, json.loads(call.arguments_raw)) for call in result.tool_calls]
    assert calls == [("f", {"a": "x\ny", "n": 1}), ("g", {})]
    for text in ("f\nis a letter", "for you\n{}", 'h\n{"a": 1}', 'so:\nf\n{"a": 1}', "f", "f\n{"):
        read = joined(read_pieces("glm-4", [text]))
        assert (read.content, list(read.tool_calls)) == (text, [])


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (0, "f{} f{} f{} f{} f{} g{} g{} g{} f{}"),
        (1, "f{} g{} f{}"),
        (3, "f{} f{} f{} g{} g{} g{} f{}"),
    ],
)
def test_of_equal_calls_in_a_row_only_the_first_are_given(size: int, most: int, kept: str) -> None:
    written = "f{} f{} f{} f{} f{} g{} g{} g{} f{}"
    assert equal_calls(written, most, size) == kept.split()


def test_calls_with_other_arguments_are_no_equal_ones() -> None:
    written = 'f{"a":1} f{"a":12} f{"a":1} f{"a":12} f{"a":1'
    for most in (1, 3):
        assert equal_calls(written, most, 3) == written.split()


def equal_calls(written: str, most: int, size: int) -> list[str]:
    """Write calls in pieces; return those that are given."""
    calls, given = EqualCalls(most), list[OutputDelta]()
    for index, (name, *text) in enumerate(written.split()):
        arguments = "".join(text)
        pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
        given += calls.feed([ToolCallStarted(index, None, name)])
        given += calls.feed([ToolCallDelta(index, piece) for piece in pieces])
    result = joined([*given, *calls.feed([ContentDelta("so")]), *calls.finish()])
    starts = [delta.index for delta in given if isinstance(delta, ToolCallStarted)]
    assert starts == [*range(len(starts))]
    return [call.name + call.arguments_raw for call in result.tool_calls]


def test_a_call_that_is_held_back_is_not_begun_if_it_is_cut_off() -> None:
    def written(index: int) -> list[OutputDelta]:
        return [ToolCallStarted(index, None, "f"), ToolCallDelta(index, "{"), ToolCallCut(index)]

    whole: list[OutputDelta] = [ToolCallStarted(0, None, "f"), ToolCallDelta(0, "{}")]
    assert EqualCalls(1).feed([*whole, *written(1)]) == whole
    assert EqualCalls(2).feed([*whole, *written(1)]) == [*whole, *written(1)]


BEGUN = {
    "hermes": ["<tool_call>", '{"name": "f", "arguments": {"a": "'],
    "qwen-xml": ["<tool_call>", "<function=f>\n<parameter=a>\n"],
    "minimax": ["<minimax:tool_call>", '<invoke name="f">\n<parameter name="a">'],
    "seed": ["<seed:tool_call>", "<function=f>\n<parameter=a>"],
    "glm": ["<tool_call>", "f", "<arg_key>", "a", "</arg_key>", "<arg_value>"],
    "deepseek": [*CALLS["deepseek"][:-1], '{"a": "'],
    "deepseek-dsml": ['<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a">'],
    "mistral": ["[TOOL_CALLS]", "f", "[ARGS]", '{"a": "'],
    "list": ["<|tool_call|>", '[{"name": "f", "arguments": {"a": "'],
    "command": ["<|START_ACTION|>", '[{"tool_name": "f", "parameters": {"a": "'],
    "apertus": ["<|tools_prefix|>", '[{"f": {"a": "'],
    "hunyuan": ["<tool_calls>", '[{"name": "f", "arguments": {"a": "'],
    "glm-4": ["f\n", '{"a": "'],
    "llama": ['{"name": "f", "parameters": {"a": "'],
    "harmony": [*CALLS["harmony"][:3], '{"a": "'],
    "gemma": ["<|tool_call>", "call:f{a:", '<|"|>'],
    "kimi-k2": [*CALLS["kimi-k2"][:-1], '{"a": "'],
    "kimi-k3": [*CALLS["kimi-k3"][:3], "<|open|>", 'argument key="a" type="string"', "<|sep|>"],
}
"""Calls, up to within a string. Those of LFM2 and OLMo are given when they are whole."""


@pytest.mark.parametrize("name", BEGUN)
def test_a_call_that_is_cut_off_is_told_to_be_none(name: str) -> None:
    """If its beginning was given; a short one is not, nor any of an answer that is not streamed."""
    cut = [*BEGUN[name], *600 * ["é"]]
    calls = [delta for delta in read_pieces(name, cut) if isinstance(delta, CallDelta)]
    assert [type(delta) for delta in calls if not isinstance(delta, ToolCallDelta)] == [
        ToolCallStarted,
        ToolCallCut,
    ]
    assert calls[-1] == ToolCallCut(0)
    for pieces, hold in ((cut, None), (cut[:20], 512)):
        deltas = read_pieces(name, pieces, hold=hold)
        assert not any(isinstance(delta, CallDelta) for delta in deltas)


def test_only_the_call_that_is_none_is_told_to_be_none() -> None:
    whole = ["<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"]
    broken = [*BEGUN["hermes"], *600 * ["é"], '"}]']
    for pieces, cut in (
        ([*whole, *broken, "so"], [1]),
        ([*broken, *whole], [0]),
        ([*whole, *BEGUN["hermes"], *600 * ["é"], '"}}', "</tool_call>"], []),
    ):
        deltas = read_pieces("hermes", pieces)
        assert [delta.index for delta in deltas if isinstance(delta, ToolCallCut)] == cut
        one = read_pieces("hermes", pieces, choice=ToolChoice(is_parallel=False))
        told = [delta.index for delta in one if isinstance(delta, ToolCallCut)]
        assert told == [index for index in cut if index == 0]


@pytest.mark.parametrize(("name", "opener"), [("hermes", "<tool_call>"), ("list", "<|tool_call|>")])
def test_a_list_of_calls_behind_one_mark(name: str, opener: str) -> None:
    objects = '[{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": "{}"}]'
    result = joined(read_pieces(name, [opener, objects]))
    assert [(c.name, c.arguments_raw) for c in result.tool_calls] == [
        ("f", '{"n": 1}'),
        ("g", "{}"),
    ]
    assert result.content is None


def test_the_choice_of_tools() -> None:
    tools = read_tools(TOOLS)
    named = ToolChoice(mode="named", name="g")
    assert [*named.offered(tools)] == ["g"]
    assert named.max_calls == 1
    assert ToolChoice(mode="none").offered(tools) == {}
    assert ToolChoice(mode="required", is_parallel=False).max_calls == 1


def test_calls_get_the_ids_that_their_format_wants() -> None:
    started: list[OutputDelta] = [ToolCallStarted(1, None, "f"), ToolCallStarted(2, "own", "g")]

    def ids(name: str) -> list[str | None]:
        made = with_ids(started, name, lambda letters: letters[0])
        return [delta.call_id for delta in made if isinstance(delta, ToolCallStarted)]

    assert ids("mistral") == ["a" * 9, "own"]
    assert ids("kimi-k2") == ["functions.f:1", "own"]
    assert ids("hermes") == ["call_" + "a" * 24, "own"]


def test_the_format_is_chosen_by_the_template_and_else_by_the_tokens() -> None:
    assert choose_format("{{ x }}<tool_call>{{ tools }}", {}).name == "hermes"
    assert choose_format("<tool_call><function=f><parameter=a>", {}).name == "qwen-xml"
    assert choose_format("<tool_call><arg_key>", {}).name == "glm"
    tokens = {5: TokenText("[TOOL_CALLS]", True)}
    assert choose_format("", tokens).name == "mistral"
    assert choose_format("{{ tools }}", tokens).name == "mistral"
    assert choose_format("{{ messages }}", tokens) is PLAIN
    marks = {n: TokenText(mark, False) for n, mark in enumerate(hunyuan_reader(":x").MARKS)}
    for template in ("{{ tools }}", "'<tool_calls{}>' '<arg_key{}>'", ""):
        assert choose_format(template, marks).reader is hunyuan_reader(":x")
    assert choose_format("<tool_calls><tool_call><arg_key>", {}).reader is hunyuan_reader("")
    for written in FORMATS:
        assert choose_format(" ".join(written.signs), {}).name == written.name


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("7", {"integer"}, "7"),
        ("7", {"string"}, '"7"'),
        ("7", {"string", "integer"}, "7"),
        ("seven", {"integer"}, '"seven"'),
        ("1.5", {"integer"}, "1.5"),
        ("1.5", {"string", "integer"}, '"1.5"'),
        ("1.0", {"string", "integer"}, "1.0"),
        ("True", {"boolean"}, "true"),
        ("null", {"string", "null"}, "null"),
        ("NaN", set(), '"NaN"'),
        ("1e999", {"number"}, "1e999"),
        ('{"a": 1}', {"object"}, '{"a": 1}'),
        ('{"a": 1}', {"array"}, '"{\\"a\\": 1}"'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[" * 5000, set(), json.dumps("[" * 5000)),
    ],
)
def test_a_bare_value_is_what_its_schema_says(text: str, types: set[str], expected: str) -> None:
    assert json_of(text, frozenset(types)) == expected


def test_a_schema_that_refers_to_itself_has_an_end() -> None:
    schema: dict[str, Any] = {
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}, {"type": "null"}]}},
    }
    tool = read_tools([{"function": {"name": "f", "parameters": schema}}])["f"]
    assert tool.types_of("a") <= {"null"}
