"""What a sequence can give beside its tokens: logits, hidden states, routing."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from shardnet.errors import SamplingError
from shardnet.sampling_params import MAX_LOGPROBS, NLogprobs
from shardnet.types import MAX_LAYERS, U32, LayerNumber, Strict

ALL_ROWS = 0


class OutputKind(enum.Enum):
    """What a row can give beside a token."""

    LOGITS = "logits"
    HIDDEN = "hidden"
    ROUTING = "routing"
    STATES = "states"
    """Hidden states that a drafter on the head's side reads; no client asks for them."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a row: experts are int16, states bfloat16, all else float32."""
        return 2 if self in (OutputKind.ROUTING, OutputKind.STATES) else 4


NO_EXPERT = -1
"""Stands in a routing where a layer has an MLP instead of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """Each row of a model visits `top_k` experts in each of `n_layers` layers, dense ones counted.

    A row of routing has them layer by layer, in a layer the best first; NO_EXPERT in dense layers.
    """

    n_layers: int
    top_k: int

    @property
    def width(self) -> int:
        """Elements of one row."""
        return self.n_layers * self.top_k


class OutputParams(Strict, frozen=True, kw_only=True):
    """What a sequence gives beside its tokens.

    Its rows are those of its prompt and of all new tokens but the last: what one forward pass over
    them has. `logit_rows` and `hidden_rows` say how many of the last rows give logits and hidden
    states: None none, ALL_ROWS all. Hidden states are those behind the final norm or, with
    `before_norm`, in front of it; with `hidden_mean` one row is given, the mean of all. Before them
    a row has the hidden states after each number of layers in `hidden_layers`, 0 for the
    embeddings; `every_layer` stands for all numbers below that of the model's layers.
    `n_prompt_logprobs` is None, or how many top entries go with each prompt token's logprob. With
    `routing` all rows give the experts they visited, layer by layer.
    """

    n_prompt_logprobs: NLogprobs | None = None
    logit_rows: U32 | None = None
    hidden_rows: U32 | None = None
    hidden_mean: bool = False
    before_norm: bool = False
    routing: bool = False
    hidden_layers: Annotated[tuple[LayerNumber, ...], Meta(max_length=MAX_LAYERS)] = ()
    every_layer: bool = False

    @property
    def asks(self) -> bool:
        """Whether anything is asked for."""
        nothing = self.n_prompt_logprobs is self.logit_rows is self.hidden_rows is None
        return self.routing or not nothing

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether rows of the prompt count that another sequence may have computed."""
        many = any(rows not in (None, 1) for rows in (self.logit_rows, self.hidden_rows))
        return many or self.routing or self.n_prompt_logprobs is not None

    def rows(self, kind: OutputKind) -> int | None:
        """Say how many of the last rows give this: None none, ALL_ROWS all."""
        match kind:
            case OutputKind.LOGITS:
                return self.logit_rows
            case OutputKind.HIDDEN:
                return self.hidden_rows
            case OutputKind.ROUTING:
                return ALL_ROWS if self.routing else None
            case OutputKind.STATES:
                return None

    def first_row(self, kind: OutputKind, n_prompt: int) -> int | None:
        """Give the first position that may be asked for, with a prompt of `n_prompt` tokens."""
        rows = self.rows(kind)
        if rows is None:
            return None
        return 0 if rows == ALL_ROWS else max(0, n_prompt - rows)

    def check(self) -> None:
        """Raise SamplingError that names the first parameter outside its range."""
        top = self.n_prompt_logprobs
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise SamplingError(f"prompt-logprobs must be from 0 to {MAX_LOGPROBS}, not {top}")
        for kind in OutputKind:
            rows = self.rows(kind)
            if rows is not None and rows < 0:
                raise SamplingError(f"{kind.value} must be of 1 row or more, or of all, not {rows}")
        if self.hidden_mean and self.hidden_rows != ALL_ROWS:
            raise SamplingError("the mean of hidden states is that of all rows")
        self._check_layers()

    def _check_layers(self) -> None:
        numbers = self.hidden_layers
        if not numbers and not self.every_layer:
            return
        if numbers and self.every_layer:
            raise SamplingError("hidden-layers are either named or all")
        if self.hidden_rows is None or self.hidden_mean:
            raise SamplingError("hidden-layers need rows of hidden states, and no mean")
        if any(one >= other for one, other in itertools.pairwise((-1, *numbers))):
            raise SamplingError(f"hidden-layers must be ascending numbers, not {[*numbers]}")

    def for_layers(self, n_layers: int) -> OutputParams:
        """Return these for a model of `n_layers`, with `every_layer` written out.

        Raises SamplingError for a layer that it does not have.
        """
        if self.every_layer:
            return replace(self, hidden_layers=tuple(range(n_layers)), every_layer=False)
        beyond = next((number for number in self.hidden_layers if number > n_layers), None)
        if beyond is not None:
            raise SamplingError(
                f"hidden-layers may be from 0 to {n_layers}, the model's layers, not {beyond}"
            )
        return self

    @property
    def n_states(self) -> int:
        """How many hidden states a row has, once `every_layer` is written out."""
        return len(self.hidden_layers) + 1


NO_OUTPUTS: Final = OutputParams()
