"""Plans and runs as people and programs read them."""

from __future__ import annotations

import msgspec
import pytest

from shardnet.errors import UsageError
from shardnet.types import parse_layers
from shardnet.wire.messages.generation import LastRun, MeanStageTime, Timing
from shardnet.wire.messages.measurements import (
    DeviceMeasured,
    NodeMeasured,
    StageSeconds,
    WayMeasured,
)
from shardnet.wire.messages.plans import (
    NOT_THERE,
    KeptPositions,
    LeftOut,
    PlannedPart,
    PlannedRing,
    PlannedStage,
    PlannedStandby,
    PlannedTurns,
    PlanReply,
)
from shardnet_cli.output.plan_text import (
    HOPS_NOTE,
    dtype_words,
    layer_words,
    plan_json,
    plan_text,
    run_json,
    run_text,
    what_if_text,
)


def stage(rank: int, name: str, compute_ms: float | None, hop_ms: float | None) -> PlannedStage:
    return PlannedStage(
        rank=rank,
        node=f"id-{name}",
        name=name,
        address=f"{name}:1",
        layers=(4 * rank, 4 * rank + 4),
        weight_bytes=3 * 2**20,
        kv_bytes=2**20,
        compute_ms=compute_ms,
        hop_ms=hop_ms,
    )


PLAN = PlanReply(
    request=1,
    model="/m",
    model_id="ab" * 32,
    dtype="bfloat16",
    wire_dtype="bfloat16",
    context=512,
    stages=[stage(0, "anna", 31.4, 0.21), stage(1, "bert", 24.0, 0.2)],
    left_out=[LeftOut(node="id-cleo", name="cleo", why="with it 3 tok/s, without 18")],
    predicted_tok_s=17.9,
    why="because",
    nodes=[
        NodeMeasured(
            node="id-anna",
            name="anna",
            memory_bytes=2**30,
            seconds=StageSeconds(layer_s=0.0078, layer_256_s=0.11, embed_s=5e-5, head_s=0.0051),
            kernel="packed bfloat16",
            threads=2,
            measured_at_s=1.7e9,
            disk_bytes_per_s=1.4e9,
        ),
        NodeMeasured(node="id-bert", name="bert", memory_bytes=2**29, why_not="it generates"),
    ],
    links=[
        WayMeasured(sender="id-anna", receiver="id-bert", round_trip_s=4.2e-4, bytes_per_s=1.1e8)
    ],
)
RUN = LastRun(
    request=0,
    plan=PLAN,
    timing=Timing(
        load_s=0,
        ttft_s=0.1,
        decode_tok_s=16.2,
        total_s=1,
        per_stage=(
            MeanStageTime(rank=0, compute_ms=33.0, queue_ms=0.25, wire_ms=0.4),
            MeanStageTime(rank=1, compute_ms=25.5, queue_ms=0.02, wire_ms=0.4),
        ),
    ),
    n_tokens=47,
    ended_at_s=1.7e9,
)


def test_a_plan_says_what_it_predicts_and_from_what() -> None:
    lines = plan_text(PLAN).splitlines()
    assert lines[0] == "/m in bfloat16, context 512: because"
    assert lines[1] == "  predicted: 18 tokens/s"
    assert lines[2].endswith("compute 31 ms, hop to bert 0.21 ms")
    assert lines[3].endswith("compute 24 ms, hop to anna 0.2 ms")
    assert lines[4] == "  left out: cleo: with it 3 tok/s, without 18"
    assert lines[5] == "measured:"
    assert lines[6].startswith(
        "  anna: layer 7.8 ms for 1 token, 110 ms for 256; embedding 0.05 ms, LM head 5.1 ms; "
        "memory 1.00 GiB, disk 1400 MB/s (packed bfloat16, threads: 2, "
    )
    assert lines[7] == "  bert: memory 0.50 GiB; speed not measured: it generates"
    assert lines[8:] == ["  anna - bert: round trip 0.42 ms, 110 MB/s"]


def test_devices_of_a_node_have_lines_of_their_own() -> None:
    """In the plan what each gets, among the measurements what each has shown."""
    part = PlannedPart(
        layers=(0, 3), devices=["cpu:0", "cpu:1"], weight_bytes=2**20, kv_bytes=0, compute_ms=1.5
    )
    anna, bert = PLAN.stages
    seconds = StageSeconds(layer_s=0.001, layer_256_s=0.1, embed_s=0, head_s=0)
    told = DeviceMeasured(name="cpu:1", memory_bytes=2**29, seconds=seconds)
    measured = msgspec.structs.replace(PLAN.nodes[0], devices=[told], gather_s=2e-5)
    anna = msgspec.structs.replace(anna, parts=[part], parts_why="it is faster")
    plan = msgspec.structs.replace(PLAN, stages=[anna, bert], nodes=[measured])
    lines = plan_text(plan).splitlines()
    shared = "    cpu:0 + cpu:1: layers 0-2, each shared by them, weights 1.0 MiB, KV cache 0.0 MiB"
    assert lines[3] == f"{shared}, compute 1.5 ms"
    assert lines[7].endswith(
        "; cpu:1: layer 1 ms, memory 0.50 GiB; a gather of their parts 0.02 ms"
    )
    written = plan_json(plan)
    [stage, other] = written["stages"]
    assert (stage["parts"][0]["layers"], stage["parts_why"]) == ([0, 3], "it is faster")
    assert (other["parts"], other["parts_why"]) == ([], None)
    [node] = written["measured"]["nodes"]
    assert (node["devices"][0]["layer_ms"], node["gather_ms"]) == (1.0, 0.02)


def test_nodes_without_compiled_kernels_are_named_in_one_line() -> None:
    assert "kernels" not in plan_text(PLAN)
    isas = {"anna": "none", "bert": "none", "cleo": "avx2"}
    nodes = [NodeMeasured(node=n, name=n, memory_bytes=1, isa=isa) for n, isa in isas.items()]
    plan = msgspec.structs.replace(PLAN, nodes=nodes)
    [line] = [line for line in plan_text(plan).splitlines() if "kernels" in line]
    assert line.startswith("  no compiled kernels on anna, bert: quantised weights are computed")
    assert "C compiler" in line
    assert [node["isa"] for node in plan_json(plan)["measured"]["nodes"]] == [
        "none",
        "none",
        "avx2",
    ]


def test_who_stands_by_for_whom_is_said() -> None:
    standby = PlannedStandby(
        rank=1, node="a" * 32, name="anna", layers=(4, 8), weight_bytes=3 << 20, kv_bytes=1 << 20
    )
    plan = msgspec.structs.replace(PLAN, standbys=[standby])
    line = "  anna stands by for bert: layers 4-7 (3.0 MiB, KV up to 1.0 MiB)"
    assert line in plan_text(plan).splitlines()
    [told] = plan_json(plan)["standbys"]
    assert (told["name"], told["rank"], told["layers"]) == ("anna", 1, [4, 8])


def test_several_rings_are_told_one_by_one() -> None:
    rings = [
        PlannedRing(stages=[stage(0, name, 31.4, None)], predicted_tok_s=tok_s)
        for name, tok_s in (("anna", 30.0), ("bert", None))
    ]
    plan = msgspec.structs.replace(PLAN, stages=rings[0].stages, rings=rings, nodes=[], links=[])
    lines = plan_text(plan).splitlines()[2:]
    assert [line.partition(" (")[0] for line in lines] == [
        "  ring 1 of 2, 30 tokens/s:",
        "    rank 0: anna",
        "  ring 2 of 2:",
        "    rank 0: bert",
        "  left out: cleo: with it 3 tok/s, without 18",
    ]
    told = plan_json(plan)["rings"]
    assert [(ring["names"], ring["predicted_tok_s"]) for ring in told] == [
        (["anna"], 30.0),
        (["bert"], None),
    ]


def test_what_many_sequences_make_is_called_so() -> None:
    plan = msgspec.structs.replace(PLAN, optimise="throughput")
    assert "predicted: 18 tokens/s of many sequences" in plan_text(plan)
    assert "18 of many sequences" in run_text(msgspec.structs.replace(RUN, plan=plan))


def test_a_plan_says_what_it_warns_of() -> None:
    plan = msgspec.structs.replace(PLAN, warnings=["int4 costs quality"])
    assert plan_text(plan).splitlines()[2] == "  warning: int4 costs quality"
    assert plan_json(plan)["warnings"] == ["int4 costs quality"]


def test_a_plan_in_json_has_what_was_measured() -> None:
    told = plan_json(PLAN)
    assert [stage["hop_ms"] for stage in told["stages"]] == [0.21, 0.2]
    anna, bert = told["measured"]["nodes"]
    assert (anna["layer_ms"], anna["layer_256_ms"]) == (7.8, 110)
    assert (anna["head_ms"], anna["why_not"]) == (5.1, None)
    assert (bert["layer_ms"], bert["kernel"], bert["why_not"]) == (None, None, "it generates")
    [link] = told["measured"]["links"]
    assert (link["from"], link["to"], link["bytes_per_s"]) == ("id-anna", "id-bert", 1.1e8)
    assert link["round_trip_ms"] == 0.42


def test_a_run_stands_beside_its_prediction() -> None:
    lines = run_text(RUN).splitlines()
    assert lines[0].startswith("/m in bfloat16, 47 tokens, ended ")
    assert [line.split() for line in lines[1:]] == [
        ["predicted", "measured"],
        [
            "rank",
            "0:",
            "anna,",
            "layers",
            "0-3",
            "of",
            "8",
            "31",
            "ms",
            "33",
            "ms",
            "(and",
            "0.25",
            "ms",
            "waiting)",
        ],
        ["hop", "to", "bert", "0.21", "ms", "0.4", "ms"],
        ["rank", "1:", "bert,", "layers", "4-7", "of", "8", "24", "ms", "26", "ms"],
        ["hop", "to", "anna", "0.2", "ms", "0.4", "ms"],
        ["tokens/s", "18", "16"],
        HOPS_NOTE.split(),
    ]
    assert run_json(RUN)["stages"][1] == {
        "rank": 1,
        "node": "id-bert",
        "name": "bert",
        "layers": [4, 8],
        "predicted_compute_ms": 24.0,
        "compute_ms": 25.5,
        "queue_ms": 0.02,
        "predicted_hop_ms": 0.2,
        "hop_ms": 0.4,
    }


def test_what_was_not_predicted_is_called_so_and_a_ring_of_one_has_no_hop() -> None:
    plan = msgspec.structs.replace(
        PLAN, stages=[stage(0, "anna", None, None)], predicted_tok_s=None
    )
    timing = msgspec.structs.replace(RUN.timing, per_stage=RUN.timing.per_stage[:1])
    run = msgspec.structs.replace(RUN, plan=plan, timing=timing)
    words = run_text(run)
    assert words.count("not measured") == 2
    assert "hop" not in words
    assert run_json(run)["stages"][0]["hop_ms"] is None
    assert "predicted" not in plan_text(plan)


def test_what_is_rounded_is_said() -> None:
    changed = msgspec.structs.replace
    assert dtype_words(PLAN) == "bfloat16"
    assert dtype_words(changed(PLAN, quant="int4")) == "bfloat16 with int4 weights"
    assert dtype_words(changed(PLAN, kv_dtype="int8")) == "bfloat16 with int8 KV"
    both = changed(PLAN, quant="int8", kv_dtype="int8")
    assert dtype_words(both) == "bfloat16 with int8 weights and int8 KV"
    told = [plan_json(plan)["kv_dtype"] for plan in (PLAN, both)]
    assert told == ["auto", "int8"]


def test_layers_are_named_with_the_last_one_included() -> None:
    assert [layer_words(PLAN, stage) for stage in PLAN.stages] == [
        "layers 0-3 of 8",
        "layers 4-7 of 8",
    ]
    single = msgspec.structs.replace(PLAN.stages[1], layers=(7, 8))
    assert layer_words(PLAN, single) == "layer 7 of 8"
    assert plan_json(PLAN)["stages"][1]["layers"] == [4, 8]
    with pytest.raises(UsageError, match="0-8,8-12 are layers 0 to 7 and 8 to 11"):
        parse_layers("0-7,8-21")


def test_what_is_fetched_first_is_said() -> None:
    fetching = msgspec.structs.replace(
        PLAN.stages[1], fetch_bytes=3 * 2**20, fetch_from=["anna", "cleo"], fetch_s=12.4
    )
    plan = msgspec.structs.replace(PLAN, stages=[PLAN.stages[0], fetching])
    assert (
        plan_text(plan)
        .splitlines()[3]
        .endswith(", fetches 3.0 MiB from anna or cleo first (about 12 s)")
    )
    assert plan_json(plan)["stages"][1]["fetch_from"] == ["anna", "cleo"]
    assert [s["fetch_bytes"] for s in plan_json(plan)["stages"]] == [0, 3 * 2**20]
    unknown = msgspec.structs.replace(fetching, fetch_from=[], fetch_s=None)
    plan = msgspec.structs.replace(PLAN, stages=[PLAN.stages[0], unknown])
    assert plan_text(plan).splitlines()[3].endswith(", fetches 3.0 MiB from other nodes first")


def test_what_is_looked_up_on_disk_is_told_beside_what_is_in_memory() -> None:
    first = msgspec.structs.replace(PLAN.stages[0], looked_up_bytes=5 * 2**30)
    plan = msgspec.structs.replace(PLAN, stages=[first, PLAN.stages[1]])
    lines = plan_text(plan).splitlines()
    assert "KV cache 1.0 MiB, looks up 5120.0 MiB of tables on its disk, compute" in lines[2]
    assert "looks up" not in lines[3]
    assert [stage["looked_up_bytes"] for stage in plan_json(plan)["stages"]] == [5 * 2**30, 0]
    there = msgspec.structs.replace(first, rows_from=["bert", "cleo"])
    plan = msgspec.structs.replace(PLAN, stages=[there, PLAN.stages[1]])
    what = "looks up 5120.0 MiB of tables at bert or cleo, 128 MiB for rows of these, compute"
    assert what in plan_text(plan).splitlines()[2]
    assert [stage["rows_from"] for stage in plan_json(plan)["stages"]] == [["bert", "cleo"], []]


def test_what_was_measured_while_busy_is_marked() -> None:
    busy = [msgspec.structs.replace(PLAN.nodes[0], is_steady=False), PLAN.nodes[1]]
    links = [msgspec.structs.replace(PLAN.links[0], is_steady=False)]
    lines = plan_text(msgspec.structs.replace(PLAN, nodes=busy, links=links)).splitlines()
    assert lines[1] == "  predicted: 18 tokens/s, measured while busy: likely more"
    assert lines[6].endswith(", measured while busy)")
    assert lines[8].endswith(" (measured while busy)")


def test_turns_of_long_conversations_and_what_is_kept_of_them() -> None:
    turns = PlannedTurns(
        n_prompt=30_000, n_next=700, first_s=94.2, next_s=3.14, resumed_s=4.04, disk_bytes_per_s=5e8
    )
    kept = KeptPositions(
        n_prompt=30_000, conversations=1, positions=40_960, kv_bytes=9, states=64, state_bytes=7
    )
    plan = msgspec.structs.replace(PLAN, turns=turns, kept=kept)
    assert [line for line in plan_text(plan).splitlines() if "30000" in line] == [
        "  a prompt of 30000 tokens: first token after about 94 s, of its next turn (700 more) "
        "after 3.1 s, read from disk (500 MB/s) after 4 s",
        "  keeps 40960 positions and 64 states of conversations in memory (about 1 conversation of "
        "30000)",
    ]
    told = plan_json(plan)
    assert (told["turns"], told["kept"]) == (
        msgspec.to_builtins(turns),
        msgspec.to_builtins(kept),
    )
    assert "conversation" not in plan_text(PLAN)
    assert (plan_json(PLAN)["turns"], plan_json(PLAN)["kept"]) == (None, None)


def test_a_plan_with_what_is_not_there_stands_beside_that_now() -> None:
    added = msgspec.structs.replace(PLAN.stages[1], name="RTX 3060", address=NOT_THERE)
    seconds = StageSeconds(
        layer_s=0.001, layer_256_s=0.01, embed_s=0, head_s=0, read_bytes_per_s=324e9
    )
    told = NodeMeasured(
        node="added-0", name="RTX 3060", memory_bytes=2**30, seconds=seconds, kernel="estimated"
    )
    then = msgspec.structs.replace(
        PLAN, stages=[PLAN.stages[0], added], nodes=[PLAN.nodes[0], told], predicted_tok_s=33.2
    )
    title, *lines = what_if_text("with RTX 3060", PLAN, "", then).splitlines()
    assert title == "with RTX 3060: 33 tokens/s instead of 18"
    assert lines[:3] == ["  now:", *(f"  {line}" for line in plan_text(PLAN).splitlines()[2:4])]
    assert lines[3:] == plan_text(then).splitlines()
    assert any(
        line.startswith("  rank 1: RTX 3060 (not there: estimated), layers 4-7 of 8")
        for line in lines
    )
    [estimated] = [line for line in lines if line.startswith("  RTX 3060: layer 1 ms")]
    assert "memory 1.00 GiB that reads 324 GB/s (estimated: it is not there)" in estimated
    found = plan_json(then)
    assert [stage["estimated"] for stage in found["stages"]] == [False, True]
    rates = [node["read_bytes_per_s"] for node in found["measured"]["nodes"]]
    assert rates == [None, 324e9]


def test_a_model_that_only_fits_with_what_is_not_there_is_told_so() -> None:
    lines = what_if_text("with x", None, "too large; get more", PLAN).splitlines()
    assert lines[:2] == ["with x: fits then, 18 tokens/s", "  now: too large; get more"]
    assert lines[2:] == plan_text(PLAN).splitlines()
