"""From a checkpoint on disk to a stage that computes.

Knows the order of work: open, identify, check what fits, load the range, set up cache and sampler.
Runs on the loading thread. Must not know rings, links or the event loop.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.checkpoint.adapters.layer_files import with_adapters
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import table_tensors
from shardnet.errors import CapacityError, UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import family_of
from shardnet.model.shards.cut import Cut
from shardnet.runtime.loading.loaded_stage import KeptWeights, LoadedStage
from shardnet.runtime.loading.model_facts import Stamp, check_model_id, stamp, tower_of
from shardnet.runtime.stage.compute import ComputePlugin, PluggedStage, StageJob
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage.estimate.memory_estimate import (
    KEPT_ROWS_BYTES,
    WeightForm,
    activation_peak_bytes,
    attention_weights,
    graph_bytes,
    kv_block_bytes,
    least_state_bytes,
    stage_weight_bytes,
    state_bytes,
    waiting_bytes,
)
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.types import (
    BLOCK_POSITIONS,
    LEAST_STATES,
    PREFILL_CHUNK_ROWS,
    STATE_POSITIONS,
    KvDType,
    LayerRange,
    WireDType,
    blocks_for,
)

if TYPE_CHECKING:
    from shardnet.model.devices.device_layers import Device
    from shardnet.model.sampling.sampler import Sampler
    from shardnet.model.shards.group import ShardGroup
    from shardnet.stage.kept_linears import KeptLinears
    from shardnet.stage.moves.slot_moves import SlotMoves
    from shardnet.stage.prefixes.prefix_store import PrefixStore
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
    from shardnet.stage.stage_audit import StageAudit
    from shardnet.stage.stage_model import StageModel


MAX_ROOM_POSITIONS = 1 << 20
"""KV room is never booked beyond this many positions, however much memory there is."""


_M_ARENA_MAX = -8
"""The number by which glibc's mallopt knows how many heaps there may be."""


Packs = tuple[Path | None, tuple[object, ...]]
"""Where quantised weights are cached, and what they are of."""


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
    if order.form.context > config.max_positions:
        raise UsageError(
            f"a context of {order.form.context} was ordered, and the model has "
            f"{config.max_positions} positions at most",
            remedy="lower --context",
        )
    if order.border_width not in (0, config.row_width):
        raise UsageError(
            f"rows of {order.border_width} columns were ordered between stages, and here the "
            f"model's have {config.row_width}",
            remedy="run the same release of shardnet, and of transformers, on all nodes",
        )
    is_cut = any(part.shards for part in order.by_device)
    if order.form.mtp and is_cut:  # they would follow no drafting
        raise mtp_not_cut("", "give --tensor-parallel 1, or leave --mtp out")
    if order.adapters and is_cut:
        raise adapters_not_cut()


def adapters_not_cut() -> UsageError:
    """Return the error of a ring with adapters whose stages are cut over devices."""
    return UsageError(
        "--lora: the linears of an adapter cannot be cut over devices",
        remedy="give --tensor-parallel 1, or merge the adapter into the model",
    )


def mtp_not_cut(node: str, remedy: str) -> UsageError:
    """Return the error of a ring that drafts where a node, if named, cuts layers over devices."""
    where = f", as {node} does" if node else ""
    return UsageError(
        f"--speculate mtp: what predicts further tokens cannot be cut over devices{where}",
        remedy=remedy,
    )


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
    stamped, checkpoint = stamp(order.folder), _opened(order)
    _check_order(order, checkpoint.config)
    job = StageJob(
        order=order,
        checkpoint=checkpoint,
        sampler=_sampler(order.folder, checkpoint.config) if order.is_tail else None,
        memory_bytes=memory_bytes,
        progress=progress,
        held_bytes=held_bytes,
    )
    stored, arithmetic, model = None, "", None
    if plugin is not None:
        loaded = plugin.load(job)
    elif checkpoint.config.outline is not None:
        from shardnet.runtime.loading.by_modules import load_by_modules

        loaded = load_by_modules(job)
    else:
        had = kept.linears if kept is not None and kept.serves(order, stamped) else None
        del kept
        cached = (packs, _packed_from(order, stamped))
        loaded, stored, arithmetic, model = _load_with_torch(job, cached, prefixes, had)
    return LoadedStage(
        order=order,
        stamp=stamped,
        compute=loaded.compute,
        weight_bytes=loaded.weight_bytes,
        room_blocks=loaded.room_blocks,
        room_states=loaded.room_states,
        load_s=time.perf_counter() - started,
        kernel=loaded.kernel,
        exact_rows=loaded.exact_rows,
        prefixes=stored,
        arithmetic=arithmetic,
        shares_blocks=model is not None and model.followers is None and model.kv.shares,
        moves=loaded.moves or getattr(loaded.compute, "moves", None),
        linears=model.linears if model is not None else None,
        audit=_audit(order, model),
        experts=model.experts if model is not None else None,
        tables=model.tables if model is not None else (),
    )


def follow(order: StageOrder, room_blocks: int) -> SlotMoves:
    """Make what takes in the sequences of the stage of an order, until that is loaded.

    Raises CheckpointError if the checkpoint is not the one in the plan.
    """
    import torch

    from shardnet.stage.load import choose_kernels, kv_cache
    from shardnet.stage.moves.slot_moves import SlotMoves

    checkpoint, device = _opened(order), torch.device(order.device.torch)
    choice = choose_kernels(checkpoint, order.form, order.arith, device)
    kv = kv_cache(checkpoint.config, order.layers, choice, device, room_blocks)
    return SlotMoves(kv, order.caching, {})


def _opened(order: StageOrder) -> Checkpoint:
    """Open the checkpoint of an order. Raises CheckpointError if it is not the one in the plan."""
    checkpoint = order.opened()
    check_model_id(order.folder, checkpoint.model_id, order.form.model_id)
    if order.form.mtp:
        checkpoint.use_mtp()
    return checkpoint


def _audit(order: StageOrder, model: StageModel | None) -> StageAudit | None:
    """Return what looks for wrong bits in a stage: in none whose devices share layers."""
    if model is None or model.followers is not None:
        return None
    from shardnet.stage.stage_audit import StageAudit

    return StageAudit(model, order.form.dtype)


def _load_with_torch(
    job: StageJob,
    packs: Packs,
    prefixes: PrefixStore | None,
    had: KeptLinears | None,
) -> tuple[PluggedStage, StagePrefixes | None, str, StageModel]:
    """Load a stage as a plug-in does, with linears that were `had`; return its prefixes on disk,
    its arithmetic and its model, too.
    """
    import torch

    from shardnet.runtime.shards.spanning_stage import LinkGroup, SpanningCompute
    from shardnet.runtime.stage.torch_compute import StreamingCompute, TorchCompute

    order, group = job.order, None
    if order.n_nodes > 1:
        if order.shards or order.parts:
            raise UsageError(
                "a stage that spans several nodes has one device of each",
                remedy="name one --device on these nodes, or use --nodes-per-stage 1",
            )
        group = LinkGroup(order.shard, order.n_nodes, order.form.gather_dtype)
    model, room = _load_model(job, packs, had, group)
    release_freed_memory()  # quantising leaves some behind
    if order.device.torch == "mps":
        torch.mps.empty_cache()  # on the thread that uses it alone
    make_compute = StreamingCompute if model.streams else TorchCompute
    arithmetic, kept = _prefixes(order, model, prefixes)
    weight_bytes = model.weight_bytes
    if group is not None:  # what of them is on this node
        cut = cut_of(model.config, order.shard, order.n_nodes, order.shares)
        weight_bytes = math.ceil(weight_bytes * cut.share(attention_weights(model.config)))
    compute = make_compute(model, job.sampler, WireDType.own(order.form.dtype), kept)
    plugged = PluggedStage(
        compute=compute
        if group is None
        else SpanningCompute(compute, group, first=compute if order.layers.start == 0 else None),
        weight_bytes=weight_bytes + (model.encoder.weight_bytes if model.encoder else 0),
        room_blocks=room.blocks,
        room_states=room.states,
        kernel=model.kernel,
        exact_rows=model.exact_rows,
        moves=compute.moves,
    )
    return plugged, kept, arithmetic, model


def _prefixes(
    order: StageOrder, model: StageModel, store: PrefixStore | None
) -> tuple[str, StagePrefixes | None]:
    """Return the stage's arithmetic and its prefixes on disk: "" and None where none are kept."""
    if store is None or order.form.gather_dtype is not None:  # rounded as the stage is cut
        return "", None
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
    from shardnet.stage.stage_audit import arithmetic_of

    arithmetic, form = arithmetic_of(model), order.form
    identity = [form.model_id, str(order.layers), form.dtype.value, form.kv_dtype]
    identity += ["mtp"] if form.mtp and order.is_tail else []
    identity += [form.quant, str(form.context), arithmetic]
    identity += [order.share] if order.share else []
    files = store.of_stage(json.dumps(identity), form.model, order.layers.words)
    return arithmetic, StagePrefixes(model.kv, files)


def _load_model(
    job: StageJob,
    packs: Packs,
    had: KeptLinears | None,
    group: ShardGroup | None,
) -> tuple[StageModel, KvRoom]:
    """Load the layers of an order, of a shard its own part. Raises as `load`.

    Returns them and their KV room.
    """
    import torch

    from shardnet.stage.adapters.adapted_linear import LoadedAdapter
    from shardnet.stage.load import choose_kernels, load_stage
    from shardnet.stage.packs.pack_cache import PackCache

    order, checkpoint, form = job.order, job.checkpoint, job.order.form
    has_tower = order.layers.start == 0 and order.shard == 0
    mmproj = Path(form.mmproj) if form.mmproj else None
    tower = tower_of(checkpoint, mmproj) if has_tower else None
    adapters = [LoadedAdapter.read(each.adapter_id, each.files) for each in order.adapters]
    config, device = with_adapters(checkpoint.config, adapters), torch.device(order.device.torch)
    choice = choose_kernels(checkpoint, form, order.arith, device)
    beside_bytes = tower.weight_bytes(choice.dtype) if tower is not None else 0
    if device.type != "cuda" and checkpoint.missing(table_tensors(checkpoint, order.layers)):
        beside_bytes += KEPT_ROWS_BYTES
    n_here, n_shards = len(order.shards) or 1, len(order.shards) or order.n_nodes
    room = kv_room(
        config,
        order.layers,
        weight_form(checkpoint, choice),
        form.context,
        # each shard has room for what is whole in all of them
        (job.memory_bytes - beside_bytes) // n_here,
        choice.kv_form,
        order.n_streamed,
        device=device.type,
        held_bytes=job.held_bytes,
        cut=cut_of(config, order.shard, n_shards, order.shares) if n_shards > 1 else None,
    )
    folder, files = packs
    if order.shards:
        from shardnet.runtime.shards.load_shard import load_leading

        progress = job.progress
        model = load_leading(
            order, checkpoint, choice, room.blocks, packs=folder, files=files, progress=progress
        )
    else:
        model = load_stage(
            checkpoint,
            order.layers,
            choice=choice,
            device=device,
            room_blocks=room.blocks,
            context=form.context,
            progress=job.progress,
            packs=PackCache.used(folder, json.dumps(files), form),
            n_streamed=order.n_streamed,
            kept=had,
            group=group,
            shares=order.shares,
            adapters=adapters,
            on=_device_of(order) if group is None else None,
        )
    if tower is not None:
        from shardnet.stage.load import load_encoder

        model.encoder = load_encoder(tower, choice=choice, device=device, progress=job.progress)
    return model, room


def _device_of(order: StageOrder) -> Device | None:
    """Return the device on which the kernel text computes a stage, None for none."""
    if not order.device.driver:
        return None
    from shardnet.model.devices.bits import open_device

    return open_device(order.device.driver)


def cut_of(config: ModelConfig, index: int, size: int, shares: Sequence[int] = ()) -> Cut:
    """Return which part of a model shard `index` of `size` has, by the `shares` of all."""
    whole_heads = family_of(config).has_whole_heads
    return Cut.of(config, index, size, shares, has_whole_heads=whole_heads)


def _sampler(path: Path, config: ModelConfig) -> Sampler:
    """Make the tail's sampler, which never draws ids without a token (padded vocabularies)."""
    from shardnet.model.sampling.sampler import Sampler
    from shardnet.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load_optional(path)
    if tokenizer is None:
        return Sampler(config.vocab_size, ())
    with tokenizer:
        return Sampler(config.vocab_size, tokenizer.ids_without_token(config.vocab_size))


def _packed_from(order: StageOrder, stamped: Stamp) -> tuple[object, ...]:
    """Say from what weights are quantised: what is cached belongs to these files."""
    share = [order.share] if order.share else []
    return order.form.model_id, str(order.folder), stamped, order.form.dtype.value, *share


def set_compute_threads(n_threads: int) -> None:
    """Set the number of threads of torch operators called from this thread."""
    import torch

    torch.set_num_threads(n_threads)


def release_freed_memory() -> None:
    """Return freed memory to the system that torch (on a GPU) or the C library would keep."""
    gc.collect()
    if "torch" in sys.modules:
        from shardnet.model.kernels.devices import release_cached

        release_cached()
    trim_heap()


def trim_heap() -> None:
    """Return freed memory that the C library keeps to the system."""
    if hasattr(library := _c_library(), "malloc_trim"):
        library.malloc_trim(0)


def keep_one_heap() -> None:
    """Have threads that begin later allocate from the first one's heap, where that is glibc's.

    Each would have one of its own, the end of which, of up to 64 MiB, is never trimmed.
    """
    if hasattr(library := _c_library(), "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)


def _c_library() -> object:
    """Return the C library on Linux, None elsewhere."""
    import ctypes

    return ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRoom:
    """What a stage has room for: blocks of keys and values, and states of layers that keep one."""

    blocks: int
    states: int


def kv_room(
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
    cut: Cut | None = None,
) -> KvRoom:
    """Return what fits into `memory_bytes` beside weights and activations.

    `n_streamed` of the layers are streamed from disk. On a CUDA `device` graphs take room as well.
    With a `cut` they are those of one shard: its part of the weights, the heads of its own.

    Raises CapacityError if they do not hold one context, and if weights and activations do not fit
    beside `held_bytes`, which are given back later.
    """
    weights = stage_weight_bytes(config, layers, form, n_streamed)
    if cut is not None:
        weights = math.ceil(weights * cut.share(attention_weights(config)))
        config = cut.own_config(config)
    rows, dtype = PREFILL_CHUNK_ROWS, form.dtype
    activations = activation_peak_bytes(config, layers, rows, dtype, context, kv_dtype)
    if n_streamed:
        activations += waiting_bytes(config, rows, dtype, context)
    if device == "cuda":
        activations += graph_bytes(config, dtype)
    one_state = state_bytes(config, layers, dtype)
    fixed = weights + activations + least_state_bytes(config, layers, dtype)
    block_bytes = kv_block_bytes(config, layers, form.kv, kv_dtype, dtype)
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
    return _room(memory_bytes - fixed, block_bytes, one_state, blocks_for(context))


def _room(n_bytes: int, block_bytes: int, state_bytes: int, least_blocks: int) -> KvRoom:
    """Share memory between blocks and states beyond the least: so many positions for each state."""
    most = MAX_ROOM_POSITIONS // BLOCK_POSITIONS
    each = STATE_POSITIONS // BLOCK_POSITIONS
    blocks = n_bytes // (block_bytes + state_bytes / each) if block_bytes or state_bytes else most
    blocks = min(max(int(blocks), least_blocks), most)
    left, most_states = n_bytes - blocks * block_bytes, LEAST_STATES + most // each
    more = left // state_bytes if state_bytes else most_states
    return KvRoom(blocks=blocks, states=min(LEAST_STATES + max(0, more), most_states))
