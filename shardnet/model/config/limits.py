"""Limits that the planner and the code that computes share. Imports nothing."""

from __future__ import annotations

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

GRAPH_BUCKETS = (1, 2, 4, 8, 16, 32)
"""Row counts for which decode steps are captured on CUDA (fused/decode_graphs.py)."""
