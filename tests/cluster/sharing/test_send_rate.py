"""The rate at which a node gives weights, by a clock of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.sharing.send_rate import BURST_S, SendRate


@given(
    st.floats(1, 1e9),
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 10)), max_size=50),
)
def test_no_more_is_sent_than_the_rate_and_one_burst(
    bytes_per_s: float, pieces: list[tuple[int, float]]
) -> None:
    """Each piece is booked a pause after the one before was sent."""
    rate, now, sent = SendRate(bytes_per_s), 0.0, 0
    for n_bytes, pause_s in pieces:
        now += pause_s
        now += rate.book(n_bytes, now)
        sent += n_bytes
        assert sent <= bytes_per_s * (now + BURST_S) * (1 + 1e-9) + 1


@given(st.floats(1000, 1e9), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50))
def test_the_whole_rate_is_used(bytes_per_s: float, pieces: list[int]) -> None:
    """Links that ask at once wait for no more than what was booked before them."""
    rate = SendRate(bytes_per_s)
    waits = [rate.book(n_bytes, 5.0) for n_bytes in pieces]
    assert waits == sorted(waits)
    assert waits[-1] <= sum(pieces) / bytes_per_s


def test_without_a_rate_nobody_waits() -> None:
    rate = SendRate(None)
    assert [rate.book(1 << 30, 0.0) for _ in range(3)] == [0.0] * 3
    assert rate.piece_bytes(1000) == 1000


def test_pieces_are_small_enough_to_show_progress() -> None:
    assert SendRate(4000).piece_bytes(1 << 20) == 1000
    assert SendRate(1).piece_bytes(1 << 20) == 1
    assert SendRate(1e9).piece_bytes(1 << 20) == 1 << 20
