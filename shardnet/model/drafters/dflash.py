"""DFlash (arXiv 2602.06036): a block of tokens in one pass of few layers, none waiting for another.

Knows the maths of the published module (github.com/z-lab/dflash, model.py). Must not know files.

The states of certain positions are fused, normed, and projected to keys and values by every layer
as they are. The block begins with the token behind them; masks stand behind it, each of which
becomes a draft. All see each other, but in layers with a window, where a row sees those before it
(SpecForge, vLLM and SGLang; the published module leaves it to the kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from shardnet.model.drafters.state_drafter import DrafterSlots
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep, attention, store_rows
from shardnet.model.layers.decoder_layer import Sublayer
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.layers.norms import HeadNorm, Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.types import PREFILL_CHUNK_ROWS, SlotId


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """A step over rows, and the rotary tables of their positions."""

    step: ForwardStep
    rotary: Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayer:
    """A decoder layer whose keys and values are of fused states too.

    Norms are over each head. `mlp` has its norm and residual.
    """

    head_size: int
    kind: AttentionKind
    input_norm: Norm
    q_proj: Linear
    kv_proj: Linear
    o_proj: Linear
    query_norm: HeadNorm
    key_norm: HeadNorm
    mlp: Sublayer

    def read(self, fused: Tensor, index: int, rows: Rows) -> None:
        """Store keys and values of fused states [T, E] in layer `index`."""
        keys, values = self._heads(self.kv_proj(fused))
        store_rows(rows.rotary.rotate(self.key_norm(keys)), values, index, rows.step)

    def __call__(
        self, hidden: Tensor, fused: Tensor, index: int, block: Rows, rows: Rows
    ) -> Tensor:
        """Run a block [B, E] through layer `index`, and read the fused states [T, E] before it."""
        normed, n_fused = self.input_norm(hidden), len(fused)
        queries = self.q_proj(normed).view(len(hidden), -1, self.head_size)
        queries = block.rotary.rotate(self.query_norm(queries))
        keys, values = self._heads(self.kv_proj(torch.cat((fused, normed))))
        keys = self.key_norm(keys)
        read = rows.rotary.rotate(keys[:n_fused])
        store_rows(read, values[:n_fused], index, rows.step)
        own = block.rotary.rotate(keys[n_fused:])
        inner = attention(queries, own, values[n_fused:], index, block.step, self.kind)
        return self.mlp(hidden + self.o_proj(inner), index, block.rotary, block.step)

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Split into keys and values [T, KV heads, D]."""
        keys, values = projected.view(len(projected), -1, self.head_size).chunk(2, 1)
        return keys, values


@dataclass(eq=False, kw_only=True)
class DFlashDrafter:
    """A drafter of blocks; see StateDrafter.

    `fuse` and `fused_norm` make of states what its layers read, `norm` is before the LM head.
    `mask_id` is the token that stands for a draft before it is made, and `known` are the ids of the
    tokens that the LM head knows, int64, None for all.
    """

    layers: tuple[int, ...]
    slots: DrafterSlots
    embed: Callable[[Tensor], Tensor]
    fuse: Linear
    fused_norm: Norm
    blocks: Sequence[BlockLayer]
    norm: Norm
    lm_head: Linear
    known: Tensor | None
    mask_id: int
    most: int

    @property
    def context(self) -> int:
        """See StateDrafter."""
        return self.slots.context

    def free(self, slot: SlotId) -> None:
        """See StateDrafter."""
        self.slots.free(slot)

    @torch.inference_mode()
    def draft(
        self,
        slot: SlotId,
        token_ids: Sequence[int],
        position: int,
        states: Tensor,
        limit: int,
    ) -> list[int]:
        """See StateDrafter. The whole block is computed, however few drafts of it are wanted."""
        skipped = max(0, len(token_ids) - self.context)
        ids, states = token_ids[skipped:], states[skipped:]
        place = self.slots.begin(slot, position + skipped, len(ids))
        states = states.to(self.slots.kv.device, self.slots.kv.dtype)
        fused = self.fused_norm(self.fuse(states))
        last = (len(ids) - 1) // PREFILL_CHUNK_ROWS * PREFILL_CHUNK_ROWS if limit else len(ids)
        for start in range(0, last, PREFILL_CHUNK_ROWS):
            some = slice(start, min(last, start + PREFILL_CHUNK_ROWS))
            rows = self._rows(slot, place + start, ids[some])
            for index, layer in enumerate(self.blocks):
                layer.read(fused[some], index, rows)
        if not limit:
            return []
        rows = self._rows(slot, place + last, ids[last:])
        masked = [ids[-1], *[self.mask_id] * self.most]
        block = self._rows(slot, place + len(ids), masked, see_each_other=True)
        hidden = self.embed(block.step.token_ids)
        for index, layer in enumerate(self.blocks):
            hidden = layer(hidden, fused[last:], index, block, rows)
        best = self.lm_head(self.norm(hidden[1 : limit + 1])).argmax(-1)
        drafts: list[int] = (best if self.known is None else self.known[best]).tolist()
        return drafts

    def _rows(
        self, slot: SlotId, place: int, ids: Sequence[int], *, see_each_other: bool = False
    ) -> Rows:
        step = self.slots.step(slot, place, ids, see_each_other=see_each_other)
        return Rows(step=step, rotary=self.slots.rotary.at(step.positions))
