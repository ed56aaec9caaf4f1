"""Pages of slots on a device: as many as the room has, and nothing of them in the host's memory."""

from __future__ import annotations

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

    def copy(self, source: Buffer, target: Buffer, n_bytes: int) -> None:
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
    n_pages, size = 64, 512  # 64 MiB
    kv, this = cache_on(OwnMemory(), n_pages, size), psutil.Process()
    before = this.memory_info().rss
    grown(kv, n_pages)
    assert kv.layer(SLOT, 0)[0].shape == (1, n_pages * PAGE, size)
    assert this.memory_info().rss - before < 16 << 20
