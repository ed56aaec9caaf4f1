"""What a grammar of calls allows is what the format's reader takes for calls, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support import soak

from shardnet.api.chat_formats.choice import ToolChoice, choose_format
from shardnet.api.chat_formats.marks import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    TokenText,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.chat_grammars.output import output_constraint
from shardnet.constraints import Constraint
from shardnet.errors import UsageError
from shardnet.model.sampling.token_masks import forbidden_tokens
from shardnet.tokenizers.grammar.compile_program import grammar_of
from shardnet.tokenizers.grammar.matcher import GrammarMatcher
from shardnet.tokenizers.grammar.vocabulary import Vocabulary
from shardnet.tokenizers.token_table import ByteStrings

EOS = 0
LETTERS = "".join(map(chr, range(32, 127))) + "\n"


def marks_of(suffix: str, *more: str) -> tuple[str, ...]:
    """Return the tokens of Hy3 and Hunyuan 4."""
    names = ("think", "tool_calls", "tool_call", "arg_key", "arg_value")
    pairs = (f"<{slash}{name}{suffix}>" for name in names for slash in ("", "/"))
    return (*pairs, *(f"<{name}{suffix}>" for name in more))


FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (
        "<tool_call> <think>",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        ("<tool_call>", '\n{"name": "f", "arguments": {"a": "é", "n": 1}}\n', "</tool_call>"),
    ),
    "qwen-xml": (
        "<tool_call><function=<parameter=<think>",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        (
            "<tool_call>",
            "\n<function=f>\n<parameter=a>\né\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
            "</function>\n",
            "</tool_call>",
        ),
    ),
    "minimax": (
        "<minimax:tool_call><think>",
        ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        (
            "<minimax:tool_call>",
            '\n<invoke name="f">\n<parameter name="a">é</parameter>\n'
            '<parameter name="n">1</parameter>\n</invoke>\n',
            "</minimax:tool_call>",
        ),
    ),
    "seed": (
        "<seed:tool_call><function=<parameter=<seed:think>",
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        (
            "<seed:tool_call>",
            "\n<function=f>\n<parameter=a>é</parameter>\n<parameter=n>1</parameter>\n</function>\n",
            "</seed:tool_call>",
        ),
    ),
    "glm": (
        "<tool_call><arg_key>",
        (
            *("<think>", "</think>", "<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        (
            *("<tool_call>", "f\n", "<arg_key>", "a", "</arg_key>", "\n"),
            *("<arg_value>", "é", "</arg_value>", "\n", "<arg_key>", "n", "</arg_key>"),
            *("<arg_value>", "1", "</arg_value>", "</tool_call>"),
        ),
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        (
            *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ),
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f", "<｜tool▁sep｜>"),
            *('{"a": "é", "n": 1}', "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    "deepseek v3": (
        "<｜tool▁calls▁begin｜>```json",
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ),
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
            'f\n```json\n{"a": "é", "n": 1}\n```',
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    "deepseek-dsml": (
        "｜DSML｜",
        ("<think>", "</think>", "｜DSML｜"),
        (
            *("<", "｜DSML｜", "function_calls>\n<", "｜DSML｜", 'invoke name="f">\n<', "｜DSML｜"),
            *('parameter name="a" string="true">é</', "｜DSML｜", "parameter>\n<", "｜DSML｜"),
            *('parameter name="n" string="false">1</', "｜DSML｜", "parameter>\n</", "｜DSML｜"),
            *("invoke>\n</", "｜DSML｜", "function_calls>"),
        ),
    ),
    "deepseek v4": (
        "'｜DSML｜' + 'tool_calls>'",
        ("<think>", "</think>", "｜DSML｜"),
        (
            *("<", "｜DSML｜", "tool_calls>\n<", "｜DSML｜", 'invoke name="f">\n<', "｜DSML｜"),
            *('parameter name="a" string="true">é</', "｜DSML｜", "parameter>\n<", "｜DSML｜"),
            *('parameter name="n" string="false">1</', "｜DSML｜", "parameter>\n</", "｜DSML｜"),
            *("invoke>\n</", "｜DSML｜", "tool_calls>"),
        ),
    ),
    "deepseek v4.1": (
        "<｜DSML｜ calls>",
        ("<think>", "</think>", "｜DSML｜"),
        (
            *("<", "｜DSML｜", " calls>\n<", "｜DSML｜", ' invoke name="f">\n<', "｜DSML｜"),
            *(' parameter name="a" string="true">é</', "｜DSML｜", " parameter>\n<", "｜DSML｜"),
            *(' parameter name="n" string="false">1</', "｜DSML｜", " parameter>\n</", "｜DSML｜"),
            *(" invoke>\n</", "｜DSML｜", " calls>"),
        ),
    ),
    "hy3": (
        "'<think{}>' '<tool_calls{}>' '<tool_sep{}>' '<arg_key{}>'.format(':opensource') tools",
        marks_of(":opensource", "tool_sep"),
        (
            *("<tool_calls:opensource>", "\n", "<tool_call:opensource>", "f"),
            *("<tool_sep:opensource>", "\n", "<arg_key:opensource>", "a"),
            *("</arg_key:opensource>", "\n", "<arg_value:opensource>", "é"),
            *("</arg_value:opensource>", "\n", "<arg_key:opensource>", "n"),
            *("</arg_key:opensource>", "\n", "<arg_value:opensource>", "1"),
            *("</arg_value:opensource>", "\n", "</tool_call:opensource>", "\n"),
            "</tool_calls:opensource>",
        ),
    ),
    "hunyuan 4": (
        "{{ tools }}",
        marks_of(":6124c78e"),
        (
            *("<tool_calls:6124c78e>", "<tool_call:6124c78e>", "f", "<arg_key:6124c78e>", "a"),
            *("</arg_key:6124c78e>", "<arg_value:6124c78e>", "é", "</arg_value:6124c78e>"),
            *("<arg_key:6124c78e>", "n", "</arg_key:6124c78e>", "<arg_value:6124c78e>", "1"),
            *("</arg_value:6124c78e>", "</tool_call:6124c78e>", "</tool_calls:6124c78e>"),
        ),
    ),
    "mistral": (
        "[TOOL_CALLS][ARGS]",
        ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]", "f", "[ARGS]", '{"a": "é", "n": 1}'),
    ),
    "mistral list": (
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]", ' [{"name": "f", "arguments": {"a": "é", "n": 1}}]'),
    ),
    "list": (
        "<|tool_call|>",
        ("<|tool_call|>",),
        ("<|tool_call|>", '[{"name": "f", "arguments": {"a": "é", "n": 1}}]'),
    ),
    "llama": (
        "<|python_tag|>",
        ("<|python_tag|>",),
        ('{"name": "f", "parameters": {"a": "é", "n": 1}}',),
    ),
    "harmony": (
        "<|channel|><|message|>",
        ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"),
        (
            *("<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json"),
            *("<|message|>", '{"a": "é", "n": 1}'),
        ),
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|>",
        (
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_end|>", "<|tool_call_argument_begin|>", "<think>", "</think>"),
        ),
        (
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"),
            *("<|tool_call_argument_begin|>", '{"a": "é", "n": 1}', "<|tool_call_end|>"),
            "<|tool_calls_section_end|>",
        ),
    ),
    "lfm2": (
        "<|tool_call_start|>",
        ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"),
        ("<|tool_call_start|>", '[f(a="é",n=1)]', "<|tool_call_end|>"),
    ),
    "olmo": (
        "<function_calls>",
        ("<think>", "</think>"),
        ("<function_calls>", '\nf(a="é",n=1)\n', "</function_calls>"),
    ),
    "command": (
        "<|START_ACTION|>",
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        (
            "<|START_ACTION|>",
            '[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": "é", "n": 1}}\n]',
            "<|END_ACTION|>",
        ),
    ),
    "apertus": (
        "<|tools_prefix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        ("<|tools_prefix|>", '[{"f": {"a": "é", "n": 1}}]', "<|tools_suffix|>"),
    ),
    "hunyuan": (
        "<tool_calls><answer>",
        ("<think>", "</think>"),
        (
            "<tool_calls>",
            '[{"name": "f", "arguments": {"a": "é", "n": 1}}]',
            "</tool_calls>",
        ),
    ),
    "glm-4": ("[gMASK]<|observation|>", (), ('f\n{"a": "é", "n": 1}',)),
    "gemma": (
        "<|tool_call><tool_call|>",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<|tool_call>", "call:f{a:", '<|"|>', "é", '<|"|>', ",n:1}", "<tool_call|>"),
    ),
}
"""By family: what its template has, its marks, and a call of f with the text é and the number 1."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    needed = [key for key in properties if key != "n"]
    return {
        "type": "function",
        "function": {"name": name, "parameters": {**schema, "required": needed}},
    }


NULLS = {"type": "array", "items": {"type": "null"}}
TOOLS = [
    tool("f", a={"type": "string"}, n={"type": "integer"}),
    tool(
        "g",
        b={"enum": ["x", "y z"]},
        n={"type": "integer"},
        l={"type": "array", "items": {"type": "null"}},
    ),
]


class Model:
    """The tokens of a family, its marks among them, or as text where they are no tokens."""

    def __init__(
        self, name: str, *, has_tokens: bool = True, tools: Sequence[dict[str, Any]] = TOOLS
    ) -> None:
        self.template, marks, self.call = FAMILIES[name]
        self.tools = tools
        self.marks = marks if has_tokens else ()
        self.tokens = {
            1 + number: TokenText(text, is_special=not text.startswith(("<think", "</")))
            for number, text in enumerate(self.marks)
        }
        letters = [letter.encode() for letter in LETTERS]
        every = [mark.encode() for mark in self.marks]
        high = [bytes([byte]) for byte in range(128, 256)]
        self.words = [b"</s>", *every, *letters, *high]
        special = [0, *(n for n, token in self.tokens.items() if token.is_special)]
        self.vocabulary = Vocabulary(
            tokens=ByteStrings.of(self.words), special_ids=tuple(special), eos_ids=(EOS,)
        )
        self.tokenizer = self.vocabulary.tokenizer()

    def constraint(
        self, tail: str = "", answer: Constraint | None = None, **how: Any
    ) -> Constraint:
        found = output_constraint(
            template=self.template,
            tokens=self.tokens,
            tools=self.tools,
            choice=ToolChoice(**how),
            answer=answer,
            prompt_tail=tail,
        )
        assert found is not None
        found.check()
        return found

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        grammar = grammar_of(constraint.kind, constraint.text)
        return GrammarMatcher.compiled(grammar, self.tokenizer, len(self.words))

    def ids(self, parts: Sequence[str]) -> list[int]:
        found = []
        for part in parts:
            if part in self.marks:
                found.append(1 + self.marks.index(part))
            else:
                found += [self.words.index(bytes([byte])) for byte in part.encode()]
        return found

    def allowed(self, matcher: GrammarMatcher) -> set[int]:
        flags = forbidden_tokens(matcher.mask(), len(self.words))
        return {n for n, is_not in enumerate(flags) if not is_not}

    def takes(self, constraint: Constraint, parts: Sequence[str]) -> bool:
        """Say whether these parts are a whole output."""
        matcher = self.matcher(constraint)
        for token_id in self.ids(parts):
            if matcher.is_complete or token_id not in self.allowed(matcher):
                return False
            matcher.advance(token_id)
        return EOS in self.allowed(matcher) or matcher.is_complete

    def read(self, token_ids: Sequence[int], tail: str = "") -> list[OutputDelta]:
        """Read an output."""
        parser = choose_format(self.template, self.tokens).parser(
            tokens=self.tokens,
            tools=self.tools,
            choice=ToolChoice(mode="required"),
            prompt_tail=tail,
        )
        deltas, waiting = [], b""
        for token_id in token_ids:
            waiting += self.words[token_id]
            try:
                text, waiting = waiting.decode(), b""
            except UnicodeDecodeError:
                text = ""
            deltas += parser.feed([token_id], text)
        return [*deltas, *parser.finish()]


def calls_of(deltas: Sequence[OutputDelta]) -> list[tuple[str, Any]]:
    names = [delta.name for delta in deltas if isinstance(delta, ToolCallStarted)]
    texts = ["" for _ in names]
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            texts[delta.index] += delta.text
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def text_of(deltas: Sequence[OutputDelta], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


@pytest.mark.parametrize(
    ("family", "has_tokens"),
    soak.cases(
        [*((family, True) for family in FAMILIES), ("hermes", False), ("deepseek-dsml", False)],
        [(family, False) for family in FAMILIES if family not in ("hermes", "deepseek-dsml")],
    ),
)
def test_a_forced_call_is_written_as_the_family_does(family: str, has_tokens: bool) -> None:
    model = Model(family, has_tokens=has_tokens)
    forced = model.constraint(mode="required")
    assert model.takes(forced, model.call)
    assert calls_of(model.read(model.ids(model.call))) == [("f", {"a": "é", "n": 1})]
    named = model.constraint(mode="named", name="f", is_parallel=False)
    assert model.takes(named, model.call)
    for wrong in (["Hello"], [], [part.replace("f", "h") for part in model.call]):
        assert not model.takes(forced, wrong)
    assert not model.takes(model.constraint(mode="named", name="g"), model.call)
    # Beside tools an answer is a call or what it has to be.
    answer = Constraint.json_schema({"enum": [[7]]})
    either = model.constraint(mode="auto", answer=answer)
    tag = ["<|python_tag|>"] if family == "llama" else []
    assert model.takes(either, [*tag, *model.call])
    final = ["<|channel|>", "final", "<|message|>"] if family == "harmony" else []
    assert model.takes(either, [*final, "[7]"])
    assert not model.takes(either, [*final, "[8]"])
    assert text_of(model.read(model.ids([*final, "[7]"])), ContentDelta) == "[7]"


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
REFERRING: dict[str, dict[str, Any]] = {
    "into properties": {
        "properties": {
            "a": {"$ref": "#/properties/x/anyOf/0"},
            "n": {"$ref": "#/properties/x/anyOf/1/items"},
            "x": {"anyOf": [TEXT, {"type": "array", "items": NUMBER}]},
        },
    },
    "escaped": {
        "properties": {"a": {"$ref": "#/$defs/a~1b"}, "n": {"$ref": "#/definitions/%C3%A9%25%20n"}},
        "$defs": {"a/b": {"$ref": "#/definitions/a[str]"}},
        "definitions": {"é% n": NUMBER, "a[str]": TEXT},
    },
    "nested definitions": {
        "properties": {
            "a": {"$ref": "#/properties/a/$defs/t", "$defs": {"t": TEXT}},
            "n": {"allOf": [{"$ref": "#/properties/n/$defs/t"}], "$defs": {"t": NUMBER}},
        },
    },
    "names": {
        "$id": "http://x.y/f",
        "properties": {"a": {"$ref": "#text"}, "n": {"$ref": "http://x.y/n"}},
        "$defs": {"t": {"$anchor": "text", **TEXT}, "n": {"$id": "n", **NUMBER}},
    },
    "of the whole": {
        "$ref": "#/$defs/Arguments",
        "$defs": {"Arguments": {"properties": {"a": TEXT, "n": NUMBER}, "required": ["a"]}},
    },
    "allOf the whole": {
        "allOf": [
            {"properties": {"a": {"type": ["string", "integer"]}}, "required": ["a"]},
            {"properties": {"a": TEXT, "n": {"$ref": "#/$defs/n"}}},
        ],
        "$defs": {"n": NUMBER},
    },
    "of some types": {
        "properties": {
            "a": {"$ref": "#/properties/x/properties/a", "type": ["string", "number"]},
            "n": {"allOf": [{"type": ["string", "number"]}, {"$ref": "#/$defs/n"}]},
            "x": {"type": "object", "properties": {"a": {"oneOf": [TEXT, {"type": "null"}]}}},
        },
        "$defs": {"n": {"enum": [1, 2]}},
    },
}


@pytest.mark.parametrize("kind", REFERRING)
@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_what_their_references_lead_to(family: str, kind: str) -> None:
    schema = {"required": ["a"], **REFERRING[kind]}
    function = {"name": "f", "parameters": schema}
    model = Model(family, tools=[{"type": "function", "function": function}])
    forced = model.constraint(mode="required")
    call = [part.replace("é", "123") for part in model.call]
    assert model.takes(forced, call)
    assert calls_of(model.read(model.ids(call))) == [("f", {"a": "123", "n": 1})]
    assert not model.takes(forced, [part.replace("1", "true") for part in model.call])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_whose_schema_refers_to_itself_can_be_called(family: str) -> None:
    node = {"properties": {key: {"$ref": "#/properties/a"} for key in "xyz"}, "type": "object"}
    tree = {"anyOf": [TEXT, {"type": "array", "items": {"$ref": "#/$defs/node"}}]}
    schema = {"properties": {"a": tree, "n": NUMBER, "t": node}, "$defs": {"node": node}}
    model = Model(family, tools=[{"function": {"name": "f", "parameters": schema}}])
    assert model.takes(model.constraint(mode="required"), model.call)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reference_that_leads_nowhere_is_named(family: str) -> None:
    model = Model(family, tools=[tool("f", a={"$ref": "#/$defs/gone"}, n=NUMBER)])
    with pytest.raises(
        UsageError, match=r"tool f: schema: \$ref '#/\$defs/gone' leads to no schema"
    ):
        model.constraint(mode="required")
    assert calls_of(model.read(model.ids(model.call))) == [("f", {"a": "é", "n": 1})]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", soak.cases([1], range(2, 30)))
def test_whatever_is_allowed_is_read_as_calls(family: str, seed: int) -> None:
    model, chance = Model(family), random.Random(seed)
    matcher = model.matcher(model.constraint(mode="named", name="g"))
    written: list[int] = []
    while not matcher.is_complete:
        allowed = model.allowed(matcher)
        if matcher.is_complete or (EOS in allowed and chance.random() < 0.7):
            break
        thoughts = {
            n for n in allowed - {EOS} if n in model.tokens and "hink" in model.tokens[n].text
        }
        written.append(chance.choice(sorted(allowed - {EOS} - thoughts) or sorted(thoughts)))
        matcher.advance(written[-1])
        assert len(written) < 4000
    deltas = model.read(written)
    calls = calls_of(deltas)
    assert calls
    assert not text_of(deltas, ContentDelta)
    for name, arguments in calls:
        assert name == "g"
        assert arguments.keys() - {"n"} == {"b", "l"}
        assert arguments["b"] in ("x", "y z")
        assert isinstance(arguments.get("n", 0), int)
        assert {*arguments["l"]} <= {None}


@pytest.mark.parametrize(
    ("family", "thought"),
    [
        ("hermes", ["<think>", "hm </thi", "</think>", "\n\n"]),
        ("gemma", ["<|channel>", "thought\nhm", "<channel|>"]),
        ("mistral", ["[THINK]", "hm", "[/THINK]"]),
        ("hy3", ["<think:opensource>", "hm", "</think:opensource>"]),
        ("hunyuan 4", ["<think:6124c78e>", "hm", "</think:6124c78e>"]),
        (
            "harmony",
            ["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant"],
        ),
    ],
)
def test_reasoning_may_stand_before_a_call(family: str, thought: list[str]) -> None:
    model = Model(family)
    forced = model.constraint(mode="required")
    assert model.takes(forced, [*thought, *model.call])
    deltas = model.read(model.ids([*thought, *model.call]))
    assert text_of(deltas, ReasoningDelta).startswith("hm")
    assert len(calls_of(deltas)) == 1
    assert not model.takes(forced, thought)
    if family != "harmony":
        # Where the prompt has begun it, it must end; where it has ended it, there is none.
        opener, *rest = thought
        begun = model.constraint(tail=f"user\n{opener}\n", mode="required")
        assert model.takes(begun, [*rest, *model.call])
        assert not model.takes(begun, model.call)
        ended = model.constraint(tail=f"{opener}\n\n{rest[1]}\n\n", mode="required")
        assert model.takes(ended, model.call)
        assert not model.takes(ended, [*thought, *model.call])


def test_an_answer_waits_for_reasoning_that_the_prompt_has_begun() -> None:
    model = Model("hermes")
    answer = Constraint(kind="json")
    alone: dict[str, Any] = {"mode": "none", "answer": answer}
    assert model.constraint(**alone) == answer
    begun = model.constraint(tail="<think>\n", **alone)
    assert model.takes(begun, ["hm", "</think>", "\n\n", '{"a": 1}'])
    assert not model.takes(begun, ['{"a": 1}'])
    harmony = Model("harmony").constraint(**alone)
    assert Model("harmony").takes(harmony, ["<|channel|>", "final", "<|message|>", "{}"])


def test_several_calls_may_follow_each_other_unless_one_is_wanted() -> None:
    for family, divider in (("hermes", ["\n"]), ("qwen-xml", ["\n"]), ("gemma", [])):
        model = Model(family)
        two = [*model.call, *divider, *model.call]
        assert model.takes(model.constraint(mode="required"), two)
        assert not model.takes(model.constraint(mode="required", is_parallel=False), two)


@pytest.mark.parametrize("family", ["glm", "deepseek-dsml"])
def test_drafts_across_marks_change_nothing(family: str) -> None:
    model = Model(family)
    matcher, ids = model.matcher(model.constraint(mode="required")), model.ids(model.call)
    for place, token_id in enumerate(ids):
        matcher.masks(ids[place : place + 6])
        matcher.forced(6)
        assert token_id in model.allowed(matcher)
        matcher.advance(token_id)
    assert EOS in model.allowed(matcher) or matcher.is_complete


def test_an_answer_may_begin_as_a_call_does() -> None:
    model = Model("llama")
    answer = Constraint.json_schema({"properties": {"name": {"type": "string"}}})
    either = model.constraint(mode="auto", answer=answer)
    assert model.takes(either, ['{"name": "f"}'])
    call = ["<|python_tag|>", *model.call]
    assert model.takes(either, call)
    assert len(calls_of(model.read(model.ids(call)))) == 1


def test_a_grammar_has_a_bound_whatever_schemas_share() -> None:
    shared = {"big": {"enum": ["x" * 1000]}}
    item = {"type": "array", "items": {"$ref": "#/$defs/big"}}
    properties = {f"a{number}": item for number in range(1000)}
    schema = {"type": "object", "properties": properties, "$defs": shared}
    big = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(UsageError, match="has more than"):
        output_constraint(
            template="<arg_key><tool_call>",
            tokens={},
            tools=big,
            choice=ToolChoice(mode="required"),
            answer=None,
            prompt_tail="",
        )


def test_models_without_calls_are_refused_by_name() -> None:
    def ask(template: str, mode: Any, answer: Constraint | None = None) -> Constraint | None:
        return output_constraint(
            template=template,
            tokens={},
            tools=TOOLS,
            choice=ToolChoice(mode=mode),
            answer=answer,
            prompt_tail="",
        )

    with pytest.raises(
        UsageError, match="tool_choice needs a model whose chat template knows tools"
    ):
        ask("plain", "required")
    with pytest.raises(
        UsageError, match=r"cannot ask for calls in this model.s format \(kimi-k3\)"
    ):
        ask("<|open|><|close|><|sep|>", "required")
    answer = Constraint(kind="json")
    assert ask("plain", "auto", answer) == answer
    assert ask("<tool_call>", "auto") is None
