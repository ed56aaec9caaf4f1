"""What is asked for, as messages: sample indices, precedence, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.api import GenerationOptions, ModelChoice, Prompt, SamplingParams
from shardnet.api.requests import is_single, make_requests, name_model
from shardnet.constraints import Constraint
from shardnet.errors import SamplingError, UsageError
from shardnet.wire.messages.generation import Generate

CHOICE = ModelChoice(model="m")
GREEDY = SamplingParams()


def messages(prompts: Any, sampling: SamplingParams = GREEDY, **options: Any) -> list[Generate]:
    return [request.message for request in make_requests(prompts, sampling, CHOICE, **options)]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9))
def test_equal_prompts_differ_in_their_sample_index(n_prompts: int, n: int, first: int) -> None:
    sampling = SamplingParams(sample_index=first)
    made = messages(["same"] * n_prompts, sampling, n=n)
    indices = [message.sampling.sample_index for message in made]
    assert indices == list(range(first, first + n_prompts * n))


def test_a_prompt_keeps_the_sample_index_that_it_names() -> None:
    prompts = ["a", Prompt("b", sample_index=7), Prompt("c", sampling=SamplingParams(seed=1))]
    made = messages(prompts, n=2)
    assert [message.sampling.sample_index for message in made] == [0, 1, 7, 8, 4, 5]
    assert [message.sampling.seed for message in made] == [0, 0, 0, 0, 1, 1]


def test_a_prompts_options_go_before_those_of_the_call() -> None:
    own: GenerationOptions = {"max_tokens": 3, "priority": 9}
    first, second = messages(["a", Prompt("b", options=own)], max_tokens=7, deadline_s=2)
    assert (first.max_tokens, first.priority, first.deadline_s) == (7, 0, 2)
    assert (second.max_tokens, second.priority, second.deadline_s) == (3, 9, 2)


def test_pictures_are_those_of_messages_or_of_the_prompt() -> None:
    """The command gives none beside a conversation that has some."""
    parts = [{"type": "image", "image": b"cat"}, {"type": "text", "text": "what is it?"}]
    [shown] = messages([Prompt([{"role": "user", "content": parts}])], pictures=[])
    [plain] = messages("what is it?", pictures=[b"dog"])
    assert [one.data for one in (*shown.pictures, *plain.pictures)] == [b"cat", b"dog"]


@pytest.mark.parametrize(
    ("prompts", "single"),
    [
        *(("a", True), ([1, 2], True), ((1,), True), (Prompt([1]), True)),
        *(([], False), (["a"], False), ([[1, 2]], False), ([Prompt("a")], False)),
    ],
)
def test_one_prompt_is_told_from_a_list(prompts: Any, single: bool) -> None:
    assert is_single(prompts) is single
    assert len(messages(prompts)) == (0 if prompts == [] else 1)


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ("a", {"priority": 101}, "priority"),
        ("a", {"deadline_s": float("nan")}, "deadline_s"),
        ("a", {"deadline_s": -1.0}, "deadline_s"),
        ("a", {"max_tokens": -1}, "max_tokens"),
        ("a", {"stop": "abc"}, "stop"),
        ("a", {"bos": "sometimes"}, "bos"),
        ("a", {"colour": "red"}, "colour"),
        ("a", {"n": 0}, "n must be"),
        ("a", {"max_tokens": 5 * 10**9}, "max_tokens is 5000000000: give .* at most 4294967295"),
        ("a", {"max_tokens": 10**30}, "max_tokens is 10*: give a smaller number"),
        ("a", {"max_tokens": "x"}, "max_tokens is 'x': give a whole number"),
        ("a", {"max_tokes": 1}, "no option 'max_tokes'; did you mean 'max_tokens'"),
        ("a", {"bos": "x"}, r"bos is 'x': give (on|off|auto|, | or )+$"),
        (
            "a",
            {"stop": ["a" * 5000]},
            r"stop\[0\] is text of 5000 characters: give text of at most",
        ),
        ([1, "a"], {}, r"token_ids\[1\] is 'a': give a whole number"),
        ([{"role": "user"}], {}, r"content is missing"),
        ([{"role": 1, "content": "x"}], {}, r"role is 1: give text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]}],
            {},
            r"messages\[0\]\.content\[1\] is of type 'image_url': only text and image are read",
        ),
        (None, {}, "None is not a prompt"),
        (["a", 5], {}, "5 is not a prompt"),
        ([1, -1], {}, "token_ids"),
        ([1, 2**32], {}, "token_ids"),
        ("\ud800", {}, "prompt has half a surrogate pair at character 1"),
        ("a", {"constraint": Constraint(kind="regex", text="\udc00")}, "constraint.text has half"),
        (["a", [1, 2], [-5]], {}, "prompt 3 of 3"),
    ],
)
def test_what_cannot_be_asked_is_named(prompts: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        messages(prompts, **options)


def test_sampling_that_is_out_of_range_is_named_with_its_prompt() -> None:
    with pytest.raises(SamplingError, match=r"prompt 2 of 2: temperature"):
        messages(["a", Prompt("b", sampling=SamplingParams(temperature=-1.0))])
    with pytest.raises(SamplingError, match="sample index"):
        messages(["a", "b"], SamplingParams(sample_index=2**32 - 1))


def test_a_relative_path_is_made_absolute_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert name_model("model") == str(tmp_path / "model")
    assert name_model("./org/name") == str(tmp_path / "org" / "name")
    assert name_model("org/name") == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert name_model("org/name") == str(tmp_path / "org" / "name")
    assert name_model("/elsewhere/model") == "/elsewhere/model"
    assert name_model("shardnet/default") == "shardnet/default"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"context": 10**12}, "choice.context is 1000000000000: give a whole number of at most"),
        ({"layers": [(1,)]}, r"choice.layers\[0\] is \(1,\): give a list of 2 entries"),
        ({"nodes": ["a:1"] * 1000}, "choice.nodes is a list of 1000: give a list of at most"),
        ({"quant": "int5"}, "choice.quant is 'int5': give int4 or int8"),
        ({"stream_layers": "some"}, "is 'some': give auto or a whole number"),
    ],
)
def test_a_choice_that_no_message_holds_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_requests("a", GREEDY, ModelChoice(model="m", **fields))


def test_a_parameter_of_sampling_that_is_no_number_is_named() -> None:
    wrong: Any = "hot"
    with pytest.raises(SamplingError, match="temperature must be a number, not 'hot'"):
        messages("a", SamplingParams(temperature=wrong))
