"""What `shardnet plan` shows of --wire-dtype: progress of measuring, text and JSON."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from shardnet.wire.messages.plans import (
    MIXED_WIRES,
    NarrowWire,
    NodeProgress,
    PlanReply,
    WireError,
)

from .bars import make_bars
from .exit_codes import say

if TYPE_CHECKING:  # rich takes longer to import than most commands to run
    from rich.progress import Progress


class WireBar:
    """Progress of measuring the error: a bar on a terminal, else one line when it begins.

    Shows nothing if the error was measured before.
    """

    def __init__(self, wire_dtype: str) -> None:
        self._words = f"measuring the error of wire dtype {wire_dtype}"
        self._progress: Progress | None = None

    def __enter__(self) -> WireBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, report: NodeProgress) -> None:
        """Move the bar; the first report makes it."""
        if self._progress is None:
            self._progress = self._begin(report.total_bytes)
        self._progress.update(self._progress.task_ids[0], completed=report.done_bytes)

    def _begin(self, total_bytes: int) -> Progress:
        progress = make_bars()
        if not progress.console.is_terminal:
            say(f"{self._words}: the head reads the whole checkpoint, {total_bytes / 1e9:.2g} GB")
        progress.add_task(self._words, total=total_bytes)
        progress.start()
        return progress


def narrow_wire_json(wire: NarrowWire | None) -> dict[str, Any]:
    """Return its keys of `plan --json`: null without --wire-dtype or if nothing was measured."""
    return {
        "wire_error": msgspec.to_builtins(wire.error) if wire else None,
        "wire_saves_ms": wire.saves_ms if wire else None,
        "wire_why": wire.why if wire else "",
    }


def narrow_wire_words(plan: PlanReply, wire: NarrowWire) -> str:
    """Describe the size, the time saved and the error of the plan's wire dtype."""
    name = f"wire {plan.wire_dtype}"
    if len(plan.stages) == 1 or plan.wire_dtype == plan.dtype:
        if wire.error is not None:  # only parts within stages are rounded
            return f"parts between the nodes of a stage are rounded: {_error_words(wire.error)}"
        return f"{name}: {wire.why}"
    size = f"{_kb(wire.row_bytes)} instead of {_kb(wire.exact_row_bytes)} kB per token and hop"
    links = [
        f"{stage.rank}-{stage.rank + 1} {stage.wire_dtype}"
        for stage in plan.stages[:-1]
        if stage.wire_dtype not in ("", plan.dtype)
    ]
    if plan.wire_dtype == MIXED_WIRES:
        name += f" ({', '.join(links)})"
    error = _error_words(wire.error) if wire.error else f"error not measured: {wire.why}"
    return f"{name}: {size}, {_saving_words(plan, wire)}; {error}"


def _saving_words(plan: PlanReply, wire: NarrowWire) -> str:
    if wire.saves_ms is None:
        return "time saved unknown, as not all links are measured"
    verb = "saves" if wire.saves_ms >= 0 else "loses"
    words = f"{verb} {short_number(abs(wire.saves_ms))} ms"
    if plan.predicted_tok_s:
        exact_ms = 1e3 / plan.predicted_tok_s + wire.saves_ms
        words += f" of {short_number(exact_ms)} ms"
    words += " per token at these links"
    return words if wire.saves_ms >= 0 else f"{words}: quantising takes longer than it saves"


def _error_words(error: WireError) -> str:
    return (
        f"logits off by at most {short_number(error.max_error)} of their spread "
        f"({short_number(error.rms_error)} rms, KL {error.kl:.1g}), "
        f"{error.n_changed} of {error.n_rows} likeliest tokens differ"
    )


def _kb(size_bytes: int) -> str:
    return f"{size_bytes / 1e3:.1f}"


def short_number(value: float) -> str:
    """Write two significant digits, whole numbers from 10 on."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
