"""One stage's model: the layers of a range with their KV cache, and their forward pass.

Must not know how it was loaded (stage/load.py), nor wire, threads or sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from shardnet.errors import CapacityError, LostShardError, ShardnetError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.drivers.driver import Array
from shardnet.model.families.family import FamilyStage
from shardnet.model.fused.decoder import DecoderStage
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.layers.attention import ForwardStep, plan_step, step_over
from shardnet.model.shards.cut import Cut
from shardnet.model.shards.group import ShardGroup
from shardnet.model.vision.picture import PictureEncoder
from shardnet.output_params import RoutingShape
from shardnet.stage.adapters.adapted_linear import ActiveAdapters, RowsOfAdapter
from shardnet.stage.file_table import FileTable
from shardnet.stage.kept_linears import KeptLinears
from shardnet.stage.packs.pack_writer import PackWriter
from shardnet.stage.runs import Run, sampled_rows
from shardnet.stage.shards.leading_kv import Followers
from shardnet.stage.streaming.layer_stream import LayerStream
from shardnet.stage.streaming.streamed_linear import ExpertPool
from shardnet.stage.weight_digests import WeightDigests
from shardnet.types import (
    Epoch,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    blocks_for,
)


@dataclass(eq=False)
class StageModel:
    """A loaded stage. Not thread-safe: the compute thread owns it."""

    family: FamilyStage
    config: ModelConfig
    layers: LayerRange
    choice: KernelChoice
    kv: KvCache
    _: KW_ONLY
    context: int
    """The limit of positions per sequence."""
    exact_rows: int
    """Rows up to which a micro-batch is computed batch-invariantly (design decision 4)."""
    weight_bytes: int
    stream: LayerStream
    writer: PackWriter
    linears: KeptLinears | None = None
    """Its linears for a stage that comes after this one, None for nothing."""
    group: ShardGroup | None = None
    """The shards of the stage of which this is one, None for a whole stage. The first one has
    `followers`, which do as it does."""
    followers: Followers | None = None
    cut: Cut | None = None
    """Which shard it is, None for a whole stage."""
    adapters: ActiveAdapters = field(default_factory=ActiveAdapters)
    adapter_ids: frozenset[str] = frozenset()
    digests: WeightDigests | None = None
    """Looks at its weights, None where nothing does."""
    experts: ExpertPool | None = None
    """Those of streamed layers, None where they are read with their layers."""
    tables: tuple[FileTable, ...] = ()
    """What is looked up in files for each token."""

    def __post_init__(self) -> None:
        self._sampled: tuple[Tensor, Tensor] | None = None
        """Of a shard, the rows that were sampled last, with their logits."""
        self._windows = self.config.distinct_windows(self.layers)
        self.first = self.layers.start == 0
        self.last = self.layers.end == self.config.n_layers
        self.streams = self.stream.n_layers > 0
        """Whether layers are read from disk for every pass, which should serve many rows then."""
        self.encoder: PictureEncoder | None = None
        """What encodes pictures for the first stage, None without one."""

    @property
    def is_lost(self) -> bool:
        """Whether a shard was lost: then nothing can be computed any more."""
        try:
            self._check_group()
        except LostShardError:
            return True
        return False

    @property
    def n_fetched(self) -> int:
        """Streamed layers that were read from disk so far."""
        return self.stream.n_fetched

    def finish_packs(self) -> None:
        """Wait until quantised weights are cached on disk; the stage can compute meanwhile."""
        self.writer.finish()

    @property
    def width(self) -> int:
        """The width of input and output rows: that of all streams."""
        return self.config.row_width

    @property
    def vocab_size(self) -> int:
        """Width of the LM head, V."""
        return self.config.vocab_size

    @property
    def has_position_axes(self) -> bool:
        """Whether rotary positions have three axes (M-RoPE)."""
        return self.config.rope is not None and bool(self.config.rope.axes)

    @property
    def caching(self) -> LayerRange:
        """The layers with keys, values or states here, what predicts further tokens included."""
        return LayerRange(self.layers.start, self.layers.end + self.has_mtp)

    @property
    def own_heads(self) -> str:
        """Name the heads of which the cache has rows, "" for all: others are on other nodes."""
        cut = self.cut
        if cut is None or self.followers is not None or not cut.cuts_heads:
            return ""
        begin, end = cut.kv_heads
        return f", heads {begin}-{end} as {cut.index} of {cut.size}"

    @property
    def routing(self) -> RoutingShape | None:
        """Routing shape (layers, top-k), or None for a dense model."""
        return self.config.routing

    @property
    def kernel(self) -> str:
        """Display name of the kernel."""
        return self.choice.name

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the stage computes in."""
        return torch_dtype(self.choice.dtype)

    @property
    def device(self) -> torch.device:
        """Device of weights and KV cache."""
        return self.kv.device

    def forward(self, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Run `batch` through the stage, on the last stage up to logits; arguments as `run`.

        Returns hidden states [T, E] in the compute dtype, or on the last stage float32 logits
        [n_sampled, V] of the sampled rows, in row order.
        """
        rows = self.run(batch, hidden)
        return self.logits(sampled_rows(rows, batch)) if self.last else rows

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Apply final norm and LM head, on the last stage: [R, E] to float32 [R, V]."""
        if rows.shape[0] == 0:
            return torch.empty(0, self.vocab_size, device=self.device)
        sampled, self._sampled = self._sampled, None
        if sampled is not None and torch.equal(sampled[0], rows):
            return sampled[1]
        if self.followers is not None:
            self.followers.logits(rows)
        return self.new_logits(rows)

    def best(self, rows: Tensor) -> Array | None:
        """Return the largest logits of rows, where a device has found them; see Judged."""
        return self.family.best(rows) if isinstance(self.family, DecoderStage) else None

    @torch.inference_mode()
    def new_logits(self, rows: Tensor) -> Tensor:
        """Compute logits as `logits`, also of rows that equal those sampled last.

        For followers, which are told each time and must then take part.
        """
        try:
            logits = self.family.logits(rows).float()
        except BaseException:
            if self.followers is not None:
                self.followers.fail()  # they wait for this shard's part, and would take the next
            raise
        self._check_group()
        return logits

    @property
    def has_mtp(self) -> bool:
        """Whether it has what predicts further tokens."""
        return self.family.mtp is not None

    @torch.inference_mode()
    def run_mtp(self, groups: Sequence[RowGroup], token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """Run rows through what predicts a further token: [T, E] in and out; see MtpLayer.

        `rows` are `mtp_inputs` at the positions of `groups`, for which their slots have room, and
        `token_ids` the tokens at the positions after them.
        """
        assert self.family.mtp is not None
        step = step_over(groups, token_ids, self.kv, self.dtype)
        return self.family.mtp(rows, step)

    @torch.inference_mode()
    def mtp_logits(self, rows: Tensor) -> Tensor:
        """Apply the LM head to rows that `run_mtp` has given: [R, E] to float32 [R, V]."""
        assert self.family.mtp is not None
        return self.family.mtp.logits(rows).float()

    def mtp_inputs(self, rows: Tensor) -> Tensor:
        """Return what `run_mtp` takes of what the last layer has given, [T, E] each."""
        is_wide = self.config.layer_streams(self.config.n_layers) is not None
        return rows if is_wide else self.normed(rows)

    @torch.inference_mode()
    def normed(self, rows: Tensor) -> Tensor:
        """Apply the final norm, on the last stage: [R, E] in and out."""
        return self.family.normed(rows)

    def run(
        self,
        batch: MicroBatch,
        hidden: Tensor | None,
        experts: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run the rows of `batch` through the stage's layers.

        `hidden` is [T, E] in any float dtype on any device, and not changed; the first stage takes
        None and embeds the token ids. `experts` collects the experts [T, K] that rows were routed
        to, by layer, counted from 0 within the stage. Returns [T, E] in the compute dtype. Raises
        CapacityError for a position beyond the context or if the KV cache is full, UsageError for a
        token id outside the vocabulary, CheckpointError if a streamed layer cannot be read.
        """
        return self.run_alone(Run(batch=batch, hidden=hidden, experts=experts))

    @torch.inference_mode()
    def run_alone(self, run: Run) -> Tensor:
        """Run one micro-batch, and collect what it asks for. As `run`."""
        [result] = self.run_together([run])
        if isinstance(result, ShardnetError):
            try:
                raise result
            finally:
                del result  # an error that knows this frame would keep the model in memory
        if self.group is not None and self.last and run.batch.n_sampled:
            # All shards know that these will be asked for: one call of them less in each step.
            rows = sampled_rows(result, run.batch)
            self._sampled = rows, self.new_logits(rows)
        return result

    def trial(self, hidden: Tensor | None, n_rows: int) -> list[Tensor]:
        """Run the first `n_rows` rows of a sequence that is none, beside those in slots.

        `hidden` is [T, E]; the first stage takes None and embeds token ids, the same ones each
        time. Returns the hidden states [T, E] that enter the layers and those after each of them,
        and behind them on the last stage the logits [T, V].
        """
        group = RowGroup(
            sequence_id=SequenceId(0), slot=SlotId(0), position=0, n_rows=n_rows, n_sampled=0
        )
        numbers = range(self.layers.start, self.layers.end + 1)
        run = Run(
            batch=MicroBatch(
                epoch=Epoch(0),
                step=StepId(0),
                groups=(group,),
                token_ids=[7919 * place % self.vocab_size for place in range(1, n_rows + 1)],
            ),
            hidden=hidden,
            kept_states=frozenset(numbers),
            kv=self.kv.alike(blocks_for(n_rows)),
        )
        output = self.run_alone(run)
        if hidden is not None:
            run.states[self.layers.start] = hidden
        states = [run.states[number] for number in numbers]
        return [*states, self.logits(output)] if self.last else states

    @torch.inference_mode()
    def run_together(self, runs: Sequence[Run]) -> list[Tensor | ShardnetError]:
        """Run micro-batches through the stage's layers, each layer once for all of them.

        Returns for each, in order, what `run` would return, bit by bit, or the error it would
        raise.
        """
        assert self.followers is None or len(runs) == 1, "shards compute one at a time"
        split = [run.split() for run in runs]
        results: list[Tensor | ShardnetError] = []
        try:
            for together in self._passes([part for parts in split for part in parts]):
                results += self._pass(together)
        except BaseException:
            if self.followers is not None:
                self.followers.fail()
            raise
        given = iter(results)
        return [
            _joined(run, parts, [next(given) for _ in parts])
            for run, parts in zip(runs, split, strict=True)
        ]

    def _passes(self, runs: Sequence[Run]) -> Iterator[list[Run]]:
        """Split `runs` where one must not start before another has finished.

        With sliding windows, a slot that grows drops positions that earlier rows still attend to. A
        state is that after one row, whatever follows.
        """
        is_ordered = any(self._windows) or self.config.has_state
        together: list[Run] = []
        slots: set[SlotId] = set()
        for run in runs:
            own = {group.slot for group in run.batch.groups}
            if is_ordered and own & slots:
                yield together
                together, slots = [], set()
            together.append(run)
            slots |= own
        if together:
            yield together

    def _pass(self, runs: Sequence[Run]) -> list[Tensor | ShardnetError]:
        results: list[Tensor | ShardnetError] = []
        walks: dict[int, Iterator[Tensor]] = {}
        is_looked_at = self.streams or len(runs) > 1 or runs[0].kept_states
        adapters: dict[int, tuple[RowsOfAdapter, ...]] = {}
        for place, run in enumerate(runs):
            try:
                adapters[place] = run.rows_of_adapters(self.adapter_ids, self.device)
                rows, step = self._begin(run)
            except ShardnetError as error:
                results.append(error.with_traceback(None))  # it would keep the model in memory
                continue
            results.append(rows)
            if step is not None:
                walks[place] = self.family.walk(rows, step)
        if not walks:
            return results
        try:
            if is_looked_at:
                self._walk_by_layer(runs, walks, adapters, results)
            else:
                self.adapters.rows = adapters[0]
                [results[0]] = deque(walks[0], maxlen=1)
        except ShardnetError as error:  # concerns all micro-batches: the layer cannot be read
            failed = error.with_traceback(None)
            return [failed if place in walks else result for place, result in enumerate(results)]
        finally:
            self.adapters.rows = ()
        self._check_group()
        return results

    def _walk_by_layer(
        self,
        runs: Sequence[Run],
        walks: Mapping[int, Iterator[Tensor]],
        adapters: Mapping[int, tuple[RowsOfAdapter, ...]],
        results: list[Tensor | ShardnetError],
    ) -> None:
        """Take all walks through one layer after the other, and keep what runs ask for of each."""
        for layer in range(len(self.layers)):
            if self.streams:
                self.stream.need(layer)
            for place, walk in walks.items():
                self.adapters.rows = adapters[place]
                results[place] = hidden = next(walk)
                keep_state(runs[place], self.layers.start + layer + 1, hidden)
            if self.streams:
                self.stream.done(layer)

    def _check_group(self) -> None:
        """Raise LostShardError if a shard was lost: then what was computed is worthless."""
        if self.group is not None:
            self.group.check()

    def _begin(self, run: Run) -> tuple[Tensor, ForwardStep | None]:
        """Make room for the rows and embed them; without rows there is no step."""
        batch = run.batch
        batch.check_token_ids(self.vocab_size)
        if batch.n_rows == 0:
            return torch.empty(0, self.width, device=self.device), None
        if self.followers is not None:  # while this one begins; they meet the same errors
            self.followers.run(batch, run.hidden, run.pictures)
        narrower = self.choice.hidden_dtype
        try:
            step = plan_step(
                batch,
                run.kv or self.kv,
                self.context,
                self.dtype,
                experts=run.experts,
                hidden_dtype=None if narrower is None else torch_dtype(narrower),
                kept_layers=frozenset(n - self.layers.start for n in run.kept_states),
                is_adapted=run.is_adapted,
                pictures=run.pictures,
                choices=run.choices,
            )
        except CapacityError as error:
            if self.followers is not None and error.__cause__ is not None:
                self.followers.fail()  # but not that this process has no memory left
            raise
        if run.hidden is None:
            embedded = self.family.embed(step)
            if run.pictures is not None:
                embedded = run.pictures.put(embedded)
            keep_state(run, 0, embedded)
            return embedded, step
        return run.hidden.to(self.device, self.dtype), step


def _joined(
    run: Run, parts: Sequence[Run], results: Sequence[Tensor | ShardnetError]
) -> Tensor | ShardnetError:
    """Return what the parts of a run gave together, or the first error of any."""
    outputs = [result for result in results if isinstance(result, Tensor)]
    if len(outputs) < len(results):
        return next(result for result in results if not isinstance(result, Tensor))
    return run.join(parts, outputs)


def keep_state(run: Run, number: int, hidden: Tensor) -> None:
    """Copy hidden states [T, E] after `number` layers, where they are kept."""
    if number in run.kept_states:
        run.states[number] = hidden.clone()
