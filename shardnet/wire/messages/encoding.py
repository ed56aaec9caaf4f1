"""Control messages about encoders: texts in, vectors or scores out.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of
models.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shardnet.wire.framing.schema import U32, PathText, Positions, RequestId, Tagged, Text, TokenIds

MAX_ENCODED: Final = 32
"""Most texts of one request."""
MAX_ENCODED_WIDTH: Final = 1 << 14
"""Most numbers of one vector."""
_MAX_BYTES: Final = 4 * MAX_ENCODED * MAX_ENCODED_WIDTH


class Encode(Tagged, frozen=True, kw_only=True):
    """Ask an encoder for the vectors of texts, or with a `query` how well each answers that.

    Without texts it is only described. `pooling` "" is the model's own. Texts that are too long are
    refused unless they are to `truncate`. `first` is the number of the first one, for errors.
    Answered by Encoded, after NodeProgress while the model is downloaded, or by Redirect.
    """

    request: RequestId
    model: PathText
    texts: Annotated[list[Text | TokenIds], Meta(max_length=MAX_ENCODED)] = msgspec.field(
        default_factory=list
    )
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
    n_tokens: Annotated[list[U32], Meta(max_length=MAX_ENCODED)] = msgspec.field(
        default_factory=list
    )
    width: Annotated[int, Meta(ge=0, le=MAX_ENCODED_WIDTH)] = 0
    values: Annotated[bytes, Meta(max_length=_MAX_BYTES)] = b""
