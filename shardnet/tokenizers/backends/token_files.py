"""Read the files of a tokenizer, within a cap of their own; what such a file has, in any format.

Must not know formats, nor folders: tokenizers/tokenizer.py combines a file with those beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import MAX_JSON_BYTES, parse_object, read_file
from shardnet.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

    from shardnet.tokenizers.chat.chat_template import ChatTemplate

MAX_FILE_BYTES: Final = 16 << 20
"""Limit of a tokenizer's file but tokenizer.json and tekken.json; the largest known has 7 MB."""
MAX_LINES: Final = 1 << 20
"""Limit of the lines of a file; the longest known has 515 000."""


def damaged(what: str) -> CheckpointError:
    """Make the error for a file that says `what` none can."""
    return CheckpointError(what, remedy="fetch the file again")


def read_bytes(path: Path, cap: int = MAX_FILE_BYTES) -> bytes:
    """Read a file of at most `cap` bytes. Raises CheckpointError as `read_file` does."""
    return read_file(path, cap)


def read_lines(path: Path) -> list[bytes]:
    """Read a file's lines, without their ends. Raises CheckpointError for more than MAX_LINES."""
    data = read_file(path, MAX_FILE_BYTES)
    n_lines = data.count(b"\n")
    if n_lines > MAX_LINES:
        raise damaged(f"{path} has {n_lines} lines, at most {MAX_LINES} are read")
    return data.split(b"\n")


def read_object(path: Path, *, distinct: bool = False) -> dict[str, Any]:
    """Read a JSON object, {} where the file is missing.

    Raises CheckpointError for anything else, with `distinct` also for duplicate keys.
    """
    if not has_file(path):
        return {}
    return parse_object(read_file(path, MAX_JSON_BYTES), path, distinct=distinct)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A backend without truncation and padding.

    `adds_bos`: whether bos is prepended unless another file says otherwise; None leaves it to the
    backend's post-processor. `template` is the file's own chat template.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool | None = None
    template: ChatTemplate | None = None
