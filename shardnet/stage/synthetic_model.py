"""A part of a model with random weights, to benchmark a device without a checkpoint.

Knows how much of a model is representative of all of it, and the parts of a step. The kernels are
those of a loaded stage. Must not know budgets or plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Unpack

import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_layers import Device
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import Shape, stage_tensors
from shardnet.model.fused.decoder import DecoderStage, StageInputs
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import synchronize
from shardnet.model.kernels.linear import KernelChoice, Linear, make_linear, probe
from shardnet.model.layers.attention import plan_step
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import (
    LinearOptions,
    PlainTable,
    RowsOf,
    StoredTable,
    Table,
    Text,
)
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.model.shards.cut import Axis
from shardnet.sampling_params import SamplingParams
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    head_weight_bytes,
    kv_block_bytes,
    layer_weight_bytes,
    least_state_bytes,
    stage_weight_bytes,
)
from shardnet.stage.tensor_reader import EXPERTS_OF_TOKENS
from shardnet.types import (
    BLOCK_POSITIONS,
    PREFILL_CHUNK_ROWS,
    DType,
    Epoch,
    KvDType,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
)

UNCACHED_BYTES = 96 * 2**20
"""Bytes of layers that exceed any CPU cache from one step to the next."""

MAX_HEAD_BYTES = 192 * 2**20
"""A larger LM head is cut down to this: a slice of the vocabulary."""

CONTEXT = 2 * BLOCK_POSITIONS
POSITION = BLOCK_POSITIONS
"""The position of a decode step's row: the number of keys it attends to."""

_SLOT = SlotId(0)
_NOISE_VALUES = (1 << 20) + 7
N_ROWS = 4096
"""Of a table in the place of one that is not loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The duration of each part of one step, in seconds.

    `plan_s` is preparing the step, `embed_s` the embedding, `layers_s` all layers of the sample,
    `head_s` norm and LM head over the sample's vocabulary, `sample_s` greedy sampling.
    """

    plan_s: float
    embed_s: float
    layers_s: float
    head_s: float
    sample_s: float


def mean_times(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the mean of each part over at least one step."""
    return StepTimes(
        plan_s=fmean(step.plan_s for step in steps),
        embed_s=fmean(step.embed_s for step in steps),
        layers_s=fmean(step.layers_s for step in steps),
        head_s=fmean(step.head_s for step in steps),
        sample_s=fmean(step.sample_s for step in steps),
    )


def synthetic_config(
    config: ModelConfig,
    form: WeightForm,
    memory_bytes: int,
    kv_dtype: KvDType = KvDType.AUTO,
    least_layers: int = 1,
) -> ModelConfig | None:
    """Cut the model down to what is measured; None if not even one layer fits `memory_bytes`.

    It has enough layers to exceed the CPU's cache, as the whole model does, or all layers, and a
    slice of the vocabulary if the LM head is huge. Both are cut down further to fit `memory_bytes`.
    Of `least_layers` each is a small part of what a step costs besides them.
    """
    n_layers = max(least_layers, -(-UNCACHED_BYTES // layer_weight_bytes(config, form)))
    row_bytes = config.row_width * form.dtype.size_bytes
    sample = replace(
        config.thinned(min(config.n_layers, n_layers)),
        vocab_size=min(config.vocab_size, max(1, MAX_HEAD_BYTES // row_bytes)),
        max_positions=CONTEXT,
    )
    while synthetic_bytes(sample, form, kv_dtype) > memory_bytes:
        if sample.n_layers > 1:
            sample = sample.thinned(sample.n_layers // 2)
        elif sample.vocab_size > 1024:
            sample = replace(sample, vocab_size=sample.vocab_size // 2)
        else:
            return None
    return sample


def synthetic_bytes(sample: ModelConfig, form: WeightForm, kv_dtype: KvDType = KvDType.AUTO) -> int:
    """Predict the bytes for measuring: weights, a step, and packing the largest part.

    A part exists twice while its kernel packs it.
    """
    whole, dtype = LayerRange(0, sample.n_layers), form.dtype
    wide = WeightForm(dtype=dtype)
    packing = max(layer_weight_bytes(sample, wide), head_weight_bytes(sample, wide))
    return (
        stage_weight_bytes(sample, whole, form)
        + activation_peak_bytes(sample, whole, PREFILL_CHUNK_ROWS, dtype, CONTEXT, kv_dtype)
        + CONTEXT // BLOCK_POSITIONS * kv_block_bytes(sample, whole, dtype, kv_dtype)
        + least_state_bytes(sample, whole, dtype)
        + packing
    )


class SyntheticModel:
    """A stage that is first and last, with random weights. Not thread-safe.

    `tick` is called between parts while it is built; an exception it raises aborts that.
    """

    @torch.inference_mode()
    def __init__(
        self,
        sample: ModelConfig,
        choice: KernelChoice,
        device: torch.device,
        tick: Callable[[], None],
        on: Device | None = None,
    ) -> None:
        dtype, layers = torch_dtype(choice.dtype), LayerRange(0, sample.n_layers)
        weights = _Noise(sample, choice, device, tick)
        inputs = StageInputs(sample, layers, weights, CONTEXT, dtype, device)
        self._family = family_of(sample).load_stage(inputs)
        self._sampler = Sampler(sample.vocab_size)
        self._kv = (KvCache if on is None else DeviceKvCache)(
            sample.n_layers,
            sample.usual_heads.n_kv_heads,
            sample.usual_heads.key_size,
            dtype,
            device,
            CONTEXT // BLOCK_POSITIONS,
            value_size=sample.usual_heads.value_size,
            kv_dtype=choice.kv_form,
            states=[sample.state(layer) for layer in layers],
            heads=sample.uneven_heads(layers),
        )
        if on is not None and isinstance(self._family, DecoderStage):
            assert isinstance(self._kv, DeviceKvCache)
            self._family.compute_on(on, self._kv)
        self._kv.ensure(_SLOT, CONTEXT, CONTEXT)
        for layer in layers:
            for cached in self._kv.layer(_SLOT, layer):
                cached.zero_()
        self._vocab_size = sample.vocab_size
        self._dtype = dtype
        self._device = device
        self._n_steps = 0

    @torch.inference_mode()
    def step(self, n_rows: int) -> StepTimes:
        """Run and time one step: a decode step if `n_rows` is 1, else an unsampled prompt chunk.

        Each step has other tokens, which are routed to other experts: none stays in the CPU's
        cache.
        """
        position = POSITION if n_rows == 1 else 0
        self._n_steps += 1
        batch = _batch(position, n_rows, self._vocab_size, self._n_steps)
        self._kv.assume_end(_SLOT, position)
        began = self._now()
        step = plan_step(batch, self._kv, CONTEXT, self._dtype)
        planned = self._now()
        hidden = self._family.embed(step)
        embedded = self._now()
        for after in self._family.walk(hidden, step):
            hidden = after
        through = judged = self._now()
        if n_rows == 1:
            logits = self._family.logits(hidden).float()
            judged = self._now()
            self._sampler.sample(logits, [SampleRow(params=SamplingParams(), position=position)])
        return StepTimes(
            plan_s=planned - began,
            embed_s=embedded - planned,
            layers_s=through - embedded,
            head_s=judged - through,
            sample_s=self._now() - judged,
        )

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


class _Noise:
    """A WeightSource of small random numbers; norms are ones."""

    def __init__(
        self,
        config: ModelConfig,
        choice: KernelChoice,
        device: torch.device,
        tick: Callable[[], None],
    ) -> None:
        tensors = stage_tensors(config, LayerRange(0, config.n_layers))
        self._shapes, self._head = tensors.all, tensors.head.keys()
        self._config = config
        self._n_experts = config.experts.n_experts if config.experts else 0
        self._choice = choice
        self._device = device
        self._tick = tick
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(_NOISE_VALUES, generator=generator) * 0.02
        self._values = noise.to(torch_dtype(choice.dtype))
        self._stored_values = noise.to(torch_dtype(choice.stored_dtype))

    def linear(self, *names: str, **how: Unpack[LinearOptions]) -> Linear:
        """Make a linear of the parameters' shapes."""
        self._tick()
        is_head = f"{names[0]}.weight" in self._head
        wide = how.get("wide", False)
        is_whole = wide or how.get("precise", False)
        kind = None if is_whole else self._choice.weight_quantization(is_head=is_head)
        noise = self._values if wide else self._stored_values
        weights = [_spread(noise, self._shapes[f"{name}.weight"]) for name in names]
        biases = [self._shapes[f"{name}.bias"] for name in names if f"{name}.bias" in self._shapes]
        if how.get("transposed"):
            weights = [weight.T for weight in weights]
        made = [self._noise(shape) for shape in biases]
        choice = self._wide if wide else self._choice
        return make_linear(choice, weights, made, self._device, kind)

    @cached_property
    def _wide(self) -> KernelChoice:
        """The kernel for float32 on this device, probed once for all routers."""
        return probe(self._device, DType.FLOAT32, None)

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of ones."""
        dtype = torch.float32 if offset else self._values.dtype
        ones = torch.ones(self._shapes[f"{name}.weight"], dtype=dtype)
        bias = torch.zeros_like(ones) if f"{name}.bias" in self._shapes else None
        return Norm(
            weight=ones.to(self._device),
            bias=None if bias is None else bias.to(self._device),
            eps=eps,
        )

    def table(self, name: str) -> Table:
        """Make a table."""
        return PlainTable(self.matrix(name))

    def stored_table(self, *names: str, rows_of: RowsOf) -> StoredTable:
        """Make a small table in the place of a large one."""
        _, width = self._shapes[f"{names[0]}.weight"]
        return SomeRows(PlainTable(self._noise((N_ROWS, width)).to(self._device)), rows_of)

    def token_classes(self) -> Tensor:
        """Make as many classes as there are."""
        own = self._config.ngrams
        assert own is not None
        return torch.arange(max(self._config.vocab_size, own.end_id + 1)) % own.n_classes

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Make a matrix."""
        self._tick()
        return self._noise(self._shapes[f"{name}.weight"]).to(self._device)

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Make a parameter; of experts by token, others for each token."""
        shape = self._shapes[name]
        if name.endswith(EXPERTS_OF_TOKENS):
            numbers = torch.arange(math.prod(shape)) % self._n_experts
            return numbers.view(shape).to(self._device, torch.float32)
        return self._noise(shape).to(self._device, torch.float32)

    def _noise(self, shape: Shape) -> Tensor:
        return _spread(self._values, shape)


@dataclass(frozen=True, slots=True)
class SomeRows:
    """A table of few rows, which counts as one of any number."""

    few: Table
    rows_of: RowsOf

    def rows(self, ids: Tensor) -> Tensor:
        """Look up the rows `ids` [T]: a new tensor [T, E]."""
        return self.few.rows(ids % N_ROWS)

    def bring(self, texts: Sequence[Text]) -> list[Tensor]:
        """See StoredTable: they are here."""
        return [self.rows_of(*text) for text in texts]


def _spread(values: Tensor, shape: Shape) -> Tensor:
    """Fill a tensor by repeating `values`."""
    size = math.prod(shape)
    tensor = torch.empty(size, dtype=values.dtype)
    for start in range(0, size, _NOISE_VALUES):
        piece = tensor[start : start + _NOISE_VALUES]
        piece.copy_(values[: len(piece)])
    return tensor.view(shape)


def _batch(position: int, n_rows: int, vocab_size: int, number: int) -> MicroBatch:
    group = RowGroup(
        sequence_id=SequenceId(1),
        slot=_SLOT,
        position=position,
        n_rows=n_rows,
        n_sampled=1 if n_rows == 1 else 0,
    )
    token_ids = [(row * 7919 + number * 104_729) % vocab_size for row in range(n_rows)]
    return MicroBatch(epoch=Epoch(0), step=StepId(1), groups=(group,), token_ids=token_ids)
