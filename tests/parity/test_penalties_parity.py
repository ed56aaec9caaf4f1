"""Greedy text under penalties on whole rings, against transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_llama
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import TorchStages, request, run, tokens_of
from support.soak import cases, is_soak
from transformers import AutoModelForCausalLM

from shardnet.sampling_params import SamplingParams

N_TOKENS = 30
BIAS = ((7, 1.5), (40, -3.0), (200, 0.75))


class Reference:
    """The same checkpoint in transformers. What it says is asked for once, whatever the split."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._said: dict[str, list[int]] = {}

    def greedy(self, prompt: list[int], **settings: Any) -> list[int]:
        """Greedy tokens of transformers' `generate`, the end-of-text token among them."""
        key = json.dumps(["greedy", prompt, settings])
        if key not in self._said:
            self._said[key] = self._generate(prompt, settings)
        return self._said[key]

    def by_hand(self, prompt: list[int], frequency: float, presence: float) -> list[int]:
        """Greedy text under the two penalties that transformers lacks."""
        key = json.dumps(["by hand", prompt, frequency, presence])
        if key not in self._said:
            self._said[key] = self._step_by_step(prompt, frequency, presence)
        return self._said[key]

    def _generate(self, prompt: list[int], settings: dict[str, Any]) -> list[int]:
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=N_TOKENS,
            pad_token_id=0,
            **settings,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def _step_by_step(self, prompt: list[int], frequency: float, presence: float) -> list[int]:
        tokens = list(prompt)
        for _ in range(N_TOKENS):
            with torch.no_grad():
                logits = self._model(torch.tensor([tokens])).logits[0, -1]
            output = tokens[len(prompt) :]
            for token_id in set(output):
                logits[token_id] -= frequency * output.count(token_id)
                logits[token_id] -= presence
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module", params=cases([4], [1, 2]))
def stages(request: pytest.FixtureRequest, folder: Path) -> TorchStages:
    return TorchStages(folder, even_split(4, request.param))


def test_penalised_text_is_that_of_transformers(stages: TorchStages, reference: Reference) -> None:
    """Several sequences at once, each with its own penalties, in shared micro-batches."""
    cases: list[tuple[SamplingParams, dict[str, Any]]] = [
        (SamplingParams(), {}),
        (SamplingParams(repetition_penalty=1.3), {"repetition_penalty": 1.3}),
        (SamplingParams(repetition_penalty=0.8), {"repetition_penalty": 0.8}),
        (
            SamplingParams(logit_bias=BIAS, repetition_penalty=1.1),
            {
                "sequence_bias": [[[token_id], bias] for token_id, bias in BIAS],
                "repetition_penalty": 1.1,
            },
        ),
    ]
    prompts = [random_prompt(length, 300, seed=length) for length in (5, 40, 17, 33)]
    answers = run(
        stages,
        *(
            request(prompt, N_TOKENS, sampling)
            for prompt, (sampling, _) in zip(prompts, cases, strict=True)
        ),
    )
    for events, prompt, (_, settings) in zip(answers, prompts, cases, strict=True):
        want = reference.greedy(prompt, eos_token_id=None, **settings)
        assert tokens_of(events) == want


def test_stop_ids_are_held_back_as_by_transformers(
    stages: TorchStages, reference: Reference
) -> None:
    """The stop id is what greedy decoding says at once, and again and again."""
    prompt = random_prompt(12, 300, seed=3)
    (said, *_) = plain = reference.greedy(prompt, eos_token_id=None)
    stop_ids = frozenset({said, plain[1]})
    for min_tokens in (0, 1, 6):
        (events,) = run(
            stages, request(prompt, 30, SamplingParams(min_tokens=min_tokens), stop_ids=stop_ids)
        )
        more = {"min_new_tokens": min_tokens} if min_tokens else {}
        want = reference.greedy(prompt, eos_token_id=sorted(stop_ids), **more)
        assert tokens_of(events) == want


def test_frequency_and_presence_count_the_output_alone(
    stages: TorchStages, reference: Reference
) -> None:
    prompt = random_prompt(30, 300, seed=8)
    sampling = SamplingParams(frequency_penalty=0.9, presence_penalty=0.6)
    (events,) = run(stages, request(prompt, N_TOKENS, sampling))
    want = reference.by_hand(prompt, 0.9, 0.6)
    assert tokens_of(events) == want
    assert want != reference.by_hand(prompt, 0.0, 0.0)


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
@pytest.mark.parametrize("temperature", cases([0.9], [0.0]))
def test_a_warm_slot_and_a_pause_change_no_penalty(stages: TorchStages, temperature: float) -> None:
    """A second turn that continues a warm slot, a copy, and sequences that are replayed."""
    sampling = SamplingParams(
        temperature=temperature, seed=4, repetition_penalty=1.2, frequency_penalty=0.7
    )
    prompt = random_prompt(200, 300, seed=1)
    (first,) = run(stages, request(prompt, 20, sampling))
    turn = [*prompt, *tokens_of(first), *random_prompt(9, 300, seed=2)]
    other = [*prompt, *random_prompt(30, 300, seed=5)]
    cold = [tokens_of(run(stages, request(ids, 30, sampling))[0]) for ids in (turn, other)]
    warm = run(
        stages,
        request(prompt, 20, sampling),
        request(turn, 30, sampling),
        request(other, 30, sampling),
        at_once=False,
    )
    assert [tokens_of(events) for events in warm[1:]] == cold
    crowded = run(stages, request(turn, 30, sampling), request(other, 30, sampling), room_blocks=3)
    assert [tokens_of(events) for events in crowded] == cold


def test_a_draft_counts_for_the_rows_behind_it(stages: TorchStages) -> None:
    """A verification frame says of each row what one row after the other says, and rewinds."""
    sampling = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5)
    prompt = random_prompt(20, 300, seed=6)
    drafts = [9, 9, 250, 9, 31, 9]
    stages.open(sampling, n_prompt=len(prompt))
    stages.step(0, prompt, 1)
    one_by_one = [
        stages.step(len(prompt) + place, [token], 1).token_ids[0]
        for place, token in enumerate(drafts)
    ]
    stages.step(len(prompt), [250, 250, 250, 31, 31, 31], 6)
    at_once = stages.step(len(prompt), drafts, len(drafts))
    for compute in stages.computes:
        compute.reset()
    assert list(at_once.token_ids) == one_by_one
