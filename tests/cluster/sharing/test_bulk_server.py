"""What a peer may ask for on a bulk link, and what it does not get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cluster.bulk_peers import Sources, open_sources
from support.models.checkpoints import make_llama

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import TensorPart
from shardnet.checkpoint.tensors.stored_tensor import FileHead
from shardnet.cluster.sharing.bulk_client import BURST_S, BulkClient, SendRate, SourceRefused
from shardnet.cluster.store.local_models import OpenModel
from shardnet.errors import RemoteProtocolError
from shardnet.wire.messages.bulk import FetchHead, FetchPart, Piece, Refused, bulk_frame, read_bulk


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("source"), hidden_size=24, intermediate_size=40)
    (folder / "secret.txt").write_text("not part of the model")
    return folder


def run(
    source: Path,
    tmp_path: Path,
    scenario: Callable[[Sources, BulkClient], Coroutine[Any, Any, None]],
    model_id: str = "",
) -> None:
    """Run a scenario with a client of a source that has one checkpoint."""

    async def main() -> None:
        async with open_sources() as sources:
            sources.add("anna", source, tmp_path / "cache")
            link = await sources.dial("anna")
            wanted = model_id or Checkpoint.open(source).model_id
            await scenario(sources, BulkClient(link, wanted, answer_s=20))
            await link.close()

    asyncio.run(main())


def test_a_skeleton_is_the_model_without_its_tensors(source: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources, client: BulkClient) -> None:
        heads = {head.name: head for head in await client.skeleton()}
        assert heads.keys() == {
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors",
        }
        for name, head in heads.items():
            content = (source / name).read_bytes()
            got = b"".join([bytes(piece) async for _, piece in client.head(head)])
            assert len(content) == head.size_bytes
            assert got == b"".join(content[at : at + n_bytes] for at, n_bytes in head.ranges)
        assert heads["config.json"].head_bytes == heads["config.json"].size_bytes
        assert heads["model.safetensors"].head_bytes < heads["model.safetensors"].size_bytes / 2

    run(source, tmp_path, scenario)


@pytest.mark.parametrize(
    "name",
    ["secret.txt", "../secret.txt", "/etc/passwd", "", ".", "model.safetensors/../secret.txt"],
)
def test_other_files_are_refused_and_the_link_goes_on(
    source: Path, tmp_path: Path, name: str
) -> None:
    async def scenario(sources: Sources, client: BulkClient) -> None:
        with pytest.raises(SourceRefused, match="has no file"):
            await anext(client.head(FileHead(name=name, size_bytes=1, ranges=((0, 1),))))
        assert await client.skeleton()

    run(source, tmp_path, scenario)


@pytest.mark.parametrize(
    ("tensor", "number"), [("lm_head.weight", 1), ("../secret.txt", 0), ("", 0), ("x", 2**32 - 1)]
)
def test_only_parts_of_the_models_tensors_are_given(
    source: Path, tmp_path: Path, tensor: str, number: int
) -> None:
    async def scenario(sources: Sources, client: BulkClient) -> None:
        part = TensorPart(tensor=tensor, number=number, file="f", offset=0, size_bytes=10)
        with pytest.raises(SourceRefused, match=f"no part {number} of tensor {tensor}"):
            await client.piece(client.ask_part(part), 10)
        with pytest.raises(SourceRefused, match=f"no part {number} of tensor {tensor}"):
            await client.digests([part])

    run(source, tmp_path, scenario)


def test_only_models_that_are_here_are_given(source: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources, client: BulkClient) -> None:
        with pytest.raises(SourceRefused, match="is not here any more"):
            await client.skeleton()

    run(source, tmp_path, scenario, "f" * 64)


@pytest.mark.parametrize("model_id", ["../..", "x", "/somewhere/evil"])
def test_a_models_id_that_is_a_path_ends_the_link(
    source: Path, tmp_path: Path, model_id: str
) -> None:
    async def scenario(sources: Sources, client: BulkClient) -> None:
        with pytest.raises(RemoteProtocolError, match="model_id"):
            await client.skeleton()

    run(source, tmp_path, scenario, model_id)


@pytest.mark.parametrize("kind", [KeyError, MemoryError, BaseException])
def test_a_bug_of_ours_ends_its_request_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def stumble(*wrong: object) -> None:
        raise kind("a bug of ours")

    async def scenario(sources: Sources, client: BulkClient) -> None:
        part = TensorPart(tensor="t", number=0, file="f", offset=0, size_bytes=10)
        with monkeypatch.context() as patch:
            patch.setattr(OpenModel, "part", stumble)
            with pytest.raises(SourceRefused, match="internal error in FetchPart"):
                await client.piece(client.ask_part(part), 10)
        assert await client.skeleton()

    run(source, tmp_path, scenario)


def test_a_checkpoint_that_has_changed_is_another_model(source: Path, tmp_path: Path) -> None:
    changed = make_llama(tmp_path / "changed", hidden_size=24, intermediate_size=40)

    async def scenario(sources: Sources, client: BulkClient) -> None:
        (changed / "tokenizer.json").unlink()
        with pytest.raises(SourceRefused, match="is not here any more"):
            await client.skeleton()

    run(changed, tmp_path, scenario)


def test_a_message_that_asks_nothing_ends_the_link(source: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources, client: BulkClient) -> None:
        near = await sources.dial("anna")
        near.send(bulk_frame(Piece(request=1), b"x"))
        with pytest.raises(RemoteProtocolError, match="sent Piece without being asked"):
            await near.receive()
        await near.close()

    run(source, tmp_path, scenario)


def test_answers_come_in_the_order_of_the_requests(source: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources, client: BulkClient) -> None:
        model_id = Checkpoint.open(source).model_id
        for request in (1, 2, 3):
            message: Any = FetchHead(request=request, model_id=model_id, file="config.json")
            if request == 2:
                message = FetchPart(request=2, model_id=model_id, tensor="no", part=0)
            client.link.send(bulk_frame(message))
        answers = [read_bulk(await client.link.receive()) for _ in range(3)]
        assert [answer.request for answer in answers] == [1, 2, 3]
        assert [type(answer) for answer in answers] == [Piece, Refused, Piece]

    run(source, tmp_path, scenario)


@given(
    st.floats(1, 1e9),
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 10)), max_size=50),
)
def test_no_more_is_sent_than_the_rate_and_one_burst(
    bytes_per_s: float, pieces: list[tuple[int, float]]
) -> None:
    """Each piece is booked a pause after the one before was sent."""
    rate, now, sent = SendRate(bytes_per_s), 0.0, 0
    for n_bytes, pause_s in pieces:
        now += pause_s
        now += rate.reserve(n_bytes, now)
        sent += n_bytes
        assert sent <= bytes_per_s * (now + BURST_S) * (1 + 1e-9) + 1


@given(st.floats(1000, 1e9), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50))
def test_the_whole_rate_is_used(bytes_per_s: float, pieces: list[int]) -> None:
    """Links that ask at once wait for no more than what was booked before them."""
    rate = SendRate(bytes_per_s)
    waits = [rate.reserve(n_bytes, 5.0) for n_bytes in pieces]
    assert waits == sorted(waits)
    assert waits[-1] <= sum(pieces) / bytes_per_s


def test_without_a_rate_nobody_waits() -> None:
    rate = SendRate(None)
    assert [rate.reserve(1 << 30, 0.0) for _ in range(3)] == [0.0] * 3
    assert rate.piece_bytes(1000) == 1000


def test_pieces_are_small_enough_to_show_progress() -> None:
    assert SendRate(4000).piece_bytes(1 << 20) == 1000
    assert SendRate(1).piece_bytes(1 << 20) == 1
    assert SendRate(1e9).piece_bytes(1 << 20) == 1 << 20
