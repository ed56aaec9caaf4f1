"""The stage of a node in words and figures, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardnet.cluster.member.ring_membership import RingMembership
from shardnet.runtime.loading.loaded_stage import LoadedStage
from shardnet.wire.framing.schema import MAX_DEVICES
from shardnet.wire.messages.diagnostics import (
    PartState,
    PrefixState,
    StageState,
    StandbyState,
)

if TYPE_CHECKING:  # it imports torch
    from shardnet.stage.prefixes.stage_prefixes import StagePrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStage:
    """A stage that is ready for a ring to come; it may be the one that is in use.

    If that comes when the node `stands_for` is lost, the stage is a standby.
    """

    ring: str
    stage: LoadedStage
    stands_for: str


def stage_state(
    loaded: LoadedStage | None,
    prepared: PreparedStage | None,
    membership: RingMembership | None,
    device_names: Sequence[str],
) -> StageState | None:
    """Describe a loaded stage, one that is ready, and the place in a ring, for people.

    Its parts are told of where the node has several devices.
    """
    standby = None if prepared is None else _standby_state(prepared, loaded)
    loaded = loaded or (prepared.stage if standby and prepared else None)
    if loaded is None:
        return None
    state = StageState(
        model=loaded.order.model,
        layers=(loaded.order.layers.start, loaded.order.layers.end),
        dtype=loaded.order.dtype.value,
        kernel=loaded.kernel,
        weight_bytes=loaded.weight_bytes,
        room_blocks=loaded.room_blocks,
        used_blocks=loaded.compute.used_blocks,
        prefixes=_prefix_state(loaded.prefixes),
        standby=standby,
        parts=_parts(loaded, device_names) if len(device_names) > 1 else [],
    )
    if membership is None or membership.is_over:
        return state
    return replace(
        state,
        n_open=membership.n_open,
        rank=membership.rank,
        n_stages=len(membership.addresses),
        epoch=membership.epoch,
        head=membership.owner,
    )


def _parts(loaded: LoadedStage, device_names: Sequence[str]) -> list[PartState]:
    return [
        PartState(
            layers=(part.order.layers.start, part.order.layers.end),
            devices=[device.name for device in part.order.shards]
            or [device_names[part.order.place]],
            weight_bytes=part.weight_bytes,
        )
        for part in loaded.parts or (loaded,)
    ][:MAX_DEVICES]


def _prefix_state(prefixes: StagePrefixes | None) -> PrefixState | None:
    if prefixes is None:
        return None
    store = prefixes.files.store
    return PrefixState(
        used_bytes=store.used_bytes,
        limit_bytes=store.limit_bytes,
        saved_positions=prefixes.figures.saved,
        restored_positions=prefixes.figures.restored,
        bytes_per_s=store.bytes_per_s,
    )


def _standby_state(prepared: PreparedStage, loaded: LoadedStage | None) -> StandbyState | None:
    if not prepared.stands_for:
        return None
    stage = prepared.stage
    parts = [part for part in stage.parts or (stage,) if part is not loaded]
    if loaded is not None:
        parts = [part for part in parts if part not in loaded.parts]
    return StandbyState(
        node=prepared.stands_for,
        layers=(parts[0].order.layers.start, parts[-1].order.layers.end) if parts else (0, 0),
        weight_bytes=sum(part.weight_bytes for part in parts),
    )
