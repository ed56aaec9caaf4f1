"""How long the turns of a long conversation take on a planned ring, and how many its memory keeps.

Knows what a prompt costs in each stage, and what is read of it from disk. Pure. Must not know how a
ring is chosen, nor how figures are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.placement.estimate import ASSUMED_DISK_BYTES_PER_S, way_between
from shardnet.cluster.placement.figures import StagePlan
from shardnet.cluster.planning.plan import Plan
from shardnet.errors import CapacityError
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.loading import KvRoom, kv_room
from shardnet.runtime.scheduling.admission_queue import most_kept_states, most_warm_blocks
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    kv_block_bytes,
    layer_read_bytes,
    state_bytes,
)
from shardnet.types import (
    BLOCK_POSITIONS,
    PREFILL_CHUNK_ROWS,
    DType,
    KvDType,
    LayerRange,
    WireDType,
    blocks_for,
)
from shardnet.wire.messages.plans import KeptPositions, PlannedTurns

LONG_PROMPT: Final = 30_000
"""Tokens of the prompt that is told of: what a coding agent has after some calls."""
NEXT_TOKENS: Final = 700
"""Tokens that its next turn adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePace:
    """What prompts take in one stage.

    A chunk of rows takes `chunk_s`, and for each position before it that a layer attends to the
    seconds in `depth_s`, each with that layer's window; and it is on its way to the next stage for
    `hop_s`. Each block of positions has `block_bytes` here, the states after one of them
    `state_bytes`. Both are read at `disk_bytes_per_s`, None where that was not measured.
    """

    chunk_s: float
    depth_s: tuple[tuple[float, int | None], ...] = ()
    hop_s: float = 0.0
    block_bytes: int = 0
    state_bytes: int = 0
    disk_bytes_per_s: float | None = None

    def at(self, position: int) -> float:
        """Seconds of a whole chunk that begins at a position."""
        return self.chunk_s + sum(
            each_s * min(position, window or position) for each_s, window in self.depth_s
        )

    def read_s(self, n_blocks: int) -> float:
        """Seconds to read the first blocks of a prompt, and the states behind the last one."""
        n_bytes = n_blocks * self.block_bytes + self.state_bytes
        return n_bytes / (self.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S)


def depth_seconds(
    config: ModelConfig, layers: LayerRange, layer_256_s: float
) -> tuple[tuple[float, int | None], ...]:
    """Return the seconds that a chunk takes for each position before it, in each attention layer.

    Attention is taken to multiply as fast as the rest of the layer, which takes `layer_256_s` with
    nothing before it.
    """
    n_weights = layer_read_bytes(config, WeightForm(dtype=DType.FLOAT32)) / 4
    found = []
    for layer in layers:
        if config.has_kv(layer):
            heads = config.heads(layer)
            columns = heads.key_size + (heads.value_size or heads.key_size)
            share = config.n_heads * columns / n_weights
            found.append((layer_256_s * share, config.window(layer)))
    return tuple(found)


def prompt_s(stages: Sequence[StagePace], start: int, end: int) -> float:
    """Predict the seconds in which a ring computes the positions of a prompt.

    Chunks follow each other through the stages: each takes as long as in the slowest of them, and
    the first one passes through all.
    """
    total_s = 0.0
    for position in range(start, end, PREFILL_CHUNK_ROWS):
        share = min(end - position, PREFILL_CHUNK_ROWS) / PREFILL_CHUNK_ROWS
        each_s = [stage.at(position) * share for stage in stages]
        total_s += max(each_s)
        if position == start:
            total_s += sum(each_s) - max(each_s) + sum(stage.hop_s * share for stage in stages)
    return total_s


def long_turn(context: int) -> tuple[int, int]:
    """Return the tokens of the long prompt that a context has room for, and of its next turn."""
    n_next = min(NEXT_TOKENS, context // 2)
    return min(LONG_PROMPT, context - n_next), n_next


def planned_turns(stages: Sequence[StagePace], context: int, head_s: float) -> PlannedTurns:
    """Predict when the first token of a long prompt comes, at first and in its next turn.

    That is also told for a prompt that all stages read from their disks, up to the last whole
    block. The LM head takes `head_s`.
    """
    n_prompt, n_next = long_turn(context)
    n_blocks, end = n_prompt // BLOCK_POSITIONS, n_prompt + n_next
    resumed_s = max(stage.read_s(n_blocks) for stage in stages)
    resumed_s += prompt_s(stages, n_blocks * BLOCK_POSITIONS, end)
    rates = [stage.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S for stage in stages]
    return PlannedTurns(
        n_prompt=n_prompt,
        n_next=n_next,
        first_s=head_s + prompt_s(stages, 0, n_prompt),
        next_s=head_s + prompt_s(stages, n_prompt, end),
        resumed_s=head_s + min(resumed_s, prompt_s(stages, 0, end)),
        disk_bytes_per_s=min(rates),
    )


def kept_positions(
    room_blocks: int,
    block_bytes: int,
    state_bytes: int,
    room_states: int | None = None,
    n_prompt: int = LONG_PROMPT,
) -> KeptPositions:
    """Say how much of conversations a ring's memory keeps, and how many of `n_prompt` tokens.

    There is room for `room_blocks` of what has ended. A block has `block_bytes` and the states
    after one position `state_bytes`, in all stages together. Each conversation needs states to go
    on from; `room_states` is None where no layer keeps any.
    """
    n_states = room_states or 0
    n_conversations = room_blocks // blocks_for(n_prompt)
    return KeptPositions(
        n_prompt=n_prompt,
        conversations=n_conversations if room_states is None else min(n_conversations, n_states),
        positions=room_blocks * BLOCK_POSITIONS,
        kv_bytes=room_blocks * block_bytes,
        states=n_states,
        state_bytes=n_states * state_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageThere:
    """A stage on its node, which may take `memory_bytes` for it, with weights in `form`.

    It sends rows in `wire` to the next stage, None for the last one.
    """

    plan: StagePlan
    memory_bytes: int
    form: WeightForm
    wire: WireDType | None
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """A ring whose stages are each on one device of one node, for long conversations."""

    config: ModelConfig
    context: int
    kv_dtype: KvDType
    stages: Sequence[StageThere]

    def turns(self, measured: Measured) -> PlannedTurns | None:
        """Predict the turns of one; None where a stage or a link was not measured, or streams."""
        paces: list[StagePace] = []
        disks = {told.node: told.disk_bytes_per_s for told in measured.reports}
        for rank, stage in enumerate(self.stages):
            node, layers = stage.plan.node, stage.plan.layers
            speed, hop_s = measured.speeds.get(node), 0.0
            if speed is None or stage.plan.n_streamed:
                return None
            if stage.wire is not None:
                link = way_between(measured.links, node, self.stages[rank + 1].plan.node)
                if link is None:
                    return None
                row_bytes = stage.wire.row_bytes(self.config.row_width)
                hop_s = link.hop_s(PREFILL_CHUNK_ROWS * row_bytes)
            paces.append(
                StagePace(
                    chunk_s=len(layers) * speed.layer_256_s + (rank == 0) * speed.embed_s,
                    depth_s=depth_seconds(self.config, layers, speed.layer_256_s),
                    hop_s=hop_s,
                    block_bytes=self._block_bytes(stage),
                    state_bytes=self._state_bytes(stage),
                    disk_bytes_per_s=disks.get(node),
                )
            )
        return planned_turns(paces, self.context, measured.speeds[node].head_s)

    def kept(self) -> KeptPositions | None:
        """Say what memory keeps; None where a stage has no room for the context."""
        try:
            rooms = [self._room(stage) for stage in self.stages]
        except CapacityError:
            return None
        room_states = min(room.states for room in rooms)
        return kept_positions(
            most_warm_blocks(min(room.blocks for room in rooms), self.context),
            sum(map(self._block_bytes, self.stages)),
            sum(map(self._state_bytes, self.stages)),
            most_kept_states(room_states, self.context) if self.config.has_state else None,
            long_turn(self.context)[0],
        )

    def _room(self, stage: StageThere) -> KvRoom:
        return kv_room(
            self.config,
            stage.plan.layers,
            stage.form,
            self.context,
            stage.memory_bytes,
            self.kv_dtype,
            stage.plan.n_streamed,
            device=stage.device,
        )

    def _block_bytes(self, stage: StageThere) -> int:
        return kv_block_bytes(self.config, stage.plan.layers, stage.form.kv, self.kv_dtype)

    def _state_bytes(self, stage: StageThere) -> int:
        return state_bytes(self.config, stage.plan.layers, stage.form.dtype)


def with_conversations(plan: Plan) -> Plan:
    """Return a plan that tells of long conversations, unless nodes or devices share a stage."""
    stages, facts = plan.placement.stages, plan.facts
    if plan.spans or facts.config.outline is not None or any(stage.parts for stage in stages):
        return plan
    each = zip(stages, plan.nodes, plan.forms, [*plan.wires, None], strict=True)
    told = Conversations(
        config=facts.config,
        context=plan.context,
        kv_dtype=KvDType(plan.choice.kv_dtype),
        stages=[
            StageThere(
                plan=stage,
                memory_bytes=node.memory_bytes
                - stage.rows_bytes
                - (rank == 0) * facts.tower_bytes.get(plan.dtype, 0),
                form=plan.weight_form(form),
                wire=wire,
                device="cuda" if node.device.startswith("cuda") else "cpu",
            )
            for rank, (stage, node, form, wire) in enumerate(each)
        ],
    )
    return replace(plan, turns=told.turns(plan.measured), kept=told.kept())
