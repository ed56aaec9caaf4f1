"""The tensors and metadata of known models in GGUF files, a few layers of each.

Knows names, sizes and types as llama.cpp's converter and quantiser choose them. Must not know how
a file is written (shape_files.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Tensors = dict[str, tuple[int, ...]]
"""Shapes by name, outputs before inputs."""
_WITH_HEAD_NORMS = ("qwen3", "qwen3moe", "gemma3", "gemma4", "qwen35", "qwen35moe", "lfm2moe")
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
    local_heads: tuple[int, int] = (0, 0)
    """Heads of keys and their size in layers with a window, where these differ (Gemma 4)."""
    pattern: str = ""
    """A letter for each layer of a hybrid: Mamba-2, Experts, Convolution, attention (*), which may
    have a Window.
    """
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
        if self.architecture == "gemma4":
            made["rope_freqs.weight"] = (self.heads[2] // 2,)
        norm = "token_embd_norm" if self.architecture == "lfm2moe" else "output_norm"
        return made | {f"{norm}.weight": (self.hidden,)}

    def _layer(self, layer: int) -> Tensors:
        if self.architecture == "nemotron_h_moe":
            return {"attn_norm.weight": (self.hidden,)} | self._single(layer)
        second = "ffn_norm" if self._has_ffn_norm else "post_attention_norm"
        made = {"attn_norm.weight": (self.hidden,), f"{second}.weight": (self.hidden,)}
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
        return made | self._attention(layer) | mlp

    @property
    def _has_ffn_norm(self) -> bool:
        return self.architecture not in ("gpt-oss", "glm4moe", "qwen35", "qwen35moe")

    def _attention(self, layer: int) -> Tensors:
        match self.architecture:
            case "deepseek2":
                return self._latent_attention()
            case "qwen35" | "qwen35moe" if (layer + 1) % 4:
                return self._delta_net()
            case "lfm2moe" if self.pattern[layer] == "C":
                return self._convolution()
        n_heads, n_keys, size = self.heads
        is_local = self.architecture == "gemma4" and self.pattern[layer] == "W"
        n_keys, size = self.local_heads if is_local else (n_keys, size)
        gates = 2 if self.architecture in ("qwen35", "qwen35moe") else 1
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
        if self.architecture in ("glm4moe", "deepseek2", "lfm2moe", "nemotron_h_moe"):
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
        is_small = len(shape) == 1 or not name.endswith(".weight") or name.endswith("norm.weight")
        if is_small or "ffn_gate_inp" in name or "conv1d" in name or "shortconv.conv" in name:
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
