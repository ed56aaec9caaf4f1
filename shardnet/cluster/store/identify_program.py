"""The process that reads large headers: the program that identify_apart.py runs.

Must not know nodes or links.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from shardnet.guard.job_loop import serve
from shardnet.runtime.loading.model_facts import identify


def identified(path: str) -> tuple[object, bytes]:
    """Identify the checkpoint at `path`; give what ModelFacts is made of."""
    facts = identify(Path(path))
    return {
        "model_id": facts.model_id,
        "config_text": facts.config_text,
        "stamp": facts.stamp,
        "is_complete": facts.is_complete,
        "stored_dtype": facts.stored_dtype and facts.stored_dtype.value,
        "linear_dtype": facts.linear_dtype and facts.linear_dtype.value,
        "packed": facts.packed and asdict(facts.packed),
        "form": facts.form,
        "size_bytes": facts.size_bytes,
        "unknown_keys": facts.unknown_keys,
        "recommended": dict(facts.recommended),
        "layers": asdict(facts.layers),
        "has_mtp": facts.has_mtp,
        "tower_bytes": {dtype.value: n_bytes for dtype, n_bytes in facts.tower_bytes.items()},
        "picture_layers": facts.picture_layers,
    }, b""


def main() -> None:
    """Do jobs until nobody asks."""
    serve({"identify": identified})
