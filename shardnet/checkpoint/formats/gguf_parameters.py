"""Which stored tensor of a GGUF is which parameter, and what its values mean.

Knows how llama.cpp's converter has changed values (convert_hf_to_gguf.py in
github.com/ggml-org/llama.cpp): rotary order, norms, transposed matrices, all experts of a layer in
one tensor. Which of these apply, the family says. Names come from the `gguf` package. Must not know
files or kernels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardnet.checkpoint.formats.gguf_types import PACKED, PLAIN, packing_of, unpack
from shardnet.checkpoint.tensors.model_tensor import (
    Make,
    ModelTensor,
    as_stored,
    cut_tensor,
    divide,
    rotary_halves,
    unchanged,
)
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families.family import Family
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.types import LayerRange

if TYPE_CHECKING:
    import torch
    from gguf.tensor_mapping import TensorNameMap
    from torch import Tensor

_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_GROUP = re.compile(r"(model\.layers\.(\d+)\.self_attn\.o_a_proj)\.\d+\.weight")
_GROUPS = "attn_output_a.weight"
_MTP = {
    **{name: name for name in ("eh_proj", "e_proj", "h_proj", "enorm", "hnorm")},
    "shared_head.norm": "shared_head_norm",
}
_JOINS = ("e_proj", "h_proj")
"""Whose columns follow each other in eh_proj, where that is one for all streams."""
_LOOKED_UP = "per_layer_token_embd"
"""The one table of which rows are looked up."""
BLOCK = re.compile(r"blk\.(\d+)\.")
_NORM = re.compile(r"norm(_(key|query|conv))?\.weight$")


def arrange(
    config: ModelConfig, arch: str, stored: Mapping[str, StoredTensor], n_blocks: int
) -> dict[str, ModelTensor]:
    """Map every stored tensor to its parameter; an unknown one has its own name.

    Of the `n_blocks` layers in the file those beyond the config's are left out, unless it counts
    the first of them to the model (MTP).
    """
    names, family = _tensor_names(config, arch), family_of(config)
    left = dict(stored)
    made: dict[str, ModelTensor] = {}
    tensors = stage_tensors(config, LayerRange(0, config.n_layers))
    for name, shape in tensors.all.items():
        expert = _find_expert(family, name)
        if expert is not None:
            found_expert = _expert_tensor(config, name, expert, stored)
            if found_expert is not None:
                made[name] = found_expert
                for stack in (*expert.stacks, *expert.own, expert.fused):
                    left.pop(stack, None)
            continue
        if (group := _GROUP.fullmatch(name)) is not None and config.compressed is not None:
            whole, info = f"{group[1]}.weight", left.pop(f"blk.{group[2]}.{_GROUPS}", None)
            if info is not None:  # once for all groups
                of_all = _parameter(whole, info, _changes(config, whole, info))
                made |= divide(of_all, config.compressed.n_groups)
            continue
        if name.endswith(".kv_b_proj.weight") and (halves := _latent_halves(config, name, stored)):
            made[name] = halves
            for source in halves.sources:
                left.pop(source.name)
            continue
        parts = [stored.get(part) for part in _joined_names(family, name)]
        if parts and (sources := [part for part in parts if part is not None]):
            made[name] = _joined(name, sources)
            for source in sources:
                left.pop(source.name, None)
            continue
        if (half := _half_join(config, name, stored)) is not None:
            made[name] = half
            continue
        found = _mtp_name(config, name) or _block_name(family, name)
        found = _LOOKED_UP if name in tensors.looked_up else found
        known = _renamed(family, name)
        for spelled in (family.name_prefix + known, known):
            found = found or names.get_name(spelled, try_suffixes=(".weight", ".bias"))
        info = stored.get(found) or stored.get(f"{found}.weight") if found is not None else None
        if info is not None:
            left.pop(info.name, None)
            if name in tensors.looked_up and info.shape[0] > shape[0]:
                info = info.rows(0, shape[0])  # those behind are padding
            is_vector = len(shape) == 1 and math.prod(info.shape) == shape[0]
            if is_vector or [n for n in info.shape if n > 1] == [n for n in shape if n > 1]:
                info = replace(info, shape=shape)  # axes of one are left out, vectors grouped
            made[name] = _parameter(name, info, _changes(config, name, info))
    return made | {
        name: unchanged(name, info)
        for name, info in left.items()
        if not _is_ahead(name, config.n_layers, n_blocks)
    }


def _is_ahead(name: str, n_layers: int, n_blocks: int) -> bool:
    """Whether a tensor is of a layer that predicts tokens further ahead: behind the `n_layers`."""
    block = BLOCK.match(name)
    return block is not None and n_layers <= int(block[1]) < n_blocks


def _mtp_name(config: ModelConfig, name: str) -> str | None:
    """Return what is stored as a parameter that no other layer than that behind the last has."""
    part = name.removeprefix(f"model.layers.{config.n_layers}.").removesuffix(".weight")
    return f"blk.{config.n_layers}.nextn.{_MTP[part]}.weight" if part in _MTP else None


def _half_join(
    config: ModelConfig, name: str, stored: Mapping[str, StoredTensor]
) -> ModelTensor | None:
    """Cut e_proj or h_proj out of one matrix for both, None where the file has them apart."""
    prefix, _, part = name.removesuffix(".weight").rpartition(".")
    whole = stored.get(f"blk.{config.n_layers}.nextn.eh_proj.weight")
    n = config.hidden_size
    if prefix != f"model.layers.{config.n_layers}" or part not in _JOINS or whole is None:
        return None
    if whole.shape != (n, 2 * n):
        return None
    begin = n * _JOINS.index(part)
    of_both = replace(_parameter(name, whole, _Changes()), packed=None)  # by rows alone
    return cut_tensor(of_both, [(begin, begin + n)], axis=1)


def _block_name(family: Family, name: str) -> str | None:
    """Return what is stored as a parameter, where the family says it."""
    layer, part = _of_layer(name)
    for own, stored in family.gguf.block_names if family.gguf is not None else ():
        if own in (part, name):
            return f"blk.{layer}.{stored}" if layer else stored
    return None


def _of_layer(name: str) -> tuple[str, str]:
    """Return a layer's number and what its parameter is called in it, "" for no layer's."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return (layer, part) if layer.isdigit() else ("", "")


def _joined_names(family: Family, name: str) -> list[str]:
    """Return what is stored as the rows of one parameter of a layer, where the family says it."""
    layer, part = _of_layer(name)
    joined = dict(family.gguf.joined_names) if family.gguf is not None else {}
    return [f"blk.{layer}.{stored}" for stored in joined.get(part, ())]


def _latent_halves(
    config: ModelConfig, name: str, stored: Mapping[str, StoredTensor]
) -> ModelTensor | None:
    """Make kv_b_proj of its keys [H, L, N] and values [H, V, L], as newer files have it.

    H heads, L rank of the latents, N and V columns of a head's keys and values. None where the file
    has it whole.
    """
    layer, latent = name.split(".")[2], config.latent
    halves = [stored.get(f"blk.{layer}.attn_{part}_b.weight") for part in "kv"]
    keys, values = halves
    if keys is None or values is None or latent is None:
        return None
    n_heads, rank = config.n_heads, latent.rank
    if keys.shape != (n_heads, rank, latent.nope_size) or values.shape != (
        n_heads,
        latent.value_size,
        rank,
    ):
        return None

    def make(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        made = [
            part.to(dtype) if info.dtype in PLAIN else unpack(part, info.dtype, info.shape, dtype)
            for part, info in zip(parts, (keys, values), strict=True)
        ]
        return torch.cat((made[0].transpose(1, 2), made[1]), 1).view(-1, rank)

    n_rows = n_heads * (latent.nope_size + latent.value_size)
    return ModelTensor(
        name=name, shape=(n_rows, rank), dtype=None, sources=(keys, values), make=make
    )


def _renamed(family: Family, name: str) -> str:
    """Return the name that the converter looks up for a parameter."""
    for ending, other in family.gguf.renamed if family.gguf is not None else ():
        if name.endswith(ending):
            return name.removesuffix(ending) + other
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expert:
    """An expert's parameter: its number, and the stacked tensors with its rows.

    `own` are the tensors of this expert alone that files of 2023 have in the place of each stack;
    `fused` is the stack of gate and up together, of which some files have the rows of one.
    """

    number: int
    stacks: tuple[str, ...]
    own: tuple[str, ...]
    fused: str
    is_up: bool


def _find_expert(family: Family, name: str) -> _Expert | None:
    """Return which rows of which tensors make an expert's parameter, None for other parameters."""
    match, names = _EXPERT.fullmatch(name), family.experts
    if match is None or names is None:
        return None
    layer, number, linear, kind = match.groups()
    parts = {"gate": names.gate, "up": names.up, "down": names.down}
    found = [part for part in parts if parts[part] == linear]
    if not found:
        return None
    return _Expert(
        number=int(number),
        stacks=tuple(f"blk.{layer}.ffn_{part}_exps.{kind}" for part in found),
        own=tuple(f"blk.{layer}.ffn_{part}.{number}.{kind}" for part in found),
        fused=f"blk.{layer}.ffn_gate_up_exps.{kind}" if found in (["gate"], ["up"]) else "",
        is_up=found == ["up"],
    )


def _expert_tensor(
    config: ModelConfig, name: str, expert: _Expert, stored: Mapping[str, StoredTensor]
) -> ModelTensor | None:
    """Make an expert's parameter from its rows of the stacks; None if one does not fit."""
    assert config.experts is not None
    sources = []
    fused = stored.get(expert.fused)
    for stack, own in zip(expert.stacks, expert.own, strict=True):
        info = stored.get(stack)
        if info is None and fused is not None and _is_stack(fused, config.experts):
            half = fused.shape[1] // 2
            one = fused.rows(expert.number, expert.number + 1)
            both = replace(one, shape=fused.shape[1:])
            sources.append(both.rows(half, 2 * half) if expert.is_up else both.rows(0, half))
            continue
        if own in stored:
            sources.append(stored[own])
        elif info is None or not _is_stack(info, config.experts):
            return None
        else:
            one = info.rows(expert.number, expert.number + 1)
            sources.append(replace(one, shape=info.shape[1:]))
    return _joined(name, sources)


def _joined(name: str, sources: Sequence[StoredTensor]) -> ModelTensor:
    """Make a parameter of the rows of one or more tensors."""
    n_rows = sum(source.shape[0] for source in sources)
    kinds = {source.dtype for source in sources}
    return ModelTensor(
        name=name,
        shape=(n_rows, *sources[0].shape[1:]),
        dtype=kinds.pop() if len(kinds) == 1 and kinds <= {*PLAIN} else None,
        sources=tuple(sources),
        make=_joiner(sources),
        packed=packing_of(sources),
    )


def _is_stack(info: StoredTensor, experts: Experts) -> bool:
    return len(info.shape) > 1 and info.shape[0] == experts.n_experts


def _joiner(sources: Sequence[StoredTensor]) -> Make:
    """Concatenate the rows of one or two tensors."""
    if len(sources) == 1 and sources[0].dtype in PLAIN:
        return as_stored

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        made = [
            values if source.dtype in PLAIN else unpack(values, source.dtype, source.shape, dtype)
            for source, values in zip(sources, stored, strict=True)
        ]
        if len(made) == 1:
            return made[0]
        if len({values.dtype for values in made}) > 1:
            made = [values.to(dtype) for values in made]
        return torch.cat(made)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """Changes of the converter to a parameter. `n_heads`: rows are in interleaved rotary order.

    `is_decay`: minus the exponential is stored.
    """

    n_heads: int | None = None
    added: float = 0.0
    transposed: bool = False
    is_decay: bool = False


def _changes(config: ModelConfig, name: str, info: StoredTensor) -> _Changes:
    gguf = family_of(config).gguf
    assert gguf is not None
    n_heads = interleaved_heads(config, name)
    if n_heads is not None:
        return _Changes(n_heads=n_heads)
    if gguf.decay is not None and name.endswith(gguf.decay):
        return _Changes(is_decay=True)
    if gguf.plain_norm is not None and name.endswith(gguf.plain_norm):
        return _Changes()
    if config.norm_offset and _NORM.search(name):
        return _Changes(added=config.norm_offset)
    is_transposed = bool(gguf.transposed) and name.startswith(gguf.transposed)
    return _Changes(transposed=is_transposed and len(info.shape) == 2)


def interleaved_heads(config: ModelConfig, name: str) -> int | None:
    """Return the heads of a parameter whose rows the converter puts in interleaved rotary order."""
    gguf = family_of(config).gguf
    if gguf is None or not gguf.interleaved_rotary:
        return None
    if ".q_proj." in name:
        return config.n_heads
    return config.n_kv_heads if ".k_proj." in name else None


def stored_names(config: ModelConfig, arch: str, linears: Iterable[str]) -> dict[str, str]:
    """Return linears, given by transformers' names, by what a GGUF of `arch` calls them."""
    names, family = _tensor_names(config, arch), family_of(config)
    found = {}
    for linear in linears:
        known = _renamed(family, linear)
        for spelled in (family.name_prefix + known, known):
            if stored := names.get_name(spelled):
                found[stored] = linear
                break
    return found


def _tensor_names(config: ModelConfig, arch: str) -> TensorNameMap:
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    gguf = family_of(config).gguf
    known = gguf.named_as if gguf is not None and gguf.named_as else arch
    number = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == known)
    return get_tensor_name_map(number, config.n_layers + config.has_mtp)


def _parameter(name: str, info: StoredTensor, changes: _Changes) -> ModelTensor:
    is_plain = info.dtype not in PACKED and not changes.added and not changes.is_decay
    return ModelTensor(
        name=name,
        shape=info.shape[::-1] if changes.transposed else info.shape,
        dtype=info.dtype if is_plain else None,
        sources=(info,),
        make=_maker(info, changes),
        packed=None if changes.transposed else packing_of([info], changes.n_heads),
    )


def _maker(info: StoredTensor, changes: _Changes) -> Make:
    if info.dtype not in PACKED and changes == _Changes():
        return as_stored

    def make(stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        (rows,) = stored
        if changes.n_heads is not None:
            rows = rotary_halves(rows, changes.n_heads)  # rows are packed each for itself
        values = rows if info.dtype in PLAIN else unpack(rows, info.dtype, info.shape, dtype)
        if changes.added:
            values = values.float() - changes.added
        if changes.is_decay:
            values = values.float().neg().log()
        return values.T if changes.transposed else values

    return make
