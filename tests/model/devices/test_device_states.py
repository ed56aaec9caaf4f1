"""Kernels of states: the same bits in any order of threads, by OpenCL, and without doubles."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import DEVICE, HostOnce, compared, device_of

from shardnet.model.devices.device_recurrence import STATE_NAMES, STATE_PARTS
from shardnet.model.devices.device_states import NO_CELL
from shardnet.model.drivers.driver import THREADS, Array, Buffer, Driver, launch, whole_text

pytestmark = compared
KERNEL = """
KERNEL decays(GLOBAL const float *given, GLOBAL float *found WHERE) {
    PHASE {
        const uint32_t at = GROUP_X * THREADS + THREAD;
        const REAL steps = softplus(REAL_ADD(WIDE(given[3 * at]), WIDE(given[3 * at + 1])));
        const REAL opened = real_exponential(WIDE(given[3 * at + 1]));
        found[3 * at] = NARROW(steps);
        found[3 * at + 1] = NARROW(real_exponential(REAL_MUL(WIDE(given[3 * at + 2]), steps)));
        found[3 * at + 2] = NARROW(REAL_DIV(WIDE(2.0f), REAL_ADD(REAL_ONE, opened)));
    }
}
"""
WITHOUT_DOUBLES = ("-DWITHOUT_REALS",)
ODD = np.array([0.0, -0.0, 1e-30, 40.0, 88.0, -104.0, 3e38, -3e38, np.nan], np.float32)
RUNS = np.array(
    [[0, 4, NO_CELL, 1]] * 4 + [[4, 9, 0, 2]] * 3 + [[4, 9, 0, 3], [4, 9, 0, 4]], np.uint32
)
"""Rows of two slots: the first begins, the second has two drafts."""


def test_decays_by_whole_numbers_have_the_bits_of_doubles() -> None:
    numbers, n_groups = np.random.default_rng(1), 200
    sizes = 2.0 ** numbers.integers(-30, 10, (n_groups * THREADS, 3))
    given = (numbers.normal(size=sizes.shape) * sizes).astype(np.float32)
    given[: len(ODD) ** 2, 0], given[: len(ODD) ** 2, 1] = np.repeat(ODD, len(ODD)), np.tile(ODD, 9)
    by_doubles, by_whole = (_decays(given, options) for options in ((), WITHOUT_DOUBLES))
    is_number = ~np.isnan(by_doubles)
    assert np.array_equal(np.isnan(by_whole), ~is_number)
    assert np.array_equal(
        by_doubles[is_number].view(np.uint32), by_whole[is_number].view(np.uint32)
    )


def _decays(given: Array, options: tuple[str, ...]) -> Array:
    driver = HostOnce(options=options)
    text = whole_text(driver.dialect, {}, *STATE_PARTS) + KERNEL
    buffers = _put(driver, given), driver.empty(given.nbytes)
    kernel = driver.compile(text, ["decays"])["decays"]
    launch(driver, kernel, (len(given) // THREADS, 1), buffers)
    return _taken(driver, buffers[1], given)


@pytest.mark.parametrize("kind", ["(THREADS - 1 - (i))", "without doubles", DEVICE])
def test_states_have_the_same_bits_in_any_order_and_dialect(kind: str) -> None:
    driver: Driver = HostOnce(options=WITHOUT_DOUBLES)
    if kind != "without doubles":
        driver = device_of(kind).driver
    for found, expected in zip(_all(driver), _all(HostOnce()), strict=True):
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def _all(driver: Driver) -> list[Array]:
    """Run a DeltaNet, Mamba-2 and a short convolution: states and outputs of each."""
    numbers, n_rows, taps = np.random.default_rng(1), len(RUNS), 4
    kernels = driver.compile(whole_text(driver.dialect, {}, *STATE_PARTS), STATE_NAMES)

    def some(*shape: int) -> Array:
        return numbers.normal(size=shape).astype(np.float32)

    found: list[Array] = []
    heads, key_heads, key, value = 4, 2, 20, 34
    keys, values = key_heads * key, heads * value
    columns, runs = 2 * keys + values, _put(driver, RUNS)
    places = np.array([0, keys, 2 * keys, columns, key, 2 * value, 0, heads], np.uint32)
    for is_mamba in (0, 1):
        rest = some(2 * heads + value + (taps + 1) * columns)
        parameters = np.concatenate([-np.abs(some(heads)), rest])
        given = some(n_rows, columns + values), some(n_rows, 2 * heads), parameters, places
        states = some(5, heads * key * value + (taps - 1) * columns)
        made = [_put(driver, states), _put(driver, given[0][:, :values])]
        sizes = columns + values, 2 * heads, heads, taps, key_heads, heads, key, value, 0
        others = (
            is_mamba,
            1 - is_mamba,
            is_mamba,
            0,
            0,
            np.float32(1e-6),
            np.float32(1),
            np.float32(0),
        )
        buffers = [*(_put(driver, each) for each in given), runs, *made]
        launch(driver, kernels["recur"], (heads, n_rows), buffers, *sizes, *others)
        found += [_taken(driver, made[0], states), _taken(driver, made[1], given[0][:, :values])]
    width = THREADS + 44
    rows, states = some(n_rows, 3 * width), some(5, (taps - 1) * width)
    made = [_put(driver, states), _put(driver, rows[:, :width])]
    buffers = [
        *(_put(driver, each) for each in (rows, some(taps, width), some(width))),
        runs,
        *made,
    ]
    launch(driver, kernels["convolve"], (2, n_rows), buffers, width, taps, 1)
    return [*found, _taken(driver, made[0], states), _taken(driver, made[1], rows[:, :width])]


def _put(driver: Driver, array: Array) -> Buffer:
    buffer = driver.empty(array.nbytes)
    driver.upload(buffer, np.ascontiguousarray(array))
    return buffer


def _taken(driver: Driver, buffer: Buffer, like: Array) -> Array:
    array = np.empty(like.shape, like.dtype)
    driver.download(buffer, array)
    return array
