"""Convolutions over a few positions: gated, in place of attention (LFM2), or of n-grams before it.

Knows what is kept of a slot: the last inputs of the convolution, of n-grams their token ids.
Must not know files, where tables lie, wire or scheduling.

Every column of every position is a few products and sums in one order, so that a position's bits
depend on nothing but the positions before it (design decision 4).

Axes in shape comments: T rows of the micro-batch, B rows of the convolution before them, E hidden
size, N streams, H heads of n-grams of all lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardnet.model.cache.slot_blocks import Replay, SlotState
from shardnet.model.config.model_config import Activation, ModelConfig, Ngrams
from shardnet.model.config.ngram_hashes import OF_LAYER, factors, head_rows, part_rows
from shardnet.model.kernels.devices import where_float64
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, Span
from shardnet.model.layers.decoder_layer import Sublayer
from shardnet.model.layers.norms import activate, row_sigmoid
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.streams import stream_norm
from shardnet.model.layers.weight_source import StoredTable, WeightSource
from shardnet.model.mixers.position_indexer import from_digits, to_digits

_LEAST_GATE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """One linear for both gates and the inputs, the convolution, another linear.

    `taps` are the factors of each column, those of the oldest position first.
    """

    in_proj: Linear
    out_proj: Linear
    taps: Tensor  # [taps, E], float32
    bias: Tensor | None  # [E], float32

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through layer `index` within the stage: [T, E]."""
        gate_in, gate_out, inner = self.in_proj(hidden).chunk(3, -1)  # [T, E] each
        gated = gate_in * inner
        parts = []
        for span in step.spans:
            state = step.kv.state(span.slot, index)
            n_rows = span.end - span.start
            before = state.keep_before(n_rows, span.n_drafts)
            rows = torch.cat((before.recent, gated[span.start : span.end]))  # [B + T, E]
            parts.append(self._convolve(rows))
            state.recent.copy_(rows[n_rows:])
            state.count(n_rows, _replay(rows) if state.kept else None)
        convolved = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self.out_proj(gate_out * convolved)

    def _convolve(self, rows: Tensor) -> Tensor:
        """Convolve rows [B + T, E], in float32: [T, E] in their dtype."""
        wide, n_rows = rows.float(), len(rows) - len(self.taps) + 1
        total = wide[:n_rows] * self.taps[0]
        for tap in range(1, len(self.taps)):
            total += wide[tap : tap + n_rows] * self.taps[tap]
        if self.bias is not None:
            total += self.bias
        return total.to(rows.dtype)


def _replay(rows: Tensor) -> Replay:
    """Return what goes over rows [B + T, E] again."""

    def replay(source: SlotState, target: SlotState, n_rows: int) -> None:
        target.recent.copy_(rows[n_rows : n_rows + len(target.recent)])

    return replay


class NgramHashes:
    """Which rows of the table n-grams have: one for each head.

    Of `classes` [V], int64, those of tokens are hashed in the place of their ids.
    """

    def __init__(
        self, own: Ngrams, layer: int, vocab_size: int, classes: Tensor | None = None
    ) -> None:
        """Make those of the absolute `layer`."""
        rows = torch.tensor(head_rows(own, layer))
        self.config = own
        self.classes = classes
        self.factors = (
            factors(own, layer, vocab_size) if classes is None else _drawn_factors(own, layer)
        )
        self.rows = rows  # [H], int64
        self.begins = rows.cumsum(0) - rows  # [H], int64

    def of_text(self, ids: Tensor, n_before: int = 0) -> Tensor:
        """Return the rows of token `ids`; see RowsOf."""
        ends = ids.new_full((max(0, self.config.longest - 1 - n_before),), self.config.end_id)
        return self(torch.cat((ends, ids)))

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows [T, H] of token `ids` [longest - 1 + T], int64 on the CPU.

        Ids before the last end of a text count as ends, but where classes are hashed.
        """
        own, n_before, classes = self.config, self.config.longest - 1, self.classes
        ids = ids if classes is None else classes[ids]
        n_rows = len(ids) - n_before
        mixed, ended = ids[n_before:] * self.factors[0], torch.zeros(n_rows, dtype=torch.bool)
        made = []
        for back in range(1, own.longest):
            earlier = ids[n_before - back : n_before - back + n_rows]
            if classes is None:
                ended = ended | (earlier == own.end_id)
                earlier = torch.where(ended, own.end_id, earlier)
            mixed = mixed ^ earlier * self.factors[back]
            heads = slice(own.heads_each * (back - 1), own.heads_each * back)
            made.append(mixed[:, None] % self.rows[heads] + self.begins[heads])
        return torch.cat(made, 1)


def _drawn_factors(own: Ngrams, layer: int) -> list[int]:
    """Draw odd numbers as Engram's makers do: with none of them a class leaves 63 bits."""
    most = max(1, ((1 << 63) - 1) // own.n_classes // 2)
    drawn = np.random.default_rng(OF_LAYER * layer).integers(0, most, own.longest, np.int64)
    return [2 * int(one) + 1 for one in drawn]


class Features(ABC):
    """What is made of a table's rows; which these are tokens say, of which a state has the last."""

    hashes: NgramHashes
    table: StoredTable

    @abstractmethod
    def add(
        self, hidden: Tensor, features: Tensor, spans: Sequence[tuple[Span, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Add what is made of looked up `features` [T, any] to the rows `hidden` [T, any].

        Of each span there is what its state has of rows before it, [B, columns]. Returns the sums
        in the shape of `hidden`, and what a state is to have of these rows: [T, columns].
        """

    def text(self, before: Tensor) -> Tensor:
        """Return the token ids of the last positions: ends of a text before the first one.

        `before` are the last rows of a state, at least as many as n-grams are long less 1.
        """
        own = self.hashes.config
        ids = from_digits(before[len(before) - own.longest + 1 :, -own.n_digits :])
        return torch.where(ids == 0, own.end_id, ids - 1).cpu()

    def digits(self, token_ids: Tensor, like: Tensor) -> Tensor:
        """Write token ids [T] as states have them: [T, digits] in the dtype of `like`."""
        return to_digits(token_ids + 1, like)

    def look_up(self, texts: Sequence[Tensor]) -> Tensor:
        """Look up the rows of `texts`, each behind the ids before it: [T, features].

        Raises CheckpointError, LostShardError.
        """
        n_before = self.hashes.config.longest - 1
        rows = torch.cat(self.table.bring([(text, n_before) for text in texts]))
        return self.table.rows(rows.flatten()).view(len(rows), -1)


class NgramFeatures(Features):
    """The table, and what gates its rows by the streams and convolves them."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        """Take the parameters of the absolute `layer`."""
        own, name = config.ngrams, f"model.layers.{layer}.ple"
        assert own is not None
        table = f"{name}.ple_embedding.ngram_embedding.shard_"
        parts = [f"{table}{number}" for number in range(len(part_rows(own, layer)))]
        self.hashes = NgramHashes(own, layer, config.vocab_size)
        self.table = weights.stored_table(*parts, rows_of=self.hashes.of_text)
        self.key_proj = weights.linear(f"{name}.key_proj")
        self.value_proj = weights.linear(f"{name}.value_proj")
        self.norm_key, self.norm_query, self.norm_conv = (
            stream_norm(config, weights, f"{name}.norm_{kind}") for kind in ("key", "query", "conv")
        )
        taps = weights.parameter(f"{name}.conv1d.weight")
        self.taps = taps.squeeze(1).T.contiguous()  # [taps, N x E], float32: the oldest first

    def add(
        self, hidden: Tensor, features: Tensor, spans: Sequence[tuple[Span, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Add gated rows and their convolution; see Features."""
        gated = self.gated(hidden, features).to(hidden.dtype)
        new = self.norm_conv(gated).flatten(1)
        convolved = [
            self.convolve(
                torch.cat((before[:, : new.shape[1]], new[span.start : span.end])),
                span.end - span.start,
            )
            for span, before in spans
        ]
        return hidden + (gated.flatten(1) + torch.cat(convolved)), new

    def gated(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Gate what was looked up, [T, features], by rows [T, N x E]: float32 [T, N, E]."""
        keys, values = self.key_proj(features), self.value_proj(features).float()
        n_streams, width = self.norm_key.weight.shape
        apart = (len(hidden), n_streams, width)
        keys, queries = self.norm_key(keys.view(apart)), self.norm_query(hidden.view(apart))
        scores = _sum_of_columns(keys.float() * queries.float()) / width**0.5  # [T, N]
        return row_sigmoid(_signed_roots(scores))[..., None] * values[:, None]

    def convolve(self, rows: Tensor, n_rows: int) -> Tensor:
        """Convolve rows [B + T, N x E] of every so many-th position: [T, N x E] of the last."""
        n_taps, step = len(self.taps), self.hashes.config.longest
        wide, end = rows.float(), len(rows)
        begins = [end - n_rows - (n_taps - 1 - tap) * step for tap in range(n_taps)]
        total = wide[begins[0] :][:n_rows] * self.taps[0]
        for tap in range(1, n_taps):
            total += wide[begins[tap] :][:n_rows] * self.taps[tap]
        return activate(Activation.SILU, total.to(rows.dtype))


class EngramFeatures(Features):
    """The table, and what gates its rows by the streams, each by itself, in float32 (Engram)."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        """Take the parameters of the absolute `layer`."""
        own, name = config.ngrams, f"model.layers.{layer}.engram"
        assert own is not None
        self.hashes = NgramHashes(own, layer, config.vocab_size, weights.token_classes())
        self.table = weights.stored_table(f"{name}.embed", rows_of=self.hashes.of_text)
        self.kv_proj = weights.linear(f"{name}.kv_proj")
        queries, keys = (weights.parameter(f"{name}.{kind}_weight") for kind in "qk")
        self.scale = queries * keys * config.hidden_size**-0.5  # [N, E], float32
        self.eps = config.norm_eps

    def add(
        self, hidden: Tensor, features: Tensor, spans: Sequence[tuple[Span, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Add gated rows to the streams, the first columns of `hidden`; see Features."""
        n_streams, width = self.scale.shape
        projected = self.kv_proj(features).float()
        keys, values = projected[:, :-width].view(-1, n_streams, width), projected[:, None, -width:]
        streams = hidden[:, : n_streams * width].float().view(-1, n_streams, width)
        scores = _sum_of_columns(streams * keys * self.scale)  # [T, N]
        for each in (streams, keys):
            scores = scores / _roots(_sum_of_columns(each * each) / width + self.eps)
        gates = row_sigmoid(_signed_roots(scores))
        added = (streams + gates[..., None] * values).flatten(1).to(hidden.dtype)
        beside = hidden[:, n_streams * width :]
        return torch.cat((added, beside), 1), hidden.new_empty(len(hidden), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSublayer:
    """What adds features of n-grams before a layer's attention, whose state has theirs too."""

    features: Features
    attention: Sublayer

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run rows [T, N x E or more] through both in layer `index` within the stage: alike."""
        own, ids = self.features, step.token_ids.cpu()
        states = [step.kv.state(span.slot, index) for span in step.spans]
        befores = [state.at_end.features for state in states]  # [B, columns and digits]
        spans = list(zip(step.spans, befores, strict=True))
        texts = [
            torch.cat((own.text(before), ids[span.start : span.end])) for span, before in spans
        ]
        hidden, kept = own.add(hidden, own.look_up(texts), spans)
        new = torch.cat((kept, own.digits(step.token_ids, kept)), 1)
        given = [torch.cat((before, new[span.start : span.end])) for span, before in spans]
        hidden = self.attention(hidden, index, rotary, step)
        for state, each in zip(states, given, strict=True):
            state.features.copy_(each[len(each) - len(state.features) :])
            if state.kept:
                state.replay_too(_replay_features(each))
        return hidden


def _replay_features(rows: Tensor) -> Replay:
    """Return what goes over rows [B + T, columns and digits] again."""

    def replay(source: SlotState, target: SlotState, n_rows: int) -> None:
        target.features.copy_(rows[n_rows : n_rows + len(target.features)])

    return replay


def _signed_roots(scores: Tensor) -> Tensor:
    """Return the roots of what scores [T, N] are without their signs, with them again."""
    return (_roots(scores.abs().clamp_min(_LEAST_GATE)) * scores.sign()).contiguous()


def _roots(numbers: Tensor) -> Tensor:
    """Return the roots of float32 numbers, by way of float64: torch's of float32 differ."""
    return where_float64(numbers).double().sqrt().float().to(numbers.device)


def _sum_of_columns(rows: Tensor) -> Tensor:
    """Add up the columns [..., E] by halves, in an order that depends on E alone: [...]."""
    while (width := rows.shape[-1]) > 1:
        half = width // 2
        folded = rows[..., :half] + rows[..., half : 2 * half]
        rows = torch.cat((folded, rows[..., 2 * half :]), -1)
    return rows[..., 0]
