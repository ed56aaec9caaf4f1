"""Rounded weights on disk: found again, noticed when damaged, and deleted when there is no room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.full_disk import full_disk
from support.models.checkpoints import make_decoder, make_llama
from support.rings.stage_chain import CPU, StageChain, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.files import CacheFolder
from shardnet.model.config.panel_form import Quantization
from shardnet.stage import stored_weights
from shardnet.stage.load import load_stage
from shardnet.stage.packs import pack_cache
from shardnet.stage.packs.pack_cache import PackCache, packed_models
from shardnet.stage.stage_model import StageModel
from shardnet.types import DType, LayerRange

INT4 = Quantization.INT4
NAMES = ["layers.0.q_proj", "layers.0.k_proj"]


def cache(folder: Path, identity: str = "one") -> PackCache:
    return PackCache(folder, identity, f"/models/{identity}", INT4)


def some(n_bytes: int = 1000) -> torch.Tensor:
    return (torch.arange(n_bytes) % 251).to(torch.uint8)


def test_what_was_put_is_found_by_the_same_name_only(tmp_path: Path) -> None:
    packs = cache(tmp_path)
    assert packs.get(NAMES, INT4, (1000,)) is None
    packs.put(NAMES, INT4, some())
    found = packs.get(NAMES, INT4, (10, 100))
    assert found is not None
    assert torch.equal(found.flatten(), some())
    assert packs.get(NAMES[:1], INT4, (1000,)) is None
    assert packs.get(NAMES, Quantization.INT8, (1000,)) is None
    assert cache(tmp_path, "other").get(NAMES, INT4, (1000,)) is None
    assert cache(tmp_path).get(NAMES, INT4, (1000,)) is not None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte": lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
    "two pieces that changed places": lambda data: (
        data[:32] + data[96:160] + data[32:96] + data[160:]
    ),
    "its digest": lambda data: bytes(32) + data[32:],
    "the end": lambda data: data[:-1],
    "more": lambda data: data + b"x",
    "all": lambda data: b"",
}


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_not_there(
    tmp_path: Path, damage: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_cache, "_PIECE_BYTES", piece_bytes)
    packs = cache(tmp_path)
    packs.put(NAMES, INT4, some())
    [file] = tmp_path.rglob("*.packed")
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert packs.get(NAMES, INT4, (1000,)) is None
    packs.put(NAMES, INT4, some())
    assert packs.get(NAMES, INT4, (1000,)) is not None


def test_reading_and_writing_say_how_far_they_are_and_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_cache, "_PIECE_BYTES", 300)
    packs, came = cache(tmp_path), list[int]()

    class GivenUp(Exception):
        pass

    def give_up(*_: object) -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        packs.put(NAMES, INT4, some(), give_up)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["about.json"]
    packs.put(NAMES, INT4, some())
    with pytest.raises(GivenUp):
        packs.get(NAMES, INT4, (1000,), give_up)
    assert packs.get(NAMES, INT4, (1000,), came.append) is not None
    assert came == [300, 300, 300, 100]


def test_a_folder_that_cannot_be_written_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    packs = cache(tmp_path / "file")
    packs.put(NAMES, INT4, some())
    assert packs.get(NAMES, INT4, (1000,)) is None


def test_on_a_full_disk_nothing_is_begun_that_would_hide_what_comes_later(tmp_path: Path) -> None:
    with full_disk(10):
        cache(tmp_path).put(NAMES, INT4, some())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    cache(tmp_path).put(NAMES, INT4, some())
    assert len(packed_models(tmp_path)) == 1


def test_the_oldest_goes_when_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10_000

    def disk(folder: object) -> shutil._ntuple_diskusage:
        return shutil._ntuple_diskusage(0, 0, free)

    monkeypatch.setattr(pack_cache.shutil, "disk_usage", disk)
    for age, name in ((300, "old"), (200, "mid"), (100, "new")):
        cache(tmp_path, name).put(NAMES, INT4, some(1000))
        [about] = [m.folder / "about.json" for m in packed_models(tmp_path) if name in m.model]
        os.utime(about, (1e9 - age, 1e9 - age))
    assert [model.model for model in packed_models(tmp_path)] == [
        *("/models/new", "/models/mid", "/models/old")
    ]
    cache(tmp_path, "old").touch()
    free = 4000  # (4000 + 3 * ~1070) / 2 leaves room for three
    cache(tmp_path, "more").put(NAMES, INT4, some(1000))
    assert {model.model for model in packed_models(tmp_path)} == {
        *("/models/old", "/models/new", "/models/more")
    }
    cache(tmp_path, "huge").put(NAMES, INT4, some(100_000))
    assert cache(tmp_path, "huge").get(NAMES, INT4, (100_000,)) is None
    for model in packed_models(tmp_path):
        model.remove()
    assert not list(tmp_path.rglob("*.packed"))


def test_what_was_deleted_stays_deleted_though_a_load_goes_on(tmp_path: Path) -> None:
    packs = cache(tmp_path)
    packs.put(NAMES, INT4, some())

    def delete() -> None:
        for model in packed_models(tmp_path):
            model.remove()

    packs.put(["begun"], INT4, some(3 << 20), delete)
    packs.put(["later"], INT4, some())
    assert list(tmp_path.iterdir()) == []
    cache(tmp_path).put(NAMES, INT4, some())
    assert cache(tmp_path).get(NAMES, INT4, (1000,)) is not None


def test_what_a_process_left_while_it_deleted_goes_when_room_is_looked_for(tmp_path: Path) -> None:
    cache(tmp_path).put(NAMES, INT4, some())
    [kept] = packed_models(tmp_path)
    kept.folder.rename(tmp_path / ".gone-1-some")
    assert packed_models(tmp_path) == []
    cache(tmp_path, "other").put(NAMES, INT4, some())
    assert [path.name for path in tmp_path.iterdir()] == [
        model.folder.name for model in packed_models(tmp_path)
    ]


def test_a_file_that_gets_its_name_while_it_is_counted_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(tmp_path).put(NAMES, INT4, some())
    [kept] = packed_models(tmp_path)
    list_files = Path.iterdir

    def with_one_more(folder: Path) -> list[Path]:
        return [folder / ".new-just-finished", *list_files(folder)]

    monkeypatch.setattr(Path, "iterdir", with_one_more)
    assert packed_models(tmp_path) == [kept]


def test_a_load_looks_at_the_folder_only_when_room_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    free = 12_000

    def look(folder: Path) -> list[CacheFolder]:
        looks.append(folder)
        return packed_models(folder)

    def disk(folder: object) -> shutil._ntuple_diskusage:
        return shutil._ntuple_diskusage(0, 0, free)

    monkeypatch.setattr(pack_cache.shutil, "disk_usage", disk)
    packs = cache(tmp_path)
    monkeypatch.setattr(pack_cache, "packed_models", look)
    for number in range(5):  # 5000 bytes: there is room for half of what is free
        packs.put([f"layers.{number}"], INT4, some(1000))
    assert len(looks) == 1
    free = 3000
    for number in range(5, 15):
        packs.put([f"layers.{number}"], INT4, some(1000))
    assert len(looks) == 2, "there is no room, and that is remembered"
    found = [packs.get([f"layers.{number}"], INT4, (1000,)) is not None for number in range(15)]
    assert found == [True] * 5 + [False] * 10


# --- a stage


def load(folder: Path, packs: PackCache | None, said: list[tuple[int, int]]) -> StageModel:
    return load_stage(
        Checkpoint.open(folder),
        LayerRange(0, 4),
        choice=probed(CPU, DType.FLOAT32, None, INT4),
        device=CPU,
        room_blocks=8,
        progress=lambda done, total: said.append((done, total)),
        packs=packs,
    )


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "gpt_oss"])
def test_the_second_load_rounds_nothing_and_gives_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts included, each by itself."""
    folder = tmp_path / "model"
    if kind == "gpt_oss":
        make_decoder(folder, kind)
    else:
        make_llama(folder, tie_word_embeddings=kind == "llama, tied")
    prompt = random_prompt(20, 300)
    said: list[tuple[int, int]] = []
    packs = cache(tmp_path / "packs")
    plain = StageChain([load(folder, None, said)]).prefill(0, prompt)
    first = load(folder, packs, said)
    assert torch.equal(StageChain([first]).prefill(0, prompt), plain)
    first.finish_packs()

    def fail(*_: object) -> None:
        raise AssertionError("rounded again")

    monkeypatch.setattr(stored_weights, "pack_all", fail)
    said.clear()
    again = load(folder, packs, said)
    assert torch.equal(StageChain([again]).prefill(0, prompt), plain)
    assert said[-1][0] == said[-1][1]
    assert said == sorted(said)
