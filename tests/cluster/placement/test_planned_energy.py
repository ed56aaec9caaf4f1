"""Joules of a token as predicted: what counts once, and which node costs more than it is worth."""

from __future__ import annotations

from typing import Any

import pytest
from support.cluster.checkup_facts import info

from shardnet.cluster.placement.energy import best_saving, joules_a_token, ring_without
from shardnet.wire.messages.diagnostics import PowerMeter
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import PlannedEnergy


def node(name: str, *meters: tuple[str, float | None, float | None], **changes: Any) -> NodeInfo:
    """Make a node with meters: source, busy and idle watts."""
    found = [
        PowerMeter(source=source, joules=0, counted_s=0, age_s=0, busy_w=busy_w, idle_w=idle_w)
        for source, busy_w, idle_w in meters
    ]
    return info(name, meters=found, **changes)


ANNA = node("anna", ("RAPL", 40.0, 8.0), ("NVML", 60.0, 12.0))
BERT = node("bert", ("plug", 200.0, 90.0))


def test_a_ring_draws_what_its_nodes_draw_and_a_machine_counts_once() -> None:
    assert joules_a_token([ANNA, BERT], 10.0) == 30.0
    twin = node("cleo", ("RAPL", 40.0, 8.0), host_id=ANNA.host_id)
    assert joules_a_token([ANNA, twin], 10.0) == 10.0
    assert joules_a_token([ANNA, BERT], None) is None
    assert joules_a_token([ANNA, node("cleo", ("plug", None, 3.0))], 10.0) is None
    assert joules_a_token([ANNA, node("cleo")], 10.0) is None


def test_a_node_that_is_left_out_is_off_or_idle_unless_its_machine_works_on() -> None:
    without = ring_without(BERT, [ANNA], 8.0)
    assert without is not None
    assert (without.name, without.predicted_tok_s) == ("bert", 8.0)
    assert without.joules_per_token == 100 / 8
    assert without.idle_joules_per_token == (100 + 90) / 8
    twin = node("cleo", ("RAPL", 40.0, 8.0), host_id=ANNA.host_id)
    without = ring_without(twin, [ANNA], 8.0)
    assert without is not None
    assert without.idle_joules_per_token == without.joules_per_token
    without = ring_without(node("cleo", ("plug", 9.0, None)), [ANNA], 8.0)
    assert without is not None
    assert without.idle_joules_per_token is None
    assert ring_without(ANNA, [node("cleo")], 8.0) is None


@pytest.mark.parametrize(("tok_s", "saves"), [(9.0, "bert"), (7.0, "anna"), (3.4, None)])
def test_the_ring_that_saves_most_is_named_if_that_is_worth_it(
    tok_s: float, saves: str | None
) -> None:
    """Together they give 10 tokens a second for 30 J each; anna alone `tok_s`, bert alone 20."""
    bert_tok_s = 20.0 if saves == "anna" else 6.0
    rings = [ring_without(BERT, [ANNA], tok_s), ring_without(ANNA, [BERT], bert_tok_s)]
    energy = PlannedEnergy(
        joules_per_token=30.0, sources=[], without=[ring for ring in rings if ring is not None]
    )
    best = best_saving(energy)
    assert (best and best.name) == saves
    assert best_saving(PlannedEnergy(joules_per_token=30.0, sources=[])) is None
