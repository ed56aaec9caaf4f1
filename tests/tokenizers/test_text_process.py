"""A tokenizer's processes: started once, the same after a new start, and gone when it is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.models import small_tokenizers as small
from support.models.loaded_tokenizers import load_here, made_tokenizer, tokenizer_of

from shardnet.cluster.head.ring_builder import _open_tokenizer
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import CapacityError, CheckpointError, UsageError
from shardnet.tokenizers import tokenizer as tokenizer_module
from shardnet.tokenizers.tokenizer import ENCODE, TextProcess, Tokenizer

TEXT = small.TEXT[2]
GONE_S = 60.0


def pid_of(tokenizer: Tokenizer) -> int | None:
    """The process that encodes, if it runs."""
    coder = tokenizer._coder
    assert isinstance(coder, TextProcess)
    return coder.pid


def kill(tokenizer: Tokenizer) -> None:
    """End the process that encodes, as the system does when memory runs out."""
    pid = pid_of(tokenizer)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while pid_of(tokenizer) is not None:
        os.sched_yield()


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "wordpiece"])
def test_a_tokenizer_in_a_process_is_the_one_in_this(kind: str, tmp_path: Path) -> None:
    folder = small.save(tmp_path, small.KINDS[kind](), tokenizer_config={"bos_token": "<s>"})
    here = load_here(folder)
    with Tokenizer.load(folder) as tokenizer:
        for bos in ("auto", "on", "off"):
            for parse in (True, False):
                ids = tokenizer.encode("<|end|> the cats", bos=bos, parse_special=parse)
                assert ids == here.encode("<|end|> the cats", bos=bos, parse_special=parse)
                assert tokenizer.decode(ids) == here.decode(ids)
        assert [tokenizer.token_bytes(n) for n in range(tokenizer.n_tokens)] == [
            here.token_bytes(n) for n in range(here.n_tokens)
        ]
        assert (tokenizer.bos_id, tokenizer.special_ids) == (1, here.special_ids)
        with pytest.raises(UsageError, match="half a surrogate pair at character 1"):
            tokenizer.encode("a\ud83d")


def test_files_are_read_once_for_all_who_use_them(tmp_path: Path) -> None:
    """The second has a process only when it encodes; a changed file is another tokenizer."""
    small.save(tmp_path, small.byte_level())
    with Tokenizer.load(tmp_path) as first, Tokenizer.load(tmp_path) as second:
        assert (pid_of(first) is None, pid_of(second) is None) == (False, True)
        assert second.table is first.table
        assert second.encode(TEXT) == first.encode(TEXT)
        assert pid_of(second) not in (None, pid_of(first))
        small.save(tmp_path, small.metaspace())
        with Tokenizer.load(tmp_path) as third:
            assert third.n_tokens != first.n_tokens


def test_a_process_that_is_gone_is_replaced(tmp_path: Path) -> None:
    with Tokenizer.load(small.save(tmp_path, small.byte_level())) as tokenizer:
        ids = tokenizer.encode(TEXT)
        kill(tokenizer)
        assert tokenizer.decode(ids) == TEXT
        assert tokenizer.encode(TEXT) == ids


def test_a_text_that_waits_outlives_the_process_of_the_one_before_it(tmp_path: Path) -> None:
    """One that ends its process fails alone."""
    with Tokenizer.load(small.save(tmp_path, small.byte_level())) as tokenizer:
        ids = tokenizer.encode(TEXT)
        coder = tokenizer._coder
        assert isinstance(coder, TextProcess)
        turn = coder._process._turn
        turn.acquire()
        waits = threading.Event()
        with ThreadPoolExecutor() as threads, pytest.MonkeyPatch.context() as patch:
            call = coder._call
            patch.setattr(coder, "_call", lambda *asked: (waits.set(), call(*asked))[1])
            waiting = threads.submit(tokenizer.encode, TEXT)
            assert waits.wait(GONE_S)
            kill(tokenizer)
            turn.release()
            assert waiting.result(GONE_S) == ids


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_text_that_fails_is_the_fault_of_who_sent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    """Where a plain text fails too it is the tokenizer's."""
    with Tokenizer.load(small.save(tmp_path, small.byte_level())) as tokenizer:
        monkeypatch.setattr(tokenizer_module, "ENCODE", replace(ENCODE, reply_bytes=1024))
        assert tokenizer.encode(TEXT)
        if is_changed:
            small.save(tmp_path, small.metaspace())
        with pytest.raises(CheckpointError if is_changed else UsageError, match=r"tokenizer\.json"):
            tokenizer.encode("b a " * 999)
        if not is_changed:
            assert tokenizer.encode(TEXT)


def test_a_file_that_has_changed_is_not_taken_for_the_one_that_was_read(tmp_path: Path) -> None:
    with Tokenizer.load(small.save(tmp_path, small.byte_level())) as tokenizer:
        kill(tokenizer)
        small.save(tmp_path, small.metaspace())
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer's files have"):
            tokenizer.encode(TEXT)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    """As many of the longest token as there is room for are encoded."""
    tokenizer = tokenizer_of("byte_level")
    longest = max(len(tokenizer.token_bytes(n)) for n in range(tokenizer.n_tokens))
    assert longest < 20
    assert tokenizer.encode("a" * 10 * longest, most_tokens=10)
    with pytest.raises(CapacityError, match=r"has .* characters and at most 10 tokens"):
        tokenizer.encode("a" * (10 * longest + 1), most_tokens=10)
    alone = made_tokenizer(small.plain_words())
    assert alone.encode("x" * 50, most_tokens=10)


def test_a_tokenizer_that_nobody_waits_for_any_more_is_closed(tmp_path: Path) -> None:
    small.save(tmp_path, small.byte_level())
    before = {child.pid for child in psutil.Process().children()}

    async def main() -> None:
        disk = DiskJobs("disk")
        opening = asyncio.create_task(_open_tokenizer(disk, tmp_path))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        disk.close()

    asyncio.run(main())
    left = [child for child in psutil.Process().children() if child.pid not in before]
    assert psutil.wait_procs(left, timeout=GONE_S)[1] == []


def test_closing_ends_all_its_processes(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    before = {child.pid for child in psutil.Process().children()}
    with closing(Tokenizer.load(small.save(tmp_path, small.wordpiece()))) as tokenizer:
        assert tokenizer.chat_prompt([{"role": "user", "content": "hi"}]) == "hi"
        running = [child for child in psutil.Process().children() if child.pid not in before]
        assert len(running) == 3  # encodes, decodes, renders
    assert psutil.wait_procs(running, timeout=GONE_S)[1] == []
    with pytest.raises(CheckpointError, match="its process is closed"):
        tokenizer.encode("the")
