"""The bundled model with every kind of drafts on real nodes of this machine, by turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench_rig import open_head

from shardnet.api.client import Client, connect
from shardnet.runtime.scheduling.drafting import NgramDrafts, RingDrafts
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

OFF, WAITS = "off", ", waits"
SAMPLING = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.7, seed=7)}


def asked_of(folder: Path, also: Sequence[str]) -> dict[str, str]:
    """Name what is compared, and say by which --speculate it drafts."""
    paths = [path.parent for path in sorted(folder.resolve().glob("*/config.json"))]
    asked = {OFF: OFF, f"ngram{WAITS}": "ngram", "ngram": "ngram", f"mtp{WAITS}": "mtp"}
    asked |= {path.name: "mtp" if path.name == "mtp" else str(path) for path in paths}
    return asked | {one: one for one in also}


async def measure(
    checkpoint: Path,
    n_nodes: int,
    prompts: Mapping[str, Sequence[int]],
    options: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """Have a ring of nodes go on behind the prompts with each drafter.

    The checkpoint has a layer for MTP, and says what the bundled model says. Nothing is looked up
    in other texts: the same one was said before.
    """
    ring = open_head(checkpoint, n_nodes, options.threads, mtp=True)
    with patch("shardnet.cluster.head.drafts._MOST_TEXTS", new=0):
        async with ring as (_, address, choice), connect(address) as client:
            return {
                f"{kind}, {how}": await _by_turns(client, choice, prompt, sampling, options)
                for kind, prompt in prompts.items()
                for how, sampling in SAMPLING.items()
            }


async def _by_turns(
    client: Client,
    choice: ModelChoice,
    prompt: Sequence[int],
    sampling: SamplingParams,
    options: argparse.Namespace,
) -> dict[str, Any]:
    asked = asked_of(options.drafters, options.also)
    found: dict[str, list[_Answer]] = {name: [] for name in asked}
    for _ in range(options.rounds):
        for name, how in asked.items():
            with _all_wait() if name.endswith(WAITS) else nullcontext():
                (result,) = await client.complete(
                    [*prompt],
                    sampling,
                    model=choice,
                    max_tokens=options.tokens,
                    speculate=how,
                    ignore_eos=True,
                )
            timing = result.timing
            found[name].append(
                (result.token_ids, timing.decode_tok_s, timing.n_drafted, timing.n_accepted)
            )
    return _compared(found)


_Answer = tuple[tuple[int, ...], float, int, int]
"""Tokens, tokens a second, drafts made and drafts right."""


@contextmanager
def _all_wait() -> Iterator[None]:
    """Have drafts wait for each other."""
    with (
        patch.object(NgramDrafts, "flies", new=False),
        patch.object(RingDrafts, "flies", new=False),
    ):
        yield


def _compared(found: dict[str, list[_Answer]]) -> dict[str, Any]:
    plain = found[OFF]
    return {
        name: {
            "to plain": _ratio(some, plain),
            "to waiting": _ratio(some, found.get(name + WAITS, some)),
            "tokens a step": round(
                sum(len(t) for t, *_ in some) / sum(len(t) - n for t, _, _, n in some), 2
            ),
            "right": round(sum(n for *_, n in some) / max(1, sum(n for _, _, n, _ in some)), 2),
            "same text": all(one[0] == plain[0][0] for one in some),
        }
        for name, some in found.items()
    }


def _ratio(some: Sequence[_Answer], others: Sequence[_Answer]) -> float:
    pairs = zip(some, others, strict=True)
    return round(statistics.median(one[1] / other[1] for one, other in pairs), 3)
