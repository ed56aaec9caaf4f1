"""What the README and docs/usage.md show does as they say: their commands are run as written.

The README's own run, over two local nodes, is in test_local.py, its walk-through over three
machines in test_walkthrough.py. Commands that need a model, a file or a machine that is not here
are parsed only, by tests/test_documents.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.soak import is_soak
from support.system.nodes import Machine, open_machine
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
    '{"prompt": "In", "regex": "[0-9]{4}|soon", "max_tokens": 5}',
)
"""One line of each kind that docs/usage.md names."""
SCHEMA = '{"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}'


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine of its own, where nothing has been done yet."""
    with open_machine(tmp_path / "machine") as machine:
        yield machine


def shown(page: Path, name: str) -> list[list[str]]:
    """The page's commands of a name that run anywhere, without `shardnet`."""
    found = [command[1:] for command in commands(page) if command[:2] == ["shardnet", name]]
    return [
        command for command in found if not ELSEWHERE & set(command) and "--chat" not in command
    ]


def telling(found: list[list[str]]) -> list[list[str]]:
    """Leave out commands whose flags another one has too, and more."""
    flags = [{word for word in command if word.startswith("-")} for command in found]
    return [
        command
        for command, own in zip(found, flags, strict=True)
        if not any(own < others for others in flags)
    ]


def shortly(command: list[str]) -> list[str]:
    """The same with a few tokens instead of hundreds."""
    return command if "--max-tokens" in command else [*command, "--max-tokens", "3"]


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_what_generates_generates(machine: Machine) -> None:
    (machine.folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    (machine.folder / "person.json").write_text(SCHEMA, encoding="utf-8")
    found = telling(shown(USAGE, "generate"))
    assert found
    for command in found:
        result = machine.run(*shortly(command), stdin="She had never" if "-" in command else None)
        assert result.code == 0, (command, result.stderr)
        assert result.stdout
        if "--json" not in command:
            continue
        answers = [json.loads(line) for line in result.stdout.splitlines()]
        if "--prompts-file" in command:
            assert [answer["index"] for answer in answers] == list(range(len(PROMPTS)))
            assert answers[4]["sample_index"] == 2
            assert re.fullmatch("[0-9]{4}|soon", answers[7]["text"])
        else:
            assert len(answers[0]["logprobs"][0]["top"]) == 3


def test_keys_are_made_and_shown(machine: Machine) -> None:
    assert [command[1] for command in shown(USAGE, "key")] == [
        "new",
        "join",
        "show",
        "rotate",
        "rotate",
    ]
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
