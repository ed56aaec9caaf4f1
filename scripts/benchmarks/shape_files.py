"""Random GGUF files in the shapes of known models: a few layers each, with sane scales.

Knows sizes, names and types of tensors as llama.cpp's converter and quantiser choose them. Weights
are one pool of random blocks again and again: what a step computes is nonsense, but finite, and
costs what the model's own would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, tuple[int, ...]]
"""Shapes by name, outputs before inputs."""

SIZE = 0.02
"""About how large weights are."""
_POOL_BLOCKS = 1 << 15
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_K": ((0, SIZE / 150), (2, SIZE / 20)),
    "Q5_0": ((0, SIZE / 9),),
    "Q6_K": ((208, SIZE / 1400),),
    "Q8_0": ((0, SIZE / 74),),
}
"""Where a block has float16 and what they are."""
_INSTEAD = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""The type where rows are no whole blocks of 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """The experts of a layer."""

    n_experts: int
    top_k: int
    inner: int
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One model's shape. `heads` are those of queries, of keys, and their size."""

    name: str
    architecture: str
    n_layers: int
    hidden: int
    vocab: int
    heads: tuple[int, int, int]
    inner: int
    moe: Moe | None = None
    n_dense: int = 0
    """Layers before those with experts."""
    is_tied: bool = False
    is_mxfp4: bool = False
    rotated: int = 0
    """Columns of a head that are rotated; 0 is all."""
    more: dict[str, Any] = field(default_factory=dict)
    """More metadata, without the architecture in the names."""

    def tensors(self) -> Tensors:
        """Name all tensors."""
        made: Tensors = {"token_embd.weight": (self.vocab, self.hidden)}
        if not self.is_tied:
            made["output.weight"] = (self.vocab, self.hidden)
        for layer in range(self.n_layers):
            for name, shape in self._layer(layer).items():
                made[f"blk.{layer}.{name}"] = shape
        return made | {"output_norm.weight": (self.hidden,)}

    def _layer(self, layer: int) -> Tensors:
        second = "ffn_norm" if self._has_ffn_norm else "post_attention_norm"
        made = {"attn_norm.weight": (self.hidden,), f"{second}.weight": (self.hidden,)}
        if self.architecture == "gemma3":
            made |= {f"post_{part}_norm.weight": (self.hidden,) for part in ("attention", "ffw")}
        if self.moe is None or layer < self.n_dense:
            mlp = _gated(self.hidden, self.inner, "")
        else:
            mlp = self._experts(self.moe)
        return made | self._attention(layer) | mlp

    @property
    def _has_ffn_norm(self) -> bool:
        return self.architecture not in ("gpt-oss", "glm4moe", "qwen35moe")

    def _attention(self, layer: int) -> Tensors:
        match self.architecture:
            case "deepseek2":
                return self._latent_attention()
            case "qwen35moe" if (layer + 1) % 4:
                return self._delta_net()
        n_heads, n_keys, size = self.heads
        gates = 2 if self.architecture == "qwen35moe" else 1
        outputs = {"q": gates * n_heads * size, "k": n_keys * size, "v": n_keys * size}
        made: Tensors = {f"attn_{k}.weight": (n, self.hidden) for k, n in outputs.items()}
        made["attn_output.weight"] = (self.hidden, n_heads * size)
        if self.architecture in ("gpt-oss", "glm4moe"):
            made |= {f"attn_{kind}.bias": (n,) for kind, n in outputs.items()}
        if self.architecture == "gpt-oss":
            made |= {"attn_output.bias": (self.hidden,), "attn_sinks.weight": (n_heads,)}
        if self.architecture in ("qwen3", "qwen3moe", "gemma3", "qwen35moe"):
            made |= {f"attn_{kind}_norm.weight": (size,) for kind in "qk"}
        return made

    def _latent_attention(self) -> Tensors:
        n_heads, queries, rank, nope, rope, values = self.heads[0], 1536, 512, 128, 64, 128
        return {
            "attn_q_a.weight": (queries, self.hidden),
            "attn_q_a_norm.weight": (queries,),
            "attn_q_b.weight": (n_heads * (nope + rope), queries),
            "attn_kv_a_mqa.weight": (rank + rope, self.hidden),
            "attn_kv_a_norm.weight": (rank,),
            "attn_k_b.weight": (n_heads, rank, nope),
            "attn_v_b.weight": (n_heads, values, rank),
            "attn_output.weight": (self.hidden, n_heads * values),
        }

    def _delta_net(self) -> Tensors:
        keys, values, size = 16, 32, 128
        mixed = (2 * keys + values) * size
        return {
            "attn_qkv.weight": (mixed, self.hidden),
            "attn_gate.weight": (values * size, self.hidden),
            "ssm_alpha.weight": (values, self.hidden),
            "ssm_beta.weight": (values, self.hidden),
            "ssm_conv1d.weight": (mixed, 4),
            "ssm_a": (values,),
            "ssm_dt.bias": (values,),
            "ssm_norm.weight": (size,),
            "ssm_out.weight": (self.hidden, values * size),
        }

    def _experts(self, moe: Moe) -> Tensors:
        n, inner = moe.n_experts, moe.inner
        made: Tensors = {"ffn_gate_inp.weight": (n, self.hidden)}
        for name, shape in _gated(self.hidden, inner, "_exps").items():
            made[name] = (n, *shape)
        if moe.shared:
            made |= _gated(self.hidden, moe.shared, "_shexp")
        if self.architecture in ("glm4moe", "deepseek2"):
            made["exp_probs_b.bias"] = (n,)
        if self.architecture == "qwen35moe":
            made["ffn_gate_inp_shexp.weight"] = (self.hidden,)
        if self.architecture == "gpt-oss":
            made["ffn_gate_inp.bias"] = (n,)
            made |= {f"ffn_{kind}_exps.bias": (n, inner) for kind in ("gate", "up")}
            made["ffn_down_exps.bias"] = (n, self.hidden)
        return made

    def metadata(self) -> dict[str, Any]:
        """Return what the header says, without the architecture in the names."""
        n_heads, n_keys, size = self.heads
        made = {
            "block_count": self.n_layers,
            "context_length": 32768,
            "embedding_length": self.hidden,
            "feed_forward_length": self.inner,
            "attention.head_count": n_heads,
            "attention.head_count_kv": n_keys,
            "attention.key_length": size,
            "attention.value_length": size,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
            "rope.dimension_count": self.rotated or size,
            "vocab_size": self.vocab,
        }
        if self.moe is not None:
            made |= {
                "expert_count": self.moe.n_experts,
                "expert_used_count": self.moe.top_k,
                "expert_feed_forward_length": self.moe.inner,
            }
        return made | self.more

    def kind(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type of a tensor: Q4_K_M's, or with `is_mxfp4` that of experts and Q8_0."""
        is_small = len(shape) == 1 or name.endswith(".bias")
        if is_small or "ffn_gate_inp" in name or "conv1d" in name:
            return "F32"
        if self.is_mxfp4:
            return "MXFP4" if "_exps" in name else "Q8_0"
        is_more = name == "output.weight" or (self.is_tied and name.startswith("token_embd"))
        if "attn_v." in name or "ffn_down" in name:
            is_more = int(name.split(".")[1]) % 2 == 0
        kind = "Q6_K" if is_more else "Q4_K"
        return _INSTEAD[kind] if shape[-1] % 256 else kind


def _gated(hidden: int, inner: int, suffix: str) -> Tensors:
    return {
        f"ffn_gate{suffix}.weight": (inner, hidden),
        f"ffn_up{suffix}.weight": (inner, hidden),
        f"ffn_down{suffix}.weight": (hidden, inner),
    }


_GROUPED: dict[str, Any] = {
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
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
            more={
                "expert_shared_feed_forward_length": 512,
                "ssm.conv_kernel": 4,
                "ssm.state_size": 128,
                "ssm.group_count": 16,
                "ssm.time_step_rank": 32,
                "ssm.inner_size": 4096,
                "full_attention_interval": 4,
                "rope.dimension_sections": [11, 11, 10, 0],
            },
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
    )
}
"""By name, those of docs/benchmarks.md."""


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
    if kind == "F32":
        values = np.random.default_rng(seed).standard_normal(shape, np.float32) * SIZE
        if name.endswith("norm.weight"):
            values += 1
        yield -np.abs(values) - 0.1 if name.endswith("ssm_a") else values
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
        case _:
            writer.add_array(key, value)
