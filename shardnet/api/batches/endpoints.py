"""The endpoints of files and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from shardnet.api.batches.batches import BatchBody, Batches, BatchList, BatchObject
from shardnet.api.batches.files import FileDeleted, FileForm, FileList, FileObject, Files
from shardnet.api.openai.faults import OPENAI
from shardnet.api.server.endpoint import FORM, Endpoint

RUNNABLE: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
"""What the lines of a batch may ask."""


def endpoints(others: Sequence[Endpoint[Any]]) -> list[Endpoint[Any]]:
    """List these endpoints. Lines are handled by those of the `others` that a batch may ask."""
    files = Files()
    runnable = {one.path: one for one in others if one.path in RUNNABLE}
    return [*_of_files(files), *_of_batches(Batches(files, runnable))]


def _of_files(files: Files) -> list[Endpoint[Any]]:
    return [
        Endpoint(
            method="POST",
            path="/v1/files",
            summary="Send a file of requests for a batch",
            handle=files.upload,
            dialect=OPENAI,
            body=FileForm,
            body_type=FORM,
            answer=FileObject,
        ),
        Endpoint(
            method="GET",
            path="/v1/files",
            summary="The files that are kept",
            handle=files.list,
            dialect=OPENAI,
            answer=FileList,
        ),
        Endpoint(
            method="GET",
            path="/v1/files/{file_id}",
            summary="What is known of a file",
            handle=files.show,
            dialect=OPENAI,
            answer=FileObject,
        ),
        Endpoint(
            method="GET",
            path="/v1/files/{file_id}/content",
            summary="What a file has",
            handle=files.fetch,
            dialect=OPENAI,
        ),
        Endpoint(
            method="DELETE",
            path="/v1/files/{file_id}",
            summary="Keep a file no longer",
            handle=files.delete,
            dialect=OPENAI,
            answer=FileDeleted,
        ),
    ]


def _of_batches(batches: Batches) -> list[Endpoint[Any]]:
    return [
        Endpoint(
            method="POST",
            path="/v1/batches",
            summary="Run the requests of a file behind others",
            handle=batches.create,
            dialect=OPENAI,
            body=BatchBody,
            answer=BatchObject,
        ),
        Endpoint(
            method="GET",
            path="/v1/batches",
            summary="The batches that are kept",
            handle=batches.list,
            dialect=OPENAI,
            answer=BatchList,
        ),
        Endpoint(
            method="GET",
            path="/v1/batches/{batch_id}",
            summary="How far a batch is",
            handle=batches.show,
            dialect=OPENAI,
            answer=BatchObject,
        ),
        Endpoint(
            method="POST",
            path="/v1/batches/{batch_id}/cancel",
            summary="Begin no more requests of a batch",
            handle=batches.cancel,
            dialect=OPENAI,
            answer=BatchObject,
        ),
    ]
