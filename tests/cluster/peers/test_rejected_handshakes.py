"""Whom a node has refused: counted by host and reason, bounded, the latest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.peers.rejected_handshakes import RejectedHandshakes
from shardnet.errors import AuthenticationError, RemoteProtocolError, ShardnetError
from shardnet.wire.messages.diagnostics import MAX_REASON

ERRORS: list[ShardnetError] = [AuthenticationError("no key"), RemoteProtocolError("nonsense")]


def test_refusals_are_counted_by_host_and_reason() -> None:
    refusals = RejectedHandshakes()
    for now, error in ((1.0, ERRORS[0]), (2.0, ERRORS[1]), (5.0, ERRORS[0])):
        refusals.note("10.0.0.9", error, now)
    key, nonsense = refusals.report(now=7.0)
    assert (key.code, key.n_times, key.age_s) == (AuthenticationError.code, 2, 2.0)
    assert (nonsense.code, nonsense.n_times, nonsense.age_s) == (RemoteProtocolError.code, 1, 5.0)


def test_an_ipv4_host_that_came_by_ipv6_is_one_host() -> None:
    refusals = RejectedHandshakes()
    refusals.note("::ffff:10.0.0.9", ERRORS[0], 1.0)
    refusals.note("10.0.0.9", ERRORS[0], 2.0)
    [only] = refusals.report(2.0)
    assert (only.host, only.n_times) == ("10.0.0.9", 2)


def test_a_wrong_key_is_forgotten_when_a_node_of_the_host_has_linked() -> None:
    """What strangers did from there is not."""
    refusals = RejectedHandshakes()
    refusals.note("::ffff:10.0.0.9", ERRORS[0], 1.0)
    refusals.note("10.0.0.9", ERRORS[1], 2.0)
    refusals.note("10.0.0.8", ERRORS[0], 3.0)
    refusals.forget("10.0.0.9")
    left = [(refused.host, refused.code) for refused in refusals.report(4.0)]
    assert left == [("10.0.0.8", ERRORS[0].code), ("10.0.0.9", ERRORS[1].code)]
    refusals.note("10.0.0.9", ERRORS[0], 5.0)
    assert refusals.report(6.0)[0].n_times == 1


def test_a_long_reason_is_cut() -> None:
    refusals = RejectedHandshakes()
    refusals.note("10.0.0.9", ShardnetError("é" * 10_000), 1.0)
    [only] = refusals.report(1.0)
    assert len(only.why.encode()) <= MAX_REASON


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(ERRORS)), max_size=40))
def test_the_latest_are_kept(notes: list[tuple[int, ShardnetError]]) -> None:
    refusals = RejectedHandshakes(most=4)
    for now, (host, error) in enumerate(notes):
        refusals.note(f"10.0.0.{host}", error, float(now))
    latest = list(dict.fromkeys((f"10.0.0.{host}", error.code) for host, error in reversed(notes)))
    assert [(r.host, r.code) for r in refusals.report(99.0)] == latest[:4]
