"""Adapters on the way from the head to the stages, and what they count for in a plan."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.cluster.bulk_peers import Sources, open_sources
from support.full_disk import full_disk
from support.models.adapters import make_peft
from support.models.checkpoints import make_llama
from support.rings.stage_forms import FORM

from shardnet.checkpoint.adapters.layer_files import AdapterFacts, read_layer_file
from shardnet.cluster.sharing.adapter_sharing import AdapterSharing, adapter_facts, ring_adapter
from shardnet.cluster.store import adapter_store
from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import CapacityError, PeerFailedError, UsageError
from shardnet.runtime.loading.model_facts import ModelFacts, identify
from shardnet.stage.estimate.memory_estimate import WeightForm, stage_weight_bytes
from shardnet.types import DType, LayerRange, WireDType
from shardnet.wire.messages.bulk import Piece
from shardnet.wire.messages.plans import ModelChoice, NamedAdapter
from shardnet.wire.messages.stages import LoadStage

MIDDLE = LayerRange(1, 3)
Fetching = Callable[[Sources, AdapterSharing], Awaitable[None]]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return identify(make_llama(tmp_path_factory.mktemp("base") / "model"))


@pytest.fixture
def path(facts: ModelFacts, tmp_path: Path) -> Path:
    return make_peft(tmp_path / "tales", facts.path)


def order(adapter: AdapterFacts, *addresses: str) -> LoadStage:
    """What the second node of a ring is told to load."""
    fields: dict[str, Any] = {"request": 0, "ring": "r", "epoch": 1, "threads": 1}
    return LoadStage(
        rank=1,
        n_stages=len(addresses),
        form=FORM,
        layers=(MIDDLE.start, MIDDLE.end),
        wire_dtype=WireDType.FLOAT32,
        received_dtype=WireDType.FLOAT32,
        addresses=[*addresses],
        adapters=[ring_adapter(adapter, MIDDLE)],
        **fields,
    )


def fetching(tmp_path: Path, scenario: Fetching) -> None:
    """Run a scenario between the node `anna`, who has what `tmp_path` has, and one with nothing."""

    async def main() -> None:
        async with open_sources() as sources:
            sources.add("anna", tmp_path / "no model", tmp_path / "anna")
            disk = DiskJobs("test-adapters")
            store = AdapterStore(tmp_path / "bert" / "adapters")
            await scenario(sources, AdapterSharing(store, sources.dial, disk))
            disk.close()

    asyncio.run(main())


def test_a_stage_fetches_the_parts_of_its_layers_once(
    facts: ModelFacts, path: Path, tmp_path: Path
) -> None:
    adapter = AdapterStore(tmp_path / "anna" / "adapters").take("tales", str(path), facts)
    told: list[tuple[int, int]] = []

    async def scenario(sources: Sources, sharing: AdapterSharing) -> None:
        for _ in range(2):
            [stage] = await sharing.fetch(
                order(adapter, "anna", "bert"), lambda *done: told.append(done)
            )
            assert stage.adapter_id == adapter.adapter_id
            assert [layer for layer, _ in stage.files] == [1, 2]
            assert all(read_layer_file(file) for _, file in stage.files)
        assert sources.dialled == ["anna"]
        assert told[0] == (0, sum(part.size_bytes for part in adapter.parts[1:3]))
        stage.files[0][1].write_bytes(b"damaged")
        await sharing.fetch(order(adapter, "anna", "bert"), lambda *done: None)
        assert read_layer_file(stage.files[0][1])
        assert sources.dialled == ["anna"] * 2

    fetching(tmp_path, scenario)


def test_a_part_that_no_node_has_or_that_is_another_is_an_error(
    facts: ModelFacts, path: Path, tmp_path: Path
) -> None:
    adapter = AdapterStore(tmp_path / "elsewhere").take("tales", str(path), facts)
    size = adapter.parts[1].size_bytes

    async def scenario(sources: Sources, sharing: AdapterSharing) -> None:
        def script(message: Any) -> Any:
            return [(Piece(request=message.request), bytes(size))]

        sources.script("cleo", script)
        with pytest.raises(PeerFailedError, match="no node sends layer 1") as raised:
            await sharing.fetch(order(adapter, "anna", "bert", "cleo"), lambda *done: None)
        assert "is not here" in str(raised.value)
        assert "other bytes" in str(raised.value)

    fetching(tmp_path, scenario)


def test_a_full_disk_is_not_the_fault_of_who_sends(
    facts: ModelFacts, path: Path, tmp_path: Path
) -> None:
    adapter = AdapterStore(tmp_path / "anna" / "adapters").take("tales", str(path), facts)

    async def scenario(sources: Sources, sharing: AdapterSharing) -> None:
        with full_disk(100), pytest.raises(CapacityError, match="free room there"):
            await sharing.fetch(order(adapter, "anna", "bert"), lambda *done: None)
        assert sources.dialled == ["anna"]

    fetching(tmp_path, scenario)


def test_an_adapter_is_read_again_when_its_files_change(
    facts: ModelFacts, path: Path, tmp_path: Path
) -> None:
    async def scenario(sources: Sources, sharing: AdapterSharing) -> None:
        choice = ModelChoice(model=str(facts.path), adapters=[NamedAdapter("tales", str(path))])
        [first] = await sharing.identify(choice, facts)
        assert [first] == await sharing.identify(choice, facts)
        assert not await sharing.have_changed([first])
        os.rename(path, tmp_path / "gone")
        assert not await sharing.have_changed([first])
        make_peft(path, facts.path, seed=1)
        assert await sharing.have_changed([first])
        [second] = await sharing.identify(choice, facts)
        assert second.adapter_id != first.adapter_id
        twice = ModelChoice(model=choice.model, adapters=choice.adapters * 2)
        with pytest.raises(UsageError, match="one name"):
            await sharing.identify(twice, facts)

    fetching(tmp_path, scenario)


def test_adapters_that_a_node_used_long_ago_make_room(
    facts: ModelFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one is trained again and again: those that may be used now stay."""
    monkeypatch.setattr(adapter_store, "SHARE_OF_DISK", 0)
    monkeypatch.setattr(adapter_store, "N_KEPT", 2)
    store = AdapterStore(tmp_path / "adapters")
    ids = []
    for seed in range(4):
        path = make_peft(tmp_path / str(seed), facts.path, seed=seed)
        ids.append(store.take("tales", str(path), facts).adapter_id)
        if seed == 1:
            store.take("tales", str(tmp_path / "0"), facts)
    assert {entry.name for entry in store.folder.iterdir()} == {ids[2], ids[3]}
    assert store.take("tales", str(tmp_path / "1"), facts).adapter_id == ids[1]
    assert {entry.name for entry in store.folder.iterdir()} == {ids[1], ids[3]}


def test_a_plan_counts_what_adapters_take(facts: ModelFacts, path: Path, tmp_path: Path) -> None:
    adapter = AdapterStore(tmp_path / "store").take("tales", str(path), facts)
    told = adapter_facts(ring_adapter(adapter))
    assert told.parts == adapter.parts
    form = WeightForm(dtype=DType.FLOAT32)
    without = stage_weight_bytes(facts.config, MIDDLE, form)
    with_it = stage_weight_bytes(facts.with_adapters([told, told]).config, MIDDLE, form)
    hidden, kv, inner, rank = 48, 16, 80, 4
    inputs = 5 * hidden + hidden + inner  # q, k, v, gate, up; o; down
    outputs = (hidden + 2 * kv + 2 * inner) + 2 * hidden
    assert with_it - without == 2 * len(MIDDLE) * 4 * rank * (inputs + outputs)
