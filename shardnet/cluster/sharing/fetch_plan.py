"""Choose which part of a model's weights to request from which source next.

Pure: takes the wanted parts and the outcome of each request. Knows nothing of links, files or time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shardnet.checkpoint.replica import TensorPart


class FetchPlan:
    """The wanted parts, and the `sources` that may send them.

    At any time every part is waiting, requested from one source, or settled.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        self.sources = set(sources)
        """Sources that have not been dropped."""
        self._waiting: dict[str, deque[TensorPart]] = {}
        self._asked: dict[TensorPart, str] = {}
        self._begun: set[TensorPart] = set()
        self._barred: dict[TensorPart, set[str]] = {}
        self._is_closed = False

    def want(self, part: TensorPart) -> None:
        """Add a part to fetch."""
        self._waiting.setdefault(part.tensor, deque()).append(part)

    def close(self) -> None:
        """Mark the list of parts as complete."""
        self._is_closed = True

    @property
    def finished(self) -> bool:
        """Whether the list is complete and every part settled."""
        return self._is_closed and not self._waiting and not self._asked

    @property
    def has_waiting(self) -> bool:
        """Whether a part waits for a source."""
        return bool(self._waiting)

    def take(self, source: str, n_asked: int) -> TensorPart | None:
        """Return a part to request from `source` now, None if there is none.

        `n_asked` is the number of its pending requests. A source without any takes over a part that
        another source has not begun to send.
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
        """Mark that a source begins to send a part; False if it is not requested there now."""
        if self._asked.get(part) != source:
            return False
        self._begun.add(part)
        return True

    def settled(self, part: TensorPart) -> None:
        """Mark that a part was received and verified."""
        self._forget(part)

    def bar(self, part: TensorPart) -> None:
        """Queue a part again, for any source but the one it was requested from."""
        self._barred.setdefault(part, set()).add(self._forget(part))
        self.want(part)

    def lost(self, source: str) -> None:
        """Queue all parts requested from a source again, for any source."""
        back = [part for part, asked in self._asked.items() if asked == source]
        for part in back:
            self._forget(part)
            self.want(part)

    def drop_source(self, source: str) -> None:
        """Request nothing more from a source, and queue its parts again."""
        self.lost(source)
        self.sources.discard(source)

    def unobtainable(self) -> TensorPart | None:
        """Return a waiting part without any source left, None if there is none."""
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
