"""Forms of stages for tests: float32, with a short context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage_form import StageForm
from shardnet.types import DType

FORM = StageForm(model="/m", model_id="0" * 64, dtype=DType.FLOAT32, context=256)
"""A form of no model in particular."""


def form_of(folder: Path, **changes: Any) -> StageForm:
    """The form of the checkpoint at `folder`."""
    own = {"model": str(folder), "model_id": Checkpoint.open(folder).model_id, "context": 512}
    return structs.replace(FORM, **own | changes)


def with_form(order: StageOrder, **changes: Any) -> StageOrder:
    """An order with another form."""
    return replace(order, form=structs.replace(order.form, **changes))
