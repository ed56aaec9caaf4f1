"""What the README and docs/usage.md show does as they say: their commands are run as written.

Commands that need a model, a file or a machine that is not here are parsed only, by
tests/test_documents.py; the walk-through over three machines is in test_walkthrough.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.system.nodes import Machine
from test_documents import USAGE, commands

README = USAGE.parents[1] / "README.md"
ELSEWHERE = {"--model", "--nodes", "--peer", "--perplexity", "--watch"}
"""Flags whose values are a reader's own, or that run until somebody ends them."""
PROMPTS = (
    "She had never",
    '"He had"',
    "[5, 6, 7]",
    '{"prompt": "Once", "max_tokens": 2, "min_tokens": 1, "temperature": 0.5, "top_k": 5}',
    '{"token_ids": [5, 6], "top_p": 0.9, "min_p": 0.01, "seed": 3, "sample_index": 2}',
    '{"prompt": "It was", "repetition_penalty": 1.1, "presence_penalty": 0.1,'
    ' "frequency_penalty": 0.1}',
    '{"prompt": "No", "stop": ["."], "stop_token_ids": [0], "ignore_eos": true, "priority": 1,'
    ' "deadline_s": 100}',
)
"""One line of each kind that docs/usage.md names."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine of its own, where nothing has been done yet."""
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        machine.close()


def shown(page: Path, name: str) -> list[list[str]]:
    """The page's commands of a name that run anywhere, without `shardnet`."""
    found = [command[1:] for command in commands(page) if command[:2] == ["shardnet", name]]
    return [
        command for command in found if not ELSEWHERE & set(command) and "--chat" not in command
    ]


def shortly(command: list[str]) -> list[str]:
    """The same with a few tokens instead of hundreds."""
    return command if "--max-tokens" in command else [*command, "--max-tokens", "3"]


@pytest.mark.parametrize("page", [README, USAGE], ids=["README.md", "usage.md"])
def test_what_generates_generates(machine: Machine, page: Path) -> None:
    (machine.folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    found = shown(page, "generate")
    assert len(found) >= 2
    for command in found:
        result = machine.run(*shortly(command), stdin="She had never" if "-" in command else None)
        assert result.code == 0, (command, result.stderr)
        answers = (
            [json.loads(line) for line in result.stdout.splitlines()] if "--json" in command else []
        )
        if "--prompts-file" in command and answers:
            assert [answer["index"] for answer in answers] == list(range(len(PROMPTS)))
            assert answers[4]["sample_index"] == 2
        elif answers:
            assert len(answers[0]["logprobs"][0]["top"]) == 3
        else:
            assert result.stdout
    if page == USAGE:
        assert {"logits", "offsets", "positions"} <= np.load(machine.folder / "logits.npz").keys()
        assert len(np.load(machine.folder / "hidden.npz")["positions"]) <= 1


def test_keys_are_made_and_shown(machine: Machine) -> None:
    assert [command[1] for command in shown(USAGE, "key")] == ["new", "join", "show"]
    key = machine.run("key", "new").stdout
    assert key.strip() in machine.run("key", "show").stdout


def test_a_node_is_listed_planned_examined_and_relieved(machine: Machine) -> None:
    [node] = machine.start_nodes("attic")
    for command in shown(USAGE, "nodes") + shown(USAGE, "status"):
        assert "attic" in machine.run(*command).stdout
    machine.run("generate", "--max-tokens", "3", "Once")
    plans = shown(USAGE, "plan")
    assert len(plans) == 2
    for command in plans:
        result = machine.run(*command)
        assert result.code == 0, result.stderr
        assert re.search(r"predicted", result.stdout)
    for command in shown(README, "doctor") + shown(USAGE, "doctor"):
        assert re.search(r"attic.*runs at " + re.escape(node.address), machine.run(*command).stdout)
    for name in ("cache", "unload"):
        for command in shown(USAGE, name):
            result = machine.run(*command)
            assert result.code == 0, (command, result.stderr)
