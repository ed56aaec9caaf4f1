"""Which tensors a stage needs, under which names and in which shapes.

Knows Hugging Face's parameter names of each family. Must not know files or torch: the loader, the
planner's memory prediction and weight sharing all read this one table.

Names here are those of the causal-LM class, GPT-2's without the `transformer.` prefix, which some
checkpoints have and some have not (`canonical_name`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardnet.model.config import ModelConfig
from shardnet.types import LayerRange

Shape = tuple[int, ...]

_GPT2_PREFIX = "transformer."
_SKIPPED = {
    "llama": re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    "gpt2": re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensors:
    """Name to shape of what a stage reads, by part. `embedding` and `head` may be empty.

    A tied head's `head` names the embedding table, also where `embedding` already does.
    """

    embedding: dict[str, Shape]
    layers: dict[int, dict[str, Shape]]
    head: dict[str, Shape]

    @property
    def all(self) -> dict[str, Shape]:
        """Every tensor of the stage, each once."""
        merged = dict(self.embedding)
        for tensors in self.layers.values():
            merged.update(tensors)
        return merged | self.head


def stage_tensors(config: ModelConfig, layers: LayerRange) -> StageTensors:
    """Name the tensors of the stage with `layers`: first with embedding, last with head."""
    return StageTensors(
        embedding=embedding_tensors(config) if layers.start == 0 else {},
        layers={layer: layer_tensors(config, layer) for layer in layers},
        head=head_tensors(config) if layers.end == config.n_layers else {},
    )


def embedding_tensors(config: ModelConfig) -> dict[str, Shape]:
    """The tables that turn token ids (and GPT-2 positions) into the first hidden states."""
    if config.family == "llama":
        return {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    return {
        "wte.weight": (config.vocab_size, config.hidden_size),
        "wpe.weight": (config.max_positions, config.hidden_size),
    }


def head_tensors(config: ModelConfig) -> dict[str, Shape]:
    """The final norm and the LM head."""
    table = (config.vocab_size, config.hidden_size)
    if config.family == "llama":
        name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        return {"model.norm.weight": (config.hidden_size,), name: table}
    name = "wte.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {
        "ln_f.weight": (config.hidden_size,),
        "ln_f.bias": (config.hidden_size,),
        name: table,
    }


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """The tensors of one layer."""
    if config.family == "llama":
        return _llama_layer(config, f"model.layers.{layer}.")
    return _gpt2_layer(config, f"h.{layer}.")


def _llama_layer(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.n_heads * config.head_size
    keys = config.n_kv_heads * config.head_size
    attention = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    mlp = {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, Shape] = {}
    for linears, with_bias in ((attention, config.attention_bias), (mlp, config.mlp_bias)):
        for name, shape in linears.items():
            tensors[f"{prefix}{name}.weight"] = shape
            if with_bias:
                tensors[f"{prefix}{name}.bias"] = shape[:1]
    tensors[f"{prefix}input_layernorm.weight"] = (hidden,)
    tensors[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return tensors


def _gpt2_layer(config: ModelConfig, prefix: str) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = {  # Conv1D: inputs first, outputs second
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    tensors: dict[str, Shape] = {}
    for name, shape in linears.items():
        tensors[f"{prefix}{name}.weight"] = shape
        tensors[f"{prefix}{name}.bias"] = shape[1:]
    for name in ("ln_1", "ln_2"):
        tensors[f"{prefix}{name}.weight"] = (hidden,)
        tensors[f"{prefix}{name}.bias"] = (hidden,)
    return tensors


def canonical_name(config: ModelConfig, name: str) -> str:
    """The name as this module writes it: GPT-2's without the `transformer.` prefix."""
    return name.removeprefix(_GPT2_PREFIX) if config.family == "gpt2" else name


def left_over(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """Of a whole checkpoint's tensor names, those that the model has no place for, sorted.

    Buffers that transformers once stored (masks, rotary frequencies) and the head of a tied model
    are known and left out.
    """
    known = set(stage_tensors(config, LayerRange(0, config.n_layers)).all) | {"lm_head.weight"}
    skipped = _SKIPPED[config.family]
    return sorted(
        name
        for name in names
        if (canonical := canonical_name(config, name)) not in known
        and not skipped.fullmatch(canonical)
    )
