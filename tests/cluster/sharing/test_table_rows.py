"""Rows of tables from other nodes: who is asked when one is lost, and what nobody is given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cluster.bulk_peers import Sources, empty_replica, open_sources
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import table_tensors
from shardnet.checkpoint.tensors.stored_tensor import StoredRow, StoredTensor
from shardnet.cluster.sharing import table_rows
from shardnet.cluster.sharing.bulk_client import BulkClient, SourceRefused
from shardnet.cluster.sharing.table_rows import TableRows
from shardnet.errors import LostShardError, RemoteProtocolError
from shardnet.transport.link import Link
from shardnet.types import LayerRange
from shardnet.wire.messages.bulk import MAX_ROWS, FetchRows, Piece, RowNumbers, bulk_frame
from shardnet.wire.messages.handshake import Capability, Hello, PeerRole


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return make_decoder(
        folder / "model", "qwen4_exp_text", with_tokenizer=False, **CASES["qwen4_exp_text"]
    )


@dataclass
class Asker:
    """A node that asks `anna` and `bert`, who have the model, for rows of all its tables."""

    sources: Sources
    checkpoint: Checkpoint
    rows: TableRows

    @property
    def tables(self) -> list[StoredTensor]:
        return [*table_tensors(self.checkpoint, LayerRange(0, 4)).values()]

    async def begin(self, *names: str) -> None:
        firsts = [StoredRow(table.name, 0, row_bytes(table)) for table in self.tables]
        await self.rows.begin(self.checkpoint.model_id, names, firsts)

    async def ask(self, *numbers: int) -> bytearray:
        """Ask as a step does, on a thread."""
        wanted = [StoredRow(t.name, n, row_bytes(t)) for t in self.tables for n in numbers]
        return await asyncio.to_thread(self.rows.ask, self.checkpoint.model_id, wanted)

    def stored(self, *numbers: int) -> bytes:
        found = b""
        for table in self.tables:
            data, size = (self.checkpoint.folder / table.file).read_bytes(), row_bytes(table)
            found += b"".join(data[table.offset + n * size :][:size] for n in numbers)
        return found


def row_bytes(table: StoredTensor) -> int:
    return table.size_bytes // table.shape[0]


def asking(
    source: Path, tmp_path: Path, scenario: Callable[[Asker], Awaitable[None]], answer_s: float = 20
) -> None:
    async def main() -> None:
        async with open_sources() as sources:
            for name in ("anna", "bert"):
                sources.add(name, source, tmp_path / name)
            rows = TableRows(dial=sources.dial, answer_s=answer_s)
            try:
                await scenario(Asker(sources, Checkpoint.open(source), rows))
            finally:
                rows.close()

    asyncio.run(main())


def lose(asker: Asker) -> None:
    """End the link that rows come over, without a word."""
    assert asker.rows._linked is not None
    asker.rows._linked[2].link.abort("a test")


def test_rows_are_those_of_the_file_and_one_link_is_enough(source: Path, tmp_path: Path) -> None:
    async def scenario(asker: Asker) -> None:
        await asker.begin("anna", "bert")
        for numbers in ([3, 0, 7], [1], [19]):
            assert await asker.ask(*numbers) == asker.stored(*numbers)
        assert asker.sources.dialled == ["anna"]

    asking(source, tmp_path, scenario)


def test_more_than_a_message_asks_for_comes_in_several(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_rows, "MAX_ROWS", 7)

    async def scenario(asker: Asker) -> None:
        await asker.begin("anna")
        assert await asker.ask(*range(5)) == asker.stored(*range(5))

    asking(source, tmp_path, scenario)


def test_a_node_that_is_lost_is_left_for_the_next_and_the_last_one_is_named(
    source: Path, tmp_path: Path
) -> None:
    async def scenario(asker: Asker) -> None:
        await asker.begin("anna", "bert")
        lose(asker)
        assert await asker.ask(2) == asker.stored(2)
        assert asker.sources.dialled == ["anna", "anna"], "a link may be lost alone"
        del asker.sources.serves["anna"]
        lose(asker)
        assert await asker.ask(5) == asker.stored(5)
        assert asker.sources.dialled[2:] == ["anna", "bert"]
        asker.sources.serves.clear()
        lose(asker)
        with pytest.raises(
            LostShardError,
            match=r"no node gives rows of .*nothing answers at bert; nothing answers at anna\); "
            "start a node that has the whole checkpoint, or make room",
        ):
            await asker.ask(6)

    asking(source, tmp_path, scenario)


def test_a_node_that_is_silent_or_sends_too_much_is_left_for_the_next(
    source: Path, tmp_path: Path
) -> None:
    async def scenario(asker: Asker) -> None:
        asker.sources.script("silent", lambda message: [])
        await asker.begin("silent", "bert")
        assert asker.sources.dialled == ["silent", "bert"]
        asker.rows.close()
        asker.sources.script("long", lambda m: [(Piece(request=m.request), bytes(1 << 19))])
        await asker.begin("long", "bert")
        assert await asker.ask(1) == asker.stored(1)
        assert asker.sources.dialled[2:] == ["long", "bert"]

    asking(source, tmp_path, scenario, answer_s=1.0)  # bert is asked too, and may be held up


def test_a_node_without_the_tables_or_of_an_older_release_is_not_asked(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(asker: Asker) -> None:
        asker.sources.add("cleo", empty_replica(source, tmp_path / "cleo"), tmp_path / "none")
        with pytest.raises(LostShardError, match=r"cleo .*is not here"):
            await asker.begin("cleo")
        await asker.begin("cleo", "anna")
        monkeypatch.setattr(Hello, "lacking", lambda hello, *needed: [*needed])
        asker.rows.close()
        with pytest.raises(LostShardError, match="anna runs shardnet 0, which does not know how"):
            await asker.begin("anna")
        assert Capability.TABLE_ROWS == "table-rows"

    asking(source, tmp_path, scenario)


def numbers(*rows: int) -> bytes:
    return b"".join(row.to_bytes(8, "little") for row in rows)


@pytest.mark.parametrize(
    ("tensor", "wanted", "why"),
    [
        ("lm_head.weight", numbers(0), "no table in which rows are looked up"),
        ("../secret.txt", numbers(0), "no table in which rows are looked up"),
        ("", numbers(10**6), "rows, and no 1000000"),
        ("", numbers(1, 2**64 - 1, 0), f"rows, and no {2**64 - 1}"),
        ("", numbers(*[0] * (MAX_ROWS // 2 + 1)), f"{MAX_ROWS + 2} rows at a time, at most"),
    ],
)
def test_nothing_else_is_given_and_the_link_goes_on(
    source: Path, tmp_path: Path, tensor: str, wanted: bytes, why: str
) -> None:
    async def scenario(asker: Asker) -> None:
        table, model_id = asker.tables[0], asker.checkpoint.model_id
        link = await asker.sources.dial("anna")
        client = BulkClient(link, asker.checkpoint.model_id)
        asked = RowNumbers(tensor or table.name, wanted)
        message = FetchRows(request=0, model_id=model_id, tables=[asked, asked])
        link.send(bulk_frame(message))
        with pytest.raises(SourceRefused, match=why):
            await client.piece(0, 1)
        good = [StoredRow(table.name, 3, row_bytes(table))]
        assert len(await client.rows(good)) == row_bytes(table)
        await link.close()

    asking(source, tmp_path, scenario)


def test_numbers_of_odd_bytes_end_the_link(source: Path, tmp_path: Path) -> None:
    async def scenario(asker: Asker) -> None:
        link = await asker.sources.dial("anna")
        asked = RowNumbers(asker.tables[0].name, b"123456789")
        model_id = asker.checkpoint.model_id
        link.send(bulk_frame(FetchRows(request=1, model_id=model_id, tables=[asked])))
        with pytest.raises(RemoteProtocolError, match="numbers of rows have 8 bytes each"):
            await link.receive()
        await link.close()

    asking(source, tmp_path, scenario)


def test_a_client_gets_no_rows(source: Path, tmp_path: Path) -> None:
    async def scenario(asker: Asker) -> None:
        link: Link = await asker.sources.dial("anna", PeerRole.CLIENT)
        table = asker.tables[0]
        with pytest.raises(SourceRefused, match="from node to node only, not to clients"):
            await BulkClient(link, asker.checkpoint.model_id).rows(
                [StoredRow(table.name, 0, row_bytes(table))]
            )
        await link.close()

    asking(source, tmp_path, scenario)
