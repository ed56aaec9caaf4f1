"""Nodes of several devices, as they report themselves: GPUs that are not here, groups of cores."""

from __future__ import annotations

from msgspec import structs
from test_planning import GIB, facts, model_with_mtp, node

from shardnet.cluster.measuring.measurement import Measured, stage_speed
from shardnet.cluster.planning.placing import fits, make_plan
from shardnet.stage.estimate.memory_estimate import graph_bytes
from shardnet.types import DType, NodeId
from shardnet.wire.messages.measurements import DeviceMeasured, NodeMeasured, StageSeconds
from shardnet.wire.messages.membership import DeviceInfo, NodeInfo
from shardnet.wire.messages.plans import ModelChoice

CHOICE = ModelChoice(model="/m")
FAST = StageSeconds(layer_s=0.001, layer_256_s=0.01, embed_s=0.0, head_s=0.001)
SLOW = StageSeconds(layer_s=0.01, layer_256_s=0.5, embed_s=0.0, head_s=0.01)


def device(name: str, memory: int, *dtypes: str) -> DeviceInfo:
    return DeviceInfo(name=name, device=name, memory_bytes=memory, threads=1, dtypes=list(dtypes))


def attic(*devices: DeviceInfo, tensor_parallel: int = 0) -> NodeInfo:
    memory = sum(each.memory_bytes for each in devices)
    one = node("attic", *devices[0].dtypes, memory=memory)
    return structs.replace(one, devices=list(devices), tensor_parallel=tensor_parallel)


def measured(one: NodeInfo, gather_s: float | None, *seconds: StageSeconds | None) -> Measured:
    told = [
        DeviceMeasured(name=each.name, memory_bytes=each.memory_bytes, seconds=figure)
        for each, figure in zip(one.devices, seconds, strict=True)
    ]
    first = seconds[0] or SLOW
    report = NodeMeasured(
        node=one.node, name=one.name, memory_bytes=one.memory_bytes, seconds=first,
        devices=told, gather_s=gather_s,
    )  # fmt: skip
    speeds = {NodeId(one.node): stage_speed(first, is_steady=True)}
    return Measured(speeds=speeds, reports=(report,))


def test_a_gpu_and_a_cpu_of_another_dtype_divide_the_layers() -> None:
    """The CPU holds its layers in float32, and so takes twice the memory for each."""
    model = facts()
    alone = make_plan(CHOICE, model, [node("a")]).placement.stages[0]
    n_layers = alone.layers.end
    graphs = graph_bytes(model.config, DType.BFLOAT16)
    sizes = range(0, 16 << 20, 1 << 16)
    whole = next(size for size in sizes if fits(model, [node("a", memory=size)]))
    small = graphs + whole - (alone.weight_bytes + alone.kv_bytes) // 3
    both = attic(device("cuda:0", small, "bfloat16"), device("cpu", GIB, "float32"))
    plan = make_plan(CHOICE, model, [both], measured(both, None, FAST, SLOW))
    [stage] = plan.reply(1).stages
    assert {part.devices[0] for part in stage.parts} == {"cuda:0", "cpu"}
    by_name = {part.devices[0]: part for part in stage.parts}
    n_gpu, n_cpu = (by_name[n].layers[1] - by_name[n].layers[0] for n in ("cuda:0", "cpu"))
    assert n_gpu + n_cpu == n_layers
    assert by_name["cpu"].kv_bytes / n_cpu == 2 * by_name["cuda:0"].kv_bytes / n_gpu
    assert "no layer is shared, since cuda:0 and cpu are unlike" in plan.why
    assert stage.parts_why in plan.why
    assert fits(model, [both])
    roomy = attic(device("cuda:0", GIB, "bfloat16"), device("cpu", GIB, "float32"))
    [stage] = make_plan(CHOICE, model, [roomy], measured(roomy, None, FAST, SLOW)).reply(1).stages
    assert [(part.devices, part.layers) for part in stage.parts] == [(["cuda:0"], (0, n_layers))]
    assert "cpu would only slow it down" in stage.parts_why


def test_groups_share_no_layers_where_the_ring_drafts_by_mtp() -> None:
    """That layer is not cut: a node would refuse to load its part."""
    groups = [device(f"cpu:{index}", GIB, "float32") for index in range(2)]
    two, model = attic(*groups), model_with_mtp()
    figures = measured(two, 1e-5, SLOW, SLOW)
    [shared] = make_plan(CHOICE, model, [two], figures).reply(1).stages[0].parts
    assert shared.devices == ["cpu:0", "cpu:1"]
    plan = make_plan(structs.replace(CHOICE, mtp=True), model, [two], figures)
    assert all(len(part.devices) == 1 for part in plan.reply(1).stages[0].parts)
    assert "no layer is shared, since the layer that predicts further" in plan.why


def test_two_groups_share_layers_as_far_as_gathers_are_measured() -> None:
    model = facts()
    groups = [device(f"cpu:{index}", GIB, "bfloat16", "float32") for index in range(2)]
    two = attic(*groups)
    plan = make_plan(CHOICE, model, [two], measured(two, 1e-5, SLOW, SLOW))
    [part] = plan.reply(1).stages[0].parts
    assert part.devices == ["cpu:0", "cpu:1"]
    assert plan.placement.stages[0].parts[0].devices == (0, 1)
    plan = make_plan(CHOICE, model, [two], measured(two, None, SLOW, SLOW))
    assert len(plan.reply(1).stages[0].parts) == 2
    assert "no layer is shared, since joining their parts is not measured" in plan.why
    gpus = attic(device("cuda:0", GIB, "bfloat16"), device("cuda:1", GIB, "bfloat16"))
    plan = make_plan(CHOICE, model, [gpus], measured(gpus, None, FAST, FAST))
    assert "no layer is shared, since only groups of cores can share layers" in plan.why
    asked = structs.replace(two, tensor_parallel=2)
    for figures in (Measured(), measured(two, None, SLOW, None)):
        [part] = make_plan(CHOICE, model, [asked], figures).reply(1).stages[0].parts
        assert part.devices == ["cpu:0", "cpu:1"]
    impossible = StageSeconds(layer_s=0.0, layer_256_s=0.0, embed_s=0.0, head_s=0.0)
    plan = make_plan(CHOICE, model, [two], measured(two, 1e-5, SLOW, impossible))
    assert "not measured yet" in plan.why  # what another node reports may be nonsense
