"""Log-probabilities of a request as a table: `generate --logprobs K` without --json.

Knows columns and how a token is written on one line. Must not know events.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from shardnet.api.events import GenerationResult, TokenLogprob

_NAME_WIDTH = 20
"""Columns of a token; a longer one moves the rest of its line."""


def logprob_lines(result: GenerationResult) -> Iterator[str]:
    """Yield the lines of a table for the prompt's tokens, and one for the generated tokens.

    Yields nothing for what was not asked for.
    """
    if result.prompt_logprobs is not None:
        first = result.prompt_token_ids[:1]
        yield from _table("prompt", [entry for entry in result.prompt_logprobs if entry])
        if first:
            yield f"(no log-probability: token {first[0]}, with which the prompt begins)"
    if result.logprobs is not None:
        yield from _table("token", result.logprobs)


def _table(title: str, entries: Sequence[TokenLogprob]) -> Iterator[str]:
    likeliest = "  likeliest there" if any(entry.top for entry in entries) else ""
    yield f"{title:{_NAME_WIDTH}}  logprob   share{likeliest}"
    for entry in entries:
        others = ", ".join(
            f"{token_words(top.token_id, top.token)} {top.logprob:.3f}" for top in entry.top
        )
        name = token_words(entry.token_id, entry.token)
        share = f"{100 * math.exp(entry.logprob):.3g} %"
        yield f"{name:{_NAME_WIDTH}} {entry.logprob:8.3f} {share:>7}  {others}".rstrip()


def token_words(token_id: int, token: str) -> str:
    """Write a token in quotes, on one line; by its id where the model has no tokenizer."""
    return json.dumps(token, ensure_ascii=False) if token else str(token_id)
