from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partly

from shardnet.model.config.model_config import Rope, RopeKind
from shardnet.model.families.registry import parse_config
from shardnet.model.layers.rotary import rotary_frequencies, rotary_tables

CPU = torch.device("cpu")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
ORIGINAL = "original_max_position_embeddings"


def factors(head_size: int, slope: float) -> list[float]:
    return [1 + slope * i for i in range(head_size // 2)]


def longrope(head_size: int, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors(head_size, 0.1),
        "long_factor": factors(head_size, 1.5),
        ORIGINAL: original,
    }


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500000.0, ORIGINAL: 8192} | LLAMA3,
        {"rope_type": "llama3", "rope_theta": 10000.0, ORIGINAL: 256} | LLAMA3,
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        YARN | {ORIGINAL: 2048},
        YARN | {ORIGINAL: 2048, "truncate": False},
        YARN | {ORIGINAL: 256, "beta_fast": 20.0, "beta_slow": 2.0},
        YARN | {ORIGINAL: 2048, "attention_factor": 0.7},
        YARN | {ORIGINAL: 2048, "attn_factor": 0.878},  # DeepSeek-R1-0528-Qwen3-8B
        YARN | {ORIGINAL: 2048, "mscale": 0.7, "mscale_all_dim": 1.3},
        "short",
        "long",
    ],
    ids=lambda rope: rope if isinstance(rope, str) else "-".join(map(str, rope.values())),
)
@pytest.mark.parametrize("max_positions", [1024, 16384])
def test_rotary_positions_are_those_of_transformers(
    rope: dict[str, Any] | str, head_size: int, max_positions: int
) -> None:
    """One sequence that fills the context, which is where length-dependent tables are promised."""
    context = 3000
    if isinstance(rope, str):
        rope = longrope(head_size, 4096 if rope == "short" else 512)
    theirs = LlamaConfig(
        num_attention_heads=2,
        hidden_size=2 * head_size,
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope),
    )
    ours = parse_config(theirs.to_dict() | {"architectures": None}, "config.json").rope
    assert ours is not None
    heads = torch.randn(1, 2, context, head_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(context)
    cos, sin = LlamaRotaryEmbedding(theirs)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    tables = rotary_tables(ours, head_size, context, torch.float32, CPU).at(positions)
    rotated = tables.rotate(heads[0].transpose(0, 1))  # [T, heads, D]
    torch.testing.assert_close(rotated.transpose(0, 1)[None], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["default", "longrope", "su", "yarn"])
def test_a_part_of_each_head_is_rotated(name: str) -> None:
    """Phi-4's three quarters, under the names that Phi-3 once had for its scaling too."""
    scaling = {} if name == "default" else longrope(24, 64)
    theirs = Phi3Config(
        num_attention_heads=2,
        hidden_size=64,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=0,
        rope_parameters=scaling | {"rope_type": name, "partial_rotary_factor": 0.75},
    )
    raw = theirs.to_dict() | {"architectures": None}
    raw["rope_parameters"]["rope_type"] = name
    ours = parse_config(raw, "config.json").rope
    assert ours is not None
    heads = torch.randn(1, 2, 200, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(200)
    cos, sin = Phi3RotaryEmbedding(theirs)(heads, positions[None])
    expected, _ = apply_partly(heads, heads, cos, sin)
    tables = rotary_tables(ours, 32, 200, torch.float32, CPU).at(positions)
    rotated = tables.rotate(heads[0].transpose(0, 1))
    torch.testing.assert_close(rotated.transpose(0, 1)[None], expected, rtol=0, atol=1e-5)


def test_linear_scaling_by_hand() -> None:
    """Head of 4, theta 100: frequencies 1 and 1/10, divided by 4."""
    rope = Rope(kind=RopeKind.LINEAR, theta=100.0, factor=4.0)
    frequencies = rotary_frequencies(rope, 4, 100)
    torch.testing.assert_close(frequencies, torch.tensor([0.25, 0.025]))
    tables = rotary_tables(rope, 4, 100, torch.float32, CPU)
    rotated = tables.at(torch.tensor([8])).rotate(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]))
    expected = torch.tensor([math.cos(2.0), 0.0, math.sin(2.0), 0.0])
    torch.testing.assert_close(rotated[0, 0], expected)


def test_dynamic_scaling_by_hand() -> None:
    """Head of 4: the base grows by (2 x 300 / 100 - 1) ** (4 / 2) where the context is 3 times."""
    rope = Rope(kind=RopeKind.DYNAMIC, theta=100.0, factor=2.0, original_max_positions=100)
    assert rotary_frequencies(rope, 4, 100).tolist() == pytest.approx([1.0, 0.1])
    assert rotary_frequencies(rope, 4, 50).tolist() == pytest.approx([1.0, 0.1])
    assert rotary_frequencies(rope, 4, 300).tolist() == pytest.approx([1.0, 1 / 50])


def test_yarn_by_hand() -> None:
    """The fastest column stays, the slowest is stretched, the magnitude is 0.1 ln 4 + 1."""
    raw = {"type": "yarn", "factor": 4.0, ORIGINAL: 1000}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 1000}
    config = parse_config({"model_type": "llama", "rope_scaling": raw} | sizes, "config.json")
    assert config.rope is not None
    assert config.rope.magnitude == pytest.approx(1.1386294)
    assert config.max_positions == 4000
    frequencies = rotary_frequencies(config.rope, 32, 100)
    plain = rotary_frequencies(Rope(), 32, 100)
    assert frequencies[0] == plain[0]
    assert frequencies[-1] == pytest.approx(float(plain[-1]) / 4)
    turns_32 = 32 * math.log(1000 / (32 * 2 * math.pi)) / (2 * math.log(10000))
    turns_1 = 32 * math.log(1000 / (2 * math.pi)) / (2 * math.log(10000))
    assert (math.floor(turns_32), math.ceil(turns_1)) == (2, 9)
    mixed = plain[5] * (1 - 3 / 7) + plain[5] / 4 * (3 / 7)
    assert frequencies[5] == pytest.approx(float(mixed))


def test_a_context_beyond_the_training_chooses_the_long_factors() -> None:
    rope = Rope(
        kind=RopeKind.LONGROPE,
        theta=100.0,
        original_max_positions=64,
        short_factors=(1.0, 2.0),
        long_factors=(4.0, 8.0),
    )
    assert rotary_frequencies(rope, 4, 64).tolist() == pytest.approx([1.0, 0.05])
    assert rotary_frequencies(rope, 4, 65).tolist() == pytest.approx([0.25, 0.0125])
