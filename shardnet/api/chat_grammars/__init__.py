"""Grammars of what a model must write: calls in its family's format, or an answer. Pure."""
