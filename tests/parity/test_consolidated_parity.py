"""Meta's and Mistral's own files: what transformers says of the same weights in its own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models.checkpoints import VOCAB_SIZE, make_decoder, make_llama
from support.models.consolidated_checkpoints import to_meta, to_mistral
from support.oracles.oracle import check_generation
from support.rings.stage_chain import StageChain, even_split, random_prompt
from transformers import AutoModelForCausalLM

SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def check(source: Path, folder: Path) -> None:
    chain = StageChain.load(folder, even_split(3, 2))
    reference = AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    prompts = [random_prompt(40, VOCAB_SIZE, seed=3), random_prompt(5, VOCAB_SIZE, seed=4)]
    check_generation(chain, reference, prompts, 8)


@pytest.mark.parametrize("window", [None, 20])
def test_mistral(window: int | None, tmp_path: Path) -> None:
    source = make_decoder(
        tmp_path / "source",
        "mistral",
        with_tokenizer=False,
        num_hidden_layers=3,
        head_dim=10,
        sliding_window=window,
    )
    check(source, to_mistral(source, tmp_path / "own"))


def test_mixtral(tmp_path: Path) -> None:
    source = make_decoder(
        tmp_path / "source", "mixtral", with_tokenizer=False, num_hidden_layers=3, head_dim=10
    )
    moe = {"num_experts": 4, "num_experts_per_tok": 2}
    check(source, to_mistral(source, tmp_path / "own", moe=moe))


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_fp8(family: str, tmp_path: Path) -> None:
    """As Mistral stores it: a scale for each weight, and scales of activations beside them."""
    sizes = {"num_hidden_layers": 3, "head_dim": 10, "sliding_window": None}
    source = make_decoder(tmp_path / "source", family, with_tokenizer=False, **sizes)
    moe = {"moe": {"num_experts": 4, "num_experts_per_tok": 2}} if family == "mixtral" else {}
    own = to_mistral(source, tmp_path / "own", narrow=True, **moe)
    stored = load_file(own / "consolidated.safetensors")
    assert stored["layers.0.attention.wq.weight"].dtype is torch.float8_e4m3fn
    check(source, own)


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize("kind", ["llama 2", "llama 3.2"])
def test_meta(kind: str, n_parts: int, tmp_path: Path) -> None:
    """One or two parts, with the embedding cut as either generation did."""
    config: dict[str, Any] = {"intermediate_size": 128, "tie_word_embeddings": False}
    params: dict[str, Any] = {}
    if kind == "llama 3.2":
        config = {"intermediate_size": 176, "rope_parameters": SCALED}
        params = {
            "ffn_dim_multiplier": 1.3,
            "rope_theta": 500000.0,
            "use_scaled_rope": True,
            "vocab_size": VOCAB_SIZE,
        }
    source = make_llama(tmp_path / "source", with_tokenizer=False, num_hidden_layers=3, **config)
    own = to_meta(
        source,
        tmp_path / "own",
        n_parts,
        cut_embedding_columns=kind == "llama 2",
        **params,
    )
    check(source, own)
