"""Convert params.json, Meta's and Mistral's own config, to the keys and values of config.json.

Knows the keys to ignore, and how a family is found; the family reads its own keys. An unknown key
is noted by name. Must not know files or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardnet.model.config.fields import Fields
from shardnet.model.config.params_keys import read_params_decoder
from shardnet.model.families.registry import FAMILIES


def config_of_params(
    params: Mapping[str, Any],
    vocab_size: int,
    is_tied: bool,
    dtype: str,
    where: str,
    unknown: list[str] | None = None,
) -> dict[str, Any]:
    """Convert the params.json at `where` to the keys and values of config.json.

    `vocab_size` and `is_tied` follow from the tensors, and `dtype`, which they are stored in.
    Unknown keys are added to the list `unknown`; without it they are refused. Raises
    UnsupportedModelError for a value that is not implemented, CheckpointError for one that is
    malformed.
    """
    fields = Fields(params, where, unknown=unknown)
    fields.ignore("vocab_size", "tied_embeddings", "max_batch_size", "model_parallel_size")
    config = read_params_decoder(fields) | _read_family(fields)
    fields.note_the_rest()
    fields.refuse_unknown()
    return config | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
        "torch_dtype": dtype,
    }


def _read_family(fields: Fields) -> dict[str, Any]:
    for family in FAMILIES.values():
        consolidated = family.consolidated
        if consolidated is not None and consolidated.claims(fields):
            return {"model_type": family.model_type} | consolidated.read(fields)
    raise fields.damaged("its keys are of no model that is known")
