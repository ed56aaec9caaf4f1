"""Texts to an encoder, piece by piece, and its vectors or scores back.

Knows how much one message takes. Must not know HTTP, nor what is made of vectors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from msgspec.structs import replace

from shardnet.errors import RemoteProtocolError
from shardnet.wire.messages.tokens import MAX_ENCODED, Encode, Encoded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_LENGTH: Final = 1 << 18
"""Characters, or token ids, of one message, unless one text alone has more."""

GivenText = str | Sequence[int]
Text = TypeVar("Text", bound=GivenText)


class EncoderClient(Protocol):
    """What asks encoders: a client, or what stands before one."""

    async def encode(self, message: Encode) -> Encoded:
        """Return vectors or scores as `shardnet.api.Client.encode` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """What an encoder made of text number `index`: float32 values, and how many tokens it had."""

    index: int
    values: NDArray[np.float32]
    n_tokens: int


async def encode(
    client: EncoderClient, message: Encode, texts: Sequence[GivenText]
) -> AsyncGenerator[EncodedText, None]:
    """Yield what an encoder makes of each text, in their order; the message says which and how.

    Raises the error of the first text that fails.
    """
    index = 0
    for piece in _pieces(texts):
        answer = await client.encode(replace(message, texts=piece, first=index))
        for values, n_tokens in zip(_rows(answer, len(piece)), answer.n_tokens, strict=True):
            yield EncodedText(index=index, values=values, n_tokens=n_tokens)
            index += 1


def _pieces(texts: Sequence[GivenText]) -> Iterator[list[str | list[int]]]:
    piece: list[str | list[int]] = []
    length = 0
    for text in texts:
        if piece and (len(piece) == MAX_ENCODED or length + len(text) > PIECE_LENGTH):
            yield piece
            piece, length = [], 0
        piece.append(text if isinstance(text, str) else list(text))
        length += len(text)
    if piece:
        yield piece


def _rows(answer: Encoded, n_texts: int) -> NDArray[np.float32]:
    """Return the values [texts, width]. Raises RemoteProtocolError for another number of them."""
    import numpy as np

    n_values = n_texts * answer.width
    if not n_values or len(answer.values) != 4 * n_values or len(answer.n_tokens) != n_texts:
        raise RemoteProtocolError(f"an encoder's answer has not the values of {n_texts} texts")
    return np.frombuffer(answer.values, "<f4").astype(np.float32).reshape(n_texts, answer.width)
