"""Experts that are stored as one tensor per layer, split into one tensor per expert.

Knows the ways in which transformers stacks them (families/family.py, `Stacking`), always with the
experts first. Must not know files, kernels or which family does what. An expert's parameter reads
the bytes of that expert alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardnet.checkpoint.tensors.model_tensor import Make, ModelTensor, unchanged
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import Stacking
from shardnet.model.families.registry import family_of
from shardnet.model.families.tensor_shapes import ExpertNames

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STACKED = re.compile(
    r"(model\.layers\.\d+\.)(?:(?:mlp|feed_forward)\.)?experts\.(gate_up_proj|down_proj)(_bias)?"
)
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp(\.gate\.weight)")
_TakeOut = Callable[["Tensor"], "Tensor"]
"""Maps the stored slice of one expert to its parameter."""


def split_experts(
    config: ModelConfig, tensors: Mapping[str, ModelTensor]
) -> dict[str, ModelTensor]:
    """Replace each stacked tensor by one per expert; leave the others unchanged.

    A tensor of another number of experts or axes than the config asks for stays too: its name then
    has no place in the model, which the loader refuses.
    """
    family = family_of(config)
    names = family.experts
    if names is None:
        return dict(tensors)
    made: dict[str, ModelTensor] = {}
    for name, tensor in tensors.items():
        match, router = _STACKED.fullmatch(name), _ROUTER.fullmatch(name)
        if router is not None:
            name = f"{router[1]}{names.block}{router[2]}"
            made[name] = replace(tensor, name=name)
        elif match is None or not _fits(config, family.stacking, match, tensor):
            made[name] = tensor
        else:
            made |= {one.name: one for one in _unstack(config, names, match, tensor)}
    return made


def _unstack(
    config: ModelConfig, names: ExpertNames, match: re.Match[str], tensor: ModelTensor
) -> Iterator[ModelTensor]:
    """Split a stack in the way that its family has, or in the one that its shape says."""
    stacking = family_of(config).stacking
    if stacking is Stacking.ALTERNATING:
        return _unstack_alternating(match, tensor)
    assert config.experts is not None
    sizes = (config.hidden_size, config.experts.intermediate_size)
    inputs, outputs = (sizes[0], 2 * sizes[1]) if match[2] == "gate_up_proj" else sizes[::-1]
    is_turned = tensor.shape[1:] == (inputs, outputs) and inputs != outputs
    if stacking is Stacking.TRANSPOSED or is_turned:
        return _unstack_transposed(names, match, tensor)
    return _unstack_concatenated(names, match, tensor)


def _fits(
    config: ModelConfig, stacking: Stacking | None, match: re.Match[str], tensor: ModelTensor
) -> bool:
    """Return whether a tensor has the axes of its family's stacks, and all experts."""
    n_axes = 2 if match[3] else 3
    if config.experts is None or len(tensor.shape) != n_axes or 0 in tensor.shape:
        return False
    if tensor.shape[0] != config.experts.n_experts or stacking is None:
        return False
    if stacking is not Stacking.CONCATENATED:
        return stacking is Stacking.ALTERNATING or not match[3]
    is_plain = tensor.dtype is not None and tensor.sources[0].strides is None
    return not match[3] and is_plain


def _unstack_concatenated(
    names: ExpertNames, match: re.Match[str], tensor: ModelTensor
) -> Iterator[ModelTensor]:
    """Split [X, N, K] into experts; its N rows are gate's, then up's, or they are down's."""
    linears = (names.gate, names.up) if match[2] == "gate_up_proj" else (names.down,)
    n_experts, n_both, n_inputs = tensor.shape
    n_rows = n_both // len(linears)
    all_rows = replace(tensor.sources[0], shape=(n_experts * n_both, n_inputs))
    for number in range(n_experts):
        for at, name in enumerate(linears):
            begin = number * n_both + at * n_rows
            rows = all_rows.rows(begin, begin + n_rows)
            yield unchanged(f"{match[1]}{names.block}.experts.{number}.{name}.weight", rows)


def _unstack_transposed(
    names: ExpertNames, match: re.Match[str], tensor: ModelTensor
) -> Iterator[ModelTensor]:
    """Split [X, K, N] into experts; its N columns are gate's, then up's, or they are down's.

    Where gate and up are two linears, each reads the bytes of both.
    """
    linears = tuple(dict.fromkeys((names.gate, names.up)))  # one where both are one linear
    linears = linears if match[2] == "gate_up_proj" else (names.down,)
    n_experts, n_inputs, n_both = tensor.shape
    n_rows = n_both // len(linears)

    def rows_from(begin: int) -> _TakeOut:
        return lambda values: values.T[begin : begin + n_rows]

    for number in range(n_experts):
        for at, name in enumerate(linears):
            yield _one_expert(
                f"{match[1]}{names.block}.experts.{number}.{name}.weight",
                tensor,
                number,
                shape=(n_rows, n_inputs),
                take_out=rows_from(at * n_rows),
            )


def _unstack_alternating(match: re.Match[str], tensor: ModelTensor) -> Iterator[ModelTensor]:
    """Split [X, K, N] or, biases, [X, N] into experts; outputs of gate and up alternate."""
    is_both = match[2] == "gate_up_proj"
    kind = "bias" if match[3] else "weight"

    def take_out(values: Tensor) -> Tensor:
        import torch

        outputs = values.T if values.ndim == 2 else values  # [N, K] or [N]
        return torch.cat((outputs[::2], outputs[1::2])) if is_both else outputs

    for number in range(tensor.shape[0]):
        yield _one_expert(
            f"{match[1]}mlp.experts.{number}.{match[2]}.{kind}",
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
    """Return the bytes of one expert; of a tensor that is not contiguous all bytes."""
    return source if source.strides is not None else source.rows(number, number + 1)


def _maker(make_stack: Make, number: int, take_out: _TakeOut) -> Make:
    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        ones = [values[number : number + 1] if len(values) > 1 else values for values in stored]
        return take_out(make_stack(ones, dtype)[0])

    return make
