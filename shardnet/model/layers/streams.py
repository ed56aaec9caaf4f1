"""Several residual streams, mixed before and behind each sub-layer (hyper-connections).

Knows the parameters of mixers by transformers' names. Must not know which family has them.

Axes in shape comments: T rows of the micro-batch, N streams, E hidden size. Rows [T, N x E] have
one stream behind the other. Mixing is in float32, stream by stream, so that a row's bits depend on
no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.config.model_config import (
    N_PIECES,
    Activation,
    ModelConfig,
    StreamKind,
    Streams,
)
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import float_linear
from shardnet.model.layers.norms import BareNorm, HeadNorm, activate, row_sigmoid, row_softmax
from shardnet.model.layers.weight_source import WeightSource


class Mixer(Protocol):
    """What mixes several streams around a sub-layer."""

    @property
    def count(self) -> int:
        """How many there are, N."""

    def around(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Join rows [T, N x E] for a sub-layer of [T, E], and share out what it gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixes:
    """How much each stream is of a sub-layer's input, gets of its output, and of each stream.

    [T, N] each, and [T, N, N] from streams to streams, None where each goes on as it is.
    """

    before: Tensor
    behind: Tensor
    across: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMixer:
    """What makes the factors of streams from all of them (arXiv 2512.24880)."""

    config: Streams
    project: Callable[[Tensor], Tensor]
    base: Tensor  # [outputs]
    scale: Tensor  # one for each kind of factor
    norm: BareNorm

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, name: str, begin: str) -> StreamMixer:
        """Take the parameters of the mixer `name`, whose own names begin with `begin`."""
        assert config.streams is not None
        own = f"{name}.{begin}"
        return cls(
            config=config.streams,
            project=_exact_linear(weights.parameter(f"{own}fn")),
            base=weights.parameter(f"{own}base"),
            scale=weights.parameter(f"{own}scale"),
            norm=BareNorm(eps=config.norm_eps),
        )

    @property
    def count(self) -> int:
        """How many streams there are."""
        return self.config.count

    def factors(self, streams: Tensor) -> tuple[Tensor, ...]:
        """Return what all kinds of factors are made of, [T, outputs] each, of rows [T, N x E]."""
        config, kinds = self.config, len(self.scale)
        widths = [config.count, config.count, config.count**2][:kinds]
        raw = torch.split(self.project(self.norm(streams.float())), widths, -1)
        bases = torch.split(self.base, widths)
        return tuple(raw[kind] * self.scale[kind] + bases[kind] for kind in range(kinds))

    def __call__(self, streams: Tensor) -> Mixes:
        """Make the factors around a sub-layer for rows [T, N x E]."""
        config = self.config
        before, behind, *across = self.factors(streams)
        shares = config.magnitude * row_sigmoid(behind.contiguous())
        is_balanced = config.kind is StreamKind.BALANCED
        return Mixes(
            before=row_sigmoid(before.contiguous()) + config.eps,
            behind=shares if is_balanced else shares + config.eps,
            across=self._balanced(across[0]) if is_balanced else None,
        )

    def _balanced(self, logits: Tensor) -> Tensor:
        """Make rows and columns of [T, N x N] add up to 1, by Sinkhorn: [T, N, N]."""
        count, eps = self.config.count, self.config.eps
        square = row_softmax(logits.reshape(-1, count)) + eps
        square = square.view(-1, count, count)
        square = square / (added_up(square.unbind(1)) + eps)[:, None]
        for _ in range(self.config.n_rounds - 1):
            square = square / (added_up(square.unbind(2)) + eps)[:, :, None]
            square = square / (added_up(square.unbind(1)) + eps)[:, None]
        return square

    def around(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Join rows [T, N x E] for a sub-layer of [T, E], and share out what it gives."""
        return self.given(streams, None, sublayer)[0]

    def given(
        self, streams: Tensor, before: Tensor | None, sublayer: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Join by the factors `before` a sub-layer, if given, in the place of its own.

        Returns the latter, too: float32 [T, N].
        """
        mixes, count = self(streams), self.config.count
        before = mixes.before if before is None else before
        wide = streams.float().view(len(streams), count, -1)
        inner = sublayer(weighted(wide, before).to(streams.dtype)).float()
        parts = []
        for stream in range(count):
            kept = wide[:, stream]
            if mixes.across is not None:
                kept = weighted(wide, mixes.across[:, :, stream])
            parts.append(inner * mixes.behind[:, stream, None] + kept)
        return torch.cat(parts, -1).to(streams.dtype), mixes.before


class GivenMixer(Protocol):
    """What mixes streams by factors from elsewhere, and makes those for elsewhere."""

    @property
    def count(self) -> int:
        """How many streams there are, N."""

    def given(
        self, streams: Tensor, before: Tensor | None, sublayer: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See StreamMixer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggedMixer:
    """What mixes streams for a sub-layer by the factors of the one before it (DeepSeek-V4.1).

    Rows have these behind the streams, in pieces, and further columns that pass.
    """

    mixer: GivenMixer
    width: int  # N x E

    @property
    def count(self) -> int:
        """How many streams there are."""
        return self.mixer.count

    def around(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Join rows [T, N x E and more] for a sub-layer of [T, E], and share out what it gives."""
        return self.lagged(streams, lambda own, before: self.mixer.given(own, before, sublayer))

    def lagged(
        self, streams: Tensor, mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Do what `mix` does with streams [T, N x E] and factors before [T, N], both new then."""
        own, n_pieces = streams[:, : self.width].contiguous(), N_PIECES * self.count
        before = from_pieces(streams[:, self.width : self.width + n_pieces])
        mixed, before = mix(own, before)
        pieces = to_pieces(before, streams.dtype)
        return torch.cat((mixed, pieces, streams[:, self.width + n_pieces :]), -1)


def to_pieces(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Write float32 numbers [T, N] as `N_PIECES` of a dtype each, which add up to them."""
    pieces = []
    for _ in range(N_PIECES):
        pieces.append(numbers.to(dtype))
        numbers = numbers - pieces[-1].float()
    return torch.stack(pieces, -1).flatten(1)


def from_pieces(pieces: Tensor) -> Tensor:
    """Add up what to_pieces has written: float32 [T, N]."""
    return added_up(pieces.float().view(len(pieces), -1, N_PIECES).unbind(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMixer:
    """What gates each column of the normed streams, by linears of a low rank (Qwen 3.8).

    `inject` makes the streams' shares of what a sub-layer gives; None behind the last layer.
    """

    count: int
    norm: HeadNorm  # [N, E]: of each stream by itself
    down: Linear
    up: Linear
    inject: Linear | None

    @classmethod
    def load(
        cls, config: ModelConfig, weights: WeightSource, name: str, *, is_last: bool = False
    ) -> GatedMixer:
        """Take the parameters of the mixer `name`."""
        assert config.streams is not None
        inject = None
        if not is_last:
            inject = weights.linear(f"{name}.block_inject_weight", precise=True)
        return cls(
            count=config.streams.count,
            norm=stream_norm(config, weights, f"{name}.hc_norm"),
            down=weights.linear(f"{name}.input_mix_weight_down"),
            up=weights.linear(f"{name}.input_mix_weight_up"),
            inject=inject,
        )

    def normed(self, streams: Tensor) -> Tensor:
        """Normalize each stream of rows [T, N x E]: same shape."""
        return self.norm(streams.view(len(streams), self.count, -1)).flatten(1)

    def join(self, normed: Tensor) -> Tensor:
        """Gate normed streams [T, N x E], and take their mean: [T, E]."""
        gates = row_sigmoid(self.up(activate(Activation.SILU, self.down(normed) / self.count)))
        gated = (gates.float() * normed.float()).view(len(normed), self.count, -1)
        return (added_up(gated.unbind(1)) / self.count).to(normed.dtype)

    def around(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Join rows [T, N x E] for a sub-layer of [T, E], and share out what it gives."""
        assert self.inject is not None
        normed = self.normed(streams)
        inner = sublayer(self.join(normed)).float()
        shares = 2 * row_sigmoid(self.inject(normed) / self.count).float()
        given = [inner * shares[:, stream, None] for stream in range(self.count)]
        return (streams.float() + torch.cat(given, -1)).to(streams.dtype)


def stream_norm(config: ModelConfig, weights: WeightSource, name: str) -> HeadNorm:
    """Take a norm over each stream by itself: of [T, N, E]."""
    assert config.streams is not None
    norm = weights.norm(name, config.norm_eps, config.norm_offset)
    return HeadNorm(weight=norm.weight.view(config.streams.count, -1), eps=config.norm_eps)


def load_mixer(config: ModelConfig, weights: WeightSource, name: str) -> Mixer:
    """Take the parameters of what mixes streams around a sub-layer."""
    assert config.streams is not None
    if config.streams.kind is StreamKind.GATED:
        return GatedMixer.load(config, weights, name)
    mixer = StreamMixer.load(config, weights, name, "")
    if config.streams.is_lagged:
        return LaggedMixer(mixer=mixer, width=config.streams_width)
    return mixer


class StreamHead:
    """Joins the streams behind the last layer: weighted, or without a mixer their mean."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, name: str = "model.hc_head"
    ) -> None:
        """Take the parameters of the head `name`, if there are any."""
        assert config.streams is not None
        mixer: StreamMixer | GatedMixer | None = None
        if config.streams.kind is StreamKind.GATED:
            mixer = GatedMixer.load(config, weights, name, is_last=True)
        elif config.streams.has_head:
            mixer = StreamMixer.load(config, weights, name, "hc_")
        self.count = config.streams.count
        self.mixer = mixer
        self.lags_behind = config.streams_width if config.streams.is_lagged else 0

    @property
    def norms(self) -> bool:
        """Whether what it gives needs no further norm."""
        return isinstance(self.mixer, GatedMixer)

    def __call__(self, streams: Tensor) -> Tensor:
        """Join rows [T, N x E] to [T, E]; with factors behind them where these come so."""
        if self.lags_behind:
            streams, carried = streams[:, : self.lags_behind], streams[:, self.lags_behind :]
            wide = streams.float().view(len(streams), self.count, -1)
            before = from_pieces(carried[:, : N_PIECES * self.count])
            return weighted(wide, before).to(streams.dtype)
        if isinstance(self.mixer, GatedMixer):
            return self.mixer.join(self.mixer.normed(streams))
        wide = streams.float().view(len(streams), self.count, -1)
        if self.mixer is None:
            return (added_up(wide.unbind(1)) / self.count).to(streams.dtype)
        [raw] = self.mixer.factors(streams)
        shares = row_sigmoid(raw.contiguous()) + self.mixer.config.eps
        return weighted(wide, shares).to(streams.dtype)


def weighted(streams: Tensor, shares: Tensor) -> Tensor:
    """Add up streams [T, N, E] times their shares [T, N]: [T, E]."""
    return added_up([streams[:, n] * shares[:, n, None] for n in range(streams.shape[1])])


def added_up(parts: Sequence[Tensor]) -> Tensor:
    """Add up one after the other, so that the order depends on no shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _exact_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Make the product with a weight [N, K], float32, by the library where it is there."""
    native = native_kernels()
    if native is None or weight.device.type != "cpu":
        return lambda rows: F.linear(rows, weight)
    return float_linear([weight], None, native)
