"""One stage's model: the layers of a range with their KV cache, loaded and ready to run.

Knows how to load a range and how rows go through it. Must not know wire, threads or sampling.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from shardnet.errors import CapacityError, ShardnetError, UsageError
from shardnet.model.attention import Step, plan_step
from shardnet.model.checkpoint import Checkpoint
from shardnet.model.codec import torch_dtype
from shardnet.model.config import ModelConfig
from shardnet.model.decode_graphs import Capture, find_capture
from shardnet.model.decoder import DecoderStage
from shardnet.model.deepseek import load_deepseek_v2_layer, load_deepseek_v3_layer
from shardnet.model.device_memory import is_out_of_memory
from shardnet.model.footprint import stage_weight_bytes, streamed_layers
from shardnet.model.gemma import load_gemma2_layer, load_gemma3_layer
from shardnet.model.gpt2 import Gpt2Stage
from shardnet.model.gpt_oss import load_gpt_oss_layer
from shardnet.model.in_place import check_in_place, dtype_in_place, weight_form
from shardnet.model.kernels import KernelChoice
from shardnet.model.kv_cache import KvCache
from shardnet.model.layout import stage_tensors
from shardnet.model.llama import load_llama_layer
from shardnet.model.mixtral import load_mixtral_layer
from shardnet.model.olmo2 import load_olmo2_layer
from shardnet.model.pack_cache import PackCache
from shardnet.model.pack_writer import PackWriter
from shardnet.model.phi3 import load_phi3_layer
from shardnet.model.qwen2_moe import load_qwen2_moe_layer
from shardnet.model.qwen3 import load_qwen3_layer
from shardnet.model.qwen3_moe import load_qwen3_moe_layer
from shardnet.model.streaming import LayerStream
from shardnet.model.tensor_reader import Progress
from shardnet.model.weights import StageWeights, WeightSource
from shardnet.types import KvDType, LayerRange, MicroBatch, RoutingShape, SlotId

log = logging.getLogger(__name__)


class FamilyStage(Protocol):
    """What a family's file brings: embedding, layers and head of one stage."""

    def embed(self, step: Step) -> Tensor:
        """Token ids to hidden states [T, E]; first stage only."""

    def walk(self, hidden: Tensor, step: Step) -> Iterator[Tensor]:
        """Run the stage's layers, one whenever the next is asked for: [T, E] in, out after each.

        What comes out of a layer lasts until the next is asked for, of the last one for good.
        """

    def normed(self, hidden: Tensor) -> Tensor:
        """Final norm: [R, E] in and out; last stage only."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Norm and LM head: [R, E] to [R, V]; last stage only."""


class FamilyMaker(Protocol):
    """Builds one stage of a family. `context` is the positions of one sequence."""

    def __call__(
        self,
        config: ModelConfig,
        layers: LayerRange,
        weights: WeightSource,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FamilyStage:
        """Take the parameters of `layers`, and of embedding and head where they belong."""


STAGES: Mapping[str, FamilyMaker] = MappingProxyType(
    {
        "llama": partial(DecoderStage, load_llama_layer),
        "mistral": partial(DecoderStage, load_llama_layer),
        "qwen2": partial(DecoderStage, load_llama_layer),
        "qwen3": partial(DecoderStage, load_qwen3_layer),
        "phi3": partial(DecoderStage, load_phi3_layer),
        "gemma2": partial(DecoderStage, load_gemma2_layer),
        "gemma3_text": partial(DecoderStage, load_gemma3_layer),
        "granite": partial(DecoderStage, load_llama_layer),
        "olmo2": partial(DecoderStage, load_olmo2_layer),
        "mixtral": partial(DecoderStage, load_mixtral_layer),
        "qwen2_moe": partial(DecoderStage, load_qwen2_moe_layer),
        "qwen3_moe": partial(DecoderStage, load_qwen3_moe_layer),
        "gpt_oss": partial(DecoderStage, load_gpt_oss_layer),
        "deepseek_v2": partial(DecoderStage, load_deepseek_v2_layer),
        "deepseek_v3": partial(DecoderStage, load_deepseek_v3_layer),
        "gpt2": Gpt2Stage,
    }
)
"""The forward pass of each family in families.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A micro-batch on its way through the layers; see StageModel.run."""

    batch: MicroBatch
    hidden: Tensor | None
    experts: dict[int, Tensor] | None = None


class StageModel:
    """A loaded stage. Not thread-safe: the compute thread owns it."""

    def __init__(
        self,
        family: FamilyStage,
        config: ModelConfig,
        layers: LayerRange,
        choice: KernelChoice,
        kv: KvCache,
        *,
        context: int,
        exact_rows: int,
        weight_bytes: int,
        stream: LayerStream,
        writer: PackWriter,
    ) -> None:
        self._family = family
        self._writer = writer
        self._stream = stream
        self._config = config
        self._context = context
        self._windows = config.distinct_windows(layers)
        self.layers = layers
        self.choice = choice
        self.kv = kv
        self.exact_rows = exact_rows
        """Rows up to which a micro-batch leaves each row's bits alone (design decision 4)."""
        self.first = layers.start == 0
        self.last = layers.end == config.n_layers
        self.weight_bytes = weight_bytes

    @property
    def n_fetched(self) -> int:
        """Layers that were read from disk so far, to compute with them."""
        return self._stream.n_fetched

    @property
    def streams(self) -> bool:
        """Whether layers are read from disk at every pass, which then should serve many rows."""
        return self._stream.n_layers > 0

    def finish_packs(self) -> None:
        """Wait until rounded weights are on the disk; they are written while the stage computes."""
        self._writer.finish()

    @property
    def width(self) -> int:
        """Hidden size E: the width of the rows that come in and go out."""
        return self._config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Width of the LM head, V."""
        return self._config.vocab_size

    @property
    def routing(self) -> RoutingShape | None:
        """How many experts a row visits in each layer of the model, None where there are none."""
        return self._config.routing

    @property
    def context(self) -> int:
        """Positions that one sequence may have."""
        return self._context

    @property
    def kernel(self) -> str:
        """Name of the kernel, for people."""
        return self.choice.name

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the stage computes in."""
        return torch_dtype(self.choice.dtype)

    @property
    def device(self) -> torch.device:
        """Where weights and KV cache live."""
        return self.kv.device

    def forward(self, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Run the rows of `batch` through the stage, on the last one to logits; see `run`.

        Returns [T, E] in the compute dtype, or on the last stage float32 logits [n_sampled, V] of
        the sampled rows, in row order.
        """
        rows = self.run(batch, hidden)
        return self.logits(sampled_rows(rows, batch)) if self.last else rows

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Apply final norm and LM head, on the last stage: [R, E] to float32 [R, V]."""
        if rows.shape[0] == 0:
            return torch.empty(0, self.vocab_size, device=self.device)
        return self._family.logits(rows).float()

    @torch.inference_mode()
    def normed(self, rows: Tensor) -> Tensor:
        """Apply the final norm, on the last stage: [R, E] in and out."""
        return self._family.normed(rows)

    @torch.inference_mode()
    def run(
        self,
        batch: MicroBatch,
        hidden: Tensor | None,
        experts: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the rows of `batch` through the stage's layers.

        `hidden` is [T, E] in any float dtype; the first stage takes None and embeds the token ids.
        It is not changed. `experts` gets the experts [T, K] that the rows visited, by layer,
        counted from 0 within the stage. Returns [T, E] in the compute dtype. Raises CapacityError
        for a position beyond the context or when the KV room is used up, UsageError for a token id
        outside the vocabulary.
        """
        [result] = self.run_together([Run(batch=batch, hidden=hidden, experts=experts)])
        if isinstance(result, ShardnetError):
            try:
                raise result
            finally:
                del result  # an error that knows this frame would keep the model in memory
        return result

    @torch.inference_mode()
    def run_together(self, runs: Sequence[Run]) -> list[Tensor | ShardnetError]:
        """Run micro-batches through the stage's layers, each layer once for all of them.

        Every one gets the bits that it would get after the ones before it: what `run` returns, or
        the error it would raise.
        """
        results: list[Tensor | ShardnetError] = []
        for together in self._passes(runs):
            results += self._pass(together)
        return results

    def _passes(self, runs: Sequence[Run]) -> Iterator[list[Run]]:
        """Cut `runs` where one may not begin before another is through.

        A slot that grows gives up positions that its earlier rows see, where layers have windows.
        """
        together: list[Run] = []
        slots: set[SlotId] = set()
        for run in runs:
            own = {group.slot for group in run.batch.groups}
            if any(self._windows) and own & slots:
                yield together
                together, slots = [], set()
            together.append(run)
            slots |= own
        if together:
            yield together

    def _pass(self, runs: Sequence[Run]) -> list[Tensor | ShardnetError]:
        results: list[Tensor | ShardnetError] = []
        walks: dict[int, Iterator[Tensor]] = {}
        for place, run in enumerate(runs):
            try:
                rows, step = self._begin(run)
            except ShardnetError as error:
                results.append(error.with_traceback(None))  # it would keep the model in memory
                continue
            results.append(rows)
            if step is not None:
                walks[place] = self._family.walk(rows, step)
        if not walks:
            return results
        try:
            for layer in range(len(self.layers)):
                self._stream.need(layer)
                for place, walk in walks.items():
                    results[place] = next(walk)
                self._stream.done(layer)
        except ShardnetError as error:  # of no single micro-batch: the layer cannot be had
            failed = error.with_traceback(None)
            return [failed if place in walks else result for place, result in enumerate(results)]
        return results

    def _begin(self, run: Run) -> tuple[Tensor, Step | None]:
        """Make room for the rows and embed them; without rows there is no step."""
        batch = run.batch
        self._check_token_ids(batch)
        if batch.n_rows == 0:
            return torch.empty(0, self.width, device=self.device), None
        step = plan_step(batch, self.kv, self._context, self.dtype, self._windows, run.experts)
        if run.hidden is None:
            return self._family.embed(step), step
        return run.hidden.to(self.device, self.dtype), step

    def _check_token_ids(self, batch: MicroBatch) -> None:
        wrong = next((t for t in batch.token_ids if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"token id {wrong} is outside the model's vocabulary of {self.vocab_size}"
            )


def make_family(
    config: ModelConfig,
    layers: LayerRange,
    weights: WeightSource,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    capture: Capture | None = None,
) -> FamilyStage:
    """Build the family's layers of one stage from `weights`.

    `capture` is what decode steps are captured by, None as the device can.
    """
    family = STAGES[config.family](config, layers, weights, context, dtype, device)
    capture = capture or find_capture(device, os.environ)
    if capture is not None and isinstance(family, DecoderStage):
        family.capture_by(capture)
    return family


def sampled_rows(rows: Tensor, batch: MicroBatch) -> Tensor:
    """Keep the last `n_sampled` rows of each group: [n_sampled, E]."""
    if batch.n_sampled == batch.n_rows:
        return rows
    kept = []
    end = 0
    for group in batch.groups:
        end += group.n_rows
        kept.append(rows[end - group.n_sampled : end])
    return torch.cat(kept)


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
    kv_dtype: KvDType = KvDType.AUTO,
    n_streamed: int = 0,
    capture: Capture | None = None,
) -> StageModel:
    """Load the tensors of `layers`, and of embedding and head where they belong, onto `device`.

    `room_blocks` is the KV room, `context` the positions of one sequence (None: the model's, at
    most 8192), `kv_dtype` how keys and values are kept. `packs` keeps rounded weights, which may be
    written while the stage is at work already. `n_streamed` layers stay on disk. `capture` is
    make_family's. `progress` is called with (bytes done, bytes in all) after every part; what it
    raises ends the loading, and nothing of it remains. Raises CheckpointError for tensors that do
    not fit the config, UsageError for layers the model does not have, CapacityError where memory
    runs out, where the model has fewer positions than `context`, and for layers that cannot be
    streamed.
    """
    config = checkpoint.config
    context = config.default_context if context is None else context
    _check_asked(config, layers, context)
    streamed = streamed_layers(layers, n_streamed)
    if streamed:
        _check_streamed(checkpoint, choice, device, packs)
    dtype = torch_dtype(choice.dtype)
    with _reads_told(checkpoint), _memory_named(device, layers, choice):
        tensors = stage_tensors(config, layers)
        weights = StageWeights(checkpoint, tensors, choice, device, progress, packs, streamed)
        with weights.writer:
            family = make_family(config, layers, weights, context, dtype, device, capture)
    kv = _kv_cache(config, layers, dtype, device, room_blocks, kv_dtype)
    weights.stream.start()
    form = weight_form(checkpoint, choice)
    return StageModel(
        family,
        config,
        layers,
        choice,
        kv,
        context=context,
        exact_rows=weights.exact_rows,
        weight_bytes=stage_weight_bytes(config, layers, form, weights.stream.n_layers),
        stream=weights.stream,
        writer=weights.writer,
    )


def _check_asked(config: ModelConfig, layers: LayerRange, context: int) -> None:
    """Raise UsageError for layers, CapacityError for positions that the model does not have."""
    if layers.end > config.n_layers:
        raise UsageError(
            f"layers {layers} were asked for, the model has {config.n_layers}; "
            f"give ranges that end at {config.n_layers}"
        )
    if context > config.max_positions:
        raise CapacityError(
            f"a context of {context} was asked for, the model has {config.max_positions} "
            "positions; ask for a shorter --context"
        )


@contextmanager
def _reads_told(checkpoint: Checkpoint) -> Iterator[None]:
    """Log what is read of each file inside."""
    before = dict(checkpoint.bytes_read)
    yield
    for file, size_bytes in checkpoint.bytes_read.items():
        if size_bytes > before[file]:
            log.info("read %d tensor bytes of %s", size_bytes - before[file], file)


@contextmanager
def _memory_named(device: torch.device, layers: LayerRange, choice: KernelChoice) -> Iterator[None]:
    """Raise CapacityError where the device has no memory for what is done inside."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"{device} has no memory for layers {layers} in {choice.dtype.value}; "
            "give the node fewer layers"
        ) from error


def _kv_cache(
    config: ModelConfig,
    layers: LayerRange,
    dtype: torch.dtype,
    device: torch.device,
    room_blocks: int,
    kv_dtype: KvDType,
) -> KvCache:
    return KvCache(
        len(layers),
        config.n_kv_heads,
        config.key_size,
        dtype,
        device,
        room_blocks,
        [config.window(layer) for layer in layers],
        config.value_size,
        kv_dtype,
    )


def _check_streamed(
    checkpoint: Checkpoint, choice: KernelChoice, device: torch.device, packs: PackCache | None
) -> None:
    """Raise UsageError or CheckpointError where layers cannot be streamed."""
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"--stream-layers: {device.type} cannot stream layers; start the node with --device cpu"
        )
    if choice.quantization is None:
        check_in_place(checkpoint.path, dtype_in_place(checkpoint), choice.stored_dtype)
    elif packs is None:
        raise UsageError("--stream-layers: rounded weights are not kept on disk here")
