"""Two models of a household on one node: each alone, and both side by side on the same cores.

Each decodes greedily behind a prompt for some seconds. What counts is the sum of what each does
beside the other as a part of what it does alone: 1 is all that the cores can do.

    scripts/bench household
    scripts/bench household --checkpoint DIR --checkpoint DIR --threads 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from bench_ring import random_1b

from shardnet.api.client import Client, connect
from shardnet.transport.loop import run
from shardnet.wire.messages.household import HouseholdModel
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.finding.target import local_processes
from shardnet_cli.flags.options import Access

NAMES = ("one", "other")


class Decoding:
    """What one request has made: tokens a second, and the longest pause between two."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.longest_s = 0.0
        self._first_s = self._last_s = 0.0

    def took(self, n_tokens: int) -> None:
        """Count tokens that have come."""
        now_s = time.perf_counter()
        if not self._first_s:
            self._first_s = now_s
        else:
            self.n_tokens += n_tokens
            self.longest_s = max(self.longest_s, now_s - self._last_s)
        self._last_s = now_s

    @property
    def tok_s(self) -> float:
        """Tokens a second behind the first one."""
        return self.n_tokens / max(1e-9, self._last_s - self._first_s)


async def decode(client: Client, name: str, prompt: list[int], seconds: float) -> Decoding:
    """Have a model decode for so long."""
    decoding, until_s = Decoding(), 0.0
    events = client.generate(
        prompt, model=ModelChoice(model=name), max_tokens=1 << 20, ignore_eos=True
    )
    async for event in events:
        if event.token_ids:
            decoding.took(len(event.token_ids))
            until_s = until_s or time.perf_counter() + seconds
        if until_s and time.perf_counter() > until_s:
            break
    await events.aclose()
    return decoding


async def measure(options: argparse.Namespace, checkpoints: list[Path]) -> list[dict[str, float]]:
    """Measure round by round."""
    access = Access(key_file="", insecure=True)
    context = options.prompt + 1024
    rounds = []
    async with (
        local_processes(1, options.threads, access) as [address],
        connect(address) as client,
    ):
        models = [
            HouseholdModel(name=name, choice=ModelChoice(model=str(path), context=context))
            for name, path in zip(NAMES, checkpoints, strict=True)
        ]
        await client.name_models(models)
        prompt = [2 + place % 50 for place in range(options.prompt)]
        for name in NAMES:  # loads it
            await decode(client, name, prompt, 1.0)
        for _ in range(options.rounds):
            alone = [await decode(client, name, prompt, options.seconds) for name in NAMES]
            beside = await asyncio.gather(
                *(decode(client, name, prompt, options.seconds) for name in NAMES)
            )
            shares = [b.tok_s / a.tok_s for a, b in zip(alone, beside, strict=True)]
            rounds.append(
                {f"{name}_alone_tok_s": a.tok_s for name, a in zip(NAMES, alone, strict=True)}
                | {f"{name}_tok_s": b.tok_s for name, b in zip(NAMES, beside, strict=True)}
                | {f"{name}_pause_s": b.longest_s for name, b in zip(NAMES, beside, strict=True)}
                | {"sum_of_shares": sum(shares)}
            )
            print(json.dumps(rounds[-1]), flush=True)
    return rounds


def main() -> None:
    """Measure and print the medians as one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, action="append", help="of each, given twice")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompts")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each decoding")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    checkpoints = [path.absolute() for path in options.checkpoint or [random_1b()]]
    rounds = run(measure(options, (2 * checkpoints)[:2]))
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    print(json.dumps({key: round(value, 3) for key, value in medians.items()}, indent=2))


if __name__ == "__main__":
    main()
