"""The process that reads large headers: the program that local_models.py runs.

Must not know nodes or links.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardnet.guard.job_loop import serve
from shardnet.runtime.loading.model_facts import identify


def identified(path: str) -> tuple[object, bytes]:
    """Identify the checkpoint at `path`; give what ModelFacts is made of."""
    facts = identify(Path(path))
    told = {
        "model_id": facts.model_id,
        "config_text": facts.config_text,
        "stamp": facts.stamp,
        "is_complete": facts.is_complete,
        "stored_dtype": facts.stored_dtype,
        "linear_dtype": facts.linear_dtype,
        "packed": facts.packed,
        "form": facts.form,
        "size_bytes": facts.size_bytes,
        "unknown_keys": facts.unknown_keys,
        "recommended": dict(facts.recommended),
        "layers": facts.layers,
        "has_mtp": facts.has_mtp,
        "tower_bytes": dict(facts.tower_bytes),
        "picture_layers": facts.picture_layers,
    }
    return msgspec.to_builtins(told), b""


def main() -> None:
    """Do jobs until nobody asks."""
    serve({"identify": identified})
