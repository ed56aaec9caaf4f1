"""Families whose tokens attend to positions that an indexer chooses: a reader and a record each.

DeepSeek-V3.2, GLM-5 and Hunyuan 4: DeepSeek-V3's latents and experts. Knows their keys, defaults
and parts (transformers, modeling_*.py). Must not know files, nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import (
    GgufFields,
    read_gguf_clamp,
    read_gguf_indexer,
    read_gguf_streams,
)
from shardnet.model.config.limits import NORM_EPS
from shardnet.model.config.model_config import Indexer, Latent, ModelConfig, StreamKind, Streams
from shardnet.model.families import deepseek_v2
from shardnet.model.families.expert_parts import DEEPSEEK_EXPERTS, RENAMED_BIAS, STACKED
from shardnet.model.families.family import GgufFormat, MtpNames
from shardnet.model.families.latent_table import LAYOUT, read_experts
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import GATED_LATENTS
from shardnet.model.families.tensor_shapes import STREAM_NAMES

_GLM: Final = Latent(
    rank=512, rope_size=64, nope_size=192, value_size=256, query_rank=2048, interleaved=True
)
_HUNYUAN: Final = replace(_GLM, query_rank=1536, interleaved=False)


def _read_v32(fields: Fields) -> ModelConfig:
    """Read a DeepseekV32Config."""
    config = deepseek_v2.read_latent_attention(fields, interleaved=True, max_positions=163840)
    fields.ignore("indexer_types", "layer_types")  # all are alike
    fields.require("rope_interleave", True)
    indexer = read_indexer(fields, range(config.n_layers + 1), 64)
    return replace(read_experts(fields, config, n_groups=8, top_groups=4), indexer=indexer)


def _read_glm(fields: Fields) -> ModelConfig:
    """Read a GlmMoeDsaConfig (GLM-5)."""
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=True, max_positions=202752, norm_eps=1e-5, defaults=_GLM
    )
    fields.ignore("layer_types")
    for key in ("rope_interleave", "indexer_rope_interleave"):
        fields.require(key, True)
    indexer = read_indexer(fields, _choosing_layers(fields, config.n_layers, (1, 2)), 32)
    config = read_experts(fields, config)
    return replace(config, indexer=replace(indexer, interleaved=True))


def _read_hunyuan(fields: Fields) -> ModelConfig:
    """Read a HYV4Config (Hunyuan 4), or what its makers publish.

    Rotated pairs stand side by side in their weights, as llama.cpp and vLLM take them;
    transformers' modules, and what they save, have halves.
    """
    interleaved = fields.take("rope_interleave", bool, fields.given("use_mla"))
    for key in ("enable_ihc", "gated_mla", "learnable_sink", "use_dsa", "use_mla"):
        fields.require(key, only=True)
    fields.require("gating_type", "elementwise")
    fields.ignore("enable_lm_head_fp32", "mtp_loss_factor", "bitwise_backward_align")
    config = deepseek_v2.read_latent_attention(
        fields,
        interleaved=interleaved,
        max_positions=262144,
        norm_eps=1e-5,
        defaults=_HUNYUAN,
        has_kv_heads=False,
    )
    fields.ignore("layer_types", "learnable_sink_init", "num_nextn_predict_layers")
    config = read_experts(fields, config, (256, 8), 768, 1, output_scale=2.827)
    limit = fields.number("swiglu_limit", 10.0)
    if config.experts is not None and limit > 0:
        config = replace(config, experts=replace(config.experts, swiglu_limit=limit))
    indexer = read_indexer(fields, _choosing_layers(fields, config.n_layers, (4, 2)), 16)
    return replace(
        config,
        has_sinks=True,
        indexer=replace(
            indexer, interleaved=interleaved, rotates_last=True, norm_eps=config.norm_eps
        ),
        streams=Streams(
            count=fields.positive("hc_mult", 4),
            kind=StreamKind.APART,
            eps=fields.number("hc_eps", 1e-6, within=NORM_EPS),
            magnitude=fields.number("hc_magnitude", 2.0),
        ),
    )


def _choosing_layers(fields: Fields, n_layers: int, regular: tuple[int, int]) -> list[int]:
    """Read which layers choose, and that for MTP; the others take the choice of one before."""
    chooses = read_choosing(fields, n_layers, regular)
    if not chooses[0]:
        raise fields.damaged("indexer_types: the first layer has no choice to take")
    return [n for n, own in enumerate([*chooses, True]) if own]


def read_choosing(fields: Fields, n_layers: int, regular: tuple[int, int]) -> list[bool]:
    """Read of each layer whether it chooses.

    By default it is every so many-th, from another on, and those before.
    """
    step = fields.positive("index_topk_freq", regular[0])
    offset = fields.take("index_skip_topk_offset", int, regular[1])
    found: Any = ["FS"[max(n - offset + 1, 0) % step != 0] for n in range(n_layers)]
    for key in ("index_topk_pattern", "indexer_types"):
        found = fields.take(key, (list, str), None) or found
    kinds = [str(each)[:1].upper() for each in found]
    if len(kinds) != n_layers or not set(kinds) <= {"F", "S"}:
        raise fields.damaged(f"indexer_types {found} are not full or shared for each layer")
    return [kind == "F" for kind in kinds]


def read_indexer(fields: Fields, layers: Iterable[int], n_heads: int) -> Indexer:
    """Read what chooses positions in `layers`; with `n_heads` by default."""
    if fields.given("q_lora_rank") and fields.missing("q_lora_rank"):
        raise fields.unsupported("q_lora_rank", None, "a rank, which positions are chosen by")
    return Indexer(
        n_heads=fields.positive("index_n_heads", n_heads),
        head_size=fields.positive("index_head_dim", 128),
        n_chosen=fields.positive("index_topk", 2048),
        interleaved=False,
        layers=tuple(layers),
    )


def _read_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of GLM-5, and what Hunyuan 4 says alike."""
    fields.require("expert_gating_func", 2)  # sigmoid
    config = deepseek_v2.read_gguf(fields)
    fields.ignore("attention.indexer.types")  # the tensors say so
    layers = range(config["num_hidden_layers"])
    kinds = ["F" if f"blk.{n}.indexer.proj.weight" in fields.tensors else "S" for n in layers]
    return config | read_gguf_indexer(fields) | {"indexer_types": kinds}


def _read_hunyuan_gguf(fields: GgufFields) -> dict[str, Any]:
    """Read the metadata of Hunyuan 4, whose rotated pairs stand side by side in the weights.

    They do so in the makers' checkpoint, which llama.cpp's converter leaves as it is.
    """
    config = _read_gguf(fields)
    limit = read_gguf_clamp(fields, config["num_hidden_layers"], "swiglu_clamp_exp")
    return (
        config
        | read_gguf_streams(fields)
        | {
            "hc_magnitude": fields.number("hyper_connection.magnitude"),
            "swiglu_limit": limit,
            "rope_interleave": True,
        }
    )


FAMILIES: Final = (
    record(
        "deepseek_v32", "DeepseekV32ForCausalLM", _read_v32, LAYOUT, mtp=MtpNames.LAYER, **STACKED
    ),
    record(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        _read_glm,
        LAYOUT,
        mtp=MtpNames.LAYER,
        **STACKED,
        gguf=GgufFormat(architecture="glm-dsa", read=_read_gguf, renamed=RENAMED_BIAS),
    ),
    record(
        "hy_v4",
        "HYV4ForCausalLM",
        _read_hunyuan,
        Layout(attention=GATED_LATENTS, mlp=DEEPSEEK_EXPERTS),
        renamed_tensors=(
            (".hc_pre.hc_", ".hc_"),
            (".hc_attn_layer.hc_", ".attn_hc."),
            (".hc_mlp_layer.hc_", ".ffn_hc."),
            (".hc_head.hc_head_", ".hc_head.hc_"),
            (".learnable_sink_param", ".sinks"),
            (".linear_gate.", ".gate_proj."),
        ),
        mtp=MtpNames.PREFIX,
        **STACKED,
        gguf=GgufFormat(
            architecture="hy_v4",
            named_as="glm-dsa",
            read=_read_hunyuan_gguf,
            renamed=RENAMED_BIAS,
            block_names=(
                *STREAM_NAMES,
                ("self_attn.sinks", "attn_sinks.weight"),
                ("self_attn.gate_proj.weight", "attn_gate.weight"),
            ),
        ),
    ),
)
