"""Fetching weights from several sources: shared out, resumed, checked, and ended by name."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster.bulk_peers import Sources, empty_replica, open_sources, same_bytes
from support.models.checkpoints import make_llama

from shardnet.checkpoint import replica as replica_module
from shardnet.checkpoint import replica_journal
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import Replica, TensorFiles, part_of, range_tensors
from shardnet.checkpoint.tensors import manifest
from shardnet.cluster.sharing import fetching
from shardnet.cluster.sharing.fetching import Fetch, Fetched, FetchTimes
from shardnet.errors import CheckpointError, PeerFailedError, ShardnetError
from shardnet.transport.link import Link
from shardnet.types import LayerRange
from shardnet.wire.framing.frames import Frame
from shardnet.wire.messages.bulk import (
    BulkMessage,
    BulkRequest,
    Digests,
    FetchDigests,
    FetchPart,
    Piece,
    Refused,
)

PART_BYTES = 1000
TIMES = FetchTimes(answer_s=20, redial_s=0)
QUICK = FetchTimes(answer_s=0.05, redial_s=0)
PATIENT_ENOUGH = FetchTimes(answer_s=3, redial_s=0)
"""For one who is silent beside one who is not, and whom a busy machine may hold up."""

Scenario = Callable[[Sources], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replica_module, replica_journal):
        monkeypatch.setattr(module, "WEIGHT_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(fetching, "DIGEST_BYTES", 4 * PART_BYTES)
    monkeypatch.setattr(manifest, "SAMPLE_BYTES", 8)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("source"), hidden_size=24, intermediate_size=40)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return make_llama(
        tmp_path_factory.mktemp("trained"), hidden_size=24, intermediate_size=40, seed=1
    )


@pytest.fixture
def other(source: Path, trained: Path, tmp_path: Path) -> Path:
    """The same model, by its id, with other weights: but for the samples that the id covers."""
    folder = shutil.copytree(trained, tmp_path / "other")
    original, copy = TensorFiles(source), TensorFiles(folder, writable=True)
    for file, ranges in Checkpoint.open(source).samples.items():
        for offset, n_bytes in ranges:
            copy.write(file, offset, memoryview(original.read(file, offset, n_bytes)))
    original.close()
    copy.close()
    assert Checkpoint.open(folder).model_id == Checkpoint.open(source).model_id
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return empty_replica(source, tmp_path / "replica")


def run(scenario: Scenario) -> None:
    async def main() -> None:
        async with open_sources() as sources:
            await scenario(sources)

    asyncio.run(main())


def layers(source: Path, start: int, end: int) -> list[str]:
    return range_tensors(Checkpoint.open(source), LayerRange(start, end))


def n_bytes(source: Path, tensors: Sequence[str]) -> int:
    checkpoint = Checkpoint.open(source)
    return sum(checkpoint.stored[name].size_bytes for name in tensors)


async def fetch(
    sources: Sources,
    folder: Path,
    tensors: Sequence[str],
    *names: str,
    times: FetchTimes = TIMES,
    log: list[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fetched:
    """Fetch tensors into the replica in `folder` from the sources of these names."""
    replica = Replica(folder)
    try:
        return await Fetch(
            model_id=replica.checkpoint.model_id,
            replica=replica,
            sources=names,
            dial=sources.dial,
            writer=sources.disk,
            on_progress=on_progress,
            log=(log if log is not None else []).append,
            times=times,
        ).run(tensors)
    finally:
        await sources.disk.run(replica.close)


class Cut:
    """A link of a source that breaks when so many pieces were sent over all links."""

    def __init__(self, link: Link, left: list[int]) -> None:
        self._link = link
        self._left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, *frames: Frame) -> None:
        if len(frames[0].payload):
            self._left[0] -= 1
            if self._left[0] == 0:
                self._link.abort("cut by the test")
        self._link.send(*frames)


def cut(sources: Sources, name: str, *, after_pieces: int) -> None:
    """Cut the link of a source once."""
    serve, left = sources.serves[name], [after_pieces]
    sources.serves[name] = lambda link: serve(Cut(link, left))  # type: ignore[arg-type]


def test_a_range_comes_whole_and_never_again(source: Path, folder: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources) -> None:
        sources.add("anna", source, tmp_path / "cache")
        reports: list[tuple[int, int]] = []
        first = layers(source, 0, 2)
        fetched = await fetch(
            sources, folder, first, "anna", on_progress=lambda *r: reports.append(r)
        )
        assert fetched == Fetched(n_bytes=n_bytes(source, first), sources=("anna",))
        assert reports[0] == (0, fetched.n_bytes)
        assert reports[-1] == (fetched.n_bytes, fetched.n_bytes)
        assert same_bytes(folder, source, first)
        assert Checkpoint.open(folder).missing(layers(source, 2, 4)) == layers(source, 2, 4)
        assert (await fetch(sources, folder, first, "anna")).n_bytes == 0
        both = layers(source, 1, 3)
        new = [name for name in both if name not in first]
        assert (await fetch(sources, folder, both, "anna")).n_bytes == n_bytes(source, new)
        assert same_bytes(folder, source, both)

    run(scenario)


def test_what_is_all_here_needs_no_source(source: Path, folder: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources) -> None:
        sources.add("anna", source, tmp_path / "cache")
        tensors = layers(source, 0, 1)
        await fetch(sources, folder, tensors, "anna")
        sources.serves.clear()
        assert (await fetch(sources, folder, tensors, "anna")).n_bytes == 0
        assert (await fetch(sources, folder, tensors)).n_bytes == 0
        with pytest.raises(
            PeerFailedError, match=r"no node sends .* \(anna: nothing answers at an"
        ):
            await fetch(sources, folder, layers(source, 1, 2), "anna")
        with pytest.raises(PeerFailedError, match="no node to ask"):
            await fetch(sources, folder, layers(source, 1, 2))

    run(scenario)


def test_several_sources_share_the_work(source: Path, folder: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources) -> None:
        for name in ("anna", "bert"):
            sources.add(name, source, tmp_path / name)
        tensors = layers(source, 0, 4)
        fetched = await fetch(sources, folder, tensors, "anna", "bert")
        assert set(fetched.sources) == {"anna", "bert"}
        assert fetched.n_bytes == n_bytes(source, tensors)
        assert same_bytes(folder, source, tensors)

    run(scenario)


def test_after_a_cut_the_fetch_goes_on_from_what_is_there(
    source: Path, folder: Path, tmp_path: Path
) -> None:
    async def scenario(sources: Sources) -> None:
        sources.add("anna", source, tmp_path / "cache")
        cut(sources, "anna", after_pieces=20)
        tensors = layers(source, 0, 4)
        fetched = await fetch(sources, folder, tensors, "anna")
        assert fetched.n_bytes == n_bytes(source, tensors), "no part came twice"
        assert sources.dialled.count("anna") == 3, "for digests, for parts, and again"
        assert same_bytes(folder, source, tensors)

    run(scenario)


def test_who_dies_is_left_and_the_others_finish(source: Path, folder: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources) -> None:
        for name in ("anna", "bert"):
            sources.add(name, source, tmp_path / name)

        async def die(link: Link) -> None:
            await link.receive()
            link.abort("dies")

        sources.serves["bert"] = die
        log: list[str] = []
        tensors = layers(source, 0, 4)
        fetched = await fetch(sources, folder, tensors, "anna", "bert", log=log)
        assert fetched.sources == ("anna",)
        assert same_bytes(folder, source, tensors)

    run(scenario)


def silent(message: BulkMessage) -> list[tuple[BulkMessage, bytes]]:
    return []


def test_who_is_silent_is_left_and_the_others_finish(
    source: Path, folder: Path, tmp_path: Path
) -> None:
    """Though it is the first, which tells the digests."""

    async def scenario(sources: Sources) -> None:
        sources.add("bert", source, tmp_path / "cache")
        sources.script("anna", silent)
        tensors = layers(source, 0, 1)
        fetched = await fetch(sources, folder, tensors, "anna", "bert", times=PATIENT_ENOUGH)
        assert fetched.sources == ("bert",)
        assert same_bytes(folder, source, tensors)

    run(scenario)


def test_when_all_are_gone_each_is_named_with_why(source: Path, folder: Path) -> None:
    async def scenario(sources: Sources) -> None:
        sources.script("anna", silent)
        with pytest.raises(PeerFailedError) as caught:
            await fetch(sources, folder, layers(source, 0, 1), "anna", "bert", times=QUICK)
        assert "anna (anna): anna (" in str(caught.value)
        assert "gave nothing of what it was asked for within 0.05 s" in str(caught.value)
        assert "bert: nothing answers at bert" in str(caught.value)

    run(scenario)


def change(folder: Path, tensor: str) -> None:
    """Change the first bytes of a tensor, so that no header, no size and no sample tells."""
    info = Checkpoint.open(folder).stored[tensor]
    files = TensorFiles(folder, writable=True)
    files.write(info.file, info.offset, memoryview(b"changed!"))
    files.close()
    now = (folder / info.file).stat().st_mtime_ns
    os.utime(folder / info.file, ns=(now, now + 10**9))  # clocks of files tick some ms apart


def test_a_source_with_other_weights_is_left_and_named(
    source: Path, other: Path, folder: Path, tmp_path: Path
) -> None:
    async def scenario(sources: Sources) -> None:
        sources.add("anna", source, tmp_path / "anna")
        sources.add("bert", other, tmp_path / "bert")
        log: list[str] = []
        tensors = layers(source, 0, 4)
        await fetch(sources, folder, tensors, "anna", "bert", log=log)
        assert same_bytes(folder, source, tensors)
        assert [line for line in log if "no more weights from bert" in line and "anna" in line]

    run(scenario)


def digests_only(checkpoint: Path) -> Callable[[BulkMessage], list[tuple[BulkMessage, bytes]]]:
    """A source that tells the digests of a checkpoint and refuses its parts."""

    def answer(message: BulkMessage) -> list[tuple[BulkMessage, bytes]]:
        match message:
            case FetchDigests(request=request, parts=parts):
                files, opened = TensorFiles(checkpoint), Checkpoint.open(checkpoint)
                sha256 = [files.digest(part_of(opened, p.tensor, p.part)) for p in parts]
                files.close()
                return [(Digests(request=request, sha256=[*sha256]), b"")]
            case _:
                return [(Refused(request=message.request, code=10, message="my disk broke"), b"")]

    return answer


def test_weights_that_are_wrong_everywhere_are_an_error_that_names_all(
    source: Path, other: Path, folder: Path, tmp_path: Path
) -> None:
    async def scenario(sources: Sources) -> None:
        sources.script("anna", digests_only(source))
        sources.add("bert", other, tmp_path / "bert")
        sources.add("cleo", other, tmp_path / "cleo")
        with pytest.raises(CheckpointError) as caught:
            await fetch(sources, folder, ["lm_head.weight"], "anna", "bert", "cleo")
        for name in ("anna", "bert", "cleo", "lm_head.weight", "the checkpoints differ"):
            assert name in str(caught.value)
        assert Checkpoint.open(folder).missing(["lm_head.weight"]) == ["lm_head.weight"]

    run(scenario)


def test_a_refusal_is_told(source: Path, folder: Path) -> None:
    async def scenario(sources: Sources) -> None:
        sources.script("anna", digests_only(source))
        with pytest.raises(PeerFailedError, match=r"anna .*my disk broke"):
            await fetch(sources, folder, ["lm_head.weight"], "anna")

    run(scenario)


def test_digests_of_two_checkpoints_are_not_mixed(
    source: Path, other: Path, folder: Path, tmp_path: Path
) -> None:
    """The first source tells some digests and is gone; the next one has other weights.

    Whether its digests or its parts are seen first, nothing of it is held.
    """

    async def scenario(sources: Sources) -> None:
        answer, n_sent = digests_only(source), [0]
        source_tensors = list(Checkpoint.open(source).stored)

        def script(message: BulkMessage) -> list[tuple[BulkMessage, bytes]] | None:
            n_sent[0] += isinstance(message, FetchDigests)
            return answer(message) if n_sent[0] == 1 else None

        sources.script("anna", script)
        sources.add("bert", other, tmp_path / "bert")
        with pytest.raises(CheckpointError, match=r"hold different weights|is not what anna"):
            await fetch(sources, folder, layers(source, 0, 4), "anna", "bert")
        assert Checkpoint.open(folder).missing(source_tensors) == source_tensors

    run(scenario)


def test_weights_that_the_source_has_changed_come_again(
    source: Path, other: Path, folder: Path, tmp_path: Path
) -> None:
    async def scenario(sources: Sources) -> None:
        sources.add("anna", other, tmp_path / "anna")
        tensors = layers(source, 0, 1)
        await fetch(sources, folder, tensors, "anna")
        sources.add("anna", source, tmp_path / "again")
        assert (await fetch(sources, folder, tensors, "anna")).n_bytes > 0
        assert same_bytes(folder, source, tensors)

    run(scenario)


def test_a_source_knows_digests_of_files_as_they_are_now(
    other: Path, folder: Path, tmp_path: Path
) -> None:
    async def scenario(sources: Sources) -> None:
        copy = Path(shutil.copytree(other, tmp_path / "copy"))
        sources.add("anna", copy, tmp_path / "anna")
        await fetch(sources, folder, ["lm_head.weight"], "anna")
        change(copy, "lm_head.weight")
        assert (await fetch(sources, folder, ["lm_head.weight"], "anna")).n_bytes == PART_BYTES
        assert same_bytes(folder, copy, ["lm_head.weight"])

    run(scenario)


def test_a_replica_gives_what_it_holds(source: Path, folder: Path, tmp_path: Path) -> None:
    """Two nodes with a half each are enough for a third one, though neither tells all digests."""

    async def scenario(sources: Sources) -> None:
        sources.add("anna", source, tmp_path / "cache")
        model_id = Checkpoint.open(source).model_id
        for name, (start, end) in (("bert", (0, 2)), ("cleo", (2, 4))):
            half = empty_replica(source, tmp_path / name / "models" / model_id)
            await fetch(sources, half, layers(source, start, end), "anna")
            sources.add(name, tmp_path / "none", tmp_path / name)
        tensors = layers(source, 0, 4)
        fetched = await fetch(sources, folder, tensors, "bert", "cleo")
        assert set(fetched.sources) == {"bert", "cleo"}
        assert same_bytes(folder, source, tensors)

    run(scenario)


def test_damage_on_this_disk_is_found_and_mended(
    source: Path, folder: Path, tmp_path: Path
) -> None:
    async def scenario(sources: Sources) -> None:
        sources.add("anna", source, tmp_path / "cache")
        tensors = layers(source, 0, 2)
        await fetch(sources, folder, tensors, "anna")
        change(folder, "model.embed_tokens.weight")
        log: list[str] = []
        fetched = await fetch(sources, folder, tensors, "anna", log=log)
        assert fetched.n_bytes == PART_BYTES
        assert "damaged" in log[0]
        assert same_bytes(folder, source, tensors)

    run(scenario)


def test_what_came_before_a_cancel_stays(source: Path, folder: Path, tmp_path: Path) -> None:
    async def scenario(sources: Sources) -> None:
        sources.add("anna", source, tmp_path / "cache")
        tensors = layers(source, 0, 4)
        some_came = asyncio.Event()

        def progress(done: int, total: int) -> None:
            if done > total / 2:
                some_came.set()

        task = asyncio.create_task(fetch(sources, folder, tensors, "anna", on_progress=progress))
        await some_came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rest = await fetch(sources, folder, tensors, "anna")
        assert 0 < rest.n_bytes < n_bytes(source, tensors) * 0.6
        assert same_bytes(folder, source, tensors)

    run(scenario)


def lie(answer: Callable[[BulkRequest], list[tuple[BulkMessage, bytes]]], source: Path) -> Any:
    """A source that tells good digests and answers FetchPart as it likes."""
    digests = digests_only(source)

    def script(message: BulkMessage) -> list[tuple[BulkMessage, bytes]]:
        return answer(message) if isinstance(message, FetchPart) else digests(message)

    return script


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda m: [(Piece(request=m.request), bytes(2000))], "a piece of 2000 bytes where"),
        (lambda m: [(Piece(request=m.request), b"")], "a piece of 0 bytes where"),
        (lambda m: [(Piece(request=m.request + 7), b"x")], "sent Piece 8 where Piece 1 was to"),
        (lambda m: [(Digests(request=m.request, sha256=[]), b"")], "sent Digests 1 where Piece 1"),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_named(
    source: Path, folder: Path, answer: Any, words: str
) -> None:
    async def scenario(sources: Sources) -> None:
        sources.script("anna", lie(answer, source))
        with pytest.raises(ShardnetError, match=f"anna .*{words}"):
            await fetch(sources, folder, ["model.norm.weight"], "anna")

    run(scenario)


def test_too_few_digests_are_named(source: Path, folder: Path) -> None:
    async def scenario(sources: Sources) -> None:
        sources.script("anna", lambda m: [(Digests(request=m.request, sha256=[]), b"")])
        with pytest.raises(PeerFailedError, match="sent 0 digests of 1 parts"):
            await fetch(sources, folder, ["model.norm.weight"], "anna")

    run(scenario)
