"""Which ring a request is given to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shardnet.cluster.router import kept_ring
from shardnet.cluster.router.choosing import SHARED_BYTES, RecentPrompts, RingView, choose
from shardnet.wire.messages.diagnostics import RingLoad


def view(
    n_requests: int, tok_s: float = 1.0, *, shared: int = 0, has_room: bool = True
) -> RingView:
    return RingView(tok_s=tok_s, n_requests=n_requests, shared_bytes=shared, has_room=has_room)


def test_requests_go_where_least_waits_for_what_a_ring_can_do() -> None:
    given = [0, 0]
    for _ in range(12):
        given[choose([view(given[0], 30.0), view(given[1], 10.0)])] += 1
    assert given == [9, 3]
    assert choose([view(0, has_room=False), view(7)]) == 1
    assert choose([view(1, has_room=False), view(2, has_room=False)]) == 0


def test_a_ring_that_has_the_prompts_beginning_gets_it_unless_it_is_far_busier() -> None:
    long = 4 * SHARED_BYTES
    assert choose([view(0), view(1, shared=long)]) == 1
    assert choose([view(0), view(4, shared=long)]) == 0
    assert choose([view(0, shared=long), view(0, shared=long + 1)]) == 1
    assert choose([view(0), view(1, shared=SHARED_BYTES - 1)]) == 0
    assert choose([view(0), view(0, shared=long, has_room=False)]) == 0


def test_of_the_prompts_of_late_the_longest_shared_beginning_counts() -> None:
    prompts = RecentPrompts(most_prompts=2, most_bytes=30)
    for prompt in (b"to be", b"to be or not", b"once"):
        prompts.add(prompt)
    assert prompts.shared_bytes(b"to be or what") == len(b"to be or ")
    assert prompts.shared_bytes(b"once upon") == 4
    prompts.add(b"x" * 20)  # the oldest goes, by number
    assert prompts.shared_bytes(b"to be") == 0
    prompts.add(b"y" * 20)  # and by size
    assert prompts.shared_bytes(b"once") == prompts.shared_bytes(b"x") == 0
    prompts.clear()
    assert prompts.shared_bytes(b"y") == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"waiting": 3, "used_blocks": 8}, True),  # until the next step
        ({"waiting": 3, "running": 0, "used_blocks": 0}, True),
        ({"used_blocks": 99}, True),
        ({"used_blocks": 100}, False),
        ({"used_blocks": 100, "warm_blocks": 40}, True),
        ({"waiting": 1, "used_blocks": 80}, False),  # 40 each: it waits for one to end
        ({"paused": 1, "used_blocks": 80}, False),
        ({"waiting": 1, "used_blocks": 80, "warm_blocks": 40}, True),
        ({"waiting": 2, "used_blocks": 8, "room_slots": 4}, False),
        ({"waiting": 1, "used_blocks": 8, "room_slots": 4}, True),
    ],
)
def test_a_ring_has_room_for_those_that_wait_and_one_more(
    changes: dict[str, int], expected: bool
) -> None:
    load = RingLoad(
        running=2,
        waiting=0,
        paused=0,
        warm_slots=0,
        warm_blocks=0,
        used_blocks=0,
        room_blocks=100,
    )
    assert kept_ring.has_room(replace(load, **changes)) is expected
