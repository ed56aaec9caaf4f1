"""Drafters for the bundled model: how they are made, written, recorded and counted."""
