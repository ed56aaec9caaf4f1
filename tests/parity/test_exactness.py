"""What is exact (design decision 4): bits that no split, no neighbour and no replay may change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2, make_llama
from support.rings.stage_chain import CPU, Rows, StageChain, even_split, probed, random_prompt
from support.soak import cases

from shardnet.model.kernels.linear import KernelChoice
from shardnet.types import ANY_ROWS, DType, LayerRange

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


@pytest.fixture(scope="module", params=cases([*MAKERS, "gpt_oss", "deepseek_v3"], ["qwen2_moe"]))
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


@pytest.mark.parametrize("family", cases(["llama", "gemma2"], ["qwen3", "gpt_oss", "granite"]))
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(family: str, tmp_path: Path) -> None:
    """As one chunk, as decode steps, and on several stages with another number of threads."""
    folder = make_decoder(tmp_path, family, dtype=torch.bfloat16, num_hidden_layers=N_LAYERS)
    choice = probed(CPU, DType.BFLOAT16, DType.BFLOAT16)
    whole = StageChain.load(folder, [LayerRange(0, N_LAYERS)], choice)
    if whole.stages[0].exact_rows < ANY_ROWS:
        pytest.skip("the library does not compute this on this machine")
    parts = StageChain.load(folder, even_split(N_LAYERS, 3), choice)
    prompt = random_prompt(140, 300)

    def logits(chain: StageChain, slot: int, size: int) -> torch.Tensor:
        return torch.cat(
            [
                chain.step(Rows(slot=slot, position=start, ids=ids, n_sampled=len(ids)))
                for start in range(0, len(prompt), size)
                for ids in [prompt[start : start + size]]
            ]
        )

    expected = logits(whole, 0, len(prompt))
    for slot, size in enumerate((1, 7, 64), start=1):
        assert torch.equal(logits(whole, slot, size), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(logits(parts, 0, 33), expected)
    finally:
        torch.set_num_threads(before)


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
