from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import RemoteProtocolError
from shardnet.model.codec import from_bytes, to_bytes, torch_dtype
from shardnet.types import DType

CPU = torch.device("cpu")


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
    with pytest.raises(RemoteProtocolError, match=f"take 24 bytes, {size_bytes} came"):
        from_bytes(bytearray(size_bytes), DType.FLOAT32, 2, 3, CPU)
