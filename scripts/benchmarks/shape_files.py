"""Random GGUF files in the shapes of known models: a few layers each, with sane scales.

Knows which models, and how a file is written; what is in one says shape_tensors.py. Weights are one
pool of random blocks again and again: what a step computes is nonsense, but finite, and costs what
the model's own would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from shape_tensors import Latents, Moe, Shape

Array = NDArray[Any]
SIZE = 0.02
"""About how large weights are."""
_POOL_BLOCKS = 1 << 15
_FEWEST = 64
"""A token's first expert is one of so many, the others those behind it."""
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_K": ((0, SIZE / 150), (2, SIZE / 20)),
    "Q5_0": ((0, SIZE / 9),),
    "Q6_K": ((208, SIZE / 1400),),
    "Q8_0": ((0, SIZE / 74),),
}
"""Where a block has float16 and what they are."""

_GROUPED: dict[str, Any] = {
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
}

_STREAMS = _GROUPED | {
    "attention.indexer.key_length": 128,
    "hyper_connection.count": 4,
    "hyper_connection.epsilon": 1e-6,
    "swiglu_clamp_exp": [10.0] * 3,
}


def _gemma4(n_kv_heads: int, n_local_heads: int, pattern: str) -> dict[str, Any]:
    """Return Gemma 4's metadata of heads and windows."""
    return {
        "attention.head_count_kv": [n_kv_heads if k == "*" else n_local_heads for k in pattern],
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.sliding_window": 1024,
        "attention.sliding_window_pattern": [kind == "W" for kind in pattern],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count_swa": 256,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": 30.0,
    }


_DELTA_NETS: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 4096,
    "full_attention_interval": 4,
    "rope.dimension_sections": [11, 11, 10, 0],
}
_PRIMES = (
    *(200003, 200009, 200017, 200023, 200029, 200033, 200041, 200063),
    *(200087, 200117, 200131, 200153, 200159, 200171, 200177, 200183),
)
"""Rows of each head of n-grams: a hundredth of the model's own."""
_NGRAMS: dict[str, Any] = {
    "ssm.time_step_rank": 48,
    "ssm.inner_size": 6144,
    "attention.recurrent_layers": [True, True, False],
    "attention.compress_ratios": [0, 0, 4],
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
    "expert_shared_feed_forward_length": 640,
    "hyper_connection.count": 4,
    "hyper_connection.low_rank": 320,
    "embedding_length_per_layer_input": 160,
    "ple.layers": [1],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 8,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 2,
    "ple.layer_multipliers": [23703586573543, 11984620175489, 33640498272851],
    "ple.head_vocab_sizes": list(_PRIMES),
    "ple.head_offsets": [sum(_PRIMES[:n]) for n in range(len(_PRIMES))],
}
_POOLED: dict[str, Any] = {
    "rope.dimension_count": 0,
    "attention.layer_norm_epsilon": 1e-6,
    "attention.head_count_kv": [0, 1],
    "attention.value_length": 512,
    "attention.kv_lora_rank": 512,
    "attention.q_lora_rank": 1536,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.types": [True, True],
    "leading_dense_block_count": 1,
    "expert_weights_scale": 2.5,
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": 1e-6,
    "kda.head_dim": 128,
    "kda.gate_lower_bound": -5.0,
    "ssm.conv_kernel": 4,
    "swiglu_clamp_exp": [10.0, 10.0],
    "swiglu_clamp_shexp": [10.0, 10.0],
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="Llama-8B",
            architecture="llama",
            n_layers=6,
            hidden=4096,
            vocab=128256,
            heads=(32, 8, 128),
            inner=14336,
        ),
        Shape(
            name="Qwen3-4B",
            architecture="qwen3",
            n_layers=12,
            hidden=2560,
            vocab=151936,
            heads=(32, 8, 128),
            inner=9728,
            is_tied=True,
        ),
        Shape(
            name="Gemma-3-4B",
            architecture="gemma3",
            n_layers=12,
            hidden=2560,
            vocab=262144,
            heads=(8, 4, 256),
            inner=10240,
            is_tied=True,
            more={"attention.sliding_window": 1024},
        ),
        Shape(
            name="Qwen3-30B-A3B",
            architecture="qwen3moe",
            n_layers=8,
            hidden=2048,
            vocab=151936,
            heads=(32, 4, 128),
            inner=6144,
            moe=Moe(n_experts=128, top_k=8, inner=768),
        ),
        Shape(
            name="gpt-oss-20b",
            architecture="gpt-oss",
            n_layers=6,
            hidden=2880,
            vocab=201088,
            heads=(64, 8, 64),
            inner=2880,
            moe=Moe(n_experts=32, top_k=4, inner=2880),
            is_mxfp4=True,
            more={
                "attention.sliding_window": 128,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 32.0,
                "rope.scaling.original_context_length": 4096,
            },
        ),
        Shape(
            name="GLM-4.5-Air",
            architecture="glm4moe",
            n_layers=3,
            hidden=4096,
            vocab=151552,
            heads=(96, 8, 128),
            inner=10944,
            moe=Moe(n_experts=128, top_k=8, inner=1408, shared=1408),
            n_dense=1,
            rotated=64,
            more=_GROUPED | {"leading_dense_block_count": 1, "expert_weights_scale": 1.0},
        ),
        Shape(
            name="Qwen3.5-35B-A3B",
            architecture="qwen35moe",
            n_layers=8,
            hidden=2048,
            vocab=248320,
            heads=(16, 2, 256),
            inner=512,
            moe=Moe(n_experts=256, top_k=8, inner=512, shared=512),
            rotated=64,
            more=_DELTA_NETS | {"expert_shared_feed_forward_length": 512},
        ),
        Shape(
            name="Qwen3.5-4B",
            architecture="qwen35",
            n_layers=4,
            hidden=2560,
            vocab=248320,
            heads=(16, 4, 256),
            inner=9216,
            is_tied=True,
            rotated=64,
            more=_DELTA_NETS,
        ),
        Shape(
            name="Gemma-4-31B",
            architecture="gemma4",
            n_layers=6,
            hidden=5376,
            vocab=262144,
            heads=(32, 4, 512),
            inner=21504,
            is_tied=True,
            local_heads=(16, 256),
            pattern="WWWWW*",
            more=_gemma4(4, 16, "WWWWW*"),
        ),
        Shape(
            name="Gemma-4-26B-A4B",
            architecture="gemma4",
            n_layers=6,
            hidden=2816,
            vocab=262144,
            heads=(16, 2, 512),
            inner=2112,
            moe=Moe(n_experts=128, top_k=8, inner=704),
            is_tied=True,
            local_heads=(8, 256),
            pattern="WWWWW*",
            more=_gemma4(2, 8, "WWWWW*"),
        ),
        Shape(
            name="LFM2.5-8B-A1B",
            architecture="lfm2moe",
            n_layers=8,
            hidden=2048,
            vocab=65536,
            heads=(32, 8, 64),
            inner=7168,
            moe=Moe(n_experts=32, top_k=4, inner=1792),
            n_dense=2,
            is_tied=True,
            pattern="CC*CCC*C",
            more={
                "attention.head_count_kv": [0, 0, 8, 0, 0, 0, 8, 0],
                "shortconv.l_cache": 3,
                "leading_dense_block_count": 2,
                "expert_gating_func": 2,
            },
        ),
        Shape(
            name="Nemotron-3-Nano",
            architecture="nemotron_h_moe",
            n_layers=7,
            hidden=2688,
            vocab=131072,
            heads=(32, 2, 128),
            inner=1856,
            moe=Moe(n_experts=128, top_k=6, inner=1856, shared=3712),
            pattern="MEMEM*E",
            more=_GROUPED
            | {
                "attention.head_count_kv": [0, 0, 0, 0, 0, 2, 0],
                "attention.layer_norm_epsilon": 1e-5,
                "feed_forward_length": [0, 1856, 0, 1856, 0, 0, 1856],
                "expert_shared_feed_forward_length": 3712,
                "expert_weights_scale": 2.5,
                "expert_group_count": 1,
                "expert_group_used_count": 1,
                "rope.scaling.finetuned": False,
                "ssm.conv_kernel": 4,
                "ssm.state_size": 128,
                "ssm.group_count": 8,
                "ssm.inner_size": 4096,
                "ssm.time_step_rank": 64,
            },
        ),
        Shape(
            name="Qwen3.8-Flash-Next",
            architecture="qwen4exp",
            n_layers=3,
            hidden=2560,
            vocab=248320,
            heads=(24, 2, 256),
            inner=640,
            moe=Moe(n_experts=512, top_k=10, inner=640, shared=640),
            rotated=64,
            pattern="LN*",
            more=_DELTA_NETS | _NGRAMS,
        ),
        Shape(
            name="GLM-5.3-Flash",
            architecture="glm5-next",
            n_layers=2,
            hidden=4096,
            vocab=154880,
            heads=(64, 1, 512),
            inner=12288,
            moe=Moe(n_experts=288, top_k=8, inner=2048, shared=2048),
            n_dense=1,
            pattern="L*",
            latents=Latents(nope=256, rope=0, values=256, index=(32, 128)),
            more=_GROUPED | _POOLED,
        ),
        Shape(
            name="DeepSeek-V3",
            architecture="deepseek2",
            n_layers=1,
            hidden=7168,
            vocab=129280,
            heads=(128, 1, 576),
            inner=18432,
            moe=Moe(n_experts=256, top_k=8, inner=2048, shared=2048),
            rotated=64,
            more=_GROUPED
            | {
                "attention.value_length": 512,
                "attention.kv_lora_rank": 512,
                "attention.q_lora_rank": 1536,
                "attention.key_length_mla": 192,
                "attention.value_length_mla": 128,
                "leading_dense_block_count": 0,
                "expert_weights_scale": 2.5,
                "expert_group_count": 8,
                "expert_group_used_count": 4,
            },
        ),
        Shape(
            name="DeepSeek-V4-Flash",
            architecture="deepseek4",
            n_layers=3,
            hidden=4096,
            vocab=129280,
            heads=(64, 1, 512),
            inner=2048,
            moe=Moe(n_experts=96, top_k=6, inner=2048, shared=2048),
            is_mxfp4=True,
            rotated=64,
            latents=Latents(queries=1024, index=(64, 128)),
            more=_STREAMS
            | {
                "attention.q_lora_rank": 1024,
                "attention.sliding_window": 128,
                "attention.output_group_count": 8,
                "attention.output_lora_rank": 1024,
                "attention.compress_ratios": [0, 4, 128],
                "attention.compress_rope_freq_base": 160000.0,
                "attention.indexer.head_count": 64,
                "attention.indexer.top_k": 512,
                "expert_gating_func": 4,
                "expert_weights_scale": 1.5,
                "hash_layer_count": 1,
                "hyper_connection.sinkhorn_iterations": 20,
                "rope.freq_base": 1e4,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 16.0,
                "rope.scaling.original_context_length": 65536,
                "rope.scaling.yarn_beta_fast": 32.0,
                "rope.scaling.yarn_beta_slow": 1.0,
                "swiglu_clamp_shexp": [10.0] * 3,
            },
        ),
        Shape(
            name="Hunyuan-4",
            architecture="hy_v4",
            n_layers=3,
            hidden=6144,
            vocab=120832,
            heads=(64, 1, 576),
            inner=18432,
            moe=Moe(n_experts=96, top_k=8, inner=2048, shared=2048),
            n_dense=1,
            rotated=64,
            latents=Latents(queries=2048, nope=192, values=256, index=(32, 128)),
            more=_STREAMS
            | {
                "attention.layer_norm_rms_epsilon": 1e-5,
                "attention.value_length": 512,
                "attention.kv_lora_rank": 512,
                "attention.q_lora_rank": 2048,
                "attention.key_length_mla": 256,
                "attention.value_length_mla": 256,
                "attention.indexer.head_count": 32,
                "attention.indexer.top_k": 2048,
                "attention.indexer.types": [True, True, False],
                "expert_weights_scale": 2.827,
                "hyper_connection.magnitude": 2.0,
                "leading_dense_block_count": 1,
                "rope.freq_base": 1e7,
            },
        ),
    )
}
"""By name, those of docs/benchmarks.md. The last two have 96 of 256 experts."""


def write_shape(shape: Shape, path: Path) -> Path:
    """Write a random file, once. Return `path`."""
    if path.exists():
        return path
    new = path.with_suffix(".new")
    writer = gguf.GGUFWriter(new, shape.architecture)
    for key, value in shape.metadata().items():
        _add(writer, f"{shape.architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{n}>".encode() for n in range(shape.vocab)])
    writer.add_token_scores([0.0] * shape.vocab)
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocab)
    tensors = shape.tensors()
    for name, own in tensors.items():
        kind = gguf.GGMLQuantizationType[shape.kind(name, own)]
        writer.add_tensor_info(name, own, np.dtype(np.float32), _n_bytes(kind, own), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (name, own) in enumerate(tensors.items()):
        for part in _values(shape.kind(name, own), name, own, seed=number):
            writer.write_tensor_data(part)
    writer.close()
    new.rename(path)
    return path


def _n_bytes(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // n_values * n_bytes


def _values(kind: str, name: str, shape: tuple[int, ...], seed: int) -> Iterator[Array]:
    """Give what is stored of a tensor."""
    if name == "rope_freqs.weight":  # a quarter of the columns turns
        yield np.where(np.arange(shape[0]) < shape[0] // 4, 1, 1e30).astype(np.float32)
        return
    if kind == "I32":  # a token's experts
        n_tokens, n_each = shape
        first = np.random.default_rng(seed).integers(0, _FEWEST, (n_tokens, 1), np.int32)
        yield first + np.arange(n_each, dtype=np.int32)
        return
    if kind in ("F32", "F16"):
        values = np.random.default_rng(seed).standard_normal(shape, np.float32) * SIZE
        if name.endswith(("norm.weight", "scale.weight", ".scale")) or "_norm_" in name:
            values += 1
        values = -np.abs(values) - 0.1 if name.endswith("ssm_a") else values
        yield values.astype(np.float16 if kind == "F16" else np.float32)
        return
    pool = _pool(kind)
    n_bytes = _n_bytes(gguf.GGMLQuantizationType[kind], shape)
    yield np.resize(np.roll(pool, 977 * seed, axis=0), n_bytes // pool.shape[1] * pool.shape[1])


@cache
def _pool(kind: str) -> Array:
    """Make random blocks, uint8 [blocks, bytes]."""
    generator = np.random.default_rng(1)
    n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = generator.integers(0, 256, (_POOL_BLOCKS, n_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(118, 121, len(blocks))
    for place, scale in _SCALES.get(kind, ()):
        halves = (scale * generator.uniform(0.8, 1.2, (len(blocks), 1))).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8)
    return blocks


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list() if key.endswith(("multipliers", "vocab_sizes", "offsets")):
            kind = gguf.GGUFValueType
            writer.add_key_value(key, value, kind.ARRAY, sub_type=kind.UINT64)
        case _:
            writer.add_array(key, value)
