"""How long the long forms of tests go on: short in the suite, long where scripts/soak runs them."""

from __future__ import annotations

import os

_VARIABLE = "SHARDNET_SOAK_S"
"""What scripts/soak sets."""


def is_soak() -> bool:
    """Whether scripts/soak runs this."""
    return _VARIABLE in os.environ


def soak_s(usual_s: float) -> float:
    """Seconds that a test goes on which goes on as long as one likes."""
    return float(os.environ.get(_VARIABLE, usual_s))
