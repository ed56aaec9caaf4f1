"""A set in lockstep through a real node: every step has all of it, however late a prompt is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt

from shardnet.api.client import connect
from shardnet.cluster.head import lead
from shardnet.cluster.head.clients import Clients
from shardnet.cluster.node.node import listening
from shardnet.errors import ContextExceededError
from shardnet.wire.messages.plans import ModelChoice

N_TOKENS = 6


def test_late_prompts_are_waited_for_and_wrong_ones_are_not(
    tmp_path: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "PATIENCE_S", 60.0)
    prompts = [random_prompt(n, 300, seed=n) for n in (9, 12, 400, 5, 7)]
    prompt_of = Clients._prompt

    async def late(self: Clients, message: Any, *arguments: Any, **more: Any) -> Any:
        if len(message.token_ids) == 12:
            await asyncio.sleep(0.3)
        return await prompt_of(self, message, *arguments, **more)

    monkeypatch.setattr(Clients, "_prompt", late)

    async def main() -> None:
        model = make_llama(tmp_path / "model", max_position_embeddings=512)
        choice = ModelChoice(model=str(model), context=256)
        async with (
            asyncio.timeout(50),
            listening(small_settings(tmp_path), "127.0.0.1", 0) as node,
            connect(node.address) as client,
        ):
            results, errors = [], []
            async for event in client.generate(
                prompts,
                model=choice,
                max_tokens=N_TOKENS,
                ignore_eos=True,
                lockstep=True,
                trace=True,
            ):
                if event.result is not None:
                    results.append(event.result)
                if event.error is not None:
                    errors.append((event.index, event.error))
            [(index, error)] = errors
            assert index == 2
            assert isinstance(error, ContextExceededError)
            assert sorted(result.index for result in results) == [0, 1, 3, 4]
            for result in results:
                assert result.trace is not None
                decoded = [step.n_batch_rows for step in result.trace.steps[1:]]
                assert decoded == [4] * (N_TOKENS - 1)

    asyncio.run(main())
