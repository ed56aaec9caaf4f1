"""Parameters of models that transformers' own modules compute, of what their checkpoints store.

Knows how its rules become model tensors. Must not know files. Quantised weights are unpacked when
they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.model.config.module_outline import ModuleOutline

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.modules.conversions import ConvertedTensor


def converted_tensors(
    outline: ModuleOutline, tensors: Mapping[str, ModelTensor]
) -> dict[str, ModelTensor]:
    """Convert `tensors`, which have the names that are stored, to those of the model.

    What the model has no place for keeps its name: the loader refuses it. Raises CheckpointError
    for tensors that do not make the parameter that their names say.
    """
    from shardnet.model.modules.conversions import conversions_of

    rules = conversions_of(outline.config_text)
    made = rules.convert({name: tensor.shape for name, tensor in tensors.items()})
    return {one.name: _model_tensor(one, tensors) for one in made}


def _model_tensor(one: ConvertedTensor, tensors: Mapping[str, ModelTensor]) -> ModelTensor:
    parts, make_one = [tensors[name] for name in one.sources], one.make
    if make_one is None:
        return replace(parts[0], name=one.name, packed=None)

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        left, values = iter(stored), []
        for part in parts:
            values.append(part.make([next(left) for _ in part.sources], dtype))
        return make_one(values)

    return ModelTensor(
        name=one.name,
        shape=one.shape,
        dtype=None,
        sources=tuple(source for part in parts for source in part.sources),
        make=make,
    )
