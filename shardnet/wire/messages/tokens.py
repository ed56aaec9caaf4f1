"""Control messages about texts alone: to ids and back, and to vectors, without generating anything.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of
tokenizers and encoders.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from shardnet.types import U32, Positions, Tagged
from shardnet.wire.framing.schema import PathText, RequestId, Text, TokenIds
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

MAX_DETOKENIZED: Final = 1 << 17
"""Most ids of one request: the answer fits into a frame."""


MAX_TOKENIZED: Final = 1 << 19
"""Most ids of one text, which may be longer than the context."""

MAX_ENCODED: Final = 32
"""Most texts of one request."""
MAX_ENCODED_WIDTH: Final = 1 << 14
"""Most numbers of one vector."""
_MAX_BYTES: Final = 4 * MAX_ENCODED * MAX_ENCODED_WIDTH


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


class Encode(Tagged, frozen=True, kw_only=True):
    """Ask an encoder for the vectors of texts, or with a `query` how well each answers that.

    Without texts it is only described. `pooling` "" is the model's own. Texts that are too long are
    refused unless they are to `truncate`. `first` is the number of the first one, for errors.
    Answered by Encoded, after NodeProgress while the model is downloaded, or by Redirect.
    """

    request: RequestId
    model: PathText
    texts: Annotated[list[Text | TokenIds], Meta(max_length=MAX_ENCODED)] = []
    query: Text | None = None
    pooling: Literal["", "mean", "cls", "last"] = ""
    special_tokens: bool = True
    truncate: bool = False
    first: U32 = 0


class Encoded(Tagged, frozen=True, kw_only=True):
    """Answers Encode: what the model is, "" for no encoder, and how many tokens each text had.

    `values` are float32, little-endian, `width` for each text: a vector, which is not scaled, or a
    score. `normalized` says whether the model's vectors should have length 1, null where its files
    do not. `context` is the most tokens of one text.
    """

    request: RequestId
    kind: Literal["", "embedding", "reranker"]
    context: Positions = 0
    normalized: bool | None = None
    n_tokens: Annotated[list[U32], Meta(max_length=MAX_ENCODED)] = []
    width: Annotated[int, Meta(ge=0, le=MAX_ENCODED_WIDTH)] = 0
    values: Annotated[bytes, Meta(max_length=_MAX_BYTES)] = b""
