"""Limits that the planner and the code that computes share. Imports nothing."""

from __future__ import annotations

MAX_LAYERS = 10_000
"""Most layers that a config may claim, so that a damaged one cannot fill the memory."""

MAX_LAYER_EXPERTS = 1 << 16
"""Most experts that all layers of a config may have together: each is weighed by its own. The
largest models known have some 25 000."""

MAX_EXPERTS = 32767
"""Most experts that a config may claim: an expert's number travels in 16 bits."""

GRAPH_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Row counts for which decode steps are captured on CUDA (fused/decode_graphs.py)."""
