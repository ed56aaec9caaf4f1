"""LoRA adapters: read on the head, sent to the other nodes of a ring, each its layers' part.

Knows which nodes to ask for a part. Must not plan, nor know what is computed with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from shardnet.checkpoint.adapters.layer_files import AdapterFacts, LayerPart
from shardnet.cluster.sharing.bulk_client import AdapterClient, SourceRefused, ended
from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    CapacityError,
    DiskSilentError,
    PeerFailedError,
    ShardnetError,
    UsageError,
)
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.runtime.stage.stage_order import StageAdapter
from shardnet.transport.link import Link
from shardnet.types import LayerRange
from shardnet.wire.messages.plans import ModelChoice
from shardnet.wire.messages.stages import AdapterLayer, LoadStage, RingAdapter

TRIES: Final = 2
"""How often every source is asked for a part before a stage fails for lack of it."""

Part = tuple[str, LayerPart]
"""An adapter's id, and what it has for one layer."""


class AdapterSharing:
    """Finds adapters on this machine, and fetches parts of them into `store`.

    `dial` opens a bulk link to an address, `disk` reads and writes files.
    """

    def __init__(
        self, store: AdapterStore, dial: Callable[[str], Awaitable[Link]], disk: DiskJobs
    ) -> None:
        self._store = store
        self._dial = dial
        self._disk = disk

    async def identify(self, choice: ModelChoice, facts: ModelFacts) -> list[AdapterFacts]:
        """Read the adapters of a choice for the model of `facts`, in their order.

        Raises UsageError for two of one name; otherwise as AdapterStore.take.
        """
        names = [adapter.name for adapter in choice.adapters]
        if len(set(names)) < len(names):
            raise UsageError(
                f"two adapters have one name among {', '.join(names)}",
                remedy="give each another one: --lora NAME=PATH",
            )
        return [
            await self._disk.run(
                adapter.path, partial(self._store.take, adapter.name, adapter.path, facts)
            )
            for adapter in choice.adapters
        ]

    async def have_changed(self, adapters: Sequence[AdapterFacts]) -> bool:
        """Say whether files of any of these adapters are others by now; one that is gone is not."""
        for adapter in adapters:
            if not adapter.stamp:  # read on a head that is lost
                continue
            now = await self._disk.run(adapter.path, partial(self._store.stamp, adapter.path))
            if now not in ((), adapter.stamp):
                return True
        return False

    async def fetch(
        self, order: LoadStage, on_progress: Callable[[int, int], None]
    ) -> tuple[StageAdapter, ...]:
        """Have the parts that a stage needs on this disk; return where they are.

        `on_progress` takes (bytes done, bytes in all). Raises PeerFailedError if no node of the
        ring sends a part, CapacityError if the disk is full, DiskSilentError.
        """
        others = [a for rank, a in enumerate(order.addresses) if rank != order.rank]
        await self.have(order.adapters, [*others, *order.sources], on_progress)
        return tuple(
            StageAdapter(
                adapter_id=adapter.adapter_id,
                files=tuple(
                    (layer.layer, self._store.file(adapter.adapter_id, layer.layer))
                    for layer in adapter.layers
                ),
            )
            for adapter in order.adapters
        )

    async def have(
        self,
        adapters: Sequence[RingAdapter],
        sources: Sequence[str],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Fetch the descriptions of adapters to this disk. As `fetch`, from these sources."""
        parts = [
            (adapter.adapter_id, layer_part(layer))
            for adapter in adapters
            for layer in adapter.layers
        ]
        disk = self._disk.at(self._store.folder)
        lacking = [part for part in parts if not await disk.run(partial(self._store.has, *part))]
        total = sum(part.size_bytes for _, part in lacking)
        failures: dict[str, str] = {}
        for source in [*dict.fromkeys(sources)] * TRIES:
            if not lacking:
                break
            try:
                await self._fetch_from(source, lacking, total, on_progress)
            except SourceRefused as refusal:
                failures[source] = str(refusal)
            except (CapacityError, DiskSilentError):  # of the disk here: no other source helps
                raise
            except ShardnetError as error:
                failures[source] = error.message
        if lacking:
            name, part = lacking[0]
            raise PeerFailedError(
                f"no node sends layer {part.layer} of adapter {name[:12]} "
                f"({'; '.join(failures.values()) or 'no node to ask'})"
            )

    async def _fetch_from(
        self, source: str, lacking: list[Part], total: int, on_progress: Callable[[int, int], None]
    ) -> None:
        """Fetch parts from one node, and take them off `lacking`. Raises what ends that."""
        disk = self._disk.at(self._store.folder)
        async with ended(await self._dial(source)) as link:
            client = AdapterClient(link)
            while lacking:
                on_progress(total - sum(part.size_bytes for _, part in lacking), total)
                name, part = lacking[0]
                content = await client.part(name, part)
                await disk.run(partial(self._store.keep, name, part, content))
                lacking.pop(0)


def layer_part(layer: AdapterLayer) -> LayerPart:
    """Read what a message says of one layer."""
    return LayerPart(
        layer=layer.layer,
        size_bytes=layer.size_bytes,
        n_weights=layer.n_weights,
        sha256=layer.sha256,
    )


def ring_adapter(adapter: AdapterFacts, layers: LayerRange | None = None) -> RingAdapter:
    """Say what an adapter has for `layers`, None for all."""
    return RingAdapter(
        name=adapter.name,
        adapter_id=adapter.adapter_id,
        layers=[
            AdapterLayer(part.layer, part.size_bytes, part.n_weights, part.sha256)
            for part in adapter.parts
            if layers is None or part.layer in layers
        ],
    )


def adapter_facts(adapter: RingAdapter) -> AdapterFacts:
    """Return what a former head has said of an adapter in all layers."""
    parts = tuple(map(layer_part, adapter.layers))
    return AdapterFacts(name=adapter.name, adapter_id=adapter.adapter_id, parts=parts)
