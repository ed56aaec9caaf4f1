"""The parser of a model without a chat format: all of its output is content."""

from __future__ import annotations

from collections.abc import Sequence

from shardnet.api.chat_formats.deltas import ContentDelta, OutputDelta


class PlainText:
    """An OutputParser that finds neither reasoning nor calls."""

    def feed(self, token_ids: Sequence[int], text: str) -> list[OutputDelta]:
        """Return the text as content."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[OutputDelta]:
        """Return nothing: nothing is held back."""
        return []
