"""Makes the engine of a ring, or what one goes over with to the next ring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardnet.cluster.ring.ring_prefixes import RingPrefixes, ring_seed
from shardnet.cluster.ring.ring_spec import RingSpec
from shardnet.cluster.ring.stage_port import StagePort
from shardnet.errors import WrongValuesError
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.prefixes import Prefixes
from shardnet.runtime.ring.pipeline import Pipeline, StepAnswered
from shardnet.runtime.scheduling.limits import RingLimits, StepLimits
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.stage.compute import StepFailed
from shardnet.types import PREFILL_CHUNK_ROWS, STATE_SLOTS, Epoch
from shardnet.wire.messages.stages import StageReady

MAX_SLOTS = 64
"""Sequences that run at once; more wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMaker:
    """Makes the parts of the engine of the ring called `name`.

    `chunk_s` is the predicted time of a whole prompt chunk in all stages. `on_wrong_values` says
    whether the ring ends by what one of them computed.
    """

    spec: RingSpec
    ports: tuple[StagePort, ...]
    name: str
    epoch: Epoch
    chunk_s: float | None
    on_wrong_values: Callable[[WrongValuesError], bool]

    def prefixes(self, ready: Sequence[StageReady]) -> Prefixes | None:
        """Return the prompts that the stages keep on disk, None unless all of them do.

        `ready` are those of all ranks, then those of the further nodes of stages that span several.
        """
        spec = self.spec
        at = zip(spec.layers, ready[: len(spec.layers)], strict=True)
        stages = [(layers, stage.arithmetic) for layers, stage in at]
        wires = {wire.value for wire in spec.wires}
        if wires - {spec.dtype.value}:  # a border rounds what goes over it
            at_border = zip(stages, [*spec.wires, None], strict=True)
            stages = [
                (layers, f"{layers} {kind} {wire.value if wire else ''}" if kind else "")
                for (layers, kind), wire in at_border
            ]
        facts = (spec.model_id, spec.dtype.value, spec.quant)
        seed = ring_seed((*facts, spec.kv_dtype, spec.context), stages)
        if seed is None or spec.has_state:
            return None
        row_s = None
        if self.chunk_s is not None:  # its stages work side by side
            row_s = self.chunk_s / PREFILL_CHUNK_ROWS / len(stages)
        return Prefixes(RingPrefixes(self.ports, self.name, self.epoch), seed, row_s)

    def limits(self, ready: Sequence[StageReady], prefixes: Prefixes | None) -> RingLimits:
        """Return what the ring of these stages gives its scheduler."""
        return RingLimits(
            epoch=self.epoch,
            n_stages=self.spec.n_parts,
            room_blocks=min(stage.room_blocks for stage in ready),
            limits=StepLimits(
                exact_rows=max(1, min(stage.exact_rows for stage in ready)),
                notes_states=self.spec.notes_states,
            ),
            prefix_seed=prefixes.seed if prefixes else None,
        )

    def engine(self, ready: Sequence[StageReady]) -> Engine:
        """Make the engine of a ring that replaces none."""
        prefixes = self.prefixes(ready)
        ring = self.limits(ready, prefixes)
        scheduler = Scheduler(
            epoch=ring.epoch,
            n_stages=ring.n_stages,
            room_blocks=ring.room_blocks,
            context=self.spec.context,
            max_slots=MAX_SLOTS,
            window=self.spec.window,
            state_slots=STATE_SLOTS if self.spec.has_state else None,
            limits=ring.limits,
            prefix_seed=ring.prefix_seed,
        )
        return Engine(
            scheduler=scheduler,
            make_pipeline=self.pipeline,
            clock_ns=time.perf_counter_ns,
            prefixes=prefixes,
        )

    def pipeline(
        self,
        on_answered: Callable[[StepAnswered], None],
        on_failed: Callable[[StepFailed], None],
    ) -> Pipeline:
        """Make a pipeline that calls these with answers and with failed steps.

        A step that has failed by what `on_wrong_values` takes goes on over another ring.
        """

        def failed(step: StepFailed) -> None:
            error = step.error
            if not isinstance(error, WrongValuesError) or not self.on_wrong_values(error):
                on_failed(step)

        return Pipeline(
            epoch=self.epoch,
            vocab_size=self.spec.vocab_size,
            clock_ns=time.perf_counter_ns,
            on_answered=on_answered,
            on_failed=failed,
            routing=self.spec.routing,
            chunk_s=self.chunk_s,
        )
