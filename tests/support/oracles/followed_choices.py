"""Which entries transformers attends to where two scores are too near to say which is higher.

Its sums go in another order than those of the compiled library. Of 20,000 rows hundreds have a last
chosen entry and a next one that differ by less than that, and a row that attends to another entry
says something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardnet.model.layers.attention import ForwardStep
from shardnet.model.mixers import compressed_attention, position_indexer

TIE = 2e-5
"""Of the largest chosen score: two that differ by less may be equal. 5e-6 have been seen."""


class FollowedChoices:
    """What rows of shardnet chose, in the order in which transformers asks for the same."""

    def __init__(self, n_chosen: int) -> None:
        self._n_chosen = n_chosen
        self._rows: deque[Tensor] = deque()
        self.n_rows = 0
        """Rows of transformers' that took them, each once in each layer that chooses."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what shardnet chooses."""
        choose, choose_entries = position_indexer.choose, position_indexer.choose_entries

        def note(chosen: Tensor | None, n_pooled: int, step: ForwardStep) -> Tensor | None:
            sees_more = (step.positions + 1) // n_pooled > self._n_chosen
            if chosen is not None:
                self._rows += chosen[sees_more].long().unbind()
            else:
                assert not sees_more.any()
            return chosen

        def positions(*given: Any) -> Tensor | None:
            return note(choose(*given), 1, given[-1])

        def entries(*given: Any, **more: Any) -> Tensor | None:
            return note(choose_entries(*given, **more), given[3], given[-1])

        with (
            mock.patch.object(position_indexer, "choose", positions),
            mock.patch.object(position_indexer, "choose_entries", entries),
            mock.patch.object(compressed_attention, "choose_entries", entries),
        ):
            yield

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Have transformers choose the same, where it may."""
        find = Tensor.topk

        def topk(scores: Tensor, k: int, dim: int = -1) -> Any:
            values, indices = find(scores, k, dim)
            if k == self._n_chosen:
                candidates = scores.reshape(-1, scores.shape[dim])
                best, chosen = values.view(-1, k), indices.view(-1, k)
                sees_more = (candidates > torch.finfo(scores.dtype).min).sum(-1) > k
                for row in sees_more.nonzero().flatten().tolist():
                    chosen[row] = self._next(candidates[row], best[row])
            return torch.return_types.topk((values, indices))  # type: ignore[attr-defined]

        with mock.patch.object(Tensor, "topk", topk):
            yield
        assert not self._rows, "shardnet chose for more rows"

    def _next(self, scores: Tensor, best: Tensor) -> Tensor:
        """Return the next row's entries, whose `scores` may be the `best` ones."""
        row = self._rows.popleft()
        assert (row.diff() > 0).all()
        assert scores[row].min() >= best.min() - TIE * best.abs().max()
        self.n_rows += 1
        return row
