"""Benchmark constrained output: time per token of JSON by a schema against free output.

Both are asked of one ring in this process, greedy, in turns; the better round of each counts. The
schema fills all tokens: an array of objects without an end. With --no-drafts what the schema forces
is not drafted, which shows what the masks alone cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from shardnet import api
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter

PROMPT = "A list of people, as JSON: "
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "hair": {"enum": ["black", "brown", "fair", "red", "grey"]},
        },
        "required": ["name", "age", "hair"],
        "additionalProperties": False,
    },
}


def main() -> None:
    """Measure and print; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench constrained")
    parser.add_argument("--model", default=DEFAULT_MODEL_NAME)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-drafts", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.no_drafts:
        AdaptiveDrafter.propose = lambda *_: []  # type: ignore[method-assign]
    report = asyncio.run(_measure(arguments))
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(
        f"{report['free']:.0f} tokens/s free, {report['constrained']:.0f} by a schema: "
        f"{report['share']:.2f} of it"
    )


async def _measure(arguments: argparse.Namespace) -> dict[str, float]:
    best = {"free": 0.0, "constrained": 0.0}
    constraints = {"free": None, "constrained": api.Constraint.json_schema(SCHEMA)}
    async with api.in_process(model=arguments.model, threads=arguments.threads) as client:
        for _ in range(arguments.rounds + 1):  # the first one loads and compiles
            for name, constraint in constraints.items():
                results = await client.complete(
                    PROMPT,
                    n=arguments.parallel,
                    max_tokens=arguments.tokens,
                    ignore_eos=True,
                    constraint=constraint,
                )
                assert all(result.finish_reason == "length" for result in results)
                rate = sum(result.timing.decode_tok_s for result in results)
                best[name] = max(best[name], rate)
    return {**best, "share": best["constrained"] / best["free"]}


if __name__ == "__main__":
    main()
