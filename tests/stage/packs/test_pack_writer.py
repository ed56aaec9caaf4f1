"""Rounded weights are written while others are packed: what is kept, and what ends the writing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardnet.model.config.panel_form import Quantization
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.packs.pack_writer import PackWriter

INT4 = Quantization.INT4
TIMEOUT_S = 20.0


class SlowCache(PackCache):
    """A disk that takes what is given to it only when the test lets it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "one", "m", INT4)
        self.begun = threading.Semaphore(0)
        self.let = threading.Event()

    def put(
        self,
        names: Sequence[str],
        kind: Quantization,
        packed: Tensor,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        def slowly() -> None:
            self.begun.release()
            while not self.let.wait(0.01):
                alive()

        super().put(names, kind, packed, slowly)

    def holds(self, name: str) -> bool:
        found = self.get([name], INT4, (1000,))
        return found is not None and torch.equal(found, some())


def some() -> Tensor:
    return (torch.arange(1000) % 251).to(torch.uint8)


def written(folder: Path) -> list[str]:
    return sorted(path.suffix or path.name[:5] for path in folder.rglob("*") if path.is_file())


def test_nobody_waits_for_the_disk_and_all_is_kept(tmp_path: Path) -> None:
    packs = SlowCache(tmp_path)
    writer = PackWriter(packs)
    with writer:
        for name in "abc":
            writer.put([name], INT4, some())
    assert packs.begun.acquire(timeout=TIMEOUT_S)
    assert not packs.holds("a"), "what is not finished is not there"
    packs.let.set()
    writer.finish()
    assert all(packs.holds(name) for name in "abc")


def test_an_error_in_loading_ends_the_writing(tmp_path: Path) -> None:
    packs = SlowCache(tmp_path)

    def fail(writer: PackWriter) -> None:
        with writer:
            writer.put(["a"], INT4, some())
            writer.put(["b"], INT4, some())
            assert packs.begun.acquire(timeout=TIMEOUT_S)
            raise KeyError("told to end")

    with pytest.raises(KeyError):
        fail(PackWriter(packs))
    assert written(tmp_path) == [".json"]
    assert not packs.begun.acquire(blocking=False), "the second one was not begun"


def test_a_stage_that_is_let_go_lets_go_of_its_weights(tmp_path: Path) -> None:
    packs = SlowCache(tmp_path)
    writer = PackWriter(packs)
    with writer:
        writer.put(["a"], INT4, some())
        writer.put(["b"], INT4, some())
    assert packs.begun.acquire(timeout=TIMEOUT_S)
    [thread] = [t for t in threading.enumerate() if t.name.startswith("shardnet-packs-put")]
    del writer
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert written(tmp_path) == [".json"]


def test_a_program_that_ends_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = SlowCache(tmp_path)
    writer = PackWriter(packs)
    writer.put(["a"], INT4, some())
    assert packs.begun.acquire(timeout=TIMEOUT_S)
    ended = threading.Thread(target=list)
    ended.start()
    ended.join()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    writer.finish()
    assert written(tmp_path) == [".json"]


def test_what_waits_for_the_disk_says_that_it_is_alive(tmp_path: Path) -> None:
    packs = SlowCache(tmp_path)
    writer = PackWriter(packs)
    writer.put(["a"], INT4, some())
    writer.finish(packs.let.set)
    assert packs.holds("a")


def test_our_own_mistakes_in_writing_come_out(tmp_path: Path) -> None:
    class Broken(PackCache):
        def put(self, *arguments: object) -> None:
            raise ZeroDivisionError

    writer = PackWriter(Broken(tmp_path, "one", "m", INT4))
    writer.put(["a"], INT4, some())
    with pytest.raises(ZeroDivisionError):
        writer.finish()
