"""Machines that are not there: read from texts, and planned with figures that are estimated.

Against reality: figures of machines that were measured once, with and without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec import structs
from support.cluster.town import make_sleepers
from test_planning import GIB, facts, node

from shardnet.cluster.machine.profile import MEMORY_SHARE
from shardnet.cluster.measuring.measurement import Measured, stage_speed
from shardnet.cluster.peers.node_directory import NodeCandidates
from shardnet.cluster.placement.figures import LinkSpeed
from shardnet.cluster.planning import what_if
from shardnet.cluster.planning.placing import make_plan, unmeasured
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Elsewhere, Planner
from shardnet.cluster.planning.what_if import (
    ESTIMATED,
    GIGABIT,
    parse_machine,
    with_estimates,
)
from shardnet.errors import PlanError, UsageError
from shardnet.model.families.registry import parse_config
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.types import Arith, DType, NodeId
from shardnet.wire.messages.measurements import NodeMeasured, StageSeconds
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import NOT_THERE, ModelChoice

CHOICE = ModelChoice(model="/m")


def shaped(n_layers: int, hidden: int, inner: int, kv_heads: int, vocab: int) -> ModelFacts:
    """A Llama of a size that has been measured."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": n_layers,
        "num_attention_heads": hidden // 64 if hidden < 4096 else hidden // 128,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    config = parse_config(raw, "config.json")
    return replace(facts(), config=config, linear_dtype=DType.BFLOAT16)


TINY_1B = shaped(22, 2048, 5632, 4, 32000)
LLAMA_8B = shaped(32, 4096, 14336, 8, 128256)


def read_as(text: str) -> list[tuple[str, float, float, float]]:
    """Kind, GiB, GB/s of plain reads and TFLOP/s of each device."""
    return [
        (one.kind, round(one.gib, 3), round(one.gb_s, 3), one.tflops)
        for one in parse_machine(text).devices
    ]


RTX_3060 = ("gpu", 12 * MEMORY_SHARE, 324.0, 12.7)
DESKTOP = ("cpu", 32 * MEMORY_SHARE, 40.96, 0.8)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("RTX 3060 12GB, 32 GB", [RTX_3060, DESKTOP]),
        ("32 GiB DDR4, nvidia geforce rtx3060", [RTX_3060, DESKTOP]),
        ("RTX 3060", [RTX_3060]),
        ("rtx 3060 8gb", [("gpu", 8 * MEMORY_SHARE, 216.0, 12.7)]),
        ("2x RTX 3060 12GB", [RTX_3060, RTX_3060]),
        ("2080 Ti:520:22:26.9", [("gpu", 22, 520, 26.9)]),
        ("attic:27.9:16", [("cpu", 16, 27.9, 1.0)]),
        ("M4 Max, 64 GB", [("gpu", 64 * MEMORY_SHARE, 491.4, 18.4)]),
        ("Apple M4 Max 64GB", [("gpu", 64 * MEMORY_SHARE, 491.4, 18.4)]),
        ("Raspberry Pi 5 8GB", [("cpu", 8 * MEMORY_SHARE, 13.6, 0.15)]),
        ("DDR5 4 channels 128 GB", [("cpu", 128 * MEMORY_SHARE, 143.36, 2.0)]),
        ("RTX 4090 48GB", [("gpu", 48 * MEMORY_SHARE, 907.2, 82.6)]),
    ],
)
def test_machines_are_read_as_people_write_them(
    text: str, devices: list[tuple[str, float, float, float]]
) -> None:
    assert read_as(text) == [
        tuple(value if isinstance(value, str) else round(value, 3) for value in device)
        for device in devices
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("RTX 3061 12GB", r"no device 'RTX 3061' is known; near it are RTX 3060"),
        ("zzz", r"no device 'zzz' is known; give its figures"),
        ("M4 Max", r"'M4 Max': up to 16 devices, of which each has memory; write"),
        ("attic:0:16", "more than 0"),
        ("attic:20:16:0", "more than 0"),
        ("attic:9999999:16", "no device"),
        (", ".join(3 * ["8x RTX 3060"]), "up to 16 devices"),
        ("", "of which each has memory"),
    ],
)
def test_what_means_no_machine_is_refused_with_the_nearest_names(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_machine(text)


def test_every_row_of_the_table_means_what_it_is_called() -> None:
    rows = [row for rows in what_if._table().values() for row in rows]
    assert len(rows) > 60
    assert len({(row.name, row.gib) for row in rows}) == len(rows)
    for row in rows:
        gib = row.gib or 16
        [found] = parse_machine(f"{row.name} {gib:g}GB").devices
        assert found == row._replace(gib=gib * MEMORY_SHARE)


def report(one: NodeInfo, layer_s: float, head_s: float, reads: float | None) -> NodeMeasured:
    seconds = StageSeconds(
        layer_s=layer_s,
        layer_256_s=100 * layer_s,
        embed_s=1e-5,
        head_s=head_s,
        step_s=1e-4,
        read_bytes_per_s=reads,
    )
    return NodeMeasured(
        node=one.node, name=one.name, memory_bytes=one.memory_bytes, seconds=seconds,
        kernel="packed", measured_at_s=1.7e9,
    )  # fmt: skip


def known(reports: Sequence[NodeMeasured], **links: LinkSpeed) -> Measured:
    """Figures of nodes, and of links by the names of both ends, of one letter each."""
    return Measured(
        speeds={
            NodeId(told.node): stage_speed(told.seconds, is_steady=True)
            for told in reports
            if told.seconds is not None
        },
        links={
            (NodeId(f"id-{ends[0]}"), NodeId(f"id-{ends[1]}")): link for ends, link in links.items()
        },
        reports=tuple(reports),
    )


def planned(
    model: ModelFacts,
    there: Sequence[NodeInfo],
    measured: Measured,
    *texts: str,
    choice: ModelChoice = CHOICE,
) -> Plan:
    """Plan with machines that are not there."""
    machines = [parse_machine(text) for text in texts]
    infos = [machine.info(number, there) for number, machine in enumerate(machines)]
    nodes = [*there, *infos]
    sizes = unmeasured(model, nodes, choice, Arith.FAST)
    given = (there, machines, infos, model.config, sizes)
    return make_plan(
        choice, model, nodes, with_estimates(measured, *given) if machines else measured
    )


def apart(one: NodeInfo) -> NodeInfo:
    return structs.replace(one, host_id=one.node)


def rate(plan: Plan) -> float:
    assert plan.placement.predicted_tok_s is not None
    return plan.placement.predicted_tok_s


@pytest.mark.parametrize("has_reads", [True, False])
def test_a_node_left_out_and_added_by_its_figures_predicts_what_it_did(has_reads: bool) -> None:
    """The 1.1B shape on two machines as docs/benchmarks.md has them: 88 MB a layer in bfloat16.

    An EPYC whose steps reach 0.87 of 27.9 GB/s and a Zen 3 whose reach 0.71 of 18.9. What is known
    of the one tells about the other; else the constant does.
    """
    small = int(1.4 * GIB)
    anna, bert = apart(node("a", memory=small)), apart(node("b", memory=small))
    rates = {"a": 27.9e9, "b": 18.9e9}
    layer_bytes, head_bytes = 88.1e6, 131e6
    reports = [
        report(
            one,
            layer_bytes / (share * rates[name]),
            head_bytes / (share * rates[name]),
            rates[name] if has_reads else None,
        )
        for one, name, share in ((anna, "a", 0.87), (bert, "b", 0.71))
    ]
    link = LinkSpeed(round_trip_s=0.5e-3, bytes_per_s=1e8)
    by_layers = structs.replace(CHOICE, nodes_per_stage=1)
    true = planned(TINY_1B, [anna, bert], known(reports, ab=link), choice=by_layers)
    assert len(true.nodes) == 2
    alone = known(reports[:1])
    with pytest.raises(PlanError):
        planned(TINY_1B, [anna], alone, choice=by_layers)
    text = f"b:18.9:{small / GIB}"
    guess = planned(TINY_1B, [anna], alone, text, choice=by_layers)
    assert [one.name for one in guess.nodes] == [one.name for one in true.nodes]
    assert 0.8 < rate(guess) / rate(true) < 1.25
    reply = guess.reply(1)
    assert [one.address == NOT_THERE for one in reply.stages] == [
        one.name == "b" for one in guess.nodes
    ]
    [estimated] = [told for told in reply.nodes if told.kernel == ESTIMATED]
    assert estimated.measured_at_s is None


@pytest.mark.parametrize(
    ("text", "model", "quant", "measured_tok_s"),
    [
        ("H100:3060:80:134", LLAMA_8B, "int4", 217),
        ("EPYC:27.9:16", TINY_1B, "none", 11.68),
    ],
)
def test_predictions_are_near_what_was_measured_of_such_machines(
    text: str, model: ModelFacts, quant: Any, measured_tok_s: float
) -> None:
    """By the constants alone, against docs/benchmarks.md: Q4_K's 4.9 GB are int4's here."""
    choice = structs.replace(CHOICE, quant="" if quant == "none" else quant)
    poor = node("poor", memory=1)
    plan = planned(model, [poor], known([]), text, choice=choice)
    assert [one.address for one in plan.nodes] == [NOT_THERE]
    assert 0.75 < rate(plan) / measured_tok_s < 1.33


def test_a_machine_has_its_gpu_before_its_memory_and_the_plan_divides_layers() -> None:
    poor = node("poor", memory=1)
    plan = planned(LLAMA_8B, [poor], known([]), "RTX 3060 12GB, 32 GB")
    [stage] = plan.reply(1).stages
    n_layers = {part.devices[0]: part.layers[1] - part.layers[0] for part in stage.parts}
    assert n_layers["gpu:0"] > n_layers["cpu"] > 0
    two = planned(LLAMA_8B, [poor], known([]), "2x RTX 3060")
    assert rate(two) > 2 * rate(plan)


def test_its_link_is_as_links_between_machines_are_here() -> None:
    usual = LinkSpeed(round_trip_s=0.2e-3, bytes_per_s=3e8)
    same_host = LinkSpeed(round_trip_s=1e-5, bytes_per_s=9e9)
    a, b, c = apart(node("a")), apart(node("b")), node("c")
    c = structs.replace(c, host_id=b.host_id)

    def link(there: list[NodeInfo], **links: LinkSpeed) -> LinkSpeed:
        plan = planned(facts(), there, known([], **links), "x:20:1", "y:20:1")
        found = plan.measured.links
        ways = [way for way in found if {"added-0", "added-1"} & {*way}]
        assert len(ways) == 2 * len(there) + 1
        [alike] = {found[way] for way in ways}
        return alike

    assert link([a, b, c], ab=usual, ac=usual, bc=same_host) == usual
    assert link([b, c], bc=same_host) == GIGABIT
    assert link([a]) == GIGABIT


def test_a_head_plans_with_machines_and_asks_none_of_them() -> None:
    """Nor does it send the client to one, or to another node that would be the head."""
    there, other = node("a", memory=1), node("b", memory=1)
    measured = AsyncMock(return_value=known([]))
    holdings = AsyncMock(return_value={})

    async def run(what: str, job: Callable[[], Any]) -> Any:
        return job()

    planner = Planner(
        node=NodeId("id-a"),
        directory=Mock(candidates=AsyncMock(return_value=NodeCandidates(nodes=(there, other)))),
        sharing=Mock(identify=AsyncMock(return_value=facts()), holdings=holdings),
        measuring=Mock(measured=measured),
        threads=Mock(run=run),
        sleepers=make_sleepers(),
        log=print,
    )

    def plan(**options: Any) -> Plan | Elsewhere:
        return asyncio.run(planner.plan(CHOICE, print, measure_one=True, **options))

    with pytest.raises(PlanError):
        plan()
    made = plan(added=["x:20:16"])
    assert isinstance(made, Plan)
    assert [one.name for one in made.nodes] == ["x"]
    assert [call.args[0] for call in measured.await_args_list] == [[there, other]] * 2
    assert [call.args[2] for call in holdings.await_args_list] == [[there, other]] * 2
    made = plan(added=["x:20:16"], without=["id-b"])
    assert isinstance(made, Plan)
    assert {*made.left_out_names.values()} == {"a", "x"}
    with pytest.raises(UsageError, match="no device 'y' is known"):
        plan(added=["y"])
