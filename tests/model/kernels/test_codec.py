from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardnet.errors import NumericalError, RemoteProtocolError
from shardnet.model.kernels.codec import from_bytes, pack_rows, to_bytes, torch_dtype, unpack_rows
from shardnet.types import DType, WireDType

CPU = torch.device("cpu")
DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol.md"
NARROW = [WireDType.BFLOAT16, WireDType.FLOAT16, WireDType.INT8]


@given(
    dtype=st.sampled_from(DType), rows=st.integers(0, 5), width=st.integers(0, 5), data=st.data()
)
def test_every_payload_comes_back_to_the_byte(
    dtype: DType, rows: int, width: int, data: st.DataObject
) -> None:
    size_bytes = rows * width * dtype.size_bytes
    payload = data.draw(st.binary(min_size=size_bytes, max_size=size_bytes))
    tensor = from_bytes(payload, dtype, rows, width, CPU)
    assert tensor.shape == (rows, width)
    assert tensor.dtype is torch_dtype(dtype)
    assert bytes(to_bytes(tensor)) == payload


def test_bytes_are_row_major_and_little_endian() -> None:
    tensor = torch.tensor([[1.0, 2.0], [-2.0, 0.5]])
    assert bytes(to_bytes(tensor)).hex() == "0000803f00000040000000c00000003f"
    assert bytes(to_bytes(tensor.T)).hex() == "0000803f000000c0000000400000003f"
    assert bytes(to_bytes(tensor.bfloat16())).hex() == "803f004000c0003f"
    assert bytes(to_bytes(tensor.half())).hex() == "003c004000c00038"


def test_nothing_is_copied_on_the_cpu() -> None:
    tensor = torch.zeros(2, 3)
    view = to_bytes(tensor)
    tensor[0, 0] = 1.0
    assert view[3] == 0x3F
    buffer = bytearray(24)
    shared = from_bytes(buffer, DType.FLOAT32, 2, 3, CPU)
    buffer[3] = 0x3F
    buffer[2] = 0x80
    assert shared[0, 0] == 1.0


@pytest.mark.parametrize("size_bytes", [0, 23, 25, 48])
def test_a_payload_of_another_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"take 24 bytes, but {size_bytes} came"):
        from_bytes(bytearray(size_bytes), DType.FLOAT32, 2, 3, CPU)


def sent(rows: Tensor, dtype: WireDType) -> Tensor:
    """Rows after a hop."""
    return unpack_rows(pack_rows(rows, dtype), dtype, rows.shape[0], rows.shape[1], CPU)


def int8_by_the_document(rows: np.ndarray) -> bytes:
    """docs/protocol.md section 9 in plain numpy, number by number."""
    scales, values = [], []
    with np.errstate(all="ignore"):
        for row in rows:
            for start in range(0, len(row), 64):
                group = row[start : start + 64]
                largest = np.max(np.abs(group))
                scale = np.float32(largest / np.float32(127))
                if not np.isfinite(largest):
                    scale = np.float32("nan")
                elif scale < 2.0**-126:
                    scale = np.float32(0)
                scales.append(scale)
                is_used = scale > 0
                values += [int(np.rint(np.float32(x / scale))) if is_used else 0 for x in group]
    return np.array(scales, "<f4").tobytes() + np.array(values, "i1").tobytes()


ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
USUAL_FLOAT = st.floats(-100, 100, width=32)


@given(
    n_rows=st.integers(0, 3),
    width=st.sampled_from([1, 5, 63, 64, 65, 130]),
    numbers=st.lists(st.one_of(ANY_FLOAT, USUAL_FLOAT), min_size=1, max_size=40),
)
def test_int8_is_as_the_document_says(n_rows: int, width: int, numbers: list[float]) -> None:
    rows = np.resize(np.array(numbers, np.float32), (n_rows, width))
    payload = bytes(pack_rows(torch.from_numpy(rows), WireDType.INT8))
    assert payload == int8_by_the_document(rows)
    assert len(payload) == n_rows * WireDType.INT8.row_bytes(width)


def test_the_documents_example_of_int8() -> None:
    (body,) = re.findall(r"```hex data-int8\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    frame = bytes.fromhex(re.sub(r"#.*", "", body))
    inf = float("inf")
    rows = torch.tensor(
        [[127.0, -63.5, 2.5, 0.0, 0.4], [1.0, inf, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1e-37, 0.0]]
    )
    payload = pack_rows(rows, WireDType.INT8)
    assert bytes(payload) == frame[-27:]
    back = unpack_rows(payload, WireDType.INT8, 3, 5, CPU)
    assert back[0].tolist() == [127.0, -64.0, 2.0, 0.0, 0.0]
    assert back[1].isnan().all()
    assert back[2].tolist() == [0.0] * 5


@given(seed=st.integers(0, 999), width=st.integers(1, 200), exponent=st.integers(-30, 30))
def test_int8_is_off_by_half_a_step_of_its_group(seed: int, width: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, width, generator=generator) * 2.0**exponent
    error = (sent(rows, WireDType.INT8) - rows).abs()
    for start in range(0, width, 64):
        group = slice(start, start + 64)
        step = rows[:, group].abs().amax(-1, keepdim=True) / 127
        assert (error[:, group] <= step * 0.500001).all()


def test_one_large_column_costs_its_group_alone() -> None:
    rows = torch.full((1, 192), 0.25)
    rows[0, 70] = 1000.0
    back = sent(rows, WireDType.INT8)
    assert back[0, 70] == 1000.0
    assert (back[0, 64:70] == 0).all()
    assert torch.allclose(back[0, :64], rows[0, :64])
    assert torch.allclose(back[0, 128:], rows[0, 128:])


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: d.value)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_never_becomes_one(dtype: WireDType, odd: float) -> None:
    rows = torch.full((2, 130), 0.5)
    rows[1, 3] = odd
    back = sent(rows, dtype)
    assert back[0].tolist() == rows[0].tolist()
    assert not back[1, 3].isfinite()
    assert back[1, 64:].tolist() == rows[1, 64:].tolist()
    if dtype is WireDType.INT8:
        assert back[1, :64].isnan().all()


def test_halves_round_to_nearest_and_ties_to_even() -> None:
    rows = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8]])
    assert sent(rows, WireDType.BFLOAT16).tolist() == [[1.0, 1 + 2**-6]]
    rows = torch.tensor([[1 + 2**-11, 1 + 3 * 2**-11]])
    assert sent(rows, WireDType.FLOAT16).tolist() == [[1.0, 1 + 2**-9]]


def test_a_number_beyond_float16_is_refused_by_name() -> None:
    assert sent(torch.tensor([[65519.0]]), WireDType.FLOAT16).tolist() == [[65504.0]]
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(NumericalError, match="does not fit a float16 wire"):
            pack_rows(torch.tensor([[1.0, -70000.0]], dtype=dtype), WireDType.FLOAT16)


@pytest.mark.parametrize("dtype", list(WireDType), ids=lambda d: d.value)
@pytest.mark.parametrize("more", [-1, 1])
def test_rows_of_another_size_are_refused(dtype: WireDType, more: int) -> None:
    size_bytes = 2 * dtype.row_bytes(70)
    with pytest.raises(RemoteProtocolError, match=f"take {size_bytes} bytes"):
        unpack_rows(bytes(size_bytes + more), dtype, 2, 70, CPU)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.value)
def test_a_rings_own_wire_rounds_nothing(dtype: DType) -> None:
    rows = torch.randn(3, 70).to(torch_dtype(dtype))
    assert torch.equal(sent(rows, WireDType.own(dtype)), rows)
