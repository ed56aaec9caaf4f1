"""Benchmark attention by the compiled library beside torch's, on the same keys and values.

Decode steps and prompt chunks behind so many positions, in float32 on one thread unless told
otherwise. Both take turns; the least time of each counts, and ratios are what to look at. Then
latents as DeepSeek-V3.2's, of which rows attend to 2,048 that are all, or chosen among 100,000.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from msgspec import structs

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import HeadShape
from shardnet.model.layers.attention import ForwardStep, attention, plan_step
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.mixers.position_indexer import choose
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId

CPU = torch.device("cpu")
CONTEXT = 8192
N_CHOSEN, N_POSITIONS = 2048, 100_000
LATENT, INDEX = 576, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads of a model's attention, and the positions before the rows."""

    head_size: int
    n_heads: int
    n_kv_heads: int
    position: int


SHAPES = [
    Shape(head_size=64, n_heads=32, n_kv_heads=4, position=1000),
    Shape(head_size=64, n_heads=32, n_kv_heads=4, position=4000),
    Shape(head_size=128, n_heads=32, n_kv_heads=8, position=1000),
    Shape(head_size=64, n_heads=6, n_kv_heads=6, position=300),
]
"""The 1.1B shape twice, Llama 3's, and the bundled model's."""


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256, help="rows of a prompt chunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    for shape in SHAPES:
        with torch.inference_mode():
            cells = [
                _compared(shape, rows, repeats, arguments.rounds, dtype)
                for rows, repeats in ((1, 100), (arguments.rows, 3))
            ]
        heads = f"{shape.n_heads} heads of {shape.head_size} over {shape.n_kv_heads}"
        print(
            f"{heads}, {shape.position} positions: one row {cells[0]}, {arguments.rows} {cells[1]}"
        )
    with torch.inference_mode():
        cells = [_chosen(rows, arguments.rounds, dtype) for rows in (1, 16)]
    print(f"{N_CHOSEN} latents, all or of {N_POSITIONS}: one row {cells[0]}, 16 {cells[1]}")


def _compared(shape: Shape, n_rows: int, repeats: int, rounds: int, dtype: torch.dtype) -> str:
    """Time both ways to attend for `n_rows` rows at once."""
    kv = KvCache(1, shape.n_kv_heads, shape.head_size, dtype, CPU, room_blocks=CONTEXT // 256)
    kv.ensure(SlotId(0), shape.position)
    for stored in kv.layer(SlotId(0), 0):
        stored.normal_()
    step = _step(kv, shape.position, n_rows, dtype)
    queries = torch.randn(n_rows, shape.n_heads, shape.head_size, dtype=dtype)
    keys, values = torch.randn(2, n_rows, shape.n_kv_heads, shape.head_size, dtype=dtype)
    by_torch = structs.replace(step, native_spans=None)
    ways: list[Callable[[], object]] = [
        lambda: attention(queries, keys, values, 0, step),
        lambda: attention(queries, keys, values, 0, by_torch),
    ]
    ours_s, theirs_s = _least_s(ways, rounds, repeats)
    return f"{ours_s * 1e3:.3f} ms, torch {theirs_s * 1e3:.3f} ms ({theirs_s / ours_s:.2f})"


def _chosen(n_rows: int, rounds: int, dtype: torch.dtype) -> str:
    """Time rows that attend to all positions, to as many of far more, and what chooses these."""
    heads = HeadShape(n_kv_heads=1, key_size=LATENT, value_size=INDEX)
    kind, ways = AttentionKind(has_index=True), list[Callable[[], object]]()
    queries, keys = torch.randn(n_rows, 128, LATENT), torch.randn(n_rows, 1, LATENT)
    index = torch.randn(n_rows, 64, INDEX).to(dtype), torch.rand(n_rows, 64)
    given = queries.to(dtype), keys.to(dtype), torch.randn(n_rows, 1, INDEX).to(dtype), 0
    for n_positions in (N_CHOSEN, N_POSITIONS):
        blocks = -(-n_positions // 256) + 1
        kv = KvCache(1, 1, LATENT, dtype, CPU, blocks, value_size=0, heads=[heads])
        kv.ensure(SlotId(0), n_positions)
        for stored in kv.layer(SlotId(0), 0):
            stored.normal_()
        step = _step(kv, n_positions - n_rows, n_rows, dtype)
        chosen = choose(*index, N_CHOSEN, 0, step)
        ways.append(partial(attention, *given, step, kind, lambda *_, own=chosen: own))
    ways.append(partial(choose, *index, N_CHOSEN, 0, step))
    all_s, chosen_s, choosing_s = _least_s(ways, rounds, 10)
    return f"{all_s * 1e3:.2f} ms, {chosen_s * 1e3:.2f} ms, choosing {choosing_s * 1e3:.2f} ms"


def _step(kv: KvCache, position: int, n_rows: int, dtype: torch.dtype) -> ForwardStep:
    """Plan rows of one sequence from a position on."""
    group = RowGroup(
        sequence_id=SequenceId(1), slot=SlotId(0), position=position, n_rows=n_rows, n_sampled=1
    )
    ids = tuple(range(n_rows))
    batch = MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=ids)
    return plan_step(batch, kv, N_POSITIONS + CONTEXT, dtype)


def _least_s(ways: list[Callable[[], object]], rounds: int, repeats: int) -> list[float]:
    """Time each way in turns: the least of all."""
    least_s = [float("inf")] * len(ways)
    for _ in range(rounds):
        for place, way in enumerate(ways):
            for _ in range(repeats):
                began_s = time.perf_counter()
                way()
                least_s[place] = min(least_s[place], time.perf_counter() - began_s)
    return least_s


if __name__ == "__main__":
    main()
