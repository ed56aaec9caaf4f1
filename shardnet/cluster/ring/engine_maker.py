"""Makes the engine of a ring, or what one goes over with to the next ring."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from shardnet.cluster.ring.ring_spec import RingSpec
from shardnet.cluster.ring.stage_port import StagePort, ask_all
from shardnet.errors import ShardnetError, WrongValuesError
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.engine.prefixes import FoundPrefix, Prefixes
from shardnet.runtime.ring.pipeline import Pipeline, StepAnswered
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import StepFailed
from shardnet.types import PREFILL_CHUNK_ROWS, Epoch, LayerRange, SequenceId
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Capability
from shardnet.wire.messages.stages import (
    MAX_AHEAD_IDS,
    FindPrefix,
    PrefixFound,
    PrefixRestored,
    ReadAhead,
    RestorePrefix,
    StageReady,
)


@dataclass(frozen=True, slots=True)
class RingPrefixes:
    """Asks all nodes of a ring at the same time."""

    ports: Sequence[StagePort]
    ring: str
    epoch: int

    async def find(self, keys: Sequence[bytes]) -> list[FoundPrefix]:
        """Ask every stage which blocks it has. Raises the first error of any."""
        message = FindPrefix(request=0, ring=self.ring, epoch=self.epoch, keys=tuple(keys))
        answers = await ask_all(port.order(message, PrefixFound) for port in self.ports)
        return [
            FoundPrefix(
                restorable=int.from_bytes(answer.restorable, "little"),
                block_bytes=answer.block_bytes,
                bytes_per_s=answer.bytes_per_s,
            )
            for answer in answers
        ]

    async def restore(
        self, sequence_id: SequenceId, keys: Sequence[bytes], token_ids: bytes
    ) -> bool:
        """Have every stage read these blocks; return whether all have. Raises likewise."""
        message = RestorePrefix(
            request=0,
            ring=self.ring,
            epoch=self.epoch,
            sequence_id=sequence_id,
            keys=tuple(keys),
            token_ids=token_ids,
        )
        answers = await ask_all(port.order(message, PrefixRestored) for port in self.ports)
        return all(answer.is_whole for answer in answers)

    async def forget(self, sequence_id: SequenceId) -> None:
        """Have every stage forget what it has read for a sequence. Raises likewise."""
        await self.restore(sequence_id, (), b"")


def ring_seed(facts: Sequence[object], stages: Sequence[tuple[LayerRange, str]]) -> bytes | None:
    """Return what stands for a ring in the keys of its prefixes, None if it keeps none.

    `facts` are what the ring as a whole computes with, `stages` the layers and the arithmetic of
    each, "" where it keeps nothing. Neighbours of equal arithmetic count as one stage: the border
    between them changes no bit.
    """
    if not all(arithmetic for _, arithmetic in stages):
        return None
    computed = [
        [arithmetic, sum(len(layers) for layers, _ in group)]
        for arithmetic, group in groupby(stages, key=lambda stage: stage[1])
    ]
    return hashlib.sha256(json.dumps([*facts, computed]).encode()).digest()


MAX_SLOTS = 64
"""Sequences that run at once; more wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMaker:
    """Makes the parts of the engine of the ring called `name`.

    `ports` are those of all ranks, then those of the further nodes of stages that span several.
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

        `ready` are in the order of the ports. Nodes of one stage all have its bits only where they
        compute alike.
        """
        spec = self.spec
        of_ranks = [{stage.arithmetic} for stage in ready[: len(spec.layers)]]
        further = [rank for rank, nodes in enumerate(spec.spans) for _ in nodes]
        for rank, stage in zip(further, ready[len(spec.layers) :], strict=True):
            of_ranks[rank].add(stage.arithmetic)
        kinds = [min(kinds) if len(kinds) == 1 else "" for kinds in of_ranks]
        stages = [*zip(spec.layers, kinds, strict=True)]
        wires = {wire.value for wire in spec.wires}
        if wires - {spec.form.dtype.value}:  # a border rounds what goes over it
            at_border = zip(stages, [*spec.wires, None], strict=True)
            stages = [
                (layers, f"{layers} {kind} {wire.value if wire else ''}" if kind else "")
                for (layers, kind), wire in at_border
            ]
        facts = (spec.form.model_id, spec.form.dtype.value, spec.form.quant)
        seed = ring_seed((*facts, spec.form.kv_dtype, spec.form.context), stages)
        if seed is None:
            return None
        return Prefixes(RingPrefixes(self.ports, self.name, self.epoch), seed, self._row_s)

    @property
    def _row_s(self) -> float | None:
        """The predicted time of a row of a prompt: stages work side by side."""
        if self.chunk_s is None:
            return None
        return self.chunk_s / PREFILL_CHUNK_ROWS / len(self.spec.layers)

    def limits(self, ready: Sequence[StageReady], prefixes: Prefixes | None) -> RingLimits:
        """Return what the ring of these stages gives its scheduler."""
        return RingLimits(
            epoch=self.epoch,
            n_stages=self.spec.n_parts,
            room_blocks=min(stage.room_blocks for stage in ready),
            limits=StepLimits(
                exact_rows=max(1, min(stage.exact_rows for stage in ready)),
            ),
            context=self.spec.form.context,
            max_slots=MAX_SLOTS,
            window=self.spec.config.smallest_window,
            largest_window=self.spec.config.largest_window,
            room_states=(
                min(stage.room_states for stage in ready) if self.spec.config.has_state else None
            ),
            rewinds=self.spec.config.rewinds,
            prefix_seed=prefixes.seed if prefixes else None,
            shares_blocks=all(stage.shares_blocks for stage in ready),
            row_s=self._row_s or 0.0,
        )

    async def _read_ahead(
        self, ports: Sequence[StagePort], turn: asyncio.Lock, prompt: Sequence[int], n_held: int
    ) -> None:
        """Have stages read for one prompt after the other; see Pipeline."""
        assert self.spec.config.ngrams is not None
        begin = max(0, n_held - self.spec.config.ngrams.longest + 1)

        async def ask(port: StagePort) -> None:
            with contextlib.suppress(ShardnetError):  # each step asks for its own then
                port.require(Capability.READ_AHEAD)
                await port.order(message, Done)

        async with turn:
            ids = tuple(prompt[begin : begin + MAX_AHEAD_IDS])
            message = ReadAhead(request=0, ring=self.name, epoch=self.epoch, token_ids=ids)
            await ask_all(map(ask, ports))

    def engine(self, ready: Sequence[StageReady]) -> Engine:
        """Make the engine of a ring that replaces none."""
        prefixes = self.prefixes(ready)
        return Engine(
            scheduler=Scheduler(self.limits(ready, prefixes)),
            make_pipeline=self.pipeline,
            clock_ns=time.perf_counter_ns,
            prefixes=prefixes,
            stage=self.ports[0].first_stage,
        )

    def pipeline(
        self, on_answered: Callable[[StepAnswered], None], on_failed: Callable[[StepFailed], None]
    ) -> Pipeline:
        """Make a pipeline that calls these with answers and with failed steps.

        A step that has failed by what `on_wrong_values` takes goes on over another ring.
        """

        def failed(step: StepFailed) -> None:
            error = step.error
            if not isinstance(error, WrongValuesError) or not self.on_wrong_values(error):
                on_failed(step)

        spec, own = self.spec, self.spec.config.ngrams
        further = [spec.layers[rank] for rank, nodes in enumerate(spec.spans) for _ in nodes]
        stages = zip([*spec.layers, *further], self.ports, strict=True)
        looking = [port for layers, port in stages if own and {*own.layers} & {*layers}]
        return Pipeline(
            epoch=self.epoch,
            vocab_size=self.spec.config.vocab_size,
            clock_ns=time.perf_counter_ns,
            on_answered=on_answered,
            on_failed=failed,
            routing=self.spec.config.routing,
            chunk_s=self.chunk_s,
            read_ahead=partial(self._read_ahead, looking, asyncio.Lock()) if own else None,
        )
