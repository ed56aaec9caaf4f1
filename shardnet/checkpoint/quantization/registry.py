"""All makers' formats of quantised weights, and how a checkpoint finds its own.

Knows the makers' modules by `quant_method`, and nothing of what stands in them; and how gpt-oss,
MLX, modelopt and transformers name experts that are stored as one tensor for all of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from shardnet.checkpoint.quantization.bitsandbytes import read_bitsandbytes
from shardnet.checkpoint.quantization.compressed_tensors import read_compressed_tensors
from shardnet.checkpoint.quantization.fp8 import read_fp8, read_modelopt
from shardnet.checkpoint.quantization.gptq import read_auto_round, read_awq, read_gptq
from shardnet.checkpoint.quantization.mlx import read_mlx
from shardnet.checkpoint.quantization.mxfp4 import read_mxfp4
from shardnet.checkpoint.quantization.weight_parts import WeightFormat, WeightParts
from shardnet.checkpoint.tensors.model_tensor import ModelTensor, unchanged
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor, damaged
from shardnet.errors import shown
from shardnet.model.config.fields import TEXT, Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import Shape, canonical_name, stage_tensors
from shardnet.types import LayerRange

METHODS: Final[Mapping[str, Callable[[Fields], WeightFormat]]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "mxfp8": read_fp8,
}
"""By `quant_method`: what reads the rest of `quantization_config`."""
_MLX: Final = "quantization"
"""MLX's key."""
_SWITCH = re.compile(r"(.+\.)(?:switch_mlp\.|(?<=\.moe\.))(gate|up|down)_proj(\..+)")
_BLOCKS = re.compile(r"(.+\.experts\.)((?:gate_up|down)_proj)(_blocks|_scales)")
_STACK = re.compile(r"(.+\.experts\.)(gate_up|down)_proj((?:[._][a-z0-9]+)*)")
_ONE_BYTE: Final = ("U8", "I8", "F8_E4M3", "F8_E5M2")
"""What the weights of a stack are stored in that has scales beside it."""
_OF_STACKS: Final = {
    "": ".weight",
    "_scale": ".weight_scale",
    "_scale_inv": ".weight_scale_inv",
    "_weight_scale": ".weight_scale",
    "_weight_scale_2": ".weight_scale_2",
    "_activation_scale": ".activation_scale",
    "_input_scale": ".input_scale",
    ".weight": ".weight",
    ".weight_scale": ".weight_scale",
    ".weight_scale_inv": ".weight_scale_inv",
}
"""What transformers and modelopt write behind a stack's name, and what a part is called."""


def take_format(
    config: dict[str, Any], where: str, unknown: list[str] | None = None
) -> WeightFormat | None:
    """Take from the keys of the config.json at `where` how weights are quantised, None if not.

    What MLX says goes first: its `quantization_config` is a copy, or of the model that it was made
    of. A multimodal checkpoint may say it in the config of its language model. Unknown keys are
    added to the list `unknown`; without it they are refused. Raises UnsupportedModelError for a
    method, or a variant of one, that is not implemented.
    """
    found = _take_said(config, where, "")
    text = config.get(TEXT)
    if isinstance(text, dict):
        inner = _take_said(text, where, f"{TEXT}.")
        if found is not None and inner is not None and found[1] != inner[1]:
            raise damaged(f"{where}: {found[0]} and {inner[0]} are not the same")
        found = found or inner
    if found is None:
        return None
    key, raw = found
    fields = Fields(raw, where, f"{key}.", unknown)
    if key.endswith(_MLX):
        method, made = "mlx", read_mlx(fields)
    else:
        method = fields.one_of("quant_method", METHODS)
        made = METHODS[method](fields)
        fields.note_the_rest()
    fields.refuse_unknown()
    return replace(made, title=_title(method, raw))


def _take_said(
    config: dict[str, Any], where: str, prefix: str
) -> tuple[str, dict[str, Any]] | None:
    """Take what a config says of quantisation, with its key behind `prefix`; None for nothing."""
    found = None
    for key in ("quantization_config", _MLX):
        raw = config.pop(key, None)
        if not isinstance(raw, dict | None):
            raise damaged(f"{where}: {prefix}{key} is {shown(raw)}, expected an object")
        found = (f"{prefix}{key}", raw) if raw else found
    return found


def _title(method: str, raw: Mapping[str, object]) -> str:
    """Name a format by its method and bits; its values were checked."""
    bits = raw.get("bits")
    return f"{method.upper()} {bits}-bit" if isinstance(bits, int) else method.upper()


def model_tensors(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    weight_format: WeightFormat | None,
    where: str,
) -> dict[str, ModelTensor]:
    """Combine the parts of quantised weights among the `stored` tensors of the folder `where`.

    Returns all parameters, by the model's names. Raises CheckpointError for parts that do not fit
    each other, or the model.
    """
    kept = {name: stored[name] for name in stored if canonical_name(config, name) is not None}
    stored = split_parts(config, kept)
    if weight_format is None:
        plain = ((_name(config, name), info) for name, info in stored.items())
        return {name: unchanged(name, info) for name, info in plain}
    shapes = stage_tensors(config, LayerRange(0, config.n_layers)).all
    made: dict[str, ModelTensor] = {}
    used: set[str] = set()
    tables = _tables_in_parts(stored)
    for stem, marker in _stems(stored, weight_format.markers):
        name = _name(config, f"{stem}.weight")
        parts = {
            suffix: stored[stem + suffix]
            for suffix in weight_format.suffixes
            if stem + suffix in stored
            and (suffix != ".bias" or canonical_name(config, stem + suffix) not in shapes)
        }
        used.update(stem + suffix for suffix in parts)
        for own in [stem] if name in shapes else tables.get(stem, [stem]):
            name, weight = _name(config, f"{own}.weight"), f"{own}.weight"
            shape = shapes.get(name) or _of_groups(config, shapes, name)
            if config.outline is not None and ".weight" in parts:  # names are the makers' still
                shape = _shape_of(parts[".weight"])
            if len(shape) != 2:  # what the model has no place for, the loader refuses by this name
                made[name] = unchanged(name, stored[stem + marker])
                continue
            if own != stem:  # a part of a table, all of which has the same scale
                parts[".weight"] = stored[weight]
                used.add(weight)
            made[name] = weight_format.combine(
                WeightParts(stem=own, name=name, shape=shape, parts={**parts}, where=where)
            )
    for name, info in stored.items():
        if name in used or name.endswith(weight_format.skipped):
            continue
        canonical = _name(config, name)
        if canonical in made:
            raise damaged(f"{where}/{info.file}: tensor {info.name} is there quantised too")
        made[canonical] = unchanged(canonical, info)
    return made


def _of_groups(config: ModelConfig, shapes: Mapping[str, Shape], name: str) -> Shape:
    """Return the shape of a weight that the model has as one for each group; () for another."""
    first = shapes.get(f"{name.removesuffix('.weight')}.0.weight")
    if first is None or config.compressed is None:
        return ()
    return config.compressed.n_groups * first[0], first[1]


def _shape_of(weight: StoredTensor) -> Shape:
    """Return the shape of a weight, whose bytes are numbers, or two 4-bit ones in U8."""
    *rows, last = weight.shape or (0,)
    return (*rows, 2 * last if weight.dtype == "U8" else last)


def _name(config: ModelConfig, name: str) -> str:
    """Return a parameter's name; those of what is left out of the model have none."""
    found = canonical_name(config, name)
    assert found is not None, "such tensors were dropped"
    return found


def _tables_in_parts(stored: Iterable[str]) -> dict[str, list[str]]:
    """List where the names of the parts of tables begin, by where those of the tables do."""
    made: dict[str, list[str]] = {}
    for name in stored:
        stem, found, _ = name.partition(".shard_")
        if found and name.endswith(".weight"):
            made.setdefault(stem, []).append(name.removesuffix(".weight"))
    return made


def _stems(stored: Iterable[str], markers: Iterable[str]) -> list[tuple[str, str]]:
    """List where the names of a quantised weight's parts begin, each with the marker it has."""
    return [
        (name.removesuffix(marker), marker)
        for name in stored
        for marker in markers
        if name.endswith(marker)
    ]


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
        is_stack = info.shape[:1] == (n_experts,) and info.strides is None
        if is_stack and (match := _SWITCH.fullmatch(name)):
            ends = f"{linears[match[2]]}{match[3]}"
            made |= _slices(f"{match[1]}experts.", ends, info)
        elif is_stack and (match := _BLOCKS.fullmatch(name)):
            made |= _slices(match[1], f"{match[2]}{match[3]}", info)
        elif (match := _STACK.fullmatch(name)) and _is_part(match, info, n_experts):
            own = (linears["gate"], linears["up"])
            made |= _parts(match, own if match[2] == "gate_up" else (linears["down"],), info)
        else:
            made[name] = info
    return made


def _is_part(match: re.Match[str], info: StoredTensor, n_experts: int) -> bool:
    is_whole = info.shape[:1] == (n_experts,) and info.strides is None
    suffix = _OF_STACKS.get(match[3], "")
    return is_whole and bool(suffix) and (suffix != ".weight" or info.dtype in _ONE_BYTE)


def _parts(
    match: re.Match[str], linears: tuple[str, ...], info: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Split a stack [X, N, ..] by expert and linear: gate's rows, then up's, or they are down's.

    What is one for all rows is the scale of both.
    """
    n = info.shape[1] // len(linears) if len(info.shape) > 1 and info.shape[1] > 1 else 0
    for number in range(info.shape[0]):
        one = info.rows(number, number + 1)
        one = replace(one, shape=one.shape[1:])
        for at, linear in enumerate(linears):
            rows = one.rows(at * n, at * n + n) if n else one
            yield f"{match[1]}{number}.{linear}{_OF_STACKS[match[3]]}", rows


def _slices(begins: str, ends: str, info: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    for number in range(info.shape[0]):
        one = info.rows(number, number + 1)
        yield f"{begins}{number}.{ends}", replace(one, shape=one.shape[1:])
