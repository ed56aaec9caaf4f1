"""Pictures of clients' requests: decoded, prepared as the model takes them, placed in prompts.

Knows the threads, how many bytes may be held, and which processor a model has. Must not know image
formats nor towers.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from shardnet.cluster.head.lead import Lead
from shardnet.cluster.head.requests import in_order
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import BusyError, UnsupportedModelError, UsageError
from shardnet.guard.pictures import PictureProcess
from shardnet.model.vision.picture import PictureProcessor, PreparedPicture
from shardnet.runtime.engine.requests import RequestPicture
from shardnet.slot_operations import PICTURE_DIGEST_BYTES, PicturePlace
from shardnet.types import remember
from shardnet.wire.messages.chat import MAX_ADDED_TEXT, MAX_PICTURES_BYTES, Picture
from shardnet.wire.messages.generation import Generate

MAX_HELD_BYTES: Final = 512 << 20
"""Files of pictures of all requests that a head holds."""
MAX_PIXELS_BYTES: Final = 256 << 20
"""Prepared pictures that wait for the tower; beyond that they are prepared again."""
MAX_KNOWN: Final = 256

FindProcessor = Callable[[Path, Path | None, Callable[[str], int | None]], PictureProcessor]
"""Returns what prepares pictures for the checkpoint at a path, with the GGUF of its tower, None for
its own, and what knows its tokens' ids.

Raises UnsupportedModelError, which says what is missing, for a model that takes none.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPicture:
    """A picture as the model takes it, without pixels, and what prepares it with them."""

    digest: bytes
    shape: PreparedPicture
    again: Callable[[], PreparedPicture]


@dataclass(slots=True, kw_only=True)
class Pictures:
    """Reads pictures for one head. Jobs run on threads of `disk`, the decoder in its own process.

    `find` is called once for each checkpoint.
    """

    disk: DiskJobs
    find: FindProcessor
    _process: PictureProcess = field(default_factory=PictureProcess)
    _processors: dict[tuple[Path, str], PictureProcessor] = field(default_factory=dict)
    _known: dict[bytes, PreparedPicture] = field(default_factory=dict)
    """Pictures that were read lately, without their pixels."""
    _waiting: dict[bytes, PreparedPicture] = field(default_factory=dict)
    """Pictures that wait for the tower, with them."""
    _held_bytes: int = 0

    def close(self) -> None:
        """End the process that decodes."""
        self._process.close()

    @contextlib.contextmanager
    def held(self, pictures: Sequence[Picture]) -> Iterator[set[bytes]]:
        """Count the files of a request while it runs, and yield a set for digests of its pictures.

        Raises BusyError where others hold too much, UsageError for too many bytes.
        """
        n_bytes = sum(len(picture.data) for picture in pictures)
        if n_bytes > MAX_PICTURES_BYTES:
            raise UsageError(
                f"the pictures of the request have {n_bytes} bytes, at most {MAX_PICTURES_BYTES} "
                "are read",
                remedy="send fewer or smaller ones",
            )
        if self._held_bytes + n_bytes > MAX_HELD_BYTES:
            raise BusyError(
                f"pictures of other requests take {self._held_bytes} of {MAX_HELD_BYTES} bytes",
                remedy="ask again later",
            )
        self._held_bytes += n_bytes
        digests: set[bytes] = set()
        try:
            yield digests
        finally:
            self._held_bytes -= n_bytes
            for digest in digests:
                self._waiting.pop(digest, None)

    async def processor(self, lead: Lead) -> PictureProcessor:
        """Return what prepares pictures for the model of a ring.

        Raises UnsupportedModelError, which names the model and what it lacks.
        """
        path, tokenizer = lead.plan.facts.path, lead.tokenizer
        files = path, lead.plan.choice.mmproj
        if tokenizer is None:
            raise UnsupportedModelError(f"{path} has no tokenizer: it takes no pictures")
        if files not in self._processors:
            ids = {text: token_id for token_id, text, _ in tokenizer.added_tokens(MAX_ADDED_TEXT)}
            mmproj = Path(files[1]) if files[1] else None

            def find() -> PictureProcessor:
                found = self.find(path, mmproj, ids.get)
                _ = found.placeholder_id  # some read their files for it: not on the event loop
                return found

            self._processors[files] = await self.disk.run(path, find)
        return self._processors[files]

    async def placed(
        self,
        message: Generate,
        prompt: Sequence[int],
        processor: PictureProcessor,
        held: set[bytes],
        *,
        tower: str = "",
    ) -> tuple[list[int], tuple[RequestPicture, ...]]:
        """Put the tokens of pictures in the place of one token each; return the prompt and them.

        Their digests, which are others with another `tower`, go to `held`. Raises UsageError for
        pictures that cannot be read, and for more or fewer places than pictures.
        """
        token_id, pictures = processor.placeholder_id, in_order(message)
        n_places = sum(each == token_id for each in prompt)
        if not n_places and message.token_ids is not None:
            prompt, n_places = [token_id] * len(pictures) + [*prompt], len(pictures)
        if n_places != len(pictures):
            raise UsageError(
                f"the prompt has {n_places} places for pictures (token {token_id}) and there are "
                f"{len(pictures)} pictures",
                remedy="give one picture for each place, and use a chat template with pictures",
            )
        place = self.disk.at("pictures")
        ids: list[int] = []
        found: list[RequestPicture] = []
        for each in prompt:
            if each != token_id:
                ids.append(each)
                continue
            number = len(found)
            job = partial(self._read, pictures[number], processor, tower, number, len(pictures))
            read, prepared = await place.run(job, alive=time.monotonic)
            held.add(read.digest)
            self._keep(read, prepared)
            found.append(self._request_picture(read, len(ids)))
            ids += read.shape.token_ids
        return ids, tuple(found)

    def _request_picture(self, read: ReadPicture, start: int) -> RequestPicture:
        rows = read.shape.is_row.nonzero()[0]

        async def prepare() -> PreparedPicture:
            waiting = self._waiting.pop(read.digest, None)
            if waiting is not None:
                return waiting
            return await self.disk.at("pictures").run(read.again, alive=time.monotonic)

        first, last = int(rows[0]), int(rows[-1])
        place = PicturePlace(
            position=start + first,
            n_positions=last - first + 1,
            grid=read.shape.grid,
            see_each_other=read.shape.see_each_other,
            digest=read.digest,
        )
        return RequestPicture(place=place, prepare=prepare)

    def _read(
        self,
        picture: Picture,
        processor: PictureProcessor,
        tower: str,
        number: int,
        n_pictures: int,
    ) -> tuple[ReadPicture, PreparedPicture | None]:
        """Decode a picture; return it, and as it was prepared unless it was known. Blocks.

        Raises UsageError, which names it.
        """
        try:
            rgb = self._process.decode(picture.data)
            digest = hashlib.sha256(
                f"{processor.key}{tower} {picture.detail} {rgb.shape}\0".encode() + rgb.tobytes()
            ).digest()[:PICTURE_DIGEST_BYTES]
            shape, prepared = self._known.get(digest), None
            if shape is None:
                prepared = processor.prepare(rgb, picture.detail)
                shape = replace(prepared, pixels=np.empty(0, np.float32), arrays={})
        except UsageError as error:
            which = f"picture {number + 1} of {n_pictures}" if n_pictures > 1 else "the picture"
            raise error.at(which) from error

        def again() -> PreparedPicture:
            return processor.prepare(self._process.decode(picture.data), picture.detail)

        return ReadPicture(digest=digest, shape=shape, again=again), prepared

    def _keep(self, read: ReadPicture, prepared: PreparedPicture | None) -> None:
        """Remember a picture, with its pixels if there is room: its request has them dropped."""
        remember(self._known, read.digest, read.shape, MAX_KNOWN)
        if prepared is not None:
            n_waiting = sum(one.n_bytes for one in self._waiting.values())
            if n_waiting + prepared.n_bytes <= MAX_PIXELS_BYTES:
                self._waiting[read.digest] = prepared
