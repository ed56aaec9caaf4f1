"""Which tensors a stage needs, under which names and in which shapes.

Knows how a stage is put together from the parts that its family names. Must not know files or
torch: the loader, the memory estimate and weight sharing all read this one table.

Names are those of transformers' causal-LM class without the family's `name_prefix`, which some
checkpoints have and some have not (`canonical_name`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

from shardnet.model.config.model_config import ModelConfig, StreamKind
from shardnet.model.families.family import MtpNames
from shardnet.model.families.registry import family_of
from shardnet.model.families.tensor_shapes import Shape as Shape
from shardnet.model.families.tensor_shapes import Table, linears, stream_mixer
from shardnet.model.families.wrappers import language_name
from shardnet.types import LayerRange

_KEPT = (
    *("gate.weight", ".router.weight", ".kv_b_proj.weight"),
    *(".in_proj_ba.weight", ".in_proj_b.weight", ".in_proj_a.weight"),
    *(".self_attn.b_proj.weight", ".self_attn.f_a_proj.weight", ".self_attn.f_b_proj.weight"),
    *(".self_attn.f_proj.weight", ".weights_proj.weight"),
    ".block_inject_weight.weight",
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_AHEAD = re.compile(r"(?:model\.)?mtp(?:_layers)?\.(?:(?:layers\.)?(\d{1,4})\.)?")
_MTP = {
    "fc": "eh_proj",
    "fc_embedding": "e_proj",
    "fc_hidden": "h_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
    "final_layernorm": "shared_head.norm",
}
"""What is called otherwise where MtpNames is PREFIX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensors:
    """The parameters of a stage, with their shapes. `embedding` and `head` may be empty.

    A tied head's `head` names the embedding table, also where `embedding` already does. Those that
    are `looked_up` stay in their files.
    """

    embedding: Table
    layers: dict[int, Table]
    head: Table
    looked_up: Table = field(default_factory=dict)

    @property
    def all(self) -> Table:
        """Every tensor of the stage, each once."""
        merged = dict(self.embedding)
        for tensors in self.layers.values():
            merged.update(tensors)
        return merged | self.head | self.looked_up


def stage_tensors(config: ModelConfig, layers: LayerRange) -> StageTensors:
    """Name the parameters of `layers`, with the embedding if first and the head if last.

    Where the model has one, the layer behind the last one is there too, and the embedding, which
    it needs.
    """
    is_last = layers.end == config.n_layers
    has_mtp = is_last and config.has_mtp
    tensors = {layer: layer_tensors(config, layer) for layer in layers}
    if has_mtp:
        tensors[config.n_layers] = mtp_tensors(config)
    embedding = embedding_tensors(config) if layers.start == 0 or has_mtp else {}
    return StageTensors(
        embedding=shared_tensors(config) | embedding,
        layers=tensors,
        head=head_tensors(config) if is_last else {},
        looked_up={
            name: shape
            for layer in layers
            for name, shape in family_of(config).looked_up_tensors(config, layer).items()
        },
    )


def count_parameters(config: ModelConfig) -> int:
    """Return how many weights the whole model has, tied ones once."""
    tensors = stage_tensors(config, LayerRange(0, config.n_layers)).all
    return sum(math.prod(shape) for shape in tensors.values())


def mtp_tensors(config: ModelConfig) -> Table:
    """Name the parameters of the layer that predicts a further token, by DeepSeek-V3's names.

    It has the embedding and the LM head of the model itself. Where it takes all residual streams,
    it joins them by a mixer of its own, and each with the embedding (DeepSeek-V4, Qwen 3.8).
    """
    prefix, width = f"model.layers.{config.n_layers}", config.hidden_size
    streams = config.layer_streams(config.n_layers)
    sizes = {"enorm": width, "hnorm": width, "shared_head.norm": width}
    joins = {"eh_proj": (width, 2 * width)}
    made = layer_tensors(config, config.n_layers)
    if streams is not None:
        joins = {"e_proj": (width, width), "h_proj": (width, width)}
        made |= stream_mixer(config, f"{prefix}.hc_head", "hc_")
        if streams.kind is StreamKind.GATED:  # the mixer norms what it joins
            sizes = {"enorm": width, "hnorm": config.row_width}
    norms: Table = {f"{prefix}.{name}.weight": (size,) for name, size in sizes.items()}
    return made | norms | linears(prefix, joins)


def embedding_tensors(config: ModelConfig) -> Table:
    """Name the tables that token ids (and learned positions) are looked up in."""
    return family_of(config).embedding_tensors(config)


def shared_tensors(config: ModelConfig) -> Table:
    """Name the parameters that every stage needs."""
    return family_of(config).shared_tensors(config)


def head_tensors(config: ModelConfig) -> Table:
    """Name the final norm and the LM head."""
    return family_of(config).head_tensors(config)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """Name the parameters of the absolute `layer`."""
    return family_of(config).layer_tensors(config, layer)


def is_quantizable(name: str, shape: Shape) -> bool:
    """Whether a parameter of a layer or a head is quantised where weights are.

    The weights of linears are; norms, biases, routers, matrices that are multiplied per head
    (DeepSeek's `kv_b_proj`) and what steers a recurrence (`in_proj_a`, `in_proj_b`) are not.
    """
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(_KEPT)


def canonical_name(config: ModelConfig, name: str) -> str | None:
    """Return a checkpoint's `name` for a parameter as this module writes it.

    None for a tensor of what is left out of a multimodal checkpoint.
    """
    inner = language_name(name, config.wrapper) if config.wrapper else name
    if inner is None:
        return None
    family = family_of(config)
    ahead = _AHEAD.match(inner) if family.mtp is MtpNames.PREFIX else None
    if ahead is not None:
        inner = _mtp_name(config.n_layers + int(ahead[1] or 0), inner[ahead.end() :])
    inner = inner.removeprefix(family.name_prefix)
    for stored, own in family.renamed_tensors:
        if stored.startswith("^"):
            inner = own + inner[len(stored) - 1 :] if inner.startswith(stored[1:]) else inner
        else:
            inner = inner.replace(stored, own)
    return inner


def _mtp_name(layer: int, name: str) -> str:
    """Return what DeepSeek-V3 calls a parameter of what predicts further tokens."""
    stem, dot, suffix = name.rpartition(".")
    return f"model.layers.{layer}.{_MTP.get(stem, stem)}{dot}{suffix}"


def lacking(config: ModelConfig, names: Container[str]) -> set[str]:
    """Return the parameters of the whole model that are not in `names`, those of MTP aside."""
    plain = replace(config, has_mtp=False)
    needed = stage_tensors(plain, LayerRange(0, config.n_layers)).all
    return {name for name in needed if name not in names}


def left_over(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """Return which of a whole checkpoint's tensor names the model has no place for, sorted.

    Without what the family ignores (masks, rotary frequencies), the LM head of a tied model, and
    what predicts tokens further ahead (MTP), which need not be used.
    """
    known = set(stage_tensors(config, LayerRange(0, config.n_layers)).all) | {"lm_head.weight"}
    ignored = re.compile(family_of(config).ignored_tensors)

    def predicts_ahead(name: str) -> bool:
        layer = _LAYER.match(name) if family_of(config).mtp is not None else None
        is_beyond = layer is not None and int(layer[1]) >= config.n_layers
        return is_beyond or name.startswith("mtp.")

    return sorted(
        name
        for name in names
        if (canonical := canonical_name(config, name)) is not None
        and canonical not in known
        and not ignored.fullmatch(canonical)
        and not predicts_ahead(canonical)
    )
