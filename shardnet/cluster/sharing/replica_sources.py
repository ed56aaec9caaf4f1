"""Choose which nodes a model can be fetched from, and which part to request from which next.

Pure: decides by the reports of the nodes, the wanted parts and the outcome of each request. Knows
nothing of links, files or time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from shardnet.checkpoint.replica import TensorPart
from shardnet.errors import PlanError
from shardnet.types import LayerRange, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSource:
    """The model that a node has at a path or under an id: `model_id` "" for none.

    `is_complete`: a whole checkpoint folder, not a replica with some parts, which has all of
    `layers`, and all but their tables of `but_tables`. `room_bytes` of others fit its disk, None
    where that is not known.
    """

    node: NodeId
    name: str
    address: str
    model_id: str
    is_complete: bool
    layers: tuple[LayerRange, ...] = ()
    but_tables: tuple[LayerRange, ...] = ()
    room_bytes: int | None = None

    def lacking_bytes(
        self, model_id: str, layer_bytes: Sequence[int], table_bytes: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return how much of each layer the node lacks, of its tables too; () for nothing."""
        if self.model_id == model_id and self.is_complete:
            return ()
        held, but_tables = set[int](), set[int]()
        if self.model_id == model_id:
            held.update(*self.layers)
            but_tables.update(*self.but_tables)
        sizes = enumerate(zip_longest(layer_bytes, table_bytes, fillvalue=0))
        return tuple(
            0 if layer in held else table if layer in but_tables else size
            for layer, (size, table) in sizes
        )


def check_same_model(sources: Sequence[ReplicaSource]) -> None:
    """Check that all nodes with a checkpoint folder have the same model.

    Raises PlanError, which names two nodes that differ and their models.
    """
    complete = [source for source in sources if source.is_complete]
    for source in complete:
        first = complete[0]
        if source.model_id != first.model_id:
            raise PlanError(
                f"the nodes hold different models: {first.name} has {first.model_id[:12]}, "
                f"{source.name} has {source.model_id[:12]}",
                remedy="copy one checkpoint to both",
            )


def agreed(sources: Sequence[ReplicaSource]) -> list[ReplicaSource]:
    """Return the nodes with a checkpoint folder of the model, else those with replicas.

    Raises PlanError if their models differ.
    """
    check_same_model(sources)
    complete = [source for source in sources if source.is_complete]
    having = complete or [source for source in sources if source.model_id]
    for source in having:
        if source.model_id != having[0].model_id:
            raise PlanError(
                f"{having[0].name} and {source.name} have parts of different models "
                f"({having[0].model_id[:12]}, {source.model_id[:12]}) and no node has a whole "
                "checkpoint",
                remedy="start a node that has one",
            )
    return having


def choose_sources(model_id: str, sources: Sequence[ReplicaSource], limit: int) -> list[str]:
    """Return at most `limit` addresses to fetch a model from, nodes with the whole model first.

    Every stage gets this order, so that all take the digests from the same source.
    """
    having = [source for source in sources if source.model_id == model_id and source.address]
    having.sort(key=lambda source: not source.is_complete)
    return list(dict.fromkeys(source.address for source in having))[:limit]


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
