"""Reading rotary positions from config.json, in the spellings of transformers 4 and 5.

Knows every kind of scaling, its keys, and what transformers takes where one is missing
(modeling_rope_utils.py). Must not know families or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shardnet.errors import shown
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import DIVISORS, MAX_POSITIONS, STRETCHES, THETAS, Range
from shardnet.model.config.model_config import Rope, RopeKind

_NO_ALIASES: Mapping[str, str] = MappingProxyType({})
_NO_SCALING: Mapping[str, Any] = MappingProxyType({})


def read_rope(
    fields: Fields,
    max_positions: int,
    head_size: int,
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    may_be_partial: bool = False,
    original: int | None = None,
    theta: float = 10000.0,
    share: float = 1.0,
    ignored: tuple[str, ...] = (),
    scaling: Mapping[str, Any] = _NO_SCALING,
) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    `aliases` are a family's other names of kinds. `original`, the positions trained with, the base
    `theta` and the rotated `share` are defaults. `partial_rotary_factor` is refused unless
    `may_be_partial`. The object's keys `ignored` change nothing for text, or are read elsewhere.
    `scaling` is the object where there is none. Raises CheckpointError for a malformed value,
    UnsupportedModelError for one that is not implemented.
    """
    inner = rope_object(fields, scaling)
    inner.ignore(*ignored)
    theta = inner.number(
        "rope_theta", fields.number("rope_theta", theta, within=THETAS), within=THETAS
    )
    if may_be_partial:
        outer_share = fields.number("partial_rotary_factor", share)
        share = inner.number("partial_rotary_factor", outer_share)
    else:
        fields.require("partial_rotary_factor", 1.0)
        inner.require("partial_rotary_factor", 1.0)
    return read_scaling(
        inner,
        Rope(theta=theta, share=share),
        max_positions=max_positions,
        original=fields.optional("original_max_position_embeddings") or original,
        head_size=head_size,
        aliases=aliases,
    )


def rope_object(fields: Fields, scaling: Mapping[str, Any] = _NO_SCALING) -> Fields:
    """Find the object of rotary parameters, under either name; `scaling` where there is none.

    Raises CheckpointError if two differ.
    """
    new = fields.take("rope_parameters", dict, None)
    old = fields.take("rope_scaling", dict, None)
    if new and old and new != old:
        raise fields.damaged("rope_parameters and rope_scaling disagree; keep one of them")
    return fields.inner("rope_parameters" if new else "rope_scaling", new or old or scaling)


def read_scaling(
    rope: Fields,
    plain: Rope,
    *,
    max_positions: int,
    head_size: int,
    original: int | None = None,
    aliases: Mapping[str, str] = _NO_ALIASES,
) -> Rope:
    """Read how the object `rope` scales the `plain` positions; what else it holds is refused.

    `max_positions` are the config's. `original`, the positions trained with, overrides the
    object's own. Raises as `read_rope`.
    """
    rotated = plain.rotated(head_size)
    if not 2 <= rotated <= head_size or rotated % 2:
        raise rope.damaged(
            f"head_dim {head_size} is odd or partial_rotary_factor leaves {rotated} columns: "
            "rotary positions need an even number of them"
        )
    kind = _kind(rope, aliases)
    own = rope.positive("original_max_position_embeddings", max_positions)
    plain = replace(plain, kind=kind, original_max_positions=original or own)
    match kind:
        case RopeKind.DEFAULT:
            rope.ignore("factor", "original_max_position_embeddings")  # of a scaling switched off
            made = Rope(theta=plain.theta, share=plain.share)
        case RopeKind.PROPORTIONAL:
            made = Rope(
                kind=kind,
                theta=plain.theta,
                share=rope.number("partial_rotary_factor", plain.share, within=Range(0, 1)),
                factor=rope.number("factor", 1.0, within=STRETCHES),
            )
        case RopeKind.LINEAR:
            made = Rope(
                kind=kind,
                theta=plain.theta,
                share=plain.share,
                factor=rope.number("factor", within=STRETCHES),
            )
        case RopeKind.DYNAMIC:
            made = _dynamic(rope, plain, max_positions, rotated)
        case RopeKind.YARN:
            made = _yarn(rope, plain, max_positions)
        case RopeKind.LONGROPE:
            made = _longrope(rope, plain, max_positions, rotated)
        case RopeKind.LLAMA3:
            made = _llama3(rope, plain)
    made = replace(made, axes=_axes(rope, rotated // 2))
    rope.note_the_rest()
    return made


def _axes(rope: Fields, n: int) -> tuple[int, ...]:
    """Read which axis each of `n` frequencies turns by, () where no sections are given.

    `mrope_section` counts those of time, height and width, which stand together, or in turns as
    long as any are left, the rest being of time.
    """
    takes_turns = rope.take("mrope_interleaved", bool, False)
    sections = rope.take("mrope_section", list, None)
    if sections is None:
        return ()
    is_counts = len(sections) == 3 and all(type(n) is int and n >= 0 for n in sections)
    if not is_counts or not (takes_turns or sum(sections) == n):
        raise rope.damaged(f"mrope_section is {shown(sections)}, expected 3 counts of {n} columns")
    if takes_turns:
        return tuple(at % 3 if at < 3 * sections[at % 3] else 0 for at in range(n))
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def reach(rope: Rope, max_positions: int) -> int:
    """Return how many positions one sequence may have, where the config says `max_positions`.

    Some scalings are meant for sequences longer than what published configs still say.
    """
    if rope.kind is RopeKind.DYNAMIC:
        return int(min(max_positions * rope.factor, MAX_POSITIONS))
    if rope.kind is RopeKind.YARN:
        stretched = int(min(rope.original_max_positions * rope.factor, MAX_POSITIONS))
        return max(max_positions, stretched)
    return max_positions


def _kind(rope: Fields, aliases: Mapping[str, str]) -> RopeKind:
    old, new = rope.take("type", str, None), rope.take("rope_type", str, None)
    name = new or old or "default"
    try:
        return RopeKind(aliases.get(name, name))
    except ValueError:
        supported = ", ".join(kind.value for kind in RopeKind)
        raise rope.unsupported("rope_type" if new else "type", name, supported) from None


def _dynamic(rope: Fields, plain: Rope, max_positions: int, rotated: int) -> Rope:
    """Its frequencies change with the length, beyond the config's `max_positions`."""
    if rotated < 4:
        raise rope.damaged(f"rope_type dynamic needs heads of 4 rotated columns, not {rotated}")
    factor = _factor(rope)
    return replace(plain, factor=factor, original_max_positions=max_positions)


def _yarn(rope: Fields, plain: Rope, max_positions: int) -> Rope:
    if plain.theta <= 1:
        raise rope.damaged(f"rope_theta is {plain.theta}, expected more than 1 with yarn")
    factor = _factor(rope, max_positions / plain.original_max_positions)
    rope.ignore("attn_factor")  # DeepSeek-R1-0528-Qwen3-8B's: transformers has no such key
    magnitude = rope.optional_number("attention_factor")
    mscale, all_dim = rope.nonzero("mscale"), rope.nonzero("mscale_all_dim")
    if magnitude is None and mscale and all_dim:
        magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return replace(
        plain,
        factor=factor,
        magnitude=yarn_magnitude(factor, 1.0) if magnitude is None else magnitude,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.take("truncate", bool, True),
    )


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return yarn's factor of cosine and sine where positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Fields, plain: Rope, max_positions: int, rotated: int) -> Rope:
    """The trained positions have the short factors, longer contexts the long ones."""
    factor = rope.optional_number("factor") or max_positions / plain.original_max_positions
    magnitude = rope.optional_number("attention_factor")
    if magnitude is None:
        magnitude = 1.0
        if factor > 1 and plain.original_max_positions > 1:
            magnitude = math.sqrt(1 + math.log(factor) / math.log(plain.original_max_positions))
    return replace(
        plain,
        factor=factor,
        magnitude=magnitude,
        short_factors=rope.numbers("short_factor", rotated // 2, within=DIVISORS),
        long_factors=rope.numbers("long_factor", rotated // 2, within=DIVISORS),
    )


def _llama3(rope: Fields, plain: Rope) -> Rope:
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    factor = rope.number("factor", within=STRETCHES)
    return replace(plain, factor=factor, low_freq_factor=low, high_freq_factor=high)


def _factor(rope: Fields, *default: float) -> float:
    """Read a factor that stretches: below 1 it would shrink what was trained."""
    return rope.number("factor", *default, within=Range(1, STRETCHES.most))
