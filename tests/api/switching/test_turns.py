"""Whose turn it is: nobody waits for ever, and not all of the time goes into loading."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from support.soak import cases

from shardnet.api.switching.turns import LEAST_TURN_S, LINGER_S, MOST_TURN_S, Ticket, Turns


def opened(model: str, now_s: float = 0.0, took_s: float = 0.0) -> tuple[Turns, Ticket]:
    """Begin a turn, with one request that runs."""
    turns = Turns()
    ticket = turns.arrive(model, now_s)
    assert turns.take(now_s) == []
    assert (turns.model, turns.is_open) == (model, False)
    turns.opened(now_s, took_s)
    assert turns.take(now_s) == [ticket]
    return turns, ticket


def test_one_model_is_never_waited_for() -> None:
    turns, first = opened("a")
    second = turns.arrive("a", 1000.0)
    assert turns.take(1000.0) == [second]
    for ticket in (first, second):
        turns.leave(ticket, 1001.0)
    assert turns.due_s(1001.0) is None
    assert (turns.take(9999.0), turns.model, turns.is_wanted) == ([], "a", False)


def test_another_model_waits_for_idle_and_then_for_a_moment() -> None:
    turns, first = opened("a")
    other = turns.arrive("b", 1.0)
    assert turns.take(1.0) == []
    assert turns.n_ahead(other) == 1
    young = turns.arrive("a", 2.0)
    assert turns.take(2.0) == [young]  # the turn is young
    late = turns.arrive("a", LEAST_TURN_S)
    assert turns.take(LEAST_TURN_S) == []  # now it waits behind the other model
    turns.leave(first, LEAST_TURN_S)
    assert turns.take(LEAST_TURN_S) == []
    assert turns.model == "a"
    turns.leave(young, LEAST_TURN_S)
    assert turns.take(LEAST_TURN_S) == []
    assert (turns.model, turns.is_open) == ("b", False)
    turns.opened(20.0, 10.0)
    assert turns.take(20.0) == [other]
    turns.leave(other, 20.5)
    assert turns.take(20.5) == []
    assert turns.due_s(20.5) == LINGER_S
    again = turns.arrive("b", 21.0)  # the program goes on within the moment
    assert turns.take(21.0) == [again]
    turns.leave(again, 22.0)
    turns.take(22.0 + LINGER_S)
    assert turns.model == "a"
    turns.opened(30.0, 1.0)
    assert turns.take(30.0) == [late]


def test_what_nobody_waits_for_any_more_is_not_loaded_on() -> None:
    turns, first = opened("a")
    turns.leave(first, 1.0)
    other = turns.arrive("b", 10.0)
    turns.take(10.0)
    assert turns.model == "b"
    turns.arrive("a", 11.0)
    turns.take(11.0)
    assert turns.model == "b"
    turns.leave(other, 12.0)
    turns.take(12.0)
    assert turns.model == "a"


def test_who_is_sent_away_keeps_its_place_for_a_while() -> None:
    turns, first = opened("a")
    other = turns.arrive("b", LEAST_TURN_S)
    turns.leave(other, 20.0, promise_s=30.0)
    late = turns.arrive("a", 21.0)
    assert turns.take(21.0) == []  # behind who was sent away
    turns.leave(first, 22.0)
    turns.take(22.0)
    assert turns.model == "b"
    turns.opened(40.0, 18.0)
    assert turns.take(40.0) == []
    assert (turns.take(42.0), turns.model, turns.due_s(42.0)) == ([], "b", 8.0)
    again = turns.arrive("b", 45.0)
    assert (again.arrived_s, turns.take(45.0)) == (LEAST_TURN_S, [again])
    turns.leave(again, 46.0)
    turns.take(50.0)
    assert turns.model == "a"
    turns.opened(50.0, 0.0)
    assert turns.take(50.0) == [late]

    turns.leave(turns.arrive("b", 60.0), 60.0, promise_s=30.0)  # who never comes again
    assert turns.arrive("b", 90.0).arrived_s == 90.0


def test_a_model_that_cannot_be_had_keeps_nobody_waiting() -> None:
    turns = Turns()
    first, second = turns.arrive("a", 0.0), turns.arrive("b", 1.0)
    turns.take(1.0)
    assert turns.end() == [first]
    turns.take(2.0)
    assert turns.model == "b"
    turns.opened(3.0, 1.0)
    assert turns.take(3.0) == [second]


@dataclass(slots=True, kw_only=True)
class Day:
    """Programs that ask for models again and again, each its next request `pause_s` after the last
    one; loading takes `load_s`. Time is simulated.
    """

    programs: list[tuple[str, float, float]]
    load_s: float
    until_s: float
    waited_s: list[float] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)
    loading_s: float = 0.0

    def pass_by(self) -> None:
        """Run it, and check that only requests for the model that is loaded run."""
        turns, now_s, model = Turns(), 0.0, ""
        events: list[tuple[float, int, str, object]] = []
        count = iter(range(10**9))
        for number in range(len(self.programs)):
            heapq.heappush(events, (0.01 * number, next(count), "arrive", number))
        owners: dict[Ticket, int] = {}
        opening = ""
        while events and events[0][0] < self.until_s:
            now_s, _, what, whose = heapq.heappop(events)
            if what == "arrive":
                assert isinstance(whose, int)
                ticket = turns.arrive(self.programs[whose][0], now_s)
                owners[ticket] = whose
            elif what == "leave":
                assert isinstance(whose, Ticket)
                turns.leave(whose, now_s)
                number = owners.pop(whose)
                again_s = now_s + self.programs[number][2]
                heapq.heappush(events, (again_s, next(count), "arrive", number))
            elif what == "opened" and whose == turns.model:
                turns.opened(now_s, self.load_s)
                model, opening = turns.model, ""
                self.loading_s += self.load_s
            for ticket in turns.take(now_s):
                assert ticket.model == model == turns.model
                self.waited_s.append(now_s - ticket.arrived_s)
                self.served[model] = self.served.get(model, 0) + 1
                ends_s = now_s + self.programs[owners[ticket]][1]
                heapq.heappush(events, (ends_s, next(count), "leave", ticket))
            if turns.model and not turns.is_open and opening != turns.model:
                opening = turns.model
                heapq.heappush(events, (now_s + self.load_s, next(count), "opened", opening))
            due_s = turns.due_s(now_s)
            if due_s is not None:
                heapq.heappush(events, (now_s + due_s, next(count), "look", None))
        self.waited_s += [now_s - ticket.arrived_s for ticket in owners if ticket.model != model]


@pytest.mark.parametrize("seed", cases(range(8), range(8, 400)))
def test_nobody_waits_for_ever_and_loading_takes_no_more_than_its_share(seed: int) -> None:
    chance = random.Random(seed)
    models = "abc"[: chance.randint(2, 3)]
    programs = [
        (chance.choice(models), chance.uniform(0.1, 30.0), chance.choice([0.0, 0.2, 3.0, 30.0]))
        for _ in range(chance.randint(2, 8))
    ]
    day = Day(programs=programs, load_s=chance.choice([0.1, 3.0, 40.0]), until_s=4000.0)
    day.pass_by()
    n_models = len({model for model, _, _ in programs})
    longest_s = max(lasts_s for _, lasts_s, _ in programs)
    turn_s = max(LEAST_TURN_S, min(MOST_TURN_S, day.load_s)) + longest_s + LINGER_S + day.load_s
    assert max(day.waited_s) <= n_models * turn_s
    assert set(day.served) == {model for model, _, _ in programs}


def test_programs_that_take_turns_compute_half_of_the_time() -> None:
    """Each asks again at once: without turns of some length each request would load its model."""
    day = Day(programs=[("a", 1.0, 0.1), ("b", 1.0, 0.1)], load_s=40.0, until_s=4000.0)
    day.pass_by()
    assert day.loading_s <= 0.55 * day.until_s
    assert min(day.served.values()) >= 0.8 * max(day.served.values())
    assert sum(day.served.values()) >= 0.8 * 0.5 * day.until_s / 1.1
