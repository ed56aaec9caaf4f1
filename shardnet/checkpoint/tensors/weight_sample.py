"""The sample of a checkpoint's weights that is part of its id: which bytes, and how they are added.

Two fine-tunes of one shape have the same headers and differ in nearly every weight, so a few bytes
of each tensor distinguish them. Bounded: at most MAX_SAMPLES reads of SAMPLE_BYTES each, however
large the model is. docs/protocol.md section 16 specifies it for other implementations. Must not
know formats.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from shardnet.checkpoint.tensors.stored_tensor import ByteRange, StoredTensor, in_order

SAMPLE_BYTES: Final = 1024
"""Bytes read from the middle of a tensor."""
MAX_SAMPLES: Final = 4096
"""Cap on the tensors of one model that are sampled: on a disk, or over HTTP, each costs a read."""
_DIGITS: Final = re.compile(r"[0-9]+")


def sampled_tensors(
    tensors: Iterable[StoredTensor], limit: int = MAX_SAMPLES
) -> list[StoredTensor]:
    """Choose the tensors to sample, in order of file, offset and name.

    All of them, up to `limit`. Beyond it tensors whose names differ only in digits share an equal
    part of the limit, so that the thousands of expert weights are thinned out and every router,
    norm and attention weight stays.
    """
    ordered = list(in_order(tensors, lambda info: (info.file, info.offset, info.name)))
    if len(ordered) <= limit:
        return ordered
    groups: dict[str, list[StoredTensor]] = defaultdict(list)
    for info in ordered:
        groups[_DIGITS.sub("#", info.name)].append(info)
    chosen: set[str] = set()
    smallest_first = in_order(groups.items(), lambda item: (len(item[1]), item[0]))
    for done, (_, group) in enumerate(smallest_first):
        n = min(len(group), (limit - len(chosen)) // (len(groups) - done))
        chosen.update(group[index * len(group) // n].name for index in range(n))
    return [info for info in ordered if info.name in chosen]


def sample_range(info: StoredTensor) -> ByteRange:
    """Return (offset, number of bytes) of a tensor's sample in its file: its middle, or all."""
    n_bytes = min(SAMPLE_BYTES, info.size_bytes)
    return info.offset + (info.size_bytes - n_bytes) // 2, n_bytes


def merged(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Return the same bytes as ranges in order, without overlap or gaps of no bytes."""
    found: list[ByteRange] = []
    for offset, n_bytes in sorted(ranges):
        end = offset + n_bytes
        if found and offset <= sum(found[-1]):
            start, had = found[-1]
            found[-1] = (start, max(end, start + had) - start)
        elif n_bytes:
            found.append((offset, n_bytes))
    return tuple(found)
