"""The JSON of the dashboard's state (docs/dashboard.md). Sizes are bytes; None is not known."""

from __future__ import annotations

from typing import Literal

import msgspec

from shardnet.wire.messages.diagnostics import Drafted, PartState, PowerMeter, RingLoad
from shardnet.wire.messages.plans import LeftOut

NodeState = Literal["up", "draining", "resting", "asleep", "silent", "lost", "refused"]
JobKind = Literal["load", "unload", "pull"]
JobState = Literal["running", "done", "failed", "cancelled"]


class ShownServer(msgspec.Struct, kw_only=True):
    """The HTTP server, and the node that it asks."""

    version: str
    uptime_s: float
    node: str | None
    name: str | None
    answers: bool
    failure: str | None
    model: str
    active_requests: int
    has_keys: bool


class ShownLink(msgspec.Struct, kw_only=True):
    """The link of a node to another one."""

    node: str
    rtt_ms: float | None


class ShownStandby(msgspec.Struct, kw_only=True):
    """The layers in which a node follows the node named `name`: 0 bytes where it holds none."""

    name: str
    layers: tuple[int, int]
    weight_bytes: int


class ShownNode(msgspec.Struct, kw_only=True):
    """A node; of one that is lost or silent what it said last."""

    node: str
    name: str
    address: str | None = None
    state: NodeState
    why: str | None = None
    since_s: float
    version: str | None = None
    uptime_s: float | None = None
    device: str | None = None
    isa: str | None = None
    threads: int | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    temperature_c: float | None = None
    power: list[PowerMeter] = []
    host: str | None = None
    is_asked: bool = False
    model: str | None = None
    layers: tuple[int, int] | None = None
    rank: int | None = None
    weight_bytes: int | None = None
    kv_positions: int | None = None
    kv_used_positions: int | None = None
    kernel: str | None = None
    dtype: str | None = None
    n_sequences: int | None = None
    standby: ShownStandby | None = None
    deputy: str | None = None
    deputy_of: list[str] = []
    wrong_bits: str | None = None
    parts: list[PartState] = []
    links: list[ShownLink] = []


class ShownStage(msgspec.Struct, kw_only=True):
    """A stage of the ring, as planned, and as it was in the last seconds."""

    rank: int
    node: str
    name: str
    layers: tuple[int, int]
    weight_bytes: int
    kv_bytes: int
    streamed_layers: int
    predicted_compute_ms: float | None
    predicted_hop_ms: float | None
    compute_ms: float | None = None
    queue_ms: float | None = None
    wire_ms: float | None = None
    busy: float | None = None


class ShownBehind(msgspec.Struct, kw_only=True):
    """One of several rings behind a head; `why` it takes no requests now."""

    names: list[str]
    why: str | None
    n_requests: int
    n_taken_over: int
    predicted_tok_s: float | None


class ShownRing(msgspec.Struct, kw_only=True):
    """The ring. Behind a loss its requests wait for something, `expected_s` still, 0 if unknown."""

    id: str
    model: str
    head: str
    context: int
    dtype: str
    wire_dtype: str
    quant: str | None
    kv_dtype: str
    predicted_tok_s: float | None
    why: str
    age_s: float
    state: Literal["ready", "recovering", "broken"]
    waits_for: str | None
    expected_s: float
    load: RingLoad | None
    stages: list[ShownStage]
    left_out: list[LeftOut]
    rings: list[ShownBehind] = []
    drafters: list[Drafted] = []


class ShownRequest(msgspec.Struct, kw_only=True):
    """A request of the ring. What it waits for is as in ShownRing."""

    id: str
    state: str
    phase: Literal["queued", "prefill", "decode"]
    n_prompt: int
    n_prefilled: int
    n_cached: int
    n_generated: int
    max_tokens: int
    age_s: float
    priority: int
    ahead: int
    waits_for: str | None
    expected_s: float


class ShownUsage(msgspec.Struct, kw_only=True):
    """Tokens of one key, "" without one, with one model, since the server began."""

    key: str
    model: str
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0


class ShownRates(msgspec.Struct, kw_only=True):
    """What the ring did in the last seconds."""

    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    round_trip_ms: float | None = None


class ShownStageTime(msgspec.Struct, kw_only=True):
    """What one stage did in one step."""

    rank: int
    start_ms: float
    queue_ms: float
    compute_ms: float


class ShownStep(msgspec.Struct, kw_only=True):
    """One trip round the ring."""

    step: int
    sent_ms: float
    round_trip_ms: float
    rows: int
    prompt_rows: int
    tokens: int
    wire_ms: float
    stages: list[ShownStageTime]


class ShownSteps(msgspec.Struct, kw_only=True):
    """Steps of a ring, oldest first, and the time by the same clock."""

    ring: str | None = None
    now_ms: float = 0.0
    steps: list[ShownStep] = []


class ShownProgress(msgspec.Struct, kw_only=True):
    """How far the node of one stage is with a load."""

    rank: int
    phase: str
    done_bytes: int
    total_bytes: int


class ShownLoading(msgspec.Struct, kw_only=True):
    """A ring that is looked for or built because somebody asked for its model."""

    model: str
    phase: str
    done_bytes: int
    total_bytes: int
    nodes: list[ShownProgress]
    age_s: float


class ShownJob(msgspec.Struct, kw_only=True):
    """Something that was started from a page and takes its time."""

    id: str
    kind: JobKind
    model: str
    state: JobState = "running"
    phase: str | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    nodes: list[ShownProgress] = []
    age_s: float = 0.0
    error: str | None = None
    remedy: str | None = None


class ShownState(msgspec.Struct, kw_only=True):
    """Everything that changes."""

    server: ShownServer
    nodes: list[ShownNode]
    ring: ShownRing | None
    loading: ShownLoading | None
    requests: list[ShownRequest]
    usage: list[ShownUsage]
    rates: ShownRates
    steps: ShownSteps
    jobs: list[ShownJob]
