"""Benchmark loading a whole model as one stage, beside reading and packing its bytes once.

For each format, in turns within each round: plain reads of the bytes (`read`), the simplest loop
that reads and packs them, without checks, progress or digests (`pack`), and `load_stage` (`load`).
Rounded formats are loaded twice: `int8` into an empty pack cache, which it fills, `int8 again` from
that; `kept` is when the cache has all of it, written beside the stage that is loaded already. The
ratio is load to pack, in the middle of the rounds' ratios; the gain is that over the first number
of threads, in the middle of the rounds' gains and by the least times (`best`), and `cpu` the time
that all threads computed, the kernel for them too. The peak is the memory that loading took at most
beside what it left behind: pages of the mapped file count.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from bench_ring import random_1b
from bench_streaming import drop_pages

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.stage_tensors import is_quantizable, stage_tensors
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import KernelChoice, make_linear, probe
from shardnet.stage.load import load_stage
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.types import DType, LayerRange

CPU = torch.device("cpu")
FORMATS = ("bfloat16", "float32", "int8", "int4")
READ_AT_A_TIME = 1 << 22
TOUCHED_BYTES = 5 << 29


@dataclass(slots=True, kw_only=True)
class Figures:
    """What one format took: a number for each round."""

    read_s: list[float] = field(default_factory=list)
    pack_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    kept_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    read_bytes: int = 0
    longest_silence_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One format of one checkpoint. `packs` is where rounded weights are kept."""

    checkpoint: Checkpoint
    choice: KernelChoice
    packs: Path
    from_packs: bool = False

    @property
    def files(self) -> list[Path]:
        """What loading reads."""
        if self.from_packs:
            return sorted(self.packs.rglob("*.packed"))
        return [self.checkpoint.folder / name for name in self.checkpoint.bytes_read]

    def read(self) -> int:
        """Read the files' bytes, into the same memory again and again; return how many."""
        buffer, n_bytes = bytearray(READ_AT_A_TIME), 0
        for path in self.files:
            with path.open("rb", buffering=0) as file:
                while n := file.readinto(buffer):
                    n_bytes += n
        return n_bytes

    def pack(self) -> list[object]:
        """Read and pack in the simplest loop; what the pack cache has need not be packed."""
        config, made = self.checkpoint.config, list[object]()
        if self.from_packs:
            made += [_read_whole(path) for path in self.files]
        tensors = stage_tensors(config, LayerRange(0, config.n_layers))
        for part in (tensors.embedding, *tensors.layers.values(), tensors.head):
            kind = self.choice.weight_quantization(is_head=part is tensors.head)
            for name, shape in part.items():
                is_linear = is_quantizable(name, shape) and part is not tensors.embedding
                if is_linear and self.from_packs:
                    continue
                tensor = self.checkpoint.read(name)
                if is_linear:
                    made.append(make_linear(self.choice, [tensor], [], CPU, kind))
                else:
                    made.append(tensor.to(torch_dtype(self.choice.dtype), copy=True))
        return made

    def load(self, progress: Callable[[int, int], None]) -> StageModel:
        """Load the stage as a node does."""
        kind, packs = self.choice.quant, None
        if kind is not None:
            packs = PackCache(self.packs, str(self.checkpoint.path), "bench", kind)
        return load_stage(
            self.checkpoint,
            LayerRange(0, self.checkpoint.config.n_layers),
            choice=self.choice,
            device=CPU,
            room_blocks=8,
            progress=progress,
            packs=packs,
        )


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench load")
    parser.add_argument("--checkpoint", type=Path, help="default: the TinyLlama-1.1B shape")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--cold", action="store_true", help="drop the files' pages before each")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = Checkpoint.open(arguments.checkpoint or random_1b())
    report = {}
    for name in arguments.formats:
        measured = _measure(checkpoint, name, arguments)
        for (title, threads), figures in measured.items():
            first = measured[title, arguments.threads[0]]
            report[f"{title}, {threads} thread{'s' * (threads > 1)}"] = _summary(figures, first)
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report))


def _measure(
    checkpoint: Checkpoint, name: str, arguments: argparse.Namespace
) -> dict[tuple[str, int], Figures]:
    """Measure a format with each number of threads, in turns within each round."""
    kind = Quantization.named(name) if name in ("int8", "int4") else None
    dtype: DType | Literal["auto"] = DType.FLOAT32 if name == "float32" else "auto"
    choice = probe(CPU, dtype, checkpoint.config.checkpoint_dtype, kind)
    titles = [name] if kind is None else [name, f"{name} again"]
    figures = {(title, n): Figures() for title in titles for n in arguments.threads}
    for _, threads in itertools.product(range(arguments.rounds), arguments.threads):
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory(dir=checkpoint.folder.parent) as packs:
            for title in titles:
                contest = Contest(
                    checkpoint=checkpoint,
                    choice=choice,
                    packs=Path(packs),
                    from_packs=title != name,
                )
                _round(contest, figures[title, threads], is_cold=arguments.cold)
    return figures


@torch.inference_mode()
def _round(contest: Contest, figures: Figures, *, is_cold: bool) -> None:
    """Let each contestant do its work once. Memory that it made is given back in between."""
    for path in contest.files:
        os.sync()  # only what is on the disk can be dropped, and writing it disturbs
        if is_cold:
            drop_pages([path])
        else:
            _read_whole(path)
    began = time.perf_counter()
    figures.read_bytes = contest.read()
    figures.read_s.append(time.perf_counter() - began)
    if is_cold:
        drop_pages(contest.files)
    _touch_memory()
    began = time.perf_counter()
    made = contest.pack()
    figures.pack_s.append(time.perf_counter() - began)
    del made
    if is_cold:
        drop_pages(contest.files)
    reports: list[float] = []
    _touch_memory()
    with _peak() as peak:
        began, processor = time.perf_counter(), time.process_time()
        model = contest.load(lambda done, total: reports.append(time.perf_counter()))
        ended = time.perf_counter()
        figures.processor_s.append(time.process_time() - processor)
    model.finish_packs()
    figures.load_s.append(ended - began)
    figures.kept_s.append(time.perf_counter() - began)
    figures.peak_bytes += peak
    silences = (b - a for a, b in zip([began, *reports], [*reports, ended], strict=True))
    figures.longest_silence_s = max(figures.longest_silence_s, *silences)
    del model


def _touch_memory() -> None:
    """Use the memory that is needed next: that which a virtual machine's host has taken back is
    given again page by page, ten times as slowly, and at times that have nothing to do with us.
    """
    torch.zeros(TOUCHED_BYTES, dtype=torch.uint8)


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """Give how much memory was taken at most beside what was kept; nothing where Linux is not."""
    peak: list[int] = []
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5", encoding="utf-8")
    yield peak
    if forget.exists():
        peak.append(_memory("VmHWM") - _memory("VmRSS"))


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _read_whole(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).clone()


def _summary(figures: Figures, first: Figures) -> dict[str, float | None]:
    middle = statistics.median
    gains = [one / ours for one, ours in zip(first.load_s, figures.load_s, strict=True)]
    ratios = [load / pack for load, pack in zip(figures.load_s, figures.pack_s, strict=True)]
    return {
        "read_mib": figures.read_bytes / 2**20,
        "read_s": middle(figures.read_s),
        "pack_s": middle(figures.pack_s),
        "load_s": middle(figures.load_s),
        "kept_s": middle(figures.kept_s),
        "ratio": middle(ratios),
        "gain": middle(gains),
        "best_gain": min(first.load_s) / min(figures.load_s),
        "processor_s": middle(figures.processor_s),
        "peak_mib": max(figures.peak_bytes) / 2**20 if figures.peak_bytes else None,
        "longest_silence_s": figures.longest_silence_s,
    }


def _as_text(report: dict[str, dict[str, float | None]]) -> str:
    head = f"{'':24}{'MiB':>8}{'read s':>8}{'pack s':>8}{'load s':>8}{'cpu s':>8}{'ratio':>7}"
    lines = [head + f"{'gain':>7}{'best':>7}{'kept s':>8}{'peak MiB':>10}{'silent s':>10}"]
    for title, row in report.items():
        peak = row["peak_mib"]
        lines.append(
            f"{title:24}{row['read_mib']:8.0f}{row['read_s']:8.2f}{row['pack_s']:8.2f}"
            f"{row['load_s']:8.2f}{row['processor_s']:8.2f}{row['ratio']:7.2f}"
            f"{row['gain']:7.2f}{row['best_gain']:7.2f}{row['kept_s']:8.2f}"
            f"{'' if peak is None else round(peak):>10}{row['longest_silence_s']:10.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
