"""The first shard of a stage: what it asks of the others, and its KV cache."""
