"""The tensors and metadata of known models in GGUF files, a few layers of each.

Knows names, sizes and types as llama.cpp's converter and quantiser choose them. Must not know how
a file is written (shape_files.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Tensors = dict[str, tuple[int, ...]]
"""Shapes by name, outputs before inputs."""
_WITH_HEAD_NORMS = (
    *("qwen3", "qwen3moe", "gemma3", "gemma4", "qwen35", "qwen35moe", "lfm2moe", "qwen4exp"),
)
_WITH_BIASED_ROUTERS = (
    *("glm4moe", "deepseek2", "lfm2moe", "nemotron_h_moe"),
    *("deepseek4", "hy_v4", "glm5-next"),
)
_BOTH = ("weight", "bias")
_IN_FLOAT32 = ("ffn_gate_inp", "conv1d", "shortconv.conv", "_ape.", "_fn.", "indexer.proj")
_KEPT = {
    "qwen4exp": ("indexer.",),
    "glm5-next": (
        *("indexer", "ssm_f_", "ssm_g_", "ssm_beta", "attn_kv_a_mqa", "attn_k_b", "attn_v_b"),
    ),
}
"""What the quantiser leaves in float16, by architecture."""
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
class Latents:
    """Sizes of latent attention: columns of latents, and of a head. `index` are the heads of what
    chooses positions, and their size.
    """

    queries: int = 1536
    rank: int = 512
    nope: int = 128
    rope: int = 64
    values: int = 128
    index: tuple[int, int] = (0, 0)


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
    local_heads: tuple[int, int] = (0, 0)
    """Heads of keys and their size in layers with a window, where these differ (Gemma 4)."""
    pattern: str = ""
    """A letter for each layer of a hybrid: Mamba-2, Experts, Convolution, Linear attention, also
    with N-grams, attention (*), which may have a Window.
    """
    rotated: int = 0
    """Columns of a head that are rotated; 0 is all."""
    latents: Latents = Latents()
    """Sizes of latent attention, where there is such."""
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
        if self.architecture == "gemma4":
            made["rope_freqs.weight"] = (self.heads[2] // 2,)
        if self.architecture == "qwen4exp":
            table = (sum(self.more["ple.head_vocab_sizes"]), self.hidden // 16)
            made |= {"per_layer_token_embd.weight": table}
            return made | self._gated_streams("output_hc")
        if self.architecture in ("deepseek4", "hy_v4"):
            made |= self._mixer("output_hc", 4, 1)
        norm = "token_embd_norm" if self.architecture == "lfm2moe" else "output_norm"
        return made | {f"{norm}.weight": (self.hidden,)}

    def _layer(self, layer: int) -> Tensors:
        if self.architecture == "nemotron_h_moe":
            return {"attn_norm.weight": (self.hidden,)} | self._single(layer)
        if self.architecture == "qwen4exp":
            return self._ngram_layer(layer)
        second = "ffn_norm" if self._has_ffn_norm else "post_attention_norm"
        made: Tensors = {"attn_norm.weight": (self.hidden,), f"{second}.weight": (self.hidden,)}
        if self.architecture in ("gemma3", "gemma4"):
            made |= {f"post_{part}_norm.weight": (self.hidden,) for part in ("attention", "ffw")}
        if self.architecture == "gemma4":
            made["layer_output_scale.weight"] = (1,)
            if self.moe is not None:
                mlp = _gated(self.hidden, self.inner, "")
                return made | self._attention(layer) | mlp | self._fused_experts(self.moe)
        if self.moe is None or layer < self.n_dense:
            mlp = _gated(self.hidden, self.inner, "")
        else:
            mlp = self._experts(self.moe)
        if "hyper_connection.count" in self.more:
            n_kinds, n_out = (2, 8) if self.architecture == "hy_v4" else (3, 24)
            made |= self._mixer("hc_attn", n_out, n_kinds) | self._mixer("hc_ffn", n_out, n_kinds)
        if layer < self.more.get("hash_layer_count", 0) and self.moe is not None:
            del mlp["exp_probs_b.bias"]
            mlp["ffn_gate_tid2eid.weight"] = (self.vocab, self.moe.top_k)
        return made | self._attention(layer) | mlp

    def _mixer(self, name: str, n_out: int, n_kinds: int) -> Tensors:
        """Name what mixes four residual streams."""
        shapes = {"fn": (n_out, 4 * self.hidden), "base": (n_out,), "scale": (n_kinds,)}
        return {f"{name}_{kind}.weight": shape for kind, shape in shapes.items()}

    @property
    def _has_ffn_norm(self) -> bool:
        return self.architecture not in ("gpt-oss", "glm4moe", "qwen35", "qwen35moe")

    def _attention(self, layer: int) -> Tensors:
        match self.architecture:
            case "deepseek2":
                return self._latent_attention()
            case "hy_v4":
                return self._latent_attention() | self._gate_and_indexer(layer)
            case "deepseek4":
                return self._compressed_attention(layer)
            case "glm5-next":
                return self._kda() if self.pattern[layer] == "L" else self._pooled_latents()
            case "qwen4exp" if self.pattern[layer] != "*":
                return self._delta_net()
            case "qwen35" | "qwen35moe" if (layer + 1) % 4:
                return self._delta_net()
            case "lfm2moe" if self.pattern[layer] == "C":
                return self._convolution()
        n_heads, n_keys, size = self.heads
        is_local = self.architecture == "gemma4" and self.pattern[layer] == "W"
        n_keys, size = self.local_heads if is_local else (n_keys, size)
        gates = 2 if self.architecture in ("qwen35", "qwen35moe", "qwen4exp") else 1
        outputs = {"q": gates * n_heads * size, "k": n_keys * size, "v": n_keys * size}
        if self.architecture == "gemma4" and not is_local:
            del outputs["v"]  # values are the keys
        made: Tensors = {f"attn_{k}.weight": (n, self.hidden) for k, n in outputs.items()}
        made["attn_output.weight"] = (self.hidden, n_heads * size)
        if self.architecture in ("gpt-oss", "glm4moe"):
            made |= {f"attn_{kind}.bias": (n,) for kind, n in outputs.items()}
        if self.architecture == "gpt-oss":
            made |= {"attn_output.bias": (self.hidden,), "attn_sinks.weight": (n_heads,)}
        if self.architecture in _WITH_HEAD_NORMS:
            made |= {f"attn_{kind}_norm.weight": (size,) for kind in "qk"}
        return made

    def _latent_attention(self) -> Tensors:
        n_heads, own = self.heads[0], self.latents
        return {
            "attn_q_a.weight": (own.queries, self.hidden),
            "attn_q_a_norm.weight": (own.queries,),
            "attn_q_b.weight": (n_heads * (own.nope + own.rope), own.queries),
            "attn_kv_a_mqa.weight": (own.rank + own.rope, self.hidden),
            "attn_kv_a_norm.weight": (own.rank,),
            "attn_k_b.weight": (n_heads, own.rank, own.nope),
            "attn_v_b.weight": (n_heads, own.values, own.rank),
            "attn_output.weight": (self.hidden, n_heads * own.values),
        }

    def _gate_and_indexer(self, layer: int) -> Tensors:
        """Name what Hunyuan 4 adds to latents."""
        made: Tensors = {
            "attn_sinks.weight": (self.heads[0],),
            "attn_gate.weight": (self.heads[0] * self.latents.values, self.hidden),
        }
        if self.more["attention.indexer.types"][layer]:
            made |= self._key_indexer()
        return made

    def _key_indexer(self) -> Tensors:
        size = self.latents.index[1]
        made = self._indexer() | {f"indexer.k_norm.{kind}": (size,) for kind in _BOTH}
        return made | {"indexer.attn_k.weight": (size, self.hidden)}

    def _indexer(self) -> Tensors:
        n_heads, size = self.latents.index
        return {
            "indexer.attn_q_b.weight": (n_heads * size, self.latents.queries),
            "indexer.proj.weight": (n_heads, self.hidden),
        }

    def _compressed_attention(self, layer: int) -> Tensors:
        """Name DeepSeek-V4's attention: a layer's rate says what makes entries of positions."""
        (n_heads, _, size), queries = self.heads, self.latents.queries
        outputs = 8 * 1024
        made: Tensors = {
            "attn_q_a.weight": (queries, self.hidden),
            "attn_q_a_norm.weight": (queries,),
            "attn_q_b.weight": (n_heads * size, queries),
            "attn_kv.weight": (size, self.hidden),
            "attn_kv_a_norm.weight": (size,),
            "attn_output_a.weight": (outputs, n_heads * size // 8),
            "attn_output_b.weight": (self.hidden, outputs),
            "attn_sinks.weight": (n_heads,),
        }
        rate = self.more["attention.compress_ratios"][layer]
        if rate:
            made |= self._compressor("attn", rate, size)
        if rate == 4:
            made |= self._compressor("indexer", rate, self.latents.index[1]) | self._indexer()
        return made

    def _compressor(self, name: str, rate: int, size: int) -> Tensors:
        width = 2 * size if rate == 4 else size
        return {
            f"{name}_compressor_kv.weight": (width, self.hidden),
            f"{name}_compressor_gate.weight": (width, self.hidden),
            f"{name}_compressor_ape.weight": (rate, width),
            f"{name}_compressor_norm.weight": (size,),
        }

    def _delta_net(self) -> Tensors:
        keys, values, size = 16, self.more["ssm.time_step_rank"], 128
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

    def _ngram_layer(self, layer: int) -> Tensors:
        """Name a layer of Qwen 3.8 between its streams, with an index or with n-grams."""
        assert self.moe is not None
        made = self._attention(layer) | self._experts(self.moe)
        for block in ("hc_attn", "hc_ffn"):
            made |= self._gated_streams(block) | {f"{block}_inject.weight": (4, 4 * self.hidden)}
        if self.pattern[layer] == "*":
            made |= {"indexer.q_proj.weight": (512, self.hidden)}
            made |= {"indexer.k_proj.weight": (128, self.hidden)}
            made |= {f"indexer.{kind}_norm.weight": (128,) for kind in "qk"}
        if self.pattern[layer] == "N":
            made |= {"ple_key.weight": (4 * self.hidden, self.hidden)}
            made |= {"ple_value.weight": (self.hidden, self.hidden)}
            made |= {f"ple_norm_{k}.weight": (4 * self.hidden,) for k in ("key", "query", "conv")}
            made |= {"ple_conv1d.weight": (4 * self.hidden, 4)}
        return made

    def _gated_streams(self, name: str) -> Tensors:
        wide, rank = 4 * self.hidden, 320
        return {
            f"{name}_norm.weight": (wide,),
            f"{name}_down.weight": (rank, wide),
            f"{name}_up.weight": (wide, rank),
        }

    def _kda(self) -> Tensors:
        n_heads, size = self.heads[0], 128
        width = n_heads * size
        made: Tensors = {f"attn_{kind}.weight": (width, self.hidden) for kind in "qkv"}
        made |= {f"ssm_conv1d_{kind}.weight": (1, width, 1, 4) for kind in "qkv"}
        made |= {f"ssm_{kind}_a.weight": (size, self.hidden) for kind in "fg"}
        made |= {f"ssm_{kind}_b.weight": (width, size) for kind in "fg"}
        return made | {
            "ssm_beta.weight": (n_heads, self.hidden),
            "ssm_a": (n_heads,),
            "ssm_dt.bias": (width,),
            "ssm_norm.weight": (size,),
            "attn_output.weight": (self.hidden, width),
        }

    def _pooled_latents(self) -> Tensors:
        size = self.latents.index[1]
        return (
            self._latent_attention()
            | self._key_indexer()
            | {
                "indexer_compressor_gate.weight": (size, self.hidden),
                "indexer_compressor_ape.weight": (4, size),
            }
        )

    def _convolution(self) -> Tensors:
        return {
            "shortconv.in_proj.weight": (3 * self.hidden, self.hidden),
            "shortconv.conv.weight": (self.hidden, 3),
            "shortconv.out_proj.weight": (self.hidden, self.hidden),
        }

    def _single(self, layer: int) -> Tensors:
        """Name one of Nemotron-H's three kinds of layers."""
        if self.pattern[layer] == "*":
            return self._attention(layer)
        if self.pattern[layer] == "M":
            return self._mamba()
        assert self.moe is not None
        gates = ("ffn_gate_exps.weight", "ffn_gate_shexp.weight")
        named = self._experts(self.moe)
        return {name: shape for name, shape in named.items() if name not in gates}

    def _mamba(self) -> Tensors:
        n_heads, size, groups, state = 64, 64, 8, 128
        inner, mixed = n_heads * size, n_heads * size + 2 * groups * state
        return {
            "ssm_in.weight": (inner + mixed + n_heads, self.hidden),
            "ssm_conv1d.weight": (mixed, 4),
            "ssm_conv1d.bias": (mixed,),
            "ssm_dt.bias": (n_heads,),
            "ssm_a": (n_heads, 1),
            "ssm_d": (n_heads, 1),
            "ssm_norm.weight": (groups, inner // groups),
            "ssm_out.weight": (self.hidden, inner),
        }

    def _fused_experts(self, moe: Moe) -> Tensors:
        """Name Gemma 4's experts beside a dense MLP, whose gate and up are one tensor."""
        n, hidden, inner = moe.n_experts, self.hidden, moe.inner
        after = ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        return {
            "ffn_gate_inp.weight": (n, hidden),
            "ffn_gate_inp.scale": (hidden,),
            "ffn_gate_up_exps.weight": (n, 2 * inner, hidden),
            "ffn_down_exps.weight": (n, hidden, inner),
            "ffn_down_exps.scale": (n,),
        } | {f"{name}.weight": (hidden,) for name in after}

    def _experts(self, moe: Moe) -> Tensors:
        n, inner = moe.n_experts, moe.inner
        made: Tensors = {"ffn_gate_inp.weight": (n, self.hidden)}
        for name, shape in _gated(self.hidden, inner, "_exps").items():
            made[name] = (n, *shape)
        if moe.shared:
            made |= _gated(self.hidden, moe.shared, "_shexp")
        if self.architecture in _WITH_BIASED_ROUTERS:
            made["exp_probs_b.bias"] = (n,)
        if self.architecture in ("qwen35moe", "qwen4exp"):
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
        is_small = len(shape) == 1 or not name.endswith(".weight") or name.endswith("norm.weight")
        if is_small or any(part in name for part in _IN_FLOAT32):
            return "F32"
        if "tid2eid" in name:
            return "I32"
        if any(part in name for part in _KEPT.get(self.architecture, ())):
            return "F16"
        if self.is_mxfp4:
            return "MXFP4" if "_exps" in name else "Q8_0"
        is_more = name == "output.weight" or (self.is_tied and name.startswith("token_embd"))
        if "attn_v." in name or "ffn_down" in name:
            is_more = int(name.split(".")[1]) % 2 == 0
        kind = "Q6_K" if is_more else "Q4_K"
        if self.architecture == "glm5-next" and "attn_q_" in name:
            return "Q8_0"
        return _INSTEAD[kind] if shape[-1] % 256 else kind


def _gated(hidden: int, inner: int, suffix: str) -> Tensors:
    return {
        f"ffn_gate{suffix}.weight": (inner, hidden),
        f"ffn_up{suffix}.weight": (inner, hidden),
        f"ffn_down{suffix}.weight": (hidden, inner),
    }
