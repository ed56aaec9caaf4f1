"""What a graph is on a GPU, on the CPU: a list of operators with the tensors that they work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tape(TorchDispatchMode):
    """Notes every operator that runs, with its arguments and where its result lies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run the operators again on the same memory; no Python of the function runs."""
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeCapture:
    """Captures as CUDA does. `n_replayed` counts replays; with `limit` later captures fail."""

    def __init__(self, limit: int | None = None) -> None:
        self.n_captured = 0
        self.n_replayed = 0
        self._limit = limit

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it once to warm up, then once for the tape."""
        run()
        if self.n_captured == self._limit:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB")
        self.n_captured += 1
        tape = _Tape()
        with tape:
            run()

        def replay() -> None:
            self.n_replayed += 1
            tape.replay()

        return replay
