"""Finds what takes pictures in a checkpoint on this machine: its processor, and its tower."""

from __future__ import annotations

from pathlib import Path

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import Pictures, open_pictures
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.vision.picture import PictureProcessor
from shardnet.model.vision.vision_family import TokenId


def processor_at(path: Path, token_id: TokenId) -> PictureProcessor:
    """Return what prepares pictures for the checkpoint at `path`.

    Raises UnsupportedModelError, which says what is missing, for a model that takes none, and
    CheckpointError for damaged files.
    """
    return open_pictures(Checkpoint.open(path), token_id).processor


def tower_of(checkpoint: Checkpoint) -> Pictures | None:
    """Return the tower that a first stage loads, None where it is not whole or not known.

    Why it is not is said when a picture comes.
    """
    try:
        found = open_pictures(checkpoint, lambda text: 0)
    except (UnsupportedModelError, CheckpointError):
        return None
    is_whole = all(name in found.checkpoint.tensors for name in found.table)
    return found if is_whole else None
