"""DFlash (arXiv 2602.06036): a block of tokens in one pass of few layers, none waiting for another.

Knows the maths of the published module (github.com/z-lab/dflash, model.py). Must not know files.

The states of certain positions are fused, normed, and projected to keys and values of every layer.
The block begins with the token behind them; masks stand behind it, each of which becomes a draft.
All see each other, but in layers with a window, where a row sees those before it (SpecForge, vLLM
and SGLang; the published module leaves that to the kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardnet.model.drafters.state_drafter import StateDrafter, chunks
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import store_rows
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.norms import HeadNorm, Norm
from shardnet.types import SlotId


@dataclass(eq=False, kw_only=True)
class DFlashDrafter(StateDrafter):
    """A drafter of blocks. Of a block all is computed, however few drafts are wanted.

    `mask_id` is the token that stands for a draft. What `fused_norm` gives becomes keys and values
    of all its own layers by `project`, in their order; `key_norm` is of all these keys.
    """

    embed: Callable[[Tensor], Tensor]
    own_layers: Sequence[Layer]
    fused_norm: Norm
    project: Linear
    key_norm: HeadNorm
    mask_id: int

    def _draft(
        self, slot: SlotId, ids: Sequence[int], place: int, states: Tensor, limit: int
    ) -> list[int]:
        """See StateDrafter."""
        for rows in chunks(len(ids)):
            self._read(slot, ids[rows], place + rows.start, states[rows])
        if limit == 0:
            return []
        block = [ids[-1], *[self.mask_id] * self.most]
        rotary, step = self._step(slot, block, place + len(ids), see_each_other=True)
        hidden = self.embed(step.token_ids)
        for index, layer in enumerate(self.own_layers):
            hidden = layer(hidden, index, rotary, step)
        return self._likeliest(hidden[1 : limit + 1])

    def _read(self, slot: SlotId, ids: Sequence[int], place: int, states: Tensor) -> None:
        """Store keys and values of states [T, layers x E] in every layer."""
        rotary, step = self._step(slot, ids, place)
        n_rows, n_layers, size = len(ids), len(self.own_layers), self.key_norm.weight.shape[-1]
        projected = self.project(self.fused_norm(self.fuse(states)))
        heads = projected.view(n_rows, n_layers, 2, -1, size)  # [T, layers, 2, KV heads, D]
        keys = rotary.rotate(self.key_norm(heads[:, :, 0].reshape(n_rows, -1, size)))
        for index, own in enumerate(keys.chunk(n_layers, 1)):
            store_rows(own, heads[:, index, 1], index, step)
