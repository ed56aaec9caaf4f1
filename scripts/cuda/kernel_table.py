"""Tell what each kernel of a decode step costs on each generation of NVIDIA's GPUs, without any.

    python scripts/cuda/kernel_table.py                      # 8B and a mixture, sm_75 to sm_120
    python scripts/cuda/kernel_table.py --shapes Llama-8B --architectures sm_86

Which kernels are launched, how often and with which memory is recorded from the product's own step
(tests/support/recorded_gpu.py). NVRTC compiles them; registers, spills and shared memory are by its
report, and how many groups fit a multiprocessor follows from these. With nvdisasm (pip install
nvidia-cuda-nvdisasm) the loop that loads most is counted: instructions for each byte that a thread
loads there, each counted once, those of loops within too. Weights that a step reads are those of
its products.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, installed or not
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from bench_device_host import SHAPES
from bench_steps import make_step

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.recorded_gpu import Call, RecordedDevice, hollow_stage

from shardnet.model.drivers.driver import THREADS, Buffer
from shardnet.model.drivers.gpu import CUDA, compiled
from shardnet.model.families.registry import parse_config

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
_THREADS = {"sm_75": 1024, "sm_80": 2048, "sm_90": 2048}
_SHARED = {"sm_75": 64, "sm_80": 164, "sm_90": 228}
"""Of a multiprocessor: threads, and KiB that groups share. Others have 1536 and 100."""
_REGISTERS = 65536
_OWN_SHARED = 1024
"""Bytes of a group that CUDA takes, from sm_80 on."""
_LOADED = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class Report(NamedTuple):
    """What a compiler made of a kernel; `of_loop` are instructions and bytes that are loaded."""

    registers: int
    spilled: int
    shared: int
    of_loop: tuple[int, int]

    def groups(self, architecture: str) -> int:
        """Return how many groups of threads fit a multiprocessor."""
        by_registers = _REGISTERS // (-(-self.registers // 8) * 8 * THREADS)
        own = self.shared + _OWN_SHARED * (architecture != "sm_75")
        by_memory = (_SHARED.get(architecture, 100) << 10) // own if own else 64
        return min(by_registers, by_memory, _THREADS.get(architecture, 1536) // THREADS)

    def cell(self, architecture: str) -> str:
        """Describe it in one cell of a table."""
        n, n_bytes = self.of_loop
        each = f", {n / n_bytes:.1f}" if n_bytes else ""
        spilled = f" ({self.spilled} spilled)" if self.spilled else ""
        return f"{self.registers}{spilled}, {self.groups(architecture)}{each}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="kernel_table.py")
    parser.add_argument("--shapes", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--architectures", nargs="*", default=[*ARCHITECTURES])
    options = parser.parse_args()
    for shape in options.shapes:
        for line in table(shape, options.architectures):
            print(line, flush=True)


def table(shape: str, architectures: Sequence[str]) -> Iterator[str]:
    """Record a step at position 300, and yield the lines of its table."""
    device, config = RecordedDevice(), parse_config(SHAPES[shape], shape)
    stage, calls = hollow_stage(config, device, 1024), device.driver.calls
    for position in range(300, 302):  # the first one makes room
        calls.clear()
        stage.run(make_step([(0, position, [7])]), None)
    launches = [call for call in calls if call.kind == "launch"]
    n_bytes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for call in launches:
        kernel = device.driver.texts[call.kernel.value]
        counts[kernel] += 1
        if kernel[1] == "multiply":
            n_bytes[kernel] += _weights(call, device)
    whole = sum(n_bytes.values())
    yield f"\n**{shape}**: {len(launches)} launches, {whole / 1e9:.2f} GB of weights a step\n"
    yield f"| kernel | launches | weights | shared | {' | '.join(architectures)} |"
    yield "|---" * (4 + len(architectures)) + "|"
    for kernel, n in counts.items():
        reports = [report(*kernel, architecture) for architecture in architectures]
        cells = [each.cell(name) for each, name in zip(reports, architectures, strict=True)]
        read = f"{n_bytes[kernel] / 1e6:,.0f} MB" if n_bytes[kernel] else ""
        shared = f"{max(each.shared for each in reports) / 1024:.1f} KiB"
        yield f"| {_title(*kernel)} | {n} | {read} | {shared} | {' | '.join(cells)} |"


def _weights(call: Call, device: RecordedDevice) -> int:
    """Return the bytes of weights that a product of one row reads: of its experts, if any."""
    weights: Buffer = call.arguments[0]
    size = device.driver.sizes[weights.address.value]
    words_of_expert = call.arguments[-2]
    return 4 * int(words_of_expert) * call.groups[1] if words_of_expert else size


def _title(text: str, name: str) -> str:
    """Name a kernel and the form of its weights by its text's macros."""
    found = dict(re.findall(r"^#define (BITS|BLOCK|IS_FLOAT|ROWS) (\d+)$", text, re.MULTILINE))
    if "BITS" not in found:
        return f"`{name}`"
    return f"`{name}`, {'floats' if found['IS_FLOAT'] == '1' else found['BITS'] + ' bits'}"


@cache
def _compiled(text: str, architecture: str) -> tuple[bytes, str]:
    return compiled(CUDA, text, architecture, ["--ptxas-options=-v"])


def report(text: str, name: str, architecture: str) -> Report:
    """Compile a text, and read what came of one of its kernels."""
    code, log = _compiled(text, architecture)
    [own] = re.findall(rf"Compiling entry function '{name}'.*?(?=Compiling entry|\Z)", log, re.S)

    def told(what: str) -> int:
        found = re.search(rf"(\d+) {what}", own)
        return 0 if found is None else int(found[1])

    loop = _loop(_listing(code, name))
    return Report(told("registers"), told("bytes spill stores"), told("bytes smem"), loop)


def _listing(code: bytes, name: str) -> list[str]:
    """Return a kernel's instructions and labels by nvdisasm; nothing where it is not installed."""
    inside = Path(torch.__file__).parents[1].glob("nvidia/*/bin/nvdisasm")
    program = shutil.which("nvdisasm") or next(map(str, inside), "")
    if not program:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code.cubin")
        path.write_bytes(code)
        told = subprocess.run([program, "-c", path], capture_output=True, text=True, check=True)
    found = re.search(rf"^\.text\.{name}:$(.*?)(?=^\.text\.|\Z)", told.stdout, re.M | re.S)
    return found[1].splitlines() if found else []


def _loop(listing: Sequence[str]) -> tuple[int, int]:
    """Count the instructions of the loop that loads most, and the bytes loaded there.

    Each is counted once, those of loops within too.
    """
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in listing:
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1])
            target = re.search(r"BRA.*`\((\.L_\w+)\)", found[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    counted = [(end - begin, sum(map(_bytes, instructions[begin:end]))) for begin, end in loops]
    return max(counted, key=lambda loop: (loop[1], -loop[0]), default=(0, 0))


def _bytes(instruction: str) -> int:
    """Return the bytes that an instruction loads from the GPU's memory."""
    found = re.search(r"\bLDG\.E(\S*)", instruction)
    if found is None:
        return 0
    return next((n for word, n in _LOADED.items() if word in found[1].split(".")), 4)


if __name__ == "__main__":
    main()
