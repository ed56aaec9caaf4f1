"""Choose which nodes a model can be fetched from.

Pure: decides by the reports of the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardnet.errors import PlanError
from shardnet.types import LayerRange, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSource:
    """The model that a node has at a path or under an id: `model_id` "" for none.

    `is_complete`: a whole checkpoint folder, not a replica with some parts, which has all of
    `layers`.
    """

    node: NodeId
    name: str
    address: str
    model_id: str
    is_complete: bool
    layers: tuple[LayerRange, ...] = ()

    def lacking_bytes(self, model_id: str, layer_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return how much of each layer the node lacks; () for nothing."""
        if self.model_id == model_id and self.is_complete:
            return ()
        held = set[int]()
        if self.model_id == model_id:
            held.update(*self.layers)
        return tuple(0 if layer in held else size for layer, size in enumerate(layer_bytes))


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
