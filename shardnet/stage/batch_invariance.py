"""Tests linear layers for batch invariance: whether bits of a row depend on the rows beside it."""

from __future__ import annotations

import logging

import torch

from shardnet.model.kernels.linear import KernelChoice, Linear, is_batch_invariant
from shardnet.types import DType

log = logging.getLogger(__name__)


class BatchInvarianceTests:
    """Tests each kind of linear once for batch invariance."""

    def __init__(self, exact_rows: int, device: torch.device) -> None:
        """Start with the probed `exact_rows`."""
        self.exact_rows = exact_rows
        self.all_native = True
        """Whether all linears so far are the compiled library's."""
        self._device = device
        self._seen: set[tuple[int, int, DType, type[Linear]]] = set()

    def is_new(self, linear: Linear, choice: KernelChoice) -> bool:
        """Say, only once for each kind of linear, that it has yet to be tested."""
        key = (*linear.shape, choice.dtype, type(linear))
        if self.exact_rows == 1 or key in self._seen:
            return False
        self._seen.add(key)
        return True

    def take_over(self, linear: Linear, exact_rows: int) -> None:
        """Count a linear that was tested before, with others: up to `exact_rows` rows are alike."""
        self.all_native = self.all_native and linear.is_native
        self.exact_rows = min(self.exact_rows, exact_rows)

    def test(self, name: str, linear: Linear, choice: KernelChoice) -> None:
        """Test a linear, unless one of its kind was tested."""
        self.all_native = self.all_native and linear.is_native
        if self.is_new(linear, choice) and not is_batch_invariant(linear, choice, self._device):
            log.warning(
                "%s: on this machine the last bits of a token depend on how many are computed at "
                "once; with --deterministic they are computed one by one, which is slower",
                name,
            )
            self.exact_rows = 1
