"""Who may begin a handshake: counts, penalties, and what is told once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import AuthenticationError, LinkError, PeerSilentError
from shardnet.transport.admission import MAX_HOSTS, PENALTY_S, Admission


def enter(admission: Admission, *hosts: str, now: float = 0.0) -> None:
    for host in hosts:
        admission.enter(host, now)


def test_open_handshakes_are_limited_in_all() -> None:
    admission = Admission(total=2, per_host=2)
    enter(admission, "10.0.0.1", "10.0.0.2")
    with pytest.raises(LinkError, match="refused, 2 other handshakes are open"):
        enter(admission, "10.0.0.3")
    admission.leave("10.0.0.1", 0.0, failed=False)
    enter(admission, "10.0.0.3")


def test_open_handshakes_are_limited_per_host() -> None:
    admission = Admission(total=9, per_host=2)
    enter(admission, "10.0.0.1", "10.0.0.1", "10.0.0.2")
    with pytest.raises(LinkError, match="2 handshakes of that host are open"):
        enter(admission, "10.0.0.1")
    admission.leave("10.0.0.1", 0.0, failed=False)
    enter(admission, "10.0.0.1")


def test_a_failed_handshake_keeps_its_hosts_place_for_a_while_and_nobody_elses() -> None:
    admission = Admission(total=1, per_host=1)
    enter(admission, "10.0.0.1", now=5.0)
    admission.leave("10.0.0.1", 6.0, failed=True)
    enter(admission, "10.0.0.2", now=6.0)
    admission.leave("10.0.0.2", 6.0, failed=False)
    with pytest.raises(LinkError, match="1 have just failed"):
        enter(admission, "10.0.0.1", now=6.0 + PENALTY_S / 2)
    enter(admission, "10.0.0.1", now=6.0 + PENALTY_S)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_addresses_of_one_host(one: str, other: str, same: bool) -> None:
    admission = Admission(total=9, per_host=1)
    enter(admission, one)
    if same:
        with pytest.raises(LinkError):
            enter(admission, other)
    else:
        enter(admission, other)


def test_a_kind_of_failure_is_told_once_per_host_until_a_link_comes_up() -> None:
    admission = Admission(total=9, per_host=9)
    stranger, silent = AuthenticationError("no key"), PeerSilentError("no hello")
    assert admission.is_news("10.0.0.1", stranger)
    assert admission.is_news("10.0.0.1", silent)
    assert not admission.is_news("10.0.0.1", AuthenticationError("still no key"))
    assert admission.is_news("10.0.0.2", stranger)
    enter(admission, "10.0.0.1")
    admission.leave("10.0.0.1", 0.0, failed=False)
    assert admission.is_news("10.0.0.1", stranger)


def test_many_hosts_take_a_bounded_memory_and_open_handshakes_are_never_forgotten() -> None:
    admission = Admission(total=2 * MAX_HOSTS, per_host=1)
    enter(admission, "10.0.0.1")
    for number in range(3 * MAX_HOSTS):
        host = f"10.1.{number // 256}.{number % 256}"
        enter(admission, host)
        admission.leave(host, 0.0, failed=True)
    assert len(admission._hosts) <= MAX_HOSTS
    with pytest.raises(LinkError):
        enter(admission, "10.0.0.1")


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=60))
def test_never_more_open_than_allowed_and_all_are_counted_down(
    moves: list[tuple[int, bool, bool]],
) -> None:
    admission = Admission(total=5, per_host=2)
    open_hosts: list[str] = []
    for now, (number, begins, fails) in enumerate(moves):
        host = f"10.0.0.{number}"
        if not begins and open_hosts:
            admission.leave(open_hosts.pop(0), float(now), failed=fails)
        else:
            try:
                admission.enter(host, float(now))
            except LinkError:
                continue
            open_hosts.append(host)
        assert len(open_hosts) <= 5
        assert all(open_hosts.count(each) <= 2 for each in open_hosts)
    for host in open_hosts:
        admission.leave(host, 0.0, failed=False)
    end = len(moves) + PENALTY_S + 1
    for number in range(5):
        admission.enter(f"10.0.0.{number}", end)
