"""Numbers of 64 bits by whole ones, where a device has none: the bits of those that have them."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import compared

from shardnet.model.devices.device_recurrence import STATE_PARTS
from shardnet.model.devices.driver import THREADS, Array, launch, whole_text
from shardnet.model.devices.host import HostDriver

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
ODD = np.array([0.0, -0.0, 1e-30, 40.0, 88.0, -104.0, 3e38, -3e38, np.nan], np.float32)


@pytest.mark.parametrize("seed", [1, 2])
def test_decays_by_whole_numbers_have_the_bits_of_doubles(seed: int) -> None:
    numbers, n_groups = np.random.default_rng(seed), 400
    sizes = 2.0 ** numbers.integers(-30, 10, (n_groups * THREADS, 3))
    given = (numbers.normal(size=sizes.shape) * sizes).astype(np.float32)
    given[: len(ODD) ** 2, 0], given[: len(ODD) ** 2, 1] = np.repeat(ODD, len(ODD)), np.tile(ODD, 9)
    by_doubles, by_whole = (_decays(given, options) for options in ((), ("-DWITHOUT_REALS",)))
    is_number = ~np.isnan(by_doubles)
    assert np.array_equal(np.isnan(by_whole), ~is_number)
    assert np.array_equal(
        by_doubles[is_number].view(np.uint32), by_whole[is_number].view(np.uint32)
    )


def _decays(given: Array, options: tuple[str, ...]) -> Array:
    driver, found = HostDriver(options=options), np.empty_like(given)
    text = whole_text(driver.dialect, {}, *STATE_PARTS) + KERNEL
    buffers = driver.empty(given.nbytes), driver.empty(given.nbytes)
    driver.upload(buffers[0], given)
    kernel = driver.compile(text, ["decays"])["decays"]
    launch(driver, kernel, (len(given) // THREADS, 1), buffers)
    driver.download(buffers[1], found)
    return found
