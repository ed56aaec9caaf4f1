"""GGUF models computed as they are stored: the logits of the values that their blocks mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.gguf_files import write_gguf
from support.models.packed_blocks import packed_and_plain
from support.needs import needs_library
from support.rings.stage_chain import CPU, StageChain, even_split, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.fused.decoder import DecoderStage
from shardnet.model.kernels import panel_linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.layers.weight_source import PanelTable
from shardnet.stage.load import load_stage
from shardnet.types import DType, LayerRange

MIXED = {
    "blk.0.attn_q": "Q4_K",
    "blk.0.attn_k": "Q5_0",
    "blk.0.attn_v": "Q6_K",
    "blk.0.attn_output": "IQ4_XS",
    "blk.0.ffn_gate": "Q3_K",
    "blk.0.ffn_up": "Q2_K",
    "blk.0.ffn_down": "IQ3_S",
    "blk.1.attn_q": "Q8_0",
    "blk.1.attn_v": "Q8_0",  # and attn_k in between is plain
    "blk.1.attn_output": "Q4_1",
    "blk.1.ffn_gate": "Q5_K",
    "blk.1.ffn_up": "Q5_K",
    "blk.1.ffn_down": "IQ2_XS",
    "token_embd": "Q5_1",
    "output.weight": "IQ4_NL",
}
"""Fourteen types in one model, and a plain matrix beside packed ones."""
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
CASES: dict[str, tuple[dict[str, Any], Mapping[str, str]]] = {
    "llama": (WIDE | {"num_attention_heads": 4, "num_key_value_heads": 2}, MIXED),
    "qwen2": (  # biases; panels that hold outputs of two weights; rows that fill no block of 256
        {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"intermediate_size": 160, "num_hidden_layers": 2, "tie_word_embeddings": True},
        {"attn": "Q5_0", "ffn": "Q4_0", "token_embd": "Q8_0"},
    ),
    "mixtral": (
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        | {"sliding_window": None, "num_attention_heads": 4},
        {"gate_exps": "Q4_0", "up_exps": "Q5_1", "down_exps": "IQ4_NL", "attn": "Q8_0"},
    ),
    "gpt_oss": (
        {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2},
        {"exps.weight": "MXFP4", "attn_q": "Q8_0"},
    ),
    "qwen3_next": (  # what steers the recurrence is stored packed, and computed as values
        {"hidden_size": 64, "linear_value_head_dim": 16, "num_hidden_layers": 2}
        | {"moe_intermediate_size": 32, "full_attention_interval": 2},
        {"attn_qkv": "Q4_0", "attn_gate": "Q8_0", "ssm_out": "Q5_0", "ssm_ba": "Q8_0"}
        | {"attn_q.": "Q8_0", "gate_exps": "Q4_0", "down_exps": "Q5_1", "shexp": "Q8_0"},
    ),
    "qwen4_exp_text": (  # a table of n-grams whose rows are read from the file, and its padding
        {"hidden_size": 64, "linear_value_head_dim": 16, "num_hidden_layers": 2, "hc_lowrank": 32}
        | {"moe_intermediate_size": 32, "full_attention_interval": 2, "layer_types": None}
        | {"output_gate_type": "sigmoid", "ple_layer_ids": [1], "ple_embed_dim": 128}
        | {"ngram_vocab_size_base": 50, "heads_per_ngram": 2, "split_ngram_parts": 3},
        {"per_layer_token_embd": "Q8_0", "hc_attn_down": "Q4_0", "hc_ffn_inject": "Q8_0"}
        | {"ple_key": "Q8_0", "indexer.q_proj": "Q8_0", "indexer.k_proj": "Q8_0"}
        | {"attn_qkv": "Q4_0", "ssm_out": "Q5_0", "gate_exps": "Q4_0", "token_embd": "Q8_0"},
    ),
    "glm5_next_text": (  # latents and what chooses among them, and KDA
        {"hidden_size": 64, "num_hidden_layers": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
        | {"linear_num_heads": 6, "layer_types": ["linear_attention", "indexed_attention"]}
        | {"mlp_layer_types": ["dense", "sparse"], "moe_intermediate_size": 32, "index_topk": 32},
        {"attn_q.": "Q4_0", "attn_v": "Q8_0", "ssm_f_a": "Q8_0", "attn_q_b": "Q8_0"}
        | {"indexer.attn_k": "Q8_0", "indexer_compressor_gate": "Q8_0", "down_exps": "Q5_1"},
    ),
    "gemma2": (
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20, "hidden_size": 96}
        | {"num_hidden_layers": 2},
        {"token_embd": "Q8_0", "attn": "Q4_0"},
    ),
}


def models(case: str, folder: Path) -> tuple[Path, Path]:
    """The model of a case packed, and in plain float32."""
    config, kinds = CASES[case]
    source = make_decoder(folder / "source", case, with_tokenizer=False, **config)
    packed, plain = packed_and_plain(kinds)
    return (
        write_gguf(source, folder / "packed.gguf", pack=packed),
        write_gguf(source, folder / "plain.gguf", pack=plain),
    )


@pytest.mark.parametrize("case", CASES)
def test_torch_computes_the_logits_of_the_values(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)
    packed, plain = models(case, tmp_path)
    prompt = random_prompt(40, 300)
    expected = StageChain.load(plain, even_split(2, 1)).prefill(0, prompt)
    for n_stages in (1, 2):
        logits = StageChain.load(packed, even_split(2, n_stages)).prefill(0, prompt)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)


@needs_library
@pytest.mark.parametrize("case", CASES)
def test_the_library_stays_near_and_splits_change_nothing(case: str, tmp_path: Path) -> None:
    packed, plain = models(case, tmp_path)
    prompt = random_prompt(70, 300)
    expected = StageChain.load(plain, even_split(2, 1)).prefill(0, prompt)
    whole = StageChain.load(packed, even_split(2, 1))
    logits = whole.prefill(0, prompt)
    has_experts = Checkpoint.open(packed).config.experts is not None
    most = 0.2 if has_experts else 0.07  # tokens are rounded to int8; some visit other experts then
    assert float((logits - expected).norm() / expected.norm()) < most
    assert torch.equal(StageChain.load(packed, even_split(2, 2)).prefill(0, prompt), logits)
    assert whole.stages[0].exact_rows >= 32


@needs_library
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "qwen2"])
def test_streamed_layers_are_packed_as_they_are_read(case: str, tmp_path: Path) -> None:
    path, _ = models(case, tmp_path)
    prompt = random_prompt(20, 300)
    expected = StageChain.load(path, even_split(2, 1)).prefill(0, prompt)
    for n_streamed in (1, 2):
        stage = load_stage(
            Checkpoint.open(path),
            LayerRange(0, 2),
            choice=probed(CPU, DType.FLOAT32, None),
            device=CPU,
            room_blocks=2,
            progress=lambda done, total: None,
            n_streamed=n_streamed,
        )
        assert stage.streams
        assert torch.equal(StageChain([stage]).prefill(0, prompt), expected)


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    packed, _ = models("gemma2", tmp_path)
    [stage] = StageChain.load(packed, even_split(2, 1)).stages
    decoder = stage.family
    assert isinstance(decoder, DecoderStage)
    assert decoder._embedding is not None
    assert decoder._head is not None
    table, head = decoder._embedding.table, decoder._head.lm_head
    assert isinstance(table, PanelTable)
    assert isinstance(head, PanelLinear)
    assert head.parts[0].packed is table.panels.packed
