"""Weights that were quantised before they were stored, by whom and how."""
