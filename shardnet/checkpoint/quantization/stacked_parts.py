"""Quantised experts that are stored as one tensor for all of a layer: the bytes of each.

Knows how gpt-oss and MLX name them. Must not know how weights are quantised. An expert's parts are
the bytes of that expert alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import family_of

_SWITCH = re.compile(r"(.+\.)switch_mlp\.(gate|up|down)_proj(\..+)")
_BLOCKS = re.compile(r"(.+\.experts\.)((?:gate_up|down)_proj)(_blocks|_scales)")


def split_parts(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace each stack by its slices, under the names that parts of one expert have.

    A slice keeps the stack's own `name`. A tensor of another number of experts stays: its name has
    no place in the model, which the loader refuses.
    """
    family = family_of(config)
    if config.experts is None or family.experts is None:
        return dict(stored)
    n_experts = config.experts.n_experts
    linears = {
        "gate": family.experts.gate,
        "up": family.experts.up,
        "down": family.experts.down,
    }
    made: dict[str, StoredTensor] = {}
    for name, info in stored.items():
        is_stack = len(info.shape) > 1 and info.shape[0] == n_experts and info.strides is None
        if is_stack and (match := _SWITCH.fullmatch(name)):
            ends = f"{linears[match[2]]}{match[3]}"
            made |= _slices(f"{match[1]}experts.", ends, info)
        elif is_stack and (match := _BLOCKS.fullmatch(name)):
            made |= _slices(match[1], f"{match[2]}{match[3]}", info)
        else:
            made[name] = info
    return made


def _slices(begins: str, ends: str, info: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    for number in range(info.shape[0]):
        one = info.rows(number, number + 1)
        yield f"{begins}{number}.{ends}", replace(one, shape=one.shape[1:])
