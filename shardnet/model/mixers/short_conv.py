"""A gated convolution over a few positions, in place of attention (LFM2).

Knows what is kept of a slot: the last inputs of the convolution. Must not know parameter names,
files, wire or scheduling.

Every column of every position is a few products and sums in one order, so that a position's bits
depend on nothing but the positions before it (design decision 4).

Axes in shape comments: T rows of the micro-batch, B rows of the convolution before them, E hidden
size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.cache.slot_blocks import Replay, SlotState
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.rotary import Rotary


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
