"""Log-probabilities are near the truth, and the same bits in any batch and on every machine."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch

from shardnet.model.sampling.sampler import rows_logprobs

PROGRAM = """
import hashlib, torch
from shardnet.model.sampling.sampler import rows_logprobs
logits = ((torch.arange(3 * 40001) * 48271 % 65537).float() / 3000 - 11).view(3, -1)
found = rows_logprobs(logits, [0, 7, 40000], 5)
print(hashlib.sha256(repr(found).encode()).hexdigest())
"""
DIGEST = "c72038f96f8e3404261b94dfe41101bf8cec9dbb7ce2901fcebc526bc6de4211"


def some_logits(n_rows: int, n_columns: int) -> torch.Tensor:
    """Numbers that no random generator has to repeat elsewhere."""
    numbers = torch.arange(n_rows * n_columns) * 48271 % 65537
    return (numbers.float() / 3000 - 11).view(n_rows, n_columns)


@pytest.mark.parametrize("n_columns", [1, 2, 3, 300, 40001])
def test_they_are_those_of_exact_sums(n_columns: int) -> None:
    logits = some_logits(4, n_columns)
    logits[1] *= 30
    logits[2, 1:] = -math.inf
    found = rows_logprobs(logits, [n_columns - 1] * 4, 3)
    for row, own in zip(logits.tolist(), found, strict=True):
        most = max(row)
        total = math.log(math.fsum(math.exp(x - most) for x in row))
        assert own.logprob == pytest.approx(row[-1] - most - total, rel=1e-13, abs=1e-15)
        for token_id, logprob in own.top:
            assert logprob == pytest.approx(row[token_id] - most - total, rel=1e-13, abs=1e-15)


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads() -> None:
    logits = some_logits(9, 40001)
    together = rows_logprobs(logits, [*range(9)], 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        alone = [rows_logprobs(logits[row : row + 1], [row], 4)[0] for row in range(9)]
        assert rows_logprobs(logits, [*range(9)], 4) == together == alone
    finally:
        torch.set_num_threads(before)


def test_every_machine_has_these_bits() -> None:
    """The digest was made on x86-64; torch takes the instructions that the variable allows."""
    here = repr(rows_logprobs(some_logits(3, 40001), [0, 7, 40000], 5))
    assert hashlib.sha256(here.encode()).hexdigest() == DIGEST
    usual = torch.backends.cpu.get_cpu_capability()
    if usual == "DEFAULT":
        pytest.skip("this CPU has no AVX2")
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default" if usual == "AVX2" else "avx2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.strip() == DIGEST
