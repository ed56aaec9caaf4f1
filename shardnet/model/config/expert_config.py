"""Reading the keys of config.json that families with experts share.

Knows what these keys mean. Must not know which family reads them, nor its defaults.
"""

from __future__ import annotations

from shardnet.errors import shown
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_EXPERTS


def read_expert_counts(
    fields: Fields,
    keys: tuple[str, str],
    n_experts: int,
    top_k: int | None,
    top_k_key: str = "num_experts_per_tok",
) -> tuple[int, int]:
    """Read the number of experts, under either of `keys`, and the number of them per token.

    The latter is under `top_k_key`. `n_experts` and `top_k` are the defaults; `top_k` None where
    there is none. Raises CheckpointError where the keys disagree or a token would use more experts
    than there are.
    """
    key = next((key for key in keys if not fields.missing(key)), keys[0])
    found = fields.positive(key, n_experts, at_most=MAX_EXPERTS)
    if any(not fields.missing(other) and fields.positive(other) != found for other in keys):
        raise fields.damaged(f"{keys[0]} and {keys[1]} disagree")
    chosen = fields.positive(top_k_key, *([] if top_k is None else [top_k]))
    if chosen > found:
        raise fields.damaged(f"{top_k_key} is {chosen}, there are {found} experts")
    return found, chosen


def read_sparse_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """Read which layers have experts: each `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.take("mlp_only_layers", list, [])
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense):
        raise fields.damaged(f"mlp_only_layers is {shown(dense)}, expected numbers of layers")
    if len(dense) > n_layers:
        raise fields.damaged(f"mlp_only_layers has {len(dense)} entries for {n_layers} layers")
    kept_dense = frozenset(dense)
    return tuple(n for n in range(n_layers) if n not in kept_dense and (n + 1) % step == 0)


def read_mlp_kinds(fields: Fields, n_layers: int, first: int) -> tuple[int, ...]:
    """Read which layers have experts, by name; where no key says it, those from `first` on."""
    kinds = fields.take("mlp_layer_types", list, None)
    if kinds is None:
        return tuple(range(max(0, first), n_layers))
    if len(kinds) != n_layers:
        raise fields.damaged(f"mlp_layer_types has {len(kinds)} entries for {n_layers} layers")
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise fields.unsupported("mlp_layer_types", kind, "dense, sparse")
    return tuple(n for n in range(n_layers) if kinds[n] == "sparse")
