"""What `generate` prints: text or token ids, and log-probabilities that a person can read."""

from __future__ import annotations

import json

import pytest

from shardnet.api.events import (
    GenerationEvent,
    GenerationResult,
    GenerationTiming,
    LikelyToken,
    RequestState,
    TokenLogprob,
    Usage,
)
from shardnet_cli.output.generation_output import EventLines, ListedTexts, OneText

TIMING = GenerationTiming(load_s=0, ttft_s=0.1, decode_tok_s=2.0, total_s=1.0, per_stage=())


def events(
    tokens: list[str], ids: list[int], logprobs: tuple[TokenLogprob, ...] | None = None
) -> list[GenerationEvent]:
    """A request whose tokens come one by one."""
    running = [
        GenerationEvent(
            request_id=1,
            index=0,
            sample=0,
            state=RequestState.RUNNING,
            token_ids=(token_id,),
            tokens=(token,),
            text=token,
        )
        for token, token_id in zip(tokens, ids, strict=True)
    ]
    result = GenerationResult(
        model="m",
        index=0,
        sample=0,
        prompt_token_ids=(5, 6),
        token_ids=tuple(ids),
        tokens=tuple(tokens),
        text="".join(tokens),
        finish_reason="length",
        seed=1,
        sample_index=0,
        logprobs=logprobs,
        usage=Usage(n_prompt=2, n_generated=len(ids), n_reused=0),
        timing=TIMING,
        prompt_logprobs=logprobs and (None, *logprobs[:1]),
    )
    last = GenerationEvent(
        request_id=1, index=0, sample=0, state=RequestState.FINISHED, result=result
    )
    return [*running, last]


@pytest.mark.parametrize(
    ("tokens", "shown"), [(["", "", ""], "7 8 9\n"), (["a", "", "b"], "ab\n")], ids=["ids", "text"]
)
def test_without_a_tokenizer_ids_are_printed_as_they_come(
    capsys: pytest.CaptureFixture[str], tokens: list[str], shown: str
) -> None:
    output = OneText(as_json=False)
    *first, last = events(tokens, [7, 8, 9])
    for event in first:
        output.take(event)
    assert capsys.readouterr().out == shown.strip()
    output.take(last)
    assert capsys.readouterr().out == "\n"
    listed = ListedTexts("", [0], as_json=False)
    for event in events(tokens, [7, 8, 9]):
        listed.take(event)
    assert capsys.readouterr().out == f"==>  <==\n{shown}\n"


def test_log_probabilities_are_a_table_beside_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    top = (LikelyToken(7, "a", -0.105), LikelyToken(9, "\n", -2.5))
    logprobs = (
        TokenLogprob(token_id=7, token="a", bytes=b"a", logprob=-0.105, top=top),
        TokenLogprob(token_id=3, token="", bytes=b"", logprob=-12.0, top=()),
    )
    output = OneText(as_json=False)
    for event in events(["a", "b"], [7, 3], logprobs):
        output.take(event)
    shown = capsys.readouterr()
    assert shown.out == "ab\n"
    lines = [" ".join(line.split()) for line in shown.err.splitlines()]
    assert lines[:-1] == [
        "prompt logprob share likeliest there",
        '"a" -0.105 90 % "a" -0.105, "\\n" -2.500',
        "(no log-probability: token 5, with which the prompt begins)",
        "token logprob share likeliest there",
        '"a" -0.105 90 % "a" -0.105, "\\n" -2.500',
        "3 -12.000 0.000614 %",
    ]
    assert all(len(line) <= 80 for line in shown.err.splitlines())


def test_json_has_ids_and_log_probabilities_and_no_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logprobs = (TokenLogprob(token_id=7, token="", bytes=b"", logprob=-0.1, top=()),)
    output = OneText(as_json=True)
    for event in events([""], [7], logprobs):
        output.take(event)
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["token_ids"], answer["text"]) == ([7], "")
    assert answer["logprobs"][0]["logprob"] == -0.1
    assert "share" not in shown.err


def test_what_a_request_waits_for_is_said_once_and_again_when_half_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Behind a lost ring: each thing that is waited for, then how many tokens are read again."""
    told = [
        (RequestState.RECOVERING, "bert was lost", 14.2),
        (RequestState.RECOVERING, "loading 4 layers at anna", 3.1),
        (RequestState.RECOVERING, "loading 4 layers at anna", 2.1),
        (RequestState.RESUMED, "", 0.0),
        (RequestState.RESUMED, "reading 4,200 tokens again", 0.0),
        (RequestState.RESUMED, "reading 4,100 tokens again", 0.0),
        *((RequestState.RESUMED, f"reading {300 * s:,} tokens again", s) for s in (13, 12, 7, 6)),
    ]
    output, lines = OneText(as_json=False), EventLines("", [0])
    for state, why, expected_s in told:
        event = GenerationEvent(
            request_id=1, index=0, sample=0, state=state, why=why, expected_s=expected_s
        )
        output.take(event)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "recovering, about 15 s: bert was lost",
        "recovering, about 4 s: loading 4 layers at anna",
        "reading 4,200 tokens again",
        "reading 3,900 tokens again, about 13 s",
        "reading 1,800 tokens again, about 6 s",
    ]
    lines.take(event)
    assert json.loads(capsys.readouterr().out) == {
        "index": 0,
        "sample": 0,
        "event": "resumed",
        "why": "reading 1,800 tokens again",
        "expected_s": 6,
    }
