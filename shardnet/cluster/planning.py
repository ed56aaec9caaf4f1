"""From what a client asks for to a plan: which nodes there are, what the model is, who gets what.

Knows how to gather what the pure planner (placement.py) needs, and how to settle the wire dtype.
Must not load anything or start a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardnet.cluster.placement import place, place_exactly
from shardnet.cluster.placement_figures import (
    Candidate,
    Links,
    ModelShape,
    Objective,
    Placement,
    StageSpeed,
)
from shardnet.errors import PlanError, UsageError
from shardnet.model.config import ModelConfig
from shardnet.model.footprint import (
    activation_peak_bytes,
    embedding_weight_bytes,
    head_weight_bytes,
    kv_block_bytes,
    layer_weight_bytes,
)
from shardnet.runtime.loading import ModelFacts
from shardnet.types import BLOCK_POSITIONS, PREFILL_CHUNK_ROWS, DType, LayerRange, NodeId
from shardnet.wire.control import LeftOut, ModelChoice, NodeInfo, PlannedStage, PlanReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured for one model shape: nodes by their id, links by (sender, receiver)."""

    speeds: Mapping[NodeId, StageSpeed] = field(default_factory=dict)
    links: Links = field(default_factory=dict)


NOTHING_MEASURED = Measured()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan with everything a ring needs to be built from it."""

    choice: ModelChoice
    facts: ModelFacts
    dtype: DType
    context: int
    nodes: tuple[NodeInfo, ...]
    placement: Placement
    left_out_names: dict[NodeId, str]

    def reply(self, request: int) -> PlanReply:
        """Tell the plan."""
        return PlanReply(
            request=request,
            model=self.choice.model,
            model_id=self.facts.model_id,
            dtype=self.dtype.value,
            context=self.context,
            stages=[
                PlannedStage(
                    rank=rank,
                    node=node.node,
                    name=node.name,
                    address=node.address,
                    layers=(stage.layers.start, stage.layers.end),
                    weight_bytes=stage.weight_bytes,
                    kv_bytes=stage.kv_bytes,
                    compute_ms=None if stage.compute_s is None else stage.compute_s * 1e3,
                )
                for rank, (node, stage) in enumerate(
                    zip(self.nodes, self.placement.stages, strict=True)
                )
            ],
            left_out=[
                LeftOut(node=out.node, name=self.left_out_names[out.node], why=out.why)
                for out in self.placement.left_out
            ],
            predicted_tok_s=self.placement.predicted_tok_s,
            why=self.placement.why,
        )


def make_plan(
    choice: ModelChoice,
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    measured: Measured = NOTHING_MEASURED,
    objective: Objective = Objective.LATENCY,
) -> Plan:
    """Plan `choice` over `nodes`: exactly these if the choice names nodes, else the best of them.

    The first node is the one that was asked. Nodes and links that were not measured are planned
    with as placement.py says.

    Raises PlanError when it does not fit, UsageError for a context the model does not have.
    """
    context = _context(choice, facts.config)
    dtype = settle_dtype(choice.dtype, facts.config, nodes)
    shape = model_shape(facts.config, dtype, context)
    candidates = [
        Candidate(
            node=NodeId(n.node),
            name=n.name,
            memory_bytes=n.memory_bytes,
            speed=measured.speeds.get(NodeId(n.node)),
        )
        for n in nodes
    ]
    layers = [LayerRange(start, end) for start, end in choice.layers] or None
    if choice.nodes:
        placement = place_exactly(shape, candidates, layers, measured.links, objective)
    elif layers is not None:
        if len(layers) > len(candidates):
            raise PlanError(
                f"--layers names {len(layers)} stages and {len(candidates)} nodes are known: "
                "name the nodes with --nodes, or give fewer ranges"
            )
        stages = candidates[: len(layers)]
        placement = place_exactly(shape, stages, layers, measured.links, objective)
    else:
        placement = place(shape, candidates, measured.links, objective)
    by_node = {node.node: node for node in nodes}
    return Plan(
        choice=choice,
        facts=facts,
        dtype=dtype,
        context=context,
        nodes=tuple(by_node[stage.node] for stage in placement.stages),
        placement=placement,
        left_out_names={NodeId(node.node): node.name for node in nodes},
    )


def settle_dtype(requested: str, config: ModelConfig, nodes: Sequence[NodeInfo]) -> DType:
    """Settle the ring's dtype: what was asked for, else the first that every node computes well.

    The checkpoint's own dtype comes first, then bfloat16 for half-precision checkpoints, then
    float32. Raises UsageError for an unknown name.
    """
    if requested != "auto":
        try:
            return DType(requested)
        except ValueError:
            raise UsageError(
                f"--dtype {requested}: choose auto, bfloat16, float16 or float32"
            ) from None
    own = config.checkpoint_dtype or DType.FLOAT32
    wanted = [own] if own is DType.FLOAT32 else [own, DType.BFLOAT16]
    for dtype in wanted:
        if all(dtype.value in node.dtypes for node in nodes):
            return dtype
    return DType.FLOAT32


def model_shape(config: ModelConfig, dtype: DType, context: int) -> ModelShape:
    """Say what the model weighs in `dtype` with one sequence of `context` positions."""
    one_layer = LayerRange(config.n_layers - 1, config.n_layers)

    def activation_bytes(positions: int) -> int:
        return activation_peak_bytes(config, one_layer, PREFILL_CHUNK_ROWS, dtype, positions)

    # The peak bends upwards: a smaller context takes no more than the chord from one block says.
    n_more = max(0, context - BLOCK_POSITIONS)
    more_bytes = activation_bytes(context) - activation_bytes(context - n_more)
    return ModelShape(
        n_layers=config.n_layers,
        layer_bytes=layer_weight_bytes(config, dtype),
        embedding_bytes=embedding_weight_bytes(config, dtype),
        head_bytes=head_weight_bytes(config, dtype),
        hop_bytes=config.hidden_size * dtype.size_bytes,
        context=context,
        kv_block_bytes=kv_block_bytes(config, one_layer, dtype),
        activation_bytes=activation_bytes(context),
        activation_position_bytes=more_bytes // max(1, n_more),
    )


def _context(choice: ModelChoice, config: ModelConfig) -> int:
    if choice.context > config.max_positions:
        raise UsageError(
            f"--context {choice.context}: the model has {config.max_positions} positions at most"
        )
    return choice.context or config.default_context
