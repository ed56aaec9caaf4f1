"""The sampler of the last stage: logits and noise in, token ids and logprobs out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardnet.constraints import TokenMask
from shardnet.errors import CheckpointError, NumericalError, WrongValuesError
from shardnet.model.arithmetic.elementary import many_exponentials, natural_logarithm
from shardnet.model.kernels.devices import where_float64
from shardnet.model.sampling.penalties import NO_CONTEXT, RowContext, change_logits, changes_logits
from shardnet.model.sampling.token_masks import forbidden_tokens
from shardnet.sampling_params import SamplingParams, TokenLogprobs

Words = npt.NDArray[np.uint32]
TokenIdArray = npt.NDArray[np.int64]
Noise = npt.NDArray[np.float64]

WORD_LIMIT = 2**32
"""Positions, sample indices and token ids must be below it: each takes one word of the counter."""

WORDS_PER_BLOCK = 4

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_2 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


def philox4x32(counters: npt.ArrayLike, key: tuple[int, int]) -> Words:
    """Run Philox4x32-10 on many counters under one key.

    `counters` has shape [4, N], one block a column; `key` is (word 0, word 1). Returns the output
    blocks, uint32 [4, N]. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011; the constants and the order of words are those of Random123's philox.h.
    """
    blocks = np.array(counters, dtype=np.uint64)  # [4, N], 32 bits used: products need 64
    word_0, word_1, word_2, word_3 = blocks
    product_0, product_2 = np.empty_like(word_0), np.empty_like(word_2)
    for turn in range(_ROUNDS):
        np.multiply(word_0, _MULTIPLIER_0, out=product_0)
        np.multiply(word_2, _MULTIPLIER_2, out=product_2)
        np.right_shift(product_2, _HALF, out=word_0)
        word_0 ^= word_1
        word_0 ^= np.uint64((key[0] + turn * _WEYL_0) % WORD_LIMIT)
        np.right_shift(product_0, _HALF, out=word_2)
        word_2 ^= word_3
        word_2 ^= np.uint64((key[1] + turn * _WEYL_1) % WORD_LIMIT)
        np.bitwise_and(product_2, _LOW, out=word_1)
        np.bitwise_and(product_0, _LOW, out=word_3)
    return blocks.astype(np.uint32)


def noise_words(seed: int, position: int, sample_index: int, token_ids: TokenIdArray) -> Words:
    """Return the 32 random bits of each token for one drawn row.

    Key: (seed mod 2^32, seed div 2^32). Counter: (position, sample_index, token id div 4, 0).
    Token t takes word t mod 4 of its block. `token_ids` is any int64 [N]; returns uint32 [N].
    """
    assert 0 <= seed < WORD_LIMIT**2
    assert 0 <= position < WORD_LIMIT
    assert 0 <= sample_index < WORD_LIMIT
    if not len(token_ids):
        return np.empty(0, dtype=np.uint32)
    first, last = int(token_ids.min()) // WORDS_PER_BLOCK, int(token_ids.max()) // WORDS_PER_BLOCK
    if last - first < len(token_ids):  # dense: each block of the span once, its tokens share it
        words = _blocks(seed, position, sample_index, np.arange(first, last + 1))
        return words.T.reshape(-1)[token_ids - WORDS_PER_BLOCK * first]
    words = _blocks(seed, position, sample_index, token_ids // WORDS_PER_BLOCK)
    return words[token_ids % WORDS_PER_BLOCK, np.arange(len(token_ids))]


def _blocks(seed: int, position: int, sample_index: int, block_numbers: TokenIdArray) -> Words:
    counters = np.zeros((WORDS_PER_BLOCK, len(block_numbers)), dtype=np.uint64)
    counters[0], counters[1], counters[2] = position, sample_index, block_numbers
    return philox4x32(counters, (seed % WORD_LIMIT, seed // WORD_LIMIT))


def gumbel_noise(seed: int, position: int, sample_index: int, token_ids: TokenIdArray) -> Noise:
    """Return the Gumbel noise of each token for one drawn row.

    u = (word + 1/2) / 2^32 is exact in float64 and never 0 or 1; noise = -log(-log(u)), which lies
    between -3.14 and 22.88. Arguments as `noise_words`; returns float64 [N].
    """
    noise = noise_words(seed, position, sample_index, token_ids).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-32
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


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

    def take_best(self, best: Words) -> SampleResult | None:
        """Choose the tokens of greedy rows whose largest logits are known, of equal ones the first.

        `best` has for each row the id and the bits of that logit, [R, 2]. Returns None where one
        of the ids has no token. Raises NumericalError as `sample` does.
        """
        best_ids, maxima = best[:, 0].tolist(), best[:, 1].copy().view(np.float32)
        if max(best_ids) >= self._n_tokens or any(id_ in self._holes for id_ in best_ids):
            return None
        if not np.isfinite(maxima).all():
            _refuse_rows_without_maximum(torch.from_numpy(maxima), range(len(maxima)))
        return SampleResult(token_ids=best_ids, logprobs=[None] * len(best_ids))

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
    """Apply top-n-sigma, temperature, cut, top-k, typical, top-p and min-p, in this order.

    `row` is one row, float32 [V] with a finite maximum, `params.temperature` above 0. Returns, on
    the device of the row, or on the CPU where that has no float64, the remaining ids, int64 [S]
    ascending, and their gaps, float64 [S]: (logit - maximum) / temperature.

    The sets are those of transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    and MinPLogitsWarper, and of llama.cpp's top-n-sigma and typical. Ties: top-k keeps every token
    that equals the k-th logit; top-p keeps, of equal logits at its border, the smaller ids.
    """
    row = where_float64(row)
    maximum = row.max()
    ids = None
    if params.top_n_sigma:
        exact = row.double()
        sigma = exact[exact.isfinite()].std(correction=0)
        ids, row = _select(exact >= maximum - params.top_n_sigma * sigma, ids, row)
    if 0 < params.top_k < len(row):  # temperature does not change ranks: top-k may come first
        ids, row = _select(row >= torch.topk(row, params.top_k).values[-1], ids, row)
    gaps = (row.to(torch.float64) - maximum).div_(params.temperature)
    ids, gaps = _select(gaps >= -CUT, ids, gaps)
    if params.typical_p is not None and params.typical_p < 1:
        ids, gaps = _select(_typical(gaps, params.typical_p), ids, gaps)
        gaps = gaps - gaps.max()
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


def _typical(gaps: Tensor, typical_p: float) -> Tensor:
    """Choose the tokens whose surprise is nearest to the expected one: a mask, bool [S].

    In the order of how far it is from that, of equal ones the smaller id first, a token stays while
    the mass before it is below `typical_p` (arXiv 2202.00666).
    """
    logprobs = gaps - gaps.exp().sum().log()
    shares = logprobs.exp()
    strange = (logprobs - (shares * logprobs).sum()).abs()
    order = torch.argsort(strange, stable=True)
    n_kept = 1 + int((shares[order].cumsum(0)[:-1] < typical_p).sum())
    kept = torch.zeros_like(gaps, dtype=torch.bool)
    kept[order[:n_kept]] = True
    return kept


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
