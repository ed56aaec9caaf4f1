"""All readers of the files of a checkpoint's folder, in one call, as a node does.

Without the readers of tokenizer.json and of templates, which run in processes of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import TensorFiles
from shardnet.errors import CheckpointError, UsageError
from shardnet.runtime.loading.model_facts import stamp
from shardnet.tokenizers.backends.added_tokens import read_added_tokens
from shardnet.tokenizers.backends.token_files import read_lines, read_object
from shardnet.tokenizers.chat.chat_template import ChatTemplate
from shardnet.tokenizers.tokenizer import read_eos_ids


def read_everything(folder: Path) -> list[CheckpointError]:
    """Read all of `folder`, each part whatever happened to the others; return what was refused.

    CheckpointError includes UnsupportedModelError; anything else is raised.
    """
    refused: list[CheckpointError] = []

    @contextlib.contextmanager
    def step() -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            refused.append(error)

    with step():
        stamp(folder)
    with step():
        _open(folder)
    others: tuple[Callable[[Path], object], ...] = (
        read_eos_ids,
        lambda folder: read_added_tokens(folder, {}),
        lambda folder: read_object(folder / "vocab.json", distinct=True),
        _template,
        _merges,
    )
    for read in others:
        with step():
            read(folder)
    return refused


def _open(folder: Path) -> None:
    """Open the checkpoint; name it, list its files, read a tensor both ways."""
    checkpoint = Checkpoint.open(folder)
    assert len(checkpoint.model_id) == 64
    heads = checkpoint.skeleton()
    with contextlib.closing(TensorFiles(checkpoint.folder)) as files:
        for head in heads:
            for offset, n_bytes in head.ranges:
                files.read(head.name, offset, min(n_bytes, 1 << 16))
    name = min(checkpoint.tensors)
    if checkpoint.tensors[name].size_bytes < 1 << 20:
        checkpoint.read(name)


def _template(folder: Path) -> None:
    with contextlib.suppress(UsageError):  # there is none
        ChatTemplate.find(folder)


def _merges(folder: Path) -> None:
    if (folder / "merges.txt").exists():
        read_lines(folder / "merges.txt")
