"""Prompts far behind windows, chunks of attention and the number of chosen positions.

Each kind of cache against transformers, which is given the same chunks: log-probabilities within
1e-4. scripts/soak tries 20,000 positions. All experts are visited, or none: of so many rows some
have two that are nearly as likely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.oracles.followed_choices import FollowedChoices
from support.oracles.oracle import FLOAT32_TOLERANCE, made_reference, reference_logits
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.soak import is_soak
from torch import Tensor

from shardnet.types import PREFILL_CHUNK_ROWS

LENGTH = 20_000 if is_soak() else 2000
N_TOKENS = 6
N_CHOSEN = 512 if is_soak() else 200
"""Entries, or positions where each is an entry."""

KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe"] * 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "sliding_window": 128,
        "index_topk": N_CHOSEN,
    },
    "deepseek_v41_text": {
        "num_hidden_layers": 3,
        "num_experts_per_tok": 8,
        "sliding_window": 128,
        "index_topk": N_CHOSEN,
        "candidate_topk_blocks": N_CHOSEN + 1,
    },
    "glm5_next_text": {
        "num_hidden_layers": 3,
        "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense"] * 3,
        "index_topk": 4 * N_CHOSEN,
    },
    "qwen4_exp_text": {
        "num_hidden_layers": 3,
        "layer_types": ["indexed_attention", "linear_attention", "indexed_attention"],
        "num_experts_per_tok": 5,
        "indexer_budget": 4 * N_CHOSEN,
        "ple_layer_ids": [2],
    },
    "hy_v4": {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense"] * 3,
        "indexer_types": ["full", "shared", "full"],
        "index_topk": N_CHOSEN,
    },
    "deepseek_v32": {"num_hidden_layers": 2, "first_k_dense_replace": 2, "index_topk": N_CHOSEN},
    "glm_moe_dsa": {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense"] * 3,
        "indexer_types": ["full", "shared", "full"],
        "index_topk": N_CHOSEN,
    },
    "llama4_text": {
        "moe_layers": [],
        "attention_chunk_size": 8192 if is_soak() else 500,
    },
}


def chunked_logits(model: Any, ids: list[int], n_prompt: int) -> Tensor:
    """transformers' logits [T, V] of a prompt in chunks, and of the rows behind it one by one."""
    starts = [*range(0, n_prompt, PREFILL_CHUNK_ROWS), *range(n_prompt, len(ids))]
    cache, parts = None, []
    with torch.inference_mode():
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            found = model(torch.tensor([ids[start:end]]), cache=cache, use_cache=True)
            cache = found.past_key_values
            parts.append(found.logits[0].float())
    return torch.cat(parts)


@pytest.mark.parametrize("family", KINDS)
def test_log_probabilities_far_behind_windows_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """A prompt and an answer over two stages; what transformers says in chunks it says at once."""
    config = CASES[family] | {"max_position_embeddings": LENGTH + 100} | KINDS[family]
    make_decoder(tmp_path, family, **config)
    model, prompt = made_reference(tmp_path), random_prompt(LENGTH, 300)
    chain = StageChain.load(
        tmp_path, even_split(config["num_hidden_layers"], 2), context=LENGTH + 100
    )
    choices = FollowedChoices(N_CHOSEN)
    with choices.noted():
        [found] = chain.generate([prompt], N_TOKENS)
    tokens = found[LENGTH - 1 : -1].argmax(-1).tolist()
    with choices.followed():
        expected = chunked_logits(model, [*prompt, *tokens], LENGTH)
    torch.testing.assert_close(
        found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=FLOAT32_TOLERANCE
    )
    assert choices.n_rows > LENGTH // 2 or family == "llama4_text"
    at_once = reference_logits(model, prompt[:N_CHOSEN])
    torch.testing.assert_close(expected[:N_CHOSEN], at_once, rtol=0, atol=FLOAT32_TOLERANCE)
