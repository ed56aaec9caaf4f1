"""What was measured of a node counts while it sleeps, for the same model, by its name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace
from support.cluster.checkup_facts import info
from support.cluster.town import make_sleepers

from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.measuring.measurement_service import MeasurementService
from shardnet.cluster.peers.sleepers import Sleepers
from shardnet.cluster.placement.figures import LinkSpeed, StageSpeed
from shardnet.types import NodeId
from shardnet.wire.messages.measurements import MeasureStage, NodeMeasured, StageSeconds
from shardnet.wire.messages.membership import Asleep

SECONDS = StageSeconds(layer_s=0.001, layer_256_s=0.1, embed_s=0.01, head_s=0.02)
LINK = LinkSpeed(round_trip_s=0.001, bytes_per_s=1e8)
ASK = MeasureStage(request=3, config="{}", dtype="bfloat16", threads=0, model="/a")


def service(sleepers: Sleepers) -> MeasurementService:
    anything = cast(Any, None)
    return MeasurementService(
        node=NodeId("anna-id"), own=anything, links=anything, control_to=anything, sleepers=sleepers
    )


def test_figures_of_a_node_that_sleeps_are_those_of_before(tmp_path: Path) -> None:
    """Also after the planning node was started again, as another id then."""
    path = tmp_path / "sleepers.json"
    before = make_sleepers(path=path)
    anna, cleo = info("anna"), info("cleo")
    report = NodeMeasured(node="cleo-id", name="cleo", memory_bytes=5, seconds=SECONDS)
    found = Measured(
        speeds={NodeId("cleo-id"): StageSpeed(layer_s=1, layer_256_s=1, embed_s=1, head_s=1)},
        links={(NodeId("anna-id"), NodeId("cleo-id")): LINK},
        reports=(report,),
    )
    assert service(before)._with_remembered(found, [anna, cleo], ASK) == found
    asleep = replace(cleo, asleep=Asleep(since_s=4e9))

    async def again() -> Sleepers:
        before.fell_asleep(asleep)
        sleepers = make_sleepers(path=path)
        await sleepers.load()
        return sleepers

    later = service(asyncio.run(again()))
    nodes = [replace(anna, node="another-id"), asleep]
    same = replace(ASK, request=9, again=True, model="/b")
    known = later._with_remembered(Measured(), nodes, same)
    assert known.reports == (report,)
    assert known.speeds[NodeId("cleo-id")].layer_s == SECONDS.layer_s
    assert known.links[NodeId("another-id"), NodeId("cleo-id")] == LINK
    other = later._with_remembered(Measured(), nodes, replace(ASK, dtype="float32"))
    assert (other.speeds, other.reports) == ({}, ())
