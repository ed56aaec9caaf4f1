"""Changes logits before a token is chosen, by penalties among others, and a slot's tokens so far.

Like the KV cache it is overwritten by position, copied and trimmed with the slot, so that penalties
need no other state (design decision 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardnet.sampling_params import DRY_ALLOWED, DRY_BASE, SamplingParams
from shardnet.types import BLOCK_POSITIONS, SlotId, blocks_for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowContext:
    """The tokens before the one that is drawn for a row.

    `tokens` are the ids of its sequence up to the row's own, int32 [N]; from `n_prompt` on they are
    output. `stop_ids` must not be drawn until there are `min_tokens`.
    """

    tokens: NDArray[np.int32]
    n_prompt: int = 0
    stop_ids: tuple[int, ...] = ()

    @property
    def output(self) -> NDArray[np.int32]:
        """The tokens generated so far, int32."""
        return self.tokens[self.n_prompt :]

    @property
    def n_output(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.n_prompt


_NO_PLACES: Final = np.empty(0, np.intp)

NO_CONTEXT = RowContext(tokens=np.empty(0, np.int32))


def needs_context(params: SamplingParams) -> bool:
    """Say whether sampling with `params` depends on earlier tokens."""
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.min_tokens > 0
        or bool(params.dry_multiplier)
    )


def changes_logits(params: SamplingParams) -> bool:
    """Say whether sampling with `params` changes the raw logits."""
    return bool(params.logit_bias) or needs_context(params)


def change_logits(logits: Tensor, rows: Sequence[tuple[SamplingParams, RowContext]]) -> None:
    """Apply bias, penalties and `min_tokens` of each row to its logits, in place.

    `logits` is float32 [R, V], R = len(rows); ids beyond its columns are ignored. Each operation is
    rounded to float32. The formulas are those of transformers' SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor and MinNewTokensLengthLogitsProcessor, and of vLLM's
    apply_penalties for the next two; `repeats` has those of DRY.
    """
    bias, repetition = _Entries(logits), _Entries(logits)
    frequency, presence, dry = (_Entries(logits) for _ in range(3))
    for row, (params, context) in enumerate(rows):
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias.note(row, np.array(ids), np.array(values, np.float32))
        if params.repetition_penalty != 1:
            repetition.note(row, context.tokens, params.repetition_penalty)
        output = context.output
        if params.frequency_penalty and len(output):
            counts = np.bincount(output)[output].astype(np.float32)
            frequency.note(row, output, np.float32(params.frequency_penalty) * counts)
        if params.presence_penalty:
            presence.note(row, output, params.presence_penalty)
        if params.dry_multiplier:
            dry.note(row, *repeats(context.tokens, params))
    bias.apply(torch.add)
    repetition.apply(lambda scores, by: torch.where(scores < 0, scores * by, scores / by))
    frequency.apply(torch.sub)
    presence.apply(torch.sub)
    dry.apply(torch.sub)
    for row, (params, context) in enumerate(rows):
        if context.stop_ids and context.n_output < params.min_tokens:
            _bar(logits[row], context.stop_ids)


MOST_REPEATED: Final = 256
"""A repeat counts for so many tokens at most."""
_MOST_EXPONENT: Final = 88.7228391
"""The logarithm of the largest float32."""


def repeats(
    tokens: NDArray[np.int32], params: SamplingParams
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the tokens that would go on with a repeat of what ends `tokens`, and DRY's penalties.

    As llama.cpp's llama_sampler_dry_apply has it, over the whole sequence.
    """
    allowed = DRY_ALLOWED if params.dry_allowed_length is None else params.dry_allowed_length
    base, shortest, n_tokens = params.dry_base or DRY_BASE, max(1, allowed), len(tokens)
    breakers = _as_set(params.dry_breakers)
    latest = tokens[: -MOST_REPEATED - 1 : -1].tolist()
    most = next((n for n, token_id in enumerate(latest) if token_id in breakers), len(latest))
    places = np.flatnonzero(tokens[:-1] == tokens[-1]) if most >= shortest else _NO_PLACES
    length = 1
    longest: dict[int, int] = {}
    while len(places):
        if length >= shortest:
            longest.update(dict.fromkeys(tokens[places + 1].tolist(), length))
        if length == most:
            break
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[n_tokens - 1 - length]]
        length += 1
    ids = np.fromiter(longest, np.int32)
    exponents = np.fromiter(longest.values(), np.float64) - allowed
    if base > 1.000001:
        exponents = np.minimum(exponents, int(_MOST_EXPONENT / math.log(base)))
    return ids, ((params.dry_multiplier or 0.0) * base**exponents).astype(np.float32)


@lru_cache(maxsize=64)
def _as_set(token_ids: tuple[int | str, ...]) -> frozenset[int | str]:
    return frozenset(token_ids)


class _Entries:
    """Tokens of some rows, with a number for each. A token listed twice is changed once."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._rows: list[NDArray[np.int64]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def note(
        self, row: int, ids: NDArray[np.signedinteger], values: float | NDArray[np.float32]
    ) -> None:
        """Add tokens of a row with their values, or with one for all."""
        self._rows.append(np.full(len(ids), row))
        self._ids.append(ids.astype(np.int64))
        self._values.append(np.broadcast_to(np.asarray(values, np.float32), len(ids)))

    def apply(self, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replace the noted tokens' logits by `formula(logits, values)`."""
        if not self._rows:
            return
        logits = self._logits
        ids = np.concatenate(self._ids)
        known = ids < logits.shape[1]
        rows, places, values = (
            torch.from_numpy(np.concatenate(parts)[known]).to(logits.device)
            for parts in (self._rows, self._ids, self._values)
        )
        logits[rows, places] = formula(logits[rows, places], values)


def _bar(row: Tensor, ids: Sequence[int]) -> None:
    """Exclude tokens from one row, unless no other would be left."""
    barred = row.clone()
    barred[[token_id for token_id in ids if token_id < len(row)]] = -torch.inf
    if bool(torch.isfinite(barred.max())):
        row.copy_(barred)


TokenArray = NDArray[np.int32]

_NOTHING: TokenArray = np.empty(0, np.int32)


class TokenHistory:
    """The token ids of all slots, 4 bytes a position. Positions never written hold 0."""

    def __init__(self) -> None:
        self._slots: dict[SlotId, TokenArray] = {}

    def write(self, slot: SlotId, position: int, token_ids: Sequence[int]) -> None:
        """Store the tokens of consecutive positions, the first at `position`."""
        end = position + len(token_ids)
        tokens = self._slots.get(slot, _NOTHING)
        if end > len(tokens):  # doubled, for amortized copies
            tokens = self._slots[slot] = _resized(tokens, max(end, 2 * len(tokens)))
        tokens[position:end] = token_ids

    def tokens(self, slot: SlotId, n_positions: int) -> TokenArray:
        """Return the tokens of the first `n_positions`, int32 [n_positions]: a view."""
        return self._slots.get(slot, _NOTHING)[:n_positions]

    def copy(self, source: SlotId, target: SlotId, n_positions: int) -> None:
        """Copy the first `n_positions` of `source` to `target`, replacing its contents."""
        self._slots[target] = _resized(self.tokens(source, n_positions), n_positions)

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """Drop everything beyond the first `n_positions`. Unknown slots are ignored."""
        if n_positions == 0:
            self._slots.pop(slot, None)
        elif len(self._slots.get(slot, _NOTHING)) >= 2 * _room(n_positions):
            self._slots[slot] = _resized(self.tokens(slot, n_positions), n_positions)

    def clear(self) -> None:
        """Drop all slots."""
        self._slots.clear()


def _room(n_positions: int) -> int:
    return blocks_for(n_positions) * BLOCK_POSITIONS


def _resized(tokens: TokenArray, n_positions: int) -> TokenArray:
    new = np.zeros(_room(n_positions), np.int32)
    new[: len(tokens)] = tokens
    return new
