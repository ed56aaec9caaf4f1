"""Layers read from disk while the stage computes."""
