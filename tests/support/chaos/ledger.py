"""The ledger of a chaos run: a line for each round, as JSON and as a row, and a summary. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

LENGTHS = (0, 100, 1000, 2000, 4000, 8000, 1 << 20)
"""Prompts between two of these, in tokens, are counted together."""
EQUAL, NAMED, DIFFERS, SILENT = "equal", "named error", "DIFFERS", "SILENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one round did and what came of it. Seconds; None for what did not happen.

    `outcomes` counts how the requests ended. `notice_s` is from the fault until clients heard of
    it, `pause_s` the longest time that any of them waited for a token then, `pauses` that of each
    request behind the tokens of its prompt. `parts` are those of the recovery by the head's own
    account. `whole_s` is until all nodes were in the ring again.
    Where the head ended, `is_headless`, requests are to end with a named error.
    """

    seed: int
    number: int
    faults: tuple[str, ...]
    moments: tuple[str, ...]
    victims: tuple[str, ...]
    outcomes: dict[str, int]
    notice_s: float | None = None
    pause_s: float = 0.0
    pauses: tuple[tuple[int, float], ...] = ()
    n_recoveries: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    whole_s: float = 0.0
    returned: str = ""
    is_headless: bool = False
    wrong: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether every text was the undisturbed one and nothing was left behind."""
        expected = {EQUAL, NAMED} if self.is_headless else {EQUAL}
        return not self.wrong and set(self.outcomes) <= expected

    @property
    def json(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self)

    @property
    def row(self) -> str:
        """As a row of HEAD's table."""
        told = " + ".join(
            f"{fault}, {moment}" if moment != "while texts run" else fault
            for fault, moment in zip(self.faults, self.moments, strict=True)
        )
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.parts.items())
        ends = ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes.items())
        notice = "" if self.notice_s is None else f"{self.notice_s:.2f}"
        wrong = "; ".join(self.wrong)
        return (
            f"| {self.number} | {told} | {', '.join(self.victims)} | {notice} | {self.pause_s:.2f} "
            f"| {parts} | {ends}{' **' + wrong + '**' if wrong else ''} |"
        )


def read_ledger(text: str) -> list[Entry]:
    """Read a file of `--ledger`: a JSON object a line."""
    return [msgspec.json.decode(line, type=Entry) for line in text.splitlines()]


HEAD = (
    "| round | fault | node | noticed (s) | pause (s) | parts (s) | texts |\n"
    "|---|---|---|---|---|---|---|"
)


def summary(entries: Sequence[Entry]) -> str:
    """Totals, then pauses by kind of fault as a table."""
    outcomes: Counter[str] = Counter()
    for entry in entries:
        outcomes.update(entry.outcomes)
    n_faults = sum(len(entry.faults) for entry in entries)
    lines = [
        f"{len(entries)} rounds, {n_faults} faults, "
        f"{sum(entry.n_recoveries for entry in entries)} recoveries; texts: "
        + ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
        + f"; {sum(not entry.is_good for entry in entries)} rounds that are not as they should be",
        "",
        "| fault | rounds | good | noticed, median (s) | pause, median (s) | pause, longest (s) |",
        "|---|---|---|---|---|---|",
    ]
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        name = entry.faults[0] if len(entry.faults) == 1 else "two faults"
        if len(entry.faults) == 1 and entry.moments[0] != "while texts run":
            name = f"{name}, {entry.moments[0]}"
        kinds.setdefault(name, []).append(entry)
    for name, some in sorted(kinds.items()):
        noticed = [entry.notice_s for entry in some if entry.notice_s is not None]
        pauses = [entry.pause_s for entry in some]
        median = f"{statistics.median(noticed):.2f}" if noticed else ""
        lines.append(
            f"| {name} | {len(some)} | {sum(entry.is_good for entry in some)} | {median} "
            f"| {statistics.median(pauses):.2f} | {max(pauses):.2f} |"
        )
    return "\n".join([*lines, *_pauses_by_length(entries)])


def _pauses_by_length(entries: Sequence[Entry]) -> list[str]:
    """A table of how long texts paused behind prompts of up to 100, 1,000 and more tokens."""
    waits = [pause for entry in entries for pause in entry.pauses]
    lines = []
    for shortest, longest in pairwise(LENGTHS):
        pauses = [pause_s for n_prompt, pause_s in waits if shortest < n_prompt <= longest]
        if pauses:
            told = f"{statistics.median(pauses):.2f} | {max(pauses):.2f}"
            lines.append(f"| {shortest + 1:,} to {longest:,} | {len(pauses)} | {told} |")
    head = ["", "| prompt, tokens | texts | pause, median (s) | pause, longest (s) |"]
    return [*head, "|---|---|---|---|", *lines] if lines else []
