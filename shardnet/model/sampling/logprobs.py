"""Logprobs of rows: log-softmax of the raw float32 logits, and the best tokens by rank.

Knows docs/protocol.md, "Logprobs". Must not know how a token was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from shardnet.model.arithmetic.elementary import many_exponentials, natural_logarithm
from shardnet.model.kernels.devices import where_float64
from shardnet.sampling_params import TokenLogprobs

_SMALLEST_EXPONENT: Final = -700.0
"""What is smaller adds nothing to a sum that has a 1."""
_AT_ONCE: Final = 1 << 15
"""Exponentials that a thread computes at a time, which its caches should hold."""


def rows_logprobs(logits: Tensor, token_ids: Sequence[int], n_top: int) -> list[TokenLogprobs]:
    """Return for each row the logprob of its token and of the `n_top` best.

    `logits` is float32 [R, V], before any filter, `token_ids` has R ids. All is computed in
    float64, with the same bits on every machine. A token without a column has minus infinity, and
    no token with that logprob is among the best. Equal logits rank by id, the smaller first.
    """
    logits = where_float64(logits)
    most = logits.amax(-1, keepdim=True).double()
    log_sums = _log_sums(logits, most)
    n_columns = logits.shape[1]
    known = [min(token_id, n_columns - 1) for token_id in token_ids]
    best = _best_ids(logits, min(n_top, n_columns))

    def logprobs_of(columns: Tensor) -> Tensor:
        return (logits.gather(1, columns).double() - most) - log_sums

    own = logprobs_of(torch.tensor(known, device=logits.device)[:, None]).squeeze(1).tolist()
    ids, values = best.tolist(), logprobs_of(best).tolist()
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=own[row] if token_id < n_columns else -torch.inf,
            top=tuple(
                (best_id, value)
                for best_id, value in zip(ids[row], values[row], strict=True)
                if value > -torch.inf
            ),
        )
        for row, token_id in enumerate(token_ids)
    ]


def _log_sums(logits: Tensor, most: Tensor) -> Tensor:
    """Return the logarithm of each row's sum of exponentials relative to its `most`: [R, 1]."""
    n_rows = torch.get_num_threads()
    sums = [
        _sum(
            torch.cat([_exponential_sums(part, own) for part in torch.split(some, _AT_ONCE, 1)], 1)
        )
        for some, own in zip(torch.split(logits, n_rows), torch.split(most, n_rows), strict=True)
    ]
    return natural_logarithm(torch.cat(sums))


def _exponential_sums(logits: Tensor, most: Tensor) -> Tensor:
    return _sum(many_exponentials((logits.double() - most).clamp_(min=_SMALLEST_EXPONENT)))


def _sum(numbers: Tensor) -> Tensor:
    """Sum each row, [R, N] to [R, 1], by halves: torch's own sum has an order of each machine."""
    while (n := numbers.shape[1]) > 1:
        left, right = torch.split(numbers, [n - n // 2, n // 2], 1)
        left[:, : n // 2] += right
        numbers = left
    return numbers


def _best_ids(logits: Tensor, n_top: int) -> Tensor:
    """Rank the `n_top` largest logits of each row: int64 [R, n_top], the largest first."""
    if not n_top:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, ids = torch.topk(logits, min(n_top + 1, logits.shape[1]))
    has_ties = (values[:, 1:] == values[:, :-1]).any(1)
    ids = ids[:, :n_top]
    for row in has_ties.nonzero().squeeze(1).tolist():  # topk ranks equal values as it likes
        ids[row] = _best_ids_of_row(logits[row], n_top)
    return ids


def _best_ids_of_row(row: Tensor, n_top: int) -> Tensor:
    ids = (row >= torch.topk(row, n_top).values[-1]).nonzero().squeeze(1)  # ascending
    return ids[torch.argsort(row[ids], descending=True, stable=True)[:n_top]]
