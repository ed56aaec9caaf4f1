"""Gated DeltaNet (arXiv 2412.06464): linear attention whose memory is one matrix for each head.

KDA (arXiv 2510.26692) is the same with a decay for each column of a key.

Knows the recurrence and its sizes. Must not know parameter names beyond those of transformers, nor
files, wire or scheduling.

Each position decays a head's matrix, reads what it holds for the key, and writes the difference to
the value. Positions are computed one after the other, by the compiled library or each by the same
operators of torch on tensors of the same shape, so that a position's bits depend on nothing but the
positions before it: chunks of a prompt may be cut anywhere (design decision 4).

Axes in shape comments: T rows of the micro-batch, B rows of the convolution before them, C its
columns, H value heads, K columns of a key, V of a value, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.cache.slot_blocks import Replay, SlotState
from shardnet.model.config.model_config import Activation, DeltaNet
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.recurrence import NativeRecurrence, RecurrenceParameters
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.norms import HeadNorm, activate
from shardnet.model.layers.rotary import Rotary

UNIT_EPS = 1e-6
"""Added to the squared length of a query or key before it is divided by the length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """A micro-batch before the convolution. All columns belong to heads in their order."""

    mixed: Tensor  # [T, C]: queries, keys, values
    gate: Tensor  # [T, H x V], of the output
    write: Tensor  # [T, H], how much of the difference is written, before the sigmoid
    decay: Tensor  # [T, H], before bias and softplus; of a KDA [T, H x K]


Project = Callable[[Tensor], Projected]
"""Projects hidden states [T, E]: families differ in the order of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """Two linears: queries, keys, values and gate; write and decay.

    With `groups_qkvz` the columns of the first are grouped by key head, with `groups_ba` those of
    the second (Qwen3-Next); else each kind stands for all heads in turn (Qwen 3.5, Ling 3).
    """

    config: DeltaNet
    qkvz_proj: Linear
    ba_proj: Linear
    groups_qkvz: bool = False
    groups_ba: bool = False

    def __call__(self, hidden: Tensor) -> Projected:
        """Project hidden states [T, E]."""
        own, columns, small = self.config, self.qkvz_proj(hidden), self.ba_proj(hidden)
        if self.groups_qkvz:
            values = own.value_width // own.n_key_heads
            columns = self._by_kind(columns, [own.key_size, own.key_size, values, values])
        if self.groups_ba:
            small = self._by_kind(small, [own.n_value_heads // own.n_key_heads] * 2)
        write, decay = small.tensor_split([self.config.n_value_heads], -1)
        width = own.mixed_width
        return Projected(
            mixed=columns[:, :width], gate=columns[:, width:], write=write, decay=decay
        )

    def _by_kind(self, columns: Tensor, widths: list[int]) -> Tensor:
        """Put columns that are grouped by key head kind by kind; `widths` are those of a group."""
        n_rows = columns.shape[0]
        parts = torch.split(columns.view(n_rows, self.config.n_key_heads, -1), widths, -1)
        return torch.cat([part.flatten(1) for part in parts], -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankProjections:
    """Queries, keys and values by one linear, gates and decays by two of a low rank each (KDA).

    The first linear gives the rank of the gates too, `small_proj` writes and the rank of decays.
    """

    config: DeltaNet
    qkv_proj: Linear
    gate_proj: Linear
    small_proj: Linear
    decay_proj: Linear

    def __call__(self, hidden: Tensor) -> Projected:
        """Project hidden states [T, E]."""
        columns, small = self.qkv_proj(hidden), self.small_proj(hidden)
        width, n_heads = self.config.mixed_width, self.config.n_value_heads
        return Projected(
            mixed=columns[:, :width],
            gate=self.gate_proj(columns[:, width:].contiguous()),
            write=small[:, :n_heads],
            decay=self.decay_proj(small[:, n_heads:].contiguous()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaProjection:
    """One linear for gate, values, keys, queries and steps, as Mamba-2 has them."""

    config: DeltaNet
    in_proj: Linear

    def __call__(self, hidden: Tensor) -> Projected:
        """Project hidden states [T, E]."""
        own = self.config
        widths = [own.value_width, own.value_width, own.key_width, own.key_width, own.n_value_heads]
        gate, values, keys, queries, steps = torch.split(self.in_proj(hidden), widths, -1)
        mixed = torch.cat((queries, keys, values), -1)
        return Projected(mixed=mixed, gate=gate, write=steps, decay=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """The sub-layer that takes the place of attention. Its memory is a slot's SlotState.

    A `group_norm` normalizes outputs [T, groups, columns] behind their gates (Mamba-2).
    """

    config: DeltaNet
    activation: Activation
    project: Project
    parameters: RecurrenceParameters
    out_proj: Linear
    native: NativeRecurrence | None
    """The recurrence by the library, None where torch computes it."""
    group_norm: HeadNorm | None = None

    @classmethod
    def of(
        cls,
        config: DeltaNet,
        activation: Activation,
        project: Project,
        parameters: RecurrenceParameters,
        out_proj: Linear,
        group_norm: HeadNorm | None = None,
    ) -> GatedDeltaNet:
        """Put it together, with the library's recurrence if it can compute this one here."""
        kernels = native_kernels() if parameters.taps.device.type == "cpu" else None
        native = None
        if kernels is not None and activation is Activation.SILU:
            native = NativeRecurrence(config, parameters, kernels)
        return cls(
            config=config,
            activation=activation,
            project=project,
            parameters=parameters,
            out_proj=out_proj,
            native=native,
            group_norm=group_norm,
        )

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through layer `index` within the stage: [T, E]."""
        projected = self.project(hidden)
        write, decay = projected.write.float(), projected.decay.float()
        compute = self.native or self._compute
        parts = []
        for span in step.spans:
            state, own = step.kv.state(span.slot, index), slice(span.start, span.end)
            n_rows = span.end - span.start
            before = state.keep_before(n_rows, span.n_drafts)
            rows = torch.cat((before.recent, projected.mixed[own]))  # [B + T, C]
            inputs = rows, projected.gate[own], write[own], decay[own]
            parts.append(compute(*inputs, before.recurrent, state.recurrent))
            state.recent.copy_(rows[n_rows:])
            kept = (rows, write[own].clone(), decay[own].clone()) if state.kept else None
            state.count(n_rows, None if kept is None else self.replay(*kept))
        outputs = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.group_norm is not None:
            n_groups = self.group_norm.weight.shape[0]
            outputs = self.group_norm(outputs.view(len(outputs), n_groups, -1)).flatten(1)
        return self.out_proj(outputs)

    def replay(self, rows: Tensor, write: Tensor, decay: Tensor) -> Replay:
        """Return what computes a state over rows [B + T, C] again."""
        compute = self.native or self._compute

        def replay(source: SlotState, target: SlotState, n_rows: int) -> None:
            n_before = len(target.recent)
            gate = rows.new_zeros(n_rows, self.config.value_width)  # of outputs: nobody asks
            own = rows[: n_before + n_rows], gate, write[:n_rows], decay[:n_rows]
            compute(*own, source.recurrent, target.recurrent)
            target.recent.copy_(rows[n_rows : n_before + n_rows])

        return replay

    def _compute(
        self,
        rows: Tensor,
        gate: Tensor,
        write: Tensor,
        decay: Tensor,
        before: Tensor,
        state: Tensor,
    ) -> Tensor:
        """Do in torch what NativeRecurrence does."""
        if before is not state:
            state.copy_(before)
        own = self.parameters
        opened = _by_row(torch.sigmoid, write) * own.write_scale
        steps = decay + own.decay_bias
        rates = own.decay_rate.repeat_interleave(steps.shape[1] // len(own.decay_rate))
        if own.decay_floor < 0:
            exponents = _by_row(torch.sigmoid, -steps * rates) * own.decay_floor
        else:
            steps = _by_row(F.softplus, steps)
            exponents = steps * rates
        kept = _by_row(torch.exp, exponents)  # [T, H], or [T, H x K]
        written = opened if own.skip is None else steps
        outputs = self._recur(self._convolve(rows), kept, written, state)  # [T, H, V]
        if own.norm_weight is not None:
            outputs = F.rms_norm(outputs, outputs.shape[-1:], None, own.norm_eps)
            outputs.mul_(own.norm_weight)
        weighted = outputs.flatten(1)
        opened_by = torch.sigmoid if own.gates_alone else partial(activate, self.activation)
        gates = _by_row(opened_by, gate.float())
        return weighted.mul_(gates).to(gate.dtype)

    def _convolve(self, rows: Tensor) -> Tensor:
        """Convolve rows [B + T, C]: float32 [T, C]."""
        taps = self.parameters.taps
        n_rows = len(rows) - len(taps) + 1
        wide = rows.float()
        total = wide[:n_rows] * taps[0]
        for tap in range(1, len(taps)):
            total += wide[tap : tap + n_rows] * taps[tap]
        if self.parameters.taps_bias is not None:
            total += self.parameters.taps_bias
        return _by_row(lambda row: activate(self.activation, row), total)

    def _recur(self, mixed: Tensor, decay: Tensor, write: Tensor, matrix: Tensor) -> Tensor:
        """Run rows [T, C] through the recurrence, in order: [T, H, V].

        `decay` is [T, H], or [T, H x K], and `write` [T, H]. Updates the `matrix` [H, K, V] of each
        head.
        """
        own, skip = self.config, self.parameters.skip
        shared = own.n_value_heads // own.n_key_heads
        widths = [own.key_width, own.key_width, own.value_width]
        queries, keys, values = torch.split(mixed, widths, -1)
        queries, keys = (
            heads.reshape(-1, own.n_key_heads, own.key_size) for heads in (queries, keys)
        )
        if skip is None:
            queries, keys = _unit(queries) * own.key_size**-0.5, _unit(keys)
        spread = torch.arange(own.n_value_heads, device=mixed.device)
        spread = spread % own.n_key_heads if own.takes_turns else spread // shared
        queries, keys = queries[:, spread], keys[:, spread]  # [T, H, K]
        values = values.reshape(-1, own.n_value_heads, 1, own.value_size)
        outputs = torch.empty_like(values)  # [T, H, 1, V]
        for row in range(len(mixed)):
            matrix.mul_(decay[row].view(own.n_value_heads, -1, 1))
            written = values[row]  # [H, 1, V]
            if skip is None:
                written = written - torch.bmm(keys[row, :, None], matrix)
            matrix.baddbmm_(keys[row, :, :, None], written * write[row, :, None, None])
            torch.bmm(queries[row, :, None], matrix, out=outputs[row])
            if skip is not None:
                outputs[row].addcmul_(values[row], skip[:, None, None])
        return outputs.squeeze(2)


def _unit(heads: Tensor) -> Tensor:
    """Divide each vector of [T, heads, K] by its length."""
    size = heads.shape[-1]
    return F.rms_norm(heads, (size,), None, UNIT_EPS / size).mul_(size**-0.5)


def _by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply an elementwise function to each row by itself: [T, N] in and out.

    torch computes the last elements of contiguous memory by another formula than the rest, so that
    over all rows at once an element's bits would depend on the other rows.
    """
    return torch.stack([function(row) for row in rows.unbind(0)])
