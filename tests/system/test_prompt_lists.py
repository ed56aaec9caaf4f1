"""`generate --prompts-file` on real nodes; and requests that are given a deadline."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.system.nodes import Crew, Result
from support.system.parrot import Parrots


def write(folder: Path, *lines: object) -> Path:
    """A file with these lines: texts as they stand, everything else as JSON."""
    file = folder / "prompts"
    file.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return file


def run(crew: Crew, file: Path, *arguments: str) -> Result:
    where = ["--nodes", crew.addresses(0, 1)]
    return crew.machine.call("generate", "--prompts-file", str(file), *where, *arguments)


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_results_come_in_order_of_the_file(trio: Crew, parrots: Parrots, tmp_path: Path) -> None:
    [m] = trio.machine.call(
        *("generate", "m", "--model", str(parrots.alphabet), "--max-tokens", "1", "--json"),
        *("--nodes", trio.addresses(0, 1)),
    ).json["prompt_token_ids"]
    file = write(tmp_path, {"prompt": "a", "max_tokens": 60}, "x", "", [m], '"b"')
    result = run(trio, file, "--model", str(parrots.alphabet), "--max-tokens", "3", "--json")
    assert result.code == 0
    found = objects(result)
    assert [entry["index"] for entry in found] == [0, 1, 2, 3]
    assert found[0]["text"].startswith("bcd")
    assert len(found[0]["token_ids"]) == 60
    assert [entry["text"] for entry in found[1:]] == ["yza", "nop", "cde"]
    assert {len(entry["stages"]) for entry in found} == {2}
    assert "4 of 4 prompts done" in result.stderr
    assert result.stderr.count("ring: ") == 1


def test_a_prompt_that_fails_is_named_and_ends_no_other(
    trio: Crew, parrots: Parrots, tmp_path: Path
) -> None:
    file = write(tmp_path, "a", [99999], "b", "c" * 9000)
    result = run(trio, file, "--model", str(parrots.alphabet), "--max-tokens", "2")
    assert result.code == 1
    assert result.stdout == "==> 1 <==\nbc\n\n==> 3 <==\ncd\n\n"
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    said = dict(line.removeprefix(f"error: {file} line ").split(": ", 1) for line in errors)
    assert "99999" in said["2"]
    assert "--context" in said["4"]


def test_equal_prompts_give_different_texts_each_to_be_had_again(
    trio: Crew, tmp_path: Path
) -> None:
    sampled = ["--temperature", "0.8", "--seed", "3", "--max-tokens", "12", "--deterministic"]
    three = write(tmp_path, *["She had never"] * 3)
    texts = [entry["text"] for entry in objects(run(trio, three, *sampled, "--json"))]
    assert len(set(texts)) == 3
    last = write(tmp_path, {"prompt": "She had never", "sample_index": 2})
    [again] = objects(run(trio, last, *sampled, "--json"))
    assert again["text"] == texts[2]
    assert (again["seed"], again["sample_index"]) == (3, 2)


@pytest.mark.parametrize("line", ["[1, 2", '{"prompt": "a", "max_tokens": -1}', '{"text": "a"}'])
def test_a_bad_line_is_wrong_usage(trio: Crew, tmp_path: Path, line: str) -> None:
    result = run(trio, write(tmp_path, "good", line))
    assert result.code == 2
    assert result.stdout == ""
    assert "line 2" in result.stderr


def test_one_source_of_prompts_is_enough(trio: Crew, tmp_path: Path) -> None:
    result = run(trio, write(tmp_path, "good"), "another")
    assert result.code == 2
    assert "one of" in result.stderr


def test_a_deadline_that_passes_is_a_named_failure(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 1), "--max-tokens", "8000"]
    running = trio.machine.begin_copy(
        "generate", "a", "--model", str(parrots.big), *where, "--deadline", "0.5"
    )
    result = running.wait()
    assert result.code == 1
    assert "did not end within its deadline of 0.5 s" in result.error_line
    assert trio.says("a", parrots.big, 0, 1) == "bcd"


def test_samples_of_one_prompt_differ_and_each_can_be_had_again(trio: Crew, tmp_path: Path) -> None:
    asked = ("She had never", "--temperature", "0.8", "--seed", "3", "--max-tokens", "12")
    where = ("--nodes", trio.addresses(0, 1), "--deterministic")
    result = trio.machine.call("generate", *asked, *where, "--n", "3", "--json")
    assert result.code == 0, result.stderr
    samples = objects(result)
    assert [(e["index"], e["sample"], e["sample_index"]) for e in samples] == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 2),
    ]
    assert len({entry["text"] for entry in samples}) == 3
    alone = {"prompt": asked[0], "sample_index": 2, "deterministic": True}
    [again] = objects(run(trio, write(tmp_path, alone), *asked[1:], "--json"))
    assert again["text"] == samples[2]["text"]
    shown = trio.machine.call("generate", *asked, *where, "--n", "2").stdout
    texts = [entry["text"] for entry in samples[:2]]
    assert shown == f"==> sample 0 <==\n{texts[0]}\n\n==> sample 1 <==\n{texts[1]}\n\n"


def test_a_line_has_options_of_its_own(trio: Crew, parrots: Parrots, tmp_path: Path) -> None:
    model = ("--model", str(parrots.alphabet), "--max-tokens", "4", "--json")
    [plain] = objects(run(trio, write(tmp_path, "a"), *model))
    assert (plain["text"], plain["logprobs"]) == ("bcde", None)
    b = plain["token_ids"][0]
    lines = [
        {"prompt": "a", "logprobs": 2},
        {"prompt": "a", "logit_bias": {str(b): -100}},
        {"prompt": "a", "bos": "on"},
        {"prompt": "a", "speculate": "ngram", "draft_tokens": 2},
        {"prompt": "a", "deterministic": True},
    ]
    scored, biased, begun, drafted, alone = objects(run(trio, write(tmp_path, *lines), *model))
    assert [entry["token_id"] for entry in scored["logprobs"]] == plain["token_ids"]
    assert {len(entry["top"]) for entry in scored["logprobs"]} == {2}
    assert biased["token_ids"][0] != b
    assert begun["prompt_token_ids"] == [0, *plain["prompt_token_ids"]]
    assert drafted["text"] == alone["text"] == "bcde"


def test_events_come_as_lines(trio: Crew, parrots: Parrots, tmp_path: Path) -> None:
    file = write(tmp_path, "a", [99999], {"prompt": "x", "logprobs": 1})
    model = ("--model", str(parrots.alphabet), "--max-tokens", "4")
    result = run(trio, file, *model, "--jsonl")
    assert result.code == 1
    events = objects(result)
    assert {entry["sample"] for entry in events} == {0}
    ends = {e["index"]: e for e in events if e["event"] in ("finished", "failed")}
    assert [ends[index]["event"] for index in range(3)] == ["finished", "failed", "finished"]
    assert "99999" in ends[1]["error"]
    for index, text in ((0, "bcde"), (2, "yzab")):
        pieces = [e for e in events if (e["index"], e["event"]) == (index, "text")]
        assert "".join(piece["text"] for piece in pieces) == text == ends[index]["text"]
        ids = [token_id for piece in pieces for token_id in piece["token_ids"]]
        assert ids == ends[index]["token_ids"]
        assert events.index(pieces[0]) < events.index(ends[index])
    [first, *_] = [e for e in events if (e["index"], e["event"]) == (2, "text")]
    assert first["logprobs"][0]["token_id"] == first["token_ids"][0]


def test_lines_end_whole_at_ctrl_c(trio: Crew, parrots: Parrots) -> None:
    running = trio.machine.begin_copy(
        *("generate", "a", "--model", str(parrots.big), "--nodes", trio.addresses(0, 1)),
        *("--max-tokens", "8000", "--jsonl"),
    )
    running.stdout.wait_for('"event":"text"')
    running.signal(signal.SIGINT)
    result = running.wait()
    assert result.code == 130
    events = [entry["event"] for entry in objects(result)]
    assert "text" in events
    assert not {"finished", "failed"} & set(events)
    assert result.stdout.endswith("}\n")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--json", "--jsonl"], "choose one of --json and --jsonl"),
        (["--n", "0"], "for --n: '0': give 1 or more"),
    ],
)
def test_what_does_not_go_together_is_wrong_usage(trio: Crew, flags: list[str], named: str) -> None:
    result = trio.machine.call("generate", "a", *flags, "--nodes", trio.addresses(0))
    assert (result.code, result.stdout) == (2, "")
    assert named in result.stderr
