"""All model families, and how a checkpoint finds its own.

Knows the families' files by name, and nothing of what stands in them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

from shardnet.model.config.fields import TEXT, Fields
from shardnet.model.config.limits import MAX_LAYER_EXPERTS, MAX_VOCABULARY, MAX_WIDTH
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families import (
    afmoe,
    bailing_hybrid,
    deepseek_v2,
    deepseek_v4,
    deepseek_v41,
    dense_table,
    encoders,
    falcon_h1,
    gemma2,
    gemma4,
    glm5_next,
    gpt2,
    gpt_oss,
    granite,
    hunyuan,
    indexed_table,
    kimi_linear,
    laguna,
    latent_table,
    lfm,
    llama,
    llama4,
    llama_table,
    mamba2,
    mimo_v2_flash,
    mistral,
    nemotron_h,
    olmo,
    olmo_hybrid,
    phi,
    qwen,
    qwen4_exp,
    qwen_hybrid,
    sparse_table,
    step3p5,
)
from shardnet.model.families.family import Family
from shardnet.model.families.transformers_modules import (
    family_by_modules,
    find_modules_family,
    find_wrapper,
)
from shardnet.model.families.wrappers import WRAPPERS

_FILES: Final = (
    *(llama, granite, hunyuan, lfm, mistral, olmo, phi, qwen, qwen_hybrid, llama4, gemma2, gemma4),
    *(mimo_v2_flash, qwen4_exp, gpt_oss, deepseek_v2, latent_table, indexed_table, glm5_next, gpt2),
    *(llama_table, deepseek_v4, deepseek_v41, dense_table, sparse_table, mamba2, falcon_h1, afmoe),
    *(bailing_hybrid, olmo_hybrid, kimi_linear, laguna, step3p5, nemotron_h),
)
"""Each has one record, FAMILY, or several, FAMILIES."""


def _records(file: ModuleType) -> tuple[Family, ...]:
    return getattr(file, "FAMILIES", None) or (file.FAMILY,)


FAMILIES: Final[Mapping[str, Family]] = {
    family.model_type: family for file in _FILES for family in _records(file)
}
"""By `model_type`."""
_OTHER_NAMES: Final = {"kimi_k2": "deepseek_v3"}
"""Names of `model_type` that stand for another one."""


def family_of(config: ModelConfig) -> Family:
    """Return the family that `config` was read by."""
    return family_by_modules(config) or FAMILIES[config.family]


def find_family(model_type: str) -> Family | None:
    """Return the family of a `model_type`, or that of the language part of a multimodal one."""
    wrapper = WRAPPERS.get(model_type)
    return FAMILIES.get(model_type if wrapper is None else wrapper.family)


def gguf_families() -> Mapping[str, list[Family]]:
    """Return the families that are read from GGUF, by `general.architecture`."""
    found: dict[str, list[Family]] = {}
    for family in FAMILIES.values():
        if family.gguf is not None:
            for architecture in (family.gguf.architecture, *family.gguf.multimodal):
                found.setdefault(architecture, []).append(family)
    return found


def parse_config(
    raw: Mapping[str, Any], where: str, unknown: list[str] | None = None
) -> ModelConfig:
    """Read the parsed config.json `raw`; `where` is its path, for messages.

    Unknown keys, which may change the maths, are added to the list `unknown`; without it they are
    refused. Raises CheckpointError for a missing or malformed field, UnsupportedModelError for an
    architecture or a value that is not implemented, and for unknown keys, all named at once.
    """
    if (name := _OTHER_NAMES.get(str(raw.get("model_type")))) is not None:
        raw = {**raw, "model_type": name}
    if encoders.is_encoder(raw):
        raise encoders.writes_nothing(where)
    wrapper = WRAPPERS.get(kind := Fields(raw, where).take("model_type", str))
    if kind not in FAMILIES and (wrapper is None or not wrapper.knows(raw.get(TEXT))):
        wrapper, raw = find_wrapper(raw, where, FAMILIES) or (wrapper, raw)
    own = fields = Fields(raw, where, unknown=unknown)
    own.require("is_causal", True)
    if wrapper is not None:
        makers = wrapper.architecture.replace("_", "")  # KimiK25, where transformers has Kimi_K25
        _check_architecture(fields, wrapper.architecture, (makers,))
        fields = wrapper.unwrap(fields, raw)
    config = _find_family(fields, is_part=wrapper is not None).read_config(fields)
    _ignore_unused_windows(fields, raw)
    fields.note_the_rest()
    own.refuse_unknown()
    if wrapper is not None:
        config = replace(config, wrapper=wrapper.model_type)
    _check_counts(fields, config)
    return config


def _check_counts(fields: Fields, config: ModelConfig) -> None:
    """Raise CheckpointError for counts that only a damaged config has, whatever the family."""
    n_experts = len(config.sparse_layers) * (config.experts.n_experts if config.experts else 0)
    for what, n, most in (
        ("tokens", config.vocab_size, MAX_VOCABULARY),
        ("experts in all layers", n_experts, MAX_LAYER_EXPERTS),
        ("columns in one linear", _widest(config), MAX_WIDTH),
    ):
        if n > most:
            raise fields.damaged(f"it claims {n} {what}, expected at most {most}")


def _widest(config: ModelConfig) -> int:
    """Return the most columns that an input or output of any of the model's linears has."""
    widths = [config.hidden_size, config.intermediate_size, config.n_heads * config.head_size]
    if config.experts is not None:
        widths += [config.experts.intermediate_size, config.experts.shared_intermediate_size]
    if config.latent is not None:
        own = config.latent
        head = max(own.nope_size + own.rope_size, own.nope_size + own.value_size)
        widths += [config.n_heads * head, own.width, own.query_rank or 0]
    return max(widths)


def _ignore_unused_windows(fields: Fields, raw: Mapping[str, Any]) -> None:
    """Ignore which layers have a window where no layer has one, in families that do not read it.

    Qwen's configs say so, and those of models that were made of Qwen's.
    """
    switch = raw.get("use_sliding_window")
    if switch is False:
        fields.ignore("sliding_window", "max_window_layers")
    elif switch is None and raw.get("sliding_window") is None:
        fields.ignore("max_window_layers")


def _find_family(fields: Fields, *, is_part: bool) -> Family:
    model_type = fields.take("model_type", str)
    family = FAMILIES.get(model_type)
    if family is None or not family.covers(fields):
        family = find_modules_family(fields, model_type, is_part=is_part)
    if family is None:
        known = ", ".join(sorted((*FAMILIES, *WRAPPERS)))
        raise fields.unsupported("model_type", model_type, known)
    whole = family.architecture
    stem = whole.removesuffix("ForCausalLM")
    without_head = (f"{stem}Model", f"{stem}TextModel")  # as models that make vectors
    _check_architecture(fields, whole, (*family.same_architectures, *without_head))
    return family


def _check_architecture(fields: Fields, only: str, same: tuple[str, ...] = ()) -> None:
    architectures = fields.take("architectures", list, [only])
    if architectures != [only] and architectures not in [[name] for name in same]:
        raise fields.unsupported("architectures", architectures, f'["{only}"]')
