"""What a head decides when rings are lost, and when nodes come back."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.cluster.recovery.policy import (
    APART_S,
    DELAYS_S,
    IN_VAIN_S,
    MOST_IN_VAIN,
    SETTLE_S,
    STUCK_S,
    Attempt,
    Blame,
    GiveUp,
    RecoveryPolicy,
    Returns,
    is_better,
)
from shardnet.errors import (
    BusyError,
    CapacityError,
    DamagedFrameError,
    LinkError,
    PeerFailedError,
    PeerSilentError,
    PeerUnreachableError,
    PlanError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.types import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LOST = PeerFailedError("b was lost", remedy="ask again")


def test_the_first_attempt_waits_for_nothing_and_leaves_out_nobody_by_name() -> None:
    """Who is lost has no link: no plan can use it. Who has linked again may be used again."""
    policy = RecoveryPolicy()
    blamed = [Blame(node=B, error=LinkError("cut"))]
    assert policy.broke(0.0, LOST, blamed) == Attempt(after_s=0.0, without={})


def test_attempts_wait_longer_and_come_to_an_end() -> None:
    policy = RecoveryPolicy()
    decision = policy.broke(0.0, LOST, [])
    waits = []
    while isinstance(decision, Attempt):
        waits.append(decision.after_s)
        decision = policy.failed(0.0, LinkError("c does not answer"), [])
    assert tuple(waits) == DELAYS_S
    assert decision.error.message == "c does not answer"


def test_who_refuses_is_left_out_and_asked_again_when_the_others_cannot_do_it() -> None:
    policy = RecoveryPolicy()
    policy.broke(0.0, LOST, [])
    busy = Blame(node=C, error=BusyError("c is generating"))
    second = policy.failed(0.0, busy.error, [busy])
    assert second == Attempt(after_s=DELAYS_S[1], without={C: "c is generating"})
    third = policy.failed(0.0, PlanError("a alone is too small"), [])
    assert third == Attempt(after_s=DELAYS_S[2], without={})
    last = policy.failed(0.0, PlanError("a alone is too small"), [])
    assert isinstance(last, GiveUp)
    assert last.error.message == "a alone is too small"


def test_who_refused_to_the_end_is_used_again_once_the_ring_is_given_up() -> None:
    """Else it would not count as here when it comes back, and no ring be opened again with it."""
    policy = RecoveryPolicy()
    full = Blame(node=C, error=CapacityError("c has no memory left"))
    decision = policy.broke(0.0, LOST, [])
    while isinstance(decision, Attempt):
        decision = policy.failed(0.0, full.error, [full])
    assert policy.left_out(0.0) == {}


def test_a_node_that_another_cannot_reach_twice_is_left_out() -> None:
    policy = RecoveryPolicy()
    policy.broke(0.0, LOST, [])
    cut = [Blame(node=C, error=LinkError("a to c is damaged"), kind="unreached")]
    assert policy.failed(0.0, cut[0].error, cut) == Attempt(after_s=DELAYS_S[1], without={})
    third = policy.failed(0.0, cut[0].error, cut)
    assert third == Attempt(after_s=DELAYS_S[2], without={C: "a to c is damaged"})


def test_a_node_of_which_another_hears_nothing_is_left_out_at_once() -> None:
    """For longer each time; unless the others cannot do it without."""
    policy = RecoveryPolicy()

    def apart(error: ShardnetError) -> list[Blame]:
        return [Blame(node=C, error=error, kind="unreached")]

    silent, unreachable = PeerSilentError("nothing came"), PeerUnreachableError("no answer")
    first = policy.broke(0.0, LOST, apart(silent))
    assert first == Attempt(after_s=0.0, without={C: "nothing came"})
    assert policy.left_out(APART_S - 0.1) == {C: "nothing came"}
    assert policy.left_out(APART_S) == {}
    again = policy.failed(APART_S, unreachable, apart(unreachable))
    assert again == Attempt(after_s=DELAYS_S[1], without={C: "no answer"})
    assert policy.left_out(3 * APART_S - 0.1) == {C: "no answer"}
    third = policy.failed(APART_S, PlanError("a alone is too small"), [])
    assert third == Attempt(after_s=DELAYS_S[2], without={})
    assert isinstance(policy.failed(APART_S, PlanError("too small"), []), GiveUp)


def test_nodes_that_could_not_be_reached_at_first_are_left_out_of_the_next_ring_too() -> None:
    policy = RecoveryPolicy()
    policy.avoid(0.0, {C: LinkError("cut")})
    assert policy.broke(1.0, LOST, []) == Attempt(after_s=0.0, without={C: "cut"})
    policy.failed(1.0, LOST, [Blame(node=B, error=LOST)])
    assert policy.left_out(APART_S) == {B: "b was lost"}
    policy.went_on()
    assert policy.left_out(APART_S) == {}


def test_rings_that_are_lost_before_any_token_are_given_up_after_a_time() -> None:
    policy = RecoveryPolicy()
    for _ in range(MOST_IN_VAIN - 1):
        assert isinstance(policy.broke(0.0, LOST, []), Attempt)
    policy.went_on()
    waits = [lost(policy, 10.0) for _ in range(len(DELAYS_S) + 2)]
    assert waits == [*DELAYS_S, DELAYS_S[-1], DELAYS_S[-1]]
    policy.went_on()
    for at_s in (0.0, *[IN_VAIN_S] * (MOST_IN_VAIN - 1)):
        lost(policy, 100.0 + at_s)
    given_up = policy.broke(100.0 + IN_VAIN_S, LOST, [])
    assert isinstance(given_up, GiveUp)
    assert isinstance(given_up.error, PeerFailedError)
    assert str(given_up.error).startswith("b was lost (and 3 rings before it, in 30 s")


def lost(policy: RecoveryPolicy, now_s: float, *blamed: Blame) -> float:
    """Lose a ring; return how long the policy waits before the next."""
    decision = policy.broke(now_s, LOST, blamed)
    assert isinstance(decision, Attempt)
    return decision.after_s


@pytest.mark.parametrize("kind", ["refused", "unreached"])
def test_who_is_lost_with_one_ring_after_the_other_is_left_out(
    kind: Literal["refused", "unreached"],
) -> None:
    """Bytes that change on their way, now and then: a ring is built before the next ones do."""
    policy = RecoveryPolicy()
    flapping = Blame(node=B, error=DamagedFrameError("its checksum is wrong"), kind=kind)
    lost(policy, 0.0, flapping)
    assert policy.left_out(0.0) == {}
    lost(policy, 0.1, flapping)
    assert policy.left_out(APART_S) == {B: "its checksum is wrong"}
    policy.failed(1.0, PlanError("a alone is too small"), [])
    assert policy.left_out(1.0) == {}


def test_who_breaks_the_protocol_is_left_out_at_once() -> None:
    policy = RecoveryPolicy()
    lost(policy, 0.0, Blame(node=B, error=RemoteProtocolError("2 bytes"), kind="unreached"))
    assert policy.left_out(APART_S - 1) == {B: "2 bytes"}


def test_who_computes_wrong_values_is_left_out_until_others_do_so_or_nobody_else_is_there() -> None:
    wrong = Blame(node=B, error=PeerFailedError("b computed wrong values"), kind="wrong")
    policy = RecoveryPolicy()
    lost(policy, 0.0, wrong)
    assert policy.left_out(STUCK_S - 1) == {B: "b computed wrong values"}
    policy.acquit()
    assert policy.left_out(1.0) == {}
    lost(policy, 2.0, wrong)
    assert isinstance(policy.failed(3.0, PlanError("a alone is too small"), []), Attempt)
    assert policy.left_out(3.0) == {}


def test_a_stage_that_hung_is_left_out_for_longer_each_time() -> None:
    policy = RecoveryPolicy()
    stuck = [Blame(node=B, error=PeerFailedError("node b is stuck"), kind="stuck")]
    first = policy.broke(0.0, LOST, stuck)
    assert first == Attempt(after_s=0.0, without={B: "node b is stuck"})
    assert policy.left_out(STUCK_S - 1) == {B: "node b is stuck"}
    assert policy.left_out(STUCK_S) == {}
    policy.broke(STUCK_S, LOST, stuck)
    assert policy.left_out(3 * STUCK_S - 1) == {B: "node b is stuck"}
    assert policy.left_out(3 * STUCK_S) == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["broke", "plan", "link", "busy", "went on"]), st.sampled_from([A, B])
        ),
        max_size=40,
    )
)
def test_whatever_happens_ends_in_an_attempt_or_a_name(events: list[tuple[str, NodeId]]) -> None:
    """No history makes a head wait for ever, or leave a node out that did nothing."""
    policy, failures = RecoveryPolicy(), 0
    policy.broke(0.0, LOST, [])
    for what, node in events:
        error = {"plan": PlanError("too small"), "link": LinkError("cut")}.get(
            what, BusyError("busy")
        )
        blamed = [Blame(node=node, error=error)] if what == "busy" else []
        if what == "went on":
            policy.went_on()
            continue
        failures = 0 if what == "broke" else failures + 1
        if what == "broke":
            decision = policy.broke(0.0, LOST, [])
        else:
            decision = policy.failed(0.0, error, blamed)
        if isinstance(decision, Attempt):
            assert decision.after_s <= DELAYS_S[-1]
            assert failures < len(DELAYS_S)
            assert C not in decision.without
        else:
            assert str(decision.error)
            policy = RecoveryPolicy()
            policy.broke(0.0, LOST, [])
            failures = 0


def test_a_node_is_news_when_it_has_settled_and_no_plan_has_seen_it() -> None:
    returns = Returns()
    returns.look(0.0, [B])
    assert not returns.is_news(0.0, [A])
    assert returns.unsettled(0.0) == {B}
    assert returns.is_news(SETTLE_S, [A])
    assert not returns.is_news(SETTLE_S, [A, B])
    returns.planned(SETTLE_S)
    assert not returns.is_news(SETTLE_S, [A])


def test_a_node_that_flaps_waits_twice_as_long_each_time_after_the_first() -> None:
    returns, now_s = Returns(), 0.0
    for factor in (1, 1, 2, 4):
        returns.look(now_s, [B])
        assert returns.settle_s(B) == SETTLE_S * factor
        assert not returns.is_news(now_s + SETTLE_S * factor - 0.1, [])
        assert returns.is_news(now_s + SETTLE_S * factor, [])
        now_s += 100.0
        returns.look(now_s, [])
    returns.look(now_s, [B])
    returns.look(now_s + 2000.0, [])
    assert returns.settle_s(B) == SETTLE_S


def test_a_ring_in_use_is_replaced_for_more_than_a_fifth() -> None:
    assert is_better(100.0, 121.0, is_complete=False, is_used=True)
    assert not is_better(100.0, 119.0, is_complete=True, is_used=True)
    assert is_better(100.0, 106.0, is_complete=False, is_used=False)
    assert not is_better(100.0, 104.0, is_complete=False, is_used=False)
    assert is_better(100.0, 50.0, is_complete=True, is_used=False)
    assert not is_better(None, 50.0, is_complete=False, is_used=False)
