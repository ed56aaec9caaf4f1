"""The requests that run while faults happen, and what their clients see of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shardnet.api import Client, GenerationOptions, GenerationResult, ModelChoice, Prompt
from shardnet.constraints import Constraint
from shardnet.errors import ShardnetError
from shardnet.sampling_params import SamplingParams

TOKEN_IDS = range(4, 256)
"""Tokens that each model of models.py has."""
SHORTEST = 16
"""Tokens of the shortest prompts."""
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 30},
        "rooms": {"type": "integer"},
    },
    "required": ["people", "rooms"],
}


@dataclass(slots=True, kw_only=True)
class Heard:
    """What came of one request: its tokens with their times, and how it ended.

    `recovering_at` is when its client was told of a recovery, each time.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    at_s: list[float] = field(default_factory=list)
    recovering_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    result: GenerationResult | None = None
    error: BaseException | None = None

    def longest_gap(self, since: float) -> float:
        """The longest time (s) without a token that ended after `since`."""
        times = self.at_s if self.error is None else [*self.at_s, self.ended_at]
        return max((b - a for a, b in pairwise(times) if b > since), default=0)

    def difference(self, other: Heard) -> str:
        """Where this differs from what the same request says undisturbed, "" if nowhere.

        Of a request that failed, what came before that is compared.
        """
        n = len(self.tokens) if self.error is not None else None
        for place, (mine, its) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != its:
                return f"token {place} is {mine}, undisturbed {its}"
        if n is None and len(self.tokens) != len(other.tokens):
            return f"{len(self.tokens)} tokens, undisturbed {len(other.tokens)}"
        if not other.text.startswith(self.text) or (n is None and self.text != other.text):
            return f"the text ends {self.text[-40:]!r}, undisturbed {other.text[-40:]!r}"
        if n is None and self.result is not None and other.result is not None:
            mine_r, its_r = self.result, other.result
            for what in ("token_ids", "text", "finish_reason", "logprobs", "seed"):
                if getattr(mine_r, what) != getattr(its_r, what):
                    return f"the result's {what} differs"
        return ""


def make_prompts(n: int, n_tokens: int, *, longest: int, has_schemas: bool = False) -> list[Prompt]:
    """Prompts of SHORTEST to `longest` tokens, every third the longest, the others drawn by the
    logarithm. Every other one is sampled, some with penalties or logprobs. With `has_schemas` every
    fourth answer is JSON of SCHEMA.
    """
    chance = random.Random(18)
    prompts = []
    for number in range(n):
        power = chance.random() if number % 3 else 1.0
        n_chosen = round(SHORTEST * (longest / SHORTEST) ** power)
        content = chance.choices(TOKEN_IDS, k=n_chosen)
        sampled = number % 2 == 1
        sampling = SamplingParams(
            temperature=0.8 if sampled else 0.0,
            top_k=40 if sampled else 0,
            top_p=0.95 if sampled else 1.0,
            repetition_penalty=1.1 if number % 4 == 3 else 1.0,
            seed=number,
            n_logprobs=2 if number % 8 == 5 else None,
        )
        options: GenerationOptions = {
            "max_tokens": n_tokens - chance.randrange(n_tokens // 4),
            "ignore_eos": True,
        }
        if has_schemas and number % 4 == 2:
            options |= {"constraint": Constraint.json_schema(SCHEMA), "ignore_eos": False}
        prompts.append(Prompt(content, sampling=sampling, sample_index=number, options=options))
    return prompts


async def listen(
    client: Client,
    prompt: Prompt,
    choice: ModelChoice,
    *,
    key: str = "",
    on_event: Callable[[str, int, bool], None] = lambda state, n_tokens, is_first: None,
    on_loading: Callable[[], None] = lambda: None,
) -> Heard:
    """Ask, and hear all of it; `on_event` takes each event's state and number of tokens.

    It is told which is the first one. With a `key` the answer is copied to a deputy of the head.
    """
    heard, is_first = Heard(), True
    try:
        asked = client.generate([prompt], model=choice, key=key, on_loading=lambda *_: on_loading())
        async for event in asked:
            now = time.monotonic()
            if event.token_ids:
                heard.tokens += event.token_ids
                heard.at_s.append(now)
            heard.text += event.text
            if event.state.value == "recovering":
                heard.recovering_at.append(now)
            heard.result = event.result or heard.result
            heard.error = event.error or heard.error
            on_event(event.state.value, len(event.token_ids), is_first)
            is_first = False
    except ShardnetError as error:
        heard.error = error
    heard.ended_at = time.monotonic()
    return heard


async def listen_to_all(
    client: Client,
    prompts: Sequence[Prompt],
    choice: ModelChoice,
    on_event: Callable[[str, int, bool], None],
    on_loading: Callable[[], None],
    key: str = "",
) -> list[Heard]:
    """Ask for all at once."""
    asked = (
        listen(
            client,
            prompt,
            choice,
            key=key and f"{key}-{number}",
            on_event=on_event,
            on_loading=on_loading,
        )
        for number, prompt in enumerate(prompts)
    )
    return await asyncio.gather(*asked)
