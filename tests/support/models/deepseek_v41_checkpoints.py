"""Tiny random checkpoints of DeepSeek-V4.1 under the names of its makers, whole or as published.

Published means: linears in FP8 with a power of two for each block of 32 x 32, experts in MXFP4, the
rest in BF16 but what mixes streams. An n-gram table is in FP8 with a power of two for 32 columns of
a row in either case. All that is not computed is there, too: a drafter, and eyes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.oracles.plain_deepseek_v41 import PlainDeepseekV41, is_wide
from support.oracles.plain_engram import compressed_ids, table_primes
from tokenizers import Tokenizer
from torch import Tensor

PUBLISHED = Path(__file__).parents[2] / "model/families/published/deepseek-v4.1-flash.json"
N_DRAFTED = 3
"""Layers of the drafter, each with a ratio at the end of `compress_ratios`."""
SIZES: dict[str, Any] = {
    "vocab_size": 300,  # as many as the tokenizer has
    "hidden_size": 48,
    "moe_intermediate_size": 20,
    "num_attention_heads": 6,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 20,
    "o_lora_rank": 10,
    "o_groups": 3,
    "swiglu_limit": 0.5,
    "max_position_embeddings": 512,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 128,
    },
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 20,
    "index_n_heads": 5,
    "index_head_dim": 16,
    "index_topk": 6,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "engram_layer_ids": [1],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
    "engram_pad_token_id": 70,
    "num_nextn_predict_layers": N_DRAFTED,
    "dspark_n_routed_experts": 4,
}
AS_PUBLISHED: dict[str, Any] = {
    "hidden_size": 96,
    "moe_intermediate_size": 32,
    "q_lora_rank": 40,
    "o_lora_rank": 32,
}
"""What makes whole groups of MXFP4, and blocks of FP8 that begin with a group of heads."""
LAYOUTS: dict[int, dict[str, Any]] = {
    3: {
        "compress_ratios": [2, 2, 1],
        "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 2],
        "candidate_source_layer_id": 2,
    },
    4: {
        "compress_ratios": [0, 2, 1, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
    },
    8: {
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "candidate_source_layer_id": 4,
        "engram_layer_ids": [1, 3],
    },
}
"""By number of layers: which of them have entries, and make and choose them."""
_FP8 = re.compile(r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight")
_MXFP4 = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write_deepseek_v41(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    is_published: bool = False,
    num_hidden_layers: int = 4,
    **config: Any,
) -> PlainDeepseekV41:
    """Write a checkpoint beside the tokenizer.json that is in `folder`; return what it means.

    `config` overrides keys of `text_config`, but the head is never tied. `LAYOUTS` says what 3, 4
    and 8 layers do.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = SIZES | (AS_PUBLISHED if is_published else {}) | LAYOUTS.get(num_hidden_layers, {})
    whole = made_config(tokenizer, {"num_hidden_layers": num_hidden_layers} | sizes | config)
    kind = torch.bfloat16 if is_published else dtype
    whole["text_config"]["tie_word_embeddings"] = False
    whole["dtype"] = str(kind).removeprefix("torch.")
    made = random_tensors(whole["text_config"], seed)
    stored = {}
    for name, tensor in made.items():
        if name.endswith(".engram.embed.weight"):
            stored |= fp8(name, tensor, 1)
        elif is_published and _MXFP4.fullmatch(name):
            stored |= mxfp4(name, tensor)
        elif is_published and _FP8.fullmatch(name) and ".compressor." not in name:
            stored |= fp8(name, tensor, 32)
        else:
            stored[name] = tensor if is_wide(name) else tensor.to(kind)
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return PlainDeepseekV41(whole, stored, tokenizer, dtype)


def made_config(tokenizer: Tokenizer, changes: dict[str, Any]) -> dict[str, Any]:
    """Put other sizes into the published config, and what follows from them."""
    whole: dict[str, Any] = json.loads(PUBLISHED.read_text())
    text = whole["text_config"] | changes
    n_layers = text["num_hidden_layers"]
    if len(text["compress_ratios"]) == n_layers:
        text["compress_ratios"] = [*text["compress_ratios"], *[0] * N_DRAFTED]
    text["dspark_target_layer_ids"] = [n_layers - 1]
    text["engram_compressed_vocab_size"] = len({*compressed_ids(tokenizer)})
    text["engram_num_embeddings"] = [sum(blocks) for blocks in table_primes(text)]
    whole["text_config"] = text
    return whole


def shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name all tensors but scales."""
    width, size, rank = text["hidden_size"], text["head_dim"], text["q_lora_rank"]
    n, n_heads = text["hc_mult"], text["num_attention_heads"]
    groups, inner = text["o_groups"], text["moe_intermediate_size"]
    of_heads, index_size = n_heads * size, text["index_head_dim"]
    vocabulary = {"embed.weight": (text["vocab_size"], width)}
    made: dict[str, tuple[int, ...]] = vocabulary | {
        "head.weight": (text["vocab_size"], width),
        "norm.weight": (width,),
        "mtp.0.attn.wq_a.weight": (rank, width),
        "mtp.2.markov_head.weight": (text["vocab_size"], 4),
        "vision.patch_embed.proj.weight": (8, 12),
    }
    for layer in range(text["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "ffn_norm.weight": (width,),
            "attn.wq_a.weight": (rank, width),
            "attn.q_norm.weight": (rank,),
            "attn.wq_b.weight": (of_heads, rank),
            "attn.wkv.weight": (size, width),
            "attn.kv_norm.weight": (size,),
            "attn.wo_a.weight": (groups * text["o_lora_rank"], of_heads // groups),
            "attn.wo_b.weight": (width, groups * text["o_lora_rank"]),
            "attn.attn_sink": (n_heads,),
            "ffn.gate.weight": (text["n_routed_experts"], width),
            "ffn.gate.bias": (text["n_routed_experts"],),
            "ffn.gate.bias_vl": (text["n_routed_experts"],),
        }
        for kind in ("attn", "ffn"):
            of_layer[f"hc_{kind}_fn"] = ((2 + n) * n, n * width)
            of_layer[f"hc_{kind}_base"] = ((2 + n) * n,)
            of_layer[f"hc_{kind}_scale"] = (3,)
        if layer in text["kv_source_layer_ids"]:
            of_layer["attn.compressor.wkv.weight"] = (size, width)
            if text["compress_ratios"][layer] > 1:
                of_layer["attn.compressor.wgate.weight"] = (size, width)
            of_layer["attn.compressor.norm.weight"] = (size,)
            of_layer["attn.indexer.wk.weight"] = (index_size, size)
            of_layer["attn.indexer.k_norm.weight"] = (index_size,)
        if layer in text["index_source_layer_ids"]:
            of_layer["attn.indexer.wq_b.weight"] = (text["index_n_heads"] * index_size, rank)
            of_layer["attn.indexer.weights_proj.weight"] = (text["index_n_heads"], width)
        experts = {f"experts.{number}": inner for number in range(text["n_routed_experts"])}
        experts["shared_experts"] = inner * text["n_shared_experts"]
        for name, own in experts.items():
            of_layer |= {f"ffn.{name}.{which}.weight": (own, width) for which in ("w1", "w3")}
            of_layer[f"ffn.{name}.w2.weight"] = (width, own)
        if layer in text["engram_layer_ids"]:
            n_columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
            n_rows = text["engram_num_embeddings"][text["engram_layer_ids"].index(layer)]
            of_layer["engram.embed.weight"] = (n_rows, text["engram_head_dim"])
            looked_up = n_columns * text["engram_head_dim"]
            of_layer["engram.wkv.weight"] = ((n + 1) * width, looked_up)
            of_layer |= {f"engram.{which}_weight": (n, width) for which in "qk"}
        made |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return made


def random_tensors(text: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Draw all of them, so that no part of the maths can hide."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(text).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", ".q_weight", ".k_weight")):
            made[name] = 1 + 0.1 * noise
        elif name.endswith("_scale"):
            made[name] = 0.6 + 0.15 * noise
        elif name.endswith("embed.weight"):
            made[name] = 0.5 * noise
        else:
            made[name] = 0.15 * noise
    return made


def powers(largest: Tensor, most: float) -> Tensor:
    """Return the powers of two by which the `largest` of blocks become `most` at the most."""
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=2.0**-40) / most)))


def fp8(name: str, weight: Tensor, n_rows: int) -> dict[str, Tensor]:
    """Store a weight [N, K] in E4M3, with a scale for each block of `n_rows` x 32."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % 32, 0, -n % n_rows))
    blocks = padded.unflatten(1, (-1, 32)).unflatten(0, (-1, n_rows))
    scales = powers(blocks.abs().amax((1, 3)), 448.0)
    narrow = (blocks / scales[:, None, :, None]).flatten(0, 1).flatten(1)[:n, :k]
    return {
        name: narrow.to(torch.float8_e4m3fn).contiguous(),
        name.removesuffix("weight") + "scale": scales.to(torch.float8_e8m0fnu),
    }


def mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Store a weight [N, K] in E2M1, two of a row in a byte, with a scale for 32 of them."""
    blocks = weight.unflatten(1, (-1, 32))
    scales = powers(blocks.abs().amax(-1), 6.0)
    sized = (blocks / scales[..., None]).flatten(1)
    codes = (sized.abs()[..., None] - _E2M1).abs().argmin(-1) + 8 * (sized < 0)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    return {name: packed, name.removesuffix("weight") + "scale": scales.to(torch.float8_e8m0fnu)}
