"""Quantised, packed weights on disk, for the next start."""
