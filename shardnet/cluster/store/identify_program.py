"""The process that reads large headers: the program that local_models.py runs.

Must not know nodes or links.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from shardnet.guard.job_loop import serve
from shardnet.runtime.loading.model_facts import ModelFacts, identify

NOT_TOLD: Final = ("path", "config", "adapters")
"""Who asks knows them, or reads them from the text of the config."""


def identified(path: str) -> tuple[object, bytes]:
    """Identify the checkpoint at `path`; give what ModelFacts is made of."""
    facts = identify(Path(path))
    told = {name: getattr(facts, name) for name in ModelFacts.__slots__ if name not in NOT_TOLD}
    told = {name: dict(of) if isinstance(of, Mapping) else of for name, of in told.items()}
    return msgspec.to_builtins(told), b""


def main() -> None:
    """Do jobs until nobody asks."""
    serve({"identify": identified})
