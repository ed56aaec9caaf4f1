"""What is shown of nodes and rings, by what was said of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.cluster.checkup_facts import reply, unlinked, view
from support.cluster.watched_node import (
    activity,
    stage_state,
    step,
    two_nodes,
)

from shardnet.api.dashboard.node_history import FORGET_S, NodeHistory
from shardnet.api.dashboard.ring_history import (
    WINDOW_S,
    RingHistory,
    parse_request_id,
    request_id,
    shown_step,
)
from shardnet.api.dashboard.state import ShownStandby
from shardnet.types import LiveState
from shardnet.wire.messages.activity import RingActivity, RingOpening, StageProgress
from shardnet.wire.messages.diagnostics import (
    AddressView,
    DeputyState,
    PartState,
    RingWait,
    StandbyState,
)
from shardnet.wire.messages.membership import ReportReply


def states(history: NodeHistory, now_s: float = 0.0) -> dict[str, str]:
    return {node.name: node.state for node in history.nodes(now_s)}


def test_a_node_that_dies_is_lost_with_what_it_had_and_forgotten_later() -> None:
    history = NodeHistory()
    standby = StandbyState(node="carl", layers=(2, 4), weight_bytes=7)
    part = PartState(layers=(0, 2), devices=["cpu:0"], weight_bytes=5)
    loaded = reply(
        "bert",
        view("anna"),
        stage=stage_state(standby=standby, parts=[part]),
        temperature_c=61.0,
        deputy=DeputyState(node="carl", n_requests=1),
        deputy_of=[DeputyState(node="anna", n_requests=0)],
    )
    history.take([reply("anna", view("bert")), loaded], 100.0)
    anna, bert = history.nodes(102.5)
    assert (anna.name, anna.is_asked, bert.is_asked) == ("anna", True, False)
    assert (bert.state, bert.since_s, bert.temperature_c) == ("up", 2.5, 61.0)
    assert (bert.model, bert.layers, bert.kv_positions, bert.kv_used_positions) == (
        "m",
        (0, 2),
        1024,
        256,
    )
    assert bert.standby == ShownStandby(name="carl", layers=(2, 4), weight_bytes=7)
    assert bert.parts == [PartState(layers=(0, 2), devices=["cpu:0"], weight_bytes=5)]
    assert (bert.deputy, bert.deputy_of) == ("carl", ["anna"])
    assert (anna.model, anna.standby, anna.deputy) == (None, None, None)
    assert [(link.node, link.rtt_ms) for link in anna.links] == [("bert-id", 0.4)]

    for peers in ([], [unlinked("bert", told_by=[])]):
        history.take([reply("anna", *peers)], 103.0)
        bert = history.nodes(104.0)[1]
        assert (bert.state, bert.since_s, bert.layers) == ("lost", 1.0, (0, 2))
    history.take([reply("anna")], 103.0 + FORGET_S + 1)
    assert states(history) == {"anna": "up"}


def test_a_node_that_comes_back_under_another_id_is_not_lost_too() -> None:
    history = NodeHistory()
    history.take(two_nodes(), 0.0)
    history.take([reply("anna")], 1.0)
    assert states(history) == {"anna": "up", "bert": "lost"}
    again = replace(two_nodes()[1], node="other")
    assert again.info is not None
    again = replace(again, info=replace(again.info, node="other"))
    history.take([reply("anna", view("bert", node="other")), again], 2.0)
    assert states(history) == {"anna": "up", "bert": "up"}


def test_nodes_that_say_nothing_are_silent_and_strangers_refused() -> None:
    history = NodeHistory()
    history.take(two_nodes(), 0.0)
    late = ReportReply(request=1, node="bert-id", name="bert", failure="no report within 4 s")
    stranger = unlinked(
        "cleo", AddressView(address="10.0.0.3:7433", seen="refused", why="nothing listens")
    )
    asked = reply("anna", view("bert"), stranger)
    for replies, why in (
        ([asked, late], "no report within 4 s"),
        ([asked], "it did not report in time"),
    ):
        history.take(replies, 1.0)
        _, bert, cleo = history.nodes(1.0)
        assert (bert.state, bert.why, bert.memory_bytes) == ("silent", why, 8 << 30)
        assert (cleo.state, cleo.why, cleo.address) == (
            "refused",
            "nothing listens",
            "10.0.0.3:7433",
        )
    # Of a node that nobody advertises any more nothing is shown.
    history.take([reply("anna", view("bert"), unlinked("cleo", told_by=[]))], 2.0)
    assert states(history) == {"anna": "up", "bert": "silent"}
    assert history.take([late], 3.0) is None
    history.asked_is_gone(3.0)
    assert states(history) == {"anna": "silent", "bert": "silent"}


def test_stages_of_a_step_stand_where_they_computed() -> None:
    shown = shown_step(step(5, 1000.0))
    assert (shown.step, shown.sent_ms, shown.round_trip_ms, shown.wire_ms) == (5, 1000, 10, 2)
    assert [(one.start_ms, one.queue_ms, one.compute_ms) for one in shown.stages] == [
        (0.0, 0.0, 3.0),
        (5.0, 1.0, 4.0),
    ]
    alone = shown_step(replace(step(5, 0.0), timings=step(5, 0.0).timings[:1]))
    assert alone.wire_ms == 0


def test_rates_and_means_are_those_of_the_last_seconds() -> None:
    history = RingHistory()
    old = step(1, 1000.0, tokens=100)
    prompt = step(2, 9000.0, tokens=0, prompt_rows=40)
    history.take(activity(old, prompt, *(step(3 + n, 9100.0 + 20 * n) for n in range(10))))
    rates = history.rates()
    # The first of these steps was sent a second ago.
    assert rates.tokens_per_s == pytest.approx(10)
    assert rates.prefill_tokens_per_s == pytest.approx(40)
    assert rates.steps_per_s == pytest.approx(11)
    assert rates.round_trip_ms == pytest.approx(10)
    ring = history.ring()
    assert ring is not None
    assert [stage.compute_ms for stage in ring.stages] == [3.0, 4.0]
    assert [stage.queue_ms for stage in ring.stages] == [0.0, 1.0]
    assert [stage.wire_ms for stage in ring.stages] == [1.0, 1.0]
    assert [stage.busy for stage in ring.stages] == pytest.approx([0.033, 0.044])
    assert (ring.state, ring.left_out[0].why) == ("ready", "too slow")
    history.take(activity(age_ms=9300.0 + 1000 * WINDOW_S))
    assert history.rates().tokens_per_s == 0
    ring = history.ring()
    assert ring is not None
    assert ring.stages[0].compute_ms is None


def test_steps_are_shown_once_and_those_of_another_ring_dropped() -> None:
    history = RingHistory()
    history.take(activity(step(1, 1.0), step(2, 2.0)))
    assert [one.step for one in history.steps().steps] == [1, 2]
    # What a head that does not know what was said repeats counts once.
    history.take(activity(step(2, 2.0), step(3, 3.0), plan=None))
    assert [one.step for one in history.steps("r1", 2).steps] == [3]
    assert [one.step for one in history.steps("r0", 2).steps] == [1, 2, 3]
    assert history.ring() is not None
    history.take(activity(step(1, 1.0), ring="r2", is_broken=True))
    assert [one.step for one in history.steps("r1", 3).steps] == [1]
    ring = history.ring()
    assert ring is not None
    assert ring.state == "broken"
    history.forget()
    assert (history.ring(), history.requests(), history.steps().steps) == (None, [], [])


def test_a_ring_that_is_being_built_is_shown_with_and_without_another() -> None:
    history = RingHistory()
    opening = RingOpening(
        model="m",
        age_s=2.0,
        stages=[
            StageProgress(rank=0, phase="loading", done_bytes=3, total_bytes=5),
            StageProgress(rank=1, phase="fetching", done_bytes=1, total_bytes=7),
        ],
    )
    for said in (RingActivity(request=0, opening=opening), activity(opening=opening)):
        history.take(said)
        loading = history.loading()
        assert loading is not None
        assert (loading.model, loading.phase, loading.age_s) == ("m", "loading", 2.0)
        assert (loading.done_bytes, loading.total_bytes) == (4, 12)
        assert [one.phase for one in loading.nodes] == ["loading", "fetching"]
    history.take(activity())
    assert history.loading() is None


@pytest.mark.parametrize(
    ("state", "n_computed", "phase"),
    [
        (LiveState.QUEUED, 0, "queued"),
        (LiveState.RUNNING, 64, "prefill"),
        (LiveState.RUNNING, 100, "decode"),
        (LiveState.PAUSED, 0, "queued"),
        (LiveState.RESUMED, 10, "prefill"),
    ],
)
def test_a_request_is_in_a_phase(state: LiveState, n_computed: int, phase: str) -> None:
    history, said = RingHistory(), activity()
    seen = replace(said.requests[0], state=state, n_computed=n_computed)
    history.take(replace(said, requests=[seen]))
    [request] = history.requests()
    assert (request.phase, request.n_prefilled, request.n_cached) == (phase, n_computed, 32)
    assert parse_request_id(request.id) == ("r1", 7)


def test_only_ids_of_requests_are_read() -> None:
    assert parse_request_id(request_id("a-b", 3)) == ("a-b", 3)
    for text in ("", "7", "-7", "r1-", "r1-x", "r1-²", "r1-" + "9" * 30, "r" * 300 + "-1"):
        assert parse_request_id(text) is None


def test_a_ring_and_its_requests_say_what_they_wait_for_behind_a_loss() -> None:
    history, said = RingHistory(), activity()
    history.take(said)
    ring = history.ring()
    assert ring is not None
    assert (ring.waits_for, history.requests()[0].waits_for) == (None, None)
    assert said.load is not None
    load = replace(said.load, wait=RingWait(kind="load", what="loading 4 layers", expected_s=3.0))
    waits = replace(said.requests[0], waits_for="reading 64 tokens again", expected_s=2.0)
    history.take(replace(said, load=load, requests=[waits]))
    ring = history.ring()
    assert ring is not None
    assert (ring.waits_for, ring.expected_s) == ("loading 4 layers", 3.0)
    [request] = history.requests()
    assert (request.waits_for, request.expected_s) == ("reading 64 tokens again", 2.0)
