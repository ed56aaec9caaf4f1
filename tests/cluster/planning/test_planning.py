"""From a client's choice to a plan."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec import structs
from support.cluster.town import make_sleepers

from shardnet.checkpoint.replica import StoredLayers
from shardnet.cluster.head.ring_builder import ring_spec
from shardnet.cluster.measuring.measurement import NOTHING_MEASURED, Measured
from shardnet.cluster.peers.node_directory import NodeCandidates
from shardnet.cluster.peers.peer_links import MAX_PEERS
from shardnet.cluster.placement.figures import HeldModel, LinkSpeed, StageSpeed
from shardnet.cluster.planning import planning
from shardnet.cluster.planning.model_shape import QuantizationChoice, model_shape
from shardnet.cluster.planning.placing import fits, make_plan, plan_again, weighed_plan
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.sharing.replica_sources import ReplicaSource
from shardnet.errors import (
    CapacityError,
    CheckpointError,
    PlanError,
    UnsupportedModelError,
    UsageError,
)
from shardnet.model.config.module_outline import HandedPart, ModuleOutline
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.registry import parse_config
from shardnet.runtime.loading.loading import cut_of, kv_room
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    attention_weights,
    graph_bytes,
    stage_weight_bytes,
)
from shardnet.stage.estimate.packed_sizes import PackedCount, PackedSizes
from shardnet.types import Arith, DType, Epoch, KvDType, LayerRange, NodeId, WireDType
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.framing.schema import encode
from shardnet.wire.messages.control import read_control
from shardnet.wire.messages.diagnostics import PowerMeter
from shardnet.wire.messages.generation import MeanStageTime, Timing
from shardnet.wire.messages.measurements import NodeMeasured
from shardnet.wire.messages.membership import Asleep, DeviceInfo, NodeInfo
from shardnet.wire.messages.plans import (
    LeftOut,
    ModelChoice,
    NamedAdapter,
    PlanReply,
    SleepingNode,
)
from shardnet_cli.output.plan_text import plan_text

GIB = 2**30


def facts(dtype: str = "bfloat16") -> ModelFacts:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": dtype,
    }
    config = parse_config(raw, "config.json")
    return ModelFacts(
        model_id="ab" * 32,
        path=Path("/m"),
        config=config,
        config_text="{}",
        stamp=(),
        is_complete=True,
    )


def node(name: str, *dtypes: str, memory: int = GIB) -> NodeInfo:
    return NodeInfo(
        node=f"id-{name}",
        name=name,
        address=f"{name}:1",
        version="0",
        device="cpu",
        memory_bytes=memory,
        memory_free_bytes=memory,
        cores=2,
        threads=1,
        dtypes=list(dtypes or ("bfloat16", "float32")),
        host_id="h",
    )


def test_whether_a_model_fits_is_estimated_from_the_memory_of_all_nodes() -> None:
    """As a plan finds it: each node alone lacks memory."""
    model, mib = facts("float32"), 2**20
    whole = make_plan(ModelChoice(model="/m"), model, [node("a")]).placement.stages[0]
    memory = whole.weight_bytes * 3 // 4 + 2 * mib
    nodes = [node("a", memory=memory), node("b", memory=memory)]
    for some, expected in ((nodes[:1], False), (nodes, True), ([node("c", memory=mib)], False)):
        assert fits(model, some) is expected
        with contextlib.nullcontext() if expected else pytest.raises(PlanError):
            make_plan(ModelChoice(model="/m"), model, some)


def test_named_nodes_are_all_used_in_their_order() -> None:
    nodes = [node("b"), node("a")]
    plan = make_plan(ModelChoice(model="/m", nodes=["b:1", "a:1"]), facts(), nodes)
    reply = plan.reply(4)
    assert [stage.name for stage in reply.stages] == ["b", "a"]
    assert reply.stages[0].layers[0] == 0
    assert reply.stages[1].layers[1] == 6
    assert reply.request == 4
    assert reply.context == 512


def test_without_names_the_model_is_not_split_and_the_other_is_left_out() -> None:
    reply = make_plan(ModelChoice(model="/m"), facts(), [node("a"), node("b")]).reply(1)
    assert [stage.name for stage in reply.stages] == ["a"]
    assert [(out.name, "every hop" in out.why) for out in reply.left_out] == [("b", True)]


def test_nodes_that_did_not_answer_are_named_in_the_plan_and_where_there_is_none() -> None:
    silent = [LeftOut(node="id-c", name="cleo", why="too busy")]
    reply = make_plan(ModelChoice(model="/m"), facts(), [node("a")], silent=silent).reply(1)
    assert reply.left_out == silent
    assert reply.why.endswith("; left out: cleo (too busy)")
    with pytest.raises(PlanError, match=r"; left out: cleo \(too busy\)$"):
        make_plan(ModelChoice(model="/m"), facts(), [node("a", memory=1)], silent=silent)


def test_measured_figures_decide_and_are_told() -> None:
    def speed(layer_s: float) -> StageSpeed:
        return StageSpeed(layer_s=layer_s, layer_256_s=1, embed_s=0, head_s=0.002)

    speeds = {NodeId("id-a"): speed(0.003), NodeId("id-b"): speed(0.001)}
    link = LinkSpeed(round_trip_s=0.001, bytes_per_s=1e8)
    ends = (NodeId("id-a"), NodeId("id-b"))
    measured = Measured(speeds=speeds, links={ends: link, ends[::-1]: link})
    nodes = [node("a"), node("b")]
    reply = make_plan(ModelChoice(model="/m"), facts(), nodes, measured).reply(1)
    assert [(stage.name, stage.compute_ms) for stage in reply.stages] == [("b", pytest.approx(8))]
    assert reply.predicted_tok_s == pytest.approx(125)
    choice = ModelChoice(model="/m", optimise="throughput")
    throughput = make_plan(choice, facts(), nodes, measured).reply(1)
    assert {s.name: s.layers[1] - s.layers[0] for s in throughput.stages} == {"a": 1, "b": 5}
    named = make_plan(ModelChoice(model="/m", nodes=["x"]), facts(), nodes, measured)
    assert [stage.layers for stage in named.reply(1).stages] == [(0, 2), (2, 6)]
    assert named.chunk_s == pytest.approx(6 * 1 + 2 * 0.002)


def test_joules_are_predicted_of_the_ring_and_of_those_without_a_node() -> None:
    """Two that must share the model, and a third in whose place either could be."""

    def drawing(name: str, watts: float) -> NodeInfo:
        meter = PowerMeter(source="plug", joules=0, counted_s=0, age_s=0, busy_w=watts)
        fits_half = node(name, memory=memory * 3 // 4 + 2**21)
        return structs.replace(fits_half, host_id=name, meters=[meter])

    alone = make_plan(ModelChoice(model="/m"), facts("float32"), [node("a")]).placement.stages[0]
    memory, link = alone.weight_bytes, LinkSpeed(round_trip_s=0.001, bytes_per_s=1e8)
    nodes = [drawing("a", 20), drawing("b", 200), drawing("c", 15)]
    times_s = {"a": 0.001, "b": 0.002, "c": 0.004}
    measured = Measured(
        speeds={
            NodeId(f"id-{name}"): StageSpeed(layer_s=s, layer_256_s=1, embed_s=0, head_s=0)
            for name, s in times_s.items()
        },
        links={(NodeId(a.node), NodeId(b.node)): link for a in nodes for b in nodes if a != b},
    )
    choice = ModelChoice(model="/m")
    reply = weighed_plan(choice, facts("float32"), nodes, measured).reply(1)
    assert {stage.name for stage in reply.stages} == {"a", "b"}
    energy, tok_s = reply.energy, reply.predicted_tok_s
    assert energy is not None
    assert tok_s is not None
    assert energy.joules_per_token == pytest.approx(220 / tok_s)
    other = make_plan(choice, facts("float32"), [nodes[0], nodes[2]], measured).reply(1)
    without = {ring.name: ring for ring in energy.without}
    assert without.keys() == {"a", "b"}
    assert without["b"].predicted_tok_s == other.predicted_tok_s
    assert without["b"].joules_per_token == pytest.approx(35 / (other.predicted_tok_s or 0))
    assert without["b"].idle_joules_per_token is None
    named = ModelChoice(model="/m", nodes=["a:1", "b:1"], layers=[(0, 3), (3, 6)])
    exactly = weighed_plan(named, facts("float32"), nodes[:2], measured)
    assert exactly.energy is not None
    assert exactly.energy.without == []  # neither has room for all
    told = plan_text(reply)
    slower = 100 * (1 - without["b"].predicted_tok_s / tok_s)
    fewer = 100 * (1 - without["b"].joules_per_token / energy.joules_per_token)
    assert (
        f" J a token (a: plug, b: plug); without b, switched off: {fewer:.0f} % fewer joules, "
        f"{slower:.0f} % slower"
    ) in told
    assert make_plan(choice, facts("float32"), nodes, measured).energy is None
    blind = [structs.replace(each, meters=[]) for each in nodes]
    assert weighed_plan(choice, facts("float32"), blind, measured).energy is None


def test_a_plan_over_as_many_nodes_as_a_head_can_have_fits_into_its_message() -> None:
    nodes = [node(f"n{number}") for number in range(MAX_PEERS + 1)]
    ends = [(NodeId(a.node), NodeId(b.node)) for a in nodes for b in nodes if a is not b]
    speed = StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
    measured = Measured(
        speeds={NodeId(one.node): speed for one in nodes},
        links=dict.fromkeys(ends, LinkSpeed(round_trip_s=0.001, bytes_per_s=1e8)),
    )
    reply = make_plan(ModelChoice(model="/m"), facts(), nodes, measured).reply(1)
    read = read_control(Frame(kind=FrameKind.CONTROL, meta=encode(reply)))
    assert isinstance(read, PlanReply)
    assert len(read.links) == len(ends)


def test_what_a_chunk_takes_is_not_known_unless_every_stage_was_measured() -> None:
    speed = StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
    half = Measured(speeds={NodeId("id-a"): speed})
    both = Measured(speeds={NodeId("id-a"): speed, NodeId("id-b"): speed})
    choice, nodes = ModelChoice(model="/m", nodes=["x"]), [node("a"), node("b")]
    assert make_plan(choice, facts(), nodes, half).chunk_s is None
    assert make_plan(choice, facts(), nodes, both).chunk_s == pytest.approx(6)


@pytest.mark.parametrize("context", [1, 256, 300, 512])
def test_a_smaller_context_never_needs_more_than_the_shape_says(context: int) -> None:
    config = facts().config
    for dtype in DType:
        shape = model_shape(config, dtype, context)
        for n_blocks in range(1, shape.n_blocks):
            smaller, exact = shape.with_blocks(n_blocks), model_shape(config, dtype, n_blocks * 256)
            assert smaller.memory_bytes(shape.whole) >= exact.memory_bytes(shape.whole)
        if shape.n_blocks > 1:
            assert (
                shape.with_blocks(1).kv_layer_bytes
                == model_shape(config, dtype, 256).kv_layer_bytes
            )


@pytest.mark.parametrize("kind", [None, *Quantization])
def test_layers_without_experts_weigh_what_they_weigh(kind: Quantization | None) -> None:
    raw = {"model_type": "deepseek_v3", "vocab_size": 320, "hidden_size": 64}
    raw |= {"intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
    raw |= {"n_routed_experts": 16, "moe_intermediate_size": 48, "first_k_dense_replace": 2}
    config = parse_config(raw, "config.json")
    rounding = QuantizationChoice(weights=kind)
    shape = model_shape(config, DType.BFLOAT16, 512, quantization=rounding)
    for start, end in ((0, 1), (0, 3), (1, 4), (2, 5), (0, 5)):
        layers = LayerRange(start, end)
        assert shape.weight_bytes(layers) == stage_weight_bytes(
            config, layers, WeightForm(dtype=DType.BFLOAT16, quant=kind)
        )
    for lighter, (_, more) in zip(shape.quantized_sizes, rounding.more(), strict=True):
        rounded = model_shape(config, DType.BFLOAT16, 512, quantization=more)
        assert shape.quantized(lighter).weight_bytes(shape.whole) == rounded.weight_bytes(
            shape.whole
        )


def test_layers_take_as_many_nodes_as_they_have_ranges() -> None:
    choice = ModelChoice(model="/m", layers=[(0, 2), (2, 6)])
    reply = make_plan(choice, facts(), [node("a"), node("b"), node("c")]).reply(1)
    assert [(stage.name, stage.layers) for stage in reply.stages] == [("a", (0, 2)), ("b", (2, 6))]
    with pytest.raises(PlanError, match=r"2 ranges.*only one node is known.*--local 2"):
        make_plan(choice, facts(), [node("a")])


def test_what_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--context 513: .* 512 positions"):
        make_plan(ModelChoice(model="/m", context=513), facts(), [node("a")])
    with pytest.raises(UsageError, match="--dtype int3"):
        make_plan(ModelChoice(model="/m", dtype="int3"), facts(), [node("a")])
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(ModelChoice(model="/m"), facts(), [node("a", memory=1000)])


@pytest.mark.parametrize("requested", ["float32", "int4", "INT8"])
def test_an_unknown_wire_dtype_is_refused(requested: str) -> None:
    with pytest.raises(UsageError, match=f"'{requested}': choose bfloat16, float16"):
        make_plan(ModelChoice(model="/m", wire_dtype=requested), facts(), [node("a")])


def test_a_narrower_wire_shortens_the_hops_and_the_prediction() -> None:
    """64 columns: 128 bytes in bfloat16, 68 in int8."""
    speed = StageSpeed(layer_s=0.001, layer_256_s=0.1, embed_s=0.0, head_s=0.0)
    link = LinkSpeed(round_trip_s=0.001, bytes_per_s=1e4)
    measured = Measured(
        speeds={NodeId("id-a"): speed, NodeId("id-b"): speed, NodeId("id-c"): speed},
        links={
            (NodeId("id-a"), NodeId("id-b")): link,
            (NodeId("id-c"), NodeId("id-b")): link,
            (NodeId("id-c"), NodeId("id-a")): link,
        },
    )
    nodes = [node("a"), node("b"), node("c")]
    exact, int8 = (
        make_plan(
            ModelChoice(
                model="/m",
                nodes=["a:1", "b:1", "c:1"],
                layers=[(0, 2), (2, 4), (4, 6)],
                wire_dtype=wire,
            ),
            facts(),
            nodes,
            measured,
        )
        for wire in ("", "int8")
    )
    assert (exact.wires, int8.wires) == ((WireDType.BFLOAT16,) * 2, (WireDType.INT8,) * 2)
    assert exact.wire_saved_s == 0
    assert int8.wire_saved_s == pytest.approx(2 * 60 / 1e4)
    assert (exact.narrowed, int8.narrowed) == ({}, {2: WireDType.INT8, 4: WireDType.INT8})
    for plan, row_bytes in ((exact, 128), (int8, 68)):
        hops = [stage.hop_s for stage in plan.placement.stages]
        assert hops == pytest.approx([0.0005 + size / 1e4 for size in (row_bytes, row_bytes, 4)])
        assert plan.placement.predicted_tok_s == pytest.approx(1 / (0.006 + sum(map(float, hops))))
    assert int8.reply(1).wire_dtype == "int8"
    assert int8.reply(1).wire is None


def test_what_a_wire_saves_is_unknown_where_a_link_is() -> None:
    choice = ModelChoice(model="/m", nodes=["a:1", "b:1"], wire_dtype="int8")
    assert make_plan(choice, facts(), [node("a"), node("b")]).wire_saved_s is None
    alone = ModelChoice(model="/m", nodes=["a:1"], wire_dtype="int8")
    assert make_plan(alone, facts(), [node("a")]).wire_saved_s == 0


def test_rounded_keys_and_values_are_planned_with_and_suggested() -> None:
    """A row of 16 columns takes 18 bytes instead of 32."""
    config = facts().config
    both = QuantizationChoice(weights=Quantization.INT4, kv_dtype=KvDType.INT8)
    plain, rounded = (
        model_shape(config, DType.BFLOAT16, 512, None, rounding)
        for rounding in (QuantizationChoice(), both)
    )
    assert (rounded.kv_block_bytes, plain.kv_block_bytes) == (256 * 4 * 18, 256 * 4 * 32)
    assert [lighter.flags for lighter in plain.quantized_sizes] == [
        ("--quant int8",),
        ("--quant int4",),
        ("--kv-dtype int8",),
        ("--quant int8", "--kv-dtype int8"),
        ("--quant int4", "--kv-dtype int8"),
    ]
    lightest = plain.quantized(plain.quantized_sizes[-1])
    assert (
        replace(lightest, layer_read_bytes=rounded.layer_read_bytes, streaming=rounded.streaming)
        == rounded
    )
    choice = ModelChoice(model="/m", kv_dtype="int8")
    reply = make_plan(choice, facts(), [node("a")]).reply(1)
    assert (reply.kv_dtype, reply.stages[0].kv_bytes) == ("int8", 6 * 2 * rounded.kv_block_bytes)
    kv_alone = QuantizationChoice(kv_dtype=KvDType.INT8)
    needed = {
        rounding: shape.memory_bytes(shape.whole)
        for rounding in (QuantizationChoice(), kv_alone, both)
        for shape in [model_shape(config, DType.BFLOAT16, 512, None, rounding)]
    }
    assert needed[both] < needed[kv_alone] < needed[QuantizationChoice()]
    for least, flags in ((kv_alone, "--kv-dtype int8"), (both, "--quant int4 --kv-dtype int8")):
        with pytest.raises(PlanError) as refused:
            make_plan(ModelChoice(model="/m"), facts(), [node("a", memory=needed[least])])
        assert f"use {flags} (needs " in str(refused.value)
        assert ("--quant int8 --kv-dtype" in str(refused.value)) is False


def test_a_gpu_keeps_memory_for_graphs() -> None:
    """In the plan and in the room of the stage: what was planned loads."""
    config, form = facts().config, WeightForm(dtype=DType.BFLOAT16)
    shape = model_shape(config, DType.BFLOAT16, 512)
    needed, graphs = shape.memory_bytes(shape.whole), graph_bytes(config, DType.BFLOAT16)
    for device, more in (("cpu", 0), ("cuda", graphs)):
        enough = structs.replace(node("a", memory=needed + more), device=device)
        [stage] = make_plan(ModelChoice(model="/m"), facts(), [enough]).placement.stages
        room = kv_room(config, stage.layers, form, 512, enough.memory_bytes, device=device)
        assert room.blocks >= 2
        less = structs.replace(enough, memory_bytes=enough.memory_bytes - 1)
        with pytest.raises(PlanError):
            make_plan(ModelChoice(model="/m"), facts(), [less])
    with pytest.raises(CapacityError):
        kv_room(config, shape.whole, form, 512, graphs, device="cuda")


def test_a_node_stands_by_only_with_the_memory_to_load_and_compute_both_stages() -> None:
    """In a window of its activations' size it was named, and could not load what it was named for,
    while a node beside the ring could have stood by."""
    model, form = facts("float32"), WeightForm(dtype=DType.FLOAT32)
    choice = ModelChoice(model="/m", nodes=["a:1", "b:1"], standby="auto")
    found = set()
    for kib in range(2300, 3700, 100):
        nodes = [node("a", memory=kib << 10), node("b")]
        plan = make_plan(choice, model, nodes)
        found.add(bool(plan.standbys))
        if plan.standbys:
            assert kv_room(model.config, LayerRange(0, 6), form, 512, kib << 10).blocks >= 2
        else:
            [standby] = plan.with_standbys("auto", [node("c")]).standbys
            assert standby.node == "id-c"
    assert found == {False, True}


@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1), (1, 1, 1, 1), (5, 1), (2, 5, 3)])
def test_what_fits_the_shards_of_a_plan_fits_each_of_them(shares: tuple[int, ...]) -> None:
    """Activations in each; keys and values where heads are fewer; unequal shares of weights."""
    config, form = facts().config, WeightForm(dtype=DType.BFLOAT16)
    assert (config.n_heads, config.n_kv_heads) == (4, 2)
    shape, n_shards = model_shape(config, DType.BFLOAT16, 512), len(shares)
    held = HeldModel(shape=shape, memory_bytes=0)
    cuts = [cut_of(config, index, n_shards, shares) for index in range(n_shards)]

    def plans(memory_bytes: int) -> bool:
        joined = held.shared_by(shares, [memory_bytes] * n_shards)
        return joined.shape.memory_bytes(shape.whole) <= joined.memory_bytes

    least = next(kib << 10 for kib in range(1, 1 << 14) if plans(kib << 10))
    for cut in cuts:
        assert kv_room(config, shape.whole, form, 512, least, cut=cut).blocks >= 2
    fullest = max(cuts, key=lambda cut: cut.share(attention_weights(config)))
    with pytest.raises(CapacityError):  # each shard has activations of its own
        kv_room(config, shape.whole, form, 512, least - held.working_bytes, cut=fullest)


def test_equal_shards_have_room_for_as_much_as_their_memory_holds() -> None:
    shape = model_shape(facts().config, DType.BFLOAT16, 512)
    held = HeldModel(shape=shape, memory_bytes=0).shared_by((1, 1), [1 << 30, 1 << 31])
    assert held.memory_bytes == 2 << 30
    assert held.shape.activation_bytes == 2 * shape.activation_bytes
    assert held.shape.kv_bytes(shape.whole) == shape.kv_bytes(shape.whole)


def test_more_streamed_layers_than_there_are_is_refused() -> None:
    told = replace(facts("float32"), stored_dtype=DType.FLOAT32)
    every = ModelChoice(model="/m", stream_layers=6)
    [stage] = make_plan(every, told, [node("a")]).placement.stages
    assert stage.n_streamed == 6
    with pytest.raises(UsageError, match=r"--stream-layers 7: the model has 6 layers"):
        make_plan(structs.replace(every, stream_layers=7), told, [node("a")])


def test_layers_are_streamed_only_where_they_must_be() -> None:
    choice = ModelChoice(model="/m", stream_layers="auto", context=256)
    told = replace(facts("float32"), stored_dtype=DType.FLOAT32)
    shape = model_shape(told.config, DType.FLOAT32, 256)
    enough = shape.memory_bytes(shape.whole)
    roomy = make_plan(choice, told, [node("anna", memory=enough)])
    assert [stage.n_streamed for stage in roomy.placement.stages] == [0]
    little = node("bert", memory=enough - 1)
    with pytest.raises(PlanError):
        make_plan(structs.replace(choice, stream_layers=0), told, [little])
    [stage] = make_plan(choice, told, [little]).reply(1).stages
    assert stage.streamed_layers >= 3
    both = make_plan(choice, told, [little, node("anna", memory=enough)])
    assert sum(stage.n_streamed for stage in both.placement.stages) == 0
    with pytest.raises(CheckpointError, match="have to be converted when they are read"):
        make_plan(choice, facts("float32"), [little])
    asked = make_plan(structs.replace(choice, stream_layers=4), told, [node("anna")])
    assert [stage.n_streamed for stage in asked.placement.stages] == [4]


def packed(bits: int) -> PackedSizes:
    """Weights that all stay packed, in so many bits."""
    count = PackedCount(n_weights=1000, n_bytes=1000 * bits // 8)
    return PackedSizes(
        layers=(count,) * 6,
        experts=(PackedCount(),) * 6,
        embedding=count,
        head=count,
        is_tied=False,
        can_stream=True,
        is_all=True,
    )


def test_what_transformers_modules_do_not_do_is_no_way_out() -> None:
    told = replace(facts("float32"), stored_dtype=DType.FLOAT32)
    layer = {"weight": (64, 64)}
    outline = ModuleOutline(
        model_type="clvp",
        config_text="{}",
        layer_list="layers",
        layers=(layer,) * 6,
        embedding=layer,
        everywhere={},
        head=layer,
        output_counts=(1,) * 6,
        borders=((HandedPart(layer=0, output=0, shape=(1, -1, 64)),),) * 6,
        n_passes=(1,) * 6,
        caches=tuple((n,) for n in range(6)),
        kv_numbers=(64,) * 6,
        state_bytes=(0,) * 6,
        shared_kv_from=None,
    )
    plugged = replace(told, config=replace(told.config, outline=outline))

    def planned(model: ModelFacts, n_streamed: int | Literal["auto"]) -> Plan:
        shape = model_shape(model.config, DType.FLOAT32, 256)
        little = node("anna", memory=shape.memory_bytes(shape.whole) - 1)
        choice = ModelChoice(model="/m", stream_layers=n_streamed, context=256)
        return make_plan(choice, model, [little])

    with pytest.raises(PlanError, match=r"--quant int8 .*--kv-dtype int8 .*--stream-layers auto"):
        planned(told, 0)
    n_streamed: int | Literal["auto"]
    for n_streamed in (0, "auto"):
        with pytest.raises(PlanError, match=r"Ways out: (add|give) [^-]*--memory \S+$"):
            planned(plugged, n_streamed)
    with pytest.raises(UnsupportedModelError, match="leave --stream-layers out"):
        planned(plugged, 2)


def test_the_quality_of_int4_is_warned_of() -> None:
    """Not where the file's makers have rounded its weights to about 4 bits."""

    def warnings(quant: str, stored: PackedSizes | None = None) -> list[str]:
        choice = structs.replace(ModelChoice(model="/m"), quant=quant)
        plan = make_plan(choice, replace(facts(), packed=stored), [node("a")])
        assert plan.reply(0).warnings == plan.warnings
        return plan.warnings

    assert len(warnings("int4")) == len(warnings("int4", packed(8))) == 1
    assert "--quant int8 is recommended" in warnings("int4")[0]
    assert not warnings("") + warnings("int8") + warnings("int4", packed(4)) + warnings("")


def test_unknown_keys_of_the_config_end_the_plan_or_are_warned_of() -> None:
    strange = replace(facts(), unknown_keys=("logit_scale = 0.1", "spread = 7"))

    class Sharing:
        async def identify(self, model: str) -> ModelFacts:
            return strange

    others = cast(Any, None)
    planner = Planner(
        sleepers=make_sleepers(),
        node=NodeId("id-a"),
        directory=others,
        sharing=cast(Any, Sharing()),
        measuring=others,
        threads=others,
        log=others,
    )

    with pytest.raises(UnsupportedModelError, match=r"logit_scale = 0\.1, spread = 7"):
        asyncio.run(planner.identify(ModelChoice(model="/m")))
    choice = ModelChoice(model="/m", ignore_unknown_config=True)
    plan = make_plan(choice, asyncio.run(planner.identify(choice)), [node("a")])
    assert "logit_scale = 0.1, spread = 7" in plan.warnings[0]
    assert ring_spec(plan).form.ignore_unknown_config


def test_a_generation_disproves_what_was_predicted_far_off() -> None:
    speeds = {
        NodeId(f"id-{name}"): StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
        for name in "ab"
    }
    link = LinkSpeed(round_trip_s=0.001, bytes_per_s=1e9)
    measured = Measured(speeds=speeds, links={(NodeId("id-a"), NodeId("id-b")): link})
    choice, nodes = ModelChoice(model="/m", nodes=["a:1", "b:1"]), [node("a"), node("b")]
    plan = make_plan(choice, facts(), nodes, measured)
    assert plan.placement.predicted_tok_s == pytest.approx(1 / 0.007, rel=0.01)

    def timing(tok_s: float) -> Timing:
        stages = tuple(
            MeanStageTime(rank=rank, compute_ms=3, queue_ms=0.1, wire_ms=0.5) for rank in range(2)
        )
        return Timing(load_s=0, ttft_s=0, decode_tok_s=tok_s, total_s=1, per_stage=stages)

    assert plan.disproved_by((0.003, 0.0044), timing(140)) == []
    assert plan.disproved_by((), timing(10)) == [], "others used the ring too"
    [slow] = plan.disproved_by((0.003, 0.006), timing(140))
    assert (slow.node, slow.layers, slow.compute_s) == ("id-b", LayerRange(3, 6), 0.006)
    assert slow.step_s is None
    [head] = plan.disproved_by((0.003, 0.003), timing(100))
    assert (head.node, head.step_s) == ("id-a", pytest.approx(0.003))
    many = make_plan(structs.replace(choice, optimise="throughput"), facts(), nodes, measured)
    assert many.disproved_by((0.003, 0.003), timing(100)) == []


def test_a_node_with_another_model_at_the_path_is_in_no_ring_that_replaces_one() -> None:
    """Nodes would refuse a ring with it; the others can go on."""
    known = [node("a"), node("b"), node("c")]
    ids = ("ab" * 32, "cd" * 32, "ab" * 32)
    holdings = {
        NodeId(one.node): ReplicaSource(
            node=NodeId(one.node),
            name=one.name,
            address=one.address,
            model_id=model_id,
            is_complete=True,
        )
        for one, model_id in zip(known, ids, strict=True)
    }
    for named in ([], [one.address for one in known]):
        choice = ModelChoice(model="/m", nodes=named)
        plan = plan_again(choice, facts(), known, NOTHING_MEASURED, (), holdings, Arith.FAST)
        assert "b" not in [one.name for one in plan.ring_nodes]
        [out] = [out for out in plan.reply(1).left_out if out.name == "b"]
        assert out.why == f"it has another model there: {ids[1][:12]}"


def test_what_a_plan_fetches_is_told_with_its_sources() -> None:
    whole = facts()
    model = replace(whole, layers=StoredLayers(size_bytes=(10**6,) * 6, held=()))
    nodes = [node("a"), node("b"), node("c")]
    holdings = {
        NodeId(f"id-{name}"): ReplicaSource(
            node=NodeId(f"id-{name}"),
            name=name,
            address=f"{name}:1",
            model_id=model_id,
            is_complete=bool(model_id),
        )
        for name, model_id in (("a", whole.model_id), ("b", ""))
    }
    speeds = {
        NodeId(f"id-{name}"): StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
        for name in "abc"
    }
    link = LinkSpeed(round_trip_s=0.001, bytes_per_s=1e6)
    measured = Measured(speeds=speeds, links={(NodeId("id-a"), NodeId("id-b")): link})
    choice = ModelChoice(model="/m", nodes=["a:1", "b:1", "c:1"])
    stages = make_plan(choice, model, nodes, measured, holdings=holdings).reply(1).stages
    assert [(s.fetch_bytes, s.fetch_from) for s in stages] == [
        (0, []),
        (2 * 10**6, ["a"]),
        (0, []),
    ], "who does not say is taken to have all"
    assert stages[1].fetch_s == pytest.approx(2)
    unmeasured = make_plan(choice, model, nodes, holdings=holdings).reply(1).stages
    assert unmeasured[1].fetch_s is None


def test_nodes_that_are_to_be_left_out_are_no_candidates() -> None:
    infos = tuple(SimpleNamespace(node=name) for name in "abc")

    async def candidates(addresses: list[str]) -> Any:
        return SimpleNamespace(nodes=infos, silent=())

    planner = Planner(
        sleepers=make_sleepers(),
        node=NodeId("a"),
        directory=cast(Any, SimpleNamespace(candidates=candidates)),
        sharing=cast(Any, None),
        measuring=cast(Any, None),
        threads=cast(Any, None),
        log=pytest.fail,
    )
    choice = ModelChoice(model="m")
    nodes, _ = asyncio.run(planner.find_candidates(choice, ["b", "unknown"]))
    assert [info.node for info in nodes] == ["a", "c"]
    with pytest.raises(PlanError, match="no node is left"):
        asyncio.run(planner.find_candidates(choice, ["a", "b", "c"]))


def test_rings_behind_one_head_compute_alike_and_are_told() -> None:
    """Each has the dtype and arithmetic that all settle on; the asked node's is the first."""
    speed = StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
    known = (node("a"), node("b", "float32"), node("c", memory=1))
    measured = Measured(speeds={NodeId(one.node): speed for one in known})
    choice = ModelChoice(model="/m", optimise="throughput")
    plan = make_plan(choice, facts(), known, measured)
    assert [ring.choice.nodes for ring in plan.rings] == [["a:1"], ["b:1"]]
    assert {(ring.choice.dtype, ring.dtype) for ring in plan.rings} == {
        ("bfloat16", DType.BFLOAT16)
    }
    reply = plan.reply(1)
    assert [[stage.name for stage in ring.stages] for ring in reply.rings] == [["a"], ["b"]]
    assert [stage.name for stage in reply.stages] == ["a"]
    assert reply.predicted_tok_s == pytest.approx(2 / 0.006)
    assert reply.why.startswith("2 rings behind one head")
    assert [out.name for out in reply.left_out] == ["c"]
    for fixed in ({"optimise": "latency"}, {"nodes": ["a:1", "b:1"]}, {"stream_layers": "auto"}):
        one = make_plan(structs.replace(choice, **fixed), facts(), known[:2], measured)
        assert not one.beside


def test_whoever_leads_one_ring_has_it_over_all_nodes_that_help() -> None:
    """Not over its part of them, where several rings would give as much: with adapters, and where
    a ring is replaced, nobody builds the others."""
    speed = StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
    known = (node("a"), node("b"))
    measured = Measured(
        speeds={NodeId(one.node): speed for one in known},
        links={(NodeId("id-a"), NodeId("id-b")): LinkSpeed(round_trip_s=1e-4, bytes_per_s=1e8)},
    )
    choice = ModelChoice(model="/m", optimise="throughput")
    adapted = structs.replace(choice, adapters=[NamedAdapter(name="tales", path="/tales")])
    assert len(make_plan(choice, facts(), known, measured).rings) == 2
    for plan in (
        make_plan(adapted, facts(), known, measured),
        make_plan(choice, facts(), known, measured, divides=False),
        plan_again(choice, facts(), known, measured, (), {}, Arith.FAST),
    ):
        assert {one.name for one in plan.nodes} == {"a", "b"}
        assert not plan.beside
        assert plan.placement.predicted_tok_s == pytest.approx(1 / 0.003, rel=0.01)


@pytest.mark.parametrize("rate", [0.0, 5e-324, 1e-300])
def test_a_disk_of_which_nonsense_is_told_counts_as_not_measured(rate: float) -> None:
    """Else its reads take longer than any figure that travels, and no client could read a plan."""
    known = [node("a")]
    speed = StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
    told = NodeMeasured(node="id-a", name="a", memory_bytes=GIB, disk_bytes_per_s=rate)
    measured = Measured(speeds={NodeId("id-a"): speed}, reports=(told,))
    choice = ModelChoice(model="/m", stream_layers=6)
    model = replace(facts(), stored_dtype=DType.BFLOAT16)
    plan = make_plan(choice, model, known, measured)
    assert plan.placement.predicted_tok_s is None
    assert plan.placement.why.endswith("(not everything is measured yet)")


def test_members_that_leave_are_used_where_a_lost_ring_cannot_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But none that is to be left out, nor others that drain or rest."""
    here, leaving, resting = (node(name, "bfloat16") for name in "abc")
    found = NodeCandidates(nodes=(here,), away=(leaving, resting))
    tried: list[str] = []

    def plan_again(asked: Any, facts: Any, nodes: Sequence[NodeInfo], *_: object) -> Any:
        tried.append("".join(one.name for one in nodes))
        if len(nodes) == 1:
            raise PlanError("it does not fit")
        return Mock()

    async def run(what: str, job: Callable[[], Any]) -> Any:
        return job()

    monkeypatch.setattr(planning, "plan_again", plan_again)
    planner = Planner(
        sleepers=make_sleepers(),
        node=NodeId("a"),
        directory=Mock(candidates=AsyncMock(return_value=found)),
        sharing=Mock(holdings=AsyncMock()),
        measuring=Mock(),
        threads=Mock(run=run),
        log=print,
    )
    opened: Any = SimpleNamespace(choice=ModelChoice(model="m"), facts=None)
    now: Any = Mock(nodes=(here, leaving), context=8, dtype=DType.BFLOAT16)
    asyncio.run(planner.replan(opened, now, {}))
    assert tried == ["a", "ab"]
    with pytest.raises(PlanError):
        asyncio.run(planner.replan(opened, now, {NodeId(leaving.node): "it leaves"}))
    assert tried == ["a", "ab", "a"]


def test_layers_of_stages_that_span_nodes_need_no_names_of_nodes() -> None:
    choice = ModelChoice(model="/m", layers=[(0, 2), (2, 6)], nodes_per_stage=2)
    nodes = [node(name) for name in "abcde"]
    plan = make_plan(choice, facts(), nodes)
    assert [(one.node, one.shards, str(one.layers)) for one in plan.placement.stages] == [
        ("id-a", ("id-b",), "0-2"),
        ("id-c", ("id-d",), "2-6"),
    ]
    with pytest.raises(PlanError, match="2 ranges, one for each 2 nodes, and only 3 nodes") as few:
        make_plan(choice, facts(), nodes[:3])
    assert few.value.remedy.startswith("name 4 nodes")


def test_a_stage_over_several_nodes_is_planned_told_and_ordered() -> None:
    """Named nodes make stages in their order; when one is lost, the others do without such stages.

    Narrower parts are no other node's bits: the plan says so, unless they are rounded anyway.
    """
    nodes = [node(name) for name in "abcd"]
    choice = ModelChoice(
        model="/m",
        nodes=[one.address for one in nodes],
        nodes_per_stage=2,
        wire_dtype="gather=int8",
        dtype="float32",
    )
    plan = make_plan(choice, facts(), nodes)
    assert [one.name for one in plan.ring_nodes] == ["a", "b", "c", "d"]
    told = plan.reply(1)
    assert [[shard.name for shard in stage.shards] for stage in told.stages] == [["b"], ["d"]]
    assert told.exact is not None
    assert not told.exact.split
    assert {wire for wire, _ in plan.rounded_parts.values()} == {WireDType.INT8}
    assert sorted(plan.rounded_parts) == [*range(6)]
    spec = ring_spec(plan)
    order = spec.order(1, 1, ring="r", epoch=Epoch(1), sources=["c:1", "d:1"], instead_of="")
    assert (order.rank, order.shard, order.form.gather_dtype) == (1, 1, WireDType.INT8)
    assert order.border_width == plan.facts.config.row_width
    assert order.shard_nodes == ["c:1", "d:1"]
    assert order.addresses == ["a:1", "c:1"]
    assert order.sources == ["c:1"]

    exact = make_plan(
        structs.replace(choice, wire_dtype="gather=bfloat16", dtype="bfloat16"), *[facts(), nodes]
    )
    assert exact.rounded_parts == {}
    told = exact.reply(1)
    assert told.exact is not None
    assert told.exact.split

    left = plan_again(choice, facts(), nodes[:3], NOTHING_MEASURED, (), {}, Arith.FAST)
    assert (left.spans, len(left.nodes)) == ((), 3)
    standing = make_plan(structs.replace(choice, standby="auto"), facts(), nodes)
    assert standing.standbys == ()
    best = make_plan(ModelChoice(model="/m", nodes_per_stage=2), facts(), nodes)
    assert [len(further) for further in best.spans] == [1]
    assert len(best.placement.left_out) == 2
    rest = make_plan(structs.replace(choice, nodes=choice.nodes[:3]), facts(), nodes[:3])
    assert [len(further) for further in rest.spans] == [1, 0]
    gpu = structs.replace(nodes[0], device="cuda")
    groups = [
        DeviceInfo(name=f"cpu:{i}", device="cpu", memory_bytes=GIB, threads=1, dtypes=gpu.dtypes)
        for i in range(2)
    ]
    with pytest.raises(PlanError, match="a stage spans CPUs only"):
        make_plan(choice, facts(), [gpu, *nodes[1:]])
    many = make_plan(choice, facts(), [structs.replace(nodes[0], devices=groups), *nodes[1:]])
    assert not any(stage.parts for stage in many.placement.stages), "its first one alone computes"
    with pytest.raises(UsageError, match="layers that nodes share"):
        make_plan(structs.replace(choice, stream_layers=1), facts(), nodes)


def model_with_mtp() -> ModelFacts:
    """A model with a layer that predicts further tokens."""
    raw = {
        "model_type": "glm4_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "torch_dtype": "float32",
    }
    return replace(facts("float32"), config=parse_config(raw, "config.json"), has_mtp=True)


def test_what_predicts_further_tokens_is_planned_on_the_last_stage() -> None:
    """Its weights, the embedding that it needs there, one layer more of keys and values."""
    model = model_with_mtp()
    nodes, choice = [node("a"), node("b")], ModelChoice(model="/m", layers=[(0, 3), (3, 6)])
    plain, ahead = (
        make_plan(structs.replace(choice, mtp=mtp, nodes=["a:1", "b:1"]), model, nodes)
        for mtp in (False, True)
    )
    before, after = (plan.placement.stages for plan in (plain, ahead))
    table, joined = 128 * 64 * 4, (2 * 64 * 64 + 3 * 64) * 4
    added = after[1].weight_bytes - before[1].weight_bytes
    assert before[0] == after[0]
    assert added == table + ahead.reply(1).mtp_bytes
    assert ahead.reply(1).mtp_bytes > joined
    assert after[1].kv_bytes * 3 == before[1].kv_bytes * 4
    assert plain.reply(1).mtp_bytes == 0
    with pytest.raises(UsageError, match="--speculate mtp: the model has no layer"):
        make_plan(ModelChoice(model="/m", mtp=True), facts(), nodes)


def has_room(choice: ModelChoice, model: ModelFacts, one: NodeInfo) -> bool:
    with contextlib.suppress(PlanError):
        return bool(make_plan(choice, model, [one]))
    return False


def test_auto_has_what_predicts_further_tokens_where_there_is_room() -> None:
    """Else the ring is made without it. No ring is made anew for requests that would use it."""
    model, auto = model_with_mtp(), ModelChoice(model="/m", context=512).drafting("auto")
    with_it = make_plan(auto, model, [node("a")])
    assert with_it.choice.mtp
    assert with_it.reply(1).mtp_bytes > 0
    plain = ModelChoice(model="/m", context=512)
    sizes = (node("a", memory=n << 14) for n in range(1, 1000))
    small = next(one for one in sizes if has_room(plain, model, one))
    without = make_plan(auto, model, [small])
    assert not without.choice.mtp
    assert without.reply(1).mtp_bytes == 0
    assert not has_room(structs.replace(plain, mtp=True), model, small)
    more = make_plan(auto, model, [small, node("b", memory=small.memory_bytes)])
    assert not more.choice.mtp, "another node is slower than drafts are faster"
    assert not make_plan(auto, facts(), [node("a")]).choice.mtp, "the model has none"
    asked = ModelChoice(model="/m")
    for plan in (with_it, without):
        assert plan.computes(asked.drafting("auto"))
        assert plan.computes(with_it.choice), "as programs ask again with what they were told"
    assert not without.computes(asked.drafting("mtp"))
    again = make_plan(with_it.choice, model, [small])
    assert not again.choice.mtp, "a ring that lost a node goes on without"


def test_what_predicts_further_tokens_is_on_no_stage_that_is_cut() -> None:
    """A node whose devices share layers is left out, and named where it is needed."""
    model, choice = model_with_mtp(), ModelChoice(model="/m", mtp=True)
    plain, shared = node("a"), node("b")
    groups = [
        DeviceInfo(
            name=f"cpu:{i}",
            device="cpu",
            memory_bytes=GIB,
            threads=1,
            dtypes=plain.dtypes,
        )
        for i in range(2)
    ]
    shared = structs.replace(shared, devices=groups, tensor_parallel=2)
    plan = make_plan(choice, model, [plain, shared])
    assert [left.name for left in plan.reply(1).left_out] == ["b"]
    assert "its devices share each layer" in plan.reply(1).left_out[0].why
    with pytest.raises(UsageError, match="cannot be cut over devices, as b does"):
        make_plan(choice, model, [shared, plain])
    with pytest.raises(UsageError, match="cannot be cut over devices, as b does"):
        make_plan(structs.replace(choice, nodes=["a:1", "b:1"]), model, [plain, shared])
    plan = make_plan(structs.replace(choice, nodes_per_stage=2), model, [plain, node("c")])
    assert [[further.name for further in span] for span in plan.spans] == [["c"]]
    cut = structs.replace(shared, tensor_parallel=0)
    [part] = make_plan(choice, model, [cut]).placement.stages[0].parts
    assert part.devices == (0,)


def test_what_a_plan_computes_is_what_a_choice_asks_for_or_leaves_open() -> None:
    plan = make_plan(ModelChoice(model="/m", quant="int8", mmproj="/p"), facts(), [node("a")])
    open_choice = ModelChoice(model="/m", quant="int8")
    assert plan.computes(open_choice)
    for same in ({"mmproj": "/p"}, {"context": plan.context}, {"dtype": "bfloat16"}):
        assert plan.computes(structs.replace(open_choice, **same)), same
    for other in ({"mmproj": "/q"}, {"quant": ""}, {"context": 1}, {"mtp": True}, {"threads": 3}):
        assert not plan.computes(structs.replace(open_choice, **other)), other


class Site:
    """A node a that plans, and b, which sleeps and wakes if it `wakes`; how fast both are."""

    def __init__(self, layer_s: dict[str, float], memory: int = GIB, *, wakes: bool = True) -> None:
        self.layer_s, self.awake, self.told = layer_s, [node("a", memory=memory)], list[Any]()
        asleep = Asleep(macs=["00:1b:44:11:3a:b7"], wake_at="127.0.0.1:9", wake_s=24.2)
        self.sleepers = make_sleepers(wait_s=0.05)
        self.sleepers.fell_asleep(structs.replace(node("b", memory=memory), asleep=asleep))
        self.sleepers.on_waking = lambda nodes: (
            asyncio.get_running_loop().call_soon(self.wake) if wakes else None
        )
        self.planner = Planner(
            node=NodeId("id-a"),
            directory=cast(Any, self),
            sleepers=self.sleepers,
            sharing=Mock(
                identify=AsyncMock(return_value=facts("float32")),
                holdings=AsyncMock(return_value={}),
            ),
            measuring=cast(Any, self),
            threads=cast(Any, self),
            log=pytest.fail,
        )

    def wake(self) -> None:
        self.awake.append(node("b", memory=self.awake[0].memory_bytes))
        self.sleepers.woke(NodeId("id-b"), "b")

    async def candidates(self, addresses: Sequence[str]) -> NodeCandidates:
        return NodeCandidates(nodes=tuple(self.awake))

    async def measured(self, nodes: Sequence[NodeInfo], *_: object, **__: object) -> Measured:
        speeds = {
            NodeId(one.node): StageSpeed(
                layer_s=self.layer_s[one.name], layer_256_s=1, embed_s=0, head_s=0
            )
            for one in nodes
        }
        link = LinkSpeed(round_trip_s=1e-4, bytes_per_s=1e9)
        return Measured(
            speeds=speeds, links={(x, y): link for x in speeds for y in speeds if x != y}
        )

    async def known(self, only: NodeInfo, *_: object) -> Measured:
        return await self.measured([only])

    async def run(self, _: str, job: Callable[[], Plan]) -> Plan:
        return job()

    def plan(self) -> Any:
        choice = ModelChoice(model="/m")
        return asyncio.run(self.planner.plan(choice, lambda *_: None))

    def plan_awake(self) -> Any:
        choice = ModelChoice(model="/m")
        return asyncio.run(
            self.planner.plan_awake(
                choice, lambda *_: None, self.told.append, lambda *told: self.told.append(told)
            )
        )


def test_a_plan_names_the_node_that_would_be_woken_and_wakes_nobody() -> None:
    """Where it is much faster with it; what is somewhat faster is not worth it."""
    site = Site({"a": 0.01, "b": 0.001})
    plan = site.plan()
    assert [one.name for one in plan.asleep] == ["b"]
    reply = plan.reply(1)
    assert reply.asleep == [SleepingNode(node="id-b", name="b", wake_s=24.2)]
    assert reply.why.endswith("; b sleeps: 25 s to wake")
    assert reply.predicted_tok_s == pytest.approx(1000 / 6)
    assert [one.name for one in site.awake] == ["a"]
    reply = Site({"a": 0.01, "b": 0.05}).plan().reply(1)
    assert [(stage.name, reply.asleep) for stage in reply.stages] == [("a", [])]
    assert reply.left_out == [
        LeftOut(node="id-b", name="b", why="b sleeps: 25 s to wake; it is not needed")
    ]


def test_a_node_that_a_ring_needs_is_woken_before_it_is_planned_for() -> None:
    site = Site({"a": 0.01, "b": 0.001})
    assert site.plan_awake() == planning.Elsewhere(address="b:1", model="/m"), "b leads it"
    [plan, progress] = site.told
    assert [one.name for one in plan.asleep] == ["b"]
    assert progress == (0, "waiting", 0, 25)


def test_a_node_that_does_not_wake_is_done_without_by_name() -> None:
    """By the others, or not at all."""
    site = Site({"a": 0.01, "b": 0.001}, wakes=False)
    plan = site.plan_awake()
    assert [one.name for one in plan.nodes] == ["a"]
    [out] = plan.silent
    assert (out.name, out.why[:35]) == ("b", "it did not wake within 0.05 s; see ")
    whole = make_plan(ModelChoice(model="/m"), facts("float32"), [node("a")]).placement.stages[0]
    memory = whole.weight_bytes * 3 // 4 + 2 * 2**20
    site = Site({"a": 0.01, "b": 0.01}, memory, wakes=False)
    with pytest.raises(PlanError, match=r"left out: b \(it did not wake within 0\.05 s"):
        site.plan_awake()
    assert len(site.told) == 2, "it was tried once"
    woken = Site({"a": 0.01, "b": 0.01}, memory).plan_awake()
    assert [one.name for one in woken.ring_nodes] == ["a", "b"]
