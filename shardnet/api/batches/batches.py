"""Batches: many requests in a file, run behind those of people, their answers in another file."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shardnet.api.batches.files import (
    FileDeleted,
    FileList,
    FileObject,
    Files,
    Line,
    LineAnswer,
    WrongLineError,
    answered,
    read_lines,
    skipped,
)
from shardnet.api.openai.endpoints import Kept
from shardnet.api.openai.faults import OPENAI, page_of
from shardnet.api.server.endpoint import FORM, Endpoint, Json, Reply
from shardnet.api.server.errors import HttpError, refused, too_many
from shardnet.api.server.keys import ApiKey
from shardnet.api.server.service import Exchange, Service
from shardnet.errors import ShardnetError
from shardnet.transport.loop import cancel_all

AT_ONCE: Final = 8
"""Requests of batches that a server works on at one time."""
MOST_RUNNING: Final = 32
RETRY_S: Final = 60
WINDOW_S: Final = 24 * 3600
"""How long a batch may take: OpenAI's only number."""
MOST_BYTES: Final = 32 << 20
"""Answers of one batch."""
TELL_S: Final = 5.0
"""How often the progress of a batch is copied to the cluster."""
GONE_S: Final = 60.0
"""A batch without progress for so long has lost the server that ran it."""


_Key = Annotated[str, Meta(max_length=64)]
_Text = Annotated[str, Meta(max_length=512)]


class BatchBody(msgspec.Struct, kw_only=True):
    """Which requests to run: a file of lines for one endpoint."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Annotated[dict[_Key, _Text], Meta(max_length=16)] | None = None


class BatchFault(msgspec.Struct, kw_only=True):
    """What is wrong with a batch, or with one line of its file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchFaults(msgspec.Struct, kw_only=True):
    """Why a batch has failed."""

    object: str = "list"
    data: list[BatchFault]


class BatchCounts(msgspec.Struct, kw_only=True):
    """How far a batch is, in lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. `status` is in_progress, cancelling, completed, cancelled, expired or failed.

    Times are seconds since 1970.
    """

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchFaults | None = None
    input_file_id: str
    completion_window: str
    status: str = "in_progress"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int
    expires_at: int
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts
    metadata: dict[str, str] | None = None

    @property
    def is_running(self) -> bool:
        """Whether some of its lines may still be answered."""
        return self.status in ("in_progress", "cancelling")


class BatchList(msgspec.Struct, kw_only=True):
    """The batches of a key, the latest first."""

    object: str = "list"
    data: list[BatchObject]
    has_more: bool = False


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A batch that runs, and the answers so far by the numbers of its lines."""

    described: BatchObject
    key: ApiKey | None
    lines: Sequence[Line]
    answers: dict[int, tuple[bool, bytes]] = field(default_factory=dict)
    n_bytes: int = 0
    end: str = "completed"

    def take(self, number: int, answer: LineAnswer) -> None:
        """Add the answer to a line."""
        written = msgspec.json.encode(answer) + b"\n"
        self.answers[number] = answer.is_right, written
        self.n_bytes += len(written)
        counts = self.described.request_counts
        counts.completed += answer.is_right
        counts.failed += not answer.is_right

    def goes_on(self) -> bool:
        """Say whether the next line is to be sent; else note how the batch ends."""
        if self.described.status == "cancelling":
            self.end = "cancelled"
        elif time.time() >= self.described.expires_at:
            self.end = "expired"
        elif self.n_bytes > MOST_BYTES:
            self.end = "failed"
        return self.end == "completed"

    def written(self, *, is_right: bool) -> bytes:
        """Return the answers, or what went wrong, in the order of the lines."""
        return b"".join(
            told for _, (right, told) in sorted(self.answers.items()) if right is is_right
        )


class Batches:
    """The batches that one server runs, and those that the cluster knows of.

    `runnable` are the endpoints of their lines.
    """

    def __init__(self, files: Files, runnable: Mapping[str, Endpoint[Any]]) -> None:
        self._files = files
        self._runnable = runnable
        self._kept = Kept(what="batch", prefix="batch_")
        self._places = asyncio.Semaphore(AT_ONCE)
        self._running: dict[tuple[str, str], BatchObject] = {}

    async def create(self, exchange: Exchange, body: BatchBody) -> Reply:
        """Begin a batch; one whose file is wrong has failed at once.

        Raises HttpError 400 for another endpoint, 404 for no file, 429 for too many batches.
        """
        service = exchange.service
        endpoint = self._runnable.get(body.endpoint)
        if endpoint is None:
            known = ", ".join(self._runnable)
            raise refused(
                f"endpoint cannot be run in a batch: those that can are {known}", "endpoint"
            )
        if len(self._running) >= MOST_RUNNING:
            raise too_many(f"{MOST_RUNNING} batches are running already", RETRY_S)
        content = await self._files.content_of(service.client, exchange.owner, body.input_file_id)
        described = _described(body)
        try:
            lines = read_lines(content, body.endpoint)
        except WrongLineError as error:
            fault = error.fault
            described.errors = _faults(
                fault.code or fault.kind, fault.message, param=fault.parameter, line=error.number
            )
            described.status, described.failed_at = "failed", int(time.time())
            await self._tell(service, exchange.owner, described)
            return Json(value=described)
        described.request_counts.total = len(lines)
        await self._tell(service, exchange.owner, described)
        batch = _Batch(described=described, key=exchange.key, lines=lines)
        self._running[exchange.owner, described.id] = described
        service.keep(self._run(service, exchange.owner, batch, endpoint))
        return Json(value=described)

    async def show(self, exchange: Exchange, body: None) -> Reply:
        """Return a batch as it is now. Raises HttpError 404."""
        return Json(value=await self._of(exchange))

    async def list(self, exchange: Exchange, body: None) -> Reply:
        """List the batches of the request's key."""
        known = await self._known(exchange)
        batches = sorted(known, key=lambda one: (-one.created_at, one.id))
        data, has_more = page_of(batches, exchange.query)
        return Json(value=BatchList(data=data, has_more=has_more))

    async def cancel(self, exchange: Exchange, body: None) -> Reply:
        """Begin no more lines of a batch. Raises HttpError 404, 400 for one that has ended."""
        described = await self._of(exchange)
        if not described.is_running:
            raise refused(f"this batch cannot be cancelled: it is {described.status}")
        if described.status == "in_progress":
            described.status, described.cancelling_at = "cancelling", int(time.time())
            await self._tell(exchange.service, exchange.owner, described)
        return Json(value=described)

    async def _of(self, exchange: Exchange) -> BatchObject:
        name = exchange.path_parameters["batch_id"]
        running = self._running.get((exchange.owner, name))
        if running is not None:
            return running
        found = await self._known(exchange, name if name.startswith("batch_") else "batch_ ")
        for described in found:
            if described.id == name:
                return described
        raise refused(self._kept.gone(name), status=404)

    async def _known(self, exchange: Exchange, prefix: str = "") -> Sequence[BatchObject]:
        """Return what the cluster knows of batches, of those that run here the latest."""
        found = []
        for kept in await self._kept.listed(exchange.service.client, exchange.owner, prefix[:128]):
            described = msgspec.json.decode(kept.description, type=BatchObject)
            running = self._running.get((exchange.owner, described.id))
            if running is None and described.is_running and kept.age_s > GONE_S:
                described.status, described.failed_at = "failed", int(time.time())
                message = "the server that ran it has ended: send it again"
                described.errors = _faults("server_gone", message)
            found.append(running or described)
        return found

    async def _tell(self, service: Service, owner: str, described: BatchObject) -> None:
        """Have the cluster know how far a batch is."""
        description = msgspec.json.encode(described)
        await self._kept.put(service.client, owner, described.id, description)

    async def _tell_often(self, service: Service, owner: str, described: BatchObject) -> None:
        """Tell it while the batch runs, and learn whether another server was asked to cancel it."""
        while True:
            await asyncio.sleep(TELL_S)
            with contextlib.suppress(ShardnetError, HttpError):
                known = await self._kept.listed(service.client, owner, described.id)
                told = [msgspec.json.decode(one.description, type=BatchObject) for one in known]
                if any(one.status == "cancelling" for one in told):
                    described.status = "cancelling"
                    described.cancelling_at = told[0].cancelling_at
                await self._tell(service, owner, described)

    async def _run(
        self, service: Service, owner: str, batch: _Batch, endpoint: Endpoint[Any]
    ) -> None:
        """Answer the lines, and write the files of the answers."""
        left = iter(enumerate(batch.lines))
        telling = asyncio.create_task(self._tell_often(service, owner, batch.described))
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(AT_ONCE, len(batch.lines))):
                    tasks.create_task(self._work(service, batch, endpoint, left))
            await cancel_all(telling)
            await self._finish(service, owner, batch)
            service.settings.log(_line(batch.described))
        finally:
            telling.cancel()
            del self._running[owner, batch.described.id]

    async def _work(
        self,
        service: Service,
        batch: _Batch,
        endpoint: Endpoint[Any],
        left: Iterator[tuple[int, Line]],
    ) -> None:
        """Answer lines, each in a place among those of all batches, until none is left."""
        for number, line in left:
            answer = await answered(service, batch.key, endpoint, line, batch.goes_on, self._places)
            batch.take(number, answer or skipped(line, batch.end))

    async def _finish(self, service: Service, owner: str, batch: _Batch) -> None:
        described = batch.described
        if batch.end == "failed":
            described.errors = _faults(
                "output_too_large", f"its answers have over {MOST_BYTES} bytes"
            )
        try:
            for is_right, what in ((True, "output"), (False, "error")):
                content = batch.written(is_right=is_right)
                if content:
                    name, purpose = f"{described.id}_{what}.jsonl", "batch_output"
                    file = await self._files.put(service.client, owner, name, purpose, content)
                    setattr(described, f"{what}_file_id", file.id)
        except ShardnetError as error:
            batch.end, described.errors = "failed", _faults("not_kept", str(error)[:500])
        status = "cancelled" if described.status == "cancelling" else batch.end
        setattr(described, f"{status}_at", int(time.time()))
        described.status = status
        with contextlib.suppress(ShardnetError):
            await self._tell(service, owner, described)


def _line(described: BatchObject) -> str:
    counts = described.request_counts
    done = f"{counts.completed} of {counts.total} lines answered"
    return f"{described.id} {described.status}: {done}, {counts.failed} failed"


def _described(body: BatchBody) -> BatchObject:
    now = int(time.time())
    return BatchObject(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        in_progress_at=now,
        expires_at=now + WINDOW_S,
        request_counts=BatchCounts(),
        metadata=body.metadata,
    )


def _faults(
    code: str, message: str, *, param: str | None = None, line: int | None = None
) -> BatchFaults:
    return BatchFaults(data=[BatchFault(code=code, message=message, param=param, line=line)])


RUNNABLE: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
"""What the lines of a batch may ask."""


def endpoints(others: Sequence[Endpoint[Any]]) -> list[Endpoint[Any]]:
    """List these endpoints. Lines are handled by those of the `others` that a batch may ask."""
    files, at = Files(), OPENAI.at
    batches = Batches(files, {one.path: one for one in others if one.path in RUNNABLE})
    return [
        at(
            "POST /v1/files",
            "Send a file of requests for a batch",
            files.upload,
            FileObject,
            body_type=FORM,
        ),
        at("GET /v1/files", "The files that are kept", files.list, FileList),
        at("GET /v1/files/{file_id}", "What is known of a file", files.show, FileObject),
        at("GET /v1/files/{file_id}/content", "What a file has", files.fetch),
        at("DELETE /v1/files/{file_id}", "Keep a file no longer", files.delete, FileDeleted),
        at(
            "POST /v1/batches",
            "Run the requests of a file behind others",
            batches.create,
            BatchObject,
        ),
        at("GET /v1/batches", "The batches that are kept", batches.list, BatchList),
        at("GET /v1/batches/{batch_id}", "How far a batch is", batches.show, BatchObject),
        at(
            "POST /v1/batches/{batch_id}/cancel",
            "Begin no more requests of a batch",
            batches.cancel,
            BatchObject,
        ),
    ]
