"""Names for the blocks of a prompt, by which stages keep and find them on disk. Pure.

A key stands for all tokens from the first up to the end of its block, and for the ring that
computed them: two rings whose keys and values differ in a bit never share a key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from shardnet.slot_operations import AdapterUse, PicturePlace
from shardnet.types import BLOCK_KEY_BYTES, BLOCK_POSITIONS, MAX_STORED_BLOCKS


def block_keys(
    seed: bytes,
    tokens: Sequence[int],
    n_positions: int,
    adapters: Sequence[AdapterUse] = (),
    pictures: Sequence[PicturePlace] = (),
) -> tuple[bytes, ...]:
    """Return the keys of the whole blocks among the first `n_positions` of `tokens`.

    `seed` stands for the ring, which computed them with `adapters` and `pictures`. A block
    stands for all of the pictures that begin in it. At most MAX_STORED_BLOCKS keys are returned.
    """
    digest = hashlib.sha256(seed)
    for use in adapters:
        digest.update(use.adapter_id.encode() + struct.pack("<d", use.scale))
    keys, coming = [], [*pictures]
    for block in range(min(n_positions // BLOCK_POSITIONS, MAX_STORED_BLOCKS)):
        ids = tokens[block * BLOCK_POSITIONS : (block + 1) * BLOCK_POSITIONS]
        digest.update(struct.pack(f"<{BLOCK_POSITIONS}I", *ids))
        while coming and coming[0].position < (block + 1) * BLOCK_POSITIONS:
            place = coming.pop(0)
            digest.update(struct.pack("<I", place.position) + place.digest)
        keys.append(digest.digest()[:BLOCK_KEY_BYTES])
    return tuple(keys)
