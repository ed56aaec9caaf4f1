"""Has pictures of requests encoded by the first stage's tower, in pieces between its steps.

Knows whose pictures wait, and how long a piece may take. Must not know towers nor image files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from shardnet.errors import CapacityError, ShardnetError, UnsupportedModelError, internal_error
from shardnet.runtime.engine.live_request import LiveRequests
from shardnet.runtime.engine.requests import RequestPicture
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import EncodePictures
from shardnet.runtime.stage.compute import StageCompute
from shardnet.runtime.stage.picture_store import PictureStore, StoredPicture
from shardnet.types import SequenceId

if TYPE_CHECKING:
    from shardnet.model.vision.picture import (
        EncodedPicture,
        EncoderWalk,
        PictureEncoder,
        PreparedPicture,
    )

log = logging.getLogger(__name__)

T = TypeVar("T")

PIECE_S: Final = 0.02
"""How long the compute thread encodes before it looks for steps, where nothing was measured."""
SHARE: Final = 0.8
"""The same as a share of what a decode step takes: a token may take 2.2 times as long in all."""


class FirstStage(Protocol):
    """The head's own stage, as far as pictures need it."""

    async def on_first_part(self, job: Callable[[StageCompute], T]) -> T:
        """Run a short job on its compute thread. Raises what it raises."""


class PictureCompute(Protocol):
    """A StageCompute that may have a tower."""

    pictures: PictureStore | None
    """Where its steps find the rows of pictures."""

    @property
    def encoder(self) -> PictureEncoder | None:
        """Its tower, None without one."""


@dataclass(slots=True, kw_only=True)
class Encoding:
    """What is being encoded for the requests of one engine. `stage` is that of the present ring.

    `step_s` is what a decode step takes, None if no sequence decodes. `on_end` is called when a
    sequence may go on; `on_failed` ends a request.
    """

    scheduler: Scheduler
    stage: FirstStage | None
    step_s: Callable[[], float | None]
    on_end: Callable[[], None]
    on_failed: Callable[[SequenceId, ShardnetError], None]
    store: PictureStore = field(default_factory=PictureStore)
    n_encoded: int = 0
    """Pictures that were encoded so far."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _latest: dict[SequenceId, EncodePictures] = field(default_factory=dict)
    """What was wanted last for a sequence: one that was paused is opened again."""

    def begin(self, wanted: EncodePictures, requests: LiveRequests) -> None:
        """Begin to encode what a sequence needs and the store lacks."""
        self._latest[wanted.sequence_id] = wanted
        task = asyncio.create_task(self._encode(wanted, requests))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End what is being encoded: the ring is gone, and the sequences are opened again."""
        for task in self._tasks:
            task.cancel()

    async def _encode(self, wanted: EncodePictures, requests: LiveRequests) -> None:
        """Encode the pictures of one sequence, and let it go on or fail."""
        sequence_id = wanted.sequence_id
        try:
            async with self._turn:
                for place in wanted.places:
                    live = requests.get(sequence_id)
                    if live is None:
                        return
                    pictures = live.request.pictures
                    picture = next(one for one in pictures if one.place == place)
                    if self.store.get(place.digest) is None:
                        await self._encode_one(picture, lambda: sequence_id in requests)
                await self._show_store()
        except ShardnetError as error:
            self.on_failed(sequence_id, error)
        except Exception as error:  # a bug of a tower ends one request, not the ring
            named = internal_error("a picture", error)
            log.error("%s", named.message)
            log.debug("in full:", exc_info=error)
            self.on_failed(sequence_id, named)
        else:
            if self._latest.get(sequence_id) is wanted:
                self.scheduler.queue.encoded(sequence_id)
                self.on_end()
        finally:
            if self._latest.get(sequence_id) is wanted:
                del self._latest[sequence_id]

    async def _show_store(self) -> None:
        """Have the stage's steps find rows here. It may be another one than a moment ago."""

        def show(compute: StageCompute) -> None:
            _with_pictures(compute).pictures = self.store

        assert self.stage is not None
        await self.stage.on_first_part(show)

    async def _encode_one(self, picture: RequestPicture, is_wanted: Callable[[], bool]) -> None:
        stage = self.stage
        if stage is None:
            raise no_tower()
        prepared = await picture.prepare()
        walk = await stage.on_first_part(lambda compute: _begun(compute, prepared))
        while is_wanted():
            step_s = self.step_s()
            budget_s = PIECE_S if step_s is None else SHARE * step_s
            job = partial(_pieces, walk, budget_s, step_s is None)
            encoded = await stage.on_first_part(job)
            if encoded is not None:
                offsets = prepared.is_row.nonzero()[0]
                offsets -= offsets[0]
                stored = StoredPicture(offsets=tuple(offsets.tolist()), encoded=encoded)
                self.store.put(picture.place.digest, stored)
                self.n_encoded += 1
                return


def no_tower() -> ShardnetError:
    """Return the error of a picture for a stage that cannot encode it."""
    return UnsupportedModelError(
        "the ring's first stage has no tower that could encode pictures",
        remedy="lead the ring by a node that has all of the model's files; if they came after the "
        "model was loaded, first: shardnet unload",
    )


def _with_pictures(compute: StageCompute) -> PictureCompute:
    if not hasattr(compute, "encoder"):
        raise no_tower()
    return compute  # type: ignore[return-value]


def _begun(compute: StageCompute, prepared: PreparedPicture) -> EncoderWalk:
    """Begin to encode, on the compute thread: up to the first piece."""
    encoder = _with_pictures(compute).encoder
    if encoder is None:
        raise no_tower()
    walk = encoder.encode([prepared])
    _pieces(walk, 0, None, compute)
    return walk


def _pieces(
    walk: EncoderWalk, budget_s: float, may_be_large: bool | None, _compute: StageCompute
) -> EncodedPicture | None:
    """Encode for about `budget_s`, at least one piece; return what is done then."""
    import torch  # on the compute thread, which has it

    from shardnet.model.kernels.devices import is_out_of_memory

    until_s = time.perf_counter() + budget_s
    with torch.inference_mode():
        while True:
            try:
                encoded = walk.send(may_be_large)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise CapacityError(
                    "no memory is left to encode a picture",
                    remedy="start the head with less --memory, or send smaller pictures",
                ) from None
            if encoded is not None or time.perf_counter() >= until_s:
                return encoded
