"""Progress on standard error: of loading, a bar per node on a terminal; of many prompts, a line."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from shardnet.cluster.machine.folders import PACKS_FOLDER, cache_dir
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.plans import NodeProgress, PlanReply

from .bars import make_bars
from .exit_codes import one_line, say, say_over
from .plan_text import dtype_words, layer_words, short_number

if TYPE_CHECKING:  # rich takes longer to import than most commands to run
    from rich.progress import TaskID

PLANNING_SHOWN_AFTER_S = 1.0
"""Planning takes longer only if nodes measure; then it is shown after this time."""


class LoadBars:
    """Prints the chosen ring, and shows its nodes' progress of measuring, fetching and loading."""

    def __init__(self) -> None:
        self._progress = make_bars(has_rate=True)
        self._names: dict[int, str] = {}
        self._fetch_words: dict[int, str] = {}
        self._bars: dict[tuple[int, Phase], TaskID] = {}
        self._waiting: set[int] = set()
        self._asleep: set[int] = set()
        self._measured = ""
        self._planning: TaskID | None = None
        self._planning_timer = threading.Timer(PLANNING_SHOWN_AFTER_S, self._show_planning)

    def __enter__(self) -> LoadBars:
        if self._progress.console.is_terminal:
            self._planning_timer.daemon = True
            self._planning_timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def expect(self, plan: PlanReply) -> None:
        """Print the plan's stages, dtypes, reason and warnings."""
        self._end_planning()
        if self._names:  # of a plan whose ring was lost while it was built
            for bar in self._bars.values():
                self._progress.remove_task(bar)
            self._bars.clear()
            self._fetch_words.clear()
            self._names.clear()
        asleep = {one.node for one in plan.asleep}
        self._asleep = {stage.rank for stage in plan.stages if stage.node in asleep}
        for stage in plan.stages:
            self._names[stage.rank] = f"{stage.name} {layer_words(plan, stage)}"
            if stage.fetch_s:
                self._fetch_words[stage.rank] = f", about {short_number(stage.fetch_s)} s"
        ring = ", ".join(self._names.values())
        wire = "" if plan.wire_dtype == plan.dtype else f", wire {plan.wire_dtype}"
        say(f"ring: {ring} ({dtype_words(plan)}{wire}, context {plan.context}): {plan.why}")
        for warning in plan.warnings:
            say(f"warning: {warning}")
        packs = cache_dir(os.environ) / PACKS_FOLDER
        if plan.quant and not packs.exists():  # said once: then the folder is there
            gib = sum(stage.weight_bytes for stage in plan.stages) / 2**30
            say(
                f"each node keeps its quantised weights for the next start ({gib:.2f} GiB in all), "
                f"this machine in {packs}, within half of what the disk has free; `shardnet cache "
                "ls` lists them, `cache rm` deletes them"
            )

    def update(self, report: NodeProgress) -> None:
        """Move a node's bar: one for each of downloading, fetching and loading."""
        if report.phase == "waiting":
            self._show_waiting(report)
            return
        if report.phase == "measuring":
            self._show_measuring(report.done_bytes, report.total_bytes)
            return
        if not report.total_bytes:
            return
        bar = (report.rank, report.phase)
        if bar not in self._bars:
            self._end_planning()
            name = self._names.get(report.rank, "the head")
            self._progress.start()
            self._bars[bar] = self._progress.add_task(
                f"{one_line(name)} {report.phase}", total=None
            )
            if report.phase == "downloading":
                say(f"{name}: downloading {report.total_bytes / 2**20:.1f} MiB from the Hub")
            if report.phase == "fetching":
                about = self._fetch_words.get(report.rank, "")
                mib = report.total_bytes / 2**20
                say(f"{name}: fetching {mib:.1f} MiB from other nodes{about}")
        self._progress.update(
            self._bars[bar], completed=report.done_bytes, total=report.total_bytes
        )

    def stop(self) -> None:
        """Remove the bars; text follows."""
        self._end_planning()
        self._progress.stop()

    def _show_waiting(self, report: NodeProgress) -> None:
        if report.rank not in self._waiting:
            self._waiting.add(report.rank)
            why = "waiting for another head that uses the node"
            if report.rank in self._asleep:
                rule = f": {report.total_bytes} s as a rule" if report.total_bytes else ""
                why = f"it sleeps, and is woken{rule}"
            say(f"{self._names.get(report.rank, 'a node')}: {why}")

    def _show_measuring(self, n_done: int, n_all: int) -> None:
        self._measured = f", {n_done} of {n_all} so far"
        if self._planning is not None:
            self._progress.update(self._planning, description=self._planning_words)

    @property
    def _planning_words(self) -> str:
        return f"planning; nodes and links are measured once per model{self._measured}"

    def _show_planning(self) -> None:
        self._planning = self._progress.add_task(self._planning_words, total=None)
        self._progress.start()

    def _end_planning(self) -> None:
        self._planning_timer.cancel()
        if self._planning_timer.is_alive():
            self._planning_timer.join()  # it may be adding its line right now
        if self._planning is not None:
            self._progress.remove_task(self._planning)
            self._planning = None


class ProgressLine:
    """One line on standard error that is overwritten, on a terminal only.

    Off where text streams to the same terminal (`beside_text`), whose lines it would tear.
    """

    def __init__(self, *, beside_text: bool) -> None:
        self._is_on = sys.stderr.isatty() and not (beside_text and sys.stdout.isatty())
        self._shown = ""
        self._next_s = 0.0

    def show(self, line: str) -> None:
        """Show `line`, at most ten times a second."""
        now = time.monotonic()
        if self._is_on and now >= self._next_s:
            self._next_s = now + 0.1
            self._shown = line
            say_over(line)

    def clear(self) -> None:
        """Remove the line; other output follows."""
        if self._shown:
            self._shown = ""
            say_over("")
