"""What `shardnet top` shows, as lines and as JSON."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from msgspec.structs import replace
from support.cluster.checkup_facts import reply, unlinked, view
from support.cluster.scripted_node import client_of
from support.cluster.watched_node import WatchedNode, activity, stage_state, step

from shardnet.api.dashboard.node_history import NodeHistory
from shardnet.api.dashboard.ring_history import RingHistory
from shardnet.api.dashboard.state import ShownLoading
from shardnet.api.server.metrics import RingMetrics
from shardnet.wire.messages.diagnostics import DeputyState, RingBehind, StandbyState
from shardnet_cli.commands import top
from shardnet_cli.commands.status import ring_line
from shardnet_cli.output.top_view import TopView, top_lines

HOSTS = ("anna", "bert", "cleo")


def looked(*, with_ring: bool = True) -> TopView:
    """Two nodes in a ring and a third that died, after a second of decoding."""
    nodes, ring = NodeHistory(), RingHistory()
    standby = StandbyState(node="anna", layers=(0, 2), weight_bytes=1)
    stage = stage_state(layers=(2, 4), standby=standby)
    bert = reply("bert", view("anna"), stage=stage, temperature_c=61.4)
    nodes.take([reply("anna", view("bert"), view("cleo")), bert, reply("cleo")], 0.0)
    deputy = DeputyState(node="bert", n_requests=1)
    anna = reply("anna", view("bert"), unlinked("cleo", told_by=[]), deputy=deputy)
    nodes.take([anna, bert], 1.0)
    if with_ring:
        ring.take(activity(*(step(n, 9000.0 + 20 * n) for n in range(50))))
    return TopView(
        at=1e9,
        asked="anna",
        answers=True,
        failure=None,
        nodes=nodes.nodes(6.0),
        ring=ring.ring(),
        loading=ring.loading(),
        rates=ring.rates(),
        requests=ring.requests(),
    )


def test_a_ring_is_shown_stage_by_stage_and_who_is_gone_in_red() -> None:
    lines = top_lines(looked(), None)
    texts = [text for _, text in lines]
    assert texts[0] == "org/Tiny-Llama on 2 of 2 nodes"
    assert texts[1].startswith("50.0 tokens/s, prompts 0 tokens/s, 10.0 ms a step, 1 running")
    anna, bert, cleo = (next(one for one in lines if one[1].startswith(n)) for n in HOSTS)
    assert "0-1" in anna[1]
    assert "3.00 ms  0.00 ms  1.00 ms  15 %" in anna[1]
    assert "61 °C" in bert[1]
    assert "2-3" in bert[1]
    assert "lost 5 s" in cleo[1]
    assert (anna[0], cleo[0]) == ("", "bold red")
    assert any(text.startswith("7        prefill  64 of 100 (64 %)  32") for text in texts)
    assert texts[-3:] == [
        "bert goes on with the answers of anna, if that is lost",
        "bert stands by for anna with layers 0-1",
        "cleo is left out: too slow",
    ]


def test_several_rings_are_shown_with_what_each_has() -> None:
    """In `top`, in `status` and for Prometheus."""
    rings = [
        RingBehind(node="a", address="", names=["anna"], n_requests=8, n_taken_over=2),
        RingBehind(node="b", address="", names=["bert", "cleo"], why="it was lost"),
    ]
    book = RingHistory()
    book.take(activity(rings=rings))
    texts = [text for _, text in top_lines(replace(looked(), ring=book.ring()), None)]
    assert "ring of anna: 8 requests, 2 taken over" in texts
    assert "ring of bert+cleo: takes none: it was lost" in texts
    assert ring_line(rings[0]) == "behind   the ring of anna: 8 requests, 2 taken over"
    assert ring_line(rings[1]).endswith("bert+cleo: 0 requests; takes none: it was lost")
    metrics = RingMetrics()
    metrics.take([reply("anna", rings=rings)], None)
    values = {
        (sample.name, sample.labels.get("ring")): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }
    assert values["shardnet_rings_up", "bert+cleo"] == 0
    assert values["shardnet_rings_requests", "anna"] == 8
    assert values["shardnet_rings_taken_over_total", "anna"] == 2


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_the_terminal_and_names_are_one_line(width: int) -> None:
    shown = looked()
    shown.nodes[0] = replace(shown.nodes[0], name="a\nb" * 30)
    for _, line in top_lines(shown, width):
        assert "\n" not in line
    assert max(len(line) for _, line in top_lines(looked(), 200)) <= 200


def test_a_cluster_without_a_model_and_a_node_that_is_silent_are_shown() -> None:
    assert top_lines(looked(with_ring=False), None)[0][1] == "2 nodes, no model is loaded"
    loading = ShownLoading(
        model="org/m", phase="loading", done_bytes=1, total_bytes=4, nodes=[], age_s=1.0
    )
    begun = replace(looked(with_ring=False), loading=loading)
    assert top_lines(begun, None)[0][1] == "org/m: loading 25 %"
    silent = replace(looked(), answers=False, failure="the link ended")
    assert ("bold red", "anna does not answer: the link ended") in top_lines(silent, None)


def test_each_look_is_one_json_object() -> None:
    async def main() -> None:
        node = WatchedNode()
        async with client_of(node) as client:
            looks = [look async for look in top.views(client, 0.001, 2)]
            assert len(node.asked_for) == 2
            for look in looks:
                text = json.loads(msgspec.json.encode(look))
                assert text["ring"]["stages"][0]["node"] == "anna-id"
                assert text["answers"] is True

    asyncio.run(main())


def test_a_request_says_what_it_waits_for_behind_a_lost_ring() -> None:
    ring, said = RingHistory(), activity()
    for what, expected_s, shown in (
        ("reading 3,900 tokens again", 11.5, "reading 3,900 tokens again, about 12 s"),
        ("loading 4 layers at anna", 0.0, "loading 4 layers at anna"),
    ):
        waits = replace(said.requests[0], waits_for=what, expected_s=expected_s)
        ring.take(replace(said, requests=[waits]))
        lines = top_lines(replace(looked(), requests=ring.requests()), None)
        [line] = [text for _, text in lines if text.startswith("7 ")]
        assert line.endswith(f"  {shown}")
