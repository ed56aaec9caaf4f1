"""Which tensors a stage needs, under which names and in which shapes.

Knows how stages are put together from the families' tables. Must not know files or torch: the
loader, the planner's memory prediction and weight sharing all read this one table.

Names here are those of the causal-LM class, GPT-2's without the `transformer.` prefix, which some
checkpoints have and some have not (`canonical_name`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import FAMILIES
from shardnet.model.families.tensor_shapes import Shape, Table
from shardnet.types import LayerRange

__all__ = [
    "Shape",
    "StageTensors",
    "Table",
    "canonical_name",
    "embedding_tensors",
    "head_tensors",
    "is_rounded",
    "layer_tensors",
    "left_over",
    "stage_tensors",
]


_KEPT = ("gate.weight", ".router.weight", ".kv_b_proj.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTensors:
    """Name to shape of what a stage reads, by part. `embedding` and `head` may be empty.

    A tied head's `head` names the embedding table, also where `embedding` already does.
    """

    embedding: Table
    layers: dict[int, Table]
    head: Table

    @property
    def all(self) -> Table:
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


def embedding_tensors(config: ModelConfig) -> Table:
    """The tables that turn token ids (and GPT-2 positions) into the first hidden states."""
    return FAMILIES[config.family].embedding(config)


def head_tensors(config: ModelConfig) -> Table:
    """The final norm and the LM head."""
    return FAMILIES[config.family].head(config)


def layer_tensors(config: ModelConfig, layer: int) -> Table:
    """The tensors of one layer."""
    return FAMILIES[config.family].layer(config, layer)


def is_rounded(name: str, shape: Shape) -> bool:
    """Whether a tensor of a layer or a head is rounded where weights are quantised.

    The weights of products are; norms, biases, the small tables of routers and what is no product
    of rows (DeepSeek's `kv_b_proj`) are not.
    """
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(_KEPT)


def canonical_name(config: ModelConfig, name: str) -> str:
    """The name as this module writes it: GPT-2's without the `transformer.` prefix."""
    return name.removeprefix(FAMILIES[config.family].prefix)


def left_over(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """Of a whole checkpoint's tensor names, those that the model has no place for, sorted.

    Buffers that transformers once stored (masks, rotary frequencies) and the head of a tied model
    are known and left out.
    """
    known = set(stage_tensors(config, LayerRange(0, config.n_layers)).all) | {"lm_head.weight"}
    skipped = re.compile(FAMILIES[config.family].skipped)
    return sorted(
        name
        for name in names
        if (canonical := canonical_name(config, name)) not in known
        and not skipped.fullmatch(canonical)
    )
