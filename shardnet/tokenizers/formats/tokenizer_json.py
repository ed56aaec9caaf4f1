"""Reads tokenizer.json, the `tokenizers` library's own format."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from shardnet.checkpoint.tensors.json_files import MAX_WHOLE_BYTES
from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.token_files import read_bytes
from shardnet.tokenizers.formats.loaded_tokenizer import LoadedTokenizer


def read_tokenizer_json(path: Path) -> LoadedTokenizer:
    """Read the file. Raises CheckpointError if it is damaged or not supported."""
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_bytes(path, MAX_WHOLE_BYTES))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a usable tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return LoadedTokenizer(backend=backend)
