"""Requests that have a key, with what was made of their answers. Pure.

Kept by their head, so that a client that comes back finds the answer, and by the head's deputy.
Must not know links, rings or how a request runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec.structs import replace

from shardnet.errors import CheckpointError
from shardnet.runtime.engine.requests import MadeToken
from shardnet.sampling_params import TokenLogprobs
from shardnet.wire.messages.deputies import CopiedToken
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

KEEP_S: Final = 60.0
"""How long an answer is kept after its client has it, or has left."""
MAX_REQUESTS: Final = 2048
"""Requests of one head. Answers that ended first make room for the next ones."""
MAX_NUMBERS: Final = 1 << 23
"""Most of their token ids and logprobs."""
MAX_PICTURE_BYTES: Final = 512 << 20
"""Most bytes of their pictures."""

End = Literal["", "complete", "left", "failed"]


@dataclass(slots=True, kw_only=True)
class CopiedRequest:
    """A request whose prompt is `generate.token_ids`, and the tokens of its answer so far.

    `model_id` is that of the checkpoint which makes them. `end` is "" while it runs.
    """

    generate: Generate
    model_id: str
    tokens: list[MadeToken] = field(default_factory=list)
    end: End = ""
    ended_at_s: float = 0.0
    n_numbers: int = 0

    def check_model(self, model_id: str) -> None:
        """Raise CheckpointError unless a ring has the checkpoint that the answer began with."""
        if model_id != self.model_id:
            raise replaced(self.generate.choice.model, self.model_id, model_id)

    @property
    def picture_bytes(self) -> int:
        """The size of its pictures."""
        return sum(len(picture.data) for picture in self.generate.pictures)


class CopiedRequests:
    """The requests of one head. Moments are of one clock, in seconds."""

    def __init__(
        self, *, most_numbers: int = MAX_NUMBERS, most_picture_bytes: int = MAX_PICTURE_BYTES
    ) -> None:
        self._most_numbers = most_numbers
        self._most_picture_bytes = most_picture_bytes
        self._requests: dict[str, CopiedRequest] = {}
        self._n_numbers = 0
        self._picture_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def running(self) -> list[CopiedRequest]:
        """Those that have not ended."""
        return [request for request in self._requests.values() if not request.end]

    def find(self, key: str, now_s: float) -> CopiedRequest | None:
        """Return the request with this key, None where none is kept."""
        self._forget_old(now_s)
        return self._requests.get(key)

    def open(self, generate: Generate, model_id: str, now_s: float) -> CopiedRequest | None:
        """Begin to keep a request, in the place of one with its key; None if there is no room."""
        self._forget_old(now_s)
        self.forget(generate.key)
        request = CopiedRequest(generate=generate, model_id=model_id)
        if not self._make_room(1, request.picture_bytes):
            return None
        self._requests[generate.key] = request
        self._picture_bytes += request.picture_bytes
        return request if self._count(request, len(generate.token_ids or ())) else None

    def add(
        self, key: str, first: int, tokens: Sequence[MadeToken], end: End, now_s: float
    ) -> bool:
        """Add tokens to an answer, from number `first` on; return whether it is still kept.

        One that they do not follow is forgotten, and so is one that has failed.
        """
        request = self._requests.get(key)
        if request is None:
            return False
        if first > len(request.tokens) or end == "failed":
            self.forget(key)
            return False
        new = tokens[len(request.tokens) - first :]
        request.tokens += new
        request.end, request.ended_at_s = end, now_s
        return self._count(request, sum(_numbers(token) for token in new))

    def forget(self, key: str) -> None:
        """Forget a request, if it is kept."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._n_numbers -= request.n_numbers
            self._picture_bytes -= request.picture_bytes

    def take_over(self, other: CopiedRequests, choice: ModelChoice, now_s: float) -> None:
        """Take all that another head had copied, asking for what `choice` says by now.

        Those that ran wait for their clients to come back.
        """
        for request in [*other._requests.values()]:
            former = request.generate.choice
            generate = replace(request.generate, choice=choice.asked_as(former))
            if self.open(generate, request.model_id, now_s) is not None:
                self.add(generate.key, 0, request.tokens, request.end or "left", now_s)
            other.forget(generate.key)

    def _count(self, request: CopiedRequest, n_numbers: int) -> bool:
        """Count what a request holds; forget it if there is no room. Return whether it is kept."""
        request.n_numbers += n_numbers
        self._n_numbers += n_numbers
        if not self._make_room(0, 0):
            self.forget(request.generate.key)
        return request.generate.key in self._requests

    def _make_room(self, n_requests: int, n_bytes: int) -> bool:
        """Forget answers, those first that ended first, until so many more have room with so many
        bytes of pictures; return whether they do.
        """

        def lacks() -> tuple[bool, bool]:
            is_full = len(self._requests) + n_requests > MAX_REQUESTS
            is_full |= self._n_numbers > self._most_numbers
            return is_full, self._picture_bytes + n_bytes > self._most_picture_bytes

        if any(lacks()):
            ended = (one for one in self._requests.values() if one.end)
            for request in sorted(ended, key=lambda one: one.ended_at_s):
                is_full, pictures_are_full = lacks()
                if is_full or (pictures_are_full and request.picture_bytes):
                    self.forget(request.generate.key)
        return not any(lacks())

    def _forget_old(self, now_s: float) -> None:
        old = [
            key
            for key, request in self._requests.items()
            if request.end and now_s - request.ended_at_s > KEEP_S
        ]
        for key in old:
            self.forget(key)


def replaced(model: str, had: str, found: str) -> CheckpointError:
    """Make the error of an answer of the checkpoint `had` that would go on with `found`."""
    return CheckpointError(
        f"{model} is another checkpoint by now ({found[:12]}) than the one that this answer began "
        f"with ({had[:12]})",
        remedy="ask anew, or put its files back",
    )


def _numbers(token: MadeToken) -> int:
    return 1 + (1 + 2 * len(token.logprobs.top) if token.logprobs else 0)


def written(tokens: Sequence[MadeToken]) -> list[CopiedToken]:
    """Write tokens as they travel."""
    return [
        CopiedToken(token.token_id, None, ())
        if token.logprobs is None
        else CopiedToken(token.token_id, token.logprobs.logprob, token.logprobs.top)
        for token in tokens
    ]


def read(tokens: Sequence[CopiedToken]) -> Iterator[MadeToken]:
    """Read tokens as they travelled."""
    for token in tokens:
        logprobs = None
        if token.logprob is not None:
            logprobs = TokenLogprobs(token_id=token.token_id, logprob=token.logprob, top=token.top)
        yield MadeToken(token_id=token.token_id, logprobs=logprobs)
