"""Checkpoints as transformers writes them: config.json beside tensors under the model's names.

An expert's parameter reads the bytes of that expert alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.formats.safetensors_files import (
    ReadFile,
    read_indexed_files,
    read_safetensors_file,
    refuse_absent,
)
from shardnet.checkpoint.formats.torch_files import read_torch_file
from shardnet.checkpoint.quantization.registry import model_tensors, take_format
from shardnet.checkpoint.quantization.weight_parts import WeightFormat
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.manifest import ID_FILES, INDEX_FILES, Contents, sample_range
from shardnet.checkpoint.tensors.model_tensor import Make, ModelTensor, divide, unchanged
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor, TensorFile, damaged, hash_ranges
from shardnet.model.config.fields import TEXT
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import Stacking
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import canonical_name, lacking
from shardnet.model.families.tensor_shapes import ExpertNames
from shardnet.model.families.wrappers import WRAPPERS, language_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.modules.conversions import Conversions, ConvertedTensor


_STACKED = re.compile(
    r"(model\.layers\.\d+\.)(?:(?:mlp|feed_forward)\.)?experts\.(gate_up_proj|down_proj)(_bias)?"
)
_ROUTER = re.compile(r"(model\.layers\.\d+\.)mlp(\.gate\.weight)")
_TakeOut = Callable[["Tensor"], "Tensor"]
"""Maps the stored slice of one expert to its parameter."""


def split_experts(
    config: ModelConfig, tensors: Mapping[str, ModelTensor]
) -> dict[str, ModelTensor]:
    """Replace each stacked tensor by one per expert, and one of groups by one per group.

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
        if config.compressed is not None and name.endswith(".o_a_proj.weight"):
            made |= divide(tensor, config.compressed.n_groups)
        elif router is not None:
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


def converted_tensors(
    rules: Conversions, tensors: Mapping[str, ModelTensor]
) -> dict[str, ModelTensor]:
    """Convert `tensors`, which have the names that are stored, to those of the model.

    What the model has no place for keeps its name: the loader refuses it. Raises CheckpointError
    for tensors that do not make the parameter that their names say.
    """
    made = rules.convert({name: tensor.shape for name, tensor in tensors.items()})
    return {one.name: _model_tensor(one, tensors) for one in made}


def language_part(tensors: Mapping[str, ModelTensor], wrapper: str) -> dict[str, ModelTensor]:
    """Leave out all tensors of a whole model but its language model's, which get its own names."""
    own = ((language_name(name, wrapper), tensor) for name, tensor in tensors.items())
    return {name: replace(tensor, name=name) for name, tensor in own if name is not None}


def _language_name(whole: Conversions, wrapper: str, name: str) -> str | None:
    return language_name(whole.renamed(name), wrapper)


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


SINGLE_FILES: Final = ("model.safetensors", "pytorch_model.bin")
"""Safetensors go first."""
HF_INDEX_FILES: Final = INDEX_FILES[:2]
"""In the order of SINGLE_FILES."""
_READERS: Final[tuple[ReadFile, ...]] = (read_safetensors_file, read_torch_file)
_EMBEDDING: Final = re.compile(r".*\b(embed_tokens|word_embeddings|wte)\.weight")
HF_WHOLE: Final = tuple(name for name in ID_FILES if name != "params.json")
"""Files that belong to such a checkpoint besides its tensors."""


def has_huggingface_tensors(folder: Path) -> bool:
    """Return whether there are tensor files with the names used by transformers."""
    return any(has_file(folder / name) for name in (*SINGLE_FILES, *HF_INDEX_FILES))


def open_huggingface(folder: Path) -> Contents:
    """Read config.json and the headers of the tensor files.

    Raises CheckpointError, which names the file, when one is missing, truncated or damaged.
    """
    where = folder / "config.json"
    raw = config = read_json(where)
    unknown: list[str] = []
    weight_format = take_format(config, str(where), unknown)
    index, files = read_tensor_files(folder)
    stored = {name: info for file in files.values() for name, info in file.tensors.items()}
    kind = config.get("model_type")
    named = {*stored}
    if _says_untied(config):  # a head that is named and not there is missing, not left out
        named.update(name for file in files.values() for name in file.absent)
    if "embed_tokens.weight" in stored:
        stored, has_head = _of_causal_class(stored), "lm_head.weight" in named
        config |= {} if has_head else {"tie_word_embeddings": True}
    if (isinstance(kind, str) and kind in WRAPPERS) or TEXT in config:
        # Two configs may say this, or leave it to their class. The file has a head or has none.
        names = (language_name(name) or "" for name in named)
        heads = ("lm_head.", "head.")  # DeepSeek's own files have the latter
        config["tie_word_embeddings"] = not any(name.startswith(heads) for name in names)
    elif config.get("tie_word_embeddings") is not False and _has_own_head(folder, stored):
        config["tie_word_embeddings"] = False

    def arrange(config: ModelConfig) -> Mapping[str, ModelTensor]:
        made: Mapping[str, ModelTensor] = {}
        rename: Callable[[str], str | None] = partial(canonical_name, config)
        try:
            is_part = config.outline is not None and config.wrapper not in {"", *WRAPPERS}
            plain = replace(config, wrapper="") if is_part else config
            tensors = model_tensors(plain, stored, weight_format, str(folder))
            if is_part:
                from shardnet.model.modules.conversions import conversions_of

                whole = conversions_of(json.dumps(raw), sees=True)
                made = language_part(converted_tensors(whole, tensors), config.wrapper)
                rename = partial(_language_name, whole, config.wrapper)
            elif config.outline is not None:
                from shardnet.model.modules.conversions import conversions_of

                rules = conversions_of(config.outline.config_text)
                rename, made = rules.renamed, converted_tensors(rules, tensors)
            else:
                made = split_experts(config, tensors)
        finally:  # also where that has failed: it names no file

            def needed() -> set[str]:
                parts = _absent_parts(weight_format, files.values())
                return lacking(config, made).union(filter(None, map(rename, parts)))

            refuse_absent(files.values(), folder, needed, rename)
        return made

    return Contents(
        folder=folder,
        config=config,
        where=str(where),
        files=files,
        whole=(*HF_WHOLE, *index),
        arrange=arrange,
        form=weight_format.title if weight_format is not None else "",
        unknown_keys=tuple(unknown),
    )


def _has_own_head(folder: Path, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether the LM head is like the embedding but for its values, as far as they are sampled.

    Fine-tuning leaves such heads beside a config that ties them; replicas have the samples too.
    """
    tables = (info for name, info in stored.items() if _EMBEDDING.fullmatch(name))
    head, table = stored.get("lm_head.weight"), next(tables, None)
    if head is None or table is None or (head.shape, head.dtype) != (table.shape, table.dtype):
        return False
    try:
        one, other = (hash_ranges(folder / x.file, [sample_range(x)]) for x in (head, table))
    except OSError as error:
        raise damaged(f"{folder}: {error.strerror}") from error
    return one != other


def _absent_parts(
    weight_format: WeightFormat | None, files: Collection[TensorFile]
) -> Iterator[str]:
    """List the absent parts of quantised weights that are there otherwise.

    Without the order of its inputs (`.g_idx`) or its scales a weight would be another one. A bias
    is a parameter of its own where the model has one.
    """
    if weight_format is None:
        return
    suffixes = [suffix for suffix in weight_format.suffixes if suffix != ".bias"]
    for name in (name for file in files for name in file.absent):
        stems = [name.removesuffix(suffix) for suffix in suffixes if name.endswith(suffix)]
        whole = [stem + suffix for stem in stems for suffix in suffixes]
        if any(part in file.tensors for part in whole for file in files):
            yield name


def _says_untied(config: Mapping[str, Any]) -> bool:
    """Return whether a config says that the LM head is no other tensor; outer keys go first."""
    inner = config.get(TEXT)
    said = (each.get("tie_word_embeddings") for each in (config, inner) if isinstance(each, dict))
    return next((value for value in said if value is not None), None) is False


def _of_causal_class(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Name tensors as the class with a head does, where the one below it was saved.

    So are models that make vectors (Qwen3-Embedding), which have no head.
    """
    heads = {name: one for name, one in stored.items() if name.startswith("lm_head.")}
    return {f"model.{name}": one for name, one in stored.items() if name not in heads} | heads


def read_tensor_files(folder: Path) -> tuple[list[str], dict[str, TensorFile]]:
    """Read the headers of all tensor files; return them and the name of the index, if any."""
    for single, index, read in zip(SINGLE_FILES, HF_INDEX_FILES, _READERS, strict=True):
        if has_file(folder / single):
            return [], {single: read(folder / single)}
        if has_file(folder / index):
            return [index], read_indexed_files(folder / index, read)
    names = ", ".join((*SINGLE_FILES, *HF_INDEX_FILES))
    raise damaged(
        f"{folder}: no tensors are here: neither {names}, nor consolidated files beside "
        "params.json, nor a GGUF"
    )
