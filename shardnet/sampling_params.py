"""How tokens are sampled: a client's parameters, and the log-probabilities of a sampled row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

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


MAX_DRY_BREAKERS = 1 << 15
"""Tokens that end what may be a repeat."""


MAX_SAMPLE_INDEX = 2**32 - 1


Temperature = Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
Probability = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Deviations = Annotated[float, Meta(ge=0, le=1e6)]
DryMultiplier = Annotated[float, Meta(ge=0, le=100)]
DryBreakers = Annotated[
    tuple[U32 | Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_DRY_BREAKERS)
]
DryBase = Annotated[float, Meta(ge=1, le=100)]

_NUMBERS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_k": (0, MAX_SAMPLING_COUNT),
    "top_p": (0, 1.0),
    "min_p": (0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2, 2.0),
    "frequency_penalty": (-2, 2.0),
    "min_tokens": (0, MAX_SAMPLING_COUNT),
    "seed": (0, MAX_SEED),
    "sample_index": (0, MAX_SAMPLE_INDEX),
    "top_n_sigma": (0, 1e6),
    "typical_p": (0, 1.0),
    "dry_multiplier": (0, 100.0),
    "dry_base": (1, 100.0),
    "dry_allowed_length": (0, MAX_SAMPLING_COUNT),
}
"""The bounds of parameters that are one number."""

NEWER: Final = ("top_n_sigma", "typical_p", "dry_multiplier", "dry_base", "dry_allowed_length")
"""Those that not every node knows; they are None where nothing is said."""
DRY_BASE: Final = 1.75
DRY_ALLOWED: Final = 2


class SamplingParams(Strict, frozen=True, kw_only=True):
    """How the tail chooses a token; docs/protocol.md, "Sampling", says what each does, in order.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, a repetition penalty of 1 and other
    penalties of 0 are off. `logit_bias` has (token id, what is added to its logit). Before
    `min_tokens` are made no stop id is. `sample_index` distinguishes equal prompts with one seed
    (design decision 3). `n_logprobs` is None when no logprobs are asked for, else how many top
    entries go with each token's own. `top_n_sigma` 0, `typical_p` 1 and `dry_multiplier` 0 are off,
    and so is None. No repeat goes over `dry_breakers`, texts, of which the head makes ids of tokens
    and which are llama.cpp's where there are none. Bounds of types hold for what comes
    from peers; `check` says what a program may give.
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
    top_n_sigma: Deviations | None = None
    typical_p: Probability | None = None
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: U32 | None = None
    dry_breakers: DryBreakers = ()

    @property
    def is_newer(self) -> bool:
        """Whether nodes without Capability.SAMPLERS would draw other tokens."""
        return bool(self.dry_breakers) or any(getattr(self, name) is not None for name in NEWER)

    def check(self) -> None:
        """Raise SamplingError that names the first parameter outside its range."""
        for name, (least, most) in _NUMBERS.items():
            value: object = getattr(self, name)
            told = name.replace("_", " " if name == "sample_index" else "-")
            if value is None and name in NEWER:
                continue
            if not isinstance(value, int | float):
                raise SamplingError(f"{name} must be a number, not {value!r}")
            if name in ("top_p", "typical_p") and not value > 0:
                raise SamplingError(f"{told} must be above 0 and at most 1, not {value}")
            if not least <= value <= most:
                end = f"2^{most.bit_length()}-1" if isinstance(most, int) else f"{most:.10g}"
                raise SamplingError(f"{told} must be from {least:g} to {end}, not {value}")
        if self.n_logprobs is not None and not 0 <= self.n_logprobs <= MAX_LOGPROBS:
            raise SamplingError(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {self.n_logprobs}")
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
