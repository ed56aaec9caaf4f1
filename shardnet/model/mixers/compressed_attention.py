"""Attention over a window, and over entries that stand for several positions (DeepSeek-V4).

Layers may share the entries of one of them (DeepSeek-V4.1); then these go from layer to layer at
the end of rows, at that of their last position.

Knows transformers' parameter names. Must not know files, wire or scheduling.

Rows of the window and those that wait for their entries are the state of a slot, as the inputs of a
convolution are. An entry lies in the slot at its own positions, a part of it at each, so that
blocks, prefixes and moves know it as keys.

Axes: T rows, H heads, D columns of a key, which is a value too, W rows of the window, N entries of
r positions each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.cache.slot_blocks import Replay, SlotState
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, Span, attend_row, attention
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.native_attention import (
    CHOSEN_ROWS,
    AttentionKind,
    Blocks,
    native_attend_rows,
)
from shardnet.model.layers.norms import BareNorm, row_softmax
from shardnet.model.layers.rotary import Rotary, rotary_frequencies, rotary_rows
from shardnet.model.layers.streams import added_up
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.mixers.position_indexer import choose_entries


class Compressor:
    """Makes entries: sums of rows, weighted column by column by a softmax over their gates."""

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        """Take the parameters of the compressor `name`."""
        assert config.compressed is not None
        assert config.rope is not None
        self.project = weights.linear(f"{name}.kv_proj", f"{name}.gate_proj")  # values and gates
        self.bias = weights.parameter(f"{name}.position_bias")  # [r, columns]: of the gates
        self.norm = weights.norm(f"{name}.kv_norm", config.norm_eps)
        self.rope = config.rope
        self.rope_size = config.compressed.rope_size
        self.frequencies = rotary_frequencies(config.rope, config.head_size, 0)
        self.width = 2 * self.bias.shape[1]  # of what waits

    def entries(self, rows: Tensor, first: int, n: int) -> Tensor:
        """Make entries `first` to `first + n` of rows [.., values and gates]: [n, D].

        The last rows are those of the last entry; entries whose norm is narrower than their values
        are made of the values before too, none of which are before the first.
        """
        rate, width = self.bias.shape
        size = self.norm.weight.shape[0]
        values, gates = rows.float().split(width, -1)  # type: ignore[no-untyped-call]
        own = slice(len(rows) - n * rate, None)
        gates = gates[own] + self.bias.repeat(n, 1)
        parts = [values[own][:, -size:].view(n, rate, size)]
        logits = [gates[:, -size:].view(n, rate, size)]
        if width > size:  # those before come first
            own = slice(len(rows) - (n + 1) * rate, len(rows) - rate)
            before = rows[own].float()
            earlier = before[:, width : width + size] + self.bias[:, :size].repeat(n, 1)
            earlier = earlier.view(n, rate, size)
            if first == 0:
                earlier[0] = -torch.inf
            parts.insert(0, before[:, :size].view(n, rate, size))
            logits.insert(0, earlier)
        summed = _pooled(torch.cat(logits, 1), torch.cat(parts, 1))  # of [n, r or 2 r, D]
        normed = self.norm(summed.to(rows.dtype))
        positions = torch.arange(first, first + n) * rate
        rotary = rotary_rows(self.rope, self.frequencies, positions, rows.dtype)
        return rotate_last(normed[:, None], rotary, self.rope_size)[:, 0]


class SharedCompressor:
    """Makes the entries that layers share, each with the key that it is chosen by behind it.

    An entry is a row, or the sum of several as those of Compressor.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str, rate: int) -> None:
        """Take the parameters of the compressor `name`, which pools `rate` positions."""
        own = config.compressed
        assert own is not None
        assert config.rope is not None
        gates = (f"{name}.gate_proj",) if rate > 1 else ()
        self.project = weights.linear(f"{name}.kv_proj", *gates)
        self.norm = weights.norm(f"{name}.kv_norm", config.norm_eps)
        self.key_proj = weights.linear(f"{name}.indexer.wk")
        self.key_norm = weights.norm(f"{name}.indexer.k_norm", config.norm_eps)
        self.rate = rate
        self.rope = config.rope
        self.rope_size = own.rope_size
        self.frequencies = rotary_frequencies(config.rope, config.head_size, 0)
        self.width = (1 + len(gates)) * own.head_size

    def entries(self, rows: Tensor, first: int, n: int) -> Tensor:
        """Make entries `first` to `first + n` of rows [.., values and gates]: [n, D and key]."""
        rows = rows[len(rows) - n * self.rate :]
        if self.rate > 1:
            value, gate = rows.float().view(n, self.rate, -1).chunk(2, -1)
            rows = _pooled(gate, value).to(rows.dtype)
        latent = self.norm(rows)
        key = self.key_norm(self.key_proj(latent))
        positions = torch.arange(first, first + n) * self.rate
        rotary = rotary_rows(self.rope, self.frequencies, positions, rows.dtype)
        both = (rotate_last(each[:, None], rotary, self.rope_size)[:, 0] for each in (latent, key))
        return torch.cat([*both], -1)


def _pooled(gate: Tensor, value: Tensor) -> Tensor:
    """Add up values [n, r, D], weighted column by column with the softmax of gates: [n, D]."""
    n, rate, size = value.shape
    shares = row_softmax(gate.transpose(1, 2).reshape(n * size, -1)).view(n, size, -1)
    return added_up([shares[..., at] * value[:, at] for at in range(rate)])


def rotate_last(heads: Tensor, rotary: Rotary, size: int) -> Tensor:
    """Rotate the last `size` columns of heads [T, H, D], pairs of adjacent ones."""
    turned = rotary.rotate_pairs(heads[..., -size:])
    return torch.cat((heads[..., :-size], turned), -1)


def _turn_back(heads: Tensor, rotary: Rotary, size: int) -> Tensor:
    """Undo `rotate_last` on what attention gives, order included."""
    turned = Rotary(cos=rotary.cos, sin=-rotary.sin).rotate(heads[..., -size:].contiguous())
    pairs = turned.view(*turned.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
    return torch.cat((heads[..., :-size], pairs), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexer:
    """What chooses among entries: queries, their weights, and keys that are entries themselves.

    Keys of shared entries come with these.
    """

    q_b_proj: Linear
    weights_proj: Linear
    compressor: Compressor | None


class CompressedAttention:
    """Attention of one layer; see Compressed.

    What predicts further tokens has a window alone, and its keys at all positions of a slot, which
    is rewound without it.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        """Take the parameters of the absolute `layer`."""
        own, attn = config.compressed, f"model.layers.{layer}.self_attn"
        assert own is not None
        sinks = weights.parameter(f"{attn}.sinks").view(1, -1, 1)
        window = own.window if layer == config.n_layers else None
        name = f"{attn}.compressor"
        self.compressor: Compressor | SharedCompressor | None = None
        rate, shares = own.rates[layer], bool(own.sources)
        if shares and rate and own.sources[layer] == layer:
            self.compressor = SharedCompressor(config, weights, name, rate)
        elif rate and not shares:
            self.compressor = Compressor(config, weights, name)
        self.indexer = None
        if layer in own.indexer.layers:
            scorer = f"{name}.indexer.scorer.weights_proj"
            self.indexer = EntryIndexer(
                q_b_proj=weights.linear(f"{name}.indexer.q_b_proj"),
                weights_proj=weights.linear(scorer, precise=True, wide=True),
                compressor=None if shares else Compressor(config, weights, f"{name}.indexer"),
            )
        self.config = own
        self.layer = layer
        self.kind = AttentionKind(sinks=sinks, window=window)
        self.q_a_proj = weights.linear(f"{attn}.q_a_proj")
        self.q_a_norm = weights.norm(f"{attn}.q_a_norm", config.norm_eps)
        self.q_b_proj = weights.linear(f"{attn}.q_b_proj")
        self.q_b_norm = None if shares else BareNorm(eps=config.norm_eps)
        self.kv_proj = weights.linear(f"{attn}.kv_proj")
        self.kv_norm = weights.norm(f"{attn}.kv_norm", config.norm_eps)
        # Each takes the heads of a group x D to the rank.
        self.groups = [weights.linear(f"{attn}.o_a_proj.{group}") for group in range(own.n_groups)]
        self.o_b_proj = weights.linear(f"{attn}.o_b_proj")

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Attend, in the layer `index` within the stage: [T, E] in and out."""
        return self.attend(hidden, None, index, rotary, step)

    def attend(
        self, hidden: Tensor, shared: Tensor | None, index: int, rotary: Rotary, step: ForwardStep
    ) -> Tensor:
        """Attend to `shared` entries, [T, columns]: zeros but in rows that complete one.

        Where the layer makes them, these are written there.
        """
        config, n_rows = self.config, len(hidden)
        low_rank = self.q_a_norm(self.q_a_proj(hidden))
        queries = self.q_b_proj(low_rank).view(n_rows, -1, config.head_size)
        if self.q_b_norm is not None:
            queries = self.q_b_norm(queries)
        queries = rotate_last(queries, rotary, config.rope_size)
        keys = self.kv_norm(self.kv_proj(hidden))[:, None]
        keys = rotate_last(keys, rotary, config.rope_size)
        if self.kind.window is not None:
            nothing = keys.new_empty(n_rows, 1, 0)
            attended = attention(queries, keys, nothing, index, step, self.kind)
        else:
            waiting = self._waiting(hidden)
            if shared is not None and self.makers:
                shared.zero_()
            seen = [
                self._store(span, index, step, keys[:, 0], waiting, shared) for span in step.spans
            ]
            chosen = self._choose(hidden, low_rank, rotary, step, [rows for _, rows in seen])
            parts = []
            for span, (window, entries) in zip(step.spans, seen, strict=True):
                parts += self._attend(queries, span, window, entries, chosen, step)
            attended = torch.cat(parts)
        attended = attended.view(n_rows, -1, config.head_size)
        attended = _turn_back(attended, rotary, config.rope_size)
        grouped = attended.view(n_rows, config.n_groups, -1).transpose(0, 1).contiguous()
        parts = [group(rows) for group, rows in zip(self.groups, grouped, strict=True)]
        return self.o_b_proj(torch.cat(parts, -1))

    @property
    def makers(self) -> list[Compressor | SharedCompressor]:
        """What makes entries, in the order of their columns."""
        found = self.compressor, self.indexer.compressor if self.indexer else None
        return [maker for maker in found if maker is not None]

    def _waiting(self, hidden: Tensor) -> Tensor:
        """Return what entries are made of: [T, columns], none where there are no entries."""
        rows = [maker.project(hidden) for maker in self.makers]
        return torch.cat(rows, -1) if rows else hidden.new_empty(len(hidden), 0)

    def _store(
        self,
        span: Span,
        index: int,
        step: ForwardStep,
        keys: Tensor,
        waiting: Tensor,
        shared: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Put a span's rows into its slot: the rows of its windows, and the entries so far.

        The first of the window's rows is that before position `span.position` by the window.
        """
        state, n_rows = step.kv.state(span.slot, index), span.end - span.start
        before = state.keep_before(n_rows, span.n_drafts)
        window, pending = self._parts(before.recent)
        window = torch.cat((window, keys[span.start : span.end]))
        pending = torch.cat((pending, waiting[span.start : span.end]))
        self._write(state, window, pending, n_rows)
        state.count(n_rows, self._replay(window, pending) if state.kept else None)
        return window, self._entries(span, index, step, pending, shared)

    def _parts(self, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the window's rows [W, D] and those that wait, of a state."""
        config, flat = self.config, recent.view(-1)
        split = config.window * config.head_size
        n, width = config.pending(self.layer)
        window = flat[:split].view(config.window, config.head_size)
        return window, flat[split : split + n * width].view(n, width)

    def _write(self, state: SlotState, window: Tensor, pending: Tensor, n_rows: int) -> None:
        """Set a state to the rows behind the first `n_rows`."""
        own_window, own_pending = self._parts(state.recent)
        own_window.copy_(window[n_rows : n_rows + len(own_window)])
        own_pending.copy_(pending[n_rows : n_rows + len(own_pending)])

    def _replay(self, window: Tensor, pending: Tensor) -> Replay:
        def replay(source: SlotState, target: SlotState, n_rows: int) -> None:
            self._write(target, window, pending, n_rows)

        return replay

    def _entries(
        self, span: Span, index: int, step: ForwardStep, pending: Tensor, shared: Tensor | None
    ) -> Tensor:
        """Make and store the entries that the span's rows complete; return all: [N, columns].

        Or take them of `shared` ones.
        """
        rate, size = self.config.rates[self.layer], self.config.entry_size(self.layer)
        if not rate:
            return pending.new_empty(0, size)
        kv, end = step.kv, span.position + span.end - span.start
        first, last = span.position // rate, end // rate
        if last > first:
            completed = slice((first + 1) * rate - 1 - span.position + span.start, span.end, rate)
            if self.makers:
                known = pending[: len(pending) - end % rate]
                widths = [maker.width for maker in self.makers]
                parts = known.split(widths, -1)  # type: ignore[no-untyped-call]
                made = [
                    maker.entries(rows, first, last - first)
                    for maker, rows in zip(self.makers, parts, strict=True)
                ]
                new = torch.cat(made, -1)
                if shared is not None:
                    shared[completed] = new
            else:
                assert shared is not None
                new = shared[completed, :size]
            spread = new.new_zeros(last - first, rate * self.config.row_size(self.layer))
            spread[:, :size] = new
            (stored, _), begin = kv.own(span.slot, index)
            rows = kv.quantize(spread.view(1, (last - first) * rate, -1))
            stored[:, first * rate - begin : last * rate - begin] = rows
        every, width = kv.layer(span.slot, index)[0][0], self.config.row_size(self.layer)
        return kv.dequantize(every[: last * rate], width).reshape(last, rate * width)[:, :size]

    def _choose(
        self,
        hidden: Tensor,
        low_rank: Tensor,
        rotary: Rotary,
        step: ForwardStep,
        entries: Sequence[Tensor],
    ) -> Tensor | None:
        """Choose entries for all rows: int32 [T, n]; None where rows attend to all they see.

        Of shared entries what is chosen is that of the layers behind, too, with the blocks.
        """
        own, config = self.indexer, self.config.indexer
        shares = bool(self.config.sources)
        before = step.choices[-1] if shares and step.choices else None
        if own is None:
            return None if before is None else before[:, : config.n_chosen]
        queries = own.q_b_proj(low_rank).view(len(hidden), config.n_heads, config.head_size)
        queries = rotate_last(queries, rotary, self.config.rope_size)
        factor = (config.n_heads * config.head_size) ** -0.5
        weights = (own.weights_proj(hidden.float()) * factor).contiguous()
        rate, keys = self.config.rates[self.layer], self.config.head_size
        of_spans = [rows[:, keys:] for rows in entries]
        n_blocks, blocks = self.config.n_blocks, None
        if n_blocks and before is not None and self.config.has_blocks(self.layer):
            numbers = before[:, config.n_chosen :].contiguous()
            blocks = Blocks(numbers=numbers, size=self.config.block_size, are_new=False)
        elif shares and n_blocks:
            numbers = torch.full((len(hidden), n_blocks), -1, dtype=torch.int32)
            is_source = self.layer == self.config.blocks_from
            blocks = Blocks(numbers=numbers, size=self.config.block_size, are_new=is_source)
        chosen = choose_entries(
            queries, weights, config.n_chosen, rate, of_spans, step, blocks=blocks
        )
        if shares:
            both = None if chosen is None or blocks is None else (chosen, blocks.numbers)
            step.choices.append(chosen if both is None else torch.cat(both, 1))
        return chosen

    def _attend(
        self,
        queries: Tensor,
        span: Span,
        window: Tensor,
        entries: Tensor,
        chosen: Tensor | None,
        step: ForwardStep,
    ) -> list[Tensor]:
        """Attend the rows of a span, some at a time: [rows, H x D] each."""
        config, rate = self.config, self.config.rates[self.layer]
        n_seen = (span.position + span.end - span.start) // rate if rate else 0
        if chosen is not None:
            n_seen = min(n_seen, chosen.shape[1])
        keys, parts = entries[:, : config.head_size], []
        for start in range(span.start, span.end, CHOSEN_ROWS):
            end = min(span.end, start + CHOSEN_ROWS)
            together = queries.new_empty(end - start, config.window + n_seen, config.head_size)
            counts = []
            for place, row in zip(together, range(start, end), strict=True):
                at = row - span.start
                n = min(span.position + at, config.window - 1) + 1
                place[:n] = window[at + config.window + 1 - n : at + config.window + 1]
                n_entries = (span.position + at + 1) // rate if rate else 0
                if chosen is None or n_entries <= n_seen:
                    place[n : n + n_entries] = keys[:n_entries]
                else:
                    taken = chosen[row, :n_seen]
                    if config.n_blocks:  # which may have fewer
                        taken = taken[taken >= 0]
                    n_entries = len(taken)
                    torch.index_select(keys, 0, taken, out=place[n : n + n_entries])
                counts.append(n + n_entries)
            parts.append(self._attend_rows(queries[start:end], together, counts, step))
        return parts

    def _attend_rows(
        self, queries: Tensor, together: Tensor, counts: Sequence[int], step: ForwardStep
    ) -> Tensor:
        native = native_attend_rows(queries, together, counts, step.kv, self.kind)
        if native is not None:
            return native
        attended = []
        for query, seen, n in zip(queries, together, counts, strict=True):
            rows = seen[None, None, :n]
            attended.append(attend_row(query[None, None], rows, rows, self.kind))
        return torch.cat(attended).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSublayer:
    """Compressed attention with its norm and residual, and the shared entries of rows.

    These are the last columns.
    """

    residual: Residual
    self_attn: CompressedAttention

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run rows [T, N x E and more] through it in layer `index` within the stage: the same."""
        n_carried = self.self_attn.config.n_carried
        shared = hidden[:, -n_carried:].clone()
        attended = self.residual.around(
            hidden, lambda normed: self.self_attn.attend(normed, shared, index, rotary, step)
        )
        return torch.cat((attended[:, :-n_carried], shared), 1)
