"""What nodes draw between two looks, by what their meters have counted at each."""

from __future__ import annotations

import pytest
from support.cluster.checkup_facts import info

from shardnet.cluster.head.energy import Look, joules_between
from shardnet.wire.messages.diagnostics import PowerMeter


def look(at_s: float, *meters: PowerMeter, host: str = "one") -> Look:
    return Look(at_s, 0, {"anna-id": info("anna", host_id=host, meters=list(meters))})


def meter(joules: float, counted_s: float, age_s: float, source: str = "plug") -> PowerMeter:
    return PowerMeter(source=source, joules=joules, counted_s=counted_s, age_s=age_s)


def test_mean_watts_between_the_readings_count_for_the_whole_window() -> None:
    first, last = look(100, meter(50, 5, 1)), look(110, meter(450, 15, 1))
    assert joules_between(first, last, [info("anna")]) == {("one", "plug"): pytest.approx(400)}
    first = look(100, meter(50, 5, 0), meter(7, 5, 0, "NVML"))
    last = look(110, meter(450, 13, 2), meter(7, 15, 0, "NVML"))
    assert joules_between(first, last, [info("anna")]) == {
        ("one", "plug"): pytest.approx(500),
        ("one", "NVML"): 0,
    }


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (look(100, meter(50, 5, 0)), look(110)),
        (look(100), look(110, meter(50, 5, 0))),
        (look(100, meter(50, 5, 0)), look(110, meter(90, 9, 0, "battery"))),
        (look(100, meter(50, 5, 0)), look(110, meter(50, 5, 10))),
        (look(100, meter(50, 5, 1)), look(101, meter(90, 6, 1))),
        (look(100, meter(50, 5, 0)), look(110, meter(4, 10, 0))),
    ],
    ids=["gone", "new", "another source", "silent", "mostly before it", "started again"],
)
def test_what_was_not_measured_in_the_window_is_not_known(first: Look, last: Look) -> None:
    assert joules_between(first, last, [info("anna")]) is None


def test_all_nodes_of_a_stage_count_or_none() -> None:
    first, last = look(100, meter(50, 5, 1)), look(110, meter(450, 15, 1))
    assert joules_between(first, last, [info("anna"), info("bert")]) is None
