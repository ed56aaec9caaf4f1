"""The lines of a file of prompts, and what `generate` makes of their order."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from msgspec import structs

from shardnet.api import (
    GenerationEvent,
    GenerationResult,
    GenerationTiming,
    Prompt,
    RequestState,
    SamplingParams,
    Usage,
)
from shardnet.constraints import Constraint
from shardnet.errors import CapacityError
from shardnet_cli.flags.sampling_options import SamplingOptions, read_prompt, read_prompts
from shardnet_cli.output.generation_output import EventLines, ListedTexts

SAMPLING = SamplingParams(temperature=0.5, seed=4)


@pytest.mark.parametrize(
    ("line", "content"),
    [
        ("Once upon a time", "Once upon a time"),
        ("  spaces stay ", "  spaces stay "),
        ("42", "42"),
        ("null", "null"),
        ('"two\\nlines"', "two\nlines"),
        ('"Never," she said.', '"Never," she said.'),
        ("[1, 2,3]", [1, 2, 3]),
        ('{"prompt": "a"}', "a"),
        (' {"token_ids": [4]}', [4]),
        ('{"prompt": ""}', ""),
    ],
)
def test_what_a_line_says(line: str, content: str | list[int]) -> None:
    assert read_prompt(line, SAMPLING) == Prompt(content)


def test_an_object_has_options_of_its_own() -> None:
    line = {
        "prompt": "a",
        "temperature": 0,
        "seed": 9,
        "sample_index": 3,
        "max_tokens": 5,
        "stop": ["x"],
        "priority": -2,
        "deadline_s": 1.5,
    }
    assert read_prompt(json.dumps(line), SAMPLING) == Prompt(
        "a",
        sampling=SamplingParams(temperature=0, seed=9),
        sample_index=3,
        options={"max_tokens": 5, "stop": ["x"], "priority": -2, "deadline_s": 1.5},
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[1, 2", "truncated"),
        (r'{"prompt": "a\ud83d"}', "prompt has half a surrogate pair at character 2"),
        (r'"\ude00"', "the text has half a surrogate pair at character 1"),
        ('["a"]', "'a': give a whole number"),
        (
            '{"prompt": "a", "max_tokes": 3}',
            "max_tokes is not a known key; did you mean 'max_tokens'",
        ),
        ('{"prompt": "a", "top_k": 1.5}', "top_k is 1.5: give a whole number"),
        ('{"messages": [{"role": 3}]}', "a value of messages[0]: give text"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "messages[0].content is a list: a prompts file takes text only",
        ),
        ('{"prompt": 1}', "prompt"),
        ('{"text": "a"}', "text"),
        ('{"prompt": "a", "token_ids": [1]}', "one of prompt, token_ids and messages"),
        ("{}", "one of prompt, token_ids and messages"),
        ('{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
        ('{"prompt": "a", "bos": "x"}', "bos is 'x': give "),
        ('{"prompt": "a", "deterministic": 1}', "deterministic is 1: give true or false"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        ('{"prompt": "a", "speculate": "http://me:pw@host/m"}', "not a URL"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"good\n\n{line}\n")
    with pytest.raises(typer.BadParameter, match=f"prompts line 3: .*{re.escape(named)}"):
        read_prompts(str(file), SAMPLING)


def test_lines_without_anything_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes("\ufeffé\r\n\r\n  \nb\u2028c".encode())
    assert read_prompts(str(file), SAMPLING) == ([1, 4], [Prompt("é"), Prompt("b\u2028c")])


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n"), encoding="utf-8"))
    assert read_prompts("-", SAMPLING) == ([1, 2], [Prompt("a"), Prompt("b")])


@pytest.mark.parametrize(("content", "named"), [(b"\n \n", "no prompts"), (b"\xff\n", "UTF-8")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(typer.BadParameter, match=named):
        read_prompts(str(file), SAMPLING)
    with pytest.raises(typer.BadParameter, match="No such file"):
        read_prompts(str(tmp_path / "nothing"), SAMPLING)


def news(index: int, text: str = "", **changes: Any) -> GenerationEvent:
    return GenerationEvent(
        request_id=index + 1,
        index=index,
        sample=0,
        state=changes.pop("state", RequestState.RUNNING),
        text=text,
        token_ids=(1,) if text else (),
        **changes,
    )


def finished(index: int, text: str, held: str = "") -> GenerationEvent:
    """The end of a prompt, `held` the end of its text."""
    timing = GenerationTiming(load_s=0, ttft_s=0, decode_tok_s=0, total_s=0, per_stage=())
    result = GenerationResult(
        model="m",
        index=index,
        sample=0,
        prompt_token_ids=(1,),
        token_ids=(1,),
        tokens=(text,),
        text=text,
        finish_reason="length",
        seed=0,
        sample_index=index,
        logprobs=None,
        usage=Usage(n_prompt=1, n_generated=1, n_reused=0),
        timing=timing,
    )
    return news(index, held, state=RequestState.FINISHED, result=result)


def failed(index: int) -> GenerationEvent:
    return news(index, state=RequestState.FAILED, error=CapacityError("no\nroom"))


def test_texts_come_in_order_each_as_soon_as_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ListedTexts("f", [1, 2, 4, 5], as_json=False)
    steps = [
        (news(1, "two"), ""),
        (news(0), ""),
        (news(0, "one"), "==> 1 <==\none"),
        (finished(1, "two!", "!"), ""),
        (failed(2), ""),
        (finished(0, "one"), "\n\n==> 2 <==\ntwo!\n\n"),
        (news(3, "five"), "==> 5 <==\nfive"),
        (finished(3, "five", "."), ".\n\n"),
    ]
    for event, shown in steps:
        texts.take(event)
        assert capsys.readouterr().out == shown
    assert not texts.close()


def test_json_comes_in_order_and_failures_apart(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ListedTexts("f", [1, 3, 4], as_json=True)
    for event in (news(1, "b"), finished(2, "c"), failed(0)):
        texts.take(event)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: f line 1: no room\n"
    texts.take(finished(1, "b"))
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(found["index"], found["text"]) for found in objects] == [(1, "b"), (2, "c")]
    assert not texts.close()
    assert "2 of 3 prompts done, 1 failed" in capsys.readouterr().err


def test_a_list_of_which_nothing_failed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ListedTexts("f", [1], as_json=True)
    texts.take(finished(0, "a"))
    assert texts.close()


def test_many_failures_of_one_cause_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ListedTexts("f", range(1, 31), as_json=True)
    for index in range(30):
        texts.take(failed(index))
    assert not texts.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:10] == [f"error: f line {line}: no room" for line in range(1, 11)]
    assert lines[10] == "error: f: 20 more prompts: no room"
    assert len(lines) == 12


def test_a_line_may_set_what_the_flags_set() -> None:
    line = {
        "prompt": "a",
        "logprobs": 3,
        "logit_bias": {"50": -3.5, "7": 1},
        "bos": "off",
        "speculate": "auto",
        "draft_tokens": 4,
        "deterministic": True,
        "keep_special_tokens": True,
    }
    prompt = read_prompt(json.dumps(line), SAMPLING)
    assert prompt.sampling == structs.replace(
        SAMPLING, n_logprobs=3, logit_bias=((50, -3.5), (7, 1.0))
    )
    assert prompt.options == {
        "bos": "off",
        "speculate": "auto",
        "draft_tokens": 4,
        "deterministic": True,
        "keep_special_tokens": True,
    }
    without = read_prompt(
        '{"prompt": "a", "logprobs": null}', structs.replace(SAMPLING, n_logprobs=2)
    )
    assert without.sampling is not None
    assert without.sampling.n_logprobs is None


def test_samples_of_one_prompt_come_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ListedTexts("", [0], as_json=False, n_samples=2)
    texts.take(replace(finished(0, "two"), text="two", sample=1))
    assert capsys.readouterr().out == ""
    texts.take(replace(failed(0), sample=0))
    shown = capsys.readouterr()
    assert shown.out == "==> sample 1 <==\ntwo\n\n"
    assert shown.err == "error: sample 0: no room\n"
    assert not texts.close()
    assert "1 of 2 samples done, 1 failed" in capsys.readouterr().err


def test_events_are_lines_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = EventLines("f", [3, 4], n_samples=2)
    events = [
        replace(news(1), state=RequestState.QUEUED, ahead=2),
        replace(news(1), sample=1),
        news(1, "b"),
        failed(0),
        finished(1, "b", "!"),
    ]
    shown = []
    for event in events:
        lines.take(event)
        shown.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert shown[:3] == [
        [{"index": 1, "sample": 0, "event": "queued", "ahead": 2}],
        [{"index": 1, "sample": 1, "event": "running"}],
        [{"index": 1, "sample": 0, "event": "text", "text": "b", "token_ids": [1]}],
    ]
    assert shown[3] == [
        {"index": 0, "sample": 0, "event": "failed", "error": "no\nroom", "code": 21}
    ]
    held, end = shown[4]
    assert (held["event"], held["text"], held["token_ids"]) == ("text", "!", [1])
    assert (end["event"], end["text"], end["token_ids"]) == ("finished", "b", [1])
    assert not lines.close()


def test_a_line_may_say_what_its_output_must_match() -> None:
    schema = read_prompt('{"prompt": "A", "json_schema": {"type": "object"}}', SAMPLING)
    assert schema.options["constraint"] == Constraint.json_schema({"type": "object"})
    pattern = read_prompt('{"prompt": "A", "regex": "a+"}', SAMPLING)
    assert pattern.options["constraint"] == Constraint(kind="regex", text="a+")
    with pytest.raises(ValueError, match="give one of json_schema, regex and grammar"):
        read_prompt('{"prompt": "A", "regex": "a+", "grammar": "start: x"}', SAMPLING)


def test_flags_say_what_the_output_must_match(tmp_path: Path) -> None:
    file = tmp_path / "grammar.lark"
    file.write_text('start: "a"\n', encoding="utf-8")
    text = ' {"type": "object"}'
    said = {
        "grammar": (str(file), Constraint(kind="lark", text='start: "a"\n')),
        "json_schema": (text, Constraint(kind="json_schema", text=text)),
        "regex": ("a+", Constraint(kind="regex", text="a+")),
    }
    for name, (value, constraint) in said.items():
        options = SamplingOptions(**{name: value})  # type: ignore[arg-type]
        assert options.generation()["constraint"] == constraint
    with pytest.raises(typer.BadParameter, match="choose one of --json-schema and --regex"):
        SamplingOptions(json_schema="{}", regex="a").generation()
    with pytest.raises(typer.BadParameter, match=r"none\.json: No such file"):
        SamplingOptions(json_schema=str(tmp_path / "none.json")).generation()
