"""Rows of a KV cache over a bulk link: what comes whole, what was changed on the way, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace
from support.cluster.bulk_peers import hello

from shardnet.cluster.member.kv_orders import KvOrders
from shardnet.cluster.sharing.bulk_client import (
    BulkServer,
    KvClient,
    ReadRows,
    SendRate,
    SourceRefused,
)
from shardnet.cluster.store.adapter_store import AdapterStore
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.cluster.store.local_models import LocalModels
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import LinkError, RemoteProtocolError, UsageError
from shardnet.transport.memory import memory_pair
from shardnet.wire.messages.bulk import FetchKv, KvRows, KvSent, Piece, bulk_frame
from shardnet.wire.messages.stages import KvSource, MoveKv

ASK = FetchKv(
    request=0, ring="r", epoch=1, sequence_id=3, slot=0, layer=2, begin=10, end=600, form="f"
)
ROW = 1000


class Holder:
    """Has rows from position 256 on: bytes of its position, 1000 for each."""

    async def held(self, ask: FetchKv) -> tuple[KvRows, ReadRows]:
        if ask.sequence_id != ASK.sequence_id:
            raise UsageError("that sequence is not here")
        rows = KvRows(request=ask.request, first=256, n_bytes=(ask.end - 256) * ROW)
        return rows, self.read

    async def read(self, begin: int, end: int) -> memoryview:
        return memoryview(b"".join(bytes([n % 251]) * ROW for n in range(begin, end)))


def served(tmp_path: Path, use: Callable[[KvClient], Awaitable[None]]) -> None:
    async def main() -> None:
        disk = DiskJobs("test-share")
        models = LocalModels(ModelCache(tmp_path))
        adapters = AdapterStore(tmp_path / "adapters")
        server = BulkServer(models, disk, SendRate(None), lambda: 0.0, adapters, Holder().held)
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
        assert content == bytes(await Holder().read(256, 600))
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


def test_a_move_that_takes_long_is_not_given_up_while_rows_come(tmp_path: Path) -> None:
    """The time that what was moved is kept begins anew with each block."""
    kept_until_s: list[float] = []
    orders: Any = None

    class Arrivals(Mock):
        """A stage that is ready, and notes when what came would be dropped."""

        async def on_arrivals(self, to: str, job: Callable[[Any], Any]) -> Any:
            assert orders._expiry is not None
            kept_until_s.append(orders._expiry.when())
            return job(moves)

    async def use(client: KvClient) -> None:
        nonlocal orders
        orders = KvOrders(host, AsyncMock(return_value=client.link))
        moved = await orders.move(message)
        assert moved.n_bytes == 344 * ROW
        assert orders._expiry is not None
        assert kept_until_s[0] < kept_until_s[-1] <= orders._expiry.when()
        assert len(set(kept_until_s)) > 2
        orders._expiry.cancel()

    part = Mock(next_wanted=Mock(return_value=ASK.begin), form=Mock(return_value=ASK.form))
    moves = Mock(part_of=Mock(return_value=part), is_whole=Mock(return_value=True))
    host = Arrivals(membership=None, prepared_layers=Mock(return_value=[ASK.layer]))
    message = MoveKv(
        request=1,
        ring=ASK.ring,
        epoch=ASK.epoch,
        to="s",
        sequence_id=ASK.sequence_id,
        slot=ASK.slot,
        token_ids=bytes(4 * ASK.end),
        sources=[KvSource(layers=(ASK.layer, ASK.layer + 1), address="far:1")],
    )
    served(tmp_path, use)


def test_a_node_ends_where_its_compute_thread_hangs_when_moved_rows_are_dropped() -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def hang() -> None:
            begun.set()
            await asyncio.Event().wait()

        orders = KvOrders(Mock(forget_arrivals=hang, is_preparing=False), AsyncMock())
        orders._expire()
        await begun.wait()
        async with asyncio.timeout(60):
            await orders.close()

    asyncio.run(main())
