"""A ring that this node leads, and one that is on its way.

Knows the plan of a ring and for which requests it serves. Must not know how rings are built.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.ring_dtypes import settle_wires
from shardnet.cluster.ring.ring import Ring
from shardnet.errors import ShardnetError
from shardnet.tokenizers.grammar.grammars import Grammars
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.types import NodeId, parse_wires
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.deputies import StandBy
from shardnet.wire.messages.plans import ModelChoice


@dataclass(slots=True, kw_only=True, eq=False)
class Lead:
    """A ring that this node leads, its plan, and the tokenizer if the checkpoint has one, with
    what constrains its output.

    Plan and ring change when another ring replaces this one; `opened` is the plan of the first.
    """

    plan: Plan
    ring: Ring
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    grammars: Grammars | None = None
    is_recovering: bool = False
    """Whether the ring is broken, or given up, for another one that is being built."""
    is_replacing: bool = False
    """Whether the stages of another ring are made ready while this one goes on."""
    is_given_up: bool = False
    """Whether the ring is broken and no other could be built: the nodes there cannot do it."""
    avoided: dict[NodeId, ShardnetError] = field(default_factory=dict)
    """Nodes that are there, and to which another node could open no link; with what came of it."""
    instead: ModelChoice | None = None
    """What the lost head was asked for in whose place this ring is."""
    opened: Plan = field(init=False)
    _told: tuple[Plan, Ring, StandBy] | None = None

    def __post_init__(self) -> None:
        self.opened = self.plan

    @property
    def stands(self) -> bool:
        """Whether requests can be given to its engine: they run, or wait for the next ring."""
        return self.is_recovering or self.ring.broken is None

    @property
    def told(self) -> StandBy:
        """What the deputy needs to know of plan and ring; the same object while they are."""
        if self._told is None or self._told[0] is not self.plan or self._told[1] is not self.ring:
            self._told = self.plan, self.ring, self.plan.stand_by(self.ring.epoch)
        return self._told[2]

    def suits(self, choice: ModelChoice) -> bool:
        """Say whether the ring is what `choice` asks for.

        A client that names no nodes takes any ring with its model. Settings that it leaves open
        match, but for wire dtype, quantisation and KV dtype: their absence means lossless. Who
        names nodes or layers with a head that is lost means the ring in its place.
        """
        had, spec = self.plan.choice, self.ring.spec
        lost = self.instead or had
        return (
            choice.model == had.model
            and (not choice.nodes or choice.nodes in (had.nodes, lost.nodes))
            and (not choice.layers or choice.layers in (had.layers, lost.layers))
            and (not choice.context or choice.context == spec.context)
            and (choice.dtype == "auto" or choice.dtype == spec.dtype.value)
            and (choice.quant, choice.kv_dtype) == (had.quant, had.kv_dtype)
            and (had.mtp or not choice.mtp)
            and all(adapter in had.adapters for adapter in choice.adapters)
            and choice.mmproj in ("", had.mmproj)
            and choice.stream_layers in (0, "auto", had.stream_layers)
            and choice.arith in ("auto", self.plan.arith.value)
            and settle_wires(
                choice.wire_dtype, spec.dtype, self.plan.nodes, self.plan.measured.links
            )
            == spec.wires
            and parse_wires(choice.wire_dtype).gather == spec.gather_dtype
            and choice.nodes_per_stage in (0, had.nodes_per_stage)
            and (not choice.threads or choice.threads == spec.threads)
            and (not choice.optimise or choice.optimise == self.plan.objective.value)
            and (
                choice.ignore_unknown_config
                or not had.ignore_unknown_config
                or not self.plan.facts.unknown_keys
            )
        )


@dataclass(slots=True, kw_only=True)
class Opening:
    """A ring that is looked for or built for a request, and how far each rank is with that.

    `progress` has phase, bytes done and bytes in all; with the phase `measuring` counts of nodes
    and links. `began_s` is monotonic.
    """

    model: str
    began_s: float
    progress: dict[int, tuple[Phase, int, int]] = field(default_factory=dict)

    def take(self, rank: int, phase: Phase, done: int, total: int) -> None:
        """Take progress. What was measured is over when something else begins."""
        if "measuring" in (phase, *(known for known, _, _ in self.progress.values())):
            self.progress.clear()
        self.progress[rank] = (phase, done, total)
