"""The bundled model."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL_PATH = Path(__file__).parent / "default_model"
"""Folder of the model that runs when no --model is given."""

DEFAULT_MODEL_NAME = "shardnet/default"
"""How the bundled model is named in --model and on the wire: each node opens its own copy."""
