"""How a ring computes: its dtype and arithmetic, what each node makes of them, its wires."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from msgspec import structs
from support.cluster.town import make_sleepers
from test_planning import GIB, facts, node

from shardnet.cluster.head.ring_builder import ring_spec
from shardnet.cluster.measuring.measurement import NOTHING_MEASURED, Measured
from shardnet.cluster.placement.figures import LinkSpeed, StageSpeed
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.cluster.planning.placing import fits, make_plan
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Planner
from shardnet.cluster.planning.ring_dtypes import (
    SLOW_BYTES_PER_S,
    node_form,
    settle_arith,
    settle_dtype,
)
from shardnet.errors import CheckpointError, PlanError, UsageError
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.stage.estimate.packed_sizes import PackedCount, PackedSizes
from shardnet.types import (
    PAIRS_ARITHMETIC,
    PORTABLE_ARITHMETIC,
    TILES_ARITHMETIC,
    Arith,
    DType,
    NodeId,
    WireDType,
    parse_wires,
)
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

BF16, F16, F32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
HALVES = replace(facts(), stored_dtype=BF16, linear_dtype=BF16)


def avx2(name: str, memory: int = GIB) -> NodeInfo:
    """A CPU without bfloat16 instructions."""
    made = node(name, "float32", memory=memory)
    return structs.replace(made, isa="avx2", arithmetic=PORTABLE_ARITHMETIC)


def arm(name: str) -> NodeInfo:
    return structs.replace(avx2(name), isa="neon")


def pairs(name: str) -> NodeInfo:
    """A CPU with the bfloat16 instructions that the library uses."""
    made = node(name, "bfloat16", "float32")
    return structs.replace(made, isa="avx512", arithmetic=PAIRS_ARITHMETIC)


def tiles(name: str) -> NodeInfo:
    return structs.replace(pairs(name), arithmetic=TILES_ARITHMETIC)


def plain_c(name: str) -> NodeInfo:
    """A CPU without vector instructions: torch computes there, if it may."""
    return structs.replace(avx2(name), isa="portable", arithmetic="torch 2.9, DEFAULT")


def gpu(name: str, memory: int = GIB) -> NodeInfo:
    made = node(name, "bfloat16", "float16", "float32", memory=memory)
    return structs.replace(made, device="cuda (NVIDIA H100)", arithmetic="NVIDIA H100, torch 2.9")


def planned(nodes: Sequence[NodeInfo], told: ModelFacts = HALVES, **choice: Any) -> Plan:
    wanted = ModelChoice(model="/m", nodes=[one.address for one in nodes], **choice)
    return make_plan(wanted, told, nodes)


@pytest.mark.parametrize(
    ("requested", "checkpoint", "nodes", "settled"),
    [
        ("auto", "bfloat16", [pairs("a"), pairs("b")], BF16),
        ("auto", "bfloat16", [gpu("a"), avx2("b")], BF16),
        ("auto", "bfloat16", [avx2("a")], BF16),
        ("auto", "float16", [pairs("a"), gpu("b")], BF16),
        ("auto", "float16", [gpu("a"), gpu("b")], F16),
        ("auto", "float32", [gpu("a")], F32),
        ("float16", "bfloat16", [avx2("a")], F16),
    ],
)
def test_the_ring_has_the_models_dtype_whatever_a_node_computes_in(
    requested: str, checkpoint: str, nodes: list[NodeInfo], settled: DType
) -> None:
    assert settle_dtype(requested, facts(checkpoint).config, nodes) is settled


def test_a_node_that_computes_in_float32_doubles_no_other_nodes_weights() -> None:
    """Each stage is planned as its own node holds it; the wire has 16 bits."""
    plan = planned([gpu("a"), avx2("b"), plain_c("c")], layers=[(0, 2), (2, 4), (4, 6)])
    config = HALVES.config
    narrow, kept, wide = (
        model_shape(config, dtype, plan.context, stored=stored)
        for dtype, stored in ((BF16, BF16), (F32, BF16), (F32, F32))
    )
    for stage, shape in zip(plan.placement.stages, (narrow, kept, wide), strict=True):
        assert stage.weight_bytes == shape.weight_bytes(stage.layers)
        assert stage.kv_bytes == shape.kv_bytes(stage.layers)
    assert 2 * narrow.kv_layer_bytes == kept.kv_layer_bytes == wide.kv_layer_bytes
    assert kept.layer_bytes < 0.6 * wide.layer_bytes
    assert plan.wires == (WireDType.BFLOAT16,) * 2
    told = [(stage.dtype, stage.weight_dtype) for stage in plan.reply(1).stages]
    assert told == [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]


def test_files_of_quantised_weights_are_computed_in_float32_with_keys_in_16_bits() -> None:
    """By CPUs with instructions for bfloat16, which are a class of their own as before."""
    count = PackedCount(n_weights=1000, n_bytes=500)
    sizes = PackedSizes(
        layers=(count,) * HALVES.config.n_layers,
        experts=(PackedCount(),) * HALVES.config.n_layers,
        embedding=count,
        head=count,
        is_tied=False,
        can_stream=True,
        is_all=True,
    )
    told = replace(HALVES, packed=sizes, linear_dtype=None)
    plan = planned([pairs("a"), pairs("b")], told, layers=[(0, 3), (3, 6)])
    assert (plan.dtype, plan.wires) == (BF16, (WireDType.BFLOAT16,))
    assert [(f.dtype, f.kv, f.arithmetic) for f in plan.forms] == [
        (F32, BF16, PAIRS_ARITHMETIC)
    ] * 2
    assert plan.exactness.split
    assert plan.exactness.batch
    wide, half = (model_shape(told.config, dtype, plan.context) for dtype in (F32, BF16))
    assert 2 * half.kv_layer_bytes == wide.kv_layer_bytes
    for stage in plan.placement.stages:
        assert stage.kv_bytes == half.kv_bytes(stage.layers)
    for others in ([pairs("a"), avx2("b")], [avx2("a"), avx2("b")]):  # portable: all in float32
        forms = planned(others, told, layers=[(0, 3), (3, 6)]).forms
        assert [(f.dtype, f.kv, f.arithmetic) for f in forms] == [
            (F32, F32, PORTABLE_ARITHMETIC)
        ] * 2
    in_part = replace(told, packed=replace(sizes, is_all=False))
    assert {f.dtype for f in planned([pairs("a"), pairs("b")], in_part).forms} == {BF16}


def test_memory_is_that_of_each_nodes_own_form() -> None:
    """The whole fits a GPU in half the memory that plain float32 takes."""
    config = HALVES.config
    narrow, wide = (model_shape(config, d, config.default_context) for d in (BF16, F32))
    enough = narrow.memory_bytes(narrow.whole)
    assert not fits(HALVES, [structs.replace(plain_c("a"), memory_bytes=enough)])
    assert fits(HALVES, [structs.replace(pairs("a"), memory_bytes=enough)])
    little = structs.replace(plain_c("a"), memory_bytes=wide.memory_bytes(wide.whole) - 1)
    with pytest.raises(PlanError, match="does not fit"):
        planned([little])
    roomy = structs.replace(pairs("b"), memory_bytes=enough)
    free = make_plan(ModelChoice(model="/m", arith="fast"), HALVES, [little, roomy])
    assert [one.name for one in free.nodes] == ["b"]


def test_layers_are_streamed_where_the_node_keeps_them_as_they_are_stored() -> None:
    streams = planned([avx2("a")], stream_layers=2, context=256).placement.stages
    assert [stage.n_streamed for stage in streams] == [2]
    with pytest.raises(CheckpointError, match="computes in float32"):
        planned([plain_c("a")], stream_layers=2, context=256)


@pytest.mark.parametrize(
    ("nodes", "arith", "kinds"),
    [
        ([pairs("a")], Arith.FAST, [PAIRS_ARITHMETIC]),
        ([pairs("a"), pairs("b")], Arith.FAST, [PAIRS_ARITHMETIC] * 2),
        ([tiles("a"), tiles("b")], Arith.FAST, [TILES_ARITHMETIC] * 2),
        ([tiles("a"), pairs("b")], Arith.PORTABLE, [PORTABLE_ARITHMETIC] * 2),
        ([pairs("a"), avx2("b")], Arith.PORTABLE, [PORTABLE_ARITHMETIC] * 2),
        ([avx2("a"), arm("b")], Arith.FAST, [PORTABLE_ARITHMETIC] * 2),
        ([gpu("a"), pairs("b")], Arith.FAST, [gpu("a").arithmetic, PAIRS_ARITHMETIC]),
        (
            [plain_c("a"), pairs("b")],
            Arith.PORTABLE,
            [plain_c("a").arithmetic, PORTABLE_ARITHMETIC],
        ),
    ],
)
def test_unlike_cpus_compute_portably(
    nodes: list[NodeInfo], arith: Arith, kinds: list[str]
) -> None:
    """Without vector instructions that would be too slow, unless it is asked for."""
    plan = planned(nodes)
    assert settle_arith("auto", nodes) is plan.arith is arith
    assert [form.arithmetic for form in plan.forms] == kinds
    exact = plan.reply(1).exact
    assert exact is not None
    assert exact.split == (len(set(kinds)) == 1)
    asked = planned(nodes, arith="portable")
    cpus = [form for form, one in zip(asked.forms, nodes, strict=True) if one.device == "cpu"]
    assert {form.arithmetic for form in cpus} == {PORTABLE_ARITHMETIC}
    assert {form.dtype for form in cpus} == {F32}
    assert set(ring_spec(asked).ariths) == {Arith.PORTABLE}
    with pytest.raises(UsageError, match="choose one of portable, fast"):
        settle_arith("quick", nodes)


def test_a_plan_names_what_holds_for_its_ring() -> None:
    def told(nodes: list[NodeInfo], **choice: Any) -> tuple[bool, bool, str]:
        exact = planned(nodes, **choice).reply(1).exact
        assert exact is not None
        assert exact.threads == exact.batch
        return exact.split, exact.batch, exact.why

    assert told([avx2("a"), arm("b")])[:2] == (True, True)
    assert "every CPU with the compiled kernels" in told([avx2("a"), pairs("b")])[2]
    assert "CPUs with AVX-512 bfloat16" in told([pairs("a"), pairs("b")])[2]
    assert told([tiles("a"), tiles("b")])[2].endswith("threads, on CPUs with AMX bfloat16")
    split, batch, why = told([avx2("a"), avx2("b")], wire_dtype="int8")
    assert (split, batch) == (False, True)
    assert "a narrower wire rounds" in why
    split, batch, why = told([gpu("a"), avx2("b")])
    assert (split, batch) == (False, False)
    assert "a (NVIDIA H100, torch 2.9), b (portable)" in why
    assert told([gpu("a"), gpu("b")])[:2] == (True, False)
    wide = facts("float32").config
    for one, by_library in ((avx2("a"), True), (pairs("a"), True), (plain_c("a"), False)):
        form = node_form(one, F32, Arith.FAST, wide, F32)
        assert (form.by_library, form.linear) == (by_library, F32)


def test_nodes_that_are_alike_are_measured_as_they_compute_once_others_are_left_out() -> None:
    """A ring of unlike candidates is planned with portable figures, one of its CPUs with fast."""
    fast, slow = (
        StageSpeed(layer_s=time_s, layer_256_s=1, embed_s=0, head_s=0) for time_s in (0.001, 1)
    )
    config = HALVES.config
    narrow = model_shape(config, BF16, config.default_context)
    asked: list[Arith] = []

    class Around:
        async def candidates(self, _: object) -> Any:
            return found

        async def identify(self, _: str) -> ModelFacts:
            return HALVES

        async def holdings(self, *_: object) -> Any:
            return {}

        async def measured(self, *arguments: Any, **_: object) -> Measured:
            [arith] = set(arguments[4].values())
            asked.append(arith)
            return Measured(speeds={NodeId("id-a"): fast, NodeId("id-b"): slow})

        async def run(self, _: str, job: Any) -> Any:
            return job()

    class Found:
        nodes: tuple[NodeInfo, ...] = (pairs("a"), avx2("b"))
        silent = ()

    around, found = cast(Any, Around()), Found()
    planner = Planner(
        sleepers=make_sleepers(),
        node=NodeId("id-a"),
        directory=around,
        sharing=around,
        measuring=around,
        threads=around,
        log=pytest.fail,
    )
    plan = asyncio.run(planner.plan(ModelChoice(model="/m"), lambda *_: None))
    assert isinstance(plan, Plan)
    assert [one.name for one in plan.nodes] == ["a"]
    assert (asked, plan.arith) == ([Arith.PORTABLE, Arith.FAST], Arith.FAST)
    enough = narrow.memory_bytes(narrow.whole)
    found.nodes = tuple(structs.replace(one, memory_bytes=enough) for one in found.nodes[:1])
    found.nodes += (avx2("b", memory=1000),)
    plan = asyncio.run(planner.plan(ModelChoice(model="/m"), lambda *_: None))
    assert isinstance(plan, Plan)
    assert (plan.arith, len(plan.nodes)) == (Arith.FAST, 1), "in float32 it would not fit"


# --- wires


def links(**rates: float) -> Measured:
    """Links between nodes of one letter: `ab=1e6` is from a to b."""
    return Measured(
        speeds={
            NodeId(f"id-{name}"): StageSpeed(layer_s=0.001, layer_256_s=1, embed_s=0, head_s=0)
            for name in "abc"
        },
        links={
            (NodeId(f"id-{way[0]}"), NodeId(f"id-{way[1]}")): LinkSpeed(
                round_trip_s=0.001, bytes_per_s=rate
            )
            for way, rate in rates.items()
        },
    )


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("", "bfloat16 bfloat16"),
        ("int8", "int8 int8"),
        ("0-1=int8", "int8 bfloat16"),
        ("b-c=int8", "bfloat16 int8"),
        ("float16,1-2=int8", "float16 int8"),
        ("slow=int8", "bfloat16 int8"),
        ("slow=int8, b-c=float16", "bfloat16 float16"),
        ("c-a=int8", "bfloat16 bfloat16"),
    ],
)
def test_links_are_named_by_ranks_by_nodes_or_are_slow(asked: str, names: str) -> None:
    measured = links(ab=SLOW_BYTES_PER_S, bc=SLOW_BYTES_PER_S - 1, ca=1e3)
    nodes = [node("a"), node("b"), node("c")]
    choice = ModelChoice(
        model="/m",
        nodes=["a:1", "b:1", "c:1"],
        layers=[(0, 2), (2, 4), (4, 6)],
        wire_dtype=asked,
    )
    plan = make_plan(choice, facts(), nodes, measured)
    assert [wire.value for wire in plan.wires] == names.split()
    for stage, wire, rate in zip(
        plan.placement.stages, plan.wires, (SLOW_BYTES_PER_S, SLOW_BYTES_PER_S - 1), strict=False
    ):
        assert stage.hop_s == pytest.approx(0.0005 + wire.row_bytes(64) / rate)
    reply = plan.reply(1)
    assert [stage.wire_dtype for stage in reply.stages] == [*names.split(), ""]
    own = len(set(names.split())) == 1
    assert reply.wire_dtype == (names.split()[0] if own else "mixed")
    assert bool(plan.warnings) == (asked == "c-a=int8")


def test_a_stage_sends_and_receives_in_the_dtypes_of_its_links() -> None:
    choice = ModelChoice(model="/m", nodes=["a:1", "b:1", "c:1"], wire_dtype="1-2=int8")
    plan = make_plan(choice, facts(), [node("a"), node("b"), node("c")], NOTHING_MEASURED)
    assert ring_spec(plan).wires == (WireDType.BFLOAT16, WireDType.INT8)
    assert list(plan.narrowed.values()) == [WireDType.INT8]


@pytest.mark.parametrize("text", ["float32", "0-1=int4", "=int8", "int8,", "0-1"])
def test_a_wire_dtype_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the wire dtype"):
        parse_wires(text)
