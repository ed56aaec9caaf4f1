"""What `shardnet top` shows of a cluster: lines with the style of each, and one JSON object.

Knows what is worth a column. Must not know where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shardnet.api.dashboard.state import (
    ShownLoading,
    ShownNode,
    ShownRates,
    ShownRequest,
    ShownRing,
    ShownStage,
)
from shardnet.cluster.diagnosis.facts import age
from shardnet.types import LayerRange
from shardnet.wire.messages.diagnostics import waiting_words

from .columns import columns, wrapped
from .exit_codes import one_line

Line = tuple[str, str]
"""A style of rich, "" for none, and a text."""

_STYLES = {
    "up": "",
    "draining": "cyan",
    "resting": "cyan",
    "asleep": "cyan",
    "silent": "yellow",
    "lost": "bold red",
    "refused": "red",
}
_GIB = 2**30
MOST_REQUESTS = 20


class TopView(msgspec.Struct, kw_only=True):
    """One look: `at` is in seconds since 1970, `failure` says why the asked node is silent."""

    at: float
    asked: str | None
    answers: bool
    failure: str | None
    nodes: list[ShownNode]
    ring: ShownRing | None
    loading: ShownLoading | None
    rates: ShownRates
    requests: list[ShownRequest]


def top_lines(view: TopView, width: int | None) -> list[Line]:
    """Describe a look in lines of at most `width`, None for no limit."""
    lines = [("bold", line) for line in wrapped(_head(view), width)]
    if view.failure:
        words = f"{view.asked or 'the node'} does not answer: {view.failure}"
        lines += [("bold red", line) for line in wrapped([words], width)]
    lines.append(("", ""))
    lines += _node_lines(view, width)
    if view.requests:
        lines.append(("", ""))
        rows = columns([_REQUEST_HEAD, *_request_rows(view.requests)], width)
        lines += [("", line) for line in rows]
        n_more = len(view.requests) - MOST_REQUESTS
        if n_more > 0:
            lines.append(("dim", f"and {n_more} more"))
    remarks = [*_remarks(view)]
    if remarks:
        lines.append(("", ""))
        lines += [("dim", line) for line in wrapped(remarks, width)]
    return lines


def _head(view: TopView) -> Iterator[str]:
    ring, rates = view.ring, view.rates
    if view.loading is not None:
        loading = view.loading
        share = 100 * loading.done_bytes // max(1, loading.total_bytes)
        yield f"{loading.model}: {loading.phase} {share} %"
    if ring is None:
        yield f"{_n_up(view.nodes)}, no model is loaded"
        return
    yield (
        f"{ring.model} on {len(ring.stages)} of {_n_up(view.nodes)}"
        + (", the ring is broken" if ring.state == "broken" else "")
    )
    step = f", {rates.round_trip_ms:.1f} ms a step" if rates.round_trip_ms is not None else ""
    load = ring.load
    queue = f", {load.running} running, {load.waiting + load.paused} waiting" if load else ""
    room = f", KV blocks {load.used_blocks} of {load.room_blocks}" if load else ""
    yield (
        f"{rates.tokens_per_s:.1f} tokens/s, prompts {rates.prefill_tokens_per_s:.0f} tokens/s"
        f"{step}{queue}{room}"
    )
    for one in ring.rings:
        state = f"takes none: {one.why}" if one.why else f"{one.n_requests} requests"
        taken = f", {one.n_taken_over} taken over" if one.n_taken_over else ""
        yield one_line(f"ring of {'+'.join(one.names)}: {state}{taken}")


def _n_up(nodes: Sequence[ShownNode]) -> str:
    n_up = sum(node.state == "up" for node in nodes)
    return f"{n_up} node{'' if n_up == 1 else 's'}"


_NODE_HEAD = (
    "node",
    "state",
    "device",
    "memory used",
    "warmth",
    "layers",
    "compute",
    "queue",
    "wire",
    "busy",
    "",
)
_REQUEST_HEAD = ("request", "phase", "prompt", "cached", "tokens", "age", "")


def _node_lines(view: TopView, width: int | None) -> list[Line]:
    stages = {stage.node: stage for stage in view.ring.stages} if view.ring is not None else {}
    ranks = {node: stage.rank for node, stage in stages.items()}
    nodes = sorted(view.nodes, key=lambda node: ranks.get(node.node, len(ranks)))
    rows = [_node_row(node, stages.get(node.node)) for node in nodes]
    shown = columns([_NODE_HEAD, *rows], width)
    styles = {one_line(node.name): _STYLES[node.state] for node in nodes}
    lines: list[Line] = []
    style = ""
    for line in shown:
        # A row that is broken continues indented: its first line begins with a name.
        name = max((name for name in styles if line.startswith(name)), key=len, default=None)
        style = styles[name] if name is not None else style if line.startswith(" ") else ""
        lines.append((style, line))
    return lines


def _node_row(node: ShownNode, stage: ShownStage | None) -> tuple[str, ...]:
    used = ""
    if node.memory_bytes is not None and node.memory_free_bytes is not None:
        used_bytes = node.memory_bytes - node.memory_free_bytes
        used = f"{used_bytes / _GIB:.1f} of {node.memory_bytes / _GIB:.1f} GiB"
    layers = stage.layers if stage is not None else node.layers
    return (
        node.name,
        node.state if node.state == "up" else f"{node.state} {age(node.since_s)}",
        (node.device or "").partition(" ")[0],
        used,
        "" if node.temperature_c is None else f"{node.temperature_c:.0f} °C",
        "" if layers is None else LayerRange(*layers).words.removeprefix("layers "),
        _ms(stage.compute_ms if stage is not None else None),
        _ms(stage.queue_ms if stage is not None else None),
        _ms(stage.wire_ms if stage is not None else None),
        "" if stage is None or stage.busy is None else f"{100 * stage.busy:.0f} %",
        node.why or "",
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"


def _request_rows(requests: Sequence[ShownRequest]) -> Iterator[tuple[str, ...]]:
    for one in requests[:MOST_REQUESTS]:
        share = 100 * one.n_prefilled // max(1, one.n_prompt)
        prompt = f"{one.n_prefilled} of {one.n_prompt} ({share} %)"
        yield (
            one.id.rpartition("-")[2],
            one.phase if one.state != "paused" else "paused",
            prompt if one.phase == "prefill" else str(one.n_prompt),
            str(one.n_cached),
            f"{one.n_generated} of {one.max_tokens}",
            age(one.age_s),
            waiting_words(one_line(one.waits_for), one.expected_s)
            if one.waits_for
            else f"{one.ahead} go first"
            if one.phase == "queued" and one.ahead
            else "",
        )


def _remarks(view: TopView) -> Iterator[str]:
    for node in view.nodes:
        if node.standby is not None:
            layers = LayerRange(*node.standby.layers).words
            does = "stands by for" if node.standby.weight_bytes else "follows"
            yield f"{node.name} {does} {node.standby.name} with {layers}"
        if node.deputy is not None:
            yield f"{node.deputy} goes on with the answers of {node.name}, if that is lost"
    for out in view.ring.left_out if view.ring is not None else ():
        yield f"{out.name} is left out: {out.why}"
