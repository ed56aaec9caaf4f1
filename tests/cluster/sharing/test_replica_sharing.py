"""A node's replicas: begun from any source, told truly, begun anew if damaged, let go in time."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from support.cluster.bulk_peers import Sources, hello, open_sources, same_bytes
from support.cluster.machines import machines
from support.models.checkpoints import make_llama
from support.rings.stage_forms import FORM

from shardnet.api.client import connect
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import range_tensors
from shardnet.cluster.sharing import sharing as sharing_module
from shardnet.cluster.sharing.bulk_client import BulkClient, SendRate, SourceRefused
from shardnet.cluster.sharing.sharing import Sharing
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import (
    BusyError,
    CapacityError,
    CheckpointError,
    PeerFailedError,
    ShortageError,
    shortage,
)
from shardnet.transport.link import Link
from shardnet.types import LayerRange, NodeId, WireDType
from shardnet.wire.messages.membership import IdentifyModel
from shardnet.wire.messages.stages import LoadStage

MODEL = "/models/tales"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"))


@dataclass
class Receiver:
    """A node without the checkpoint, beside the source `anna` with it."""

    source: Path
    cache: ModelCache
    sources: Sources
    disk: DiskJobs
    begun: list[Sharing] = field(default_factory=list)

    def sharing(self, dial: Callable[[str], Awaitable[Link]] | None = None) -> Sharing:
        """Start it anew."""
        sharing = Sharing(
            node=NodeId("bert"),
            name="bert",
            cache=self.cache,
            peers=cast(Any, None),
            dial=dial or self.sources.dial,
            rate=SendRate(None),
            disk=self.disk,
            log=lambda line: None,
        )
        self.begun.append(sharing)
        return sharing

    async def load(
        self,
        sharing: Sharing,
        *layers: int,
        sources: tuple[str, ...],
        beside: bool = False,
        model: Path | None = None,
    ) -> Path:
        """Fetch a stage; check that its tensors are those of the source, which has the `model`."""
        model = model or self.source
        fields: dict[str, Any] = {"request": 0, "ring": "r", "epoch": 1, "threads": 1, "rank": 0}
        order = LoadStage(
            n_stages=1,
            form=replace(FORM, model=MODEL, model_id=Checkpoint.open(model).model_id),
            beside=beside,
            layers=layers,
            wire_dtype=WireDType.FLOAT32,
            received_dtype=WireDType.FLOAT32,
            addresses=["bert"],
            sources=list(sources),
            **fields,
        )
        folder = await sharing.folder(order, lambda done, total: None)
        wanted = range_tensors(Checkpoint.open(model), LayerRange(*layers))
        assert same_bytes(folder, model, wanted)
        return folder

    @property
    def model_id(self) -> str:
        """The id of the model of the source."""
        return Checkpoint.open(self.source).model_id


def receiving(
    source: Path, tmp_path: Path, scenario: Callable[[Receiver], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with open_sources() as sources:
            sources.add("anna", source, tmp_path / "anna")
            disk = DiskJobs("test-sharing")
            receiver = Receiver(source, ModelCache(tmp_path / "bert"), sources, disk)
            try:
                await scenario(receiver)
            finally:
                for sharing in receiver.begun:
                    await sharing.close()
                disk.close()

    asyncio.run(main())


def test_layers_that_came_are_told_from_then_on(source: Path, tmp_path: Path) -> None:
    async def scenario(receiver: Receiver) -> None:
        sharing = receiver.sharing()
        ask = IdentifyModel(request=1, model=MODEL, model_id=receiver.model_id)
        assert (await sharing.answer(ask)).model_id == ""
        for end in (1, 3):
            await receiver.load(sharing, 0, end, sources=("anna",))
            assert (await sharing.answer(ask)).layers == [(0, end)]

    receiving(source, tmp_path, scenario)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage"),
    [("model.safetensors", zero), ("config.json", zero), ("config.json", Path.unlink)],
)
def test_a_replica_that_a_power_cut_has_damaged_comes_anew(
    name: str, damage: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    async def scenario(receiver: Receiver) -> None:
        folder = await receiver.load(receiver.sharing(), 0, 2, sources=("anna",))
        damage(folder / name)
        sharing = receiver.sharing()
        ask = IdentifyModel(request=1, model=MODEL, model_id=receiver.model_id)
        assert (await sharing.answer(ask)).model_id == ""
        assert await receiver.load(sharing, 0, 2, sources=("anna",)) == folder
        assert (await sharing.answer(ask)).layers == [(0, 2)]
        assert [model.model_id for model in receiver.cache.models()] == [receiver.model_id]

    receiving(source, tmp_path, scenario)


def test_a_replica_that_cannot_be_read_now_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(receiver: Receiver) -> None:
        folder = await receiver.load(receiver.sharing(), 0, 2, sources=("anna",))
        (folder / "mark").touch()
        real = Checkpoint.open

        def fail(path: Path, **named: Any) -> Checkpoint:
            if path == folder:
                raise CheckpointError(f"{path}: Too many open files") from OSError(24, "")
            return real(path, **named)

        monkeypatch.setattr(Checkpoint, "open", fail)
        with pytest.raises(CheckpointError, match="Too many open files"):
            await receiver.load(receiver.sharing(), 0, 3, sources=("anna",))
        monkeypatch.undo()
        assert (folder / "mark").exists()

    receiving(source, tmp_path, scenario)


def test_a_source_that_takes_no_link_is_passed_over(source: Path, tmp_path: Path) -> None:
    async def scenario(receiver: Receiver) -> None:
        async def dial(name: str) -> Link:
            if name == "cleo":
                raise PeerFailedError("cleo is leaving")
            return await receiver.sources.dial(name)

        await receiver.load(receiver.sharing(dial), 0, 2, sources=("cleo", "anna"))

    receiving(source, tmp_path, scenario)


def test_the_next_model_may_take_the_room_of_the_last_but_not_beside_it(
    source: Path, tmp_path: Path
) -> None:
    """A ring of another model has been left when its stage is ordered, unless it is beside it."""
    other = make_llama(tmp_path / "other", seed=1)

    async def scenario(receiver: Receiver) -> None:
        receiver.sources.add("cleo", other, tmp_path / "cleo")
        await receiver.load(receiver.sharing(), 0, 4, sources=("anna",))
        [first] = receiver.cache.models()
        receiver.cache = ModelCache(receiver.cache.folder, first.size_bytes * 3 // 2)
        receiver.begun.pop().release()
        sharing = receiver.sharing()
        await receiver.load(sharing, 0, 4, sources=("anna",))
        with pytest.raises(CapacityError, match="raise --cache-limit"):
            await receiver.load(sharing, 0, 4, sources=("cleo",), model=other, beside=True)
        await receiver.load(sharing, 0, 4, sources=("cleo",), model=other)
        assert receiver.cache.find(first.model_id) is None

    receiving(source, tmp_path, scenario)


def test_weights_go_to_so_many_nodes_at_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(receiver: Receiver) -> None:
        sharing, sources = receiver.sharing(), receiver.sources
        sources.serves["bert"] = sharing.serve
        client = BulkClient(await sources.dial("bert"), receiver.model_id)
        with pytest.raises(SourceRefused):  # the link is being served
            await client.skeleton()
        sharing.check_hello(hello("anna"))
        monkeypatch.setattr(sharing_module, "MAX_BULK_LINKS", 1)
        with pytest.raises(BusyError, match="over 1 links already"):
            sharing.check_hello(hello("anna"))

    receiving(source, tmp_path, scenario)


@pytest.mark.usefixtures("unmeasured")
def test_a_peer_that_may_open_no_more_files_does_not_lack_the_model(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone has it: whoever asks this node hears what that peer is short of, and its name."""
    short = OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main() -> None:
        async with (
            machines(tmp_path, "anna", "bert") as (anna, bert),
            connect(anna.node.address) as client,
        ):
            own, peers = (one.node.stage.sharing._models for one in (anna, bert))
            monkeypatch.setattr(own, "at", lambda model: None)
            monkeypatch.setattr(peers, "at", Mock(side_effect=shortage(short, "config.json")))
            with pytest.raises(ShortageError, match=r"bert.*config\.json: .* no more files"):
                await client.complete([[5]], model=str(source))

    asyncio.run(main())
