"""The process of one shard of a stage but the first, whose calls it runs once it has loaded.

Knows how a call becomes what StageModel and its KV cache do. Must not know rings, sequences or
sampling: the first shard has those.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from shardnet.errors import CapacityError, ShardnetError, internal_error
from shardnet.runtime.shards.calls import (
    Adopt,
    AdoptRows,
    Call,
    Deep,
    Failed,
    Logits,
    Progress,
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
from shardnet.threads import end_process, keep_to

if TYPE_CHECKING:
    from torch import Tensor

    from shardnet.model.cache.picture_rows import PictureRows
    from shardnet.stage.stage_model import StageModel

_CALLS: Final = msgspec.msgpack.Decoder(Call)
_REPORT_S: Final = 0.5
log = logging.getLogger(__name__)


def main() -> None:
    """Be the shard that the process at the other end of a socket wants."""
    leader = socket.socket(fileno=int(sys.argv[1]))
    job = read_job(leader)
    logging.basicConfig(format=f"shard {job.index}: %(levelname)s %(message)s")
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    keep_to(job.order.device.cores)  # before torch starts threads, and touches memory
    serve(job, leader)
    end_process(0)


def read_job(leader: socket.socket) -> ShardJob:
    """Wait for the first message. Raises EOFError if none comes."""
    return msgspec.msgpack.decode(
        read_message(leader), type=ShardJob, dec_hook=lambda _, path: Path(path)
    )


def serve(job: ShardJob, leader: socket.socket) -> None:
    """Load a shard and do as `leader` says until it goes; say what goes wrong."""
    try:
        _serve(job, leader)
    except ShardnetError as error:
        _tell(leader, error)
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        log.exception("this shard cannot go on")
        _tell(leader, internal_error(f"shard {job.index}", error))


def _end_with_parent() -> None:
    """End when the other end of standard input does, whatever this process is at."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


def _tell(leader: socket.socket, error: ShardnetError) -> None:
    with contextlib.suppress(OSError):
        failed = Failed(code=error.code, message=error.message, remedy=error.remedy)
        write_message(leader, failed)


def _serve(job: ShardJob, leader: socket.socket) -> None:
    import torch

    from shardnet.model.shards.group import SharedMemory
    from shardnet.runtime.shards.load_shard import load_shard

    torch.set_num_threads(job.n_threads)
    memory = SharedMemory.of(job.memory, job.size)
    mailbox = Mailbox(job.mailbox, job.mailbox_bytes, job.size)
    try:
        model = load_shard(job, memory, _Reporter(leader))
        model.finish_packs()
        write_message(leader, Ready(exact_rows=model.exact_rows))
        shard = _Shard(job, model, leader)
        n_taken = 0
        while True:
            mailbox.wait(n_taken)
            read_exactly(leader, 1)  # comes with the call, and wakes this process if it sleeps
            message, following = mailbox.take()
            call = _CALLS.decode(message)
            rows = shard.copied(call, following)
            mailbox.taken(job.index)
            n_taken += 1
            shard.do(call, rows)
    except BaseException:
        memory.fail(job.index)  # at once: the others are in the middle of a step
        raise


class _Reporter:
    """Tells how far loading is, not too often."""

    def __init__(self, leader: socket.socket) -> None:
        self._leader = leader
        self._told = 0.0

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told > _REPORT_S:
            self._told = time.monotonic()
            write_message(self._leader, Progress(done=done, total=total))


class _Shard:
    """A loaded shard, and what has come of a slot that it is to hold."""

    def __init__(self, job: ShardJob, model: StageModel, leader: socket.socket) -> None:
        from shardnet.runtime.shards.load_shard import ArrivingSlot

        assert model.cut is not None
        self._job = job
        self._model = model
        self._leader = leader
        self._deep: dict[int | None, Tensor] = {}
        self._arriving = ArrivingSlot(model.kv, model.cut.kv_heads[0])

    def copied(self, call: Call, following: memoryview) -> Tensor | None:
        """Return the rows that follow a call, in memory of their own."""
        import torch

        if not len(following):
            return None
        data = torch.frombuffer(bytearray(following), dtype=torch.uint8)
        match call:
            case Run(dtype=dtype, width=width):
                return data.view(getattr(torch, dtype)).view(-1, width)
            case Logits(n_rows=n_rows, dtype=dtype):
                return data.view(getattr(torch, dtype)).view(n_rows, -1)
            case Deep(n_rows=n_rows):
                return data.view(torch.float32).view(n_rows, -1)
            case _:
                return data

    def _pictures(self, run: Run) -> PictureRows | None:
        """Return what the rows of a run have of pictures, with what came before it."""
        import torch

        from shardnet.model.cache.picture_rows import PictureRows

        deep, self._deep = self._deep, {}
        if run.index is None:
            return None
        device, positions = self._model.device, None
        rows = deep.pop(None, None)
        if run.positions is not None:
            positions = torch.tensor(run.positions, device=device)
        return PictureRows(
            index=torch.tensor(run.index, dtype=torch.int64, device=device),
            rows=None if rows is None else rows.to(device),
            deep={layer: added.to(device) for layer, added in deep.items() if layer is not None},
            blocks=run.blocks,
            positions=positions,
        )

    def do(self, call: Call, rows: Tensor | None) -> None:
        """Carry out a call."""
        import torch

        from shardnet.model.kernels.codec import to_bytes
        from shardnet.stage import runs as stage_runs

        kv = self._model.kv
        match call:
            case Run(batch=batch, n_threads=n_threads):
                if min(n_threads, self._job.n_threads) != torch.get_num_threads():
                    torch.set_num_threads(min(n_threads, self._job.n_threads))
                run = stage_runs.Run(batch=batch, hidden=rows, pictures=self._pictures(call))
                try:
                    self._model.run_alone(run)
                except CapacityError as error:  # the first shard has met it too
                    if error.__cause__ is not None:  # but for a lack of memory
                        raise
            case Deep(layer=layer):
                assert rows is not None
                self._deep[layer] = rows
            case Logits():
                assert rows is not None
                self._model.new_logits(rows)
            case SlotCall(method=method, arguments=arguments):
                getattr(kv, method)(*arguments)
                if method == "clear":
                    self._arriving.clear()
            case AdoptRows():
                assert rows is not None
                self._arriving.take(call, rows)
            case Adopt(slot=slot, firsts=firsts, n_blocks=n_blocks):
                self._arriving.adopt(slot, firsts, n_blocks)
            case Read(slot=slot, layer=layer, begin=begin, end=end, values=values):
                contents = kv.contents(slot)
                first = contents.first(layer)
                held = contents.rows(layer, first + begin, first + end, values=values)
                data = to_bytes(held)
                dtype = str(held.dtype).rpartition(".")[2]
                shape = (held.shape[0], held.shape[1], held.shape[2])
                write_message(self._leader, Rows(n_bytes=data.nbytes, dtype=dtype, shape=shape))
                self._leader.sendall(data)
            case _:
                assert_never(call)
