"""The examples of docs/api.md: they run, and say what the text around them promises."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from shardnet import api

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the blocks define, run as one module."""
    module = tmp_path_factory.mktemp("examples") / "examples.py"
    module.write_text("\n\n".join(BLOCKS), encoding="utf-8")
    return runpy.run_path(str(module))


def test_the_examples_run(examples: dict[str, Any]) -> None:
    assert len(BLOCKS) >= 7
    assert callable(examples["all_at_once"])


def test_the_examples_do_as_the_text_says(examples: dict[str, Any]) -> None:
    async def main() -> None:
        async with api.in_process(threads=1) as client:
            first, ids, short = await examples["many"](client)
            assert first
            assert ids
            assert short != first
            assert "," in await examples["race"](client)
            assert "priority" in examples["refused"](client)
            first, second = await examples["again"](client)
            assert first == second
            result = await examples["look_inside"](client)
            n_rows = result.usage.n_prompt + result.usage.n_generated - 1
            assert (result.logits.n_rows, result.hidden.n_rows) == (2, n_rows)
            assert len(result.prompt_logprobs) == result.usage.n_prompt

    asyncio.run(main())
