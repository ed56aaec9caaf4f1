"""The stages against transformers' own classes, on random tiny checkpoints.

Llama and GPT-2 in float32: logits within 1e-4 and the same greedy tokens. The other families, and
other dtypes, are in test_family_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_gpt2, make_llama
from support.oracles.oracle import check_generation
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.soak import cases
from transformers import AutoModelForCausalLM

from shardnet.checkpoint.checkpoint import Checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}


def bare_gpt2(folder: Path, **config: Any) -> Path:
    """A GPT-2 as first published: no `transformer.` prefix, and mask buffers among the tensors."""
    make_gpt2(folder, **config)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(4):
        bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512, dtype=torch.uint8).tril()
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


GQA_ODD = {"hidden_size": 35, "head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1}
CASES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama-gqa": (make_llama, {}),
    "llama-tied-linear": (make_llama, {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "llama-llama3": (make_llama, {"rope_parameters": LLAMA3}),
    "llama-biases": (make_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-odd": (make_llama, GQA_ODD | {"intermediate_size": 51, "num_hidden_layers": 5}),
    "llama-mha-indexed": (make_llama, {"num_key_value_heads": 6, "max_shard_size": "60KB"}),
    "llama-gelu": (make_llama, {"hidden_act": "gelu"}),
    "gpt2": (make_gpt2, {}),
    "gpt2-bare-names": (bare_gpt2, {}),
    "gpt2-relu": (make_gpt2, {"activation_function": "relu", "n_inner": 70}),
    "gpt2-indexed": (make_gpt2, {"max_shard_size": "60KB"}),
}


@pytest.fixture(scope="module", params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, config = CASES[request.param]
    return make(tmp_path_factory.mktemp(request.param), **config)


@pytest.fixture(scope="module")
def reference(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("n_stages", cases([3], [1, 2, "all"]))
def test_greedy_tokens_and_logits_are_those_of_transformers(
    folder: Path, reference: Any, n_stages: int | str
) -> None:
    """Prompts in chunks, then decoding of several sequences in one micro-batch."""
    n_layers = Checkpoint.open(folder).config.n_layers
    ranges = even_split(n_layers, n_layers if n_stages == "all" else int(n_stages))
    prompts = [random_prompt(length, 300, seed=length) for length in (1, 20, 300)]
    check_generation(StageChain.load(folder, ranges), reference, prompts, 24)
