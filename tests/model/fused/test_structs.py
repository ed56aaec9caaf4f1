"""What the compiled library and Python tell each other, read from the library's sources.

Both sides write the same structs down. A field that only one of them has moves all that follow it,
and the library then reads and writes anywhere.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardnet.model.arithmetic import row_functions
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config import panel_form
from shardnet.model.fused import structs
from shardnet.model.kernels import library, packing
from shardnet.model.kernels.recurrence import RecurrenceStruct
from shardnet.model.layers.attention import plan_step
from shardnet.model.layers.native_attention import MAX_HEAD, AttendStruct
from shardnet.model.shards.group import GatherStruct, JoinedStruct
from shardnet.types import (
    BLOCK_POSITIONS,
    Epoch,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
)

SOURCES = Path(__file__).parents[3] / "shardnet" / "model" / "kernels" / "csrc"
TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "parallel_function": ctypes.c_void_p,
    "join_function": ctypes.c_void_p,
    "await_function": ctypes.c_void_p,
}
MIRRORS: dict[str, type[ctypes.Structure]] = {
    "team": library.Team,
    "form": library.FormStruct,
    "linear": library._LinearStruct,
    "packing": packing._Packing,
    "block_packing": packing._BlockPacking,
    "code_packing": packing._CodePacking,
    "look_up": packing._LookUp,
    "norm": row_functions.NormStruct,
    "row_call": row_functions.RowStruct,
    "head_matmuls": row_functions.HeadStruct,
    "streams": structs.StreamsStruct,
    "residual": structs.ResidualStruct,
    "attend": AttendStruct,
    "gather": GatherStruct,
    "joined": JoinedStruct,
    "attention_call": structs.AttentionStruct,
    "mlp_call": structs.MlpStruct,
    "layer": structs.LayerStruct,
    "recurrence": RecurrenceStruct,
}
Fields = list[tuple[str, Any]]


@cache
def sources() -> str:
    """Headers and sources, without comments."""
    found = sorted(SOURCES.glob("*.[ch]"))
    return re.sub(r"/\*.*?\*/", "", "\n".join(path.read_text() for path in found), flags=re.S)


def fields_of(name: str) -> Fields:
    """Read `struct NAME` in order: what it is made of, each with its name."""
    [body] = re.findall(rf"^struct {name} \{{(.*?)^\}};", sources(), re.S | re.M)
    found: Fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        said = re.fullmatch(r"(?:const )?(struct \w+|\w+)\b(.*)", declaration, re.S)
        assert said, declaration
        for field in said[2].split(","):
            is_pointer = "*" in field
            kind = ctypes.c_void_p if is_pointer else type_of(said[1])
            name, _, size = field.strip(" *\n]").partition("[")
            found.append((name, kind * int(size) if size else kind))
    return found


def type_of(name: str) -> Any:
    return MIRRORS[name.removeprefix("struct ")] if name.startswith("struct ") else TYPES[name]


def constant(name: str) -> int:
    """Read a number that is defined or enumerated."""
    found = re.findall(rf"(?:#define {name}|\b{name} =) (\d+)\b", sources())
    assert len(set(found)) == 1, (name, found)
    return int(found[0])


@pytest.mark.parametrize("name", MIRRORS)
def test_every_struct_is_the_same_on_both_sides(name: str) -> None:
    assert fields_of(name) == list(MIRRORS[name]._fields_)  # type: ignore[misc]


def test_tables_of_spans_and_slots_have_the_columns_of_their_structs() -> None:
    assert fields_of("slot_layer") == [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("shared", ctypes.c_void_p),
    ]
    assert fields_of("span") == [
        ("layers", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("see_each_other", ctypes.c_int64),
    ]
    kv = KvCache(2, 3, 8, torch.float32, torch.device("cpu"), 16, windows=(None, 4))
    kv.ensure(SlotId(7), 1300)
    groups = tuple(
        RowGroup(sequence_id=SequenceId(1), slot=SlotId(slot), position=at, n_rows=n, n_sampled=n)
        for slot, at, n in ((3, 0, 40), (7, 1300, 2))
    )
    batch = MicroBatch(epoch=Epoch(1), step=StepId(1), groups=groups, token_ids=range(42))
    native_spans = plan_step(batch, kv, 2000, torch.float32).native_spans
    assert native_spans is not None
    assert native_spans.n_rows == 42
    tables = [kv.addresses(slot) for slot in (SlotId(3), SlotId(7))]
    assert native_spans.spans.tolist() == [
        [tables[0].ctypes.data, 0, 40, 0, 0],
        [tables[1].ctypes.data, 40, 42, 1300, 0],
    ]
    for layer in (0, 1):
        keys, values = kv.layer(SlotId(7), layer)
        first = kv.first(SlotId(7), layer)
        assert tables[1][layer].tolist() == [
            keys.data_ptr(),
            values.data_ptr(),
            first,
            keys.shape[1],
            0,
        ]
    assert tables[1][1, 2] > 0  # a window has given something up
    for table in (native_spans.spans, *tables):
        assert table.dtype == np.int64
        assert table.flags.c_contiguous


def test_numbers_stand_for_the_same_on_both_sides() -> None:
    assert {isa.name: isa.value for isa in library.Isa} == {
        name: constant(name) for name in ("PORTABLE", "AVX2", "AVX512", "NEON", "NEON_PLAIN")
    }
    parts = ("BEFORE", "STORE", "ATTEND", "AFTER")
    assert [getattr(structs, part) for part in parts] == [constant(p) for p in parts]
    for activation, number in row_functions.ACTIVATIONS.items():
        in_c = "GELU_TANH" if activation.name.startswith("GELU") else activation.name
        assert number == constant(in_c)
    for function in row_functions.RowFunction:
        assert function == constant(function.name)
    in_c = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
    assert {dtype: constant(name) for dtype, name in in_c.items()} == packing._TYPES
    assert constant("MAX_HEAD") == MAX_HEAD
    assert constant("BLOCK") == BLOCK_POSITIONS
    assert constant("PANEL") == panel_form.PANEL
    assert constant("UNIT") == panel_form.UNIT
    names = {"BFLOAT16": "BF16", "FLOAT16": "F16", "FLOAT32": "F32"}
    for code in panel_form.Code:
        assert code == constant(names.get(code.name, code.name))
    for scale in panel_form.Scale:
        assert scale == constant(f"SCALE_{scale.name}")
    for minimum in panel_form.Minimum:
        assert minimum == constant("NO_MINIMUM" if minimum.name == "NONE" else minimum.name)
    for kind in panel_form.Quantization:
        assert kind.group == constant(f"INT{kind.bits}_GROUP")


def test_python_looks_for_the_version_that_the_source_has() -> None:
    """Else no library would ever be found, and the tests that need one would be left out."""
    assert re.findall(r"\bshardnet_version_(\d+)", sources()) == [str(library.KERNELS_VERSION)]
