"""Families without a record of ours: transformers' own modules, where that package is installed.

Reads their configs as transformers does. What such a model holds is an outline in the config, which
tables and sizes come from; stage/module_stage.py computes it. Imports transformers only when such a
config is read.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.errors import UnsupportedModelError, UsageError, shown
from shardnet.model.config.decoder_config import read_dtype, read_eos
from shardnet.model.config.fields import TEXT, Fields
from shardnet.model.config.limits import MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.config.module_outline import ModuleOutline
from shardnet.model.families.family import Family, FamilyStage
from shardnet.model.families.wrappers import Wrapper

if TYPE_CHECKING:
    from shardnet.model.fused.decoder import StageInputs

INSTALL: Final = "pip install 'shardnet[transformers]'"


def find_modules_family(fields: Fields, model_type: str, *, is_part: bool = False) -> Family | None:
    """Return the family of a `model_type` that the installed transformers has, None without one.

    Where it `is_part` of a multimodal model that may have no class of its own.

    Raises UnsupportedModelError where that package is not installed.
    """
    try:
        from shardnet.model.modules.meta_model import causal_class, part_class

        architecture = causal_class(model_type) or (part_class(model_type) if is_part else None)
    except ImportError as error:
        raise UnsupportedModelError(
            f"{fields.where}: model_type = {shown(model_type)} has no implementation of its own "
            "here, and transformers (5.24 or newer), which may have one, is not installed",
            remedy=f"{INSTALL} on every node, or use a checkpoint of a supported model",
        ) from error
    if architecture is None:
        return None
    named = fields.take("architectures", list, [])
    is_causal = len(named) == 1 and isinstance(named[0], str) and named[0].endswith("ForCausalLM")
    return replace(
        _FAMILY,
        model_type=model_type,
        architecture=architecture,
        same_architectures=(named[0],) if is_causal else (),  # its makers' own class
    )


def find_wrapper(
    raw: Mapping[str, Any], where: str, families: Container[str]
) -> tuple[Wrapper, Mapping[str, Any]] | None:
    """Read a multimodal config.json that has no record: its language model may be of any family.

    Returns None where the installed transformers, if any, knows no such `model_type`, or no such
    language model, and the `families` none either; else also the config, with what the language
    model's own leaves to its class. Raises UnsupportedModelError for a language model
    that runs otherwise than alone, CheckpointError for values that transformers does not take.
    """
    kind = str(raw.get("model_type"))
    if not isinstance(raw.get(TEXT), dict):
        return None
    try:
        from shardnet.model.modules.meta_model import causal_class

        architecture = causal_class(kind, sees=True)
    except ImportError:
        return None
    if architecture is None:
        return None
    from shardnet.model.modules.language_part import read_language_part
    from shardnet.model.modules.meta_model import part_class, read_module_config

    inner = read_module_config(raw, where).get_text_config(decoder=True)
    kind_of_text = str(inner.model_type)
    if kind_of_text not in families and not (
        causal_class(kind_of_text) or part_class(kind_of_text)
    ):
        return None
    _check_sizes(Fields(raw, where), inner)
    _check_depths(Fields(raw, where), raw)
    text = json.loads(read_language_part(json.dumps(dict(raw)), where))
    family = text["model_type"]
    wrapper = Wrapper(
        model_type=kind, architecture=architecture, family=family, text_types=(family,)
    )
    own = {key: raw[TEXT][key] for key in ("dtype", "torch_dtype") if key in raw[TEXT]}
    return wrapper, {**raw, TEXT: text | own}


def _read_config(fields: Fields) -> ModelConfig:
    """Read a config as transformers does: it knows all keys.

    Raises CheckpointError for values that it does not take, UnsupportedModelError for a model that
    cannot be cut.
    """
    from shardnet.model.modules.meta_model import read_module_config
    from shardnet.model.modules.outline import read_outline

    raw = fields.take_all()
    config = read_module_config(raw, fields.where)
    if config.get_text_config(decoder=True) is not config:
        kind = fields.take("model_type", str)
        raise fields.unsupported("model_type", kind, "language models without other parts")
    _check_sizes(fields, config)
    return _model_config(fields, config, read_outline(json.dumps(dict(raw)), fields.where))


def _check_sizes(fields: Fields, config: Any) -> None:
    """Raise CheckpointError for sizes that only a damaged config has, before a model is built."""
    for key, most in (
        ("num_hidden_layers", MAX_LAYERS),
        ("hidden_size", MAX_WIDTH),
        ("vocab_size", MAX_VOCABULARY),
    ):
        value = getattr(config, key, None)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise fields.damaged(f"{key} is {value!r}, expected 1 to {most}")


def _check_depths(fields: Fields, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for towers with more layers than any has, before they are built."""
    for name, part in raw.items():
        for key in ("num_hidden_layers", "depth"):
            if isinstance(part, dict) and isinstance(n := part.get(key), int) and n > MAX_LAYERS:
                raise fields.damaged(f"{name}.{key} is {n}, expected at most {MAX_LAYERS}")


def _model_config(fields: Fields, config: Any, outline: ModuleOutline) -> ModelConfig:
    """Write what planner, KV cache and sampler need; what the maths needs is in the outline."""

    def size(key: str, default: int) -> int:
        try:
            value = getattr(config, key, None)
        except RuntimeError:  # it differs from layer to layer
            value = None
        return value if isinstance(value, int) and value > 0 else default

    n_heads, hidden_size = size("num_attention_heads", 1), config.hidden_size
    return ModelConfig(
        family=outline.model_type,
        n_layers=len(outline.layers),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=size("num_key_value_heads", n_heads),
        head_size=size("head_dim", max(1, hidden_size // n_heads)),
        intermediate_size=size("intermediate_size", 4 * hidden_size),
        vocab_size=config.vocab_size,
        max_positions=min(size("max_position_embeddings", MAX_POSITIONS), MAX_POSITIONS),
        norm_eps=1e-6,
        activation=Activation.SILU,
        attention_bias=False,
        mlp_bias=False,
        rope=None,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        checkpoint_dtype=read_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=read_eos(fields),
        outline=outline,
    )


def _outline(config: ModelConfig) -> ModuleOutline:
    assert config.outline is not None, "configs of this family are read with one"
    return config.outline


def _load_stage(inputs: StageInputs) -> FamilyStage:
    """Raise UsageError: whoever asks wants more than a stage of a ring on one device."""
    raise UsageError(
        f"{inputs.config.family} is computed by transformers' own modules, which neither draft "
        "nor are measured or shared by several devices",
        remedy="ask without it",
    )


_FAMILY: Final = Family(
    model_type="",
    architecture="",
    read_config=_read_config,
    layer_tensors=lambda config, layer: dict(_outline(config).layers[layer]),
    embedding_tensors=lambda config: dict(_outline(config).embedding),
    head_tensors=lambda config: dict(_outline(config).head),
    shared_tensors=lambda config: dict(_outline(config).everywhere),
    load_stage=_load_stage,
)


def family_by_modules(config: ModelConfig) -> Family | None:
    """Return the record of a config that was read with an outline, None for others."""
    return None if config.outline is None else _FAMILY
