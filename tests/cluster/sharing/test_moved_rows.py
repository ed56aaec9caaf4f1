"""Rows of a KV cache over a bulk link: what comes whole, what was changed on the way, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.cluster.bulk_peers import hello

from shardnet.cluster.sharing.bulk_client import BulkServer, KvClient, SendRate, SourceRefused
from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.local_models import LocalModels
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import LinkError, RemoteProtocolError, UsageError
from shardnet.transport.memory import memory_pair
from shardnet.wire.messages.bulk import FetchKv, KvRows, KvSent, Piece, bulk_frame

ASK = FetchKv(
    request=0, ring="r", epoch=1, sequence_id=3, slot=0, layer=2, begin=10, end=600, form="f"
)
ROW = 1000


class Holder:
    """Has rows from position 256 on: bytes of its position, 1000 for each."""

    async def held(self, ask: FetchKv) -> KvRows:
        if ask.sequence_id != ASK.sequence_id:
            raise UsageError("that sequence is not here")
        return KvRows(request=ask.request, first=256, n_bytes=(ask.end - 256) * ROW)

    async def read(self, ask: FetchKv, begin: int, end: int) -> memoryview:
        return memoryview(b"".join(bytes([n % 251]) * ROW for n in range(begin, end)))


def served(tmp_path: Path, use: Callable[[KvClient], Awaitable[None]]) -> None:
    async def main() -> None:
        disk = DiskJobs("test-share")
        models = LocalModels(ModelCache(tmp_path))
        adapters = AdapterStore(tmp_path / "adapters")
        server = BulkServer(models, disk, SendRate(None), lambda: 0.0, adapters, Holder())
        near, far = await memory_pair(hello("near"), hello("far"))
        serving = asyncio.ensure_future(server.serve(far))
        await use(KvClient(near))
        await near.close()
        with pytest.raises(LinkError):
            await serving
        disk.close()

    asyncio.run(main())


async def fetched(client: KvClient, request: int) -> tuple[KvRows, bytes]:
    rows = await client.rows(request)
    return rows, b"".join([bytes(piece) async for piece in client.payload(rows)])


def test_rows_come_in_order_and_a_refusal_ends_nothing_else(tmp_path: Path) -> None:
    async def use(client: KvClient) -> None:
        asked = [client.ask(message) for message in (ASK, replace(ASK, sequence_id=4), ASK)]
        rows, content = await fetched(client, asked[0])
        assert (rows.first, rows.n_bytes) == (256, 344 * ROW)
        assert content == bytes(await Holder().read(ASK, 256, 600))
        with pytest.raises(SourceRefused, match="that sequence is not here"):
            await client.rows(asked[1])
        assert (await fetched(client, asked[2]))[1] == content

    served(tmp_path, use)


def test_rows_that_changed_on_the_way_are_noticed() -> None:
    async def main() -> None:
        near, far = await memory_pair(hello("near"), hello("far"))
        client = KvClient(near)
        request = client.ask(ASK)
        far.send(bulk_frame(KvRows(request=request, first=10, n_bytes=4)))
        far.send(bulk_frame(Piece(request=request), b"rowz"))
        far.send(bulk_frame(KvSent(request=request, sha256="0" * 64)))
        with pytest.raises(RemoteProtocolError, match="keys and values that changed on the way"):
            await fetched(client, request)
        await near.close()
        await far.close()

    asyncio.run(main())
