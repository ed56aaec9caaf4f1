"""Requests with a key, and what their client has got of them so far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from shardnet.api.client import Client
from shardnet.api.events import RequestState
from shardnet.model.kernels import library
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, n_logprobs=2)
N_TOKENS = 120
SOME = 8


@dataclass
class Said:
    """What a client has got of its requests; `some` is set when each has SOME tokens."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    states: list[RequestState] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, prompts: Sequence[object]) -> Said:
        """Nothing so far, of so many requests."""
        return cls([[] for _ in prompts], [[] for _ in prompts])


async def say(
    client: Client,
    prompts: list[list[int]],
    choice: ModelChoice,
    key: str = "",
    *,
    resume: bool = False,
    said: Said | None = None,
) -> Said:
    """Generate from all prompts at once."""
    said = said or Said.of(prompts)
    events = client.generate(
        prompts,
        SAMPLED,
        model=choice,
        max_tokens=N_TOKENS,
        ignore_eos=True,
        key=key,
        resume=resume,
        # Without the library rows that are computed again have other bits unless this is asked.
        deterministic=library.native_kernels() is None,
    )
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                raise event.error
            said.tokens[event.index] += event.token_ids
            said.logprobs[event.index] += [one.logprob for one in event.logprobs or ()]
            said.states.append(event.state)
            if min(len(tokens) for tokens in said.tokens) >= SOME:
                said.some.set()
    return said
