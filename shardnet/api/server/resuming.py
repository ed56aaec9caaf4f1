"""The rest of a stream of which a client has the beginning.

Knows how events end. Must not know what they hold.
"""

from __future__ import annotations

from typing import Final

from shardnet.api.server.errors import Fault, HttpError

MOST_RECEIVED: Final = 1 << 32


def n_received(value: bytes) -> int:
    """Read how many events a client has. Raises HttpError 400 for what is no number."""
    text = value.decode("latin-1").strip()
    if not (text.isascii() and text.isdigit()) or int(text[:12]) > MOST_RECEIVED:
        raise HttpError(
            Fault(
                status=400,
                kind="invalid_request_error",
                message=(
                    "x-shardnet-resume says how many events of the stream were received, 0 for "
                    f"none: expected a number, got {text[:40]!r}"
                ),
            )
        )
    return int(text)


class Rest:
    """Leaves out the first `n` events of a stream."""

    def __init__(self, n: int, media_type: str) -> None:
        self._n_left = n
        self._end = b"\n\n" if media_type.startswith("text/event-stream") else b"\n"

    def of(self, chunk: bytes) -> bytes:
        """Return what is left of the next chunk, which holds whole events."""
        while self._n_left and chunk:
            _, _, chunk = chunk.partition(self._end)
            self._n_left -= 1
        return chunk
