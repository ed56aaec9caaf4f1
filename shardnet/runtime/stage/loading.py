"""From a checkpoint on disk to a stage that computes.

Knows the order of work: open, identify, check what fits, load the range, set up cache and sampler.
Runs on the loading thread. Must not know rings, links or the event loop.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.assets import DEFAULT_MODEL_NAME, DEFAULT_MODEL_PATH
from shardnet.checkpoint.checkpoint import Checkpoint, names_checkpoint
from shardnet.checkpoint.formats.gguf_header import gguf_files
from shardnet.checkpoint.hub_cache import HubName, pulled_folder
from shardnet.checkpoint.model_folders import find_in_lm_studio
from shardnet.checkpoint.model_names import LM_STUDIO
from shardnet.checkpoint.ollama_store import OllamaName, find_ollama
from shardnet.checkpoint.recommended_sampling import read_recommended
from shardnet.checkpoint.replica import NO_LAYERS, StoredLayers, stored_layers
from shardnet.checkpoint.replica_journal import Journal
from shardnet.checkpoint.tensors.checkpoint_files import folder_entries
from shardnet.errors import CapacityError, CheckpointError, UsageError
from shardnet.model.config.fields import unknown_keys_error
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.quantization import Quantization
from shardnet.runtime.stage.compute import StageCompute
from shardnet.runtime.stage.plugin import ComputePlugin, PluggedStage, StageJob
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    graph_bytes,
    kv_block_bytes,
    stage_weight_bytes,
    state_bytes,
    waiting_bytes,
)
from shardnet.stage.estimate.packed_sizes import PackedSizes, packed_sizes
from shardnet.stage.estimate.stored_dtype import linear_dtype, stored_dtype, weight_form
from shardnet.types import (
    BLOCK_POSITIONS,
    PREFILL_CHUNK_ROWS,
    Arith,
    DType,
    KvDType,
    LayerRange,
    WireDType,
    blocks_for,
)

if TYPE_CHECKING:
    from shardnet.model.sampling.sampler import Sampler
    from shardnet.stage.kept_linears import KeptLinears
    from shardnet.stage.pack_cache import PackCache
    from shardnet.stage.prefixes.prefix_store import PrefixStore
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
    from shardnet.stage.slot_moves import SlotMoves
    from shardnet.stage.stage_model import StageModel

MAX_ROOM_POSITIONS = 1 << 20
"""KV room is never booked beyond this many positions, however much memory there is."""


MAX_CONFIG_TEXT = 1 << 20
"""Characters of a config.json that one node sends another."""

Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of change (ns) of every file of a checkpoint folder; see `stamp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """Which stage to load, in the ring's `dtype`. Equal orders give the same stage.

    `folder` is where the checkpoint `model` lies on this machine.
    """

    model: str
    folder: Path
    model_id: str
    layers: LayerRange
    dtype: DType
    context: int
    is_tail: bool
    """Whether the stage has the last layer, so that it samples."""
    device: str
    quantization: Quantization | None = None
    kv_dtype: KvDType = KvDType.AUTO
    n_streamed: int = 0
    """How many of the layers are streamed from disk."""
    ignore_unknown: bool = False
    """Whether unknown keys of the config are ignored."""
    arith: Arith = Arith.FAST


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a checkpoint from its headers.

    `path` is its folder, or its file. `config_text` is its config in the words of config.json.
    `stamp` changes when a file of it does. `is_complete`: it holds every tensor, and is not a
    replica. `packed` are the weights that stay as they are stored. `stored_dtype` is that of all
    other linear weights of layers in the files, None where they have to be converted;
    `linear_dtype` that of the LM head's too. `form` names how they are stored, for people, and
    `size_bytes` is the size of the tensor files. `unknown_keys` of its config may change what is
    computed: a ring is made of it only where they are to be ignored. `recommended` is the sampling
    that its makers recommend, by the names of SamplingParams. `layers` are the stored sizes of
    layers, and which of them are here.
    """

    model_id: str
    path: Path
    config: ModelConfig
    config_text: str
    stamp: Stamp
    is_complete: bool
    stored_dtype: DType | None = None
    linear_dtype: DType | None = None
    packed: PackedSizes | None = None
    form: str = ""
    size_bytes: int = 0
    unknown_keys: tuple[str, ...] = ()
    layers: StoredLayers = NO_LAYERS
    recommended: Mapping[str, float] = field(default_factory=dict)

    def check_known(self) -> None:
        """Raise UnsupportedModelError, which names all unknown keys of the config, if any."""
        if self.unknown_keys:
            raise unknown_keys_error(str(self.path), self.unknown_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """What is kept of a stage, of this order and stamp, for the next one."""

    order: StageOrder
    stamp: Stamp
    linears: KeptLinears

    def serves(self, order: StageOrder, stamped: Stamp) -> bool:
        """Whether a stage of `order` holds weights of the same files in the same form."""
        own = self.order
        alike = replace(
            own,
            layers=order.layers,
            is_tail=order.is_tail,
            context=order.context,
            n_streamed=order.n_streamed,
        )
        return alike == order and self.stamp == stamped


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """A stage ready to compute. `stamp` is that of the checkpoint's files when it was loaded.

    `prefixes` are those on disk of finished prompts, None where none are kept; `arithmetic` is "".
    `moves` takes the sequences of other stages in, None where it cannot. `linears` are those that a
    later stage may take. A stage that has grown has `parts`, which were loaded one by one.
    """

    order: StageOrder
    stamp: Stamp
    compute: StageCompute
    weight_bytes: int
    room_blocks: int
    load_s: float
    kernel: str
    exact_rows: int
    prefixes: StagePrefixes | None = None
    arithmetic: str = ""
    moves: SlotMoves | None = None
    linears: KeptLinears | None = None
    parts: tuple[LoadedStage, ...] = ()

    @property
    def kept(self) -> KeptWeights | None:
        """What the next stage may take of this one, None for nothing."""
        if self.linears is None:
            return None
        copy = replace(self.linears, linears={**self.linears.linears})
        return KeptWeights(order=self.order, stamp=self.stamp, linears=copy)

    def fits(self, order: StageOrder) -> bool:
        """Whether loading `order` now would give the same stage."""
        return self.order == order and self.stamp == stamp(order.folder)

    def part(self, order: StageOrder) -> LoadedStage | None:
        """Return what loading `order` now would give: this stage, or a part of it."""
        return next((one for one in (self, *self.parts) if one.fits(order)), None)

    def lacks(self, order: StageOrder) -> list[StageOrder]:
        """Return the orders of what has to be loaded beside this stage to have that of `order`.

        There are none if it is no part of that stage, or cannot be joined to one.
        """
        own, whole = self.order.layers, order.layers
        alike = replace(self.order, layers=whole, is_tail=order.is_tail)
        is_part = whole.start <= own.start and own.end <= whole.end
        if self.moves is None or order.n_streamed or alike != order or not is_part:
            return []
        if self.stamp != stamp(order.folder):
            return []
        ranges = [(whole.start, own.start), (own.end, whole.end)]
        return [
            replace(order, layers=LayerRange(*ends), is_tail=order.is_tail and ends[1] == whole.end)
            for ends in ranges
            if ends[0] < ends[1]
        ]


def find_folder(model: str) -> Path | None:
    """Return the folder, or the GGUF file, that `model` names on this machine: the bundled model,
    an absolute path, a model of the Hub that was pulled, of Ollama's or LM Studio's store.

    None when there is none here.
    """
    if model == DEFAULT_MODEL_NAME or os.path.isabs(model):
        path = DEFAULT_MODEL_PATH if model == DEFAULT_MODEL_NAME else Path(model)
        return path if names_checkpoint(path) else None
    if model.startswith(LM_STUDIO):
        return find_in_lm_studio(model)
    if ollama := OllamaName.parse(model):
        return find_ollama(ollama)
    name = HubName.parse(model)
    return pulled_folder(name) if name is not None else None


def identify(path: Path) -> ModelFacts:
    """Read the headers of a checkpoint and identify its model. Reads no tensor.

    Unknown keys of its config are not refused: see `ModelFacts.check_known`.
    """
    stamped = stamp(path)
    checkpoint = Checkpoint.open(path, ignore_unknown=True)
    return ModelFacts(
        model_id=checkpoint.model_id,
        path=path,
        config=checkpoint.config,
        config_text=checkpoint.config_text,
        stamp=stamped,
        is_complete=checkpoint.journal is None,
        stored_dtype=stored_dtype(checkpoint),
        linear_dtype=linear_dtype(checkpoint),
        packed=packed_sizes(checkpoint),
        form=checkpoint.form,
        size_bytes=checkpoint.size_bytes,
        unknown_keys=checkpoint.unknown_keys,
        recommended=read_recommended(path),
        layers=stored_layers(checkpoint),
    )


def identify_at(model: str, *, ignore_unknown: bool = False) -> ModelFacts:
    """Identify the checkpoint that `model` names on this machine.

    Raises CheckpointError if there is none, or it is damaged, UnsupportedModelError if its config
    has unknown keys, unless `ignore_unknown`.
    """
    folder = find_folder(model)
    if folder is None:
        raise CheckpointError(f"there is no checkpoint folder at {model}")
    facts = identify(folder)
    if not ignore_unknown:
        facts.check_known()
    return facts


def check_model_id(path: Path, found: str, planned: str) -> None:
    """Raise CheckpointError if the model `found` at `path` is not the `planned` one."""
    if found != planned:
        raise CheckpointError(
            f"{path} holds model {found[:12]}, but the plan was made for {planned[:12]}: it has "
            "changed since, or differs between nodes"
        )


def check_layers(config: ModelConfig, layers: LayerRange) -> None:
    """Raise UsageError if a model does not have all of `layers`."""
    if layers.end > config.n_layers:
        raise UsageError(f"layers {layers} were ordered, and the model has {config.n_layers}")


def _check_order(order: StageOrder, config: ModelConfig) -> None:
    """Raise UsageError if no ring with the model of `config` has the stage of `order`."""
    check_layers(config, order.layers)
    if order.is_tail != (order.layers.end == config.n_layers):
        place = "the last one" if order.is_tail else "not the last one"
        raise UsageError(
            f"layers {order.layers} of {config.n_layers} were ordered for a stage that is {place}"
        )
    if order.context > config.max_positions:
        raise UsageError(
            f"a context of {order.context} was ordered, and the model has {config.max_positions} "
            "positions at most",
            remedy="lower --context",
        )


def config_text(facts: ModelFacts) -> str:
    """Return the text of a checkpoint's config, for a node that has no checkpoint.

    Raises CheckpointError when it is larger than 1 MiB.
    """
    text = facts.config_text
    if len(text) > MAX_CONFIG_TEXT:
        raise CheckpointError(
            f"{facts.path}: its config has {len(text)} characters, at most 1 MiB can be sent"
        )
    return text


def stamp(path: Path) -> Stamp:
    """Return name, size and modification time (ns) of every file of a checkpoint.

    The stamp of a replica changes only when tensors that it held are replaced: added tensors change
    nothing that was loaded before. Raises CheckpointError if the folder cannot be read.
    """
    journal = Journal.find(path) if path.is_dir() else None
    if journal is not None:
        return (("replica", journal.n_dropped, 0),)
    try:
        files = gguf_files(path) if path.is_file() else [path / n for n in folder_entries(path)]
        files = sorted(file for file in files if file.is_file())
        return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}", remedy="check the path of --model"
        ) from error


def load(
    order: StageOrder,
    memory_bytes: int,
    progress: Callable[[int, int], None],
    packs: Path | None = None,
    plugin: ComputePlugin | None = None,
    prefixes: PrefixStore | None = None,
    held_bytes: int = 0,
    kept: KeptWeights | None = None,
) -> LoadedStage:
    """Load one stage into at most `memory_bytes`, its KV cache included, with torch or a `plugin`.

    Until it is in use another one holds `held_bytes`, beside which its weights must fit. What is
    `kept` of another stage of the same model, loaded in the same form, is not read again.

    Quantised weights are cached below the folder `packs`, finished prompts in `prefixes`.
    `progress` is called with (bytes done, total bytes) and may raise to cancel.

    Raises CheckpointError if the checkpoint is not the one in the plan, UsageError if its model has
    no such stage, CapacityError if the stage does not fit its memory, and the errors of reading the
    checkpoint.
    """
    started = time.perf_counter()
    stamped = stamp(order.folder)
    checkpoint = Checkpoint.open(order.folder, ignore_unknown=order.ignore_unknown)
    check_model_id(order.folder, checkpoint.model_id, order.model_id)
    _check_order(order, checkpoint.config)
    job = StageJob(
        order=order,
        checkpoint=checkpoint,
        sampler=_sampler(order.folder, checkpoint.config) if order.is_tail else None,
        memory_bytes=memory_bytes,
        progress=progress,
        held_bytes=held_bytes,
    )
    stored, arithmetic, linears = None, "", None
    if plugin is not None:
        loaded = plugin.load(job)
    else:
        had = kept.linears if kept is not None and kept.serves(order, stamped) else None
        del kept
        cache = _pack_cache(order, stamped, packs)
        loaded, stored, arithmetic, linears = _load_with_torch(job, cache, prefixes, had)
    return LoadedStage(
        order=order,
        stamp=stamped,
        compute=loaded.compute,
        weight_bytes=loaded.weight_bytes,
        room_blocks=loaded.room_blocks,
        load_s=time.perf_counter() - started,
        kernel=loaded.kernel,
        exact_rows=loaded.exact_rows,
        prefixes=stored,
        arithmetic=arithmetic,
        moves=getattr(loaded.compute, "moves", None),
        linears=linears,
    )


def _load_with_torch(
    job: StageJob,
    packs: PackCache | None,
    prefixes: PrefixStore | None,
    had: KeptLinears | None,
) -> tuple[PluggedStage, StagePrefixes | None, str, KeptLinears | None]:
    """Load a stage as a plug-in does, with linears that were `had`; return its prefixes on disk,
    its arithmetic and its linears, too.
    """
    from shardnet.runtime.stage.torch_compute import StreamingCompute, TorchCompute

    model, room_blocks = _load_model(job, packs, had)
    release_freed_memory()  # quantising leaves some behind
    make_compute = StreamingCompute if model.streams else TorchCompute
    arithmetic, kept = _prefixes(job.order, model, prefixes)
    plugged = PluggedStage(
        compute=make_compute(model, job.sampler, WireDType.own(job.order.dtype), kept),
        weight_bytes=model.weight_bytes,
        room_blocks=room_blocks,
        kernel=model.kernel,
        exact_rows=model.exact_rows,
    )
    return plugged, kept, arithmetic, model.linears


def _prefixes(
    order: StageOrder, model: StageModel, store: PrefixStore | None
) -> tuple[str, StagePrefixes | None]:
    """Return the stage's arithmetic and its prefixes on disk: "" and None where none are kept.

    Where layers keep a state there are none: it is that after the last position only.
    """
    if store is None or model.kv.has_states:
        return "", None
    from shardnet.runtime.stage.arithmetic import arithmetic_of
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes

    arithmetic = arithmetic_of(model)
    identity = [order.model_id, str(order.layers), order.dtype.value, order.kv_dtype.value]
    identity += [order.quantization.value if order.quantization else "", str(order.context)]
    files = store.of_stage(json.dumps([*identity, arithmetic]), order.model, order.layers.words)
    return arithmetic, StagePrefixes(model.kv, files)


def _load_model(
    job: StageJob, packs: PackCache | None, had: KeptLinears | None
) -> tuple[StageModel, int]:
    """Load the layers of an order. Returns them and their KV room in blocks; raises as `load`."""
    import torch

    from shardnet.model.kernels.linear import probe
    from shardnet.stage.load import load_stage

    order, checkpoint = job.order, job.checkpoint
    config, device = checkpoint.config, torch.device(order.device)
    choice = probe(device, order.dtype, config.checkpoint_dtype, order.quantization, order.arith)
    room_blocks = kv_room_blocks(
        config,
        order.layers,
        weight_form(checkpoint, choice),
        order.context,
        job.memory_bytes,
        order.kv_dtype,
        order.n_streamed,
        device=device.type,
        held_bytes=job.held_bytes,
    )
    model = load_stage(
        checkpoint,
        order.layers,
        choice=choice,
        device=device,
        room_blocks=room_blocks,
        context=order.context,
        progress=job.progress,
        packs=packs,
        kv_dtype=order.kv_dtype,
        n_streamed=order.n_streamed,
        kept=had,
    )
    return model, room_blocks


def _sampler(path: Path, config: ModelConfig) -> Sampler:
    """Make the tail's sampler, which never draws ids without a token (padded vocabularies)."""
    from shardnet.model.sampling.sampler import Sampler
    from shardnet.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load_optional(path)
    if tokenizer is None:
        return Sampler(config.vocab_size, ())
    with tokenizer:
        return Sampler(config.vocab_size, tokenizer.ids_without_token(config.vocab_size))


def _pack_cache(order: StageOrder, stamped: Stamp, folder: Path | None) -> PackCache | None:
    """Return the cache of quantised weights of these files; None without quantisation."""
    if folder is None or order.quantization is None:
        return None
    from shardnet.stage.pack_cache import PackCache

    identity = json.dumps([order.model_id, str(order.folder), stamped, order.dtype.value])
    packs = PackCache(folder, identity, order.model, order.quantization)
    packs.touch()
    return packs


def set_compute_threads(n_threads: int) -> None:
    """Set the number of threads of torch operators called from this thread."""
    import torch

    torch.set_num_threads(n_threads)


def release_freed_memory() -> None:
    """Return freed memory to the system that torch (on a GPU) or the C library would keep."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        import ctypes
        import ctypes.util

        library = ctypes.CDLL(ctypes.util.find_library("c"))
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)


def kv_room_blocks(
    config: ModelConfig,
    layers: LayerRange,
    form: WeightForm,
    context: int,
    memory_bytes: int,
    kv_dtype: KvDType = KvDType.AUTO,
    n_streamed: int = 0,
    *,
    device: str = "cpu",
    held_bytes: int = 0,
) -> int:
    """Return the KV blocks that fit into `memory_bytes` beside weights and activations.

    `n_streamed` of the layers are streamed from disk. On a CUDA `device` graphs take room as well.

    Raises CapacityError if they do not hold one context, and if weights and activations do not fit
    beside `held_bytes`, which are given back later.
    """
    weights = stage_weight_bytes(config, layers, form, n_streamed)
    rows, dtype = PREFILL_CHUNK_ROWS, form.dtype
    activations = activation_peak_bytes(config, layers, rows, dtype, context, kv_dtype)
    if n_streamed:
        activations += waiting_bytes(config, rows, dtype, context)
    if device == "cuda":
        activations += graph_bytes(
            config, dtype, form.quantization, is_packed=form.packed is not None
        )
    fixed = weights + activations + state_bytes(config, layers, dtype)
    block_bytes = kv_block_bytes(config, layers, dtype, kv_dtype)
    needed = blocks_for(context) * block_bytes
    if fixed + needed > memory_bytes:
        raise CapacityError(
            f"{layers.words} need {fixed + needed} bytes for a context of {context}, and this "
            f"node may use {memory_bytes}",
            remedy="lower --context, raise --memory or give it fewer layers",
        )
    if fixed + held_bytes > memory_bytes:
        raise CapacityError(
            f"{layers.words} need {fixed} bytes beside {held_bytes} of the stage that is in use, "
            f"and this node may use {memory_bytes}",
            remedy="raise --memory",
        )
    most = MAX_ROOM_POSITIONS // BLOCK_POSITIONS
    return min((memory_bytes - fixed) // block_bytes, most) if block_bytes else most
