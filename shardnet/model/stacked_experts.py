"""Experts that are stored as one tensor for all of a layer, taken apart into one for each.

Knows how transformers stacks them: with the experts first, gpt-oss's with the inputs before the
outputs and the outputs of gate and up in turn. Must not know files or kernels. What is made of one
expert reads the bytes of that expert alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardnet.model.config import ModelConfig
from shardnet.model.making import Make, ModelTensor
from shardnet.model.stored import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")
_TakeOut = Callable[["Tensor"], "Tensor"]
"""From what is stored of one expert to its parameter."""


def experts_apart(
    config: ModelConfig, tensors: Mapping[str, ModelTensor]
) -> dict[str, ModelTensor]:
    """Replace each tensor of all experts by one for each of them; the others stay as they are.

    A tensor of another number of experts or axes than the config asks for stays too: its name then
    has no place in the model.
    """
    made: dict[str, ModelTensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        n_axes = 2 if match and match[3] else 3
        if (
            match is None
            or config.experts is None
            or config.family != "gpt_oss"
            or len(tensor.shape) != n_axes
            or tensor.shape[0] != config.experts.n_experts
        ):
            made[name] = tensor
        else:
            made |= {one.name: one for one in _in_turn(match, tensor)}
    return made


def _in_turn(match: re.Match[str], tensor: ModelTensor) -> Iterator[ModelTensor]:
    """Take gpt-oss's tensors apart: [X, K, N] or, biases, [X, N]."""
    is_both = match[2] == "gate_up_proj"
    kind = "bias" if match[3] else "weight"

    def take_out(values: Tensor) -> Tensor:
        import torch

        outputs = values.T if values.ndim == 2 else values  # [N, K] or [N]
        return torch.cat((outputs[::2], outputs[1::2])) if is_both else outputs

    for number in range(tensor.shape[0]):
        yield _one_expert(
            f"{match[1]}{number}.{match[2]}.{kind}",
            tensor,
            number,
            shape=tensor.shape[:0:-1],
            take_out=take_out,
        )


def _one_expert(
    name: str, tensor: ModelTensor, number: int, *, shape: tuple[int, ...], take_out: _TakeOut
) -> ModelTensor:
    return replace(
        tensor,
        name=name,
        shape=shape,
        sources=tuple(_of_expert(source, number) for source in tensor.sources),
        make=_maker(tensor.make, number, take_out),
    )


def _of_expert(source: StoredTensor, number: int) -> StoredTensor:
    """Name the bytes of one expert; of a tensor that is not stored row by row all bytes."""
    return source if source.strides is not None else source.rows(number, number + 1)


def _maker(make_stack: Make, number: int, take_out: _TakeOut) -> Make:
    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        ones = [values[number : number + 1] if len(values) > 1 else values for values in stored]
        return take_out(make_stack(ones, dtype)[0])

    return make
