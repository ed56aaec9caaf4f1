"""Rows of the LM head that no token stands behind: never drawn, on any split, as transformers does.

The tail loads the tokenizer itself, so stages are loaded here as a node loads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import N_TOKENS, VOCAB_SIZE, make_llama
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import LoadedStages, load_stages, request, run, tokens_of
from support.soak import cases
from transformers import AutoModelForCausalLM

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.output_params import OutputParams
from shardnet.runtime.engine.outputs import PromptLogprobsReady
from shardnet.runtime.engine.requests import TokenGenerated
from shardnet.sampling_params import SamplingParams

ADDED_ID = 310
HOLES = [n for n in range(N_TOKENS, VOCAB_SIZE) if n != ADDED_ID]
"""The checkpoint's ids without a token: before and behind one that a file adds."""

MAX_TOKENS = 12
N_STAGES = cases([1, 3], [2])
PROMPTS = [random_prompt(n, N_TOKENS, seed=n) for n in (5, 17, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows without a token would win nearly every draw."""
    folder = make_llama(tmp_path_factory.mktemp("padded"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][HOLES] *= 4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "added_tokens.json").write_text(json.dumps({"<added>": ADDED_ID}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def splits(folder: Path) -> list[LoadedStages]:
    return [load_stages(folder, even_split(4, n_stages)) for n_stages in N_STAGES]


@pytest.fixture(scope="module", params=range(len(N_STAGES)))
def stages(request: pytest.FixtureRequest, splits: list[LoadedStages]) -> LoadedStages:
    return splits[request.param]


def test_a_head_with_values_of_its_own_counts_where_the_config_ties_it(tmp_path: Path) -> None:
    """As fine-tuning writes it; one that is only a copy is tied."""
    folder = make_llama(tmp_path, tie_word_embeddings=True)
    tensors, path = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, path, {"format": "pt"})
    assert Checkpoint.open(folder).config.tie_word_embeddings
    save_file(tensors | {"lm_head.weight": table.flip(0).contiguous()}, path, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = transformers_tokens(model, PROMPTS[1], suppress_tokens=range(N_TOKENS, VOCAB_SIZE))
    [said] = run(load_stages(folder, even_split(4, 2)), request(PROMPTS[1], MAX_TOKENS))
    assert tokens_of(said) == expected


def transformers_tokens(model: Any, prompt: list[int], **settings: Any) -> list[int]:
    ids = torch.tensor([prompt])
    tokens: list[int] = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=[],
        pad_token_id=0,
        **settings,
    )[0, len(prompt) :].tolist()
    return tokens


def test_the_rows_would_win_if_they_were_not_masked(reference: Any) -> None:
    tokens = transformers_tokens(reference, PROMPTS[0])
    assert sum(token_id in HOLES for token_id in tokens) > MAX_TOKENS / 2


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        (SamplingParams(), {}),
        (SamplingParams(repetition_penalty=1.3), {"repetition_penalty": 1.3}),
        (SamplingParams(repetition_penalty=0.7), {"repetition_penalty": 0.7}),
    ],
)
def test_greedy_text_is_that_of_transformers_without_the_rows(
    splits: list[LoadedStages], reference: Any, params: SamplingParams, settings: dict[str, Any]
) -> None:
    want = [
        transformers_tokens(reference, prompt, suppress_tokens=HOLES, **settings)
        for prompt in PROMPTS
    ]
    for stages in splits:
        said = run(stages, *(request(prompt, MAX_TOKENS, params) for prompt in PROMPTS))
        assert [tokens_of(events) for events in said] == want, f"{len(stages.computes)} stages"


SAMPLED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=3.0, top_k=30, seed=2),
    SamplingParams(temperature=1.5, top_p=0.9, min_p=0.001, frequency_penalty=-1.5, seed=3),
    SamplingParams(temperature=1.0, presence_penalty=-2, logit_bias=((315, 100.0),), seed=4),
]


def test_sampled_text_has_none_of_the_rows_and_is_alike_on_every_split(
    splits: list[LoadedStages],
) -> None:
    wanted = [request(PROMPTS[1], MAX_TOKENS, params) for params in SAMPLED]
    drawn = [
        [tokens_of(events) for events in run(stages, *wanted, at_once=False)] for stages in splits
    ]
    assert all(texts == drawn[0] for texts in drawn[1:])
    assert not set(HOLES) & {token_id for tokens in drawn[0] for token_id in tokens}
    assert len({tuple(tokens) for tokens in drawn[0]}) == len(SAMPLED)


def test_logprobs_are_over_the_tokens_alone(stages: LoadedStages, reference: Any) -> None:
    params = SamplingParams(n_logprobs=3)
    outputs = OutputParams(n_prompt_logprobs=0)
    (events,) = run(stages, request(PROMPTS[2], 4, params, outputs=outputs))
    generated = [event for event in events if isinstance(event, TokenGenerated)]
    ids = [*PROMPTS[2], *(event.token_id for event in generated)]
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0].double()
    logits[:, HOLES] = -torch.inf
    want = torch.log_softmax(logits, -1)
    for place, event in enumerate(generated, len(PROMPTS[2]) - 1):
        assert event.logprobs is not None
        assert event.logprobs.logprob == pytest.approx(float(want[place, event.token_id]), abs=1e-4)
        best = torch.topk(want[place], 3)
        assert [token_id for token_id, _ in event.logprobs.top] == best.indices.tolist()
    scored = [entry for e in events if isinstance(e, PromptLogprobsReady) for entry in e.logprobs]
    assert len(scored) == len(PROMPTS[2]) - 1
    for place, entry in enumerate(scored):
        assert entry.logprob == pytest.approx(float(want[place, ids[place + 1]]), abs=1e-4)
