"""Limits that the planner and the code that computes share. Imports nothing of shardnet."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """What a number of a config must lie between, both ends included."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


MAX_LAYERS = 512
"""Most layers that a config may claim, so that a damaged one cannot fill the memory."""

MAX_VOCABULARY = 1 << 22
"""Most tokens that a config may claim, far above any vocabulary."""

MAX_EOS = 1024
"""Most ids that end a text."""

MAX_EXPERTS = 32767
"""Most experts that a config may claim: an expert's number travels in 16 bits."""

MAX_LAYER_EXPERTS = 1 << 16
"""Most experts that a config may claim in all layers together; Kimi-K2 has 23 040."""

MAX_STATE_COLUMNS = 1 << 22
"""Most numbers in the state of one layer that a config may claim; Qwen3.5-397B has 1 048 576."""

MAX_POSITIONS = 1 << 27
"""Most positions that a config may claim; Llama 4 Scout has 10 485 760."""

MAX_WIDTH = 1 << 20
"""Most columns of one linear that a config may claim; Llama 3 405B has 53 248."""

SCALES = Range(1e-6, 1e6)
"""Numbers that multiply or divide others."""

NORM_EPS = Range(1e-30, 1.0)
"""What norms add to the mean of squares, which may be 0."""

THETAS = Range(1.0, 1e12)
"""Bases of rotary positions: below 1, columns would turn faster than positions count."""

STRETCHES = Range(0.25, 1e6)
"""How far positions are stretched. With MAX_POSITIONS no angle exceeds 2 ** 30."""

DIVISORS = Range(0.25, 1e30)
"""What a single rotary frequency is divided by: some checkpoints stop columns by 1e30."""

GRAPH_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Row counts for which decode steps are captured on CUDA (fused/decode_graphs.py)."""
