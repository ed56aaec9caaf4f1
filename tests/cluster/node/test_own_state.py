"""What a node says of itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.cluster.machine.profile import Device
from shardnet.cluster.node.pressure import OwnState
from shardnet.types import LayerRange

CPU = Device(kind="cpu", description="cpu", dtypes=(), arithmetic="AVX-512 bfloat16")
CARD = Device(kind="nvidia", index=0, description="nvidia:0 (A)", dtypes=(), arithmetic="portable")


def state_of(*devices: Device, is_over: bool = False, standby_bytes: int = 0) -> OwnState:
    order = SimpleNamespace(form=SimpleNamespace(model="/m"), layers=LayerRange(1, 4))
    return OwnState(
        settings=cast(
            Any,
            SimpleNamespace(
                node="n",
                name="n",
                budget=SimpleNamespace(device=devices[0], devices=devices),
                tensor_parallel=0,
            ),
        ),
        advertisement=cast(Any, SimpleNamespace(address="h:1")),
        host=cast(
            Any,
            SimpleNamespace(
                loaded=SimpleNamespace(order=order, weight_bytes=1),
                weight_bytes=1 + standby_bytes,
                membership=SimpleNamespace(is_over=is_over, rank=2),
                refusals=SimpleNamespace(is_draining=False, rests=""),
            ),
        ),
        orders=cast(
            Any,
            SimpleNamespace(
                memory_bytes=lambda: 8,
                device_bytes=lambda: [1] * len(devices),
                threads_of=lambda place: 1,
                threads=1,
            ),
        ),
        power=cast(Any, SimpleNamespace(meters=list)),
    )


@pytest.mark.parametrize(("is_over", "rank"), [(False, 2), (True, None)])
def test_a_stage_whose_ring_is_over_has_no_rank_in_it(is_over: bool, rank: int | None) -> None:
    """A node that was frozen for long comes back to a ring that has gone on without it."""
    stage = state_of(CPU, is_over=is_over).info().stage
    assert stage is not None
    assert stage.rank == rank


def test_behind_a_device_of_the_kernel_text_the_cpu_computes_as_that_does() -> None:
    """So all parts of the node give the same bits, and plans say so."""
    info = state_of(CARD, CPU).info()
    assert info.arithmetic == "portable"
    assert [device.arithmetic for device in info.devices] == ["portable", "portable"]
    assert state_of(CPU).info().arithmetic == "AVX-512 bfloat16"
    unlike = replace(CARD, arithmetic="A, 1e-06 from the compiled kernels")
    assert state_of(unlike, CPU).info().arithmetic == f"{unlike.arithmetic} + AVX-512 bfloat16"


def test_what_a_standby_takes_is_not_free() -> None:
    assert state_of(CPU).info().memory_free_bytes == 7
    assert state_of(CPU, standby_bytes=4).info().memory_free_bytes == 3
