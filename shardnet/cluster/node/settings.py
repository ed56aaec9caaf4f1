"""What a node is given at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardnet.cluster.discovery.discovery import Discovery
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.cluster.machine.profile import MemoryBudget
from shardnet.cluster.pressure.sleep import SleepSettings
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.installation import KeeperFolder
from shardnet.runtime.stage.executor import ComputeThreads
from shardnet.transport.identity import Identity
from shardnet.types import NodeId
from shardnet.wire.messages.plans import ModelChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of one node.

    `threads` 0 means a share of the machine's cores. `tensor_parallel` of its devices share each
    layer; 0 leaves that to the plan. `models` keeps weights that come from other
    nodes; `share_rate` limits the bytes per second that this node sends of its weights, None does
    not. Without `identity` links are neither encrypted nor authenticated. `discovery` finds other
    nodes and advertises this one; without it only `peers` and their peers are known, with `tailnet`
    also nodes on the user's machines in a tailnet. One that `remembers` asks the peers of earlier
    starts too. `cache` is
    the folder for figures, the last run and other things that can be made again; finished prompts
    take at most `prefix_cache_bytes` of it, 0 for none. A model that no request has used for
    `idle_unload_s` seconds is freed, never for None. While it awaits steps it `spins` for moments,
    but not on battery. A node that `yields` gives its layers to others while its machine's owner
    uses it. `sleeps` says how it has its machine sleep while nobody needs it. Audits take
    `audit_share` of the time of the stages that it leads, 0 for none. `power_command` prints what
    the machine draws in watts. The process has a `keeper` where other versions may be installed,
    else None, and `serves_http` or does not. A runner computes what it `serves`, whatever it is
    asked for, on the threads `compute` of its node.
    """

    node: NodeId
    name: str
    budget: MemoryBudget
    threads: int
    peers: tuple[str, ...]
    local_nodes: LocalNodes
    cache: Path
    models: ModelCache
    log: Callable[[str], None]
    share_rate: float | None = None
    identity: Identity | None = None
    discovery: Discovery | None = None
    tailnet: bool = False
    remembers: bool = False
    idle_unload_s: float | None = None
    prefix_cache_bytes: int = 0
    tensor_parallel: int = 0
    spins: bool = True
    yields: bool = False
    audit_share: float = 0.0
    power_command: tuple[str, ...] = ()
    keeper: KeeperFolder | None = None
    serves_http: bool = False
    serves: ModelChoice | None = None
    compute: ComputeThreads | None = None
    sleeps: SleepSettings = field(default_factory=SleepSettings)

    @property
    def cluster(self) -> str | None:
        """The fingerprint of the cluster key, None without one."""
        return self.identity.fingerprint if self.identity else None

    @property
    def clusters(self) -> tuple[str, ...]:
        """Those of all keys that count now, the newest first; "" for none."""
        return self.identity.fingerprints if self.identity else ("",)
