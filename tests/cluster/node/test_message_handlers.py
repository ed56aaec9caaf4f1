"""Every control message that a node can receive has a handler, or is answered elsewhere by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest

from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.node.node import running
from shardnet.cluster.node.settings import NodeSettings
from shardnet.cluster.peers.control_link import ControlLink, Incoming, MessageHandlers
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.types import DType, NodeId
from shardnet.wire.messages.activity import ClockRead, RingActivity, RingKept, TracePiece
from shardnet.wire.messages.chat import TokenizerDescribed
from shardnet.wire.messages.control import ControlMessage, Done, Failed, Redirect
from shardnet.wire.messages.deputies import (
    AnswerFound,
    CopiedTo,
    NodeFound,
    ValueFound,
    ValuesListed,
)
from shardnet.wire.messages.drafting import DrafterReady, DraftReply
from shardnet.wire.messages.generation import (
    Cancel,
    Detokenized,
    Encoded,
    Finished,
    LastRun,
    RowsPiece,
    StateChanged,
    TextPiece,
    Tokenized,
    Unload,
)
from shardnet.wire.messages.household import HouseholdListed, RunnerOpened
from shardnet.wire.messages.measurements import LinksMeasured, StageMeasured
from shardnet.wire.messages.membership import (
    KeyTaken,
    ModelIdentity,
    ModelsListed,
    ReportReply,
    StatusReply,
)
from shardnet.wire.messages.plans import NodeProgress, PlanReply
from shardnet.wire.messages.stages import (
    ExpertsCounted,
    KvMoved,
    LayerComputed,
    LoadProgress,
    PrefixFound,
    PrefixRestored,
    StageAudited,
    StageReady,
)
from shardnet.wire.messages.updates import Rearranged, UpdateDescribed

ANSWERS = {
    AnswerFound,
    ClockRead,
    ExpertsCounted,
    CopiedTo,
    Detokenized,
    Done,
    DraftReply,
    DrafterReady,
    Encoded,
    Failed,
    Finished,
    KvMoved,
    LastRun,
    LayerComputed,
    LinksMeasured,
    LoadProgress,
    ModelIdentity,
    ModelsListed,
    NodeFound,
    NodeProgress,
    PlanReply,
    PrefixFound,
    PrefixRestored,
    Redirect,
    ReportReply,
    RingActivity,
    RingKept,
    RowsPiece,
    StageAudited,
    StageMeasured,
    StageReady,
    StateChanged,
    StatusReply,
    TextPiece,
    Tokenized,
    TokenizerDescribed,
    TracePiece,
    ValueFound,
    ValuesListed,
    KeyTaken,
    Rearranged,
    UpdateDescribed,
    RunnerOpened,
    HouseholdListed,
}
"""What answers a request: peers/control_link.py gives it to whoever asked."""
ON_THE_LINK = {Cancel}
"""What peers/control_link.py does itself."""


def test_every_message_that_a_node_can_receive_has_a_handler(tmp_path: Path) -> None:
    settings = NodeSettings(
        node=NodeId("a"),
        name="anna",
        budget=MemoryBudget(
            device=Device(kind="cpu", description="cpu", dtypes=(DType.FLOAT32,)),
            asked_bytes=2**20,
        ),
        threads=1,
        peers=(),
        local_nodes=LocalNodes(tmp_path),
        cache=tmp_path,
        models=ModelCache(tmp_path),
        log=lambda line: None,
    )

    async def registered() -> frozenset[type[object]]:
        async with running(settings) as node:
            return node.handlers.types

    handled = asyncio.run(registered())
    assert handled == set(get_args(Incoming))
    assert not handled & (ANSWERS | ON_THE_LINK)
    assert handled | ANSWERS | ON_THE_LINK == set(get_args(ControlMessage))


def test_a_message_has_one_handler() -> None:
    async def handle(control: ControlLink, message: Unload) -> None:
        """Do nothing."""

    handlers = MessageHandlers()
    handlers.register(Unload, handle)
    with pytest.raises(AssertionError, match="Unload has a handler already"):
        handlers.register(Unload, handle)
