"""Finds what takes pictures in a checkpoint on this machine: its processor, and its tower."""

from __future__ import annotations

from pathlib import Path

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import Pictures, open_pictures
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.vision.picture import PictureProcessor
from shardnet.model.vision.vision_family import TokenId


def processor_at(path: Path, mmproj: Path | None, token_id: TokenId) -> PictureProcessor:
    """Return what prepares pictures for the checkpoint at `path`; for `mmproj` see open_pictures.

    Raises UnsupportedModelError, which says what is missing, for a model that takes none, and
    CheckpointError for damaged files.
    """
    return open_pictures(Checkpoint.open(path), token_id, mmproj).processor


def tower_of(checkpoint: Checkpoint, mmproj: Path | None = None) -> Pictures | None:
    """Return the tower that a first stage loads, None where it is not whole or not known.

    Why it is not is said when a picture comes; of a GGUF that was named, `mmproj`, at once, by the
    errors of `open_pictures`.
    """
    try:
        found = open_pictures(checkpoint, lambda text: 0, mmproj)
    except (UnsupportedModelError, CheckpointError):
        if mmproj is not None:
            raise
        return None
    lacking = [name for name in found.table if name not in found.checkpoint.tensors]
    if lacking and mmproj is not None:
        raise CheckpointError(
            f"{mmproj} lacks {lacking[0]}", remedy="use the projector of this very model"
        )
    return None if lacking else found
