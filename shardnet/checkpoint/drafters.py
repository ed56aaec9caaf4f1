"""Drafters on disk: what kind a folder has, and what one says that reads another model's states.

Knows how their makers write them (SafeAILab/EAGLE, SpecForge, vLLM's speculators, z-lab/dflash).
Reads headers only, and imports no torch. Must not know what is computed of the tensors.

Makers count the layers whose states are read in three ways. Here 0 are the embeddings, and N what
layer N - 1 gives, counted from 0, before any norm.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats.huggingface import has_huggingface_tensors, read_tensor_files
from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_json
from shardnet.checkpoint.tensors.model_tensor import unchanged
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor, TensorFile
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import parse_config
from shardnet.model.families.tensor_shapes import (
    Table,
    attention,
    gated,
    head_norms,
    linears,
    norms,
)

OWN: Final = "drafter"
"""Begins the names of a drafter's parameters here."""
EMBEDDING: Final = f"{OWN}.embed_tokens.weight"
HEAD: Final = f"{OWN}.lm_head.weight"
KNOWN: Final = f"{OWN}.d2t"
"""What is added to each number of its own vocabulary to make a token id of the model's."""
_LAYER: Final = f"{OWN}.layers.0"
_MAX_BLOCK: Final = 256
_EAGLE3: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_DFLASH: Final = "DFlashDraftModel"
_OTHERS: Final = re.compile(
    r"medusa|hydra|mlp_?speculator|p-?eagle|domino|dspark|eagle", re.IGNORECASE
)
"""In names of architectures and keys of other drafters."""
_SPECULATORS: Final = (
    *("speculators_config", "speculators_model_type", "speculators_version"),
    *("embed_requires_grad", "has_no_defaults_at_init", "transformer_layer_config"),
)
"""Keys of vLLM's speculators that change nothing here."""
_OWN_KEYS: Final = frozenset(
    (
        *("architectures", "auto_map", "draft_vocab_size", "eagle_config", "norm_before_residual"),
        *("eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_output", "target_hidden_size"),
        *("target_model_type", "block_size", "dflash_config", "num_target_layers"),
        *("norm_before_fc", *_SPECULATORS),
    )
)
"""What a Llama or Qwen config does not have."""
_IGNORED: Final = re.compile(rf"{OWN}\.(t2d|verifier_(lm_head|norm)\..*|.*rotary_emb\.inv_freq)")
_OTHER_MODEL: Final = "name a drafter that was trained for this very model"
_IMPLEMENTED: Final = "use EAGLE-3 or DFlash, a small model of the same family, or ngram"


class DrafterFormat(enum.Enum):
    """What drafts."""

    MODEL = "model"
    """A whole small model."""
    EAGLE3 = "EAGLE-3"
    """A layer that reads states of three layers, and drafts one token behind the other."""
    BLOCK = "DFlash"
    """Layers that read states, and draft a block of tokens at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFiles:
    """A drafter that reads hidden states of another model.

    `config` is that of its own layers, `table` its parameters, which `checkpoint` has, and `layers`
    those whose states it reads. A `draft_size` is that of its own vocabulary, None for the model's.
    Embedding and LM head are the model's where the table lacks them. `state_norms` are the norms of
    states before they are joined; with `norms_residual` the residual is what is normed. `mask_id`
    and `block_size` are DFlash's.
    """

    format: DrafterFormat
    config: ModelConfig
    table: Table
    checkpoint: Checkpoint
    layers: tuple[int, ...]
    draft_size: int | None
    state_norms: tuple[str, ...] = ()
    norms_residual: bool = False
    mask_id: int = 0
    block_size: int = 1


def drafter_format(folder: Path) -> DrafterFormat:
    """Say what the drafter in a folder is, by its config and the names of its tensors.

    Raises UnsupportedModelError, which names it, for a drafter that is not implemented, and
    CheckpointError for damaged files.
    """
    where = folder / "config.json"
    if not folder.is_dir() or not has_file(where) or not has_huggingface_tensors(folder):
        return DrafterFormat.MODEL
    raw = read_json(where)
    given = raw.get("architectures")
    named = [str(name) for name in (given if isinstance(given, list) else [])]
    kinds = [*named, str(raw.get("model_type")), str(raw.get("speculators_model_type"))]
    if _DFLASH in named:
        return DrafterFormat.BLOCK
    if any(name in named for name in _EAGLE3) or kinds[-1] == "eagle3":
        return DrafterFormat.EAGLE3
    if found := next(filter(_OTHERS.search, kinds), None):
        raise _not_implemented(folder, found)
    names = _stored(_files(folder)).keys()
    if KNOWN in names or {HEAD, f"{_LAYER}.hidden_norm.weight"} <= names:
        return DrafterFormat.EAGLE3
    if found := next(filter(_OTHERS.search, raw), None):
        raise _not_implemented(folder, found)
    if {f"{OWN}.fc.weight", f"{_LAYER}.self_attn.q_proj.weight"} <= names:
        raise _not_implemented(folder, "a head of EAGLE-1, EAGLE-2 or HASS")
    return DrafterFormat.MODEL


def _not_implemented(folder: Path, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{folder}: {what}: such drafters are not implemented", remedy=_IMPLEMENTED
    )


def _files(folder: Path) -> Mapping[str, TensorFile]:
    return read_tensor_files(folder)[1]


def _stored(files: Mapping[str, TensorFile]) -> dict[str, StoredTensor]:
    """Return the stored tensors by the names that they have here."""
    named = (pair for file in files.values() for pair in file.tensors.items())
    return {_own_name(name): one for name, one in named}


def _own_name(name: str) -> str:
    """Return what a stored tensor is called here: all programs name the layers alike but for that.

    SGLang and vLLM take these too: with `model.` before them, and the one layer by its number.
    """
    return f"{OWN}.{name.removeprefix('model.').replace('midlayer.', 'layers.0.', 1)}"


def open_drafter(folder: Path, target: Checkpoint) -> DrafterFiles:
    """Read the config and the headers of a drafter for the model `target`.

    Raises CheckpointError for one that was made for another model, and for damaged files;
    UnsupportedModelError for what is not implemented, also unknown keys of its config.
    """
    form = drafter_format(folder)
    if form is DrafterFormat.MODEL:
        raise CheckpointError(f"{folder}: a model, which reads no states", remedy=_IMPLEMENTED)
    where = folder / "config.json"
    raw = read_json(where)
    inner = raw.get("transformer_layer_config")  # as vLLM's speculators write it
    raw |= inner if isinstance(inner, dict) else {}
    own = Fields({key: raw[key] for key in raw if key in _OWN_KEYS}, str(where))
    own.ignore("architectures", "auto_map", *_SPECULATORS)
    config = parse_config({key: raw[key] for key in raw if key not in _OWN_KEYS}, str(where))
    files, model = _files(folder), target.config
    stored = _stored(files)
    _check_model(own, "token ids", config.vocab_size, model.vocab_size)
    read = _read_eagle3 if form is DrafterFormat.EAGLE3 else _read_dflash
    tensors = {name: unchanged(name, one) for name, one in stored.items()}
    made = read(own, config, model, target.beside(folder, files, tensors))
    own.note_the_rest()
    own.refuse_unknown()
    table = made.table | _tables(own, made, model, stored)
    for name in stored.keys() - table.keys() - {KNOWN}:
        if not _IGNORED.fullmatch(name):
            raise own.damaged(f"tensor {name.removeprefix(OWN + '.')} has no place in {form.value}")
    return replace(made, table=table)


def _check_model(own: Fields, what: str, made_for: int, has: int) -> None:
    """Refuse a drafter for a model of other sizes."""
    if made_for != has:
        raise CheckpointError(
            f"{own.where}: this drafter was made for a model of {made_for} {what}, this one has "
            f"{has}",
            remedy=_OTHER_MODEL,
        )


def _read_eagle3(
    own: Fields, config: ModelConfig, model: ModelConfig, checkpoint: Checkpoint
) -> DrafterFiles:
    """Read an EAGLE-3 head's own keys.

    `eagle_config` counts a layer from 0 and means what it gives (SpecForge, SGLang). The same key
    outside says after how many layers (vLLM and its speculators), as the authors' module does,
    which reads what enters layers 2, N / 2 and N - 3 of N.
    """
    own.ignore("target_model_type")
    own.require("norm_output", True)
    own.require("norm_before_fc", False)
    width = own.positive("target_hidden_size", config.hidden_size)
    _check_model(own, "columns", width, model.row_width)
    if config.n_layers != 1:
        raise own.unsupported("num_hidden_layers", config.n_layers, "1")
    key, n = "eagle_aux_hidden_state_layer_ids", model.n_layers
    inner = own.inner("eagle_config", own.take("eagle_config", dict, {}))
    inner.require("use_aux_hidden_state", True)
    counted, outer = inner.take(key, list, None), own.take(key, list, None)
    inner.note_the_rest()
    if counted:
        layers = _layers(own, [_after(layer) for layer in counted], n)
    else:
        layers = _layers(own, outer or [2, n // 2, n - 3], n)
    hidden, attn = config.hidden_size, f"{_LAYER}.self_attn"
    table = _decoder(config, 0) | {f"{_LAYER}.hidden_norm.weight": (hidden,)}
    for name in "qkv":  # which see the embedding too
        n_out, _ = table[f"{attn}.{name}_proj.weight"]
        table[f"{attn}.{name}_proj.weight"] = (n_out, 2 * hidden)
    has_norms = own.take("fc_norm", bool, False)
    names = tuple(f"{OWN}.fc_norm.{at}" for at in range(len(layers) if has_norms else 0))
    return DrafterFiles(
        format=DrafterFormat.EAGLE3,
        config=config,
        checkpoint=checkpoint,
        table=table
        | {f"{name}.weight": (width,) for name in names}
        | _fusing(config, len(layers) * width),
        layers=layers,
        draft_size=own.optional("draft_vocab_size"),
        state_norms=names,
        norms_residual=own.take("norm_before_residual", bool, False),
    )


def _read_dflash(
    own: Fields, config: ModelConfig, model: ModelConfig, checkpoint: Checkpoint
) -> DrafterFiles:
    """Read a DFlash drafter's own keys: it counts a layer from 0 and means what it gives."""
    inner = own.inner("dflash_config", own.take("dflash_config", dict))
    _check_model(own, "columns", config.hidden_size, model.row_width)
    n, n_own = model.n_layers, config.n_layers
    _check_model(own, "layers", own.positive("num_target_layers", n), n)
    usual = [n // 2] if n_own == 1 else [round(1 + i * (n - 4) / (n_own - 1)) for i in range(n_own)]
    counted = inner.take("target_layer_ids", list, usual)
    # of the last one its module reads what the final norm gives, other programs what it is given
    layers = _layers(own, [_after(layer) for layer in counted], n - 1)
    size = inner.positive("block_size", own.positive("block_size", 16, at_most=_MAX_BLOCK))
    mask_id: int = inner.take("mask_token_id", int)
    if not 0 <= mask_id < model.vocab_size or not 2 <= size <= _MAX_BLOCK:
        raise own.damaged(f"mask_token_id {mask_id}, block_size {size}: out of range")
    inner.note_the_rest()
    table = _fusing(config, len(layers) * config.hidden_size)
    for layer in range(n_own):
        table |= _decoder(config, layer)
    return DrafterFiles(
        format=DrafterFormat.BLOCK,
        config=config,
        checkpoint=checkpoint,
        table=table | {f"{OWN}.hidden_norm.weight": (config.hidden_size,)},
        layers=layers,
        draft_size=own.optional("draft_vocab_size"),
        mask_id=mask_id,
        block_size=size,
    )


def _after(layer: object) -> object:
    """Count a layer and those before it, where its number counts from 0."""
    return layer + 1 if isinstance(layer, int) else layer


def _layers(own: Fields, layers: list[Any], most: int) -> tuple[int, ...]:
    """Check after how many layers states are read."""
    if not layers or not all(isinstance(layer, int) and 0 <= layer <= most for layer in layers):
        raise CheckpointError(
            f"{own.where}: this drafter reads states after {layers} layers, of this model those "
            f"after 0 to {most} can be read",
            remedy=_OTHER_MODEL,
        )
    return tuple(layers)


def _decoder(config: ModelConfig, layer: int) -> Table:
    """Name the parameters of a layer, Llama's or Qwen3's."""
    table = attention(config, layer) | norms(
        config, layer, "input_layernorm", "post_attention_layernorm"
    )
    if config.has_head_norms:
        table |= head_norms(config, layer)
    mlp = f"model.layers.{layer}.mlp"
    table |= gated(config, mlp, config.intermediate_size, with_bias=config.mlp_bias)
    return {_own_name(name): shape for name, shape in table.items()}


def _fusing(config: ModelConfig, width: int) -> Table:
    hidden = config.hidden_size
    return {f"{OWN}.norm.weight": (hidden,)} | linears(OWN, {"fc": (hidden, width)})


def _tables(
    own: Fields, made: DrafterFiles, model: ModelConfig, stored: Mapping[str, StoredTensor]
) -> Table:
    """Name embedding and LM head, as far as they are not the model's.

    Raises CheckpointError where they are neither here nor can be the model's.
    """
    config, known = made.config, stored.get(KNOWN)
    size = made.draft_size or (known.shape[0] if known is not None else config.vocab_size)
    if size != config.vocab_size and (known is None or known.shape != (size,)):
        raise own.damaged(f"tensor d2t is missing, or does not have {size} numbers")
    table: Table = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    table |= {HEAD: (size, config.hidden_size)}
    for name in table.keys() - stored.keys():
        if table[name] != (model.vocab_size, model.hidden_size):
            raise own.damaged(f"tensor {name.removeprefix(OWN + '.')} is missing")
        del table[name]
    return table
