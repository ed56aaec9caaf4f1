"""When a machine is put to sleep, and by which signs it is known to have slept."""

from __future__ import annotations

from shardnet.cluster.pressure.sleep import AWAKE_S, STOOD_S, SUSPENDED_S, Doze, SleepPolicy


def test_a_node_sleeps_after_its_time_without_use() -> None:
    policy = SleepPolicy(after_s=100.0, used_s=1000.0)
    assert not policy.look(1099.0, used_s=500.0)
    assert not policy.look(1101.0, used_s=1050.0)
    assert not policy.look(1149.0, used_s=0.0), "what was used once counts, whatever is told later"
    assert policy.look(1150.0, used_s=0.0)


def test_who_was_woken_stays_until_it_can_be_used() -> None:
    """Whoever woke it has to plan and to load; a node that sleeps late stays as long as ever."""
    for after_s, stays_s in ((1.0, AWAKE_S), (1800.0, 1800.0)):
        policy = SleepPolicy(after_s=after_s, used_s=0.0)
        policy.stay(5000.0)
        assert not policy.look(5000.0 + stays_s - 0.1, used_s=0.0)
        assert policy.look(5000.0 + stays_s, used_s=0.0)


def test_a_suspended_machine_is_told_by_its_two_clocks() -> None:
    """One of them goes on: by how much more is how long it slept, however short that was."""
    doze = Doze(looked_s=10.0, ahead_s=7.0)
    assert doze.look(10.25, 7.0) == 0
    assert doze.look(10.5, 7.0 + SUSPENDED_S) == SUSPENDED_S
    assert doze.look(10.75, 7.0 + 4000.0) == 4000.0


def test_a_process_that_stood_still_is_told_by_one_clock() -> None:
    """Looks that are a little late, as on a busy machine, say nothing."""
    doze = Doze(looked_s=10.0, ahead_s=0.0)
    assert doze.look(10.0 + STOOD_S - 0.1, 0.0) == 0
    assert doze.look(10.0 + 2 * STOOD_S - 0.2, 0.0) == 0
    assert doze.look(110.0, 0.0) == 110.0 - (10.0 + 2 * STOOD_S - 0.2)
