"""What is asked for, as messages: sample indices, precedence, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.api import GenerationOptions, ModelChoice, Prompt, SamplingParams
from shardnet.api.requests import is_single, make_requests, name_model
from shardnet.errors import SamplingError, UsageError
from shardnet.wire.generation import Generate

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
        ([1, -1], {}, "token_ids"),
        ([1, 2**32], {}, "token_ids"),
        ("\ud800", {}, "surrogates"),
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
