"""LoRA adapters on a ring of processes: fetched, chosen by request, kept through a loss."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

from msgspec.structs import replace
from support.models.adapters import make_peft
from support.system.nodes import open_machine
from support.system.parrot import Parrots

from shardnet.api.client import Client, connect
from shardnet.api.events import GenerationResult
from shardnet.model.kernels.library import native_kernels
from shardnet.wire.messages.plans import ModelChoice, NamedAdapter

N_TOKENS = 24
IS_DETERMINISTIC = native_kernels() is None
PROMPT = list(range(5, 40))
USES = ({"a": 1.0}, {}, {"b": 1.0}, {"b": 0.5})


async def say(
    client: Client,
    choice: ModelChoice,
    adapters: dict[str, float],
    at_token: Callable[[int], None] = lambda n: None,
    key: str = "",
) -> GenerationResult:
    """Run one request; `at_token` is called with the number of its tokens so far."""
    n_tokens = 0
    events = client.generate(
        PROMPT,
        model=choice,
        max_tokens=N_TOKENS,
        ignore_eos=True,
        deterministic=IS_DETERMINISTIC,
        adapters=adapters,
        key=key,
    )
    async for event in events:
        if event.error is not None:
            raise event.error
        n_tokens += len(event.token_ids)
        at_token(n_tokens)
        if event.result is not None:
            return event.result
    raise AssertionError("no result")


async def say_all(
    client: Client, choice: ModelChoice, at_token: Callable[[int], None] = lambda n: None
) -> list[list[int]]:
    """Run a request with each of USES at once; return their token ids."""
    first = say(client, choice, USES[0], at_token, token_hex(16))
    rest = (say(client, choice, uses, key=token_hex(16)) for uses in USES[1:])
    results = await asyncio.gather(first, *rest)
    return [list(one.token_ids) for one in results]


def test_adapters_are_fetched_and_outlive_nodes(parrots: Parrots, tmp_path: Path) -> None:
    """Only the head reads them; together each is as alone, also where a node is lost meanwhile:
    the one in the middle, then the head.
    """
    base = parrots.alphabet  # which nodes need not measure, once another test has had it
    paths = {name: make_peft(tmp_path / name, base, seed=n) for n, name in enumerate("ab")}
    with open_machine(tmp_path / "first") as first, open_machine(tmp_path / "other") as other:
        nodes = [*first.start_nodes("anna"), *other.start_nodes("bert", "cleo")]
        adapters = [NamedAdapter(name, str(path)) for name, path in paths.items()]
        addresses = [node.address for node in nodes]
        choice = ModelChoice(model=str(base), nodes=addresses, adapters=adapters, context=512)
        victims = nodes[:2]
        is_killing = False

        def kill(n_tokens: int) -> None:
            nonlocal is_killing
            if n_tokens >= 8 and is_killing:
                is_killing = False
                victims.pop().process.kill()

        async def main() -> None:
            nonlocal is_killing
            async with connect(addresses[0]) as client:
                wanted = [[*(await say(client, choice, uses)).token_ids] for uses in USES]
                assert len({tuple(ids) for ids in wanted}) == len(wanted)
                assert await say_all(client, choice) == wanted
                files = (tmp_path / "other").rglob("adapters/*/*.safetensors")
                kept = {file.stem for file in files}
                assert "3" in kept, "it was not fetched"
                for path in paths.values():  # what the head has read is not read again
                    shutil.rmtree(path)
                while victims:
                    is_killing = True
                    assert await say_all(client, replace(choice, adapters=[]), kill) == wanted

        asyncio.run(main())
