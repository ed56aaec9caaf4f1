"""Two agents in turns on a server over two nodes, all of which are started anew in between."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.soak import cases, is_soak
from support.system.nodes import Machine, open_machine

CONTEXT = 4096
N_TURNS = 30 if is_soak() else 3
AT_ONCE = 10 if is_soak() else 2
"""So many turns of each agent, then everything is started anew."""
NEW = "A single man in possession of a good fortune asks again, and this is number {}. "
FAMILIES = {
    "qwen3_5_text": {"num_hidden_layers": 4},
    "falcon_h1": CASES["falcon_h1"] | {"num_hidden_layers": 3},
    "lfm3": CASES["lfm3"] | {"sliding_window": 100},
    "llama": {},
}


@contextlib.contextmanager
def server(machine: Machine, model: Path, *names: str, keeps: bool) -> Iterator[httpx.Client]:
    """Serve a model over new nodes of these names, which keep prefixes on disk if it `keeps`."""
    arguments = ["--prefix-cache", "1GiB"] if keeps else []
    nodes = machine.start_nodes(*names, arguments=arguments)
    addresses = ",".join(node.address for node in nodes)
    command = machine.begin_copy(
        *("serve", "--nodes", addresses, "--model", str(model), "--context", str(CONTEXT)),
        *("--port", "0", "--json"),
    )
    url = json.loads(command.stdout.wait_for("\n"))["url"]
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        yield client
    command.signal(signal.SIGINT)
    assert command.wait().code == 0
    for node in nodes:
        node.stop()


def complete(client: httpx.Client, prompt: str, seed: int, **more: Any) -> tuple[Any, Any]:
    """Ask for some tokens: the answer as it came, and what it takes to be equal to another."""
    body = {"prompt": prompt, "seed": seed, "max_tokens": 12, "temperature": 0.8, "logprobs": 3}
    answer = client.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    [choice] = told["choices"]
    n_tokens, logprobs = told["usage"]["completion_tokens"], choice["logprobs"]
    last = {
        name: logprobs[name][-n_tokens:] for name in ("tokens", "token_logprobs", "top_logprobs")
    }
    return told, (choice["text"].removeprefix(prompt), choice["finish_reason"], last)


@pytest.mark.parametrize("family", cases(["qwen3_5_text"], ["falcon_h1", "lfm3", "llama"]))
def test_agents_are_told_the_same_as_by_a_fresh_server(family: str, tmp_path: Path) -> None:
    """Both begin with the same, and go on from their own answers; the fresh one has one node, and
    computes every row of each prompt."""
    model = make_decoder(
        tmp_path / family, family, **{"max_position_embeddings": CONTEXT} | FAMILIES[family]
    )
    shared = "".join(NEW.format(n) for n in range(12))
    prompts = [f"{shared}You are {name}. " for name in ("the first", "the second")]
    asked: list[tuple[str, int, Any]] = []
    with open_machine(tmp_path / "machine") as machine:
        for first in range(0, N_TURNS, AT_ONCE):
            with server(machine, model, "anna", "bert", keeps=True) as client:
                for turn in range(first, min(first + AT_ONCE, N_TURNS)):
                    for agent, prompt in enumerate(prompts):
                        told, answer = complete(client, prompt, turn)
                        asked.append((prompt, turn, answer))
                        prompts[agent] += answer[0] + NEW.format(turn)
                        usage = told["usage"]
                        n_reused = usage["prompt_tokens_details"]["cached_tokens"]
                        assert turn == first or n_reused > usage["prompt_tokens"] // 2
        with server(machine, model, "cleo", keeps=False) as client:
            for prompt, seed, answer in asked:
                assert complete(client, prompt, seed, echo=True)[1] == answer
