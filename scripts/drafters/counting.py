"""How many tokens a step gives with a chain of drafts, and with a small tree, from records."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from .recording import Recorded, Text

Path = tuple[int, ...]
"""A draft of a tree: the ranks of the drafts that lead to it, and its own."""


def gain(text: Text, n_right: Callable[[int], int]) -> float:
    """Return tokens a step, where a step at a place gives one and those drafts that are right."""
    place, n_steps = text.n_prompt - 1, 0
    while place < len(text.ids) - 2:
        place += 1 + n_right(place)
        n_steps += 1
    return (place - text.n_prompt + 1) / n_steps


def chain_gain(text: Text, recorded: Recorded, n_drafts: int) -> float:
    """Return the tokens a step with so many drafts one behind the other."""

    def n_right(place: int) -> int:
        came = text.ids[place + 2 : place + 2 + n_drafts]
        pairs = enumerate(zip(recorded.chain(place), came, strict=False))
        return next((n for n, (draft, token_id) in pairs if draft != token_id), len(came))

    return gain(text, n_right)


def tree_gain(text: Text, recorded: Recorded, paths: dict[int, Path], n_rows: int) -> float:
    """Return the tokens a step with the better of two trees of so many drafts."""
    known = best_tree([*paths.values()], n_rows)
    return max(
        gain(text, lambda place: depth_in(known, paths[place])),
        gain(text, lambda place: depth_in(likely_tree(recorded, place, n_rows), paths[place])),
    )


def right_path(text: Text, record: Recorded, place: int) -> Path:
    """Return the ranks of the tokens that come, as far as they were recorded.

    Behind a draft that is not the likeliest, at the second depth or deeper, nothing is recorded.
    """
    path: list[int] = []
    for depth, token_id in enumerate(text.ids[place + 2 : place + 2 + record.ids.shape[2]]):
        branch = path[0] if path else 0
        ranked = record.ids[place, branch, depth].tolist()
        if token_id not in ranked:
            break
        path.append(ranked.index(token_id))
        if depth and path[-1]:
            break
    return (*path,)


def best_tree(paths: Sequence[Path], n_rows: int) -> set[Path]:
    """Return the tree of so many drafts through which most of these paths go furthest."""
    counts: dict[Path, int] = {}
    for path in paths:
        for end in range(1, len(path) + 1):
            counts[path[:end]] = counts.get(path[:end], 0) + 1
    return {*heapq.nsmallest(n_rows, counts, key=lambda path: (-counts[path], len(path), path))}


def likely_tree(record: Recorded, place: int, n_rows: int) -> set[Path]:
    """Return the tree of the drafts that the drafter itself holds likeliest."""
    n_depths, n_ranks = record.ids.shape[2:]
    chances = record.chances[place].tolist()
    left: list[tuple[float, Path]] = [(-chances[0][0][rank], (rank,)) for rank in range(n_ranks)]
    heapq.heapify(left)
    tree: set[Path] = set()
    while left and len(tree) < n_rows:
        chance, path = heapq.heappop(left)
        tree.add(path)
        if len(path) < n_depths and (len(path) == 1 or not path[-1]):
            for rank in range(n_ranks):
                behind = chances[path[0]][len(path)][rank]
                heapq.heappush(left, (chance * behind, (*path, rank)))
    return tree


def depth_in(tree: set[Path], path: Path) -> int:
    """Count the drafts of a tree that are right, where this path is what comes."""
    return next((n for n in range(len(path)) if path[: n + 1] not in tree), len(path))
