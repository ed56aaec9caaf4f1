"""Pieces of a job by several threads: each once, and what a piece or the caller raises ends it."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.model.kernels.worker_pool import Crew

TIMEOUT_S = 20.0


class Told(Exception):
    """What a piece, or the caller, raises."""


@given(st.integers(1, 5), st.integers(0, 40))
def test_every_piece_is_done_once(n_threads: int, n_pieces: int) -> None:
    done: list[int] = []
    crew = Crew(n_threads, "crew")
    for _ in range(2):
        crew.do(done.append, range(n_pieces))
    assert sorted(done) == sorted([*range(n_pieces)] * 2)


def test_helpers_work_while_the_caller_does() -> None:
    both = threading.Barrier(2, timeout=TIMEOUT_S)
    at_work: list[threading.Thread] = []

    def work(piece: int) -> None:
        both.wait()
        at_work.append(threading.current_thread())

    Crew(2, "crew").do(work, range(2))
    assert threading.current_thread() in at_work
    assert len(set(at_work)) == 2


@pytest.mark.parametrize("who", ["caller", "helper", "alive"])
def test_what_is_raised_ends_the_job_once_nobody_works(who: str) -> None:
    here, begun = threading.current_thread(), threading.Barrier(2, timeout=TIMEOUT_S)
    working = threading.Semaphore(2)
    n_done = 0

    def work(piece: int) -> None:
        nonlocal n_done
        is_caller = threading.current_thread() is here
        if piece < 2:  # each has one
            begun.wait()
        with working:
            if who == ("caller" if is_caller else "helper"):
                raise Told
            n_done += 1

    def alive() -> None:
        if who == "alive":
            raise Told

    crew = Crew(2, "crew")
    with pytest.raises(Told):
        crew.do(work, range(10_000), alive)
    n_then = n_done
    assert working.acquire(blocking=False)
    assert working.acquire(blocking=False), "nobody works any more"
    working.release(2)
    done: list[int] = []
    crew.do(done.append, range(3))
    assert sorted(done) == [0, 1, 2]
    assert n_done == n_then
