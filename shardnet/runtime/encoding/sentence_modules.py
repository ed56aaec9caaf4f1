"""What sentence-transformers' files say is done around a model: prompt, pooling, layers, length.

Reads headers only; no torch. Must not know the model itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from shardnet.checkpoint.formats.huggingface import read_tensor_files
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import MAX_JSON_BYTES, parse_value, read_file, read_json
from shardnet.checkpoint.tensors.model_tensor import ModelTensor, unchanged
from shardnet.checkpoint.tensors.stored_tensor import FileState, damaged
from shardnet.errors import CheckpointError, UnsupportedModelError, shown
from shardnet.model.config.fields import Fields
from shardnet.model.families.encoders import MAX_VECTOR, Kind
from shardnet.runtime.encoding.judge import SYSTEM, Answers

Pooling = Literal["mean", "cls", "last"]
Activation = Literal["Identity", "Tanh"]

_MODES: Final[Mapping[str, Pooling]] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
}
"""Ways to pool, as the files of newer and older versions name them."""
_FLAG: Final = "pooling_mode_"
_FOLDER: Final = re.compile(r"[\w-]+")
_SCORE: Final = "LogitScore"
_MAX_DENSE: Final = 4
_VECTOR: Final = "sentence_embedding"
"""What is made of a text, as these files call it."""
_KINDS: Final = ("Transformer", "Pooling", "Dense", "Normalize")
"""In the order in which they may follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A linear behind the pooling, whose weight [outputs, inputs] goes first, and its activation.

    `tensors` are in the files `opened`, by name in `folder`.
    """

    activation: Activation
    tensors: tuple[ModelTensor, ...]
    folder: Path
    opened: Mapping[str, FileState]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    """What is done around a model. Its vectors have length 1 if they are `normalized`.

    `prompt` is written before each text, which is put in lower case first if it `lowers`; an
    input has `most_tokens`, None where no file says. A decoder that judges documents does so by the
    logits of `answers`, None where its tokenizer says which.
    """

    pooling: Pooling = "mean"
    dense: tuple[DenseLayer, ...] = ()
    normalized: bool | None = None
    prompt: str = ""
    lowers: bool = False
    most_tokens: int | None = None
    answers: Answers | None = None


def read_modules(folder: Path) -> SentenceModules:
    """Read the files beside the model in `folder`, which may be missing.

    Raises CheckpointError if one is damaged, UnsupportedModelError for what is not implemented.
    """
    return _around(folder, _listed(folder / "modules.json"))


def read_decoder_modules(folder: Path) -> tuple[Kind, SentenceModules] | None:
    """Say what files say that a model which could write text is for; None for that.

    Raises as `read_modules`, and for one that is asked in other words than Qwen3-Reranker.
    """
    listed = _listed(folder / "modules.json")
    kinds = {kind for kind, _ in listed or ()}
    if listed is not None and _SCORE in kinds:
        return "reranker", _scores(folder, listed)
    return ("embedding", _around(folder, listed)) if "Pooling" in kinds else None


def _around(folder: Path, listed: list[tuple[str, str]] | None) -> SentenceModules:
    """Read the modules that stand around a model which makes vectors."""
    limits = _optional(folder / "sentence_bert_config.json")
    most = _positive(limits.get("max_seq_length"))
    lowers = limits.get("do_lower_case") is True
    if listed is None:
        return SentenceModules(lowers=lowers, most_tokens=most)
    _check(folder / "modules.json", listed)
    kinds = [kind for kind, _ in listed]
    prompt = _prompt(folder / "config_sentence_transformers.json")
    pooling: Pooling = "mean"
    if "Pooling" in kinds:
        pooling = _pooling(_within(folder, listed[kinds.index("Pooling")][1]), prompt)
    dense = [_within(folder, path) for kind, path in listed if kind == "Dense"]
    return SentenceModules(
        pooling=pooling,
        dense=tuple(_dense(path) for path in dense),
        normalized="Normalize" in kinds,
        prompt=prompt,
        lowers=lowers,
        most_tokens=most,
    )


def _scores(folder: Path, listed: list[tuple[str, str]]) -> SentenceModules:
    """Read by which tokens' logits a decoder judges documents."""
    path = folder / "modules.json"
    if [kind for kind, _ in listed] != ["Transformer", _SCORE]:
        raise UnsupportedModelError(f"{path}: other modules than {_SCORE} are not implemented")
    where = _within(folder, listed[1][1]) / "config.json"
    fields = Fields(read_json(where), str(where))
    template = folder / "chat_template.jinja"
    words = SYSTEM.partition(".")[0].encode()
    if not has_file(template) or words not in read_file(template, MAX_JSON_BYTES):
        raise UnsupportedModelError(
            f"{where}: {_SCORE} is implemented for models that are asked as Qwen3-Reranker is",
            remedy="use another reranker (docs/models.md)",
        )
    no = fields.take("false_token_id", int, None)
    most = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    return SentenceModules(
        answers=(fields.take("true_token_id", int), no), most_tokens=_positive(most)
    )


def check_widths(dense: Sequence[DenseLayer], width: int, where: str) -> None:
    """Raise CheckpointError unless linears take what is before them: `width` numbers at first."""
    for layer in dense:
        n_out, n_in = layer.tensors[0].shape
        if n_in != width:
            raise damaged(
                f"{where}: a linear behind the pooling takes {n_in} numbers, and gets {width}"
            )
        width = n_out


def _positive(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _listed(path: Path) -> list[tuple[str, str]] | None:
    """Return kind and folder of each module in their order; None where the file is missing."""
    if not has_file(path):
        return None
    values = parse_value(read_file(path, MAX_JSON_BYTES), path)
    found: list[tuple[str, str]] = []
    for one in values if isinstance(values, list) else [None]:
        kind, place = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise damaged(f"{path}: {shown(one)} is no module")
        found.append((kind.rpartition(".")[2], place))
    return found


def _check(path: Path, found: list[tuple[str, str]]) -> None:
    """Raise UnsupportedModelError unless it is a transformer, pooled, then perhaps multiplied and
    normalised.
    """
    kinds = [kind for kind, _ in found]
    for kind in kinds:
        if kind not in _KINDS:
            raise UnsupportedModelError(f"{path}: the module {shown(kind)} is not implemented")
    if not found or found[0] != ("Transformer", ""):
        raise UnsupportedModelError(f"{path}: modules in other folders are not implemented")
    numbers = [_KINDS.index(kind) for kind in kinds]
    n_dense = kinds.count("Dense")
    if numbers != sorted(numbers) or len({*kinds}) + max(0, n_dense - 1) != len(kinds):
        raise UnsupportedModelError(f"{path}: modules in the order {kinds} are not implemented")
    if n_dense > _MAX_DENSE or (n_dense and "Pooling" not in kinds):
        raise UnsupportedModelError(f"{path}: {n_dense} modules Dense are not implemented here")


def _within(folder: Path, place: str) -> Path:
    """Return the folder of a module. Raises UnsupportedModelError for one that is elsewhere."""
    if not _FOLDER.fullmatch(place):
        raise UnsupportedModelError(f"{folder}: modules in other folders are not implemented")
    if os.path.islink(folder / place):
        raise CheckpointError(f"{folder / place} is a link", remedy="put the folder in its place")
    return folder / place


def _pooling(folder: Path, prompt: str) -> Pooling:
    """Read how vectors are pooled. Raises UnsupportedModelError for another way."""
    path = folder / "config.json"
    config = read_json(path)
    one = config.get("pooling_mode")
    modes = [
        key.removeprefix(_FLAG) for key in config if key.startswith(_FLAG) and config[key] is True
    ]
    modes = [one] if isinstance(one, str) else modes
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"{path}: pooling by {shown(one or modes)} is not implemented",
            remedy=f"there are {', '.join(_MODES)}, one at a time",
        )
    if prompt and config.get("include_prompt") is False:
        raise UnsupportedModelError(f"{path}: include_prompt = False is not implemented")
    return _MODES[modes[0]]


def _prompt(path: Path) -> str:
    """Return what is written before a text where nobody asks for another prompt."""
    config = _optional(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise damaged(f"{path} has no prompt {shown(name)}")
    return prompt


def _dense(folder: Path) -> DenseLayer:
    """Read the headers of a linear. Raises UnsupportedModelError for other activations."""
    path = folder / "config.json"
    fields = Fields(read_json(path), str(path))
    said = fields.take("activation_function", str, "torch.nn.modules.activation.Tanh")
    activation = said.rpartition(".")[2]
    if activation != "Identity" and activation != "Tanh":
        raise fields.unsupported("activation_function", said, "Identity, Tanh")
    for key in ("module_input_name", "module_output_name"):
        fields.require(key, _VECTOR)
    n_in = fields.positive("in_features", at_most=MAX_VECTOR)
    n_out = fields.positive("out_features", at_most=MAX_VECTOR)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (n_out, n_in)}
    if fields.take("bias", bool, True):
        shapes["linear.bias"] = (n_out,)
    _, files = read_tensor_files(folder)
    stored = {name: one for file in files.values() for name, one in file.tensors.items()}
    if {name: one.shape for name, one in stored.items()} != shapes:
        raise damaged(f"{folder}: its tensors are not {shapes}")
    return DenseLayer(
        activation=activation,
        tensors=tuple(unchanged(name, stored[name]) for name in shapes),
        folder=folder,
        opened={name: FileState.of(folder / name) for name in files},
    )


def _optional(path: Path) -> dict[str, Any]:
    """Read a JSON object that may be missing."""
    return read_json(path) if has_file(path) else {}
