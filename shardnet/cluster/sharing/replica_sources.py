"""Who has a model, and from whom it can be fetched.

Pure: judges what nodes said of themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardnet.errors import PlanError
from shardnet.types import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What a node has for a path or of a model: `model_id` "" for nothing.

    `is_complete`: a checkpoint folder of its own, not parts that came from other nodes.
    """

    node: NodeId
    name: str
    address: str
    model_id: str
    is_complete: bool


def check_same_model(holders: Sequence[Holder]) -> None:
    """Make sure that whoever has a checkpoint folder has the same model.

    Raises PlanError that names two nodes and what they have.
    """
    complete = [holder for holder in holders if holder.is_complete]
    for holder in complete:
        first = complete[0]
        if holder.model_id != first.model_id:
            raise PlanError(
                f"the nodes hold different models: {first.name} has {first.model_id[:12]}, "
                f"{holder.name} has {holder.model_id[:12]}; copy one checkpoint to both"
            )


def agreed(holders: Sequence[Holder]) -> list[Holder]:
    """Return those who have a model, one and the same; a checkpoint folder counts before parts.

    Raises PlanError when they have different ones.
    """
    check_same_model(holders)
    complete = [holder for holder in holders if holder.is_complete]
    having = complete or [holder for holder in holders if holder.model_id]
    for holder in having:
        if holder.model_id != having[0].model_id:
            raise PlanError(
                f"{having[0].name} and {holder.name} have parts of different models "
                f"({having[0].model_id[:12]}, {holder.model_id[:12]}) and nobody has a whole "
                "checkpoint: start a node that does"
            )
    return having


def choose_sources(model_id: str, holders: Sequence[Holder], limit: int) -> list[str]:
    """Return where to fetch a model from, whoever has all of it first; at most `limit` addresses.

    Every stage gets this order, so that the first settles the digests for all of them.
    """
    having = [holder for holder in holders if holder.model_id == model_id and holder.address]
    having.sort(key=lambda holder: not holder.is_complete)
    return list(dict.fromkeys(holder.address for holder in having))[:limit]
