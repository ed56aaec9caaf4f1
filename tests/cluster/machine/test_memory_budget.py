"""What a node may use of its device's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shardnet.cluster.machine.profile import MEMORY_SHARE, Device, MemoryBudget
from shardnet.runtime.loading.loading import release_freed_memory
from shardnet.runtime.stage.compute import ComputePlugin

GIB = 2**30


def test_what_torch_keeps_for_itself_is_there_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a GPU that was unloaded would look full, and the next model would not fit."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 6 * GIB)
    budget = MemoryBudget(
        device=Device(kind="cuda", description="cuda", dtypes=()), asked_bytes=None
    )
    assert budget.available_bytes() == 66 * GIB
    assert budget.total_bytes(used_bytes=6 * GIB, n_nodes_here=1) == int(72 * GIB * MEMORY_SHARE)


def test_what_is_freed_on_a_gpu_goes_back_to_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(None))
    release_freed_memory()
    assert not given_back  # no GPU was used here
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    release_freed_memory()
    assert len(given_back) == 1


LOADS_ON_A_THREAD = """
import threading
import psutil
from shardnet.runtime.loading.loading import keep_one_heap, release_freed_memory

def load():
    large = b"x" * (30 << 20)
    del large  # from here on what is smaller is put into a heap
    weights = [b"x" * (9 << 20) for _ in range(3)]

keep_one_heap()
before = psutil.Process().memory_full_info().uss
loading = threading.Thread(target=load)
loading.start()
loading.join()
release_freed_memory()
print((psutil.Process().memory_full_info().uss - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems trim their heaps themselves")
def test_what_a_thread_had_loaded_goes_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADS_ON_A_THREAD], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 9  # else the next model's weights in it would not seem to be freed


def test_a_card_beside_a_cpu_is_promised_no_more_than_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What --memory names above all that is free, the system may find; a card does not."""
    monkeypatch.setattr(MemoryBudget, "system_bytes", lambda self: (40 * GIB, 64 * GIB))
    card = ComputePlugin(
        name="card",
        description="card",
        dtypes=(),
        load=lambda job: pytest.fail("nothing is loaded"),
        free_bytes=lambda: 20 * GIB,
    )
    cpu = Device(kind="cpu", description="cpu", dtypes=())
    for asked, shares in ((30, [10, 19]), (90, [24, 57])):
        budget = MemoryBudget(device=Device.of_plugin(card), others=(cpu,), asked_bytes=asked * GIB)
        found = budget.device_bytes([4 * GIB, 2 * GIB], n_nodes_here=1)
        assert [n_bytes // GIB for n_bytes in found] == shares
