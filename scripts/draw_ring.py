"""Draws docs/ring.svg: the stages of a real run, their memory, and where a token's time goes.

Knows the JSON of `shardnet generate --json` and `shardnet plan --json`. Every figure in the picture
is one of theirs, or a sum of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "It is a truth universally acknowledged"
SAMPLING = ("--temperature", "0.7", "--seed", "3", "--max-tokens", "128")

WIDTH, MARGIN = 880, 20
CARD_TOP, CARD_HEIGHT, CARD_GAP = 56, 118, 76
RETURN_Y = CARD_TOP + CARD_HEIGHT + 50
BAR_TOP, BAR_HEIGHT = RETURN_Y + 52, 26
HEIGHT = BAR_TOP + BAR_HEIGHT + 42

# Colours that are readable on white and on black: cards bring their own background.
COLOURS = ("#2f6fb3", "#7a57b8", "#2b8573")
WIRE, REST = "#c07a1c", "#8b949e"
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
         font-size: 14px; fill: #7b8693; }
  .title { font-size: 17px; font-weight: 600; }
  .card { fill: #ffffff; }
  .rank { font-size: 15px; font-weight: 700; fill: #ffffff; }
  .wire { font-size: 13px; font-weight: 600; fill: #c07a1c; }
  .share { font-size: 13px; font-weight: 600; fill: #ffffff; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One node's part of the run; times are means over decode steps."""

    rank: int
    layers: tuple[int, int]
    compute_ms: float
    queue_ms: float
    wire_ms: float
    memory_bytes: int | None
    """Weights and KV cache as planned, None where no plan was given."""
    devices: str
    """What computes, "" where no plan was given or no node has more than its CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the picture shows."""

    model: str
    tok_s: float
    stages: Sequence[Stage]

    @property
    def token_ms(self) -> float:
        """Time of one token, from the tokens per second."""
        return 1e3 / self.tok_s

    @property
    def rest_ms(self) -> float:
        """What neither computes, queues nor travels: the head between two steps."""
        return max(
            0.0, self.token_ms - sum(s.compute_ms + s.queue_ms + s.wire_ms for s in self.stages)
        )


def read_run(generated: dict[str, Any], planned: dict[str, Any] | None) -> Run:
    """Read the JSON of a run, and of a plan for the same layers.

    Raises SystemExit if the run has no decode step or the plan has other layers.
    """
    timing = generated["timing"]
    if not timing["decode_tok_s"]:
        sys.exit("the run has no tokens per second: generate at least two tokens")
    layers = [tuple(stage["layers"]) for stage in generated["stages"]]
    memory: list[int | None] = [None] * len(layers)
    devices = [""] * len(layers)
    if planned is not None:
        if [tuple(stage["layers"]) for stage in planned["stages"]] != layers:
            sys.exit(f"the plan has other layers than the run, which has {layers}")
        memory = [stage["weight_bytes"] + stage["kv_bytes"] for stage in planned["stages"]]
        parts = [stage.get("parts", []) for stage in planned["stages"]]
        if any(parts):
            devices = [
                ", ".join(name for part in own for name in part["devices"]) or "CPU"
                for own in parts
            ]
    return Run(
        model=generated["model"],
        tok_s=timing["decode_tok_s"],
        stages=[
            Stage(
                rank=times["rank"],
                layers=(begin, end),
                compute_ms=times["compute_ms"],
                queue_ms=times["queue_ms"],
                wire_ms=times["wire_ms"],
                memory_bytes=held,
                devices=computes,
            )
            for times, (begin, end), held, computes in zip(
                timing["per_stage"], layers, memory, devices, strict=True
            )
        ],
    )


def draw(run: Run, note: str) -> str:
    """Return the picture as SVG; `note` says which model ran where."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(_description(run, note))}">',
        f"<title>{escape(_description(run, note))}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" '
        'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0 10 5 0 10z" fill="{WIRE}"/></marker></defs>',
        f'<text class="title" x="{MARGIN}" y="28">{escape(note)}</text>',
        f'<text class="title" x="{WIDTH - MARGIN}" y="28" text-anchor="end">'
        f"{_figure(run.tok_s)} tokens/s</text>",
        *_ring(run),
        *_bar(run),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _description(run: Run, note: str) -> str:
    stages = ", ".join(f"layers {s.layers[0]}-{s.layers[1]}" for s in run.stages)
    return f"{note}: a ring of {len(run.stages)} nodes ({stages}), {_figure(run.tok_s)} tokens/s"


def _ring(run: Run) -> Iterator[str]:
    """Draw a card for every stage, an arrow to the next, and the tail's way home."""
    n = len(run.stages)
    width = (WIDTH - 2 * MARGIN - (n - 1) * CARD_GAP) / n
    middle = CARD_TOP + CARD_HEIGHT / 2
    for stage in run.stages:
        x = MARGIN + stage.rank * (width + CARD_GAP)
        yield from _card(stage, x, width, is_last=stage.rank == n - 1)
        if stage.rank < n - 1:
            begin, end = x + width + 4, x + width + CARD_GAP - 4
            yield _arrow(f"M{begin:.0f} {middle:.0f}H{end:.0f}")
            centre = (begin + end) / 2
            yield (
                f'<text class="wire" x="{centre:.0f}" y="{middle - 10:.0f}" text-anchor="middle">'
                f"{_figure(stage.wire_ms)} ms</text>"
            )
    bottom = CARD_TOP + CARD_HEIGHT + 4
    left, right = MARGIN + width / 2, WIDTH - MARGIN - width / 2
    yield _arrow(
        f"M{right:.0f} {bottom}V{RETURN_Y - 14}q0 14-14 14H{left + 14:.0f}q-14 0-14-14V{bottom + 4}"
    )
    yield (
        f'<text class="wire" x="{WIDTH / 2:.0f}" y="{RETURN_Y - 10}" text-anchor="middle">'
        f"the sampled token: 4 bytes, {_figure(run.stages[-1].wire_ms)} ms</text>"
    )


def _card(stage: Stage, x: float, width: float, *, is_last: bool) -> Iterator[str]:
    colour = COLOURS[stage.rank % len(COLOURS)]
    role = " · head" if stage.rank == 0 else " · tail" if is_last else ""
    n_layers = stage.layers[1] - stage.layers[0]
    inside = ["embedding"] if stage.rank == 0 else []
    inside.append(f"{n_layers} layer{'s' if n_layers > 1 else ''}")
    inside += ["LM head"] if is_last else []
    lines = [", ".join(inside)]
    if stage.memory_bytes is not None:
        lines.append(f"{stage.memory_bytes / 2**20:.1f} MiB of memory")
    lines.append(f"{_figure(stage.compute_ms)} ms a token")
    yield (
        f'<rect x="{x:.0f}" y="{CARD_TOP}" width="{width:.0f}" height="{CARD_HEIGHT}" rx="10" '
        f'fill="{colour}"/>'
    )
    title = escape(f"rank {stage.rank}{role}{' · ' * bool(stage.devices)}{stage.devices}")
    yield f'<text class="rank" x="{x + 16:.0f}" y="{CARD_TOP + 28}">{title}</text>'
    for number, line in enumerate(lines):
        y = CARD_TOP + 54 + 22 * number
        yield f'<text class="card" x="{x + 16:.0f}" y="{y}">{escape(line)}</text>'


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{WIRE}" stroke-width="2" marker-end="url(#tip)"/>'


def _bar(run: Run) -> Iterator[str]:
    """Draw the time of one token as a bar: stages and hops in their order, then the rest."""
    scale = (WIDTH - 2 * MARGIN) / run.token_ms
    told = f"the {_figure(run.token_ms)} ms of one token"
    yield f'<text x="{MARGIN}" y="{BAR_TOP - 12}">{told}</text>'
    pieces = [
        piece
        for stage in run.stages
        for piece in (
            (stage.compute_ms, COLOURS[stage.rank % len(COLOURS)], 1.0),
            (stage.queue_ms, COLOURS[stage.rank % len(COLOURS)], 0.45),
            (stage.wire_ms, WIRE, 1.0),
        )
    ]
    x = float(MARGIN)
    for ms, colour, opacity in [*pieces, (run.rest_ms, REST, 1.0)]:
        width = ms * scale
        yield (
            f'<rect x="{x:.1f}" y="{BAR_TOP}" width="{width:.1f}" height="{BAR_HEIGHT}" '
            f'fill="{colour}" fill-opacity="{opacity}"/>'
        )
        if opacity == 1.0 and width > 34:
            yield (
                f'<text class="share" x="{x + width / 2:.1f}" y="{BAR_TOP + 18}" '
                f'text-anchor="middle">{_figure(ms)}</text>'
            )
        x += width
    yield from _legend(run, BAR_TOP + BAR_HEIGHT + 26)


def _legend(run: Run, y: int) -> Iterator[str]:
    named = [(COLOURS[s.rank % len(COLOURS)], 1.0, f"rank {s.rank}") for s in run.stages]
    named += [
        (COLOURS[0], 0.45, "waiting there"),
        (WIRE, 1.0, "wire"),
        (REST, 1.0, "between steps"),
    ]
    x = float(MARGIN)
    for colour, opacity, name in named:
        yield (
            f'<rect x="{x:.0f}" y="{y - 11}" width="12" height="12" rx="2" fill="{colour}" '
            f'fill-opacity="{opacity}"/>'
        )
        yield f'<text x="{x + 18:.0f}" y="{y}">{name}</text>'
        x += 44 + 8 * len(name)


def _figure(value: float) -> str:
    """Write a figure with two digits, or all before the point."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _shardnet(*arguments: str) -> dict[str, Any]:
    """Run a command over three nodes of this machine; return its JSON."""
    command = [sys.executable, "-P", "-m", "shardnet_cli", *arguments, "--local", "3", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed; its message stands above")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _read(path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return answer


def main() -> None:
    """Draw a run that is given, or one that is made now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--run", type=Path, help="output of `generate --json`; default: run the bundled model now"
    )
    parser.add_argument("--plan", type=Path, help="output of `plan --json` for the same layers")
    parser.add_argument("--note", help="which model ran where; default: what is known of it")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "ring.svg")
    options = parser.parse_args()
    if options.run is None:
        generated = _shardnet("generate", *SAMPLING, PROMPT)
        layers = ",".join(f"{a}-{b}" for a, b in (s["layers"] for s in generated["stages"]))
        planned: dict[str, Any] | None = _shardnet("plan", "--layers", layers)
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        note = f"the bundled model on one {os.cpu_count()}-core machine, {today}"
    else:
        generated = _read(options.run)
        planned = _read(options.plan) if options.plan is not None else None
        note = generated["model"]
    run = read_run(generated, planned)
    options.out.write_text(draw(run, options.note or note), encoding="utf-8")


if __name__ == "__main__":
    main()
