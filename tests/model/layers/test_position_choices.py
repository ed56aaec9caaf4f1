"""Which positions rows attend to where they choose, and what they attend to then."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import torch
from support.needs import needs_library
from support.rings.stage_chain import Rows, batch_of
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import HeadShape
from shardnet.model.kernels.library import ISA_VARIABLE, find_kernels
from shardnet.model.layers import native_attention
from shardnet.model.layers.attention import ForwardStep, attention, plan_step, store_rows
from shardnet.model.layers.native_attention import AttentionKind, Blocks
from shardnet.model.mixers.position_indexer import choose, choose_entries, choose_pooled
from shardnet.types import KvDType, SlotId

LATENT, INDEX = 24, 16
KIND = AttentionKind(has_index=True)
HEADS = {"few heads": 3, "one tile": 48, "several tiles": 70}


def cache(dtype: torch.dtype = torch.float32, kv_dtype: KvDType = KvDType.AUTO) -> KvCache:
    """One layer of latents with keys of an index beside them."""
    shape = HeadShape(n_kv_heads=1, key_size=LATENT, value_size=INDEX)
    made = (1, 1, LATENT, dtype, torch.device("cpu"), 64)
    return KvCache(*made, value_size=0, kv_dtype=kv_dtype, heads=[shape])


def step_of(kv: KvCache, position: int, n_rows: int) -> ForwardStep:
    """One sequence's rows from a position on."""
    rows = Rows(slot=0, position=position, ids=[0] * n_rows, n_sampled=0)
    return plan_step(batch_of([rows]), kv, 9999, torch.float32)


class Sequence:
    """Rows of one sequence in numbers, which may come in any steps."""

    def __init__(
        self, n_rows: int, n_heads: int, seed: int = 0, dtype: torch.dtype = torch.float32
    ):
        made = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        self.index = made(n_rows, n_heads, INDEX).to(dtype)
        self.weights = made(n_rows, n_heads)
        self.index_keys = made(n_rows, 1, INDEX).to(dtype)
        self.queries, self.keys = (
            made(n_rows, 5, LATENT).to(dtype),
            made(n_rows, 1, LATENT).to(dtype),
        )

    def run(self, kv: KvCache, steps: list[int], n_chosen: int) -> tuple[list[Tensor], Tensor]:
        """Send the rows in so many steps: what was chosen in each, and all that was attended."""
        chosen: list[Tensor] = []
        parts, start = [], 0
        for n in steps:
            rows = slice(start, start + n)
            group = Rows(slot=0, position=start, ids=[0] * n, n_sampled=0)
            step = plan_step(batch_of([group]), kv, 100_000, self.keys.dtype)
            chooser = partial(choose, self.index[rows], self.weights[rows].contiguous(), n_chosen)
            more = (
                self.queries[rows],
                self.keys[rows],
                self.index_keys[rows],
                0,
                step,
                KIND,
                chooser,
            )
            parts.append(attention(*more))
            chosen += [each for each in step.choices if each is not None]
            start += n
        return chosen, torch.cat(parts)

    def wanted(self, row: int, n_chosen: int) -> Tensor:
        """The positions by definition, in float64: of equal scores the first."""
        keys = self.index_keys[: row + 1, 0].double()
        scores = (self.index[row].double() @ keys.T).relu().T @ self.weights[row].double()
        return scores.sort(descending=True, stable=True).indices[:n_chosen].sort().values


@pytest.mark.parametrize("n_heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("steps", [[700], [256, 256, 188], [690, *[1] * 10]], ids=str)
def test_the_best_positions_are_chosen_and_attended(n_heads: int, steps: list[int]) -> None:
    own, n_chosen = Sequence(700, n_heads), 40
    _, attended = own.run(cache(), steps, n_chosen)
    for row in (0, 39, 40, 41, 300, 511, 699):
        keys = own.keys[own.wanted(row, n_chosen), 0].double()
        scores = own.queries[row].double() @ keys.T * LATENT**-0.5
        expected = (scores.softmax(-1) @ keys).flatten().float()
        torch.testing.assert_close(attended[row], expected, rtol=0, atol=1e-5)


@needs_library
def test_a_row_is_attended_as_in_a_slot_of_its_chosen_positions_alone() -> None:
    """To the bit, whatever the positions between them hold: so they cost nothing."""
    own, n_chosen, kv = Sequence(700, 6), 300, cache()
    [chosen], _ = own.run(kv, [700], n_chosen)
    positions = chosen[699].long()
    between = torch.ones(700, dtype=torch.bool).index_fill(0, positions, value=False)
    own.keys[between] = torch.nan
    store_rows(own.keys, own.index_keys, 0, step_of(kv, 0, 700))
    given = own.queries[699:], own.keys[699:], own.index_keys[699:], 0
    among = attention(*given, step_of(kv, 699, 1), KIND, lambda *_: chosen[699:])
    small = own.queries[699:].expand(n_chosen, -1, -1), own.keys[positions]
    alone = attention(*small, own.index_keys[positions], 0, step_of(cache(), 0, n_chosen), KIND)
    assert torch.equal(among[0], alone[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [KvDType.AUTO, KvDType.INT8])
def test_bits_depend_on_no_step_block_thread_or_instruction_set(
    dtype: torch.dtype, kv_dtype: KvDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Sequence(700, 6, dtype=dtype)
    _, expected = own.run(cache(dtype, kv_dtype), [700], 100)
    for isa in ("portable", "avx2"):
        kernels = find_kernels({ISA_VARIABLE: isa})
        monkeypatch.setattr(native_attention, "native_kernels", lambda found=kernels: found)
        _, others = own.run(cache(dtype, kv_dtype), [311, 300, 88, 1], 100)
        assert torch.equal(others, expected), isa
        monkeypatch.undo()
    torch.set_num_threads(2)
    kv = cache(dtype, kv_dtype)
    own.run(kv, [600], 100)
    kv.copy(SlotId(0), SlotId(1), 600)  # shares blocks with slot 0
    step = plan_step(
        batch_of([Rows(slot=1, position=600, ids=[0] * 100, n_sampled=0)]), kv, 9999, dtype
    )
    chooser = partial(choose, own.index[600:], own.weights[600:].contiguous(), 100)
    rows = slice(600, 700)
    given = (own.queries[rows], own.keys[rows], own.index_keys[rows], 0, step, KIND, chooser)
    assert torch.equal(attention(*given), expected[rows])


def test_torch_chooses_the_same_where_the_library_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Sequence(300, 4)
    [native], expected = own.run(cache(), [300], 33)
    monkeypatch.setattr(native_attention, "native_kernels", lambda: None)
    [chosen], attended = own.run(cache(), [300], 33)
    assert torch.equal(chosen, native)
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-5)


def test_of_equal_scores_the_first_are_chosen() -> None:
    own = Sequence(200, 2)
    own.weights[:] = -own.weights.abs()  # no score is above 0, many are 0: all heads below it
    own.weights[150:] = 0.0
    [chosen], _ = own.run(cache(), [200], 30)
    for row in (29, 30, 100, 149, 150, 199):
        assert chosen[row].tolist() == own.wanted(row, 30).tolist()
    assert chosen[199].tolist() == list(range(30))
    assert chosen[4].tolist() == [*range(5), *[-1] * 25]


def test_rows_that_see_few_positions_choose_nothing() -> None:
    own = Sequence(40, 2)
    step_choices, attended = own.run(cache(), [39, 1], 40)
    assert step_choices == []
    plain = cache()
    rows = Rows(slot=0, position=0, ids=[0] * 40, n_sampled=0)
    step: ForwardStep = plan_step(batch_of([rows]), plain, 9999, torch.float32)
    expected = attention(own.queries, own.keys, own.index_keys, 0, step, KIND)
    assert torch.equal(attended, expected)


def means(rows: Tensor) -> Tensor:
    """The mean of every four rows."""
    return rows.view(-1, 4, rows.shape[1]).mean(1)


@pytest.mark.parametrize("is_native", [True, False])
def test_entries_of_several_positions_are_chosen_with_the_unfinished_one(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that end within an entry, a rewind, and a slot that goes on from another."""
    if not is_native:
        monkeypatch.setattr(native_attention, "native_kernels", lambda: None)
    own, n_entries, kv = Sequence(500, 5), 9, cache()
    pooled = means(own.index_keys[:, 0])

    def run(slot: int, start: int, end: int) -> Tensor:
        rows = slice(start, end)
        group = Rows(slot=slot, position=start, ids=[0] * (end - start), n_sampled=0)
        step = plan_step(batch_of([group]), kv, 9999, torch.float32)
        weights = own.weights[rows].contiguous()
        chooser = partial(choose_pooled, own.index[rows], weights, n_entries, 4, means)
        given = (own.queries[rows], own.keys[rows], own.index_keys[rows], 0, step, KIND, chooser)
        attention(*given)
        [chosen] = step.choices
        assert chosen is not None
        return chosen

    run(0, 0, 150)
    run(0, 150, 341)
    kv.copy(SlotId(0), SlotId(1), 300)
    for slot, start in ((0, 290), (1, 300)):
        chosen = run(slot, start, 500)
        for row in (start, 342, 343, 344, 498, 499):
            keys = pooled[: (row + 1) // 4].double()
            scores = (own.index[row].double() @ keys.T).relu().T @ own.weights[row].double()
            best = scores.sort(descending=True, stable=True).indices[:n_entries].sort().values
            wanted = [4 * entry + within for entry in best.tolist() for within in range(4)]
            wanted += range((row + 1) // 4 * 4, row + 1)
            assert [n for n in chosen[row - start].tolist() if n >= 0] == wanted


def test_rows_of_a_step_that_see_few_entries_see_all_positions() -> None:
    own, kv = Sequence(60, 3), cache()
    step = plan_step(
        batch_of([Rows(slot=0, position=0, ids=[0] * 60, n_sampled=0)]), kv, 999, torch.float32
    )
    chooser = partial(choose_pooled, own.index, own.weights, 9, 4, means)
    attention(own.queries, own.keys, own.index_keys, 0, step, KIND, chooser)
    [chosen] = step.choices
    assert chosen is not None
    for row in (0, 3, 38, 35):
        assert chosen[row].tolist() == [*range(row + 1), *[-1] * (39 - row - 1)]
    assert len([n for n in chosen[39].tolist() if n >= 0]) == 36


@needs_library
@pytest.mark.parametrize("rate", [1, 2])
def test_entries_are_chosen_in_blocks_that_another_layer_has_chosen(rate: int) -> None:
    """By the library and by torch; the last block that a row sees is always one of them."""
    made = partial(torch.randn, generator=torch.Generator().manual_seed(5))
    n_rows, n_chosen, n_blocks, size = 90, 6, 3, 4
    queries, weights, keys = made(n_rows, 3, INDEX), made(n_rows, 3), made(n_rows // rate, INDEX)
    kv = cache()
    step = step_of(kv, 0, n_rows)
    numbers = torch.full((n_rows, n_blocks), -1, dtype=torch.int32)
    found = []
    for is_native in (True, False):
        own = step if is_native else msgspec.structs.replace(step, native_spans=None)
        new = Blocks(numbers=numbers.clone(), size=size, are_new=True)
        first = choose_entries(queries, weights, n_chosen, rate, [keys], own, blocks=new)
        known = Blocks(numbers=new.numbers, size=size, are_new=False)
        within = choose_entries(queries, weights.flip(0), n_chosen, rate, [keys], own, blocks=known)
        found.append((first, new.numbers, within))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    first, blocks, within = found[0]
    for row in range(n_rows):
        n_seen = (row + 1) // rate
        kept = [n for n in blocks[row].tolist() if n >= 0]
        chosen = [n for n in within[row].tolist() if n >= 0]
        if -(-n_seen // size) <= n_blocks:
            assert kept == []
            assert len(chosen) == min(n_seen, n_chosen)
        else:
            assert len(kept) == n_blocks
            assert kept[-1] == (n_seen - 1) // size
            n_free = sum(min(size, n_seen - n * size) for n in kept)
            assert len(chosen) == min(n_chosen, n_free)
            assert {n // size for n in chosen} <= {*kept}
