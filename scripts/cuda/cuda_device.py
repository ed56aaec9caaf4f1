"""The device that check_cuda.py measures: its clock, its memory, and what it reads and copies."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: of a GPU much, of a CPU, to try the script, next to nothing."""

    read_bytes: int
    figure_s: float
    streamed_shape: dict[str, int]


FULL = Scale(
    read_bytes=4 << 30,
    figure_s=1.0,
    streamed_shape={
        "hidden": 4096,
        "layers": 4,
        "intermediate": 14336,
        "heads": 32,
        "kv-heads": 8,
        "vocab": 8000,
    },
)
SMALL = Scale(
    read_bytes=1 << 24,
    figure_s=0.01,
    streamed_shape={
        "hidden": 64,
        "layers": 4,
        "intermediate": 128,
        "heads": 4,
        "kv-heads": 2,
        "vocab": 300,
    },
)


class Gpu:
    """A device, its clock and its memory. A CPU, which has no counters, may stand for it."""

    def __init__(self, device: torch.device, scale: Scale) -> None:
        self.device = device
        self.scale = scale
        self._is_cuda = device.type == "cuda"

    def wait(self) -> None:
        """Wait until all is done that was launched."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def taken_bytes(self) -> int:
        """Say what the driver has given away, after what torch keeps for nothing was given back."""
        if not self._is_cuda:
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Say how much more is allocated while something runs than before."""
        if not self._is_cuda:
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of `run`, which has run before, over about a second."""
        self.wait()
        times: list[float] = []
        while len(times) < 3 or sum(times) < self.scale.figure_s:
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def seconds_each(self, run: Callable[[], object], n_times: int) -> float:
        """Return the time of `run` where many follow each other and nobody waits between them."""
        run()

        def several() -> None:
            for _ in range(n_times):
                run()

        return self.seconds(several) / n_times

    @cached_property
    def read_rate(self) -> float:
        """Bytes per second of a sum over memory that no cache holds."""
        memory = torch.ones(self.scale.read_bytes // 4, device=self.device)
        memory.sum()
        return memory.nbytes / self.seconds(memory.sum)

    @cached_property
    def pinned_rate(self) -> float:
        """Bytes per second from pinned memory of the host."""
        n_bytes = self.scale.read_bytes // 4
        source = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        target = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        return n_bytes / self.seconds(lambda: target.copy_(source, non_blocking=True))
