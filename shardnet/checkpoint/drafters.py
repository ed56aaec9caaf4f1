"""Drafters on disk: what kind a folder has, and what one says that reads another model's states.

Knows how their makers write them (SafeAILab/EAGLE, SpecForge, vLLM's speculators, z-lab/dflash).
Reads headers only, and imports no torch. Must not know what is computed of the tensors.

Makers count the layers whose states are read in two ways. Here 0 are the embeddings, and N what
layer N - 1 gives, counted from 0, before any norm.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
from shardnet.model.families.layout import Layout
from shardnet.model.families.registry import parse_config
from shardnet.model.families.tensor_shapes import Table
from shardnet.slot_operations import MAX_DRAFT_LAYERS

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
FUSE: Final = "model.fc.weight"
"""Joins the states of a position."""
KNOWN: Final = "model.d2t"
"""What is added to each number of its own vocabulary to make a token id of the model's."""
_HIDDEN_NORM: Final = "model.layers.0.hidden_norm.weight"
_EAGLE3: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_DFLASH: Final = "DFlashDraftModel"
_OTHERS: Final = re.compile(r"(?i)\w*(medusa|hydra|mlp_?speculator|domino|dspark|eagle)\w*")
"""In names of architectures and keys of other drafters."""
_SPECULATORS: Final = """speculators_config speculators_model_type speculators_version
embed_requires_grad has_no_defaults_at_init transformer_layer_config"""
"""Keys of vLLM's speculators that change nothing here."""
_OWN_KEYS: Final = """architectures auto_map block_size dflash_config draft_vocab_size eagle_config
eagle_aux_hidden_state_layer_ids fc_norm norm_before_fc norm_before_residual norm_output
num_target_layers target_hidden_size target_model_type"""
"""What else a Llama or Qwen config does not have."""
_IGNORED: Final = re.compile(r"model\.(t2d|verifier_(lm_head|norm)\..*|.*rotary_emb\.inv_freq)")
_MAX_BLOCK: Final = 256
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


@dataclass(kw_only=True)
class DrafterFiles:
    """A drafter that reads hidden states of another model.

    `config` is that of its own layers, `table` its parameters, which `checkpoint` has, and `layers`
    those whose states it reads. Embedding and LM head are the model's where the table lacks them.
    `state_norms` are the norms of states before they are joined; with `norms_residual` the residual
    is what is normed. `mask_id` and `block_size` are DFlash's.
    """

    format: DrafterFormat
    config: ModelConfig
    checkpoint: Checkpoint
    table: Table
    layers: tuple[int, ...] = ()
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
    kinds = str([raw.get(key) for key in ("architectures", "model_type", "speculators_model_type")])
    if _DFLASH in kinds:
        return DrafterFormat.BLOCK
    if any(name in kinds for name in (*_EAGLE3, "'eagle3'")):
        return DrafterFormat.EAGLE3
    names, other = _stored(read_tensor_files(folder)[1]).keys(), _OTHERS.search(kinds)
    if not other and (KNOWN in names or {HEAD, _HIDDEN_NORM} <= names):
        return DrafterFormat.EAGLE3
    other = other or _OTHERS.search(" ".join(key for key in raw if raw[key]))
    if other or {FUSE, "model.layers.0.self_attn.q_proj.weight"} <= names:
        what = other[0] if other else "a head of EAGLE-1, EAGLE-2 or HASS"
        raise UnsupportedModelError(
            f"{folder}: {what}: such drafters are not implemented", remedy=_IMPLEMENTED
        )
    return DrafterFormat.MODEL


def _stored(files: Mapping[str, TensorFile]) -> dict[str, StoredTensor]:
    """Return the stored tensors by the names that a model's would have.

    SpecForge and the authors call the one layer `midlayer`, vLLM and SGLang take its number too.
    """
    stored = {}
    for name, one in (pair for file in files.values() for pair in file.tensors.items()):
        plain = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        stored[plain if plain == HEAD else f"model.{plain}"] = one
    return stored


def open_drafter(folder: Path, target: Checkpoint) -> DrafterFiles:
    """Read the config and the headers of a drafter for the model `target`.

    Raises CheckpointError for one that was made for another model, and for damaged files;
    UnsupportedModelError for what is not implemented, also unknown keys of its config.
    """
    form, where = drafter_format(folder), str(folder / "config.json")
    if form is DrafterFormat.MODEL:
        raise CheckpointError(f"{folder}: a model, which reads no states", remedy=_IMPLEMENTED)
    raw = read_json(folder / "config.json")
    inner = raw.get("transformer_layer_config")  # as vLLM's speculators write it
    raw |= inner if isinstance(inner, dict) else {}
    unused = _SPECULATORS.split()
    given = {key: raw.pop(key) for key in {*_OWN_KEYS.split(), *unused} & raw.keys()}
    own, config = Fields(given, where), parse_config(raw, where)
    own.ignore("architectures", "auto_map", "target_model_type", *unused)
    _, files = read_tensor_files(folder)
    stored = _stored(files)
    checkpoint = target.beside(
        folder, files, {name: unchanged(name, stored[name]) for name in stored}
    )
    table: Table = {"model.norm.weight": (config.hidden_size,)}
    for layer in range(config.n_layers):
        table |= Layout().layer_tensors(config, layer)
    made = DrafterFiles(format=form, config=config, checkpoint=checkpoint, table=table)
    (_read_eagle3 if form is DrafterFormat.EAGLE3 else _read_dflash)(own, made, target.config)
    _read_vocabulary(own, made, target.config, stored)
    own.note_the_rest()
    own.refuse_unknown()
    for name in stored.keys() - table.keys() - {KNOWN}:
        if not _IGNORED.fullmatch(name):
            raise own.damaged(f"tensor {name} has no place in {form.value}")
    return made


def _check_model(own: Fields, what: str, made_for: int, has: int) -> None:
    """Refuse a drafter for a model of other sizes."""
    if made_for != has:
        raise CheckpointError(
            f"{own.where}: this drafter was made for a model of {made_for} {what}, this one has "
            f"{has}",
            remedy=_OTHER_MODEL,
        )


def _read_eagle3(own: Fields, made: DrafterFiles, model: ModelConfig) -> None:
    """Read an EAGLE-3 head's own keys.

    `eagle_config` counts a layer from 0 and means what it gives (SpecForge, SGLang). The same key
    outside says after how many layers (vLLM and its speculators), as the authors' module does,
    which reads what enters layers 2, N / 2 and N - 3 of N.
    """
    own.require("norm_output", True)
    own.require("norm_before_fc", False)
    config, n = made.config, model.n_layers
    if config.n_layers != 1:
        raise own.unsupported("num_hidden_layers", config.n_layers, "1")
    width = own.positive("target_hidden_size", config.hidden_size)
    _check_model(own, "columns", width, model.row_width)
    inner = own.inner("eagle_config", own.take("eagle_config", dict, {}))
    inner.require("use_aux_hidden_state", True)
    key = "eagle_aux_hidden_state_layer_ids"
    outside = own.take(key, list, None) or [2, n // 2, n - 3]
    counted = inner.take(key, list, None)
    inner.note_the_rest()
    made.layers = _layers(own, counted or outside, n, counts_from=1 if counted else 0)
    for name in "qkv":  # which see the embedding too
        weight = f"model.layers.0.self_attn.{name}_proj.weight"
        made.table[weight] = (made.table[weight][0], 2 * config.hidden_size)
    n_norms = len(made.layers) if own.take("fc_norm", bool, False) else 0
    made.state_norms = tuple(f"model.fc_norm.{at}" for at in range(n_norms))
    made.table.update({f"{name}.weight": (width,) for name in made.state_norms})
    made.table[_HIDDEN_NORM] = (config.hidden_size,)
    made.table[FUSE] = (config.hidden_size, len(made.layers) * width)
    made.norms_residual = own.take("norm_before_residual", bool, False)


def _read_dflash(own: Fields, made: DrafterFiles, model: ModelConfig) -> None:
    """Read a DFlash drafter's own keys: it counts a layer from 0 and means what it gives."""
    hidden, n, n_own = made.config.hidden_size, model.n_layers, made.config.n_layers
    if not made.config.has_head_norms:
        raise own.unsupported("model_type", made.config.family, "qwen3")
    _check_model(own, "columns", hidden, model.row_width)
    _check_model(own, "layers", own.positive("num_target_layers", n), n)
    inner = own.inner("dflash_config", own.take("dflash_config", dict))
    usual = [n // 2] if n_own == 1 else [round(1 + i * (n - 4) / (n_own - 1)) for i in range(n_own)]
    # of the last one its module reads what the final norm gives, other programs what it is given
    made.layers = _layers(own, inner.take("target_layer_ids", list, usual), n - 1, counts_from=1)
    size = own.positive("block_size", 16)
    made.block_size = inner.positive("block_size", size, at_most=_MAX_BLOCK)
    if made.block_size == 1:
        raise inner.unsupported("block_size", 1, f"2 to {_MAX_BLOCK}")
    made.mask_id = inner.take("mask_token_id", int)
    if not 0 <= made.mask_id < model.vocab_size:
        raise inner.damaged(f"mask_token_id {made.mask_id} is no token of the model")
    inner.note_the_rest()
    made.table[FUSE] = (hidden, len(made.layers) * hidden)
    made.table["model.hidden_norm.weight"] = (hidden,)


def _layers(own: Fields, given: list[Any], most: int, *, counts_from: int) -> tuple[int, ...]:
    """Return after how many layers states are read. Raises CheckpointError for what is none."""
    found = [each + counts_from for each in given if isinstance(each, int)]
    if not found or len(found) < len(given) or not 0 <= min(found) <= max(found) <= most:
        raise CheckpointError(
            f"{own.where}: this drafter reads states after {found} layers, of this model those "
            f"after 0 to {most} can be read",
            remedy=_OTHER_MODEL,
        )
    if len(found) > MAX_DRAFT_LAYERS:
        raise own.unsupported("layers read", len(found), f"at most {MAX_DRAFT_LAYERS}")
    return tuple(found)


def _read_vocabulary(
    own: Fields, made: DrafterFiles, model: ModelConfig, stored: Mapping[str, StoredTensor]
) -> None:
    """Name embedding and LM head, as far as they are not the model's.

    Raises CheckpointError where they are neither here nor can be the model's.
    """
    n_all, hidden = made.config.vocab_size, made.config.hidden_size
    _check_model(own, "token ids", n_all, model.vocab_size)
    known = stored[KNOWN].shape if KNOWN in stored else (n_all,)
    size = own.positive("draft_vocab_size", *known[:1])
    if known != (size,):
        raise own.damaged(f"tensor d2t is missing, or does not have {size} numbers")
    for name, n in ((EMBEDDING, n_all), (HEAD, size)):
        if name in stored:
            made.table[name] = (n, hidden)
        elif (n, hidden) != (n_all, model.hidden_size):
            raise own.damaged(f"tensor {name} is missing")
