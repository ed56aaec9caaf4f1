"""An encoder in memory with its tokenizer, and a thread on which such a one works.

Knows how texts become inputs, and when who waits for a job has waited too long, or has gone. Must
not know which encoders there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from shardnet.cluster.store.disk_jobs import node_leaves
from shardnet.errors import CancelledRequestError, DeadlineError
from shardnet.runtime.encoding.judge import INSTRUCTION, Judge, question
from shardnet.runtime.stage.executor import Executor
from shardnet.tokenizers.tokenizer import TextProcess
from shardnet.wire.messages.generation import Encode

if TYPE_CHECKING:  # it imports torch
    from shardnet.runtime.encoding.decoder import Decoder
    from shardnet.runtime.encoding.encoder import Encoder, EncoderInput, Step

T = TypeVar("T")

JOB_S: Final = 300.0
"""How long a thread may go without a step: a text, a chunk of a long one, a batch, a tensor."""


class EncoderThread:
    """A thread whose jobs call a Step in between, which ends those that nobody waits for."""

    def __init__(self, name: str) -> None:
        self.executor = Executor(name, niceness=10)
        self._moved_s = 0.0

    def move(self) -> None:
        """Note that the job goes on. On the thread."""
        self._moved_s = time.monotonic()

    async def run(self, job: Callable[[Step], T]) -> T:
        """Run a job; once nobody waits for it any more its next step raises. Raises as `end_of`."""
        is_over = False

        def step() -> None:
            self.move()
            if is_over:
                raise CancelledRequestError("nobody waits for this any more")

        running = self.executor.submit(partial(job, step))
        try:
            return await self.end_of(running)
        finally:
            is_over = True
            running.cancel()

    async def end_of(self, job: asyncio.Future[T]) -> T:
        """Wait for a job. Raises DeadlineError where no job of the thread moves for JOB_S,
        PeerFailedError for one that was dropped, as the node leaves.
        """
        since_s = time.monotonic()
        done: Collection[asyncio.Future[T]] = ()
        while not done:
            left_s = max(since_s, self._moved_s) + JOB_S - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"an encoder has done nothing for {JOB_S:g} s", remedy="ask again"
                )
            done, _ = await asyncio.wait([job], timeout=left_s)
        if job.cancelled():
            raise node_leaves()
        return job.result()


@dataclass(slots=True, kw_only=True, eq=False)
class HeldEncoder:
    """A loaded encoder, since when no request has used it, and how long it is kept then.

    `keep_s` None is the usual time.
    """

    model: str
    encoder: Encoder | Decoder
    tokenizer: TextProcess
    n_bytes: int
    judge: Judge | None = None
    n_users: int = 0
    used_s: float = field(default_factory=time.monotonic)
    keep_s: float | None = None

    def inputs(self, message: Encode, step: Step) -> list[EncoderInput]:
        """Make the inputs of all texts, each behind the query if there is one."""
        from shardnet.runtime.encoding.encoder import EncoderInput

        made = []
        for text in message.texts:
            step()
            made.append(EncoderInput(*self._encoded(message, text)))
        return made

    def _encoded(self, message: Encode, text: str | list[int]) -> tuple[list[int], list[int]]:
        """Encode a text, or a query and a document; return ids, and of which text each is."""
        if not isinstance(text, str):
            return text, [0] * len(text)
        facts, query = self.encoder.facts, message.query
        most_tokens = facts.context if message.truncate else None
        if self.judge is not None and query is not None:
            asked = question(query, text, message.instruction or INSTRUCTION)
            ids = self.judge.tokens(self.tokenizer.encode, asked, most_tokens)
            return ids, [0] * len(ids)
        texts = [facts.modules.prompt + text] if query is None else [query, text]
        return self.tokenizer.encode_input(
            *(one.lower() if facts.modules.lowers else one for one in texts),
            special_tokens=message.special_tokens,
            most_tokens=most_tokens,
        )
