"""Which positions rows attend to, where a small indexer chooses them (arXiv 2512.02556).

Knows transformers' parameter names, and that the index's keys stand in slots in the place of
values, or behind them. Must not know files, wire or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.cache.kv_cache import Pool
from shardnet.model.config.model_config import N_DIGITS, Indexer, ModelConfig
from shardnet.model.layers.attention import Choose, ForwardStep
from shardnet.model.layers.native_attention import Blocks, Entries, native_choose
from shardnet.model.layers.norms import HeadNorm, row_softmax
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource


class PositionIndexer:
    """What chooses the positions that rows attend to, or takes an earlier layer's choice.

    Axes: I heads, D columns of each. Without `projections` the choice is that of the layer before.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        """Take the parameters of the absolute `layer`."""
        own, latent = config.indexer, config.latent
        assert own is not None
        assert latent is not None
        has_own = layer in own.layers
        name = f"model.layers.{layer}.self_attn.indexer"
        self.config = own
        self.rope_size = latent.rope_size
        self.projections = IndexProjections(own, weights, name) if has_own else None

    def __call__(self, hidden: Tensor, low_rank: Tensor, rotary: Rotary) -> tuple[Tensor, Choose]:
        """Return the rows' keys [T, 1, D or 0] to be stored, and what chooses among positions."""
        own, config = self.projections, self.config
        if own is None:
            return hidden.new_empty(len(hidden), 1, 0), choose_again
        queries = own.wq_b(low_rank).view(len(hidden), config.n_heads, config.head_size)
        heads = torch.cat((queries, own.k_norm(own.wk(hidden))[:, None]), 1)  # [T, I + 1, D]
        turned = self._rotate(heads, rotary) if self.rope_size else heads
        factor = (config.n_heads * config.head_size) ** -0.5
        weights = (own.weights_proj(hidden.float()) * factor).contiguous()  # [T, I]
        queries, keys, pool = turned[:, :-1], turned[:, -1:], own.pool
        if pool is None:
            return keys, partial(choose, queries, weights, config.n_chosen)
        n_entries = config.n_chosen // pool.n_pooled
        chooser = partial(choose_pooled, queries, weights, n_entries, pool.n_pooled, pool)
        return torch.cat((keys, pool.scores(hidden)[:, None]), -1), chooser

    def _rotate(self, heads: Tensor, rotary: Rotary) -> Tensor:
        config = self.config
        turning = heads[..., -self.rope_size :] if config.rotates_last else heads
        turned = rotary.rotate_pairs(turning) if config.interleaved else rotary.rotate(turning)
        if config.rotates_last:
            turned = torch.cat((heads[..., : -self.rope_size], turned), -1)
        return turned


class EntryPool:
    """What makes one key of those of `n_pooled` positions (GLM-5.3), column by column.

    Each column of a key counts by the softmax, over the positions, of its score, of which `places`
    has a part for each place in an entry.
    """

    def __init__(self, n_pooled: int, weights: WeightSource, name: str) -> None:
        """Take the parameters of the indexer `name`."""
        self.n_pooled = n_pooled
        self.scores = weights.linear(f"{name}.pool_gate", precise=True)
        self.places = weights.parameter(f"{name}.index_kpool_compress_ape")  # [P, D], float32

    def __call__(self, stored: Tensor) -> Tensor:
        """Make entries [n, D] of keys and scores [n x P, 2 x D], one position after the other."""
        n_entries, size = len(stored) // self.n_pooled, self.places.shape[1]
        wide = stored.float().view(n_entries, self.n_pooled, 2, size)
        keys, scores = wide.unbind(2)  # [n, P, D] each
        logits = (scores + self.places).transpose(1, 2).reshape(-1, self.n_pooled)
        shares = row_softmax(logits).view(n_entries, size, self.n_pooled)
        entries = keys[:, 0] * shares[..., 0]
        for place in range(1, self.n_pooled):
            entries = entries + keys[:, place] * shares[..., place]
        return entries.to(stored.dtype)


class IndexProjections:
    """The parameters of an indexer: queries of low rank, a key, and the weights of its heads.

    With a `pool` entries of several positions are chosen.
    """

    def __init__(self, config: Indexer, weights: WeightSource, name: str) -> None:
        """Take the parameters of the indexer `name`."""
        self.wq_b = weights.linear(f"{name}.wq_b")
        self.wk = weights.linear(f"{name}.wk")
        self.k_norm = weights.norm(f"{name}.k_norm", config.norm_eps)
        self.weights_proj = weights.linear(f"{name}.weights_proj", precise=True, wide=True)
        self.pool = EntryPool(config.n_pooled, weights, name) if config.n_pooled > 1 else None


class BlockIndexer:
    """What chooses entries of several positions each, by the mean of their keys (Qwen 3.8).

    Axes: I heads, D columns of each, C of what is stored beside the values of a position: its key,
    neither normed nor rotated, and the digits of what it is to be rotated by.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int) -> None:
        """Take the parameters of the absolute `layer`."""
        own, name = config.indexer, f"model.layers.{layer}.self_attn.indexer"
        assert own is not None
        q_norm, k_norm = (
            weights.norm(f"{name}.{kind}_layernorm", own.norm_eps, config.norm_offset)
            for kind in "qk"
        )
        self.config = own
        self.n_kv_heads = config.n_kv_heads
        self.qk_proj = weights.linear(f"{name}.index_qk_proj")
        self.q_norm = HeadNorm(weight=q_norm.weight.repeat(own.n_heads, 1), eps=own.norm_eps)
        self.k_norm = k_norm

    def __call__(self, hidden: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Choose]:
        """Return what is stored beside the rows' values [T, KV heads, C], and what chooses.

        `positions` are what they are rotated by, [T], or [axes, T].
        """
        own, n_rows = self.config, len(hidden)
        heads = self.qk_proj(hidden).view(n_rows, own.n_heads + 1, own.head_size)
        queries = rotary.rotate(self.q_norm(heads[:, :-1]))
        axes = positions.expand(own.n_axes, -1)
        digits = [to_digits(axis, hidden) for axis in axes]
        beside = torch.cat((heads[:, -1], *digits), -1)
        n_columns = self.n_kv_heads * own.beside_values(self.n_kv_heads)
        beside = F.pad(beside, (0, n_columns - beside.shape[1])).view(n_rows, self.n_kv_heads, -1)
        weights = queries.new_full(queries.shape[:2], own.head_size**-0.5, dtype=torch.float32)
        assert rotary.every is not None
        n_entries, pool = own.n_chosen // own.n_pooled, partial(self.pool, rotary.every)
        return beside, partial(choose_pooled, queries, weights, n_entries, own.n_pooled, pool)

    def pool(self, rotary: Rotary, stored: Tensor) -> Tensor:
        """Make entries [n, D] of values [n x positions, W]: see KvCache.entries."""
        own, n = self.config, len(stored) // self.config.n_pooled
        if not n:
            return stored.new_empty(0, own.head_size)
        n_beside = own.beside_values(self.n_kv_heads)
        beside = stored.view(len(stored), self.n_kv_heads, -1)[..., -n_beside:].flatten(1)
        beside = beside.view(n, own.n_pooled, -1)
        total = beside[:, 0, : own.head_size].float()
        for position in range(1, own.n_pooled):
            total = total + beside[:, position, : own.head_size]
        keys = self.k_norm((total / own.n_pooled).to(stored.dtype))
        places = beside[:, 0, own.head_size :][:, : N_DIGITS * own.n_axes]  # where each begins
        begins = torch.stack([from_digits(axis) for axis in torch.split(places, N_DIGITS, 1)])
        return rotary.at(begins if own.n_axes > 1 else begins[0]).rotate(keys[:, None])[:, 0]


def to_digits(numbers: Tensor, like: Tensor) -> Tensor:
    """Write numbers [T], int64, as digits [T, N_DIGITS] in the dtype of `like`."""
    return torch.stack([numbers >> 8 * n & 255 for n in range(N_DIGITS)], 1).to(like.dtype)


def from_digits(digits: Tensor) -> Tensor:
    """Read what to_digits has written: int64 [T]."""
    ones, *more = digits.long().unbind(1)
    for n, each in enumerate(more, start=1):
        ones = ones + (each << 8 * n)
    return ones


def choose(
    queries: Tensor, weights: Tensor, n_chosen: int, layer: int, step: ForwardStep
) -> Tensor | None:
    """Choose positions by the keys that the slots have as values: None where rows see no more."""
    chosen = None
    if any(span.position + span.end - span.start > n_chosen for span in step.spans):
        if step.native_spans is not None:
            chosen = native_choose(queries, weights, n_chosen, layer, step.native_spans, step.kv)
        if chosen is None:
            size = queries.shape[-1]
            stored = [step.kv.layer(span.slot, layer)[1][0] for span in step.spans]
            keys = [step.kv.dequantize(rows, size) for rows in stored]
            chosen = _chosen_in_torch(queries, weights, n_chosen, 1, keys, step)
    step.choices.append(chosen)
    return chosen


def choose_pooled(
    queries: Tensor,
    weights: Tensor,
    n_entries: int,
    n_pooled: int,
    pool: Pool,
    layer: int,
    step: ForwardStep,
) -> Tensor | None:
    """Choose `n_entries` entries of `n_pooled` positions each, and take the unfinished one too.

    A row sees the entries of which it sees all positions. Those that are new come of `pool`.
    """
    width = (n_entries + 1) * n_pooled - 1
    chosen = None
    entries = []
    for span in step.spans:
        n = (span.position + span.end - span.start) // n_pooled
        entries.append(step.kv.entries(span.slot, layer, n, n_pooled, pool))
    of_rows = choose_entries(queries, weights, n_entries, n_pooled, entries, step)
    if of_rows is not None:
        chosen = _positions_of(of_rows, step.positions.to(torch.int32), n_pooled, width)
    step.choices.append(chosen)
    return chosen


def choose_entries(
    queries: Tensor,
    weights: Tensor,
    n_chosen: int,
    n_pooled: int,
    entries: Sequence[Tensor],
    step: ForwardStep,
    *,
    blocks: Blocks | None = None,
) -> Tensor | None:
    """Choose among the entries of each span, keys [N, D], of which a row sees all positions.

    int32 [T, n_chosen], ascending, -1 behind the last; None where rows see no more. With `blocks`
    they are those of the rows' blocks, or these are chosen too.
    """
    if max(map(len, entries)) <= n_chosen:
        return None
    if step.native_spans is not None:
        given = (queries, weights, n_chosen, 0, step.native_spans, step.kv)
        own = Entries(keys=entries, n_pooled=n_pooled, blocks=blocks)
        native = native_choose(*given, entries=own)
        if native is not None:
            return native
    return _chosen_in_torch(queries, weights, n_chosen, n_pooled, entries, step, blocks)


def _positions_of(entries: Tensor, positions: Tensor, n_pooled: int, width: int) -> Tensor:
    """Return the positions of chosen entries [T, n], and those behind the last whole one.

    int32 [T, width]; of rows that see no more entries than are chosen all positions.
    """
    within = torch.arange(n_pooled, dtype=torch.int32, device=entries.device)
    chosen = (entries[..., None] * n_pooled + within).flatten(1)
    n_seen = positions[:, None] + 1
    tail = n_seen // n_pooled * n_pooled + within[:-1]
    tail = torch.where(tail < n_seen, tail, -1)
    every = torch.arange(width, dtype=torch.int32, device=entries.device)
    every = torch.where(every < n_seen, every, -1)
    sees_more = n_seen // n_pooled > entries.shape[1]
    return torch.where(sees_more, torch.cat((chosen, tail), 1), every)


def _chosen_in_torch(
    queries: Tensor,
    weights: Tensor,
    n_chosen: int,
    n_pooled: int,
    entries: Sequence[Tensor],
    step: ForwardStep,
    blocks: Blocks | None = None,
) -> Tensor:
    """Do what native_choose does: keys [N, D] of each span, of `n_pooled` positions each."""
    chosen = queries.new_full((len(queries), n_chosen), -1, dtype=torch.int32)
    for span, keys in zip(step.spans, (own.float() for own in entries), strict=True):
        for row in range(span.start, span.end):
            n_seen = (span.position + row - span.start + 1) // n_pooled
            above = (keys[:n_seen] @ queries[row].float().T).relu_()  # [P, I]
            scores = above @ weights[row]
            if blocks is not None:
                scores = _in_blocks(scores, blocks, blocks.numbers[row], n_chosen)
            best = _best(scores, n_chosen)
            chosen[row, : len(best)] = best
    return chosen


def _best(scores: Tensor, n: int) -> Tensor:
    """Return the numbers of the `n` highest scores [P] that are above -inf, ascending."""
    best = scores.sort(descending=True, stable=True).indices[:n].sort().values
    return best[scores[best] > -torch.inf]


def _in_blocks(scores: Tensor, blocks: Blocks, own: Tensor, n_chosen: int) -> Tensor:
    """Leave out scores [P] beyond a row's `own` blocks [N], or write down which these are."""
    of_blocks = torch.arange(len(scores)) // blocks.size
    if not blocks.are_new:
        is_free = len(scores) <= n_chosen or own[0] < 0
        return scores if is_free else scores.masked_fill(~torch.isin(of_blocks, own), -torch.inf)
    n = int(of_blocks[-1]) + 1 if len(scores) else 0
    if n > len(own):
        padded = F.pad(scores, (0, n * blocks.size - len(scores)), value=-torch.inf)
        best = padded.view(n, blocks.size).amax(1)
        best[-1] = torch.inf
        own.copy_(_best(best, len(own)))
    return scores


def choose_again(layer: int, step: ForwardStep) -> Tensor | None:
    """Take what the last layer before has chosen that chooses: nothing in a trial of one layer."""
    return step.choices[-1] if step.choices else None
