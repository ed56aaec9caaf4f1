"""The node: the composition root and what reaches it."""
