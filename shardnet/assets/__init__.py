"""The bundled model."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL_PATH = Path(__file__).parent / "default_model"
"""Folder of the model that runs when no --model is given."""
