"""Experts that are stored as one tensor for all of a layer, taken apart into one for each.

Knows how transformers stacks them, always with the experts first: gpt-oss's with the inputs before
the outputs and the outputs of gate and up in turn; others, where it saves them as it computes them,
with the outputs first, those of up behind those of gate. Must not know files or kernels. What is
made of one expert reads the bytes of that expert alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardnet.checkpoint.tensors.model_tensor import Make, ModelTensor, unchanged
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.config.model_config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STACKED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)(_bias)?")
_MIXTRAL_GATE = re.compile(r"(model\.layers\.\d+\.)mlp(\.gate\.weight)")
_OWN_NAMES: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""Where each family has its experts, and its names of gate, up and down."""
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
        router = _MIXTRAL_GATE.fullmatch(name) if config.family == "mixtral" else None
        if router is not None:
            name = f"{router[1]}block_sparse_moe{router[2]}"
            made[name] = replace(tensor, name=name)
        elif match is None or not _fits(config, match, tensor):
            made[name] = tensor
        elif config.family == "gpt_oss":
            made |= {one.name: one for one in _in_turn(match, tensor)}
        else:
            made |= {one.name: one for one in _behind_each_other(config, match, tensor)}
    return made


def _fits(config: ModelConfig, match: re.Match[str], tensor: ModelTensor) -> bool:
    """Whether a tensor has the axes that its family's stacks have, and all experts."""
    n_axes = 2 if match[3] else 3
    if config.experts is None or len(tensor.shape) != n_axes or 0 in tensor.shape:
        return False
    if tensor.shape[0] != config.experts.n_experts:
        return False
    if config.family == "gpt_oss":
        return True
    is_plain = tensor.dtype is not None and tensor.sources[0].strides is None
    return config.family in _OWN_NAMES and not match[3] and is_plain


def _behind_each_other(
    config: ModelConfig, match: re.Match[str], tensor: ModelTensor
) -> Iterator[ModelTensor]:
    """Take [X, N, K] apart, whose rows are those of gate, then those of up, or those of down."""
    place, gate, up, down = _OWN_NAMES[config.family]
    names = (gate, up) if match[2] == "gate_up_proj" else (down,)
    n_experts, n_both, n_inputs = tensor.shape
    n_rows = n_both // len(names)
    all_rows = replace(tensor.sources[0], shape=(n_experts * n_both, n_inputs))
    for number in range(n_experts):
        for at, name in enumerate(names):
            begin = number * n_both + at * n_rows
            rows = all_rows.rows(begin, begin + n_rows)
            yield unchanged(f"{match[1]}{place}.experts.{number}.{name}.weight", rows)


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
    """Name the bytes of one expert; of a tensor that is not stored row by row all bytes."""
    return source if source.strides is not None else source.rows(number, number + 1)


def _maker(make_stack: Make, number: int, take_out: _TakeOut) -> Make:
    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        ones = [values[number : number + 1] if len(values) > 1 else values for values in stored]
        return take_out(make_stack(ones, dtype)[0])

    return make
