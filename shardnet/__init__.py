"""shardnet: one language model over the machines of a home lab."""

import os

__version__ = "0.3.0.dev0"

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
"""Has torch, imported later, ask for large pages: weights are read faster (docs/adr/0083)."""
