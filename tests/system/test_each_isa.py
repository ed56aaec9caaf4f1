"""What is promised of bits, once more for each class of CPU that this one can be told to be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.soak import is_soak

from shardnet.model.kernels.library import ISA_VARIABLE, Isa, find_kernels

ROOT = Path(__file__).parents[2]
IN_PROCESS = (
    "tests/parity/test_exactness.py",
    "tests/parity/test_transformers_parity.py",
    "tests/parity/test_quantized_parity.py",
)
OF_NODES = ("tests/system/test_recovery.py", "tests/system/test_unlike_nodes.py")
"""Each starts node processes, which takes longer than all that is computed."""
SHORT = [
    "-k",
    "(llama or deepseek_v3 or spans_two_nodes) and not "
    "(llama4 or tied or llama3 or biases or indexed or gelu or with_these_weights)",
]
"""What the suite runs of them: all promises, of two unlike families, whole and odd rows of one.
What no kernel of ours computes is the same for each class."""
SHORT_OF_NODES = "portable"
"""The class whose nodes the suite starts: the one without vectors, where torch has most to do. Of
those with vectors it has nodes of this machine's own class."""
CLASSES = {
    "avx512_bf16": (Isa.AVX512, True, False),
    "avx512": (Isa.AVX512, False, False),
    "avx2": (Isa.AVX2, False, False),
    "neon": (Isa.NEON, False, False),
    "neon_plain": (Isa.NEON_PLAIN, False, False),
    "portable": (Isa.PORTABLE, False, False),
    "off": None,
}
"""What SHARDNET_ISA may be: the instruction set, whether it has pairs of bfloat16, and tiles."""
OF_TORCH = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
"""Has torch take no more of the CPU than the library does."""


def class_told(name: str | None = None) -> tuple[Isa, bool, bool] | None:
    """What this machine computes with where SHARDNET_ISA is `name`, by default what it is now."""
    found = find_kernels(os.environ if name is None else {ISA_VARIABLE: name})
    return (found.isa, found.has_pairs, found.has_tiles) if found is not None else None


@pytest.mark.parametrize("name", CLASSES)
def test_promises_hold_on_a_cpu_of_the_class(name: str) -> None:
    if class_told(name) != CLASSES[name]:
        pytest.skip("this machine is none, or has no compiled library")
    if class_told() == CLASSES[name]:
        pytest.skip("this machine is one: the tests themselves show it")
    chosen = [] if is_soak() else SHORT
    promises = [*IN_PROCESS, *(OF_NODES if is_soak() or name == SHORT_OF_NODES else ())]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *promises],
        cwd=ROOT,
        env=os.environ | {ISA_VARIABLE: name} | OF_TORCH.get(name, {}),
        capture_output=True,
        text=True,
        check=False,
    )
    n_passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert n_passed is not None
    assert int(n_passed[1]) > len(promises)
