"""Random trees of prompts, as agents and their sub-agents ask them. Knows no ring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.models.checkpoints import EOS_ID

FIRST_ID, END_ID = 2, 300
"""Texts have these token ids, and end with EOS_ID as the messages of a chat do."""


def text(draws: random.Random, n_tokens: int) -> list[int]:
    """Draw a message of so many tokens."""
    return [*(draws.randrange(FIRST_ID, END_ID) for _ in range(n_tokens - 1)), EOS_ID]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A prompt whose last message begins at `begin`, and its answer as far as it is known.

    `how` says what it came from.
    """

    how: str
    prompt: list[int]
    begin: int
    answer: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        return [*self.prompt, *self.answer]

    def then(self, how: str, n_kept: int, message: Sequence[int]) -> Turn:
        """What comes when a message follows the first `n_kept` tokens."""
        return Turn(how=how, prompt=[*self.tokens[:n_kept], *message], begin=n_kept)


class PromptTree:
    """Draws prompts, each from one of the turns that were answered before.

    All sub-agents of one tree begin with the same tokens. No prompt has more than `most` tokens.
    """

    def __init__(self, draws: random.Random, most: int) -> None:
        self._draws, self._most = draws, most
        self._shared = text(draws, draws.randint(250, 620))
        self.turns: list[Turn] = []

    def draw(self) -> Turn:
        """Draw the next prompt. The newest turns are continued most often."""
        draws = self._draws
        if not self.turns or draws.random() < 0.25:
            return self._agent()
        before = self.turns[-1 - min(int(draws.expovariate(0.5)), len(self.turns) - 1)]
        turn = self._after(before)
        return turn if len(turn.prompt) <= self._most else self._agent()

    def _agent(self) -> Turn:
        own = text(self._draws, self._draws.choice([9, 60, 300, self._most - 620]))
        n_shared = len(self._shared)
        return Turn(how="agent", prompt=[*self._shared, *own], begin=n_shared)

    def _after(self, before: Turn) -> Turn:
        draws, n_prompt, tokens = self._draws, len(before.prompt), before.tokens
        message = text(draws, draws.choice([2, 7, 30, 270]))
        match draws.choice(["turn", "turn", "edit", "within", "fork", "again", "other day"]):
            case "edit":
                return before.then("edit", before.begin, message)
            case "within":
                return before.then("within", draws.randint(n_prompt, len(tokens)), message)
            case "fork":
                return before.then("fork", draws.randrange(len(tokens)), message)
            case "other day":
                turn = before.then("other day", n_prompt, ())
                turn.prompt[draws.randrange(min(n_prompt, 40))] = FIRST_ID
                return turn
            case "again":
                return before.then("again", n_prompt, ())
        return before.then("turn", len(tokens), message)
