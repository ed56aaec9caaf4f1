"""`generate` with prompt logprobs and saved rows, on real nodes: equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.checkpoints import make_decoder, make_llama
from support.oracles.oracle import load_reference
from support.system.nodes import Crew, Machine
from support.system.parrot import Parrots
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [290, 3, 3]]
SAMPLED = ["--temperature", "0.7", "--seed", "3", "--repetition-penalty", "1.2", "--min-p", "0.02"]


def forward(model: Any, ids: list[int]) -> tuple[Any, Any]:
    """transformers' logits [T, V] and hidden states behind the norm [T, E]."""
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0].numpy(), out.hidden_states[-1][0].numpy()


def arrays(file: Path) -> dict[str, Any]:
    """The arrays of a .npz file."""
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive}


def test_rows_and_prompt_logprobs_of_a_list(machine: Machine, tmp_path: Path) -> None:
    """Two node processes on loopback, prompts of different lengths, tokens drawn."""
    folder = make_llama(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, PROMPTS)))
    result = machine.run(
        *("generate", "--prompts-file", str(tmp_path / "prompts"), "--model", str(folder)),
        *("--local", "2", "--dtype", "float32", "--max-tokens", "4", "--ignore-eos", "--json"),
        *("--prompt-logprobs", "2", "--save-logits", str(tmp_path / "l.npz"), *SAMPLED),
        *("--save-hidden", str(tmp_path / "h.npz"), "--hidden-rows", "mean"),
    )
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == {
        "prompts",
        "l.npz",
        "h.npz",
    }
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    saved, means = arrays(tmp_path / "l.npz"), arrays(tmp_path / "h.npz")
    assert saved["offsets"].tolist() == [0, 9, 13, 19]
    assert saved["positions"].tolist() == [*range(9), *range(4), *range(6)]
    assert means["offsets"].tolist() == [0, 1, 2, 3]
    assert len(answers) == len(PROMPTS)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        logits, hidden = forward(model, [*prompt, *answer["token_ids"][:-1]])
        start, end = saved["offsets"][number : number + 2]
        np.testing.assert_allclose(saved["logits"][start:end], logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(means["hidden"][number], hidden.mean(0), rtol=0, atol=TOLERANCE)
        first, *others = answer["prompt_logprobs"]
        assert first is None
        assert [entry["token_id"] for entry in others] == prompt[1:]
        logprobs = torch.log_softmax(torch.tensor(logits[:, :300]), -1)
        for row, entry in zip(logprobs, others, strict=False):
            assert entry["logprob"] == pytest.approx(float(row[entry["token_id"]]), abs=TOLERANCE)
            assert len(entry["top"]) == 2
            assert entry["top"][0][2] == pytest.approx(float(row.max()), abs=TOLERANCE)


def routed(model: Any, ids: list[int]) -> Any:
    """The experts that transformers' routers choose: [T, layers, K]."""
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda m, a, out: chosen.append(out[2])) for gate in gates]
    forward(model, ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).numpy()


def test_the_routing_of_a_list(machine: Machine, tmp_path: Path) -> None:
    """Two node processes, prompts of different lengths, tokens drawn."""
    folder = make_decoder(tmp_path / "model", "mixtral", num_hidden_layers=3)
    model = load_reference(folder)
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, PROMPTS)))
    result = machine.run(
        *("generate", "--prompts-file", str(tmp_path / "prompts"), "--model", str(folder)),
        *("--local", "2", "--dtype", "float32", "--max-tokens", "4", "--ignore-eos", "--json"),
        *("--record-routing", str(tmp_path / "r.npz"), *SAMPLED),
    )
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    saved = arrays(tmp_path / "r.npz")
    assert saved["routing"].dtype == np.int16
    assert saved["offsets"].tolist() == [0, 9, 13, 19]
    assert saved["positions"].tolist() == [*range(9), *range(4), *range(6)]
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        start, end = saved["offsets"][number : number + 2]
        expected = routed(model, [*prompt, *answer["token_ids"][:-1]])
        assert saved["routing"][start:end].tolist() == expected.tolist()


def test_a_model_without_experts_has_no_routing(
    trio: Crew, parrots: Parrots, tmp_path: Path
) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "1", "--json"]
    arguments = ["--record-routing", str(tmp_path / "r.npz")]
    error = trio.generate("abc", parrots.alphabet, *where, *arguments).error
    assert "is a llama model without experts: there is no routing to record" in error
    assert not list(tmp_path.iterdir())


def test_a_prompt_is_scored_without_any_token(trio: Crew, parrots: Parrots, tmp_path: Path) -> None:
    file = tmp_path / "last.npz"
    answer = trio.generate(
        *("abca", parrots.alphabet, "--nodes", trio.addresses(0, 2), "--json"),
        *("--max-tokens", "0", "--prompt-logprobs", "0"),
        *("--save-hidden", str(file), "--hidden-rows", "last", "--hidden-before-norm"),
    ).json
    assert answer["token_ids"] == []
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [round(entry["logprob"], 3) for entry in others[:2]] == [0, 0]
    assert others[2]["logprob"] < -10
    assert [entry["top"] for entry in others] == [[], [], []]
    saved = arrays(file)
    assert saved["positions"].tolist() == [3]
    assert saved["hidden"].argmax() == answer["prompt_token_ids"][-1]  # the parrot's one-hot rows


def test_nothing_that_was_not_asked_for_is_told(trio: Crew, parrots: Parrots) -> None:
    answer = trio.generate(
        "abc", parrots.alphabet, "--nodes", trio.addresses(0), "--max-tokens", "1", "--json"
    ).json
    assert answer["prompt_logprobs"] is None


def test_a_file_that_cannot_be_written_is_named(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "0", "--json"]
    arguments = ["--save-logits", "/proc/self/rows.npz"]  # a folder where no file can be made
    error = trio.generate("abc", parrots.alphabet, *where, *arguments).error
    assert "rows.npz cannot be written" in error
