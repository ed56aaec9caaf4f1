"""Sub-layers by the compiled library, against the same sub-layers by torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES, ODD
from support.needs import needs_library
from support.rings.stage_chain import CPU, Rows, StageChain, random_prompt
from support.soak import cases, examples
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.cache.kv_quantization import quantize_rows
from shardnet.model.config.model_config import Activation
from shardnet.model.fused import decoder
from shardnet.model.fused.attention import NativeAttention, NativeMlp
from shardnet.model.fused.experts import NativeExperts
from shardnet.model.fused.layers import NativeSublayers
from shardnet.model.kernels.library import NativeKernels, find_kernels
from shardnet.model.kernels.linear import Kernel, KernelChoice, probe
from shardnet.model.kernels.panel_linear import PanelLinear, float_linear
from shardnet.model.layers import attention as torch_attention
from shardnet.model.layers.attention import ForwardStep, plan_step
from shardnet.model.layers.decoder_layer import AttentionSublayer, Layer, MlpSublayer, Residual
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.native_attention import AttentionKind, can_attend
from shardnet.model.layers.norms import HeadNorm, Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.types import (
    DType,
    Epoch,
    KvDType,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    kv_groups,
)

pytestmark = needs_library
ISAS = ("portable", "avx2", "")
DTYPES = (torch.float32, torch.bfloat16)
WIDTH, INNER = 40, 72

SUBLAYERS_BY_FAMILY = {
    "mistral": (True, True),
    "mistral-odd": (True, True),
    "qwen2": (True, True),
    "qwen3": (True, True),
    "phi3-partial-tied": (True, True),
    "gemma2": (True, True),
    "gemma2-no-caps": (True, True),
    "gemma3_text": (True, True),
    "granite": (True, True),
    "olmo2": (False, True),
    "mixtral": (True, True),
    "gpt_oss": (True, True),
    "deepseek_v2": (False, True),
    "afmoe": (True, True),
    "lfm3-bias-untied": (True, True),
    "laguna": (True, True),
    "granite_swa": (True, True),
    "flint": (True, True),
    "sarvam_moe": (True, True),
    "minicpm3": (False, True),
}
"""Families whose first layer has its attention, its MLP computed by the library."""
FLOAT_ROUTERS = ["flint"]
"""Whose router computes in float32, which torch does where that is faster: then not so the MLP."""
IN_INT8 = ["mistral-odd", "phi3-partial-tied", "gemma2", "olmo2", "gpt_oss", "deepseek_v2"]
IN_BFLOAT16 = [
    "laguna",
    "afmoe",
    "lfm3-bias-untied",
    "mistral-odd",
    "phi3-partial-tied",
    "gemma2",
    "olmo2",
    "gpt_oss",
    "deepseek_v2",
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kernels_named(name: str) -> NativeKernels:
    found = find_kernels({"SHARDNET_ISA": name})
    assert found is not None
    return found


def native(dtype: DType) -> KernelChoice:
    return KernelChoice(dtype=dtype, kernel=Kernel.NATIVE, exact_rows=32, min_rows=1)


def chains(folder: Path, choice: KernelChoice, kv_dtype: KvDType) -> tuple[StageChain, StageChain]:
    """The model with sub-layers by the library and by torch, the linears by the library in both."""
    whole = [LayerRange(0, Checkpoint.open(folder).config.n_layers)]
    ours = StageChain.load(folder, whole, choice, kv_dtype=kv_dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "native_kernels", lambda: None)
        theirs = StageChain.load(folder, whole, choice, kv_dtype=kv_dtype)
    return ours, theirs


@contextmanager
def attention_by_torch() -> Iterator[None]:
    """What the library computes is compared with this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "native_attend", lambda *arguments: None)
        yield


def batches() -> Iterator[tuple[Rows, ...]]:
    """Prompts in chunks, decode rows, several rows of a slot, and all of them together."""

    def rows(slot: int, position: int, n_rows: int) -> Rows:
        ids = random_prompt(n_rows, 300, seed=100 * slot + position)
        return Rows(slot=slot, position=position, ids=ids, n_sampled=n_rows)

    yield (rows(0, 0, 270),)
    yield (rows(1, 0, 5), rows(2, 0, 1))
    yield (rows(0, 270, 1), rows(1, 5, 1), rows(2, 1, 17))
    yield (rows(1, 6, 40), rows(0, 271, 3), rows(2, 18, 1), rows(3, 0, 33))
    yield (rows(0, 274, 1), rows(3, 33, 32))


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    cases(
        [*product(SUBLAYERS_BY_FAMILY, [KvDType.AUTO]), *product(IN_INT8, [KvDType.INT8])],
        [(family, KvDType.INT8) for family in SUBLAYERS_BY_FAMILY if family not in IN_INT8],
    ),
)
def test_every_family_computes_what_torch_does(
    family: str, kv_dtype: KvDType, tmp_path: Path
) -> None:
    folder = make_decoder(
        tmp_path, family.split("-")[0], dtype=torch.bfloat16, **{"seed": 3} | CASES[family]
    )
    ours, theirs = chains(folder, native(DType.FLOAT32), kv_dtype)
    layer = ours.stages[0].family._layers[0][0]  # type: ignore[attr-defined]
    by_library = isinstance(layer.mlp, NativeMlp | NativeExperts)
    computed = (isinstance(layer.attention, NativeAttention), by_library)
    of_attention, of_mlp = SUBLAYERS_BY_FAMILY[family]
    if family in FLOAT_ROUTERS:
        of_mlp = probe(torch.device("cpu"), DType.FLOAT32, None).kernel is Kernel.NATIVE
    assert computed == (of_attention, of_mlp)
    for groups in batches():
        logits = ours.step(*groups)
        with attention_by_torch():
            want = theirs.step(*groups)
        if kv_dtype is KvDType.AUTO:
            torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)
        else:  # a difference in the last place moves some keys to the next step
            assert (logits - want).square().mean() < 1e-4 * want.square().mean()


@pytest.mark.parametrize(
    "family",
    cases(IN_BFLOAT16, [family for family in SUBLAYERS_BY_FAMILY if family not in IN_BFLOAT16]),
)
def test_bfloat16_is_no_further_from_the_truth(family: str, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path, family.split("-")[0], dtype=torch.bfloat16, **CASES[family])
    ours, theirs = chains(folder, native(DType.BFLOAT16), KvDType.AUTO)
    _, exact = chains(folder, native(DType.FLOAT32), KvDType.AUTO)
    error = reference = torch.zeros(())
    for groups in batches():
        with attention_by_torch():
            want, rounded = exact.step(*groups), theirs.step(*groups)
        error = error + (ours.step(*groups) - want).square().sum()
        reference = reference + (rounded - want).square().sum()
    assert error <= 1.3**2 * reference


def with_native_sublayers(layer: Layer, kernels: NativeKernels | None) -> Layer:
    return NativeSublayers.of(layer, kernels).replace_in(layer)


def layer_by_torch(
    name: str,
    *,
    size: int = 8,
    heads: tuple[int, int] = (6, 2),
    activation: Activation = Activation.SILU,
    window: int | None = None,
    norms: torch.dtype = torch.float32,
    kind: AttentionKind | None = None,
) -> Layer:
    """A layer with norms everywhere, whose linears are the library's for an instruction set."""
    n_heads, n_kv_heads = heads

    def linear(n_out: int, n_in: int, seed: int) -> PanelLinear:
        weight = numbers(n_out, n_in, seed=seed) / n_in**0.5
        return float_linear([weight.bfloat16()], numbers(n_out, seed=seed), kernels_named(name))

    def norm(width: int, seed: int) -> Norm:
        return Norm(weight=numbers(width, seed=seed).to(norms), bias=None, eps=1e-5)

    qk_norm = HeadNorm.join(norm(size, 5), norm(size, 6), n_heads, n_kv_heads)
    return Layer(
        attention=AttentionSublayer(
            residual=Residual(before=norm(WIDTH, 1), after=norm(WIDTH, 2), multiplier=0.3),
            self_attn=SelfAttention(
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_size=size,
                kind=kind or AttentionKind(window=window),
                qkv_proj=linear((n_heads + 2 * n_kv_heads) * size, WIDTH, 7),
                o_proj=linear(WIDTH, n_heads * size, 8),
                qk_norm=qk_norm,
            ),
        ),
        mlp=MlpSublayer(
            residual=Residual(before=norm(WIDTH, 3), after=norm(WIDTH, 4)),
            mlp=GatedMlp(
                activation=activation,
                gate_up_proj=linear(2 * INNER, WIDTH, 9),
                down_proj=linear(WIDTH, INNER, 10),
            ),
        ),
    )


def group(slot: int, position: int, n_rows: int) -> RowGroup:
    return RowGroup(
        sequence_id=SequenceId(slot),
        slot=SlotId(slot),
        position=position,
        n_rows=n_rows,
        n_sampled=n_rows,
    )


class Runner:
    """One layer and its KV cache."""

    def __init__(
        self,
        layer: Layer,
        size: int,
        n_kv_heads: int,
        dtype: torch.dtype,
        kv_dtype: KvDType = KvDType.AUTO,
        held: torch.dtype | None = None,
    ) -> None:
        attention = layer.attention
        own = attention._own if isinstance(attention, NativeAttention) else attention.self_attn  # type: ignore[attr-defined]
        self.window = own.kind.window
        self.layer = layer
        self.dtype = dtype
        self.kv = KvCache(
            1,
            n_kv_heads,
            size,
            dtype,
            CPU,
            64,
            windows=(self.window,),
            kv_dtype=kv_dtype,
            held=held,
        )
        angles = torch.outer(torch.arange(2000.0), 0.5 ** torch.arange(size // 2))
        self.table = Rotary(
            cos=torch.cat((angles.cos(), angles.cos()), -1).unsqueeze(1).to(dtype),
            sin=torch.cat((-angles.sin(), angles.sin()), -1).unsqueeze(1).to(dtype),
        )

    def step(self, *groups: RowGroup) -> ForwardStep:
        n_rows = sum(g.n_rows for g in groups)
        batch = MicroBatch(
            epoch=Epoch(1), step=StepId(1), groups=groups, token_ids=tuple(range(n_rows))
        )
        return plan_step(batch, self.kv, 2000, self.dtype)

    def run(self, hidden: Tensor, *groups: RowGroup) -> Tensor:
        step = self.step(*groups)
        by_torch = isinstance(self.layer.attention, AttentionSublayer)
        with attention_by_torch() if by_torch else nullcontext():
            return self.layer(hidden.to(self.dtype), 0, self.table.at(step.positions), step)


SHAPES = [(8, (6, 2)), (64, (9, 1)), (128, (2, 2)), (22, (20, 2))]
EACH_SHAPE = [*product(ISAS, DTYPES, SHAPES)]
USUAL_SHAPES = [
    (name, DTYPES[(place + other) % 2], shape)
    for place, name in enumerate(ISAS)
    for other, shape in enumerate(SHAPES)
]
"""Each shape for each instruction set, in one dtype and the other in turns."""


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    cases(USUAL_SHAPES, [each for each in EACH_SHAPE if each not in USUAL_SHAPES]),
)
def test_every_instruction_set_computes_what_torch_does(
    name: str, dtype: torch.dtype, shape: tuple[int, tuple[int, int]]
) -> None:
    size, heads = shape
    plain = layer_by_torch(name, size=size, heads=heads, norms=dtype)
    ours = with_native_sublayers(plain, kernels_named(name))
    assert isinstance(ours.attention, NativeAttention)
    assert isinstance(ours.mlp, NativeMlp)
    runners = [Runner(layer, size, heads[1], dtype) for layer in (ours, plain)]
    for groups in (
        (group(0, 0, 120),),
        (group(1, 0, 7), group(0, 120, 1)),
        *((group(0, 121 + n, 1), group(1, 7 + n, 1)) for n in range(30)),
        (group(0, 151, 2), group(2, 0, 40)),
    ):
        n_rows = sum(g.n_rows for g in groups)
        hidden = numbers(n_rows, WIDTH, seed=n_rows)
        out, want = (runner.run(hidden, *groups) for runner in runners)
        tolerance = 2e-5 if dtype is torch.float32 else 4e-2
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU_NEW, Activation.RELU]
)
@pytest.mark.parametrize("name", ISAS)
def test_activations_hold_for_any_numbers(name: str, activation: Activation) -> None:
    plain = layer_by_torch(name, activation=activation)
    plain = replace(plain, mlp=replace(plain.mlp, residual=Residual()))  # type: ignore[type-var]
    ours = with_native_sublayers(plain, kernels_named(name))
    runners = [Runner(layer, 8, 2, torch.float32) for layer in (ours, plain)]
    for scale in (0.0, 1e-20, 1.0, 30.0, 1e4):
        hidden = numbers(9, WIDTH, seed=4) * scale
        steps = [runner.step(group(0, 0, 9)) for runner in runners]
        out, want = (
            runner.layer.mlp(hidden, 0, runner.table, step)
            for runner, step in zip(runners, steps, strict=True)
        )
        spread = float(want.abs().max())
        torch.testing.assert_close(out, want, rtol=0, atol=3e-6 * spread)


def test_an_activation_that_the_library_has_not_stays_torchs() -> None:
    plain = layer_by_torch("", activation=Activation.GELU)
    ours = with_native_sublayers(plain, kernels_named(""))
    assert isinstance(ours.attention, NativeAttention)
    assert ours.mlp is plain.mlp
    assert with_native_sublayers(plain, None) is plain


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so_in_its_row_alone(name: str, bad: float) -> None:
    """The head looks at logits: a row that went wrong must not come out as a number."""
    for dtype in (torch.float32, torch.bfloat16):
        runner = Runner(
            with_native_sublayers(layer_by_torch(name), kernels_named(name)), 8, 2, dtype
        )
        hidden = numbers(5, WIDTH)
        hidden[3, 7] = bad
        out = runner.run(hidden, *(group(slot, 0, 1) for slot in range(5)))
        assert out[3].isnan().all()
        assert out[[0, 1, 2, 4]].isfinite().all()


@settings(max_examples=examples(6), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 5, 300]),
    is_wide=st.booleans(),
    n_threads=st.sampled_from([1, 2]),
)
def test_a_row_has_the_same_bits_in_any_batch(
    lengths: list[int], window: int | None, is_wide: bool, n_threads: int
) -> None:
    """Alone or beside others, in one frame or row by row, with a prompt chunk or without."""
    dtype = torch.float32 if is_wide else torch.bfloat16
    for name in ISAS:
        layer = with_native_sublayers(layer_by_torch(name, window=window), kernels_named(name))
        runners = [Runner(layer, 8, 2, dtype) for _ in range(3)]
        rows = [numbers(n, WIDTH, seed=slot) for slot, n in enumerate(lengths)]
        groups = [group(slot, 0, n) for slot, n in enumerate(lengths)]
        threads_before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        try:
            together = runners[0].run(torch.cat(rows), *groups)
            chunk = numbers(40, WIDTH, seed=9)
            beside = runners[1].run(torch.cat([*rows, chunk]), *groups, group(9, 0, 40))
        finally:
            torch.set_num_threads(threads_before)
        alone = [
            runners[2].run(row[None], group(slot, position, 1))
            for slot, own in enumerate(rows)
            for position, row in enumerate(own)
        ]
        assert torch.equal(together, torch.cat(alone))
        assert torch.equal(beside[: len(together)], together)


KINDS = {
    "plain": AttentionKind(),
    "window": AttentionKind(window=150),
    "small window": AttentionKind(window=3),
    "caps": AttentionKind(soft_cap=2.0),
    "sinks": AttentionKind(window=200, sinks=numbers(2, 3, 1)),
}

EACH_WAY = [*product(KINDS, DTYPES, KvDType)]
USUAL_WAYS = [
    (kind, dtype, kv_dtype)
    for place, kind in enumerate(KINDS)
    for dtype, kv_dtype in zip(DTYPES, [*KvDType][:: 1 - 2 * (place % 2)], strict=True)
]
"""Each kind in both dtypes, once with keys as they are and once in int8, in turns."""


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_dtype"),
    cases(USUAL_WAYS, [way for way in EACH_WAY if way not in USUAL_WAYS]),
)
def test_a_position_has_the_same_bits_in_any_chunk_on_any_machine(
    kind: str, dtype: torch.dtype, kv_dtype: KvDType
) -> None:
    """Prompts of 300 in chunks of several sizes and as decode steps; instruction sets, threads."""
    prompt, size = numbers(300, WIDTH), 32
    before = torch.get_num_threads()
    layers = [
        with_native_sublayers(
            layer_by_torch(name, size=size, kind=KINDS[kind]), kernels_named(name)
        )
        for name in ("portable", "avx2", "avx512")  # pairs of bfloat16 add in another order
    ]
    results = []
    try:
        for place, rows in enumerate((300, 1, 7, 64, 256)):
            torch.set_num_threads(1 + place % 3)
            runner = Runner(layers[place % len(layers)], size, 2, dtype, kv_dtype)
            parts = [
                runner.run(part, group(0, place * rows, len(part)))
                for place, part in enumerate(prompt.split(rows))
            ]
            slot = [stored[:, :300].clone() for stored in runner.kv.layer(SlotId(0), 0)]
            results.append((torch.cat(parts), *slot))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


WINDOWS = (None, 20, 300)
IN_TURNS = [*zip(ISAS, WINDOWS, strict=True)]


@pytest.mark.parametrize(
    ("name", "window"),
    cases(IN_TURNS, [each for each in product(ISAS, WINDOWS) if each not in IN_TURNS]),
)
def test_a_slot_is_read_where_it_is_after_it_has_moved(name: str, window: int | None) -> None:
    """It grows in blocks, gives up what its window does not see, and shares blocks with a copy."""
    plain = layer_by_torch(name, window=window)
    ours = with_native_sublayers(plain, kernels_named(name))
    runners = [Runner(layer, 8, 2, torch.float32) for layer in (ours, plain)]
    for position in range(0, 1500, 250):
        hidden = numbers(250, WIDTH, seed=position)
        for runner in runners:
            runner.run(hidden, group(0, position, 250))
    for runner in runners:
        runner.kv.copy(SlotId(0), SlotId(1), 1400)
        assert runner.kv.blocks_used == 6 + 1
        hidden = numbers(8, WIDTH, seed=1400)
        of_both = [runner.run(hidden, group(slot, 1400, 8)) for slot in (0, 1)]
        assert torch.equal(*of_both)
        runner.kv.free(SlotId(0))
    for position in range(1400, 1440, 8):
        hidden = numbers(8, WIDTH, seed=position)
        out, want = (runner.run(hidden, group(1, position, 8)) for runner in runners)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, WIDTH - 1), torch.float32), ((5, WIDTH), torch.float16), ((4, WIDTH), torch.float32)],
    ids=["width", "dtype", "rows"],
)
def test_rows_that_the_library_would_misread_are_refused(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """It is told addresses, and would read and write beyond what is there."""
    layer = with_native_sublayers(layer_by_torch(""), kernels_named(""))
    runner = Runner(layer, 8, 2, torch.float32)
    step = runner.step(group(0, 0, 5))
    rotary = runner.table.at(step.positions)
    with pytest.raises(ValueError, match=r"rows|does not compute"):
        layer.attention(torch.zeros(shape, dtype=dtype), 0, rotary, step)
    if shape[0] == 5:
        with pytest.raises(ValueError, match=r"rows|does not compute"):
            layer.mlp(torch.zeros(shape, dtype=dtype), 0, rotary, step)


def test_a_step_of_other_rows_or_layers_is_refused() -> None:
    """The library looks rows up in the step's spans, and layers in its slots."""
    layer = with_native_sublayers(layer_by_torch(""), kernels_named(""))
    runner = Runner(layer, 8, 2, torch.float32)
    step = runner.step(group(0, 0, 5))
    hidden, rotary = torch.zeros(4, WIDTH), runner.table.at(step.positions[:4])
    with pytest.raises(ValueError, match="the step"):
        layer.attention(hidden, 0, rotary, step)
    hidden, rotary = torch.zeros(5, WIDTH), runner.table.at(step.positions)
    with pytest.raises(ValueError, match="the step"):
        layer.attention(hidden, 7, rotary, step)


def test_parts_of_another_shape_are_refused() -> None:
    plain = layer_by_torch("")
    first, second = plain.attention, plain.mlp
    assert isinstance(first, AttentionSublayer)
    assert isinstance(second, MlpSublayer)
    assert isinstance(first.self_attn, SelfAttention)
    short = Residual(before=Norm(weight=torch.ones(WIDTH - 1), bias=None, eps=1e-6))
    more_heads = replace(first.self_attn, n_heads=2 * first.self_attn.n_heads)
    turned = replace(second.mlp, gate_up_proj=second.mlp.down_proj)
    for wrong, words in (
        (replace(plain, attention=replace(first, residual=short)), "a norm"),
        (replace(plain, attention=replace(first, self_attn=more_heads)), "o_proj"),
        (replace(plain, mlp=replace(second, mlp=turned)), "gate_up_proj"),
    ):
        with pytest.raises(ValueError, match=words):
            with_native_sublayers(wrong, kernels_named(""))


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 20, 22, 64, 72, 96])
def test_keys_are_quantized_to_torchs_bytes(name: str, dtype: torch.dtype, size: int) -> None:
    """And what is no number shows in its group alone; behind the last column are zeros."""
    layer = layer_by_torch(name, size=size, norms=dtype)
    ours = with_native_sublayers(layer, kernels_named(name))
    plain, quantized = (Runner(ours, size, 2, dtype, kv_dtype) for kv_dtype in KvDType)
    hidden = numbers(40, WIDTH) * torch.logspace(-40, 3, 40)[:, None]
    hidden[7] = 0
    for row, bad in ((11, float("nan")), (12, float("inf")), (13, -float("inf"))):
        hidden[row, 3] = bad
    for begin, end in ((0, 33), (33, 40)):  # a chunk, then rows
        for runner in (plain, quantized):
            runner.run(hidden[begin:end], group(0, begin, end - begin))
    for own, want in zip(
        quantized.kv.layer(SlotId(0), 0), plain.kv.layer(SlotId(0), 0), strict=True
    ):
        assert own.dtype is torch.int8
        quantized_by_torch = quantize_rows(want[:, :40])
        n_groups, columns = kv_groups(size)
        end = n_groups * columns
        assert torch.equal(own[:, :40, :end], quantized_by_torch[..., :end])
        assert not own[:, :40, size:end].any()
        scales, wanted = (  # of what is no number the bits are anybody's
            rows[..., end:].contiguous().view(torch.bfloat16)
            for rows in (own[:, :40], quantized_by_torch)
        )
        torch.testing.assert_close(scales, wanted, rtol=0, atol=0, equal_nan=True)
        assert scales.isnan().any()


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("size", [8, 20, 22, 24, 32, 64, 72])
def test_quantized_keys_are_attended_as_torch_does(name: str, size: int) -> None:
    plain = layer_by_torch(name, size=size)
    ours = with_native_sublayers(plain, kernels_named(name))
    assert can_attend(size, KvCache(1, 2, size, torch.float32, CPU, 1, kv_dtype=KvDType.INT8))
    runners = [Runner(layer, size, 2, torch.float32, KvDType.INT8) for layer in (ours, plain)]
    for groups in ((group(0, 0, 20),), (group(0, 20, 100), group(1, 0, 3)), (group(0, 120, 19),)):
        n_rows = sum(g.n_rows for g in groups)
        hidden = numbers(n_rows, WIDTH, seed=n_rows)
        out, want = (runner.run(hidden, *groups) for runner in runners)
        assert (out - want).square().mean() < 1e-5 * want.square().mean()


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("size", [8, 20, 22, 64])
def test_keys_held_in_bfloat16_are_stored_and_attended_as_torch_does(name: str, size: int) -> None:
    plain = layer_by_torch(name, size=size)
    ours = with_native_sublayers(plain, kernels_named(name))
    held = torch.bfloat16
    runners = [Runner(layer, size, 2, torch.float32, held=held) for layer in (ours, plain)]
    for groups in ((group(0, 0, 20),), (group(0, 20, 100), group(1, 0, 3)), (group(0, 120, 19),)):
        n_rows = sum(g.n_rows for g in groups)
        hidden = numbers(n_rows, WIDTH, seed=n_rows)
        out, want = (runner.run(hidden, *groups) for runner in runners)
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    stored, by_torch = (runner.kv.layer(SlotId(0), 0) for runner in runners)
    for mine, other in zip(stored, by_torch, strict=True):
        assert mine.dtype is torch.bfloat16
        rows = slice(0, 139)
        assert (mine[:, rows] == other[:, rows]).float().mean() > 0.99  # float32 differs in ulps


def test_odd_sizes_are_among_the_families() -> None:
    assert ODD.items() <= CASES["mistral-odd"].items()


@pytest.mark.parametrize("kv_dtype", list(KvDType), ids=lambda d: d.value)
def test_values_in_other_groups_than_keys_are_left_to_torch(kv_dtype: KvDType) -> None:
    """In int8 24 columns are one group of 32, and 16 one of 16."""
    kv = KvCache(1, 2, 24, torch.float32, CPU, 1, value_size=16, kv_dtype=kv_dtype)
    assert can_attend(24, kv, 16) is (kv_dtype is KvDType.AUTO)
