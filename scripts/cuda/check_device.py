"""Report what this machine's device computes, how right and how fast, as text to send with a bug.

    python scripts/cuda/check_device.py                   # the GPU if torch has one, else the CPU
    python scripts/cuda/check_device.py --device mps
    python scripts/cuda/check_device.py --device opencl:0 --model FILE.gguf
    python scripts/cuda/check_device.py --quick           # small trials, rough times

It needs shardnet's sources and packages, and nothing else: CPUs, CUDA, ROCm, MPS; Linux, macOS,
Windows. A part that fails says so and the next one begins. It names no user, host or path but
torch's own error messages.

Exits 1 where a result is WRONG or a part failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, installed or not
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the steps that benchmarks run
from bench_steps import make_step
from check_cuda import Part, run_parts
from cpu_promises import promises, shares
from cuda_device import FULL, SMALL, Gpu
from cuda_logits import SHORT_TRIAL, WHOLE_TRIAL, small_model
from text_device import text_parts

from shardnet import __version__
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.machine.profile import find_devices, find_isa
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import computes
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import probe
from shardnet.stage.load import load_stage
from shardnet.types import DType, LayerRange, SlotId

Cells = Sequence[str]
SIZE = 2048
N_PROMPT = 256


def main() -> None:
    """Print the report and exit with what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="check_device")
    parser.add_argument("--device", default="auto", help="as of shardnet node; one device")
    parser.add_argument("--model", default="", help="also this file, where the device is opencl")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: as torch chooses")
    parser.add_argument("--quick", action="store_true", help="small trials, rough times")
    parser.add_argument("--seconds", type=float, default=300, help="no part begins after so many")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    found = find_devices(options.device, print)[0]
    device = torch.device(found.for_torch)
    gpu = Gpu(device, SMALL if options.quick else FULL)
    if found.driver:
        own = text_parts(found, gpu, options.model, is_quick=options.quick)
        end(run_parts([("the machine", partial(machine, device)), *own], options.seconds))
    with small_model(device, SHORT_TRIAL if options.quick else WHOLE_TRIAL) as model:
        parts: list[Part] = [
            ("the machine", partial(machine, device)),
            ("torch", partial(torch_build, device)),
            ("dtypes: error against float64; time of one row, of 64", partial(dtypes, gpu)),
            (
                "batch invariance: rows with the same bits alone and together",
                partial(exact, device),
            ),
            ("logits of a small model against plain formulas", model.against_plain),
            ("the bundled model", partial(bundled, gpu)),
        ]
        if device.type == "cpu":
            parts.insert(4, ("what docs/exactness.md promises of this CPU", promises))
            parts.append(("weights read from memory, one row", partial(shares, gpu)))
        if device.type == "cuda":
            parts.insert(5, ("streamed layers against resident", model.streamed_against_resident))
            parts.insert(5, ("graphs against eager steps", model.graphs_against_eager))
        is_good = run_parts(parts, options.seconds)
    end(is_good)


def end(is_good: bool) -> NoReturn:
    """Print the last line, and exit."""
    print(f"\n{'all is right' if is_good else 'something is WRONG or failed'}")
    raise SystemExit(0 if is_good else 1)


def machine(device: torch.device) -> Iterator[Cells]:
    """Say what computes."""
    memory = psutil.virtual_memory()
    yield "shardnet", __version__
    yield "system", f"{platform.system()} {platform.release()}", platform.machine()
    yield "Python", platform.python_version(), platform.python_implementation()
    yield "processor", _processor(), f"{psutil.cpu_count(logical=False)} cores"
    yield "threads", str(torch.get_num_threads()), f"{os.cpu_count()} logical processors"
    yield "memory", f"{memory.total / 2**30:.1f} GiB", f"{memory.available / 2**30:.1f} free"
    yield "compiled kernels", find_isa(os.environ) or "none for this system"
    native = native_kernels()
    if native is not None:
        yield "bfloat16 pairs, tiles (AMX)", str(native.has_pairs), str(native.has_tiles)
    yield "device", str(device)


def _processor() -> str:
    """Return the processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def torch_build(device: torch.device) -> Iterator[Cells]:
    """Say how torch was built, and what it sees."""
    yield "torch", torch.__version__, torch.backends.cpu.get_cpu_capability()
    yield "CUDA, ROCm", str(torch.version.cuda), str(torch.version.hip)
    yield "MPS", f"built {torch.backends.mps.is_built()}", f"{torch.backends.mps.is_available()}"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", found.name, f"{found.total_memory / 2**30:.1f} GiB"
    if device.type == "mps":
        yield "mps", f"{torch.mps.recommended_max_memory() / 2**30:.1f} GiB recommended"


@torch.inference_mode()
def dtypes(gpu: Gpu) -> Iterator[Cells]:
    """Hold a matmul of each dtype against float64, and time it."""
    numbers = torch.Generator().manual_seed(1)
    whole = [torch.randn(n, SIZE, generator=numbers) for n in (64, SIZE)]
    for dtype in DType:
        wanted = torch_dtype(dtype)
        if not computes(gpu.device, wanted):
            yield dtype.value, "not computed, or not right"
            continue
        plain = [numbers.to(wanted) for numbers in whole]
        rows, weight = (numbers.to(gpu.device) for numbers in plain)
        exact = plain[0].double() @ plain[1].double().T
        found = torch.nn.functional.linear(rows, weight).cpu().double()
        error = float((found - exact).abs().max() / exact.abs().max())
        times = [
            gpu.seconds_each(partial(torch.nn.functional.linear, rows[:n], weight), 5)
            for n in (1, 64)
        ]
        yield dtype.value, f"{error:.1e}", *(f"{took_s * 1e6:.0f} µs" for took_s in times)


def exact(device: torch.device) -> Iterator[Cells]:
    """Say what each dtype is computed by, and in how many rows a row keeps its bits."""
    for dtype in DType:
        choice = probe(device, dtype, dtype)
        yield dtype.value, choice.name, f"{choice.exact_rows} rows", f"padded to {choice.min_rows}"


@torch.inference_mode()
def bundled(gpu: Gpu) -> Iterator[Cells]:
    """Measure a prompt and decode steps of the bundled model, in its own dtype."""
    checkpoint = Checkpoint.open(DEFAULT_MODEL_PATH)
    config, device = checkpoint.config, gpu.device
    dtype = config.checkpoint_dtype or DType.FLOAT32
    began = time.perf_counter()
    stage = load_stage(
        checkpoint,
        LayerRange(0, config.n_layers),
        choice=probe(device, dtype, dtype),
        device=device,
        room_blocks=64,
        progress=lambda done, total: None,
    )
    gpu.wait()
    yield "loading", f"{time.perf_counter() - began:.2f} s", stage.choice.name
    prompt = [(5 * place) % config.vocab_size for place in range(N_PROMPT)]

    def prefill() -> None:
        stage.forward(make_step([(0, 0, prompt)]), None)
        stage.kv.free(SlotId(0))

    prefill()
    yield "prefill", f"{N_PROMPT / gpu.seconds(prefill):.0f} tokens/s"
    for n_rows in (1, 8):
        for slot in range(n_rows):
            stage.forward(make_step([(slot, 0, prompt[:64])]), None)
        step = make_step((slot, 64, [slot]) for slot in range(n_rows))
        stage.forward(step, None)
        took_s = gpu.seconds(partial(stage.forward, step, None))
        yield f"decode, {n_rows} at once", f"{n_rows / took_s:.0f} tokens/s"


if __name__ == "__main__":
    main()
