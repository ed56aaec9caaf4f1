"""Control messages about tokens alone: text to ids and back, without generating anything.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of
tokenizers.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from shardnet.wire.framing.schema import U32, Positions, RequestId, Tagged, Text, TokenIds
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

MAX_DETOKENIZED: Final = 1 << 17
"""Most ids of one request: the answer fits into a frame."""


MAX_TOKENIZED: Final = 1 << 19
"""Most ids of one text, which may be longer than the context."""


class Tokenize(Tagged, frozen=True, kw_only=True):
    """Ask for the token ids of the prompt of `generate`, which is not generated.

    Answered by Tokenized or Redirect; the ring is built if needed, as for Generate.
    """

    request: RequestId
    generate: Generate


class Tokenized(Tagged, frozen=True, kw_only=True):
    """Answers Tokenize. `context` is the most tokens of one sequence; there may be more ids."""

    request: RequestId
    token_ids: TokenIds
    context: Positions


class Detokenize(Tagged, frozen=True, kw_only=True):
    """Ask for the text of token ids. Answered by Detokenized or Redirect."""

    request: RequestId
    choice: ModelChoice
    token_ids: Annotated[list[U32], Meta(max_length=MAX_DETOKENIZED)]
    keep_special_tokens: bool = False


class Detokenized(Tagged, frozen=True, kw_only=True):
    """Answers Detokenize: the whole text, and the text of each token by itself."""

    request: RequestId
    text: Text
    tokens: Annotated[list[Text], Meta(max_length=MAX_DETOKENIZED)]
