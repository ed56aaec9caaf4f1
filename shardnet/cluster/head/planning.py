"""From what a client asks for to a plan: which nodes there are, what the model is, who gets what.

Knows how to gather what the pure planner (placement.py) needs, and how to settle the wire dtype.
Must not load anything or start a ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardnet.cluster.measuring.measurement import NOTHING_MEASURED, Measured
from shardnet.cluster.placement.figures import (
    Candidate,
    Lighter,
    Links,
    ModelShape,
    Objective,
    Placement,
    Streaming,
)
from shardnet.cluster.placement.placement import place, place_exactly, place_streaming
from shardnet.cluster.placement.words import LISTED
from shardnet.errors import PlanError, UsageError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.quantization import Quantization
from shardnet.runtime.stage.loading import ModelFacts
from shardnet.stage.estimate.memory_estimate import (
    KEEPS_BFLOAT16,
    WeightForm,
    activation_peak_bytes,
    embedding_weight_bytes,
    graph_bytes,
    head_weight_bytes,
    kv_block_bytes,
    layer_read_bytes,
    layer_scratch_bytes,
    layer_stream_bytes,
    layers_weight_bytes,
    waiting_bytes,
)
from shardnet.stage.estimate.stored_dtype import check_in_place
from shardnet.types import (
    BLOCK_POSITIONS,
    PREFILL_CHUNK_ROWS,
    DType,
    KvDType,
    LayerRange,
    NodeId,
    WireDType,
)
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.metas import explanation
from shardnet.wire.messages.narrow import NarrowWire
from shardnet.wire.messages.plans import LeftOut, ModelChoice, PlannedStage, PlanReply

NARROW_WIRES = ("bfloat16", "float16", "int8")
"""What may be asked for with --wire-dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What of a model is rounded: the weights of its products, its keys and values."""

    weights: Quantization | None = None
    kv_dtype: KvDType = KvDType.AUTO

    def more(self) -> Iterator[tuple[tuple[str, ...], Rounding]]:
        """Every way to round what is not, with its flags: those of one flag, then those of two."""
        kinds = [] if self.weights else list(Quantization)
        weights = [((f"--quant {kind.value}",), replace(self, weights=kind)) for kind in kinds]
        yield from weights
        if self.kv_dtype is KvDType.AUTO:
            flag, rounded = f"--kv-dtype {KvDType.INT8.value}", replace(self, kv_dtype=KvDType.INT8)
            yield (flag,), rounded
            for flags, one in weights:
                yield (*flags, flag), replace(one, kv_dtype=KvDType.INT8)


NOT_ROUNDED = Rounding()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan with everything a ring needs to be built from it.

    `wire_saved_s` is what the wire dtype saves one token on all links together, against the ring's
    own: None where a link was not measured. `chunk_s` is what a whole prompt chunk is predicted to
    take in all stages together, without the links: None where a stage was not measured.
    """

    choice: ModelChoice
    facts: ModelFacts
    dtype: DType
    wire_dtype: WireDType
    wire_saved_s: float | None
    context: int
    nodes: tuple[NodeInfo, ...]
    placement: Placement
    left_out_names: dict[NodeId, str]
    measured: Measured = NOTHING_MEASURED
    objective: Objective = Objective.LATENCY
    chunk_s: float | None = None
    silent: tuple[LeftOut, ...] = ()

    @property
    def why(self) -> str:
        """Why the plan is as it is, and which nodes could not be asked."""
        words = self.placement.why
        return f"{words}; {_silent_words(self.silent)}" if self.silent else words

    @property
    def borders(self) -> tuple[int, ...]:
        """The layers before which activations cross a wire."""
        return tuple(stage.layers.start for stage in self.placement.stages[1:])

    def reply(self, request: int, wire: NarrowWire | None = None) -> PlanReply:
        """Tell the plan, and what is known of the `wire` that was asked for."""
        return PlanReply(
            request=request,
            model=self.choice.model,
            model_id=self.facts.model_id,
            dtype=self.dtype.value,
            wire_dtype=self.wire_dtype.value,
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
                    compute_ms=_ms(stage.compute_s),
                    hop_ms=_ms(stage.hop_s),
                    streamed_layers=stage.n_streamed,
                )
                for rank, (node, stage) in enumerate(
                    zip(self.nodes, self.placement.stages, strict=True)
                )
            ],
            left_out=[
                LeftOut(node=out.node, name=self.left_out_names[out.node], why=out.why)
                for out in self.placement.left_out
            ]
            + list(self.silent),
            predicted_tok_s=self.placement.predicted_tok_s,
            why=explanation(self.why),
            optimise=self.objective.value,
            nodes=list(self.measured.told),
            links=self.measured.ways,
            wire=wire,
            quant=self.choice.quant,
            kv_dtype=self.choice.kv_dtype,
        )


def make_plan(
    choice: ModelChoice,
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    measured: Measured = NOTHING_MEASURED,
    silent: Sequence[LeftOut] = (),
) -> Plan:
    """Plan `choice` over `nodes`: exactly these if the choice names nodes, else the best of them.

    The first node is the one that was asked. Nodes and links that were not measured are planned
    with as placement.py says. The `silent` nodes would be candidates if they had answered: the
    plan, or why there is none, names them.

    Raises PlanError when it does not fit, UsageError for a context the model does not have and for
    a dtype that is none.
    """
    objective = Objective(choice.optimise) if choice.optimise else Objective.LATENCY
    context = _context(choice, facts.config)
    dtype = settle_dtype(choice.dtype, facts.config, nodes)
    wire_dtype = settle_wire_dtype(choice.wire_dtype, dtype)
    rounding = Rounding(weights=Quantization.named(choice.quant), kv_dtype=KvDType(choice.kv_dtype))
    stored = _stored_dtype(facts, dtype, nodes, measured)
    shape = model_shape(facts.config, dtype, context, wire_dtype, rounding, stored)
    if rounding.weights is None and facts.dtype_in_place is not stored:
        shape = replace(shape, streaming=None)
    disks = {told.node: told.disk_bytes_per_s for told in measured.told}
    graphs_bytes = {"cuda": graph_bytes(facts.config, dtype, rounding.weights)}
    candidates = [
        Candidate(
            node=NodeId(n.node),
            name=n.name,
            memory_bytes=max(0, n.memory_bytes - graphs_bytes.get(n.device, 0)),
            speed=measured.speeds.get(NodeId(n.node)),
            disk_bytes_per_s=disks.get(n.node),
        )
        for n in nodes
    ]
    try:
        placement = _placed(choice, facts, shape, stored, candidates, measured.links, objective)
    except PlanError as error:
        if silent:
            raise PlanError(f"{error}; {_silent_words(silent)}") from None
        raise
    by_node = {node.node: node for node in nodes}
    saved_bytes = WireDType.own(dtype).row_bytes(facts.config.hidden_size) - shape.hop_bytes
    return Plan(
        choice=choice,
        facts=facts,
        dtype=dtype,
        wire_dtype=wire_dtype,
        wire_saved_s=_sending_s(placement, measured.links, saved_bytes),
        context=context,
        nodes=tuple(by_node[stage.node] for stage in placement.stages),
        placement=placement,
        left_out_names={NodeId(node.node): node.name for node in nodes},
        measured=measured,
        objective=objective,
        chunk_s=_chunk_s(placement, shape, measured, disks),
        silent=tuple(silent),
    )


def _silent_words(silent: Sequence[LeftOut]) -> str:
    told = [out.name for out in silent[:LISTED]]
    if len(silent) > LISTED:
        told.append(f"and {len(silent) - LISTED} more nodes")
    return f"left out since they did not say how they are: {', '.join(told)}"


def _placed(
    choice: ModelChoice,
    facts: ModelFacts,
    shape: ModelShape,
    stored: DType,
    candidates: Sequence[Candidate],
    links: Links,
    objective: Objective,
) -> Placement:
    """Place the model with as little streaming as `choice` allows. Raises as make_plan."""
    layers = [LayerRange(start, end) for start, end in choice.layers] or None
    exactly = bool(choice.nodes or layers)
    if layers is not None and not choice.nodes:
        if len(layers) > len(candidates):
            raise PlanError(_too_few_nodes(len(layers), candidates))
        candidates = candidates[: len(layers)]

    def resident() -> Placement:
        if exactly:
            return place_exactly(shape, candidates, layers, links, objective)
        return place(shape, candidates, links, objective)

    def streaming(n_streamed: int | None) -> Placement | None:
        if shape.streaming is None:
            check_in_place(facts.path, facts.dtype_in_place, stored)
        return place_streaming(
            shape, candidates, layers, links, objective, exactly=exactly, n_streamed=n_streamed
        )

    if not choice.stream_layers:
        return resident()
    if choice.stream_layers != "auto" and choice.stream_layers > shape.n_layers:
        raise UsageError(
            f"--stream-layers {choice.stream_layers}: the model has {shape.n_layers} layers; "
            f"give {shape.n_layers} or fewer, or auto for as few as must be"
        )
    if choice.stream_layers == "auto":
        try:
            return resident()
        except PlanError:
            placement = streaming(None)
            if placement is None:
                raise
            return placement
    placement = streaming(choice.stream_layers)
    if placement is None:
        raise PlanError(
            f"--stream-layers {choice.stream_layers}: the other layers do not fit these nodes; "
            "use --stream-layers auto"
        )
    return placement


def _too_few_nodes(n_ranges: int, candidates: Sequence[Candidate]) -> str:
    known = "only one node is known"
    if len(candidates) > 1:
        names = ", ".join(candidate.name for candidate in candidates[:LISTED])
        known = f"only {len(candidates)} nodes are known ({names})"
    return (
        f"--layers has {n_ranges} ranges, one for each node, and {known}: name "
        f"{n_ranges} nodes with --nodes, start them with --local {n_ranges}, or give fewer ranges"
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


def _stored_dtype(
    facts: ModelFacts, dtype: DType, nodes: Sequence[NodeInfo], measured: Measured
) -> DType:
    """Say what the weights of products stay in: bfloat16 where every node has measured that.

    Else `dtype`, which is never less than a stage takes.
    """
    keeping = {told.node for told in measured.told if told.kernel == KEEPS_BFLOAT16}
    keeps = dtype is DType.FLOAT32 and all(node.node in keeping for node in nodes)
    return DType.BFLOAT16 if keeps and facts.products_dtype is DType.BFLOAT16 else dtype


def settle_wire_dtype(requested: str, dtype: DType) -> WireDType:
    """Settle how activations travel in a ring that computes in `dtype`: "" keeps every bit.

    Raises UsageError for an unknown name, and for float32, which no ring gains anything by.
    """
    if not requested:
        return WireDType.own(dtype)
    if requested not in NARROW_WIRES:
        raise UsageError(f"--wire-dtype {requested}: choose {', '.join(NARROW_WIRES)}")
    return WireDType(requested)


def model_shape(
    config: ModelConfig,
    dtype: DType,
    context: int,
    wire_dtype: WireDType | None = None,
    rounding: Rounding = NOT_ROUNDED,
    stored: DType | None = None,
) -> ModelShape:
    """Say what the model weighs in `dtype` with one sequence of `context` positions.

    `wire_dtype` is how rows travel, None as the model computes. `stored` is what the weights of
    products stay in, None for `dtype`. The shape also says what it would weigh if more of it were
    rounded than `rounding` says.
    """
    form = WeightForm(dtype=dtype, quantization=rounding.weights, linear_dtype=stored)
    weights = _weighed(config, form, context, rounding.kv_dtype)
    return ModelShape(
        n_layers=config.n_layers,
        layer_bytes=weights.layer_bytes,
        spared_bytes=weights.spared_bytes,
        embedding_bytes=embedding_weight_bytes(config, dtype),
        head_bytes=weights.head_bytes,
        hop_bytes=(wire_dtype or WireDType.own(dtype)).row_bytes(config.hidden_size),
        context=context,
        kv_block_bytes=weights.kv_block_bytes,
        activation_bytes=weights.activation_bytes,
        activation_position_bytes=weights.activation_position_bytes,
        layer_read_bytes=layer_read_bytes(config, form),
        streaming=Streaming(
            read_bytes=layer_stream_bytes(config, form),
            working_bytes=layer_scratch_bytes(config, form)
            + waiting_bytes(config, PREFILL_CHUNK_ROWS, dtype, context),
        ),
        lighter=tuple(
            _weighed(
                config, replace(form, quantization=more.weights), context, more.kv_dtype, flags
            )
            for flags, more in rounding.more()
        ),
    )


def _weighed(
    config: ModelConfig,
    form: WeightForm,
    context: int,
    kv_dtype: KvDType,
    flags: tuple[str, ...] = (),
) -> Lighter:
    """Say what rounding, which `flags` ask for, leaves of the parts that it can make smaller."""
    one_layer, dtype = LayerRange(config.n_layers - 1, config.n_layers), form.dtype

    def activation_bytes(positions: int) -> int:
        rows = PREFILL_CHUNK_ROWS
        return activation_peak_bytes(config, one_layer, rows, dtype, positions, kv_dtype)

    # The peak bends upwards: a smaller context takes no more than the chord from one block says.
    n_more = max(0, context - BLOCK_POSITIONS)
    layers = layers_weight_bytes(config, form)
    more_bytes = activation_bytes(context) - activation_bytes(context - n_more)
    return Lighter(
        flags=flags,
        layer_bytes=max(layers),
        spared_bytes=_spared(layers),
        head_bytes=head_weight_bytes(config, form),
        kv_block_bytes=kv_block_bytes(config, one_layer, dtype, kv_dtype),
        activation_bytes=activation_bytes(context),
        activation_position_bytes=more_bytes // max(1, n_more),
    )


def _spared(layers: Sequence[int]) -> tuple[int, ...]:
    """Say how much less than the largest layer each one weighs; () where all are alike."""
    most = max(layers)
    return tuple(most - n_bytes for n_bytes in layers) if min(layers) < most else ()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _context(choice: ModelChoice, config: ModelConfig) -> int:
    if choice.context > config.max_positions:
        raise UsageError(
            f"--context {choice.context}: the model has {config.max_positions} positions at most"
        )
    return choice.context or config.default_context


def _chunk_s(
    placement: Placement,
    shape: ModelShape,
    measured: Measured,
    disks: Mapping[str, float | None],
) -> float | None:
    """Seconds that a chunk computes in all stages and waits for their disks.

    None where a stage, or the disk that it streams from, was not measured.
    """
    total_s = 0.0
    for stage in placement.stages:
        speed, read_bytes = measured.speeds.get(stage.node), shape.read_bytes(stage.n_streamed)
        bytes_per_s = disks.get(stage.node)
        if speed is None or (read_bytes and not bytes_per_s):
            return None
        total_s += len(stage.layers) * speed.layer_256_s + speed.embed_s + speed.head_s
        if bytes_per_s:
            total_s += read_bytes / bytes_per_s
    return total_s


def _sending_s(placement: Placement, links: Links, size_bytes: int) -> float | None:
    """Seconds that so many bytes take over all links that carry activations, one after another.

    None where one of them was not measured.
    """
    total_s = 0.0
    for sender, receiver in pairwise(stage.node for stage in placement.stages):
        link = links.get((sender, receiver)) or links.get((receiver, sender))
        if link is None:
            return None
        total_s += link.send_s(size_bytes)
    return total_s
