"""Which tokens have texts that are alike: what Engram hashes in the place of token ids.

Knows the process that uses a stranger's tokenizer. Must not know what classes are hashed to.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path

from shardnet.errors import CheckpointError
from shardnet.tokenizers.formats.tokenizer_files import NAMES, tokenizer_place
from shardnet.tokenizers.tokenizer import Stamp, TextProcess, stamp_of

_turn = threading.Lock()


def token_classes(path: Path, n_tokens: int, n_classes: int) -> bytearray:
    """Return the classes of a checkpoint's first ids, int32 each: found once for each folder.

    Blocks. Raises CheckpointError if there is no tokenizer, it fails or exceeds its limits, or its
    classes are not `n_classes`.
    """
    place = tokenizer_place(path)
    with _turn:
        found = bytearray(_classes(place, stamp_of(place), n_tokens))
    n_found = len({*memoryview(found).cast("i")})
    if len(found) != 4 * n_tokens:
        raise CheckpointError(
            f"{path} has no tokenizer ({NAMES}), by which its n-grams are hashed",
            remedy="add its files",
        )
    if n_found != n_classes:
        raise CheckpointError(
            f"{path}: the texts of {n_tokens} tokens are {n_found} but for case, accents and "
            f"spaces; engram_compressed_vocab_size is {n_classes}",
            remedy="fetch the checkpoint's tokenizer again",
        )
    return found


@lru_cache(maxsize=4)
def _classes(place: Path, stamp: Stamp, n_tokens: int) -> bytes:
    process = TextProcess(place)
    try:
        return process.classes(n_tokens)
    finally:
        process.close()
