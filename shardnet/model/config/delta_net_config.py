"""Reading the keys of config.json that say which layers are gated DeltaNets, and their sizes.

Knows what these keys mean. Must not know which family reads them, nor tensors.
"""

from __future__ import annotations

from typing import Final

from shardnet.model.config.decoder_config import FULL
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_STATE_COLUMNS
from shardnet.model.config.model_config import DeltaNet

LINEAR: Final = "linear_attention"
_MOST_TAPS = 64
_INTERVAL = 4


def read_delta_net(fields: Fields, n_layers: int) -> DeltaNet | None:
    """Read the sizes of the gated DeltaNets; None where every layer has attention.

    Raises CheckpointError for sizes that do not fit together or would fill the memory,
    UnsupportedModelError for another kind of layer.
    """
    layers = _read_layers(fields, n_layers)
    read = DeltaNet(
        n_key_heads=fields.positive("linear_num_key_heads", 16),
        n_value_heads=fields.positive("linear_num_value_heads", 32),
        key_size=fields.positive("linear_key_head_dim", 128),
        value_size=fields.positive("linear_value_head_dim", 128),
        n_taps=fields.positive("linear_conv_kernel_dim", 4, at_most=_MOST_TAPS),
        takes_turns=fields.take("linear_heads_take_turns", bool, False),
        has_split_gate=fields.take("linear_gate_is_split", bool, False),
        layers=layers,
    )
    if read.n_value_heads % read.n_key_heads:
        raise fields.damaged(
            f"linear_num_value_heads {read.n_value_heads} is no multiple of linear_num_key_heads "
            f"{read.n_key_heads}"
        )
    check_state_size(fields, read)
    return read if layers else None


def check_state_size(fields: Fields, read: DeltaNet) -> None:
    """Raise CheckpointError for states that would fill the memory."""
    n_columns = max(read.key_size * read.value_width, read.n_taps * read.mixed_width)
    if n_columns > MAX_STATE_COLUMNS:
        raise fields.damaged(
            f"linear attention claims {n_columns} numbers of state in a layer, expected at most "
            f"{MAX_STATE_COLUMNS}"
        )


def _read_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """Read `layer_types`, or by default all layers but each `full_attention_interval`-th."""
    interval = fields.positive("full_attention_interval", _INTERVAL)
    kinds = fields.take("layer_types", list, None)
    if kinds is None:
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(n_layers)]
    if len(kinds) != n_layers:
        raise fields.damaged(f"layer_types has {len(kinds)} entries for {n_layers} layers")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise fields.unsupported("layer_types", kind, f"{LINEAR}, {FULL}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
