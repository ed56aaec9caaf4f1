"""The sampler of the last stage: logits in, token ids and logprobs out.

Knows the order of filters and the noise that docs/protocol.md, "Sampling", fixes. Must not know
sequences, slots or frames: a row's token is a pure function of its logits, parameters, seed, sample
index, position and the tokens before it, in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from shardnet.constraints import TokenMask
from shardnet.errors import CheckpointError, NumericalError, WrongValuesError
from shardnet.model.kernels.devices import where_float64
from shardnet.model.sampling.logprobs import rows_logprobs
from shardnet.model.sampling.penalties import NO_CONTEXT, RowContext, change_logits, changes_logits
from shardnet.model.sampling.philox import gumbel_noise
from shardnet.model.sampling.token_masks import forbidden_tokens
from shardnet.sampling_params import SamplingParams, TokenLogprobs

CUT = 40.0
"""Tokens further than this below the maximum, after temperature, are filtered out.

The noise spans 26.02, so no token below the cut could have been drawn.
"""

_FIRST_NUCLEUS_SIZE = 1024
"""Tokens that are sorted first; all are, if these do not hold the mass."""


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of sampling for one row, apart from its logits.

    `position` is that of the row's input token; the drawn token takes the next one. `context` is
    used only by parameters that depend on earlier tokens. `mask` is None where any token may be
    drawn.
    """

    params: SamplingParams
    position: int
    context: RowContext = NO_CONTEXT
    mask: TokenMask | None = None


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    """One token id per row, in row order, and its logprobs if the row asked for them, else None."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Draws the next token of each row of a micro-batch."""

    def __init__(self, vocab_size: int, without_token: Sequence[int] = ()) -> None:
        """Take the width of the LM head, and the ids below it that have no token.

        Most of these pad the vocabulary at its end. They are excluded before anything is computed.
        Raises CheckpointError if no id is left.
        """
        self._vocab_size = vocab_size
        holes = set(without_token)
        self._n_tokens = vocab_size
        while self._n_tokens - 1 in holes:
            self._n_tokens -= 1
        if not self._n_tokens:
            raise CheckpointError(
                f"the tokenizer has no token for any of the model's {vocab_size} ids",
                remedy="take both from one checkpoint",
            )
        self._holes = sorted(id_ for id_ in holes if id_ < self._n_tokens)

    def _columns(self, logits: Tensor) -> Tensor:
        """Exclude ids without a token: [R, V] to [R, n_tokens], with minus infinity for gaps."""
        columns = logits[:, : self._n_tokens]
        if self._holes:
            columns = columns.clone()
            columns[:, self._holes] = -torch.inf
        return columns

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> SampleResult:
        """Choose one token per row.

        `logits` is float32 [R, V] on any device, R = len(rows), V = vocab_size; it is not changed.
        Greedy rows cost one argmax. Filters run on the device of the logits; only the remaining
        tokens are copied to the CPU, for the noise. Raises NumericalError, which lists the rows at
        fault, if a row holds NaN or has no finite maximum.
        """
        assert logits.dtype == torch.float32
        assert logits.shape == (len(rows), self._vocab_size)
        if not rows:
            return SampleResult(token_ids=[], logprobs=[])
        logits = self._columns(logits)  # [R, n_tokens]
        best_ids = torch.argmax(logits, dim=-1)  # NaN counts as largest; ties to the smaller id
        maxima = logits.gather(1, best_ids[:, None]).squeeze(1)
        # Both at once (ids are exact in float64), to synchronize with a GPU only once.
        pair = (where_float64(one).double() for one in (best_ids, maxima))
        best_ids, maxima = torch.stack([*pair]).cpu()
        _refuse_rows_without_maximum(maxima, range(len(rows)))
        token_ids: list[int] = best_ids.long().tolist()
        changed = _changed_rows(logits, rows)
        for index, row in enumerate(rows):
            if row.params.temperature > 0:
                token_ids[index] = _draw(changed.get(index, logits[index]), row)
            elif index in changed:
                token_ids[index] = int(changed[index].argmax())
        return SampleResult(token_ids=token_ids, logprobs=_logprobs(logits, rows, token_ids))

    def logprobs(self, logits: Tensor, token_ids: Sequence[int], n_top: int) -> list[TokenLogprobs]:
        """Return for each row the logprob of its token and of the `n_top` best.

        See `rows_logprobs`. `logits` is float32 [R, V]. Raises NumericalError as `sample` does.
        """
        logits = self._columns(logits)
        _refuse_rows_without_maximum(logits.amax(1), range(len(logits)))
        return rows_logprobs(logits, token_ids, n_top)


def _logprobs(
    logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Return the logprobs of the rows that ask for them, None for the others."""
    logprobs: list[TokenLogprobs | None] = [None] * len(rows)
    for n_top in {row.params.n_logprobs for row in rows} - {None}:
        places = [index for index, row in enumerate(rows) if row.params.n_logprobs == n_top]
        chosen = [token_ids[index] for index in places]
        found = rows_logprobs(logits[places], chosen, n_top or 0)
        for index, entry in zip(places, found, strict=True):
            logprobs[index] = entry
    return logprobs


def _changed_rows(logits: Tensor, rows: Sequence[SampleRow]) -> dict[int, Tensor]:
    """Return the modified logits of the rows with a mask, bias, penalties or early stop ids, by
    index.
    """
    places = [
        index
        for index, row in enumerate(rows)
        if row.mask is not None or changes_logits(row.params)
    ]
    if not places:
        return {}
    wanted = [(rows[index].params, rows[index].context) for index in places]
    changed = logits[places]  # a copy
    for place, index in enumerate(places):
        mask = rows[index].mask
        if mask is not None:
            forbidden = torch.from_numpy(forbidden_tokens(mask, changed.shape[1]))
            changed[place].masked_fill_(forbidden.to(changed.device), -torch.inf)
    change_logits(changed, wanted)
    _refuse_rows_without_maximum(changed.amax(1), places)
    return dict(zip(places, changed, strict=True))


def surviving_tokens(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Apply temperature, cut, top-k, top-p and min-p, in this order, to one row.

    `row` is float32 [V] with a finite maximum, `params.temperature` above 0. Returns, on the device
    of the row, or on the CPU where that has no float64, the remaining ids, int64 [S] ascending, and
    their gaps, float64 [S]: (logit - maximum) / temperature.

    The sets are those of transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    and MinPLogitsWarper. Ties: top-k keeps every token that equals the k-th logit; top-p keeps, of
    equal logits at its border, the smaller ids.
    """
    row = where_float64(row)
    maximum = row.max()
    ids = None
    if 0 < params.top_k < len(row):  # temperature does not change ranks: top-k may come first
        ids = (row >= torch.topk(row, params.top_k).values[-1]).nonzero().squeeze(1)
        row = row[ids]
    gaps = (row.to(torch.float64) - maximum).div_(params.temperature)
    ids, gaps = _select(gaps >= -CUT, ids, gaps)
    if params.top_p < 1:
        ids, gaps = _select(_nucleus(gaps, params.top_p), ids, gaps)
    if params.min_p > 0:
        ids, gaps = _select(gaps.exp() >= params.min_p, ids, gaps)
    return ids, gaps


def _select(mask: Tensor, ids: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
    """Select by a boolean mask; `ids` None stands for 0, 1, 2, …"""
    places = mask.nonzero().squeeze(1)
    return places if ids is None else ids[places], values[places]


def _draw(row: Tensor, sample: SampleRow) -> int:
    ids, gaps = surviving_tokens(row, sample.params)
    candidates = ids.cpu().numpy()
    if len(candidates) == 1:
        return int(candidates[0])
    noise = gumbel_noise(
        sample.params.seed, sample.position, sample.params.sample_index, candidates
    )
    noise += gaps.cpu().numpy()
    return int(candidates[np.argmax(noise)])  # the first maximum: ties to the smaller id


def _nucleus(gaps: Tensor, top_p: float) -> Tensor:
    """Choose the fewest tokens that hold the mass `top_p`: a mask, bool [S].

    In order of falling probability, a token stays while the mass before it is below `top_p`. Only
    as many tokens as necessary are sorted.
    """
    weights = gaps.exp()
    total = weights.sum()
    mass_wanted = top_p * total
    # Tokens lighter than this weigh less than 1 - top_p all together, so none of them stays. Half
    # of that bound, so that rounding cannot matter.
    heavy = gaps[weights > 0.5 * (1 - top_p) * total / len(gaps)]
    for n_sorted in (min(_FIRST_NUCLEUS_SIZE, len(heavy)), len(heavy)):
        largest = _descending(heavy, n_sorted)
        masses = largest.exp().cumsum(0)
        if masses[-1] >= mass_wanted:
            break
    n_kept = 1 + int((masses[:-1] < mass_wanted).sum())
    border = largest[n_kept - 1]
    kept = gaps > border
    ties = (gaps == border).nonzero().squeeze(1)
    kept[ties[: n_kept - int(kept.sum())]] = True
    return kept


def _descending(values: Tensor, limit: int) -> Tensor:
    """Sort the `limit` largest values, largest first."""
    if limit < len(values):
        return torch.topk(values, limit).values
    if values.device.type == "cpu":  # numpy sorts 4 times faster than torch there
        return -torch.from_numpy(np.sort(-values.numpy()))
    return torch.sort(values, descending=True).values


def _refuse_rows_without_maximum(maxima: Tensor, places: Sequence[int]) -> None:
    """Raise NumericalError if any maximum is not finite; `places` are their rows."""
    finite = torch.isfinite(maxima)
    if bool(finite.all()):
        return
    wrong = (~finite).nonzero().squeeze(1).tolist()
    rows = tuple(places[index] for index in wrong)
    highest = float(maxima[wrong[0]])
    # Where a constraint allows no token the maximum is -inf, and nothing is computed wrong.
    kind = NumericalError if highest == -math.inf else WrongValuesError
    error = kind(
        f"the logits of row {rows[0]} have maximum {highest}, not a finite number",
        remedy="the model overflowed: try --dtype float32, or check the checkpoint",
    )
    error.rows = rows
    raise error
