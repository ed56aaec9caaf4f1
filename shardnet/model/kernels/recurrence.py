"""The recurrence of a gated DeltaNet or of Mamba-2 by the compiled library.

Knows the struct of csrc/recurrence.c and checks every address in it. Must not know slots, parameter
names or linear layers.

Axes in shape comments: T rows of one sequence, B rows of the convolution before them, C its columns
(queries, keys, values), H value heads, K columns of a key, V of a value.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from shardnet.model.config.model_config import DeltaNet
from shardnet.model.kernels.library import (
    SCRATCH,
    NativeKernels,
    Team,
    check_memory,
    check_rows,
    fields,
    is_bf16,
)


class RecurrenceStruct(ctypes.Structure):
    """`struct recurrence` of csrc/recurrence.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows", "gate", "write", "decay", "taps", "rate", "bias"),
        *fields(ctypes.c_void_p, "weight", "taps_bias", "skip", "state", "mixed", "out"),
        ("team", Team),
        *fields(ctypes.c_int64, "n_rows", "n_taps", "n_key_heads", "n_heads", "key_size"),
        ("value_size", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *fields(ctypes.c_int32, "is_bf16", "takes_turns"),
        ("write_scale", ctypes.c_float),
        *fields(ctypes.c_int32, "gates_alone", "by_column"),
        ("decay_floor", ctypes.c_float),
        ("before", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceParameters:
    """What the recurrence of a layer was trained with, all in float32.

    With a `skip` it is that of Mamba-2. Outputs are not normed without a `norm_weight`. How much is
    written is the sigmoid times `write_scale`. With `gates_alone` outputs are multiplied by the
    sigmoids of their gates, else by the gates too. Where each column of a key decays by itself D is
    H x K, else H; with a `decay_floor` below 0 the logarithms of its decays are that times the
    sigmoid of minus the rate times what the decay is computed from, else the rate times the
    softplus of that.
    """

    taps: Tensor  # [taps, C]: the oldest position first
    decay_rate: Tensor  # [H], negative
    decay_bias: Tensor  # [D]
    norm_weight: Tensor | None  # [V]
    norm_eps: float
    taps_bias: Tensor | None = None  # [C]
    skip: Tensor | None = None  # [H]
    write_scale: float = 1.0
    gates_alone: bool = False
    decay_floor: float = 0.0


def mixed_bytes(config: DeltaNet) -> int:
    """Return the scratch memory that a row needs: `mixed` of the struct."""
    n_heads = config.n_value_heads
    n_kept = n_heads * config.key_size if config.has_key_decays else 0
    return 4 * (config.mixed_width + 2 * n_heads + n_kept)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeRecurrence:
    """The recurrence of one layer. Not thread-safe: it holds the arguments of its calls."""

    def __init__(
        self, config: DeltaNet, parameters: RecurrenceParameters, kernels: NativeKernels
    ) -> None:
        """Point to the parameters, all on the CPU. Raises ValueError for those of other shapes."""
        own = parameters
        for what, tensor, n_values in (
            ("taps", own.taps, config.n_taps * config.mixed_width),
            ("decay rates", own.decay_rate, config.n_value_heads),
            ("decay biases", own.decay_bias, config.n_decays),
            ("a norm", own.norm_weight, config.value_size),
            ("biases of taps", own.taps_bias, config.mixed_width),
            ("skips", own.skip, config.n_value_heads),
        ):
            if tensor is not None:
                check_memory(what, tensor, 4 * n_values, torch.float32)
        self._config = config
        self._kept = parameters
        self._call = kernels.function("shardnet_recurrence", ctypes.POINTER(RecurrenceStruct))
        self.arguments = RecurrenceStruct(
            taps=own.taps.data_ptr(),
            rate=own.decay_rate.data_ptr(),
            bias=own.decay_bias.data_ptr(),
            weight=_address(own.norm_weight),
            taps_bias=_address(own.taps_bias),
            skip=_address(own.skip),
            team=kernels.team,
            n_taps=config.n_taps,
            n_key_heads=config.n_key_heads,
            n_heads=config.n_value_heads,
            key_size=config.key_size,
            value_size=config.value_size,
            eps=own.norm_eps,
            takes_turns=config.takes_turns,
            write_scale=own.write_scale,
            gates_alone=own.gates_alone,
            by_column=config.has_key_decays,
            decay_floor=own.decay_floor,
        )

    def __call__(
        self,
        rows: Tensor,
        gate: Tensor,
        write: Tensor,
        decay: Tensor,
        before: Tensor,
        state: Tensor,
    ) -> Tensor:
        """Run rows [B + T, C], of which the last T are new: outputs [T, H x V] in their dtype.

        `gate` is [T, H x V] in the dtype of the rows, `write` is float32 [T, H], `decay` [T, D].
        The state `before` and that to be written, which may be the same, are float32 [H, K, V].
        Raises ValueError for other memory.
        """
        own, arguments = self._config, self.arguments
        rows, gate = rows.contiguous(), gate.contiguous()
        write, decay = write.contiguous(), decay.contiguous()
        n_rows = check_rows(rows, own.mixed_width) - own.n_taps + 1
        if n_rows < 1:
            raise ValueError(f"{len(rows)} rows: the compiled library needs one more than before")
        check_memory("gates", gate, n_rows * own.value_width * rows.itemsize, rows.dtype)
        for what, tensor, n in (
            ("writes", write, own.n_value_heads),
            ("decays", decay, own.n_decays),
        ):
            check_memory(what, tensor, 4 * n_rows * n, torch.float32)
        for held in (before, state):
            check_memory("a state", held, 4 * own.key_size * own.value_width, torch.float32)
        out = rows.new_empty(n_rows, own.value_width)
        arguments.rows = rows.data_ptr()
        arguments.gate = gate.data_ptr()
        arguments.write = write.data_ptr()
        arguments.decay = decay.data_ptr()
        arguments.state, arguments.before = state.data_ptr(), before.data_ptr()
        arguments.mixed = SCRATCH.at_least(n_rows * mixed_bytes(own)).data_ptr()
        arguments.out = out.data_ptr()
        arguments.n_rows = n_rows
        arguments.is_bf16 = is_bf16(rows)
        arguments.team.n_threads = torch.get_num_threads()
        self._call(arguments)
        return out
