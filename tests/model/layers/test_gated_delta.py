"""The recurrence of a gated DeltaNet against its plain formula, and its bits in any chunks."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import Activation, DeltaNet
from shardnet.model.kernels.library import ISA_VARIABLE, find_kernels
from shardnet.model.kernels.recurrence import NativeRecurrence, RecurrenceParameters
from shardnet.model.layers.attention import plan_step
from shardnet.model.layers.rotary import Rotary
from shardnet.model.mixers.gated_delta import GatedDeltaNet, Projected
from shardnet.types import Epoch, MicroBatch, RowGroup, SequenceId, SlotId, StepId

CPU = torch.device("cpu")
SIZES = DeltaNet(n_key_heads=2, n_value_heads=6, key_size=5, value_size=37, n_taps=4, layers=(0,))
BY_COLUMNS = replace(SIZES, has_key_decays=True)
WIDTHS = [SIZES.mixed_width, SIZES.value_width, SIZES.n_value_heads, BY_COLUMNS.n_decays]
NO_ROTARY = Rotary(cos=torch.empty(0), sin=torch.empty(0))


def project_columns(hidden: Tensor) -> Projected:
    mixed, gate, write, decay = torch.split(hidden, WIDTHS, -1)
    return Projected(mixed=mixed, gate=gate, write=write, decay=decay)


def project(hidden: Tensor) -> Projected:
    whole = project_columns(hidden)
    return replace(whole, decay=whole.decay[:, : SIZES.n_value_heads])


class Same:
    """A linear that changes nothing."""

    shape = (SIZES.value_width, SIZES.value_width)
    weights_stay = True

    def __call__(self, rows: Tensor) -> Tensor:
        return rows


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PARAMETERS = RecurrenceParameters(
    taps=noise(SIZES.n_taps, SIZES.mixed_width, seed=1),
    decay_rate=-noise(SIZES.n_value_heads, seed=2).abs(),
    decay_bias=noise(SIZES.n_value_heads, seed=3),
    norm_weight=1 + noise(SIZES.value_size, seed=4) / 10,
    norm_eps=1e-6,
)


OF_MAMBA = replace(
    PARAMETERS,
    norm_weight=None,
    taps_bias=noise(SIZES.mixed_width, seed=10),
    skip=noise(SIZES.n_value_heads, seed=11),
)


OF_COLUMNS = replace(PARAMETERS, decay_bias=noise(BY_COLUMNS.n_decays, seed=12), gates_alone=True)


@pytest.fixture(
    params=[
        *("native", "torch", "native-turns", "torch-turns", "native-mamba", "torch-mamba"),
        *("native-twice", "torch-twice", "native-columns", "torch-columns"),
        *("native-columns-bounded", "torch-columns-bounded"),
    ]
)
def layer(request: pytest.FixtureRequest) -> GatedDeltaNet:
    """By either, with value heads side by side or taking turns, that of Mamba-2, OLMo Hybrid, Kimi
    Linear or Ling 3.
    """
    sizes = replace(SIZES, takes_turns="turns" in request.param)
    parameters = OF_MAMBA if "mamba" in request.param else PARAMETERS
    if "twice" in request.param:
        parameters = replace(parameters, write_scale=2.0)
    made = GatedDeltaNet.of(sizes, Activation.SILU, project, parameters, Same())
    if "columns" in request.param:
        own = replace(OF_COLUMNS, decay_floor=-5.0 if "bounded" in request.param else 0.0)
        made = GatedDeltaNet.of(BY_COLUMNS, Activation.SILU, project_columns, own, Same())
    if "torch" in request.param:
        return replace(made, native=None)
    if made.native is None:
        pytest.skip("the library was not built here")
    return made


def kv_cache() -> KvCache:
    return KvCache(1, 1, 8, torch.float32, CPU, 16, states=(SIZES.state,))


def run(
    layer: GatedDeltaNet, kv: KvCache, *groups: tuple[int, int, Tensor], n_drafts: int = 0
) -> Tensor:
    """Run (slot, position, rows) in one step; the last positions of the first slot are drafts."""
    batch = MicroBatch(
        epoch=Epoch(1),
        step=StepId(1),
        groups=tuple(
            RowGroup(
                sequence_id=SequenceId(slot),
                slot=SlotId(slot),
                position=position,
                n_rows=len(rows),
                n_sampled=0,
                n_drafts=0 if place else n_drafts,
            )
            for place, (slot, position, rows) in enumerate(groups)
        ),
        token_ids=[0] * sum(len(rows) for _, _, rows in groups),
    )
    step = plan_step(batch, kv, 1024, torch.float32)
    return layer(torch.cat([rows for _, _, rows in groups]), 0, NO_ROTARY, step)


def in_chunks(layer: GatedDeltaNet, hidden: Tensor, sizes: Sequence[int]) -> Tensor:
    kv, parts, position = kv_cache(), [], 0
    for rows in hidden.split(list(sizes)):  # type: ignore[no-untyped-call]
        parts.append(run(layer, kv, (0, position, rows)))
        position += len(rows)
    return torch.cat(parts)


def plain(layer: GatedDeltaNet, hidden: Tensor) -> Tensor:
    """The formulas as they are written, position by position and head by head, in float64."""
    outputs, skip = [], layer.parameters.skip
    wide = layer.project(hidden.double())
    n_heads, biases = SIZES.n_value_heads, layer.parameters.decay_bias
    padded = torch.cat((torch.zeros(3, SIZES.mixed_width), wide.mixed))
    state = torch.zeros(SIZES.n_value_heads, SIZES.key_size, SIZES.value_size, dtype=torch.float64)
    for row in range(len(hidden)):
        summed = (padded[row : row + 4] * PARAMETERS.taps).sum(0)
        summed = summed if layer.parameters.taps_bias is None else summed + OF_MAMBA.taps_bias
        mixed = summed * summed.sigmoid()
        of_keys = 2 * SIZES.key_width
        queries, keys = mixed[:of_keys].view(2, SIZES.n_key_heads, SIZES.key_size)
        values = mixed[of_keys:].view(SIZES.n_value_heads, SIZES.value_size)
        for head in range(SIZES.n_value_heads):
            shared = head % 2 if layer.config.takes_turns else head // 3
            query, key = queries[shared], keys[shared]
            if skip is None:
                query = query / (query.square().sum() + 1e-6).sqrt() / SIZES.key_size**0.5
                key = key / (key.square().sum() + 1e-6).sqrt()
            before = (wide.decay[row] + biases).view(n_heads, -1)[
                head
            ]  # of the head, or each column
            steps = torch.log1p(before.exp())
            exponents, floor = PARAMETERS.decay_rate[head] * steps, layer.parameters.decay_floor
            if floor < 0:
                exponents = floor * (-PARAMETERS.decay_rate[head] * before).sigmoid()
            state[head] *= exponents.exp()[:, None]
            if skip is None:
                difference = values[head] - key @ state[head]
                written = layer.parameters.write_scale * wide.write[row, head].sigmoid()
                state[head] += written * torch.outer(key, difference)
                output = query @ state[head]
                normed = output / (output.square().mean() + 1e-6).sqrt() * PARAMETERS.norm_weight
            else:
                state[head] += steps * torch.outer(key, values[head])
                normed = query @ state[head] + skip[head] * values[head]
            gate = wide.gate[row].view(SIZES.n_value_heads, -1)[head]
            opened = gate.sigmoid() * (1 if layer.parameters.gates_alone else gate)
            outputs.append(normed * opened)
    return torch.stack(outputs).view(len(hidden), -1).float()


def test_it_is_the_plain_formula(layer: GatedDeltaNet) -> None:
    hidden = noise(40, sum(WIDTHS))
    expected = plain(layer, hidden)
    torch.testing.assert_close(in_chunks(layer, hidden, [40]), expected, rtol=1e-4, atol=2e-5)


def test_bits_depend_on_no_chunk(layer: GatedDeltaNet) -> None:
    hidden = noise(70, sum(WIDTHS), seed=5)
    whole = in_chunks(layer, hidden, [70])
    for sizes in ([1, 33, 36], [64, 6], [1] * 70):
        assert torch.equal(in_chunks(layer, hidden, sizes), whole), sizes


def test_bits_depend_on_no_other_sequence(layer: GatedDeltaNet) -> None:
    """Also where two sequences are at different positions of theirs."""
    one, other = noise(50, sum(WIDTHS), seed=6), noise(40, sum(WIDTHS), seed=7)
    kv = kv_cache()
    first = run(layer, kv, (0, 0, one[:20]))
    both = run(layer, kv, (0, 20, one[20:]), (1, 0, other))
    together = torch.cat((first, both[:30]))
    assert torch.equal(together, in_chunks(layer, one, [50]))
    assert torch.equal(both[30:], in_chunks(layer, other, [40]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_were_rejected_leave_no_trace(layer: GatedDeltaNet, dtype: torch.dtype) -> None:
    """Whatever was sent behind them, and whoever begins with rows among them."""
    hidden, wrong = (noise(120, sum(WIDTHS), seed=seed).to(dtype) for seed in (20, 21))
    own = KvCache(1, 1, 8, dtype, CPU, 16, states=(SIZES.state,))
    expected = run(layer, own, (0, 0, hidden))
    choice, kv, at = random.Random(1), KvCache(1, 1, 8, dtype, CPU, 16, states=(SIZES.state,)), 30
    run(layer, kv, (0, 0, hidden[:at]))
    while at < 90:
        n_right, n_certain = choice.randrange(1, 12), at + 1
        rows = torch.cat((hidden[at : at + n_right], wrong[at + n_right :]))  # from `at` on
        position = at
        for n_rows in choice.sample(range(1, 8), choice.randrange(1, 5)):
            sent = rows[position - at : position - at + n_rows]
            beside = [(2, 0, hidden[:3])] * choice.randrange(2)
            n_drafts = position + n_rows - max(n_certain, at + 1)
            found = run(layer, kv, (0, position, sent), *beside, n_drafts=n_drafts)
            n_same = max(0, min(n_rows, at + n_right - position))
            assert torch.equal(found[:n_same], expected[position : position + n_same])
            position += n_rows
            n_certain = choice.randrange(n_certain, max(n_certain, min(at + n_right, position)) + 1)
        at = min(at + n_right, position)
        kv.copy(SlotId(0), SlotId(1), at)
        assert torch.equal(run(layer, kv, (1, at, hidden[at : at + 9])), expected[at : at + 9])
        if choice.randrange(2):
            kv.trim(SlotId(0), at)


def test_bfloat16_is_rounded_at_the_ends_only(layer: GatedDeltaNet) -> None:
    hidden = noise(40, sum(WIDTHS), seed=8).bfloat16()
    kv = KvCache(1, 1, 8, torch.bfloat16, CPU, 16, states=(SIZES.state,))
    outputs = run(layer, kv, (0, 0, hidden))
    assert outputs.dtype is torch.bfloat16
    torch.testing.assert_close(
        outputs.float(), plain(layer, hidden.float()), rtol=1 / 128, atol=1e-4
    )


@pytest.mark.parametrize("isa", ["portable", "avx2"])
@pytest.mark.parametrize("sizes", [SIZES, BY_COLUMNS], ids=["heads", "columns"])
def test_instruction_sets_agree(isa: str, sizes: DeltaNet) -> None:
    """Up to how they add products: with vectors of any length, whole and in part."""
    kernels = find_kernels({ISA_VARIABLE: isa})
    if kernels is None:
        pytest.skip("the library was not built here")
    by_columns = sizes.has_key_decays
    own, parameters = (project_columns, OF_COLUMNS) if by_columns else (project, PARAMETERS)
    made = GatedDeltaNet.of(sizes, Activation.SILU, own, parameters, Same())
    other = replace(made, native=NativeRecurrence(sizes, parameters, kernels))
    hidden = noise(30, sum(WIDTHS), seed=9)
    expected = in_chunks(made, hidden, [30])
    torch.testing.assert_close(in_chunks(other, hidden, [30]), expected, rtol=1e-4, atol=1e-5)


WIDE = DeltaNet(n_key_heads=2, n_value_heads=4, key_size=40, value_size=100, n_taps=4, layers=(0,))
"""Vectors alone, four together, and in part; a head's columns lie together between rows."""
LONG = replace(WIDE, key_size=1032, value_size=20)
"""Keys of so many columns that a head's do not."""
BITS = {
    "heads": "caab235a0d4a40ad",
    "heads-long": "d523c1a21dc27e77",
    "columns": "c6856f9fc47cbf84",
    "columns-bounded": "083b7066875317dc",
    "mamba": "203f3f7538732f21",
    "mamba-long": "ffcbf34ea5fa35a9",
}
"""Of outputs and states, when each row went through the whole state of a head before the next."""


def plain_numbers(*shape: int, seed: int) -> Tensor:
    """Numbers within 1 of zero, the same on any machine."""
    counted = torch.arange(math.prod(shape)) * 40503 + seed * 7919
    return (counted % 2039 / 1024 - 1).float().view(shape)


def wide_case(kind: str) -> tuple[DeltaNet, RecurrenceParameters]:
    sizes = replace(
        LONG if "long" in kind else WIDE,
        has_key_decays="columns" in kind,
        is_mamba="mamba" in kind,
        takes_turns="mamba" in kind,
    )
    of_mamba = sizes.is_mamba
    parameters = RecurrenceParameters(
        taps=plain_numbers(sizes.n_taps, sizes.mixed_width, seed=1),
        decay_rate=-plain_numbers(sizes.n_value_heads, seed=2).abs(),
        decay_bias=plain_numbers(sizes.n_decays, seed=3),
        norm_weight=None if of_mamba else 1 + plain_numbers(sizes.value_size, seed=4),
        norm_eps=1e-6,
        taps_bias=plain_numbers(sizes.mixed_width, seed=5) if of_mamba else None,
        skip=plain_numbers(sizes.n_value_heads, seed=6) if of_mamba else None,
        gates_alone=sizes.has_key_decays,
        decay_floor=-5.0 if "bounded" in kind else 0.0,
    )
    return sizes, parameters


@pytest.mark.parametrize("isa", ["", "avx2", "portable"])
@pytest.mark.parametrize("kind", BITS)
def test_rows_in_turn_have_the_bits_of_rows_alone(kind: str, isa: str) -> None:
    """Of any number, on any number of threads, and with each instruction set."""
    kernels = find_kernels({ISA_VARIABLE: isa})
    if kernels is None:
        pytest.skip("the library was not built here")
    sizes, parameters = wide_case(kind)
    native = NativeRecurrence(sizes, parameters, kernels)
    n_rows, before = 70, torch.get_num_threads()
    rows = plain_numbers(sizes.n_taps - 1 + n_rows, sizes.mixed_width, seed=7)
    gate = plain_numbers(n_rows, sizes.value_width, seed=8)
    write = 3 * plain_numbers(n_rows, sizes.n_value_heads, seed=9)
    decay = 3 * plain_numbers(n_rows, sizes.n_decays, seed=10)
    for n_threads, parts in ((1, [70]), (2, [33, 37]), (3, [1] * 70), (3, [64, 6])):
        torch.set_num_threads(n_threads)
        state, digest, at = torch.zeros(sizes.state.recurrent), hashlib.sha256(), 0
        try:
            for n in parts:
                own, end = slice(at, at + n), at + n + sizes.n_taps - 1
                out = native(rows[at:end], gate[own], write[own], decay[own], state, state)
                digest.update(out.numpy().tobytes())
                at += n
        finally:
            torch.set_num_threads(before)
        digest.update(state.numpy().tobytes())
        assert digest.hexdigest()[:16] == BITS[kind], parts


def test_memory_of_another_size_is_refused() -> None:
    kernels = find_kernels({})
    if kernels is None:
        pytest.skip("the library was not built here")
    native = NativeRecurrence(SIZES, PARAMETERS, kernels)
    state = torch.zeros(SIZES.state.recurrent)
    rows, gate = noise(5, SIZES.mixed_width), noise(2, SIZES.value_width)
    small = noise(2, SIZES.n_value_heads)
    native(rows, gate, small, small, state, state)
    for wrong in (
        (rows[:, 1:], gate, small, small, state, state),
        (rows, gate[1:], small, small, state, state),
        (rows, gate, small[1:], small, state, state),
        (rows, gate, small, small.double(), state, state),
        (rows, gate, small, small, state, state[1:]),
        (rows, gate, small, small, state[1:], state),
        (rows[:3], gate[:0], small[:0], small[:0], state, state),
    ):
        with pytest.raises(ValueError, match="library"):
            native(*wrong)
