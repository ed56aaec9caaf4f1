"""Measure for this node's own plans and for other heads.

Knows which part measures what here, and which node is asked elsewhere. Must not know how a figure
is measured, nor how a plan uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec import structs

from shardnet.cluster.measuring.link_benchmark import LinkBenchmark
from shardnet.cluster.measuring.measurement import (
    Ariths,
    Instruments,
    Measured,
    OnMeasured,
    StageRun,
    gather,
    stage_speed,
)
from shardnet.cluster.measuring.node_benchmark import NodeBenchmark
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.peers.sleepers import MAX_FIGURES, Sleepers
from shardnet.cluster.placement.figures import LinkSpeed
from shardnet.errors import ShardnetError, UsageError
from shardnet.model.config.panel_form import Quantization
from shardnet.runtime.loading.model_facts import ModelFacts, config_text
from shardnet.types import PREFILL_CHUNK_ROWS, Arith, DType, NodeId, Quant, remember
from shardnet.wire.framing.schema import OfModel, encode
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.measurements import (
    MAX_PAYLOAD_BYTES,
    LinksMeasured,
    MeasureLinks,
    MeasureStage,
    StageMeasured,
    StageObserved,
)
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

TELL_S: Final = 2.0
"""How long nodes have to take what was observed of them."""


@dataclass(kw_only=True, eq=False, repr=False)
class MeasurementService:
    """Has this `node` and others measured; `control_to` returns the link to another one.

    Of those that sleep it knows what was measured before, from `sleepers`.
    """

    node: NodeId
    own: NodeBenchmark
    links: LinkBenchmark
    control_to: Callable[[NodeInfo], Awaitable[ControlLink]]
    sleepers: Sleepers

    async def measured(
        self,
        nodes: Sequence[NodeInfo],
        choice: ModelChoice,
        facts: ModelFacts,
        dtype: DType,
        ariths: Ariths,
        *,
        again: bool = False,
        on_measured: OnMeasured = lambda n_done, n_all: None,
    ) -> Measured:
        """Have the nodes and the links between them measured for a model.

        With `again` known figures are measured too. `ariths` and `on_measured` as for `gather`.
        """
        ask = await self._ask(choice, facts, dtype, again=again)
        largest = PREFILL_CHUNK_ROWS * facts.config.row_width * dtype.size_bytes
        payload_bytes = min(largest, MAX_PAYLOAD_BYTES)
        of_stage = self.measure_stage if facts.config.outline is None else _not_measured
        instruments = Instruments(of_stage, self.measure_links)
        awake = [node for node in nodes if node.asleep is None]
        found = await gather(awake, ask, payload_bytes, instruments, on_measured, ariths)
        return self._with_remembered(found, nodes, ask)

    def _with_remembered(
        self, found: Measured, nodes: Sequence[NodeInfo], ask: MeasureStage
    ) -> Measured:
        """Add what is remembered of the nodes that sleep; remember what was found."""
        same = structs.replace(ask, request=0, again=False, model="")
        subject, memory = hashlib.sha256(encode(same)).hexdigest()[:16], self.sleepers.figures
        names = {NodeId(node.node): node.name for node in nodes}
        for report in found.reports:
            if report.seconds is not None:
                remember(memory.speeds, f"{report.name} {subject}", report, MAX_FIGURES)
        for (one, other), speed in found.links.items():
            remember(memory.links, f"{names[one]} {names[other]}", speed, MAX_FIGURES)
        speeds, links, reports = {**found.speeds}, {**found.links}, [*found.reports]
        for node in (NodeId(info.node) for info in nodes if info.asleep is not None):
            known = memory.speeds.get(f"{names[node]} {subject}")
            if known is not None and known.seconds is not None:
                reports.append(structs.replace(known, node=node))
                speeds[node] = stage_speed(known.seconds, is_steady=known.is_steady)
            for pair in [*((node, other) for other in names), *((other, node) for other in names)]:
                if (way := memory.links.get(f"{names[pair[0]]} {names[pair[1]]}")) is not None:
                    links[pair] = LinkSpeed(**structs.asdict(way))
        return Measured(speeds=speeds, links=links, reports=tuple(reports))

    async def known(
        self, node: NodeInfo, choice: ModelChoice, facts: ModelFacts, dtype: DType, ariths: Ariths
    ) -> Measured:
        """Return the known figures of this node, without measuring."""
        ask = await self._ask(choice, facts, dtype, again=False)
        of_stage = self._known if facts.config.outline is None else _not_measured
        return await gather(
            [node], ask, 0, Instruments(of_stage, self.measure_links), ariths=ariths
        )

    async def _known(self, node: NodeInfo, message: MeasureStage) -> StageMeasured:
        return self.own.known(message)

    async def measure_stage(self, node: NodeInfo, message: MeasureStage) -> StageMeasured:
        """Have a node measure itself (Instruments)."""
        if node.node == self.node:
            return await self.own.measure(message, "this node", lambda done, total: None)
        control = await self.control_to(node)
        return await control.ask(message, StageMeasured, on_progress=lambda report: None)

    async def measure_links(self, node: NodeInfo, message: MeasureLinks) -> LinksMeasured:
        """Have a node measure its links (Instruments)."""
        if node.node == self.node:
            return await self.links.measure(message)
        control = await self.control_to(node)
        return await control.ask(message, LinksMeasured)

    async def observed(
        self,
        nodes: Sequence[NodeInfo],
        choice: ModelChoice,
        facts: ModelFacts,
        dtype: DType,
        ariths: Ariths,
        runs: Sequence[StageRun],
    ) -> None:
        """Tell nodes how long their stages took in a generation, each in one of `runs`.

        Waits TELL_S at most; a node that does not take it is left alone.
        """
        asked = await self._ask(choice, facts, dtype, again=False)
        subject = {name: getattr(asked, name) for name in OfModel.__struct_fields__}
        by_id = {node.node: node for node in nodes}

        async def tell(run: StageRun) -> None:
            arith = ariths.get(run.node, Arith.FAST).value
            message = StageObserved(
                **subject | {"arith": arith},
                layers=(run.layers.start, run.layers.end),
                compute_s=run.compute_s,
                step_s=run.step_s,
            )
            with contextlib.suppress(ShardnetError, TimeoutError):
                async with asyncio.timeout(TELL_S):
                    if run.node == self.node:
                        self.own.observe(message, "this node")
                    else:
                        control = await self.control_to(by_id[run.node])
                        await control.ask(message, Done)

        await asyncio.gather(*(tell(run) for run in runs))

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages by which other heads have this node measure."""
        handlers.register(MeasureStage, self._answer_stage)
        handlers.register(MeasureLinks, self._answer_links)
        handlers.register(StageObserved, self._take_observed)

    async def _take_observed(self, control: ControlLink, message: StageObserved) -> None:
        self.own.observe(message, control.peer_name)
        control.send(Done(request=message.request))

    async def _answer_links(self, control: ControlLink, message: MeasureLinks) -> None:
        control.send(await self.links.measure(message))

    async def _answer_stage(self, control: ControlLink, message: MeasureStage) -> None:
        progress = partial(control.tell_progress, message.request)
        control.send(await self.own.measure(message, control.peer_name, progress))

    async def _ask(
        self, choice: ModelChoice, facts: ModelFacts, dtype: DType, *, again: bool
    ) -> MeasureStage:
        return MeasureStage(
            request=0,
            config=config_text(facts),
            dtype=dtype.value,
            threads=choice.threads,
            model=choice.model,
            again=again,
            quant=_measured_as(choice, facts),
            kv_dtype=choice.kv_dtype,
            ignore_unknown_config=choice.ignore_unknown_config,
        )


def _measured_as(choice: ModelChoice, facts: ModelFacts) -> Quant:
    """Return what weights are quantised to in measuring: weights that stay packed as they are
    stored are measured as the kind that takes about as many bytes.
    """
    if Quantization.named(choice.quant) is not None or facts.packed is None:
        return choice.quant
    match facts.packed.nearest:
        case Quantization.INT8:
            return "int8"
        case Quantization.INT4:
            return "int4"
        case None:
            return choice.quant


async def _not_measured(node: NodeInfo, message: MeasureStage) -> StageMeasured:
    """Raise UsageError: there is no model of such a shape in random weights."""
    raise UsageError("a model that transformers' own modules compute is not measured")
