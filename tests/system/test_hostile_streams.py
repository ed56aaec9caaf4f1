"""Running streams, while another member and local files do their worst to the node.

Each stream has the text that it has undisturbed and never stands still; the process lives on, and
gives back what memory it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from support.hostile.corpus import (
    FRAMES,
    good_checkpoint,
    hostile_checkpoints,
    hostile_tokenizers,
)
from support.hostile.hostile_files import CASES
from support.hostile.mutate_frames import sealed
from support.soak import is_soak
from support.system.nodes import Machine, NodeProcess
from support.system.parrot import Parrots
from support.system.strangers import connected, hello

from shardnet.api import ModelChoice, RequestState
from shardnet.api.client import connect
from shardnet.errors import BusyError, CheckpointError, ShardnetError
from shardnet.wire.framing.frames import PREAMBLE
from shardnet.wire.messages.handshake import PeerRole, Purpose

N_STREAMS = 8 if is_soak() else 4
N_TOKENS = 60
PAUSE_S = 0.2
"""Between a text and the next one of the same stream: without it four streams take a core."""
CONTEXT = 512
N_WARM = 8 * N_STREAMS
"""Texts after which the slots that stay warm take all the memory that they ever do."""
GAP_S = 3.0
"""Three times the promise: no stream stands still for a second."""
QUICK = ("charsmap_cut_short", "charsmap_out_of_bounds", "template_without_token")
"""Tokenizers that fail at once; tests/hostile has a test for each."""
N_HARMLESS = 5
"""Cases that a plan does not read: tokenizers, and the ids that end a text."""
GROWTH_BYTES = 48 << 20
"""What allocators and threads may keep more of, also on a busy machine. A file whose lengths are
believed takes hundreds of MiB, and so does a leak in what the frames are read into.
"""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Streams:
    """Requests of several people, each with a client of its own, one after the other."""

    def __init__(self, choice: ModelChoice) -> None:
        self._choice = choice
        self._ends = asyncio.Event()
        self._more = asyncio.Condition()
        self.pause_s = 0.0
        self.n_texts = 0
        self.longest_gap_s = 0.0

    async def run(self, number: int) -> None:
        """Ask again and again; check every text, and when its pieces came."""
        async with connect(self._choice.nodes[0]) as client:
            while not self._ends.is_set():
                at = [time.monotonic()]
                text = ""
                asked = client.generate(
                    LETTERS[number], model=self._choice, max_tokens=N_TOKENS, ignore_eos=True
                )
                async for event in asked:
                    at.append(time.monotonic())
                    text += event.text
                    assert event.error is None, event.error
                assert event.state is RequestState.FINISHED
                turned = LETTERS[number + 1 :] + LETTERS[: number + 1]
                assert text == (turned * N_TOKENS)[:N_TOKENS]
                gaps_s = [later - earlier for earlier, later in pairwise(at)]
                self.longest_gap_s = max(self.longest_gap_s, *gaps_s)
                async with self._more:
                    self.n_texts += 1
                    self._more.notify_all()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.pause_s):
                        await self._ends.wait()

    async def have_come(self, n_texts: int) -> None:
        """Wait for so many texts."""
        async with self._more:
            await self._more.wait_for(lambda: self.n_texts >= n_texts)

    def end(self) -> None:
        """Let each running text end, and ask for no more."""
        self._ends.set()


def say_to(node: NodeProcess, purpose: Purpose, frames: bytes) -> None:
    """Be a member that opens a link and sends these frames."""
    ring = {"ring": "none"} if purpose is Purpose.DATA else {}
    greeting = PREAMBLE + hello(purpose=purpose, role=PeerRole.NODE, **ring)
    with contextlib.suppress(OSError), connected(node, greeting + frames) as connection:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def frames_in_corpus() -> Iterator[tuple[Purpose, bytes]]:
    """Every frame on every kind of link."""
    for path in sorted(FRAMES.glob("*.bin")):
        for purpose in Purpose:
            yield purpose, sealed(path.read_bytes())


def test_streams_go_on_whatever_a_member_and_files_do(
    machine: Machine, parrots: Parrots, tmp_path: Path
) -> None:
    [node] = machine.start_nodes("anna", arguments=["--memory", "80MB"])
    choice = ModelChoice(model=str(parrots.alphabet), nodes=[node.address], context=CONTEXT)

    checkpoints = [*hostile_checkpoints(tmp_path / "files")]
    tokenizers = [*hostile_tokenizers(tmp_path / "tokenizers", parrots.alphabet)]
    quick = [path for path in tokenizers if path.name in QUICK]

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            async with connect(node.address) as client:
                await client.complete("a", model=choice, max_tokens=2, ignore_eos=True)
                measured = ModelChoice(model=str(good_checkpoint(tmp_path / "good")))
                await client.plan(measured)  # what measuring takes, it keeps
            streams = Streams(choice)
            running = [tasks.create_task(streams.run(number)) for number in range(N_STREAMS)]
            before = await settled_bytes(node, streams, N_WARM)
            streams.pause_s = PAUSE_S
            n_refused = await ask_for_files(node, checkpoints)
            for purpose, frames in frames_in_corpus():
                await asyncio.to_thread(say_to, node, purpose, frames)
            streams.pause_s = 0.0
            async with connect(node.address) as client:
                long = client.generate("a", model=choice, max_tokens=CONTEXT - 1, ignore_eos=True)
                async with contextlib.aclosing(long):
                    await anext(long)  # all others may be between two texts at once
                    await ask_for_tokenizers(node, tokenizers, BusyError)
            after = await settled_bytes(node, streams, streams.n_texts + 2 * N_STREAMS)
            streams.end()
            await asyncio.wait(running)
            await ask_for_tokenizers(node, quick, CheckpointError)
            async with connect(node.address) as client:
                [said] = await client.complete("a", model=choice, max_tokens=3, ignore_eos=True)
                assert said.text == "bcd"
        print(
            f"{n_refused} files refused, {streams.n_texts} texts, longest gap "
            f"{streams.longest_gap_s:.3f} s, {before / 2**20:.1f} MiB before, "
            f"{after / 2**20:.1f} MiB after"
        )
        assert n_refused >= len(CASES) - N_HARMLESS
        assert streams.longest_gap_s < GAP_S
        assert after <= before + GROWTH_BYTES

    asyncio.run(main())
    assert node.process.poll() is None


async def ask_for_tokenizers(
    node: NodeProcess, checkpoints: Sequence[Path], refused: type[ShardnetError]
) -> None:
    """Ask for a text of a model with each hostile tokenizer, which is refused."""
    async with connect(node.address) as client:
        for path in checkpoints:
            choice = ModelChoice(model=str(path), nodes=[node.address])
            with pytest.raises(refused):
                await client.complete("a" * 40, model=choice, max_tokens=3, ignore_eos=True)


async def settled_bytes(node: NodeProcess, streams: Streams, n_texts: int) -> int:
    """Return the node's resident memory once so many texts have come."""
    await streams.have_come(n_texts)
    return int(psutil.Process(node.pid).memory_info().rss)


async def ask_for_files(node: NodeProcess, checkpoints: Sequence[Path]) -> int:
    """Ask the node to plan with every model of the corpus, as any client may.

    Return how many it refused by name.
    """
    n_refused = 0
    async with connect(node.address) as client:
        for path in checkpoints:
            try:
                await client.plan(ModelChoice(model=str(path), nodes=[node.address]))
            except ShardnetError as error:
                n_refused += "internal" not in str(error)
    return n_refused
