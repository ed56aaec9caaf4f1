"""Weights from node to node."""
