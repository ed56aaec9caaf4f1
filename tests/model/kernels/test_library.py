"""The threads that the compiled library shares with torch, whichever OpenMP library torch has."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.needs import needs_library
from torch import Tensor

from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.library import NativeKernels, native_kernels, parallel_by
from shardnet.model.kernels.quantized_linear import quantized

pytestmark = needs_library
ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_int32
PARALLEL = ctypes.CFUNCTYPE(None, ADDRESS, ADDRESS, ctypes.c_uint, ctypes.c_uint)
REGION = ctypes.CFUNCTYPE(None, ctypes.POINTER(NUMBER), ctypes.POINTER(NUMBER), ADDRESS, ADDRESS)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_torchs_openmp_library_runs_functions_on_threads() -> None:
    """Without it the library would compute on one thread, and nobody would notice."""
    native = native_kernels()
    assert native is not None
    assert native.team.parallel


def test_a_library_that_has_neither_is_not_used() -> None:
    native = native_kernels()
    assert native is not None
    assert not parallel_by(cast(Any, SimpleNamespace()), native._library)


def test_gomp_parallel_comes_first() -> None:
    native = native_kernels()
    assert native is not None
    own = PARALLEL(lambda *_: None)
    openmp = SimpleNamespace(GOMP_parallel=own, __kmpc_fork_call=own)
    found = parallel_by(cast(Any, openmp), native._library)
    assert found == ctypes.cast(own, ADDRESS).value


@pytest.mark.parametrize("n_threads", [2, 3])
def test_intels_entry_points_do_what_gomp_parallel_does(n_threads: int) -> None:
    """As in torch for Windows, whose OpenMP library has no GOMP_parallel."""
    native = native_kernels()
    assert native is not None
    pushed: list[tuple[int, int]] = []
    n_entered = 0

    def fork(place: int, n_arguments: int, region: Any, function: int, argument: int) -> None:
        nonlocal n_entered
        assert place
        assert n_arguments == 2
        for number in range(pushed[-1][1]):
            n_entered += 1
            own = NUMBER(number)
            region(ctypes.byref(own), ctypes.byref(own), function, argument)

    types = (ADDRESS, NUMBER, REGION, ADDRESS, ADDRESS)
    parts = {
        "__kmpc_fork_call": ctypes.CFUNCTYPE(None, *types)(fork),
        "__kmpc_push_num_threads": ctypes.CFUNCTYPE(None, ADDRESS, NUMBER, NUMBER)(
            lambda _, number, n: pushed.append((number, n))
        ),
        "__kmpc_global_thread_num": ctypes.CFUNCTYPE(NUMBER, ADDRESS)(lambda _: 7),
    }
    address = parallel_by(cast(Any, SimpleNamespace(**parts)), native._library)
    kernels = NativeKernels(
        isa=native.isa,
        has_pairs=native.has_pairs,
        has_tiles=native.has_tiles,
        _library=native._library,
        _parallel=address,
    )
    panels, rows = quantized(numbers(2000, 300), Quantization.INT4), numbers(40, 300)
    expected = native.matmul([panels], None)(rows)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        assert torch.equal(kernels.matmul([panels], None)(rows), expected)
    finally:
        torch.set_num_threads(before)
    assert set(pushed) == {(7, n_threads)}
    assert n_entered == len(pushed) * n_threads
