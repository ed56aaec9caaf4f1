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
        OPENAI.at(
            "POST /v1/files",
            "Send a file of requests for a batch",
            files.upload,
            FileForm,
            FileObject,
            body_type=FORM,
        ),
        OPENAI.at("GET /v1/files", "The files that are kept", files.list, answer=FileList),
        OPENAI.at(
            "GET /v1/files/{file_id}", "What is known of a file", files.show, answer=FileObject
        ),
        OPENAI.at("GET /v1/files/{file_id}/content", "What a file has", files.fetch),
        OPENAI.at(
            "DELETE /v1/files/{file_id}", "Keep a file no longer", files.delete, answer=FileDeleted
        ),
    ]


def _of_batches(batches: Batches) -> list[Endpoint[Any]]:
    return [
        OPENAI.at(
            "POST /v1/batches",
            "Run the requests of a file behind others",
            batches.create,
            BatchBody,
            BatchObject,
        ),
        OPENAI.at("GET /v1/batches", "The batches that are kept", batches.list, answer=BatchList),
        OPENAI.at(
            "GET /v1/batches/{batch_id}", "How far a batch is", batches.show, answer=BatchObject
        ),
        OPENAI.at(
            "POST /v1/batches/{batch_id}/cancel",
            "Begin no more requests of a batch",
            batches.cancel,
            answer=BatchObject,
        ),
    ]
