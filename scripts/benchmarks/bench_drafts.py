"""Count what trained drafters draft of texts that they have not seen: nothing is timed.

The drafters are those in the folders of DIR, as scripts/train_drafters.py writes them. Texts are
those of scripts/benchmarks/texts, and what the bundled model says behind a prompt itself. *Tokens a
step* are those that come from one step with so many drafts, all steps of a text behind each other.
*Second* is how often the second best draft is right where the best is wrong, *behind* where one
right draft is before it. A tree has rows for several tokens of one place; *tree of N* are its
tokens a step to those of a chain of as many rows, *best* what the best tree of at most 8 rows gives
for the time of its rows to what the best chain gives, where a row costs a part of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from bench_engine import PROMPT_MARK, TEXTS
from drafters.counting import chain_gain, right_path, tree_gain
from drafters.recording import (
    Recorded,
    Text,
    given_text,
    load_drafters,
    load_model,
    own_text,
    record,
)

KINDS = {"prose": "novel", "code editing": "code_edit", "JSON": "json", "chat": "chat"}
OWN = {"own words, greedy": 0.0, "own words, sampled": 0.7}
DEPTHS = (1, 2, 3, 4, 7, 12)
ROWS = (2, 3, 4, 6, 8)
COSTS = (0.016, 0.05, 0.1, 0.2)


def main() -> None:
    """Print tables, or one JSON object."""
    options = _parse_options()
    torch.set_num_threads(options.threads)
    report: dict[str, dict[str, Any]] = {}
    for name, kind, text, recorded in records(options.drafters, options.tokens):
        report.setdefault(name, {})[kind] = {**_chains(text, recorded), **_trees(text, recorded)}
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for name, kinds in report.items():
        heads = next(iter(kinds.values()))
        print(f"\n| {name} | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
        for kind, cells in kinds.items():
            print(f"| {kind} | {' | '.join(f'{cell:.3g}' for cell in cells.values())} |")


def texts_of(model: Any, n_tokens: int) -> dict[str, Text]:
    """Return the texts by their kinds."""
    context = model.config.max_position_embeddings
    texts = {
        kind: given_text(TEXTS / f"{name}.txt", PROMPT_MARK, n_tokens, context)
        for kind, name in KINDS.items()
    }
    for kind, temperature in OWN.items():
        texts[kind] = own_text(model, texts["prose"], n_tokens, temperature)
    return texts


def records(folder: Path, n_tokens: int) -> Iterator[tuple[str, str, Text, Recorded]]:
    """Give each drafter's name, a kind of text, the text, and what is drafted of it."""
    model = load_model()
    texts = texts_of(model, n_tokens)
    for name, drafter in load_drafters(folder, model).items():
        for kind, text in texts.items():
            yield name, kind, text, record(drafter, model, text)


def _chains(text: Text, recorded: Recorded) -> dict[str, float]:
    depths = [depth for depth in DEPTHS if depth <= recorded.ids.shape[2]]
    return {f"{depth} drafts": chain_gain(text, recorded, depth) for depth in depths}


def _trees(text: Text, recorded: Recorded) -> dict[str, float]:
    """Compare trees with chains. Of two trees the better counts: that which the drafter itself
    holds likeliest, and the one that is best for this text, which flatters it.
    """
    n_depths = recorded.ids.shape[2]
    places = range(text.n_prompt - 1, len(text.ids) - 2)
    paths = {place: right_path(text, recorded, place) for place in places}
    first = [path[:1] for path in paths.values()]
    behind = [path[1:2] for path in paths.values() if path[:1] == (0,)]
    found = {
        "best right": first.count((0,)) / len(first),
        "second": _share_of_wrong(first, 1),
        "third": _share_of_wrong(first, 2),
        "second behind": _share_of_wrong(behind, 1),
    }
    chains = {n: chain_gain(text, recorded, n) for n in range(n_depths + 1)}
    trees = {n: tree_gain(text, recorded, paths, n) for n in ROWS}
    found |= {f"tree of {n}": trees[n] / chains[min(n, n_depths)] for n in ROWS}
    for cost in COSTS:
        chain, tree = (
            max(tokens / (1 + cost * n_rows) for n_rows, tokens in some.items())
            for some in (chains, trees)
        )
        found[f"best, row {cost:g}"] = max(chain, tree) / chain
    return found


def _share_of_wrong(ranks: Sequence[tuple[int, ...]], rank: int) -> float:
    """Return how often a rank is right where the best is wrong."""
    return ranks.count((rank,)) / max(1, len(ranks) - ranks.count((0,)))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench drafts")
    parser.add_argument("drafters", type=Path, metavar="DIR")
    parser.add_argument("--tokens", type=int, default=400, help="of each text at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
