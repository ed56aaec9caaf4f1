"""Pages of slots on a device: as many as the room has, and nothing of them in the host's memory."""

from __future__ import annotations

import numpy as np
import psutil
import torch
from support.devices import HostOnce, compared

from shardnet.model.devices.device_kv import PAGE, DeviceKvCache
from shardnet.model.devices.driver import Buffer
from shardnet.model.layers.attention import Span
from shardnet.types import SlotId

pytestmark = compared
SLOT = SlotId(0)


class OwnMemory(HostOnce):
    """A device whose memory is none of this process."""

    def empty(self, n_bytes: int) -> Buffer:
        """Return nothing."""
        return None

    def copy(
        self, source: Buffer, target: Buffer, n_bytes: int, at: tuple[int, int] = (0, 0)
    ) -> None:
        """Do nothing."""


def grown(kv: DeviceKvCache, n_pages: int) -> DeviceKvCache:
    """Have the rows of a page more computed on the device, again and again."""
    for page in range(n_pages):
        begin = page * PAGE
        kv.ensure(SLOT, begin + PAGE, PAGE)
        kv.bring([Span(slot=SLOT, start=0, end=PAGE, position=begin, masks=None)])
    return kv


def cache_on(driver: HostOnce, room_blocks: int, size: int) -> DeviceKvCache:
    kv = DeviceKvCache(1, 1, size, torch.float32, torch.device("cpu"), room_blocks)
    kv.compute_on(driver)
    return kv


def test_pages_double_up_to_the_room() -> None:
    kv = cache_on(HostOnce(), 5, 4)
    assert [grown(kv, n_pages).n_made[0] for n_pages in range(1, 6)] == [1, 2, 4, 4, 5]


def test_what_a_device_holds_takes_no_memory_of_the_host() -> None:
    n_pages, size = 64, 4096  # 512 MiB; of what is freed, large pages may stay
    kv, this = cache_on(OwnMemory(), n_pages, size), psutil.Process()
    before = this.memory_info().rss
    grown(kv, n_pages)
    assert kv.layer(SLOT, 0)[0].shape == (1, n_pages * PAGE, size)
    assert this.memory_info().rss - before < 160 << 20


def test_a_slot_is_copied_on_the_device() -> None:
    driver, size, n_kept, n_changed, other = HostOnce(), 4, 2 * PAGE + 10, 2 * PAGE + 5, SlotId(1)
    kv = grown(cache_on(driver, 6, size), 3)
    for buffer in kv.pages_of(0):
        driver.upload(buffer, np.arange(3 * PAGE * size, dtype=np.float32))
    kv.copy(SLOT, other, n_kept)
    for slot in (SLOT, other):  # rows of their own, behind what both have
        kv.ensure(slot, n_changed + 1, 1)
        kv.bring([Span(slot=slot, start=0, end=1, position=n_changed, masks=None)])
    assert driver.n_waits == 0
    assert kv.n_made[0] == 6
    driver.upload(kv.pages_of(0)[0], np.zeros(3 * PAGE * size, np.float32))
    held, copied = kv.contents(SLOT).keys[0], kv.contents(other).keys[0]
    assert not held[0, :n_changed].any()
    expected = torch.arange(n_changed * size, dtype=torch.float32).view(n_changed, size)
    assert torch.equal(copied[0, :n_changed], expected)
