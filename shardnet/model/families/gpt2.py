"""GPT-2 (transformers, modeling_gpt2.py): learned positions, LayerNorms, names of its own.

Parameters are named without the `transformer.` prefix, which some checkpoints have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardnet.model.config.decoder_config import (
    even_head_size,
    read_activation,
    read_dtype,
    read_eos,
)
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields
from shardnet.model.config.limits import MAX_LAYERS, MAX_POSITIONS, NORM_EPS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import Family, FamilyStage, GgufFormat
from shardnet.model.families.tensor_shapes import Table

if TYPE_CHECKING:
    from shardnet.model.fused.decoder import StageInputs


def read_config(fields: Fields) -> ModelConfig:
    """Read a GPT2Config."""
    hidden_size = fields.positive("n_embd")
    n_heads = fields.positive("n_head")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        family=fields.take("model_type", str),
        n_layers=fields.positive("n_layer", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=even_head_size(fields, hidden_size, n_heads),
        intermediate_size=fields.positive("n_inner", 4 * hidden_size),
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.positive("n_positions", 1024, at_most=MAX_POSITIONS),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, within=NORM_EPS),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        attention_bias=True,
        mlp_bias=True,
        rope=None,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, True),
        checkpoint_dtype=read_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=read_eos(fields),
    )


def embedding_tensors(config: ModelConfig) -> Table:
    """Name the tables of tokens and positions."""
    return {
        "wte.weight": (config.vocab_size, config.hidden_size),
        "wpe.weight": (config.max_positions, config.hidden_size),
    }


def head_tensors(config: ModelConfig) -> Table:
    """Name the final norm and the LM head."""
    name = "wte.weight" if config.tie_word_embeddings else "lm_head.weight"
    return {
        "ln_f.weight": (config.hidden_size,),
        "ln_f.bias": (config.hidden_size,),
        name: (config.vocab_size, config.hidden_size),
    }


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name a layer's parameters. Conv1D weights have the inputs first, the outputs second."""
    prefix = f"h.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    tensors: Table = {}
    for name, shape in shapes.items():
        tensors[f"{prefix}{name}.weight"] = shape
        tensors[f"{prefix}{name}.bias"] = shape[1:]
    for name in ("ln_1", "ln_2"):
        tensors[f"{prefix}{name}.weight"] = (hidden,)
        tensors[f"{prefix}{name}.bias"] = (hidden,)
    return tensors


def load_stage(inputs: StageInputs) -> FamilyStage:
    """Take the parameters of `layers`, and of embedding and head where they belong.

    Decode steps are not captured.
    """
    from shardnet.model.fused.gpt2_stage import Gpt2Stage

    return Gpt2Stage(inputs.config, inputs.layers, inputs.weights)


def read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata."""
    return {
        "n_layer": fields.positive("block_count"),
        "n_positions": fields.positive("context_length"),
        "n_embd": fields.positive("embedding_length"),
        "n_inner": fields.positive("feed_forward_length"),
        "n_head": fields.positive("attention.head_count"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon", within=NORM_EPS),
    }


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read_config=read_config,
    embedding_tensors=embedding_tensors,
    head_tensors=head_tensors,
    layer_tensors=layer_tensors,
    load_stage=load_stage,
    name_prefix="transformer.",
    ignored_tensors=r"h\.\d+\.attn\.(bias|masked_bias)",
    gguf=GgufFormat(architecture="gpt2", read=read_gguf, transposed="h."),
    pretokenizer="gpt-2",
)
