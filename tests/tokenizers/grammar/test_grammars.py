"""Constraints compiled and followed: what may come next, and which are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from shardnet.constraints import Constraint, TokenMask
from shardnet.errors import RemoteProtocolError, UnsupportedModelError, UsageError
from shardnet.model.sampling.token_masks import forbidden_tokens
from shardnet.tokenizers.grammar.grammars import Grammars
from shardnet.tokenizers.grammar.matcher import GrammarMatcher
from shardnet.tokenizers.token_table import (
    HAS_TOKEN,
    IS_BYTE,
    IS_SPECIAL,
    ByteStrings,
    Joins,
    TokenTable,
)

WORDS = [b"</s>", b"<end>", b"", b"yes", b"y", *(bytes([n]) for n in range(32, 127)), b"es", b"y"]
EOS, END, HOLE, YES, Y = range(5)
N_IDS = len(WORDS) + 3
"""The LM head is wider than the tokenizer."""
FLAGS = bytes(
    [HAS_TOKEN | IS_SPECIAL] * 2 + [0] + [HAS_TOKEN] * (len(WORDS) - 4) + [HAS_TOKEN | IS_BYTE]
)
TABLE = TokenTable(joins=Joins.BYTES, flags=FLAGS, later=ByteStrings.of(WORDS))


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TABLE, n_ids=N_IDS, eos_ids=[EOS, END])
    made.matcher(Constraint(kind="json"))  # its process is not what a test leaves behind
    yield made
    made.close()


def allowed(mask: TokenMask) -> set[int]:
    return {n for n, is_not in enumerate(forbidden_tokens(mask, N_IDS)) if not is_not}


def ids(text: str) -> list[int]:
    return [5 + ord(character) - 32 for character in text]


def follow(matcher: GrammarMatcher, text: str) -> GrammarMatcher:
    for token_id in ids(text):
        matcher.advance(token_id)
    return matcher


def test_every_token_that_begins_what_may_follow_is_allowed(grammars: Grammars) -> None:
    """Special tokens and ids without a token never are, those that end a text where it may end."""
    matcher = grammars.matcher(Constraint.choice(["yes", "yes!"]))
    y_s = {YES, Y, *ids("y"), len(WORDS) - 1}  # however they are spelt
    assert allowed(matcher.mask()) == y_s
    assert allowed(matcher.mask()) == y_s  # asked again
    matcher.advance(YES)
    assert allowed(matcher.mask()) == {EOS, END, *ids("!")}
    assert not matcher.is_complete
    matcher.advance(*ids("!"))
    assert matcher.is_complete
    with pytest.raises(RemoteProtocolError, match="token 3, which the constraint forbids"):
        grammars.matcher(Constraint(kind="regex", text="[ab]")).advance(YES)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint(kind="json"), '{"a": [1, null]}'),
        (Constraint.json_schema({"enum": ["x", 3]}), "3"),
        (Constraint.json_schema("true"), "[1, 2]"),
        (Constraint(kind="json_schema", text='{"$ref": "#/a b", "a b": {"enum": [1]}}'), "1"),
        (Constraint(kind="regex", text="^[a-c]{2}/x$"), "ab/x"),
        (Constraint(kind="lark", text='start: "(" start ")" | "a"'), "((a))"),
        (Constraint.json_schema({"x-guidance": {"whitespace_flexible": True}}), "[   1]"),
    ],
)
def test_each_kind_is_followed_to_its_end(
    grammars: Grammars, constraint: Constraint, text: str
) -> None:
    matcher = follow(grammars.matcher(constraint), text)
    assert EOS in allowed(matcher.mask())


def test_what_is_drafted_ends_before_a_token_that_is_meant_by_its_id(grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint(kind="lark", text='start: "ab" <[3]> "cd"'))
    assert matcher.forced(9) == ids("ab")
    follow(matcher, "ab")
    assert (allowed(matcher.mask()), matcher.forced(9)) == ({YES}, [])
    matcher.advance(YES)
    assert matcher.forced(9) == ids("cd")


def test_drafts_count_up_to_the_first_that_is_forbidden(grammars: Grammars) -> None:
    matcher = follow(grammars.matcher(Constraint(kind="regex", text="ab[0-9]{2}")), "a")
    first = matcher.mask()
    assert matcher.forced(8) == ids("b")
    masks = matcher.masks(ids("b1x2"))
    assert [sorted(allowed(mask)) for mask in masks] == [ids("b"), *[ids("0123456789")] * 2]
    assert len(matcher.masks(ids("b123"))) == 4  # behind the end only the end of the text
    assert matcher.mask() == first  # it stayed where it was
    assert matcher.copy().masks(ids("b1")) == masks[:3]
    follow(matcher, "b12")
    assert matcher.is_complete


def test_what_must_follow_is_drafted_by_the_longest_tokens(grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint.choice(["yes"]))
    assert matcher.forced(8) == [YES]
    assert follow(matcher, "y").forced(1) == [WORDS.index(b"es")]


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint.json_schema("{"), "json_schema cannot be compiled: it is not JSON: Expecting"),
        (Constraint.json_schema("[NaN]"), "it is not JSON: NaN is no number"),
        (Constraint.json_schema("[" * 5000), "it is nested too deeply"),
        (Constraint.json_schema({"type": "horse"}), "Invalid type: horse"),
        (Constraint.json_schema({"uniqueItems": True, "type": "array"}), "uniqueItems"),
        (
            Constraint(kind="json_schema", text='{"$ref": "http://127.0.0.1:9/"}'),
            r"\$ref 'http://127.0.0.1:9/' leads to no schema in it",
        ),
        (
            Constraint(kind="json_schema", text='{"maximum": 18446744073709551615}'),
            "no grammar keeps the number in maximum 18446744073709551615",
        ),
        (Constraint(kind="regex", text="a(?=b)"), "look-around"),
        (Constraint(kind="regex", text="a("), "regex parse error.*unclosed group"),
        (Constraint(kind="lark", text="start: x"), r'lark cannot .* at 1\(8\): unknown name: "x"'),
        (Constraint.choice([]), "the list is empty"),
        (Constraint(kind="choice", text="[1]"), "it is not a list of texts"),
        (Constraint(kind="regex", text="é"), "no token of this model can write"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(
    grammars: Grammars, constraint: Constraint, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        grammars.matcher(constraint)


def test_a_grammar_that_ends_its_process_does_not_end_the_node() -> None:
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(9000))
    grammars = Grammars(TABLE, n_ids=N_IDS, eos_ids=[])
    try:
        with pytest.raises(UsageError, match="within limits: it ended its process with SIG"):
            grammars.matcher(Constraint(kind="lark", text=f'{rules}\nr9000: "a"\nstart: r0'))
        matcher = follow(grammars.matcher(Constraint(kind="regex", text="a+b?")), "aa")
        assert allowed(matcher.mask()) == {*ids("ab")}  # the model has no token that ends a text
        assert follow(matcher, "b").is_complete
    finally:
        grammars.close()


def test_refused_constraints_share_one_process() -> None:
    """Also before the first that can be compiled."""
    before = {child.pid for child in psutil.Process().children()}
    with closing(Grammars(TABLE, n_ids=N_IDS, eos_ids=[EOS])) as grammars:
        for text in ("([", "(", "["):
            with pytest.raises(UsageError, match="the regex cannot be compiled"):
                grammars.matcher(Constraint(kind="regex", text=text))
        mine = [child for child in psutil.Process().children() if child.pid not in before]
        assert len(mine) == 1
        assert grammars.matcher(Constraint(kind="regex", text="yes"))


def test_a_tokenizer_whose_tokens_change_where_they_join_is_refused() -> None:
    table = TokenTable(joins=Joins.WORDS, flags=FLAGS, later=ByteStrings.of(WORDS))
    grammars = Grammars(table, n_ids=N_IDS, eos_ids=[EOS])
    with pytest.raises(UnsupportedModelError, match="change where they join"):
        grammars.matcher(Constraint(kind="json"))


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (Constraint(kind="gbnf", text="x"), "the kind is 'gbnf'"),  # type: ignore[arg-type]
        (Constraint(kind="regex"), "the regex is empty"),
        (Constraint(kind="json", text="{}"), "json takes no text"),
        (Constraint(kind="regex", text="a" * (1 << 19)), "has 524288 characters"),
    ],
)
def test_what_is_no_constraint_is_refused_before_it_is_sent(
    constraint: Constraint, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        constraint.check()
