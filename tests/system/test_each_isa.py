"""What is promised of bits, once more for each class of CPU that this one can be told to be."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_recovery
import test_unlike_nodes
from support.soak import cases, is_soak
from support.system.nodes import Crew, open_machine
from support.system.pytest_copies import PytestCopies, open_pytest_copies
from support.system.warm_start import is_possible

from shardnet.cluster.machine.kernels import VECTORS
from shardnet.cluster.machine.profile import find_isa
from shardnet.model.kernels.library import ISA_VARIABLE, Isa, find_kernels

ROOT = Path(__file__).parents[2]
IN_PROCESS = (
    "tests/parity/test_exactness.py",
    "tests/parity/test_transformers_parity.py",
    "tests/parity/test_quantized_parity.py",
)
SHORT = [
    "-k",
    "(llama or deepseek_v3) and not "
    "(llama4 or tied or llama3 or biases or indexed or gelu or with_these_weights or "
    "however_it_is_computed or whatever_the_heads)",
]
"""What the suite runs of them: all promises, of two unlike families, whole and odd rows of one.
What no kernel of ours computes is the same for each class; so are the two tests that go through
the instruction sets themselves, whatever they are told."""
SHORT_OF_NODES = "portable"
"""The class whose nodes the suite starts: the one without vectors, where torch has most to do. Of
those with vectors it has nodes of this machine's own class."""
SHORT_TEXT = 20
"""Tokens of each text there: without vectors none is done before a node is killed."""
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
QUIET = ["-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
PROMISES_S = 540.0
"""How long those of one class may take, which are thousands in the long form."""
OF_TORCH = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
"""Has torch take no more of the CPU than the library does."""


def class_told(name: str | None = None) -> tuple[Isa, bool, bool] | None:
    """What this machine computes with where SHARDNET_ISA is `name`, by default what it is now."""
    found = find_kernels(os.environ if name is None else {ISA_VARIABLE: name})
    return (found.isa, found.has_pairs, found.has_tiles) if found is not None else None


def skip_unless_told(name: str) -> None:
    """Skip what this machine cannot be told to be, or is."""
    if class_told(name) != CLASSES[name]:
        pytest.skip("this machine is none, or has no compiled library")
    if class_told() == CLASSES[name]:
        pytest.skip("this machine is one: the tests themselves show it")


@pytest.fixture(scope="module")
def copies() -> Iterator[PytestCopies]:
    with open_pytest_copies() as copies:
        yield copies


@pytest.mark.skipif(not is_possible(), reason="no process that has torch can be copied here")
@pytest.mark.parametrize("name", CLASSES)
def test_promises_hold_on_a_cpu_of_the_class(name: str, copies: PytestCopies) -> None:
    skip_unless_told(name)
    code, said = copies.run(
        ["-q", *QUIET, *([] if is_soak() else SHORT), *IN_PROCESS],
        os.environ | {ISA_VARIABLE: name} | OF_TORCH.get(name, {}),
        ROOT,
        PROMISES_S,
    )
    n_passed = re.search(r"(\d+) passed", said)
    assert code == 0, said[-6000:]
    assert n_passed is not None
    assert int(n_passed[1]) > len(IN_PROCESS)


@pytest.mark.parametrize(
    "name", cases([SHORT_OF_NODES], [name for name in CLASSES if name != SHORT_OF_NODES])
)
def test_nodes_of_the_class_keep_their_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_told(name)
    for variable, value in {ISA_VARIABLE: name, **OF_TORCH.get(name, {})}.items():
        monkeypatch.setenv(variable, value)
    if not is_soak():
        monkeypatch.setattr(test_recovery, "N_TOKENS", SHORT_TEXT)
    with test_recovery.open_survivor(tmp_path / "surviving") as anna:
        test_recovery.test_a_stage_that_spans_two_nodes_says_the_same_and_outlives_one_of_them(
            anna, signal.SIGKILL
        )
        if not is_soak():
            return
        test_recovery.test_a_ring_that_loses_its_middle_and_its_tail_says_the_same(anna)
    if find_isa(os.environ) in VECTORS:
        with open_machine(tmp_path / "unlike") as machine:
            crew = Crew(machine=machine, nodes=machine.start_nodes("anna"))
            test_unlike_nodes.test_portable_arithmetic_gives_the_same_bits_on_unlike_cpus(
                crew, tmp_path
            )
