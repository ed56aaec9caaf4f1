"""DeepSeek-V3.2 and GLM-5 (transformers, modeling_deepseek_v32.py, modeling_glm_moe_dsa.py).

DeepSeek-V3 whose tokens attend to the `index_topk` positions that an indexer chooses.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.config.model_config import Experts, Indexer, Latent, ModelConfig
from shardnet.model.families import deepseek_v2, deepseek_v3
from shardnet.model.families.family import Family, GgufFormat, MtpNames, Stacking

_EXPERTS: Final = Experts(
    n_experts=256,
    top_k=8,
    intermediate_size=2048,
    normalize_top_k=True,
    shared_intermediate_size=1,
    n_groups=8,
    top_groups=4,
    output_scale=2.5,
    layers=(3,),
)
_GLM: Final = Latent(
    rank=512, rope_size=64, nope_size=192, value_size=256, query_rank=2048, interleaved=True
)


def _read_config(fields: Fields) -> ModelConfig:
    """Read a DeepseekV32Config."""
    config = deepseek_v2.read_latent_attention(fields, interleaved=True, max_positions=163840)
    fields.ignore("indexer_types")  # all are alike
    config = _read_rest(fields, config, _EXPERTS)
    return replace(config, indexer=read_indexer(fields, range(config.n_layers + 1), 64))


def _read_glm(fields: Fields) -> ModelConfig:
    """Read a GlmMoeDsaConfig."""
    config = deepseek_v2.read_latent_attention(
        fields, interleaved=True, max_positions=202752, norm_eps=1e-5, defaults=_GLM
    )
    config = _read_rest(fields, config, replace(_EXPERTS, n_groups=1, top_groups=1))
    indexer = read_indexer(fields, choosing_layers(fields, config.n_layers, (1, 2)), 32)
    fields.require("indexer_rope_interleave", True)
    return replace(config, indexer=replace(indexer, interleaved=True))


def choosing_layers(fields: Fields, n_layers: int, regular: tuple[int, int]) -> list[int]:
    """Read which layers choose, and that for MTP; the others take the choice of one before.

    By default it is every so many-th, from another on, and those before.
    """
    step = fields.positive("index_topk_freq", regular[0])
    offset = fields.take("index_skip_topk_offset", int, regular[1])
    found: Any = ["FS"[max(n - offset + 1, 0) % step != 0] for n in range(n_layers)]
    for key in ("index_topk_pattern", "indexer_types"):
        found = fields.take(key, object, None) or found
    kinds = [str(each)[:1].upper() for each in found]
    if len(kinds) != n_layers or not set(kinds) <= {"F", "S"} or kinds[0] != "F":
        raise fields.damaged(f"indexer_types {found} are not full or shared for each layer")
    return [n for n, kind in enumerate([*kinds, "F"]) if kind == "F"]


def read_indexer(fields: Fields, layers: Iterable[int], n_heads: int) -> Indexer:
    """Read what chooses positions in `layers`; with `n_heads` by default."""
    return Indexer(
        n_heads=fields.positive("index_n_heads", n_heads),
        head_size=fields.positive("index_head_dim", 128),
        n_chosen=fields.positive("index_topk", 2048),
        interleaved=False,
        layers=tuple(layers),
    )


def _read_rest(fields: Fields, config: ModelConfig, defaults: Experts) -> ModelConfig:
    """Read the experts."""
    fields.ignore("layer_types")
    fields.require("rope_interleave", True)
    deepseek_v2.require_text(fields, "scoring_func", "sigmoid")
    deepseek_v2.require_text(fields, "topk_method", "noaux_tc")
    normalizes = fields.take("norm_topk_prob", bool, True)
    defaults = replace(defaults, normalize_top_k=normalizes)
    return deepseek_v2.read_experts(fields, config, defaults, smallest_group=2)


def _read_gguf(fields: Fields, tensors: Container[str], factors: Factors) -> dict[str, Any]:
    """Read the metadata of GLM-5."""
    fields.require("expert_gating_func", 2)  # sigmoid
    config = deepseek_v2.read_gguf(fields, tensors, factors)
    fields.ignore("attention.indexer.types")  # the tensors say so
    names = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
    own = {key: fields.positive(f"attention.indexer.{name}") for key, name in names.items()}
    layers = range(config["num_hidden_layers"])
    kinds = ["F" if f"blk.{n}.indexer.proj.weight" in tensors else "S" for n in layers]
    return config | own | {"indexer_types": kinds}


def _family(model_type: str, architecture: str, **more: Any) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        layer_tensors=deepseek_v3.layer_tensors,
        load_stage=deepseek_v3.FAMILY.load_stage,
        mtp=MtpNames.LAYER,
        experts=deepseek_v2.EXPERTS,
        stacking=Stacking.CONCATENATED,
        **more,
    )


FAMILIES: Final = (
    _family("deepseek_v32", "DeepseekV32ForCausalLM", read_config=_read_config),
    _family(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        read_config=_read_glm,
        gguf=GgufFormat(
            architecture="glm-dsa",
            read=_read_gguf,
            renamed=(("correction_bias", "correction.bias"),),
        ),
    ),
)
