"""A node whose disk is full, whose cache vanishes and whose clock jumps: no request is lost."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster.small_node import small_settings
from support.full_disk import full_disk
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import Client, connect
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.machine.profile import Device, MemoryBudget
from shardnet.cluster.member import stage_loader
from shardnet.cluster.node.node import listening
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.runtime.loading.loaded_stage import LoadedStage
from shardnet.runtime.loading.loading import load
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.types import BLOCK_POSITIONS, DType
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 60.0
DAY_S = 86400.0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    ],
    ids=["cuda", "mps"],
)
def test_a_gpu_without_memory_leaves_its_layers_to_the_cpu(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lines = make_llama(tmp_path / "model"), list[str]()
    n_layers = Checkpoint.open(model).config.n_layers

    def load_on(order: StageOrder, *others: Any) -> LoadedStage:
        if order.device.torch == "cpu":
            return load(order, *others)
        with capacity_error_for("cuda:0 has no memory for layers"):
            raise error

    gpu = Device(kind="cuda", index=0, description="cuda:0 (A card)", dtypes=(DType.FLOAT32,))
    settings = small_settings(tmp_path)
    budget = replace(settings.budget, device=gpu, others=(settings.budget.device,))
    monkeypatch.setattr(stage_loader, "load", load_on)
    monkeypatch.setattr(MemoryBudget, "device_bytes", lambda *_, **__: [1 << 28, 1 << 28])
    monkeypatch.setattr(MemoryBudget, "_free_bytes", lambda *_: 1 << 28)

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            listening(replace(settings, budget=budget, log=lines.append), "127.0.0.1", 0) as node,
            connect(node.address) as client,
        ):
            choice = ModelChoice(model=str(model), layers=[(0, n_layers)])
            [answer] = await client.complete([[1, 2, 3]], model=choice, max_tokens=4)
            assert len(answer.token_ids) == 4

    asyncio.run(main())
    assert "cuda:0 has no memory for layers: the CPU computes from now on" in lines


def test_nothing_is_lost_with_the_disk_the_cache_or_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded and used anew each time: weights rounded to int8 and finished prompts are cached."""
    model = make_llama(tmp_path / "model", max_position_embeddings=2048)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    settings = replace(
        small_settings(tmp_path), cache=cache, prefix_cache_bytes=64 << 20, idle_unload_s=3600.0
    )
    prompt = random_prompt(5 * BLOCK_POSITIONS, 300, seed=1)
    now = time.time

    async def said(client: Client) -> list[int]:
        """Have the model loaded, use it, and free it."""
        choice = ModelChoice(model=str(model), quant="int8", context=2048)
        first, again = [
            await client.complete([prompt], model=choice, max_tokens=12, ignore_eos=True)
            for _ in range(2)
        ]
        await client.unload()
        assert first[0].token_ids == again[0].token_ids
        return [*first[0].token_ids]

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            listening(settings, "127.0.0.1", 0) as node,
            connect(node.address) as client,
        ):
            with full_disk(100):
                expected = await said(client)
            assert not [*cache.glob("packs/*/*.packed"), *cache.glob("prefixes/*/*.kv")]
            assert await said(client) == expected
            assert [*cache.glob("*/*/*.packed")]
            assert [*cache.glob("*/*/*.kv")]
            shutil.rmtree(cache)
            assert await said(client) == expected
            assert [*cache.glob("*/*/*.packed")]
            for ahead_s in (-DAY_S, 400 * DAY_S):
                monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: now() + ahead_s)
                assert await said(client) == expected

    asyncio.run(main())
