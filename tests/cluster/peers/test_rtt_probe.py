"""Which of the addresses that answered is used. How they are asked: test_peers.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.peers.rtt_probe import SAME_RTT, SAME_RTT_S, ProbeAnswer, choose
from shardnet.types import NodeId

ORDER = ["lan", "wifi", "vpn"]


def answered(**rtts_ms: float) -> list[ProbeAnswer]:
    return [
        ProbeAnswer(address=address, node=NodeId("n"), name="n", rtt_s=ms / 1000)
        for address, ms in rtts_ms.items()
    ]


@pytest.mark.parametrize(
    ("rtts_ms", "best"),
    [
        ({"lan": 5.0, "wifi": 2.0, "vpn": 30.0}, "wifi"),
        ({"lan": 2.2, "wifi": 2.0, "vpn": 2.1}, "lan"),  # about equal: the first in order
        ({"vpn": 2.1, "wifi": 2.0}, "wifi"),
        ({"lan": 0.09, "vpn": 0.03}, "lan"),  # too short to tell apart
        ({"vpn": 900.0}, "vpn"),
    ],
)
def test_the_shortest_round_trip_wins(rtts_ms: dict[str, float], best: str) -> None:
    chosen = choose(answered(**rtts_ms), ORDER)
    assert chosen is not None
    assert chosen.address == best


def test_of_none_there_is_none() -> None:
    assert choose([], ORDER) is None


@given(st.dictionaries(st.sampled_from(ORDER), st.floats(0.01, 1e4), min_size=1))
def test_the_chosen_one_is_about_the_fastest_and_the_first_of_these(
    rtts_ms: dict[str, float],
) -> None:
    found = answered(**rtts_ms)
    chosen = choose(found, ORDER)
    assert chosen is not None
    limit_s = max(min(one.rtt_s for one in found) * SAME_RTT, SAME_RTT_S)
    good = [one.address for one in found if one.rtt_s <= limit_s]
    assert chosen.address == min(good, key=ORDER.index)
