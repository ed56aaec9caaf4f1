"""Pages of slots on a device: as many as the room has, and nothing of them in the host's memory."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch
from support.devices import HostOnce, compared

from shardnet.errors import CapacityError
from shardnet.model.devices.device_kv import PAGE, DeviceKvCache
from shardnet.model.devices.device_states import Cells
from shardnet.model.devices.products import Rows
from shardnet.model.drivers.driver import Buffer
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


class Tight(HostOnce):
    """A device that has memory for so many buffers more."""

    n_left = 1 << 20

    def empty(self, n_bytes: int) -> Buffer:
        """See Driver."""
        if self.n_left == 0:
            raise CapacityError("no memory")
        self.n_left -= 1
        return super().empty(n_bytes)


def grown(kv: DeviceKvCache, n_pages: int) -> DeviceKvCache:
    """Have the rows of a page more computed on the device, again and again."""
    for page in range(n_pages):
        begin = page * PAGE
        kv.ensure(SLOT, begin + PAGE, PAGE)
        kv.bring([Span(slot=SLOT, start=0, end=PAGE, position=begin, masks=None)])
    return kv


def cache_on(driver: HostOnce, room_blocks: int, size: int, n_layers: int = 1) -> DeviceKvCache:
    kv = DeviceKvCache(n_layers, 1, size, torch.float32, torch.device("cpu"), room_blocks)
    kv.compute_on(driver, {})
    return kv


def test_pages_double_up_to_the_room() -> None:
    kv = cache_on(HostOnce(), 5, 4)
    assert [grown(kv, n_pages).n_made[0] for n_pages in range(1, 6)] == [1, 2, 4, 4, 5]


@pytest.mark.parametrize("n_had", [0, 1])
@pytest.mark.parametrize("n_left", [0, 1, 2, 3])
def test_pages_that_find_no_memory_leave_all_as_it_was(n_had: int, n_left: int) -> None:
    """Layers that were moved until then are told of, and each keeps its own contents."""
    driver, size = Tight(), 4
    kv = grown(cache_on(driver, 4, size, n_layers=2), n_had)
    held = [kv.pages_of(layer) for layer in range(2)] if n_had else []
    for layer, buffers in enumerate(held):
        for buffer in buffers:
            driver.upload(buffer, np.full(PAGE * size, layer, np.float32))
    before, driver.n_left = kv.n_made, n_left
    kv.ensure(SLOT, PAGE * (n_had + 1), PAGE)
    span = Span(slot=SLOT, start=0, end=PAGE, position=PAGE * n_had, masks=None)
    with pytest.raises(CapacityError):
        kv.bring([span])
    is_moved = [kv.pages_of(layer)[0] is not own[0] for layer, own in enumerate(held)]
    assert (kv.n_made != before) == any(is_moved) or not n_had
    driver.n_left = 4
    kv.bring([span])
    assert len(kv._buffers) == 2
    for layer in range(2):
        for buffer in kv.pages_of(layer):
            assert buffer.nbytes >= 4 * PAGE * size * (n_had + 1)
            assert not n_had or (buffer[: 4 * PAGE * size].view(np.float32) == layer).all()


def test_scratch_and_cells_that_find_no_memory_are_made_later() -> None:
    driver = Tight()
    scratch = Rows(driver)
    scratch.of("rows", 100)
    driver.n_left, n_made = 0, scratch.n_made
    for n_bytes in (200, 150):
        with pytest.raises(CapacityError):
            scratch.of("rows", n_bytes)
    assert scratch.n_made > n_made  # what was recorded has a buffer that is gone
    driver.n_left = 1
    assert scratch.of("rows", 150).nbytes >= 150
    cells = Cells(driver, dict.fromkeys(range(2), 40))
    driver.n_left = 2
    held = [cells.take() for _ in range(4)]
    driver.n_left, before = 1, dict(cells.buffers)
    with pytest.raises(CapacityError):
        cells.take()
    assert (cells.n, cells.buffers, cells.free) == (4, before, [])
    driver.n_left = 2
    assert cells.take().number == len(held)


def test_scratch_has_no_spare_where_there_is_no_memory_for_it() -> None:
    driver = HostOnce()
    scratch = Rows(driver)
    scratch.of("rows", 100)
    empty = driver.empty

    def empty_of_150(n_bytes: int) -> Buffer:
        if n_bytes > 150:
            raise CapacityError("no memory")
        return empty(n_bytes)

    driver.empty = empty_of_150  # type: ignore[method-assign]
    assert scratch.of("rows", 120).nbytes >= 120
    assert scratch.sizes == {"rows": 120}


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


def test_rows_that_the_host_alone_has_computed_are_brought_to_the_device() -> None:
    size = 4
    kv = cache_on(HostOnce(), 1, size)
    for position in range(3):
        kv.ensure(SLOT, position + 1, 1)
        kv.give_back([Span(slot=SLOT, start=0, end=1, position=position, masks=None)])
        kv.layer(SLOT, 0)[0][0, position] = position + 1
    kv.ensure(SLOT, 4, 1)
    kv.bring([Span(slot=SLOT, start=0, end=1, position=3, masks=None)])
    rows = kv.pages_of(0)[0].view(np.float32)[: 3 * size].reshape(3, size)
    assert rows[:, 0].tolist() == [1, 2, 3]
