"""How GGUF tensors become panels: every type, to the bit, and every change of the converter."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from support.models.packed_blocks import random_rows

from shardnet.checkpoint.formats.gguf_types import PACKED, packing_of
from shardnet.checkpoint.tensors.model_tensor import rotary_halves
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.model.kernels.codes import PackedWeight
from shardnet.model.kernels.panels import Panels, pack_into, unpack

N_IN = 512


def stored(kind: str, n_rows: int, n_in: int = N_IN) -> StoredTensor:
    return StoredTensor(
        name="w", dtype=kind, shape=(n_rows, n_in), size_bytes=0, file="m.gguf", offset=0
    )


def meant(kind: str, rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


def values_of(weight: PackedWeight, tensors: list[torch.Tensor], n_rows: int) -> torch.Tensor:
    """The values of panels that are packed 32 rows at a time."""
    packed = torch.empty(weight.form.packed_shape(n_rows, N_IN), dtype=torch.uint8)
    for begin in range(0, n_rows, 32):
        end = min(begin + 32, n_rows)
        rows = weight.rows(tensors, begin, end)
        pack_into(packed[begin // 16 : -(-end // 16)], rows, weight.form)
    return unpack(Panels(packed=packed, form=weight.form, shape=(n_rows, N_IN)), torch.float32)


@pytest.mark.parametrize("kind", PACKED)
def test_panels_have_the_values_of_the_definition(kind: str) -> None:
    rows = torch.from_numpy(random_rows(kind, 72, N_IN, seed=1))
    weight = packing_of([stored(kind, 72)])
    assert weight is not None
    assert weight.in_order
    assert torch.equal(values_of(weight, [rows], 72), meant(kind, rows))


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_what_the_package_quantises(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(16, N_IN)).astype(np.float32)
    rows = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))
    weight = packing_of([stored(kind, 16)])
    assert weight is not None
    assert torch.equal(values_of(weight, [rows], 16), meant(kind, rows))


def test_rows_of_queries_are_reordered_as_their_values_are() -> None:
    rows = torch.from_numpy(random_rows("Q4_K", 72, N_IN, seed=1))
    weight = packing_of([stored("Q4_K", 72)], n_heads=3)
    assert weight is not None
    assert not weight.in_order
    assert torch.equal(values_of(weight, [rows], 72), rotary_halves(meant("Q4_K", rows), 3))


def test_rows_of_two_tensors_follow_each_other() -> None:
    tensors = [torch.from_numpy(random_rows("IQ3_S", n, N_IN, seed=n)) for n in (40, 24)]
    weight = packing_of([stored("IQ3_S", 40), stored("IQ3_S", 24)])
    assert weight is not None
    assert weight.in_order
    expected = torch.cat([meant("IQ3_S", rows) for rows in tensors])
    assert torch.equal(values_of(weight, tensors, 64), expected)


def test_what_stays_plain() -> None:
    assert packing_of([stored("F16", 16)]) is None
    assert packing_of([stored("Q4_K", 16), stored("Q6_K", 16)]) is None
    stack = StoredTensor(
        name="w", dtype="Q8_0", shape=(2, 16, 32), size_bytes=0, file="m.gguf", offset=0
    )
    assert packing_of([stack]) is None
