"""How tokens are sampled: a client's parameters, and the log-probabilities of a sampled row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from shardnet.errors import SamplingError
from shardnet.types import U32, U64, Strict

MAX_LOGPROBS = 100
NLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


MAX_LOGIT_BIASES = 1024


MAX_STOP_IDS = 2048
"""A client's 1024 stop ids and as many that the checkpoint ends texts with."""


MAX_TEMPERATURE = 1e6


MAX_SAMPLING_COUNT = 2**32 - 1


MAX_SEED = 2**64 - 1


MAX_SAMPLE_INDEX = 2**32 - 1


Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
Probability = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

_NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "min_tokens", "seed", "sample_index"),
)
"""Of the parameters of sampling those that are always one number."""


class SamplingParams(Strict, frozen=True, kw_only=True):
    """How the tail chooses a token; docs/protocol.md, "Sampling", says what each does, in order.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, a repetition penalty of 1 and other
    penalties of 0 are off. `logit_bias` has (token id, what is added to its logit). Before
    `min_tokens` are made no stop id is. `sample_index` distinguishes equal prompts with one seed
    (design decision 3). `n_logprobs` is None when no logprobs are asked for, else how many top
    entries go with each token's own. Bounds of types hold for what comes from peers; `check` says
    what a program may give.
    """

    temperature: Temperature = 0.0
    top_k: U32 = 0
    top_p: Probability = 1.0
    min_p: Probability = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[U32, Bias], ...], Meta(max_length=MAX_LOGIT_BIASES)] = ()
    min_tokens: U32 = 0
    seed: U64 = 0
    sample_index: U32 = 0
    n_logprobs: NLogprobs | None = None

    def check(self) -> None:
        """Raise SamplingError that names the first parameter outside its range."""
        for name in _NUMBERS:
            value: object = getattr(self, name)
            if not isinstance(value, int | float):
                raise SamplingError(f"{name} must be a number, not {value!r}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise SamplingError(f"temperature must be 0 to 1000000, not {self.temperature}")
        if not 0 <= self.top_k <= MAX_SAMPLING_COUNT:
            raise SamplingError(f"top-k must be from 0 (off) to 2^32-1, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise SamplingError(f"min-p must be from 0 (off) to 1, not {self.min_p}")
        self._check_penalties()
        if not 0 <= self.min_tokens <= MAX_SAMPLING_COUNT:
            raise SamplingError(f"min-tokens must be from 0 to 2^32-1, not {self.min_tokens}")
        if not 0 <= self.seed <= MAX_SEED:
            raise SamplingError(f"seed must be from 0 to 2^64-1, not {self.seed}")
        if not 0 <= self.sample_index <= MAX_SAMPLE_INDEX:
            raise SamplingError(f"sample index must be from 0 to 2^32-1, not {self.sample_index}")
        if self.n_logprobs is not None and not 0 <= self.n_logprobs <= MAX_LOGPROBS:
            raise SamplingError(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {self.n_logprobs}")

    def _check_penalties(self) -> None:
        if not 0.01 <= self.repetition_penalty <= 100:
            raise SamplingError(
                f"repetition-penalty must be from 0.01 to 100, not {self.repetition_penalty}"
            )
        if not -2 <= self.presence_penalty <= 2:
            raise SamplingError(
                f"presence-penalty must be from -2 to 2, not {self.presence_penalty}"
            )
        if not -2 <= self.frequency_penalty <= 2:
            raise SamplingError(
                f"frequency-penalty must be from -2 to 2, not {self.frequency_penalty}"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise SamplingError(
                f"logit-bias may name {MAX_LOGIT_BIASES} tokens, not {len(self.logit_bias)}"
            )
        seen = set()
        for token_id, bias in self.logit_bias:
            if token_id < 0 or not -100 <= bias <= 100:
                raise SamplingError(
                    f"logit-bias must be a token id and -100 to 100, not {token_id}={bias}"
                )
            if token_id in seen:
                raise SamplingError(f"logit-bias names token {token_id} twice")
            seen.add(token_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of one sampled row: the token's own and the `top` (token id, logprob) by rank.

    Log-softmax of the raw float32 logits, before penalties and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
