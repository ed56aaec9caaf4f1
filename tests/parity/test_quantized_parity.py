"""Families with rounded weights against transformers with the same weights.

In float32 and by torch the logits are those of transformers' model whose weights were rounded and
brought back. The compiled products round rows too: they stay near.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2
from support.needs import needs_library
from support.oracles.oracle import check_generation, load_reference, reference_logits
from support.rings.stage_chain import CPU, StageChain, even_split, probed, random_prompt
from support.soak import cases
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels import panel_linear
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.kernels.panels import unpack
from shardnet.model.kernels.quantized_linear import quantized
from shardnet.types import DType, LayerRange

CASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "phi3": {"hidden_size": 66, "num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 20},
    "qwen2_moe": {"num_hidden_layers": 2, "seed": 3},
    "gpt_oss": {"num_hidden_layers": 2},
    "qwen3_5_text": {"num_hidden_layers": 2, "full_attention_interval": 2},
    "deepseek_v2": {"num_hidden_layers": 2},
    "kimi_linear": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "gpt2": {},
}
EACH = [(family, kind) for family in CASES for kind in Quantization]
IN_TURNS = [list(Quantization)[place % len(Quantization)] for place in range(len(CASES))]
BY_TORCH = [*zip(CASES, IN_TURNS, strict=True)]
BY_LIBRARY = [way for way in EACH if way not in BY_TORCH]
"""Each family with one kind by torch and the other by the library."""
KEPT = (
    *("shared_expert_gate", "kv_b_proj", "in_proj_a", "in_proj_b"),
    *(".b_proj", ".f_a_proj", ".f_b_proj"),
)
"""Products whose weights stay as they are."""


def make(folder: Path, family: str) -> Path:
    if family == "gpt2":
        return make_gpt2(folder)
    return make_decoder(folder, family, **CASES[family])


def rounded(folder: Path, kind: Quantization) -> Any:
    """transformers' model with its products' weights rounded."""
    model = load_reference(folder)
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if name.endswith("experts") and hasattr(module, "gate_up_proj"):
            _round_experts(module, kind, transposed=hasattr(module, "down_proj_bias"))
        elif name.endswith(KEPT):
            continue
        elif module is head:
            module.weight = nn.Parameter(_there_and_back(module.weight.data, kind.of_head))
        elif isinstance(module, nn.Linear):
            module.weight = nn.Parameter(_there_and_back(module.weight.data, kind))
        elif isinstance(module, Conv1D):
            module.weight = nn.Parameter(_there_and_back(module.weight.data.T, kind).T)
    return model


def _round_experts(experts: Any, kind: Quantization, *, transposed: bool) -> None:
    """Round the stacked experts of a layer, gpt-oss's with the inputs first."""
    for stacked in (experts.gate_up_proj, experts.down_proj):
        for weight in stacked.data:
            weight = weight.T if transposed else weight
            weight.copy_(_there_and_back(weight, kind))


def _there_and_back(weight: torch.Tensor, kind: Quantization) -> torch.Tensor:
    return unpack(quantized(weight, kind), torch.float32)


def choice_of(kind: Quantization) -> KernelChoice:
    return probed(CPU, DType.FLOAT32, None, kind)


@pytest.mark.parametrize(("family", "kind"), cases(BY_TORCH, BY_LIBRARY))
def test_logits_are_those_of_transformers_with_these_weights(
    family: str, kind: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)
    folder = make(tmp_path, family)
    reference = rounded(folder, kind)
    n_layers = Checkpoint.open(folder).config.n_layers
    chain = StageChain.load(folder, [LayerRange(0, n_layers)], choice_of(kind))
    check_generation(chain, reference, [random_prompt(5, 300), random_prompt(40, 300)], 6)


@needs_library
@pytest.mark.parametrize(("family", "kind"), cases(BY_LIBRARY, BY_TORCH))
def test_compiled_products_stay_near_and_splits_change_nothing(
    family: str, kind: Quantization, tmp_path: Path
) -> None:
    folder = make(tmp_path, family)
    n_layers = Checkpoint.open(folder).config.n_layers
    prompt = random_prompt(70, 300)
    whole = StageChain.load(folder, [LayerRange(0, n_layers)], choice_of(kind))
    logits = whole.prefill(0, prompt)
    want = reference_logits(rounded(folder, kind), prompt)
    has_experts = Checkpoint.open(folder).config.experts is not None
    most = 0.2 if has_experts else 0.07  # rows are rounded to int8; some visit other experts then
    assert float((logits - want).norm() / want.norm()) < most
    split = StageChain.load(folder, even_split(n_layers, n_layers), choice_of(kind))
    assert torch.equal(split.prefill(0, prompt), logits)
    assert whole.stages[0].exact_rows >= 32
