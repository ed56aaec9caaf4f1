"""A traced request and the figures of its ring, over two real nodes."""

from __future__ import annotations

import asyncio

from support.system.nodes import Crew
from support.system.parrot import Parrots

from shardnet.api.client import connect
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.diagnostics import NodeReport
from shardnet.wire.messages.plans import ModelChoice

N_TOKENS = 6


def test_a_trace_has_every_step_on_both_nodes_in_order(trio: Crew, parrots: Parrots) -> None:
    """Between two machines' clocks, too, nothing comes before it was sent."""
    nodes = [trio.nodes[number] for number in (0, 2)]

    async def main() -> None:
        async with asyncio.timeout(120), connect(nodes[0].address) as client:
            addresses = [node.address for node in nodes]
            client.choice = ModelChoice(model=str(parrots.alphabet), nodes=addresses)
            plain, traced = [
                (await client.complete("a", SamplingParams(), max_tokens=N_TOKENS, trace=trace))[0]
                for trace in (False, True)
            ]
            told: dict[str, NodeReport] = {}
            while not {node.ready["name"] for node in nodes} <= told.keys():  # a busy one is late
                reports = [reply async for reply in client.report(with_peers=True)]
                told = {one.name: one.report for one in reports if one.report is not None}
        assert plain.trace is None
        assert plain.text == traced.text
        trace = traced.trace
        assert trace is not None
        assert len(trace.nodes) == len(set(trace.nodes)) == 2
        assert len(trace.steps) == N_TOKENS
        assert (trace.steps[0].position, trace.steps[0].n_sampled) == (0, 1)
        within_us = max(trace.clocks_within_us)
        for step in trace.steps:
            first, second = step.stages
            moments = [step.sent_us, first.begun_us, first.done_us]
            assert moments == sorted(moments)
            assert first.done_us - within_us <= second.arrived_us
            assert second.done_us <= step.answered_us + within_us

        work = told[trace.nodes[0]].ring  # the other node may lead one of another test yet
        assert work is not None
        assert [stage.name for stage in work.stages] == list(trace.nodes)
        assert work.n_steps >= 2 * N_TOKENS
        assert min(stage.compute_us for stage in work.stages) > 0
        assert work.n_prompts >= 2
        assert work.load.room_slots > 1
        for name, other in (trace.nodes, trace.nodes[::-1]):
            data = {link.name: link for link in told[name].links if link.purpose == "data"}
            assert min(data[other].sent_bytes, data[other].received_bytes) > 100
        infos = [reply.info for reply in reports if reply.info is not None]
        assert all(info.uptime_s > 0 for info in infos)

    asyncio.run(main())
