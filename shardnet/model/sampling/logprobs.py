"""Logprobs of rows: log-softmax of the raw float32 logits, and the best tokens by rank.

Knows docs/protocol.md, "Logprobs". Must not know how a token was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardnet.model.kernels.devices import where_float64
from shardnet.sampling_params import TokenLogprobs


def rows_logprobs(logits: Tensor, token_ids: Sequence[int], n_top: int) -> list[TokenLogprobs]:
    """Return for each row the logprob of its token and of the `n_top` best.

    `logits` is float32 [R, V], before any filter, `token_ids` has R ids; sums are taken in float64.
    A token without a column has minus infinity, and no token with that logprob is among the best.
    Equal logits rank by id, the smaller first.
    """
    logits = where_float64(logits)
    logprobs = torch.log_softmax(logits.to(torch.float64), dim=-1)
    n_columns = logits.shape[1]
    known = [min(token_id, n_columns - 1) for token_id in token_ids]
    own = logprobs.gather(1, torch.tensor(known, device=logits.device)[:, None]).squeeze(1).tolist()
    best = _best_ids(logits, min(n_top, n_columns))
    ids, values = best.tolist(), logprobs.gather(1, best).tolist()
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
