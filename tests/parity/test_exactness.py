"""What is exact (design decision 4): bits that no split, no neighbour and no replay may change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2, make_llama
from support.models.family_cases import CASES
from support.needs import needs_library
from support.rings.stage_chain import CPU, Rows, StageChain, even_split, probed, random_prompt
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.arithmetic.row_functions import ACTIVATIONS, activated_rows
from shardnet.model.config.model_config import Activation
from shardnet.model.kernels.library import ISA_VARIABLE, native_kernels
from shardnet.model.kernels.linear import KernelChoice
from shardnet.types import ANY_ROWS, Arith, DType, KvDType, LayerRange, SlotId

N_LAYERS = 4
MAKERS: dict[str, Callable[..., Path]] = {"llama": make_llama, "gpt2": make_gpt2}
WITH_EXPERTS: dict[str, Callable[..., Path]] = {
    family: partial(make_decoder, family=family)
    for family in ("qwen2_moe", "gpt_oss", "deepseek_v3")
}
"""What makes rows depend on each other easily: routers, experts, sigmoids, sums."""


@pytest.fixture(scope="module", params=list(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=cases([*MAKERS], list(WITH_EXPERTS)))
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = (MAKERS | WITH_EXPERTS)[request.param]
    return make(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
def choice(request: pytest.FixtureRequest) -> KernelChoice:
    """What this machine computes in when asked for the dtype."""
    return probed(CPU, request.param, None)


def splits() -> list[list[LayerRange]]:
    """Layer by layer, which cuts everywhere, and in three equal parts; then every cut in two."""
    cuts = [[LayerRange(0, k), LayerRange(k, N_LAYERS)] for k in range(1, N_LAYERS)]
    return cases([even_split(N_LAYERS, N_LAYERS), even_split(N_LAYERS, 3)], cuts)


def test_every_split_gives_the_same_bits(folder: Path, choice: KernelChoice) -> None:
    prompts = [random_prompt(length, 300, seed=length) for length in (7, 301)]
    whole = StageChain.load(folder, [LayerRange(0, N_LAYERS)], choice).generate(prompts, 6)
    for ranges in splits():
        parts = StageChain.load(folder, ranges, choice).generate(prompts, 6)
        for expected, logits in zip(whole, parts, strict=True):
            assert torch.equal(logits, expected), f"split {[str(part) for part in ranges]}"


FAMILIES = {case.split("-")[0]: case for case in reversed(CASES)}
"""A case of each family."""
USUAL = [
    *("gemma2", "gpt2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next", "olmo2"),
    *("deepseek_v4", "deepseek_v41_text", "glm5_next_text", "qwen4_exp_text", "hy_v4"),
]
"""Those that are least alike."""


HEADS: dict[str, dict[str, Any]] = {
    "llama-20": {"head_dim": 20},
    "gemma2-22": CASES["gemma2"] | {"head_dim": 22},
    "qwen2-24": {"head_dim": 24},
    "gpt_oss-72": {"head_dim": 72},
    "deepseek_v3": CASES["deepseek_v3"],
}
"""Heads, and latents, of columns that are no whole groups in int8."""
ARITHS = [Arith.PORTABLE, Arith.FAST]
IN_TURNS = [(case, ARITHS[place % 2]) for place, case in enumerate(HEADS)]


@contextmanager
def instruction_set(name: str, n_threads: int) -> Iterator[None]:
    """Have the library compute so."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ISA_VARIABLE, name)
        native_kernels.cache_clear()
        try:
            yield
        finally:
            torch.set_num_threads(before)
            patch.undo()
            native_kernels.cache_clear()


@needs_library
@pytest.mark.parametrize("family", cases(USUAL, sorted({*FAMILIES, "llama", "gpt2"} - set(USUAL))))
@pytest.mark.parametrize("stored", cases([torch.bfloat16], [torch.float32, torch.float16]))
@pytest.mark.parametrize("arith", [Arith.PORTABLE, Arith.FAST], ids=lambda arith: arith.value)
def test_every_family_has_the_same_bits_however_it_is_computed(
    family: str, stored: torch.dtype, arith: Arith, tmp_path: Path
) -> None:
    """Portable arithmetic on every instruction set, what a CPU does with pairs on its own."""
    if family == "gpt2":
        folder = make_gpt2(tmp_path, dtype=stored)
    else:
        case = CASES[FAMILIES[family]] if family in FAMILIES else {}
        folder = make_decoder(tmp_path, family, dtype=stored, **case)
    check_bits(folder, stored, arith)


@needs_library
def test_routers_in_float32_are_as_portable_as_the_rest(tmp_path: Path) -> None:
    """Loaded without vectors, too, where torch would compute in float32 if it might."""
    folder = make_decoder(tmp_path, "deepseek_v3", **CASES["deepseek_v3"] | {"hidden_size": 1056})
    choice = probed(CPU, DType.FLOAT32, None, arith=Arith.PORTABLE)
    layers = [LayerRange(0, Checkpoint.open(folder).config.n_layers)]
    made = []
    for name in ("", "portable"):
        with instruction_set(name, 1):
            made.append(StageChain.load(folder, layers, choice).prefill(0, random_prompt(50, 290)))
    assert torch.equal(*made)


@needs_library
@pytest.mark.parametrize(
    ("case", "arith"),
    cases(IN_TURNS, [each for each in itertools.product(HEADS, ARITHS) if each not in IN_TURNS]),
)
def test_keys_and_values_in_int8_too_whatever_the_heads(
    case: str, arith: Arith, tmp_path: Path
) -> None:
    stored = torch.bfloat16
    folder = make_decoder(tmp_path, case.split("-")[0], dtype=stored, **HEADS[case])
    check_bits(folder, stored, arith, KvDType.INT8)


@needs_library
@pytest.mark.parametrize("case", HEADS)
def test_keys_and_values_held_in_bfloat16_too_whatever_the_heads(case: str, tmp_path: Path) -> None:
    """As CPUs with instructions for bfloat16 compute files of quantised weights."""
    stored = torch.bfloat16
    folder = make_decoder(tmp_path, case.split("-")[0], dtype=stored, **HEADS[case])
    check_bits(folder, stored, Arith.PORTABLE, held=DType.BFLOAT16)


def check_bits(
    folder: Path,
    stored: torch.dtype,
    arith: Arith,
    kv_dtype: KvDType = KvDType.AUTO,
    held: DType | None = None,
) -> None:
    """In chunks of all sizes, on several stages, beside others, with other threads and sets."""
    dtype = DType(str(stored).removeprefix("torch."))
    choice = replace(probed(CPU, dtype, dtype, arith=arith), held_dtype=held)
    is_portable = arith is Arith.PORTABLE
    if not is_portable and choice.name != "native bfloat16":
        pytest.skip("this machine computes portably, or by torch where it may")
    n_layers = Checkpoint.open(folder).config.n_layers
    prompt = random_prompt(150, 300)

    def rows(start: int, end: int, slot: int = 0) -> Rows:
        return Rows(slot=slot, position=start, ids=prompt[start:end], n_sampled=end - start)

    with instruction_set("", 1):
        chain = StageChain.load(folder, [LayerRange(0, n_layers)], choice, kv_dtype=kv_dtype)
        assert chain.stages[0].exact_rows == ANY_ROWS
        expected = chain.step(rows(0, 150))
    with instruction_set("avx2" if is_portable else "", 3):
        chain = StageChain.load(folder, even_split(n_layers, n_layers), choice, kv_dtype=kv_dtype)
        cuts = [0, 64, *range(71, 110, 7), *range(107, 112), 149]
        pieces = [*itertools.pairwise(cuts)][1:]
        got = [chain.step(rows(0, 33, slot=1), rows(0, cuts[1]))[33:]]
        got += [chain.step(rows(start, end)) for start, end in pieces]
        assert torch.equal(torch.cat(got), expected[:149])
        few = [rows(33, 34, slot=1), rows(0, 7, slot=2), rows(0, 1, slot=3)]
        beside = chain.step(few[0], rows(149, 150), *few[1:])  # one that chooses, where any does
        wanted = [expected[33:34], expected[149:], expected[:7], expected[:1]]
        assert torch.equal(beside, torch.cat(wanted))
        has_states = any(stage.kv.has_states for stage in chain.stages)
        if not has_states:  # a prefix is reused, and its last rows overwritten
            for stage in chain.stages:
                stage.kv.copy(SlotId(0), SlotId(4), 140)
            assert torch.equal(chain.step(rows(131, 136, slot=4)), expected[131:136])
    if not is_portable:
        return
    with instruction_set("portable", 2):
        chain = StageChain.load(folder, [LayerRange(0, n_layers)], choice, kv_dtype=kv_dtype)
        assert torch.equal(chain.step(rows(0, 60)), expected[:60])


def test_a_row_keeps_its_bits_in_any_batch(any_folder: Path, choice: KernelChoice) -> None:
    """Decode rows of several sequences in one micro-batch, against each sequence alone."""
    n_sequences = min(choice.exact_rows, 9)
    prompts = [random_prompt(3 + 5 * i, 300, seed=i) for i in range(n_sequences)]
    chain = StageChain.load(any_folder, [LayerRange(0, N_LAYERS)], choice)
    together = chain.generate(prompts, 4)
    for stage in chain.stages:
        for slot in range(n_sequences):
            stage.kv.free(slot)  # type: ignore[arg-type]
    for prompt, expected in zip(prompts, together, strict=True):
        (alone,) = chain.generate([prompt], 4)
        assert torch.equal(alone, expected)


def test_verification_rows_have_the_bits_of_decode_steps(
    folder: Path, choice: KernelChoice
) -> None:
    """Five rows of one sequence at once, as speculation sends them, against one by one."""
    if choice.exact_rows < 5:
        pytest.skip("this machine computes single rows exactly only: speculation is off")
    prompt, drafts = random_prompt(40, 300), random_prompt(5, 300, seed=9)
    chain = StageChain.load(folder, [LayerRange(0, N_LAYERS)], choice)
    chain.prefill(0, prompt)
    one_by_one = [
        chain.step(Rows(slot=0, position=40 + i, ids=[token], n_sampled=1))
        for i, token in enumerate(drafts)
    ]
    at_once = chain.step(Rows(slot=0, position=40, ids=drafts, n_sampled=5))  # overwrites them
    assert torch.equal(at_once, torch.cat(one_by_one))


def test_rewinding_is_overwriting(folder: Path, choice: KernelChoice) -> None:
    """Wrong draft rows leave no trace once their positions are written again."""
    prompt = random_prompt(40, 300)
    chain = StageChain.load(folder, even_split(N_LAYERS, 2), choice)
    row = Rows(slot=0, position=40, ids=[5], n_sampled=1)
    chain.prefill(0, prompt)
    expected = chain.step(row)
    chain.step(Rows(slot=0, position=40, ids=[9, 9, 9], n_sampled=3))
    assert torch.equal(chain.step(row), expected)


@needs_library
@pytest.mark.parametrize("kind", list(ACTIVATIONS), ids=lambda kind: kind.value)
def test_numbers_of_any_size_are_activated_alike_by_any_instruction_set(kind: Activation) -> None:
    size = 10.0 ** torch.linspace(-38, 38, 77)
    rows = torch.cat((size, -size, torch.tensor([0.0, -0.0, torch.inf])))[None]
    found = []
    for name in ("portable", "avx2", "avx512"):
        with instruction_set(name, 1):
            found.append(activated_rows(kind, rows))
    for made in found:
        assert made is not None
        assert torch.equal(made.view(torch.int32), found[0].view(torch.int32))
        assert made.isfinite()[0, :-1].all()
