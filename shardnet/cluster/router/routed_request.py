"""One request on its way: given to a ring, and to another one with its tokens when that is lost.

Knows the messages of an answer. Must not know how a ring is chosen.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from shardnet.cluster.deputy.copying import Copy
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.router.front import Front
from shardnet.cluster.router.kept_ring import KeptRing
from shardnet.errors import (
    BusyError,
    CheckpointError,
    DeadlineError,
    LinkError,
    PeerFailedError,
    PlanError,
    RemoteProtocolError,
    ShardnetError,
    SupersededError,
)
from shardnet.runtime.engine.requests import MadeToken
from shardnet.runtime.loading.model_facts import check_model_id
from shardnet.sampling_params import TokenLogprobs
from shardnet.types import LiveState
from shardnet.wire.framing.schema import Numbered, encode
from shardnet.wire.messages.activity import TracePiece
from shardnet.wire.messages.control import Failed, Redirect, reported_error
from shardnet.wire.messages.deputies import CopiedTo
from shardnet.wire.messages.generation import (
    Finished,
    Generate,
    StateChanged,
    TextPiece,
    TokenDetail,
)
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.plans import NodeProgress, PlanReply

RING_ERRORS = (LinkError, PeerFailedError, BusyError, PlanError, CheckpointError)
"""What ends a request on one ring, and not on another."""
MOST_IN_VAIN: Final = 3
IN_VAIN_S: Final = 30.0
"""How many rings may be lost with a request one after the other before it has a token of one, and
how long that may go on: it is likely to be what ends them. As recovery/policy.py has it."""
EXPECTED_S = 0.5
"""How long it is expected to take until it goes on."""


def prompt_bytes(message: Generate) -> bytes:
    """Return a prompt so that equal beginnings are equal bytes."""
    if message.token_ids is not None:
        return array("I", message.token_ids).tobytes()
    if message.messages is None:
        return message.prompt.encode("utf-8", "replace")
    said = [encode(one) for one in message.messages]
    return b"".join([message.tools.encode("utf-8", "replace"), *said])


class RoutedRequest:
    """A request of the client on `control`, whose answer begins with the tokens `made`.

    The client has `n_sent` of these. They are added to `copy` as they come, if there is one.
    """

    def __init__(
        self,
        control: ControlLink,
        message: Generate,
        *,
        prompt: bytes,
        made: Sequence[int],
        n_sent: int,
        copy: Copy | None,
    ) -> None:
        self._control = control
        self._message = message
        self._prompt = prompt
        self._made = [*made]
        self._n_before = len(made)
        self._n_told = n_sent
        self._copy = copy
        self._copied_to = ""
        self._n_rings = 0
        self._began_s = time.monotonic()
        self._first_s = 0.0
        self._n_in_vain = 0
        self._in_vain_since_s = 0.0

    async def run(self, front: Front) -> None:
        """Relay the answer, from whichever rings. Raises what ended it."""
        tried: set[tuple[KeptRing, int]] = set()
        last: ShardnetError | None = None
        while True:
            try:
                async with asyncio.timeout(self._left_s):
                    ring = await front.ring_for(self._prompt, tried)
            except TimeoutError:
                raise DeadlineError(
                    f"the request did not end within its deadline of {self._message.deadline_s:g} "
                    f"s, after {len(self._made)} tokens, and waits for a ring: allow more time"
                ) from None
            except SupersededError:
                raise
            except ShardnetError as error:
                raise last or error from None
            ring.n_taken_over += self._n_rings > 0
            self._n_rings += 1
            n_made, n_times = len(self._made), ring.n_times
            try:
                await self._on(ring, front)
                ring.prompts.add(self._prompt)
            except RING_ERRORS as error:
                if isinstance(error, SupersededError) and error.address:
                    raise  # not one ring: another node leads them all
                if len(self._made) > n_made:
                    tried.clear()
                    self._n_in_vain = 0
                tried.add((ring, n_times))
                last = error
                self._check_in_vain(error)
                self._tell_moved(error)
            else:
                return

    @property
    def _left_s(self) -> float | None:
        """How much of its deadline is left, None without one."""
        deadline_s = self._message.deadline_s
        if deadline_s is None:
            return None
        return max(0.0, deadline_s + self._began_s - time.monotonic())

    def _check_in_vain(self, error: ShardnetError) -> None:
        """Raise the `error` that a ring ended with if too many did before the next token."""
        if not isinstance(error, LinkError | PeerFailedError):
            return
        if not self._n_in_vain:
            self._in_vain_since_s = time.monotonic()
        self._n_in_vain += 1
        took_s = time.monotonic() - self._in_vain_since_s
        if self._n_in_vain > MOST_IN_VAIN and took_s >= IN_VAIN_S:
            raise type(error)(
                f"{error.message} (and {self._n_in_vain - 1} rings before it, in {took_s:.0f} s, "
                "were lost without a token)",
                remedy=error.remedy,
            )

    async def _on(self, ring: KeptRing, front: Front) -> None:
        """Relay what one ring makes of it."""
        message = self._message
        if message.deadline_s is not None:
            message = replace(message, deadline_s=self._left_s)
        async with ring.asking(replace(message, made=[*self._made], key="")) as answers:
            while True:
                answer = await answers.get()
                if isinstance(answer, ShardnetError):
                    raise answer
                if isinstance(answer, Failed):
                    raise self._failure(answer, ring)
                if isinstance(answer, StateChanged) and answer.state is LiveState.RECOVERING:
                    if ring.is_whole:
                        ring.recovers(answer.why)
                    if front.others_than(ring):
                        raise PeerFailedError(answer.why)
                if isinstance(answer, PlanReply):  # its files may have been replaced
                    planned = ring.plan.facts.model_id
                    check_model_id(Path(answer.model), answer.model_id, planned)
                await self._relay(answer)
                if isinstance(answer, Finished):
                    return

    def _failure(self, answer: Failed, ring: KeptRing) -> ShardnetError:
        """Return the error of a request that failed on a ring, in that ring's own words."""
        error = reported_error(answer, ring.plan.nodes[0].name)
        if isinstance(error, RING_ERRORS):
            return error
        error.message = answer.message
        return error

    async def _relay(self, answer: Numbered) -> None:
        request = self._message.request
        match answer:
            case TextPiece():
                self._first_s = self._first_s or time.monotonic()
                self._made += answer.token_ids
                self._copy_tokens(answer)
                self._tell_copied()
                if answer.token_ids and len(self._made) <= self._n_told:
                    return
            case StateChanged():
                self._tell_copied()
                if self._made:
                    answer = replace(answer, prompt_tail="")
            case Finished():
                answer = self._finished(answer)
            case PlanReply() | NodeProgress() | TracePiece():
                pass
            case Redirect():
                raise PeerFailedError(f"the ring was left by its head; {answer.address} leads")
            case _:
                raise RemoteProtocolError(f"a ring answered Generate with {type(answer).__name__}")
        self._control.send(replace(answer, request=request))
        await self._control.link.drain(shared=True)

    def _finished(self, answer: Finished) -> Finished:
        """Put the times of all rings together."""
        if self._n_rings < 2:
            return answer
        now_s, first_s = time.monotonic(), self._first_s or time.monotonic()
        n_made = len(self._made) - self._n_before
        timing = replace(
            answer.timing,
            ttft_s=first_s - self._began_s,
            total_s=now_s - self._began_s,
            decode_tok_s=(n_made - 1) / (now_s - first_s) if n_made > 1 and now_s > first_s else 0,
        )
        return replace(answer, timing=timing)

    def _tell_moved(self, error: ShardnetError) -> None:
        self._control.send(
            StateChanged(
                request=self._message.request,
                state=LiveState.RECOVERING,
                why=explanation(error),
                expected_s=EXPECTED_S,
            )
        )

    def _copy_tokens(self, piece: TextPiece) -> None:
        if self._copy is not None:
            for place, token_id in enumerate(piece.token_ids):
                detail = None if piece.logprobs is None else piece.logprobs[place]
                self._copy.add(_made(token_id, detail))

    def _tell_copied(self) -> None:
        """Tell the client where its answer is copied, where that has changed."""
        if self._copy is not None and self._copy.address != self._copied_to:
            self._copied_to = self._copy.address
            self._control.send(CopiedTo(request=self._message.request, address=self._copied_to))


def _made(token_id: int, detail: TokenDetail | None) -> MadeToken:
    if detail is None:
        return MadeToken(token_id=token_id)
    return MadeToken(
        token_id=token_id,
        logprobs=TokenLogprobs(
            token_id=detail.token_id,
            logprob=detail.logprob,
            top=tuple((top.token_id, top.logprob) for top in detail.top),
        ),
    )
