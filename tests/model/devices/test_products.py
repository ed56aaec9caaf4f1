"""Products by the kernel text have the library's bits: on the host, and by OpenCL where it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
import torch
from support.devices import DEVICE, HOST, HostOnce, device_of
from support.models.random_panels import FORMS, random_panels
from support.soak import cases, is_soak
from torch import Tensor

from shardnet.errors import ConfigurationError
from shardnet.model.config.panel_form import FLOAT16, GGUF_FORMS
from shardnet.model.devices.device_layers import Device
from shardnet.model.devices.products import DeviceProduct
from shardnet.model.drivers import driver as drivers
from shardnet.model.drivers.driver import Array, Buffer
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="it is compared with the library")
QUICK = ("-O0",)
REVERSE, SHUFFLED = "(255 - (i))", "((i) * 5 + 3) % 256"
TENSORS: Final = "tensors"
"""The host, with outputs and rows given to threads as NVIDIA's tensor cores do."""
Q4_K, Q6_K = GGUF_FORMS["Q4_K"], GGUF_FORMS["Q6_K"]
GPTQ = next(form for form in FORMS if form.name.startswith("GPTQ"))
BY_DEVICE = [f"{form.name}-{DEVICE}" for form in (Q4_K,)]
IN_ALL_ROWS = {*BY_DEVICE, f"{Q4_K.name}-{HOST}", f"{FLOAT16.name}-{HOST}"}
ALL = [f"{form.name}-{kind}" for kind in (HOST, DEVICE) for form in FORMS]
OF_ALL_KINDS = ("Q4_K", "Q6_K", "Q8_0", "NVFP4", "GPTQ 8", "MLX")
"""Levels with minimums and without, halves of units, codes of 8 bits, with and without a sign."""
BY_TENSORS = [
    f"{form.name}-{TENSORS}"
    for form in FORMS
    if not (form.is_float or form.is_plain or form.name in OF_ALL_KINDS)
]


@functools.cache
def quick_device_of(kind: str) -> Device:
    """As `device_of`; the host's compiler takes longer to optimise a product than that takes."""
    if kind == DEVICE:
        return device_of(kind)
    if kind == TENSORS:
        return Device(HostOnce(options=(*QUICK, "-DTENSORS")))
    return Device(HostOnce("(i)" if kind == HOST else kind, QUICK))


def multiplied(
    device: Device, parts: Sequence[Panels], rows: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply rows on a device, without a test of its bits before."""
    product = DeviceProduct(
        device.kernels,
        device.driver,
        device.scratch,
        [parts],
        None if bias is None else bias.numpy(),
    )
    out = torch.empty(len(rows), product.shape[0])
    taken = device.driver.empty(out.nbytes)
    product(device.put(rows.numpy()), len(rows), taken)
    device.driver.download(taken, out.numpy())
    return out


def random_rows(n_rows: int, n_in: int) -> Tensor:
    return torch.randn(n_rows, n_in, generator=torch.Generator().manual_seed(n_rows))


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether all bits are equal; NaN are all alike."""
    alike = (found.isnan() == expected.isnan()).all()
    return bool(alike) and torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    "case",
    cases(
        [name for name in ALL if HOST in name]
        + [f"{name}-{TENSORS}" for name in OF_ALL_KINDS]
        + BY_DEVICE,
        BY_TENSORS + [name for name in ALL if DEVICE in name],
    ),
)
def test_every_form_has_the_librarys_bits(case: str) -> None:
    """Of 1 and 33 rows with odd sizes, some of 2 and 8; values that are no number come through."""
    name, _, kind = case.rpartition("-")
    form = next(form for form in FORMS if form.name == name)
    n_out, n_in = 40, 300 if form.block_inputs < 256 else 2 * form.block_inputs
    panels, device = random_panels(form, n_out, n_in), quick_device_of(kind)
    linear = PanelLinear([panels], None)
    assert linear.is_native
    few = (33,) if kind == TENSORS else (1, 33)
    for n_rows in (1, 2, 8, 33) if is_soak() or case in IN_ALL_ROWS else few:
        rows = random_rows(n_rows, n_in)
        rows[n_rows // 2, 7] = math.nan if n_rows > 2 else 1e-30
        assert same(multiplied(device, [panels], rows, None), linear(rows)), n_rows


@pytest.mark.parametrize("order", [HOST, REVERSE, SHUFFLED])
def test_threads_may_run_in_any_order(order: str) -> None:
    """Parts of unlike forms, a bias, an order of inputs and rows that are not finite."""
    torch.manual_seed(1)
    inputs = torch.randperm(512).int()
    parts = [
        random_panels(Q4_K, 48, 512),
        random_panels(Q6_K, 20, 512, seed=1),
        random_panels(GGUF_FORMS["Q5_0"], 16, 512, seed=2),
        replace(random_panels(GGUF_FORMS["Q5_0"], 16, 512, seed=3), input_order=inputs),
        random_panels(FLOAT16, 7, 512, seed=4),
    ]
    bias, rows = torch.randn(107), random_rows(9, 512)
    rows[3, 100], rows[5, 0] = math.inf, math.nan
    expected = PanelLinear(parts, bias)(rows)
    assert same(multiplied(quick_device_of(order), parts, rows, bias), expected)


_ADDING = """PHASE {
            TIMES (k, OF_THREAD) {
                const uint32_t i = k * THREADS + THREAD, o = i"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("4 + (quad) / 4", "4"),
        ("dots[r * 4 + j] - less", "dots[r * 4 + j]"),
        ("- LESS * 0x01010101u", ""),
        ("((side) * (DEEP / 16) + QUAD / 4)", "(QUAD / 4)"),
        ("FMA(part[at + g * 16], factor[at + g * 16], sum)", "sum + part[at + g * 16]"),
        (_ADDING, _ADDING.replace("PHASE {", "{ const uint32_t turn = 255;", 1)),
        ("DIV(largest, 127.0f)", "MUL(largest, 1.0f / 127.0f)"),
    ],
    ids=["plane", "offset", "offset of many", "half", "fused", "phase", "reciprocal"],
)
def test_a_wrong_text_is_found_out(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By these tests, and by a device that holds its products against the library's."""
    own = drivers.part_of_text
    assert sum(own(name).count(before) for name in ("linear", "many")) == 1
    monkeypatch.setattr(drivers, "part_of_text", lambda name: own(name).replace(before, after))
    linear = PanelLinear([random_panels(Q6_K, 16, 1024)], None)
    with pytest.raises(ConfigurationError, match="has other bits for Q6_K"):
        Device(HostOnce(options=QUICK)).product(linear)


def test_a_form_is_held_against_the_library_whatever_its_name_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of 32 and of 128 inputs have one name where files are of one maker."""
    device, checked = Device(HostOnce()), list[int]()
    monkeypatch.setattr(device, "_check", lambda part: checked.append(part.form.group))
    for group in (32, 128, 32):
        form = replace(GPTQ, group=group)
        device.product(PanelLinear([random_panels(form, 16, 256)], None))
    assert checked == [32, 128]


def test_experts_are_uploaded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of a layer once more in the host's memory."""
    device, sizes = Device(HostOnce(options=QUICK)), list[int]()
    upload = device.driver.upload

    def noted(buffer: Buffer, array: Array, offset: int = 0) -> None:
        sizes.append(array.nbytes)
        upload(buffer, array, offset)

    monkeypatch.setattr(device.driver, "upload", noted)
    experts = [[random_panels(Q4_K, 16, 256, seed=seed)] for seed in range(3)]
    product = DeviceProduct(device.kernels, device.driver, device.scratch, experts, None)
    each = experts[0][0].packed.nbytes
    assert sizes == [each] * 3
    whole = b"".join(expert.packed.numpy().tobytes() for [expert] in experts)
    assert product._parts[0].weights[: 3 * each].tobytes() == whole
