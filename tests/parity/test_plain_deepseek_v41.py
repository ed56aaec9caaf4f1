"""What DeepSeek-V4.1 is held against: plain formulas, of which each part is shown to matter.

Where they do the same as DeepSeek-V4's, transformers' modules say so. Of n-gram tables the makers'
own sizes are: they follow from prime numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models.checkpoints import last_made, make_decoder
from support.models.deepseek_v41_checkpoints import PUBLISHED, shapes
from support.oracles.oracle import (
    FLOAT32_TOLERANCE,
    first_of_equal,
    load_reference,
    reference_logits,
)
from support.oracles.plain_deepseek_v41 import TWISTS, Past, PlainDeepseekV41, rotary_config
from support.oracles.plain_engram import compressed_ids, looked_up, table_primes
from support.rings.stage_chain import random_prompt
from support.soak import cases
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

PROMPT = random_prompt(120, 300, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("whole"), "deepseek_v41", num_hidden_layers=8)


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainDeepseekV41:
    return PlainDeepseekV41.load(folder)


@pytest.fixture(scope="module")
def expected(plain: PlainDeepseekV41) -> Tensor:
    return reference_logits(plain, PROMPT)


def test_a_token_says_nothing_of_those_before_it(plain: PlainDeepseekV41, expected: Tensor) -> None:
    """Prefixes of odd lengths, and rows behind what came before."""
    for length in (1, 2, 21, 77):
        logits = reference_logits(plain, PROMPT[:length])
        torch.testing.assert_close(logits, expected[:length], rtol=0, atol=1e-5)
    past, parts = Past(), []
    with mock.patch.object(Tensor, "topk", first_of_equal):
        for begin, end in ((0, 50), (50, 51), (51, 120)):
            found = plain(torch.tensor([PROMPT[begin:end]]), cache=past, use_cache=True)
            parts.append(found.logits[0])
            assert found.past_key_values is past
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("twist", cases(TWISTS[:4], TWISTS[4:]))
def test_each_mistake_would_be_noticed(twist: str, folder: Path, expected: Tensor) -> None:
    """Of most tokens behind the window, by far more than the tolerance."""
    wrong = reference_logits(PlainDeepseekV41.load(folder, twist=twist), PROMPT)
    is_far = ((wrong - expected).abs().amax(-1) > 100 * FLOAT32_TOLERANCE)[20:]
    assert is_far.float().mean() > 0.75


@pytest.mark.parametrize("change", [{"index_topk": 5}, {"candidate_topk_blocks": 2}])
def test_what_is_chosen_matters(change: dict[str, int], folder: Path, expected: Tensor) -> None:
    plain = PlainDeepseekV41.load(folder)
    plain.text |= change
    assert (reference_logits(plain, PROMPT) - expected).abs().amax(-1).median() > 0.01


def test_logits_are_spread_and_seldom_near_ties(expected: Tensor) -> None:
    best = expected.topk(2).values
    assert 0.5 < expected.std() < 2
    assert len({*expected.argmax(-1).tolist()}) > len(PROMPT) // 3
    assert (best[:, 0] - best[:, 1] > 1e-2).float().mean() > 0.9


def test_as_its_makers_publish_it(tmp_path: Path) -> None:
    """What the files mean is near the weights they were made of, whose bytes are a quarter."""
    make_decoder(tmp_path, "deepseek_v41", is_published=True)
    made, read = last_made(tmp_path), load_reference(tmp_path)
    assert torch.equal(*(reference_logits(each, PROMPT) for each in (made, read)))
    text = read.text
    plain = make_decoder(tmp_path / "plain", "deepseek_v41", **text)
    others = PlainDeepseekV41.load(plain).weights
    assert read.weights.keys() == others.keys() == shapes(text).keys()
    for name, weight in others.items():
        error = (read.weights[name] - weight).square().mean().sqrt()
        assert error <= 0.13 * weight.square().mean().sqrt(), name


def test_tables_are_as_large_as_published() -> None:
    """Their prime numbers, all 48 of them different."""
    text = json.loads(PUBLISHED.read_text())["text_config"]
    tables = table_primes(text)
    assert [sum(blocks) for blocks in tables] == text["engram_num_embeddings"]
    assert len({prime for blocks in tables for prime in blocks}) == 2 * 3 * 8


def test_tokens_that_are_written_alike_are_one(folder: Path, plain: PlainDeepseekV41) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    numbers = compressed_ids(backend)
    ids = {name: numbers[backend.token_to_id(name)] for name in ("A", "a", "Ġa", "Ġ", "Ċ", "b")}
    assert ids["A"] == ids["a"] == ids["Ġa"] != ids["b"]
    assert ids["Ġ"] == ids["Ċ"] != ids["a"]
    assert max(numbers) + 1 == plain.text["engram_compressed_vocab_size"] < len(numbers)
    assert numbers[70] != 70, "padding would be no token of its own"
    text = [backend.token_to_id(name) for name in ("b", "A", "b", "a", "b", "a", "b")]
    rows = looked_up(plain.text, numbers, 1, text)
    assert (rows[4] == rows[6]).all()
    assert (rows[4] != rows[2]).any(), "what is before the text is no token of it"
    assert (rows != looked_up(plain.text, numbers, 3, text)).all(), "each layer has factors"
    assert 0 <= rows.min() <= rows.max() < plain.text["engram_num_embeddings"][0]


def config_of(text: dict[str, Any], kind: str) -> DeepseekV4Config:
    """Say what DeepSeek-V4 has in common in its words, for one layer."""
    names = ("hidden_size", "num_attention_heads", "q_lora_rank", "o_lora_rank", "o_groups")
    names += ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "swiglu_limit")
    names += ("sliding_window", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps")
    config = rotary_config(text)
    for name in (*names, "routed_scaling_factor"):
        setattr(config, name, text[name])
    config.num_hidden_layers, config.layer_types, config.mlp_layer_types = 1, [kind], ["moe"]
    config.compress_rates = {"heavily_compressed_attention": 2}
    config._attn_implementation = "eager"
    return config


def filled(module: nn.Module, plain: PlainDeepseekV41, names: dict[str, str]) -> nn.Module:
    """Give a module the weights of layers: by its names, those of the checkpoint."""
    own = {name: plain.weights[stored] for name, stored in names.items()}
    module.load_state_dict(own, strict=False)
    left = {name for name, _ in module.named_parameters()} - own.keys()
    assert left <= {"compressor.position_bias"}
    for name in left:
        nn.init.zeros_(module.get_parameter(name))
    return module.eval()


@pytest.mark.parametrize("layer", [0, 2])
@torch.inference_mode()
def test_attention_is_that_of_deepseek_v4_where_all_is_seen(layer: int, folder: Path) -> None:
    """But for a norm of queries and a bias of positions: windows, and entries of two positions."""
    plain = PlainDeepseekV41.load(folder)
    plain.text["index_topk"] = 1000
    kind = "heavily_compressed_attention" if layer else "sliding_attention"
    config, attn = config_of(plain.text, kind), f"layers.{layer}.attn"
    names = {"q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_proj": "wkv", "o_a_proj": "wo_a"}
    names |= {"o_b_proj": "wo_b", "q_a_norm": "q_norm", "kv_norm": "kv_norm"}
    if layer:
        names |= {"compressor.kv_proj": "compressor.wkv", "compressor.kv_norm": "compressor.norm"}
        names |= {"compressor.gate_proj": "compressor.wgate"}
    stored = {f"{name}.weight": f"{attn}.{own}.weight" for name, own in names.items()}
    theirs = v4.DeepseekV4Attention(config, 0)
    filled(theirs, plain, stored | {"sinks": f"{attn}.attn_sink"})
    theirs.q_b_norm = nn.Identity()
    rows = torch.randn(61, plain.text["hidden_size"], generator=torch.Generator().manual_seed(1))
    at, ages = torch.arange(61), torch.arange(61)[:, None] - torch.arange(61)
    mask = torch.zeros(61, 61).masked_fill((ages < 0) | (ages >= 20), -torch.inf)
    rotary = v4.DeepseekV4RotaryEmbedding(config)
    positions = {name: rotary(rows, at[None], name) for name in ("main", "compress")}
    found, _ = theirs(rows[None], positions, at[None], mask[None, None])
    shared: Any = type("Shared", (), {})()
    own = plain.attention(rows, 0, layer, shared)
    torch.testing.assert_close(own, found[0], rtol=0, atol=1e-5)
    if layer:
        scorer = v4.DeepseekV4IndexerScorer(DeepseekV4Config(index_n_heads=5, index_head_dim=16))
        assert scorer.softmax_scale * scorer.weights_scaling == pytest.approx((16 * 5) ** -0.5)


@torch.inference_mode()
def test_streams_are_mixed_as_in_deepseek_v4(plain: PlainDeepseekV41) -> None:
    """What a sub-layer is given at once, and what becomes of its output."""
    config, name = config_of(plain.text, "sliding_attention"), "layers.2.hc_attn"
    names = {part: f"{name}_{part}" for part in ("fn", "base", "scale")}
    theirs = filled(v4.DeepseekV4HyperConnection(config), plain, names)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 3, plain.text["hidden_size"], generator=generator)
    rows = torch.randn(9, plain.text["hidden_size"], generator=generator)
    post, comb, collapsed = theirs(hidden[None])
    own = plain.mixes(hidden, name)
    torch.testing.assert_close(plain.joined(own[0], hidden), collapsed[0])
    mixed = post[..., None] * rows[None, :, None] + comb.mT @ hidden[None]
    torch.testing.assert_close(plain.spread(rows, hidden, *own[1:]), mixed[0])


@torch.inference_mode()
def test_experts_are_those_of_deepseek_v4(plain: PlainDeepseekV41) -> None:
    config, ffn = config_of(plain.text, "sliding_attention"), "layers.3.ffn"
    config._experts_implementation = "eager"
    theirs = v4.DeepseekV4SparseMoeBlock(config, 0).eval()
    weights = {name.removeprefix(f"{ffn}."): part for name, part in plain.weights.items()}

    def experts(*kinds: str) -> Tensor:
        own = [
            [weights[f"experts.{number}.{kind}.weight"] for kind in kinds] for number in range(8)
        ]
        return torch.stack([torch.cat(each) for each in own])

    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    own = {
        f"shared_experts.{n}.weight": weights[f"shared_experts.{w}.weight"]
        for n, w in renamed.items()
    }
    own |= {
        "gate.weight": weights["gate.weight"],
        "gate.e_score_correction_bias": weights["gate.bias"],
    }
    own |= {"experts.gate_up_proj": experts("w1", "w3"), "experts.down_proj": experts("w2")}
    theirs.load_state_dict(own)
    rows = torch.randn(40, plain.text["hidden_size"], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(plain.experts(rows, ffn), theirs(rows[None])[0])
