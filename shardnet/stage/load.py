"""Loads a range of layers of a checkpoint as a stage, or one shard of it.

Knows which requests are refused before anything is read, in which order parts are loaded, which
rows of which parameter a shard has, and what is gathered around a linear. Must not know wire,
threads or who asked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from shardnet.checkpoint.adapters.layer_files import with_adapters
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import Pictures
from shardnet.errors import CapacityError, ConfigurationError, UnsupportedModelError, UsageError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_layers import Device
from shardnet.model.families.family import FamilyStage
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import StageTensors, stage_tensors
from shardnet.model.families.tensor_shapes import Table as Shapes
from shardnet.model.fused.decode_graphs import Capture
from shardnet.model.fused.decoder import DecoderStage, StageInputs
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.linear import MAX_EXACT_ROWS, Kernel, KernelChoice, Linear, probe
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import (
    LinearOptions,
    RowsOf,
    StoredTable,
    Table,
    WeightSource,
    WholeSource,
)
from shardnet.model.shards.cut import Axis, Cut, stays_whole
from shardnet.model.shards.gathered import GatheredLinear, GatheredTable
from shardnet.model.shards.group import ShardGroup
from shardnet.model.vision.tower import TowerEncoder
from shardnet.stage.adapters.adapted_linear import ActiveAdapters, AdaptedWeights, LoadedAdapter
from shardnet.stage.estimate.memory_estimate import stage_weight_bytes, streamed_layers
from shardnet.stage.estimate.packed_sizes import packed_sizes
from shardnet.stage.estimate.stored_dtype import check_streamable, stored_dtype, weight_form
from shardnet.stage.kept_linears import KeptLinears
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.shards.leading_kv import Followers, LeadingKvCache
from shardnet.stage.stage_model import StageModel
from shardnet.stage.tensor_reader import Progress
from shardnet.stage.weights import StageWeights
from shardnet.stage_form import StageForm
from shardnet.types import Arith, KvDType, LayerRange

log = logging.getLogger(__name__)


def choose_kernels(
    checkpoint: Checkpoint, form: StageForm, arith: Arith, device: torch.device
) -> KernelChoice:
    """Choose the dtype and kernels of a ring's stage of a checkpoint on a device."""
    packed, own = packed_sizes(checkpoint), checkpoint.config.indexer
    if own is not None and own.n_axes and form.kv_dtype == KvDType.INT8.value:
        raise UnsupportedModelError(
            f"--kv-dtype int8: {checkpoint.config.family} caches positions behind values, which "
            "int8 would round"
        )
    choice = probe(
        device,
        form.dtype,
        checkpoint.config.checkpoint_dtype,
        Quantization.named(form.quant),
        arith,
        is_packed=packed is not None and packed.is_all,
    )
    return replace(choice, kv_form=KvDType(form.kv_dtype))


@torch.inference_mode()
def load_stage(
    checkpoint: Checkpoint,
    layers: LayerRange,
    *,
    choice: KernelChoice,
    device: torch.device,
    room_blocks: int,
    progress: Progress,
    context: int | None = None,
    packs: PackCache | None = None,
    n_streamed: int = 0,
    capture: Capture | None = None,
    kept: KeptLinears | None = None,
    group: ShardGroup | None = None,
    shares: Sequence[int] = (),
    followers: Followers | None = None,
    adapters: Sequence[LoadedAdapter] = (),
    on: Device | None = None,
) -> StageModel:
    """Load `layers` onto `device`, with the embedding in the first stage and the head in the last.

    `room_blocks` is the capacity of the KV cache in blocks of 256 positions, `context` the limit of
    positions per sequence (None: the model's, at most 8192). `packs` caches quantised weights,
    which may be written while the stage computes already. `n_streamed` layers stay on disk.
    `capture` is that of StageInputs. `kept` are linears of a stage of the same model, loaded
    with the same choice: they are taken from there. With a `group` this is a shard of the stage,
    with the heads of its own, by the `shares` of all of them, () for equal ones, and with
    `followers` the first one, as which others do. With `on`, the kernel text computes there what it
    can of a stage whose `device` is the CPU.
    `progress` is called with (bytes done, bytes in total) after every part; an exception it raises
    aborts the loading and releases everything.

    Raises CheckpointError for tensors that do not match the config, UsageError for layers that the
    model does not have and for layers that cannot be streamed, CapacityError if memory runs out or
    `context` exceeds the model's positions.
    """
    config = checkpoint.config
    context = config.default_context if context is None else context
    _check_asked(config, layers, context)
    streamed = streamed_layers(layers, n_streamed)
    if streamed:
        _check_streamed(checkpoint, choice, device, packs)
    dtype = torch_dtype(choice.dtype)
    too_much = f"{device} has no memory for {layers.words} in {choice.dtype.value}"
    with (
        _log_reads(checkpoint),
        capacity_error_for(too_much, remedy="give the node fewer layers"),
    ):
        tensors = stage_tensors(config, layers)
        weights = StageWeights(checkpoint, tensors, choice, device, progress, packs, streamed, kept)
        own, cut = config, None
        active = ActiveAdapters()
        adapted = AdaptedWeights(weights, config, adapters, active, device) if adapters else None
        whole: WholeSource = adapted or weights
        source: WeightSource = whole
        if group is not None:
            whole_heads = family_of(config).has_whole_heads
            cut = Cut.of(config, group.index, group.size, shares, has_whole_heads=whole_heads)
            own = cut.own_config(config)
            source = ShardWeights(whole, tensors.all, cut, group)
        with weights.writer:
            inputs = StageInputs(own, layers, source, context, dtype, device, capture)
            family = family_of(own).load_stage(inputs)
        if adapted is not None:
            adapted.check_all_used()
    kv = kv_cache(own, layers, choice, device, room_blocks, cut, followers, on)
    if on is not None:
        with capacity_error_for(f"{on.driver.description} has no memory for {layers.words}"):
            choice = replace(choice, by_text=_compute_on(on, family, kv, layers))
    most = weights.exact_rows if family.is_exact(kv) else MAX_EXACT_ROWS
    weights.stream.start()
    if weights.experts is not None:
        weights.experts.start()
    form = weight_form(checkpoint, choice)
    forms = _stored_forms(checkpoint, tensors)
    choice = replace(choice, stored_forms=forms)
    if forms and choice.quant is not None:
        kind = choice.quant.value
        log.info("weights stored as %s are quantised again, to %s", " and ".join(forms), kind)
    return StageModel(
        family,
        config,
        layers,
        choice,
        kv,
        context=context,
        exact_rows=min(most, weights.exact_rows),
        weight_bytes=stage_weight_bytes(
            with_adapters(config, adapters), layers, form, weights.stream.n_layers
        ),
        stream=weights.stream,
        writer=weights.writer,
        linears=weights.made if followers is None else None,
        group=group,
        followers=followers,
        cut=cut,
        adapters=active,
        adapter_ids=frozenset(adapter.adapter_id for adapter in adapters),
        digests=weights.digests,
        experts=weights.experts,
        tables=tuple(weights.tables),
    )


def _stored_forms(checkpoint: Checkpoint, tensors: StageTensors) -> tuple[str, ...]:
    """Name the forms of most of the weights that stay packed, at most two."""
    n_bytes: Counter[str] = Counter()
    for name in tensors.all:
        tensor = checkpoint.tensors[name]
        if tensor.packed is not None:
            n_bytes[tensor.packed.form.name] += tensor.size_bytes
    return tuple(form for form, _ in n_bytes.most_common(2))


def _check_asked(config: ModelConfig, layers: LayerRange, context: int) -> None:
    """Raise UsageError for layers, CapacityError for positions that the model does not have."""
    if layers.end > config.n_layers:
        raise UsageError(
            f"layers {layers} were asked for, the model has {config.n_layers}",
            remedy=f"give ranges that end at {config.n_layers}",
        )
    if context > config.max_positions:
        raise CapacityError(
            f"a context of {context} was asked for, the model has {config.max_positions} positions",
            remedy="ask for a shorter --context",
        )


@contextmanager
def _log_reads(checkpoint: Checkpoint) -> Iterator[None]:
    """Log how much of each file is read inside."""
    before = dict(checkpoint.bytes_read)
    yield
    for file, size_bytes in checkpoint.bytes_read.items():
        if size_bytes > before[file]:
            log.info("read %d tensor bytes of %s", size_bytes - before[file], file)


def kv_cache(
    config: ModelConfig,
    layers: LayerRange,
    choice: KernelChoice,
    device: torch.device,
    room_blocks: int,
    cut: Cut | None = None,
    followers: Followers | None = None,
    on: Device | None = None,
) -> KvCache:
    """Make the KV cache that a stage has: see load_stage."""
    has_mtp = config.has_mtp and layers.end == config.n_layers
    numbers = [*layers, config.n_layers] if has_mtp else [*layers]
    usual = config.usual_heads
    arguments = (
        len(numbers),
        usual.n_kv_heads,
        usual.key_size,
        torch_dtype(choice.dtype),
        device,
        room_blocks,
        [config.window(layer) for layer in numbers],
        usual.value_size,
        choice.kv_form,
        [config.state(layer) for layer in numbers],
        config.uneven_heads(numbers),
        torch_dtype(choice.kv_dtype),
    )
    if cut is None or followers is None:
        return KvCache(*arguments) if on is None else DeviceKvCache(*arguments)
    return LeadingKvCache(*arguments, cut=cut, followers=followers)


def _compute_on(on: Device, family: FamilyStage, kv: KvCache, layers: LayerRange) -> str:
    """Have a device compute a stage; return its name, "" if the CPU has to."""
    assert isinstance(kv, DeviceKvCache)
    why = "this family"
    try:
        if isinstance(family, DecoderStage):
            why = family.compute_on(on, kv)
    except ConfigurationError as error:
        why = error.message
    if not why:
        return on.driver.description
    instead = "; with --device cuda torch's GPU would" if on.driver.dialect == "cuda" else ""
    log.warning(
        "%s: the kernel text does not compute %s yet: the CPU does%s", layers.words, why, instead
    )
    return ""


def _check_streamed(
    checkpoint: Checkpoint, choice: KernelChoice, device: torch.device, packs: PackCache | None
) -> None:
    """Raise UsageError or CheckpointError if layers cannot be streamed."""
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"--stream-layers: {device.type} cannot stream layers",
            remedy="start the node with --device cpu",
        )
    if choice.quant is None:
        found, packed = stored_dtype(checkpoint), packed_sizes(checkpoint)
        check_streamable(checkpoint.path, found, packed, choice.stored_dtype)
    elif packs is None:
        raise UsageError("--stream-layers: quantised weights are not cached on disk here")


@torch.inference_mode()
def load_encoder(
    pictures: Pictures, *, choice: KernelChoice, device: torch.device, progress: Progress
) -> TowerEncoder:
    """Load tower and projector onto `device`. Their weights are never quantised again.

    `progress` is as in `load_stage`. Raises CheckpointError for tensors that do not match the
    config, CapacityError if memory runs out.
    """
    dtype = torch_dtype(choice.dtype)
    choice = replace(choice, quant=None)
    tensors = StageTensors(embedding={}, layers={0: pictures.table}, head={})
    too_much = f"{device} has no memory for the vision tower in {choice.dtype.value}"
    with capacity_error_for(too_much, remedy="give the node fewer layers"):
        weights = StageWeights(pictures.checkpoint, tensors, choice, device, progress)
        with weights.writer:
            tower = pictures.load(weights, dtype, device)
    return TowerEncoder(
        tower=tower,
        processor=pictures.processor,
        weight_bytes=pictures.weight_bytes(choice.dtype),
        dtype=dtype,
        device=device,
        is_batch_invariant=choice.kernel is Kernel.NATIVE,
    )


class ShardWeights:
    """The WeightSource of one shard: `weights`, cut as `cut` says.

    Norms, routers, other parameters that are never quantised, and what `stays_whole` are whole in
    every shard.
    """

    def __init__(self, weights: WholeSource, shapes: Shapes, cut: Cut, group: ShardGroup) -> None:
        """Take the source of the whole stage, whose parameters have these `shapes`."""
        self._weights = weights
        self._shapes = shapes
        self._cut = cut
        self._group = group
        self._kept: set[str] = set()
        """Parameters of which rows were chosen: a tied table is asked for twice."""

    def linear(self, *names: str, **how: Unpack[LinearOptions]) -> Linear:
        """See WeightSource."""
        transposed, outputs = how.get("transposed", False), how.pop("outputs", ())
        shapes = [self._shapes[f"{name}.weight"][:: -1 if transposed else 1] for name in names]
        n_outs, n_in = [n_out for n_out, _ in shapes], shapes[0][1]
        axes = outputs if self._cut.cuts(outputs) else ()
        in_ends = self._cut.input_ends(n_in, how.pop("inputs", None))
        is_whole = not axes and in_ends is None and stays_whole(sum(n_outs), n_in)
        if how.get("precise") or how.get("wide") or is_whole:
            return self._weights.linear(*names, **how)
        ranges = self._cut.rows(n_outs, axes)
        own = [name for name, some in zip(names, ranges, strict=True) if some]
        for name, some in zip(names, ranges, strict=True):
            for kind, axis in (("weight", 1 if transposed else 0), ("bias", 0)):
                self._keep(f"{name}.{kind}", some, axis)
        linear = self._weights.linear(*own, transposed=transposed)
        out_ends = None if axes else self._cut.output_ends(sum(n_outs))
        if in_ends is None and out_ends is None:
            return linear
        return GatheredLinear(linear, self._group, in_ends, out_ends)

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """See WeightSource."""
        return self._weights.norm(name, eps, offset)

    def table(self, name: str) -> Table:
        """See WeightSource."""
        weight = f"{name}.weight"
        n_rows, width = self._shapes[weight]
        ends = self._cut.output_ends(n_rows)
        if ends is None or stays_whole(n_rows, width):
            return self._weights.table(name)
        self._keep(weight, self._cut.rows([n_rows], ())[0], 0)
        return GatheredTable(self._weights.table(name), self._group, ends, width)

    def stored_table(self, *names: str, rows_of: RowsOf) -> StoredTable:
        """See WeightSource."""
        return self._weights.stored_table(*names, rows_of=rows_of)

    def token_classes(self) -> Tensor:
        """See WeightSource."""
        return self._weights.token_classes()

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        self._keep_of(f"{name}.weight", rows)
        return self._weights.matrix(name)

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """See WeightSource."""
        self._keep_of(name, rows)
        return self._weights.parameter(name)

    def _keep_of(self, name: str, rows: Axis | None) -> None:
        if rows is not None and self._cut.cuts((rows,)):
            self._keep(name, self._cut.rows([self._shapes[name][0]], (rows,))[0], 0)

    def _keep(self, name: str, ranges: Sequence[tuple[int, int]], axis: int) -> None:
        """Have only `ranges` of a parameter read, if the stage has it."""
        if name in self._shapes and name not in self._kept:
            self._kept.add(name)
            self._weights.keep(name, ranges, axis)
