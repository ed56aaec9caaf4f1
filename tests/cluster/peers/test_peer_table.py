"""The book of peers by itself: whom to try when, what is forgotten, what is kept for people."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.peers.peer_table import (
    HESITATE_S,
    MAX_KNOWN,
    MDNS,
    PATIENCE_S,
    RETRY_S,
    SLOW_RETRY_S,
    KnownNode,
    PeerTable,
)
from shardnet.types import NodeId

M, A, Z = NodeId("m"), NodeId("a"), NodeId("z")
HERE, THERE = "10.0.0.1:1", "10.0.0.2:1"


def book() -> PeerTable:
    return PeerTable(M)


def told(node: NodeId = Z, *addresses: str, now: float = 0.0) -> PeerTable:
    made = book()
    made.add_report(node, node, addresses or (HERE,), source=MDNS, now=now)
    return made


def due(book: PeerTable, now: float) -> list[NodeId]:
    return [known.node for known in book.due(now)]


def entry(book: PeerTable, node: NodeId = Z) -> KnownNode:
    known = book.get(node)
    assert known is not None
    return known


def test_the_smaller_id_tries_at_once_and_the_larger_one_hesitates() -> None:
    assert due(told(Z), 0.0) == [Z]
    later = told(A)
    assert due(later, 0.0) == []
    assert later.next_due() == HESITATE_S
    assert due(later, HESITATE_S) == [A]


def test_a_node_is_no_peer_of_its_own() -> None:
    assert told(M).known() == []


def test_a_linked_node_is_tried_until_its_best_address_is_known() -> None:
    known = told(Z)
    known.linked(Z, "zoe", 0.0, dialled_at="")
    assert due(known, 1.0) == [Z]
    known.answered(Z, HERE, 0.001, {})
    assert due(known, 1.0) == []
    known.add_report(Z, "zoe", (HERE, THERE), source=Z, now=2.0)  # it has another address now
    assert due(known, 3.0) == [Z]
    known.answered(Z, THERE, 0.001, {HERE: "no answer"})
    assert due(known, 3.0) == []
    known.doubt(Z, 4.0)
    assert due(known, 4.0) == [Z]


def test_failures_in_a_row_are_tried_again_more_and_more_slowly() -> None:
    known, now, waits = told(Z), 0.0, []
    while now < PATIENCE_S + 100:
        assert due(known, now) == [Z]
        known.failed(Z, {HERE: "nothing listens there"}, now)
        next_due = known.next_due()
        assert next_due is not None
        waits.append(next_due - now)
        now = next_due
    assert tuple(waits[: len(RETRY_S)]) == RETRY_S
    assert waits == sorted(waits)
    assert waits[-1] == SLOW_RETRY_S
    assert entry(known).failures == {HERE: "nothing listens there"}


def test_news_make_a_node_worth_another_attempt() -> None:
    known = told(Z)
    for _ in range(5):
        known.failed(Z, {}, 10.0)
    known.add_report(Z, "zoe", (HERE,), source=A, now=10.1)
    assert due(known, 10.1) == []  # nothing new
    known.add_report(Z, "zoe", (THERE,), source=A, now=10.2)
    assert due(known, 10.2) == [Z]
    assert entry(known).addresses == (HERE, THERE)


def test_a_lost_node_is_tried_again_and_forgotten_when_nobody_tells_of_it() -> None:
    known = told(Z)
    known.linked(Z, "zoe", 0.0, dialled_at="")
    known.add_report(Z, "zoe", (THERE,), source=Z, now=0.0)
    known.answered(Z, THERE, 0.001, {})
    known.lost(Z, 100.0)
    assert due(known, 100.0) == [Z]
    known.retract(Z, source=MDNS, now=200.0)
    assert due(known, 200.0 + PATIENCE_S) == [Z]
    assert due(known, 201.0 + PATIENCE_S) == []
    assert known.known() == []


def test_a_node_that_a_record_speaks_of_is_never_forgotten() -> None:
    known = told(Z)
    known.failed(Z, {}, 0.0)
    assert due(known, 100 * PATIENCE_S) == [Z]


def test_what_a_lost_peer_told_counts_only_for_a_while() -> None:
    known = book()
    known.linked(A, "ann", 0.0, dialled_at=THERE)
    known.add_report(Z, "zoe", (HERE,), source=A, now=0.0)
    known.lost(A, 10.0)
    assert due(known, 10.0 + HESITATE_S) == [Z, A]
    assert due(known, 11.0 + PATIENCE_S) == []


def test_a_list_of_peers_takes_the_place_of_the_one_before() -> None:
    known = told(Z)
    known.add_report(Z, "zoe", (THERE,), source=A, now=0.0)
    known.retract_others([Z], source=A, now=1.0)
    assert entry(known).addresses == (HERE, THERE)
    known.retract_others([], source=A, now=2.0)
    assert entry(known).addresses == (HERE,)


def test_a_refused_node_is_kept_with_the_reason_and_not_tried() -> None:
    known = book()
    assert known.refuse(Z, "zoe", (HERE,), "another key", source=MDNS, now=0.0)
    assert due(known, 10.0) == []
    assert known.next_due() is None
    assert entry(known).refusal == "another key"
    known.add_report(Z, "zoe", (HERE,), source=MDNS, now=20.0)
    assert due(known, 20.0) == [Z]


def test_a_refused_node_is_forgotten_when_another_one_has_its_addresses() -> None:
    """It came back with the right key, and a new id. Its old record is withdrawn by nobody."""
    known = book()
    known.refuse(Z, "zoe", (HERE, THERE), "another key", source=MDNS, now=0.0)
    known.add_report(A, "zoe", (HERE,), source=MDNS, now=1.0)
    assert entry(known).refusal == "another key"
    known.add_report(A, "zoe", (THERE, HERE), source=MDNS, now=2.0)
    assert known.get(Z) is None


def test_of_a_nodes_record_and_its_own_report_the_later_counts() -> None:
    """A node that moved is announced at its new address before its old link is lost."""
    known = told(Z, HERE)
    known.linked(Z, "zoe", 0.0, dialled_at="")
    known.add_report(Z, "zoe", (HERE,), source=Z, now=1.0)
    known.answered(Z, HERE, 0.001, {})
    known.add_report(Z, "zoe", (THERE,), source=MDNS, now=2.0)
    assert entry(known).addresses == entry(known).announced == (THERE,)
    assert due(known, 2.0) == [Z]
    known.add_report(Z, "zoe", (HERE,), source=Z, now=3.0)
    assert entry(known).addresses == entry(known).announced == (HERE,)
    known.add_report(Z, "zoe", (), source=Z, now=4.0)
    assert entry(known).addresses == entry(known).announced == (THERE,)


def test_the_dialled_address_is_used_until_a_better_one_has_answered() -> None:
    known = book()
    known.linked(Z, "zoe", 0.0, dialled_at="nas.lan:1")
    assert entry(known).address == "nas.lan:1"
    known.add_report(Z, "zoe", (HERE,), source=Z, now=0.0)
    assert entry(known).announced == (HERE,)
    assert set(entry(known).addresses) == {HERE, "nas.lan:1"}
    assert due(known, 0.0) == [Z]


def test_an_address_that_two_nodes_claim_belongs_to_none() -> None:
    known = book()
    for node in (A, Z):
        known.linked(node, node, 0.0, dialled_at="")
        known.add_report(node, node, (HERE,), source=node, now=0.0)
    assert known.owner_of(HERE) is None
    known.lost(A, 1.0)
    assert known.owner_of(HERE) is entry(known)


def test_scopes_of_other_machines_do_not_matter() -> None:
    known = book()
    known.linked(Z, "zoe", 0.0, dialled_at="")
    known.add_report(Z, "zoe", ("[fe80::1%2]:7433",), source=MDNS, now=0.0)
    assert known.owner_of("[fe80::1%eth0]:7433") is entry(known)
    assert known.owner_of("[fe80::2%2]:7433") is None


def test_the_book_has_an_end() -> None:
    known = book()
    for number in range(MAX_KNOWN + 50):
        known.add_report(NodeId(f"n{number}"), "n", (HERE,), source=MDNS, now=0.0)
    assert len(known.known()) == MAX_KNOWN


def full_of_records() -> PeerTable:
    known = book()
    for number in range(MAX_KNOWN):
        known.add_report(NodeId(f"n{number}"), "n", (THERE,), source=MDNS, now=0.0)
    return known


def test_members_have_room_where_records_have_taken_all() -> None:
    """Whoever is on the network can write any number of records."""
    known = full_of_records()
    known.answered(NodeId("n0"), THERE, 0.1, {})
    known.linked(Z, "zoe", 1.0, dialled_at="")
    known.add_report(A, "ann", (HERE,), source=Z, now=1.0)
    assert entry(known, Z).is_linked
    assert entry(known, A).addresses == (HERE,)
    assert known.get(NodeId("n0")) is not None, "it has answered"
    assert len(known.known()) == MAX_KNOWN


def test_members_do_not_displace_members() -> None:
    known = book()
    for number in range(MAX_KNOWN):
        known.linked(NodeId(f"n{number}"), "n", 0.0, dialled_at=THERE)
    known.linked(Z, "zoe", 1.0, dialled_at="")
    assert known.get(Z) is None


def test_a_record_takes_the_place_of_one_that_was_withdrawn() -> None:
    known = full_of_records()
    known.add_report(Z, "zoe", (HERE,), source=MDNS, now=1.0)
    assert known.get(Z) is None
    known.retract(NodeId("n7"), source=MDNS, now=2.0)
    known.add_report(Z, "zoe", (HERE,), source=MDNS, now=3.0)
    assert entry(known).addresses == (HERE,)
    assert known.get(NodeId("n7")) is None


def test_who_has_waited_longest_is_tried_first() -> None:
    known = book()
    for number in range(20):
        known.add_report(NodeId(f"n{number:02}"), "n", (THERE,), source=MDNS, now=0.0)
    known.add_report(Z, "zoe", (HERE,), source=MDNS, now=0.1)
    for number in range(20):
        known.failed(NodeId(f"n{number:02}"), {}, 5.0)
    assert due(known, 6.0)[0] == Z


def test_a_record_has_no_say_in_a_linked_node() -> None:
    known = book()
    known.linked(Z, "zoe", 0.0, dialled_at="")
    known.add_report(Z, "zoe", (HERE,), source=Z, now=0.0)
    known.add_report(Z, "eve", (THERE,), source=MDNS, now=1.0)
    assert entry(known).name == "zoe"
    assert entry(known).vouched == (HERE,)
    assert not known.refuse(Z, "eve", (THERE,), "another key", source=MDNS, now=2.0)
    known.lost(Z, 3.0)
    assert (entry(known).name, entry(known).refusal) == ("zoe", "")
    assert due(known, 3.0) == [Z]


def test_what_is_passed_on_is_what_members_and_people_report() -> None:
    known = told(Z, THERE)
    assert entry(known).vouched == ()
    known.add_report(Z, "zoe", (HERE,), source=A, now=1.0)
    assert entry(known).vouched == (HERE,)
    known.linked(Z, "zoe", 1.0, dialled_at="nas.lan:1")
    known.add_report(Z, "zoe", (), source=Z, now=1.0)
    assert entry(known).vouched == (HERE, "nas.lan:1")


Change = tuple[str, NodeId]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["tell", "retract", "link", "lose", "answer", "fail", "doubt", "refuse"]),
        st.sampled_from([A, Z, M]),
    )
)


@given(CHANGES)
def test_whoever_is_due_has_addresses_and_is_wanted(changes: list[Change]) -> None:
    known = book()
    for now, (change, node) in enumerate(changes):
        match change:
            case "tell":
                known.add_report(node, node, (HERE,), source=A, now=now)
            case "retract":
                known.retract(node, source=A, now=now)
            case "link":
                known.linked(node, node, now, dialled_at="")
            case "lose":
                known.lost(node, now)
            case "answer":
                known.answered(node, HERE, 0.1, {})
            case "fail":
                known.failed(node, {}, now)
            case "doubt":
                known.doubt(node, now)
            case "refuse":
                known.refuse(node, node, (HERE,), "no", source=MDNS, now=now)
        for one in known.due(now):
            assert one.addresses
            assert one.node != M
            assert not one.refusal
            assert not (one.is_linked and one.is_settled)
            next_due = known.next_due()
            assert next_due is not None
            assert next_due <= now
