"""Who shakes hands, who waits, who must go for others, and what is reported once."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import AuthenticationError, PeerSilentError
from shardnet.transport.admission import (
    GRACE_S,
    MAX_HOSTS,
    MAX_REPORTED,
    SPENT_S,
    Admission,
    KnownHosts,
    ReportedFailures,
    Turns,
)

WAIT_S = 5.0
ONE, TWO, THREE = "10.0.0.1", "10.0.0.2", "10.0.0.3"


class Door:
    """An admission with tickets of its own."""

    def __init__(
        self, *, connections: int = 99, handshakes: int = 8, per_host: int = 4, known: str = ""
    ) -> None:
        self.known = KnownHosts()
        for address in known.split():
            self.known.add(address)
        self.admission = Admission(
            connections=connections,
            handshakes=handshakes,
            per_host=per_host,
            wait_s=WAIT_S,
            known=self.known,
        )
        self.tickets = count()
        self.closed: list[int] = []

    def silent(self, address: str, n: int = 1, now: float = 0.0) -> list[int]:
        """Connections that say nothing. Those that are closed for them join `closed`."""
        arrived = []
        for _, ticket in zip(range(n), self.tickets, strict=False):
            closed = self.admission.arrive(ticket, address, now)
            self.closed += [] if closed is None else [closed]
            arrived.append(ticket)
        return arrived

    def ready(self, address: str, n: int = 1, now: float = 0.0) -> list[int]:
        """Connections whose first byte has come."""
        arrived = self.silent(address, n, now)
        for ticket in arrived:
            if ticket not in self.closed:
                self.admission.speak(ticket)
        return arrived

    def turns(self, now: float = 0.0) -> Turns:
        return self.admission.take_turns(now)

    def begin(self, address: str, n: int = 1, now: float = 0.0) -> list[int]:
        """Handshakes that begin at once."""
        arrived = self.ready(address, n, now)
        assert self.turns(now) == Turns(begun=arrived)
        return arrived


# --- whose turn it is


def test_silent_connections_take_no_turn() -> None:
    door = Door()
    door.silent(ONE, 50)
    (ticket,) = door.ready(TWO)
    assert door.turns() == Turns(begun=[ticket])


def test_a_burst_of_one_host_is_served_in_order_as_handshakes_end() -> None:
    door = Door(per_host=4)
    burst = door.ready(ONE, 50)
    begun = door.turns().begun
    assert begun == burst[:4]
    for ticket in burst:
        assert ticket in begun
        door.admission.leave(ticket, 0.0, failed=False)
        begun += door.turns().begun
    assert begun == burst
    assert door.closed == []


def test_hosts_take_turns() -> None:
    door = Door(handshakes=4, per_host=4)
    flood, other = door.ready(ONE, 50), door.ready(TWO)
    assert door.turns().begun == [flood[0], other[0], flood[1]]


def test_a_failed_handshake_counts_for_a_while_from_its_beginning() -> None:
    door = Door(per_host=1)
    (failed,) = door.begin(ONE, now=5.0)
    door.admission.leave(failed, 5.5, failed=True)
    (later,) = door.ready(ONE, now=5.5)
    assert door.turns(5.0 + SPENT_S - 0.01) == Turns()
    assert door.turns(5.0 + SPENT_S) == Turns(begun=[later])


def test_a_handshake_that_came_up_makes_room_at_once_and_its_host_known() -> None:
    door = Door(per_host=1)
    (up,) = door.begin(ONE)
    assert ONE not in door.known
    door.admission.leave(up, 0.0, failed=False)
    assert ONE in door.known
    door.begin(ONE)


def test_failed_handshakes_of_all_strangers_together_are_limited() -> None:
    """What strangers can have computed is bounded, however many addresses they have."""
    door = Door(handshakes=8)
    for number in range(40):
        door.ready(f"10.1.0.{number}", 4)
    n_begun = 0
    for step in range(30):
        for ticket in door.turns(step / 10).begun:
            n_begun += 1
            door.admission.leave(ticket, step / 10, failed=True)
    assert n_begun == 3 * 6


def test_known_hosts_have_places_that_strangers_never_take() -> None:
    door = Door(handshakes=8, known=TWO)
    for address in (ONE, THREE):
        door.ready(address, 50)
    assert len(door.turns().begun) == 6
    door.begin(TWO, 2)
    door.ready(TWO)
    assert door.turns() == Turns()


# --- who must go


def test_a_slow_handshake_of_the_host_with_most_ends_for_a_new_one() -> None:
    door = Door(handshakes=8)
    door.begin(TWO, 2, now=0.1)
    slow = door.begin(ONE, 4, now=0.1)
    (new,) = door.ready(THREE, now=0.2)
    assert door.turns(0.1 + GRACE_S - 0.01) == Turns()
    assert door.turns(0.1 + GRACE_S) == Turns(begun=[new], ended=slow[:1])
    door.admission.leave(slow[0], 0.2 + GRACE_S, failed=True)  # of no account: it has gone


def test_a_slow_handshake_ends_for_no_host_that_has_as_many() -> None:
    door = Door(handshakes=4)
    door.begin(ONE, 1)
    own = door.begin(TWO, 2, now=0.5)
    (new,) = door.ready(TWO)
    assert door.turns(GRACE_S) == Turns()
    assert door.turns(0.5 + GRACE_S) == Turns(begun=[new], ended=own[:1])


def test_a_slow_handshake_goes_on_while_nobody_waits() -> None:
    door = Door(handshakes=1, per_host=1)
    door.begin(ONE)
    assert door.turns(WAIT_S) == Turns()


def test_too_many_connections_close_the_oldest_silent_one_of_the_host_with_most() -> None:
    door = Door(connections=10)
    flood = door.silent(ONE, 7, now=1.0)
    door.silent(TWO, 3)
    door.ready(THREE, now=1.0)
    assert door.closed == flood[:1]


def test_a_host_that_floods_closes_its_own_old_connections_else_its_new_one() -> None:
    door = Door(connections=10)
    flood = door.silent(ONE, 10)
    new = door.silent(ONE, now=GRACE_S / 2)
    assert door.closed == new
    door.silent(ONE, now=GRACE_S)
    assert door.closed == new + flood[:1]


def test_no_stranger_closes_a_known_hosts_connection() -> None:
    door = Door(connections=10, known=ONE)
    door.silent(ONE, 9)
    strangers = [*door.silent(TWO), *door.silent(TWO), *door.silent(THREE, now=9.0)]
    assert door.closed == [strangers[1], strangers[0]]
    door.silent(ONE)
    assert door.closed[2:] == strangers[2:]


def test_hosts_that_have_as_many_close_the_one_that_has_waited_longest() -> None:
    door = Door(connections=3)
    door.ready("10.1.0.1", now=0.0)
    second = door.silent("10.1.0.2", now=1.0)
    door.silent("10.1.0.3", now=2.0)
    door.silent("10.1.0.4", now=3.0)
    assert door.closed == second


def test_waits_that_are_too_long_expire() -> None:
    door = Door()
    old = door.silent(ONE, 2) + door.ready(TWO)
    door.silent(ONE, now=1.0)
    assert door.admission.expired(WAIT_S - 0.01) == []
    assert sorted(door.admission.expired(WAIT_S)) == old


def test_a_process_without_room_sheds_a_connection_of_the_host_with_most_that_wait() -> None:
    door = Door()
    assert door.admission.shed() is None
    door.begin(ONE, 4)
    assert door.admission.shed() is None
    door.ready(ONE)
    flood = door.silent(TWO, 2)
    assert door.admission.shed() == flood[0]
    assert door.admission.n_waiting == 2


# --- attacks


def test_500_silent_connections_from_40_hosts_delay_nobody() -> None:
    door = Door(connections=256, handshakes=128, per_host=16)
    for number in range(500):
        door.silent(f"10.1.0.{number % 40}")
    for number in range(10):
        door.begin(f"10.0.0.{number}", now=0.1)
    assert all(ticket < 500 for ticket in door.closed)


@pytest.mark.parametrize("n_hosts", [4, 40, 200])
def test_handshakes_that_never_end_delay_a_newcomer_for_a_moment(n_hosts: int) -> None:
    """The attackers replace at once what is ended."""
    door = Door(connections=512, handshakes=128, per_host=16)
    for number in range(500):
        door.ready(f"10.1.0.{number % n_hosts}")
    newcomers: set[int] = set()
    begun_at: dict[int, float] = {}
    for now in (tenth / 10 for tenth in range(40)):
        if now == 1.5:
            for number in range(10):
                newcomers |= set(door.ready(f"10.0.0.{number}", now=now))
        turns = door.turns(now)
        begun_at |= {ticket: now - 1.5 for ticket in turns.begun if ticket in newcomers}
        for ticket in turns.begun:
            if ticket in newcomers:
                door.admission.leave(ticket, now, failed=False)
        for _ in turns.ended:
            door.ready(f"10.1.0.{next(door.tickets) % n_hosts}", now=now)
    assert begun_at.keys() == newcomers
    assert max(begun_at.values()) <= 1.1 * GRACE_S


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(["arrive", "speak", "leave", "fail", "turns"])
        ),
        max_size=80,
    )
)
def test_limits_hold_and_all_is_forgotten_in_the_end(moves: list[tuple[int, str]]) -> None:
    door = Door(connections=7, handshakes=4, per_host=2, known="10.0.0.3")
    silent: list[int] = []
    waiting: set[int] = set()
    shaking: list[int] = []
    hosts: dict[int, int] = {}

    def settle(turns: Turns) -> None:
        for ticket in turns.ended:
            shaking.remove(ticket)
        shaking.extend(turns.begun)
        waiting.difference_update(turns.begun)

    for step, (number, move) in enumerate(moves):
        now = step * 0.3
        if move == "arrive":
            (ticket,) = door.silent(f"10.0.0.{number}", now=now)
            hosts[ticket] = number
            silent.append(ticket)
            waiting.add(ticket)
            for closed in door.closed:
                waiting.discard(closed)
                silent = [each for each in silent if each != closed]
        elif move == "speak" and silent:
            door.admission.speak(silent.pop(number % len(silent)))
        elif move in ("leave", "fail") and shaking:
            ticket = shaking.pop(number % len(shaking))
            door.admission.leave(ticket, now, failed=move == "fail")
        else:
            settle(door.turns(now))
        assert len(waiting) + len(shaking) <= 7
        assert len(shaking) <= 4
        assert all(sum(hosts[t] == n for t in shaking) <= 2 for n in range(4))
        assert door.admission.n_waiting == len(waiting)
    for ticket in shaking:
        door.admission.leave(ticket, 99.0, failed=True)
    for ticket in waiting:
        door.admission.forget(ticket)
    assert door.turns(99.0) == Turns()
    assert door.admission._hosts == {}
    assert door.admission._tickets == {}
    assert door.admission._in_turn == {}


# --- hosts


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
    door = Door(per_host=1)
    door.begin(one)
    (ticket,) = door.ready(other)
    assert door.turns() == Turns(begun=[] if same else [ticket])
    known = KnownHosts()
    known.add(one)
    assert (other in known) is same


def test_the_hosts_that_are_known_are_bounded_and_the_longest_unseen_is_forgotten() -> None:
    known = KnownHosts(most=2)
    for address in (ONE, TWO, ONE, THREE):
        known.add(address)
    assert [address in known for address in (ONE, TWO, THREE)] == [True, False, True]


def test_a_failure_is_told_once_per_host_until_a_link_comes_up() -> None:
    reported = ReportedFailures()
    stranger, silent = AuthenticationError("no key"), PeerSilentError("no hello")
    assert reported.is_news(ONE, stranger)
    assert reported.is_news(ONE, silent)
    assert not reported.is_news(ONE, AuthenticationError("no key"))
    assert reported.is_news(ONE, AuthenticationError("another key"))
    assert reported.is_news(TWO, stranger)
    reported.clear(ONE)
    assert reported.is_news(ONE, stranger)


def test_the_failures_of_a_host_that_are_told_are_bounded() -> None:
    reported = ReportedFailures()
    news = [reported.is_news(ONE, AuthenticationError(f"key {n}")) for n in range(20)]
    assert sum(news) == MAX_REPORTED


def test_the_hosts_whose_failures_were_told_are_bounded() -> None:
    reported = ReportedFailures()
    for number in range(3 * MAX_HOSTS):
        assert reported.is_news(f"10.1.{number // 256}.{number % 256}", PeerSilentError("no hello"))
    assert len(reported._by_host) == MAX_HOSTS
