"""Weights that were quantised before they were stored, one file per maker."""
