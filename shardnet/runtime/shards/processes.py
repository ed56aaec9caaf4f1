"""The processes of a stage's shards but the first, which the node's own process is.

Knows how to start, ask, watch and end them. Must not know what a stage computes. All but `start`
runs on the thread that loads, then on the compute thread.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from shardnet.errors import ConfigurationError, LostShardError, error_for_code
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.cache.slot_blocks import SlotContents
from shardnet.model.kernels.codec import to_bytes
from shardnet.model.shards.group import MemoryGroup, ShardGroup, SharedMemory, unnamed_file
from shardnet.runtime.shards.calls import (
    WAKE,
    Adopt,
    AdoptRows,
    Answer,
    Call,
    Deep,
    Failed,
    Logits,
    Read,
    Ready,
    Rows,
    Run,
    ShardJob,
    SlotCall,
    read_exactly,
    read_message,
    write_message,
)
from shardnet.runtime.shards.mailbox import Mailbox
from shardnet.slot_operations import SlotMethod
from shardnet.types import MicroBatch, SlotId

log = logging.getLogger(__name__)

MODULE: Final = "shardnet.runtime.shards.shard_process"
SILENT_S: Final = 120.0
"""How long a shard that loads may say nothing: it imports torch, and its disk may be slow."""
ANSWER_S: Final = 60.0
_LOOK_S: Final = 0.5
_ROOT: Final = Path(__file__).parents[3]
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)
_ENCODER: Final = msgspec.msgpack.Encoder()


class ShardProcess(Protocol):
    """A process, or what stands for one."""

    def kill(self) -> None:
        """Have it end at once."""

    def wait(self) -> int:
        """Wait until it has ended; return its exit code."""


Launch = Callable[[socket.socket, Sequence[int]], ShardProcess]
"""Starts a process with its end of a socket and the descriptors that it needs."""


def launch(theirs: socket.socket, descriptors: Sequence[int]) -> ShardProcess:
    """Start a process of shard_process.py, which ends when this process does.

    Raises ConfigurationError if the system starts none.
    """
    places = [str(_ROOT), *(place for place in sys.path if os.path.isabs(place))]
    program = f"import sys; sys.path += sys.argv[2:]; from {MODULE} import main; main()"
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", program, str(theirs.fileno()), *places],
            stdin=subprocess.PIPE,  # nothing is written: its end says that this process has ended
            stdout=subprocess.DEVNULL,
            pass_fds=[*descriptors, theirs.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is for this process
        )
    except OSError as error:
        raise ConfigurationError(
            f"the process of another shard could not be started: {error}",
            remedy="end other programs, or give --tensor-parallel 1",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Follower:
    """One process: `index` of its shard, and the socket to it."""

    index: int
    process: ShardProcess
    socket: socket.socket


class ShardProcesses:
    """The followers of a stage's first shard, and the group that all are in.

    They end with this object. It implements Followers.
    """

    def __init__(self, size: int, mailbox_bytes: int, launch: Launch = launch) -> None:
        """Make what `size` shards share, for calls of at most `mailbox_bytes`."""
        self._launch = launch
        self._memory = SharedMemory.create(size)
        n_bytes = Mailbox.bytes_for(size, mailbox_bytes)
        self._mailbox_file = unnamed_file(n_bytes)
        self._mailbox = Mailbox(self._mailbox_file, n_bytes, size)
        self._mailbox_bytes = n_bytes
        self.group: ShardGroup = MemoryGroup(self._memory, 0, size)
        """The group, as the first shard sees it."""
        self._size = size
        self._followers: list[_Follower] = []
        self._is_ending = threading.Event()
        weakref.finalize(self, _end, self._followers, self._is_ending, self._mailbox_file)

    def start(self, job: Callable[[int, int, int, int], ShardJob]) -> None:
        """Start a process for each other shard, which loads what `job` says.

        `job` is called with the number of the shard, the descriptors of the memory and of the
        mailbox, and the size of that.
        """
        for index in range(1, self._size):
            own, theirs = socket.socketpair()
            kept = (self._memory.descriptor, self._mailbox_file)
            process = self._launch(theirs, kept)
            theirs.close()
            own.settimeout(ANSWER_S)
            self._followers.append(_Follower(index=index, process=process, socket=own))
            threading.Thread(
                target=_watch,
                args=(process, index, self._memory, self._is_ending),
                name=f"shardnet-shard-{index}",
                daemon=True,
            ).start()
            try:
                write_message(own, job(index, kept[0], kept[1], self._mailbox_bytes))
            except OSError:
                raise self._lost(self._followers[-1], "ended before it was told its job") from None

    def await_ready(self, alive: Callable[[], None]) -> int:
        """Wait until all are loaded; return the rows up to which each is batch-invariant.

        `alive` is called all the time, and may raise. Raises what a shard could not be loaded for.
        """
        exact_rows = []
        heard = dict.fromkeys((follower.socket for follower in self._followers), time.monotonic())
        while heard:
            alive()
            readable = wait([*heard], _LOOK_S)
            if not readable:
                self.check()  # only now: whoever has failed says why, if it still can
            for follower in self._followers:
                if follower.socket in readable:
                    heard[follower.socket] = time.monotonic()
                    answer = self._answer(follower)
                    if isinstance(answer, Ready):
                        exact_rows.append(answer.exact_rows)
                        del heard[follower.socket]
                elif time.monotonic() - heard.get(follower.socket, math.inf) > SILENT_S:
                    raise self._lost(follower, f"has loaded nothing for {SILENT_S:.0f} s")
        return min(exact_rows)

    # --- what Followers is

    def run(self, batch: MicroBatch, hidden: Tensor | None, pictures: PictureRows | None) -> None:
        """See Followers."""
        positions = None
        if pictures is not None:
            parts: list[tuple[int | None, Tensor]] = [*pictures.deep.items()]
            if pictures.rows is not None:
                parts.append((None, pictures.rows))
            for layer, added in parts:
                self._call(Deep(layer=layer, n_rows=len(added)), added.float())
            positions = pictures.positions
        call = Run(
            batch=batch,
            dtype="" if hidden is None else _name(hidden.dtype),
            width=0 if hidden is None else hidden.shape[1],
            n_threads=torch.get_num_threads(),
            index=None if pictures is None else pictures.index.tolist(),
            blocks=() if pictures is None else pictures.blocks,
            positions=None if positions is None else positions.tolist(),
        )
        self._call(call, *([] if hidden is None else [hidden]))

    def logits(self, rows: Tensor) -> None:
        """See Followers."""
        self._call(Logits(n_rows=rows.shape[0], dtype=_name(rows.dtype)), rows)

    def change_slots(self, method: SlotMethod, *arguments: int | list[int] | None) -> None:
        """See Followers."""
        self._call(SlotCall(method=method, arguments=arguments))

    def adopt(self, slot: SlotId, contents: SlotContents, n_blocks: int) -> None:
        """See Followers."""
        for layer in range(len(contents.keys)):
            state = contents.states.get(layer)
            if state is not None:
                flat = torch.empty(state.n_bytes, dtype=torch.uint8)
                state.read(flat)
                self._send_state(layer, flat, state.end)
                continue
            self._send_rows(layer, "keys", contents.keys[layer])
            self._send_rows(layer, "values", contents.values[layer])
        self._call(Adopt(slot=slot, firsts=tuple(contents.firsts), n_blocks=n_blocks))

    def _send_rows(self, layer: int, part: str, tensor: Tensor) -> None:
        n_rows = tensor.shape[1]
        row_bytes = tensor.shape[0] * tensor.shape[2] * tensor.element_size()
        at_once = max(1, self._room // max(1, row_bytes))
        for begin in range(0, n_rows if row_bytes else 0, at_once):
            some = tensor[:, begin : begin + at_once]
            call = AdoptRows(layer=layer, part=part, begin=begin, n=some.shape[1], n_rows=n_rows)
            self._call(call, some)

    def _send_state(self, layer: int, flat: Tensor, end: int) -> None:
        n_bytes = len(flat)
        for begin in range(0, n_bytes, self._room):
            some = flat[begin : begin + self._room]
            call = AdoptRows(
                layer=layer, part="state", begin=begin, n=len(some), n_rows=n_bytes, end=end
            )
            self._call(call, some)

    def read(
        self, slot: SlotId, layer: int, begin: int, end: int, *, values: bool
    ) -> Sequence[Tensor]:
        """See Followers."""
        self._call(Read(slot=slot, layer=layer, begin=begin, end=end, values=values))
        return [self._rows(follower) for follower in self._followers]

    def _rows(self, follower: _Follower) -> Tensor:
        answer = self._answer(follower)
        if not isinstance(answer, Rows):
            raise self._lost(follower, "answered something else than rows")
        try:
            data = read_exactly(follower.socket, answer.n_bytes)
        except (EOFError, OSError):
            raise self._lost(follower, "ended while it was read from") from None
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        dtype = getattr(torch, answer.dtype)
        return flat.view(dtype).view(answer.shape)

    def fail(self) -> None:
        """See Followers."""
        self._memory.fail(0)

    # --- how it travels

    @property
    def _room(self) -> int:
        """The bytes that may follow a short message."""
        return self._mailbox.capacity - 4096

    def check(self) -> None:
        """Raise LostShardError, which names the shard, if one is lost."""
        self.group.check()

    def _call(self, call: Call, *tensors: Tensor) -> None:
        self.check()
        message = _ENCODER.encode(call)
        self._mailbox.put(message, [to_bytes(tensor) for tensor in tensors], self.check)
        for follower in self._followers:
            try:
                follower.socket.send(WAKE)
            except OSError:
                raise self._lost(follower, "has ended") from None

    def _answer(self, follower: _Follower) -> Answer:
        try:
            answer: Answer = _ANSWERS.decode(read_message(follower.socket))
        except (EOFError, OSError):
            raise self._lost(follower, "has ended") from None
        if isinstance(answer, Failed):
            self._memory.fail(follower.index)
            raise error_for_code(answer.code, answer.message, remedy=answer.remedy)
        return answer

    def _lost(self, follower: _Follower, what: str) -> LostShardError:
        self._memory.fail(follower.index)
        return LostShardError(
            f"shard {follower.index} of {self._size} of this stage {what}",
            remedy="the stage is loaded again; if this happens often, see that node's log",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _watch(
    process: ShardProcess, index: int, memory: SharedMemory, is_ending: threading.Event
) -> None:
    """Report to the group a process that ends without an order."""
    code = process.wait()
    if not is_ending.is_set():
        memory.fail(index)
        log.error("shard %d of a stage has ended (exit code %d)", index, code)


def _end(followers: Sequence[_Follower], is_ending: threading.Event, mailbox_file: int) -> None:
    is_ending.set()
    os.close(mailbox_file)
    for follower in followers:
        follower.process.kill()
        follower.socket.close()
