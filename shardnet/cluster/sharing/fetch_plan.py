"""Choose which source to ask for which part of a model's weights next.

Pure: is told what is wanted and what became of each request. Knows nothing of links, files or time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shardnet.checkpoint.replica import TensorPart


class FetchPlan:
    """Parts that are wanted, and the `sources` that may give them.

    Every part is at any time waiting, asked from one source, or settled.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self.sources = set(sources)
        """Those that have not been given up."""
        self._waiting: dict[str, deque[TensorPart]] = {}
        self._asked: dict[TensorPart, str] = {}
        self._begun: set[TensorPart] = set()
        self._barred: dict[TensorPart, set[str]] = {}
        self._is_closed = False

    def want(self, part: TensorPart) -> None:
        """Add a part."""
        self._waiting.setdefault(part.tensor, deque()).append(part)

    def close(self) -> None:
        """Mark that no part will be added any more."""
        self._is_closed = True

    @property
    def finished(self) -> bool:
        """Whether every part is settled and none will be added."""
        return self._is_closed and not self._waiting and not self._asked

    @property
    def has_waiting(self) -> bool:
        """Whether a part waits for a source."""
        return bool(self._waiting)

    def take(self, source: str, n_asked: int) -> TensorPart | None:
        """Return a part to ask `source` for now, None when there is none for it.

        A source of which nothing is asked takes over what another one has not begun to send.
        """
        for tensor, parts in self._waiting.items():
            for _ in range(len(parts)):
                part = parts.popleft()
                if self._may_give(source, part):
                    if not parts:
                        del self._waiting[tensor]
                    self._asked[part] = source
                    return part
                parts.append(part)
        if n_asked:
            return None
        for part in self._asked:
            if part not in self._begun and self._may_give(source, part):
                self._asked[part] = source
                return part
        return None

    def begin(self, part: TensorPart, source: str) -> bool:
        """Mark that a source begins to send a part. False if the part is not asked of it now."""
        if self._asked.get(part) != source:
            return False
        self._begun.add(part)
        return True

    def settled(self, part: TensorPart) -> None:
        """Mark that a part was received and verified."""
        self._forget(part)

    def bar(self, part: TensorPart) -> None:
        """Queue a part again, for any source but the one that was asked for it."""
        self._barred.setdefault(part, set()).add(self._forget(part))
        self.want(part)

    def lost(self, source: str) -> None:
        """Queue everything that a source was asked for again, for any source."""
        back = [part for part, asked in self._asked.items() if asked == source]
        for part in back:
            self._forget(part)
            self.want(part)

    def leave(self, source: str) -> None:
        """Give a source up."""
        self.lost(source)
        self.sources.discard(source)

    def unobtainable(self) -> TensorPart | None:
        """Return a waiting part that no source is left for, None when there is none."""
        for parts in self._waiting.values():
            for part in parts:
                if self.sources <= self._barred.get(part, set()):
                    return part
        return None

    def _may_give(self, source: str, part: TensorPart) -> bool:
        return source not in self._barred.get(part, ())

    def _forget(self, part: TensorPart) -> str:
        self._begun.discard(part)
        return self._asked.pop(part)
