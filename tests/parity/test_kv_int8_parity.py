"""Families with keys and values in int8: the maths, what rounding costs, and that nothing else may.

The logits are those of transformers given our rounded keys and values, which lie within half a step
of its own: a number near the middle of two steps may go to either, so they are not rounded twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2
from support.models.family_cases import CASES as FLOAT_CASES
from support.models.family_cases import SELDOM
from support.oracles.oracle import FLOAT32_TOLERANCE, made_reference, reference_logits
from support.oracles.plain_kv import plain_groups, plain_restored, plain_scale
from support.rings.stage_chain import CPU, Rows, StageChain, even_split, probed, random_prompt
from support.soak import cases
from torch import Tensor
from transformers import DynamicCache

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.registry import FAMILIES
from shardnet.model.kernels.linear import Kernel, KernelChoice
from shardnet.types import DType, KvDType, SlotId

WINDOWS = {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 20}
CASES: dict[str, dict[str, Any]] = {
    # plain formulas take no keys and values that were made elsewhere
    **{family: {} for family in FAMILIES if family != "deepseek_v41_text"},
    "mistral": {"sliding_window": 20, "head_dim": 8},
    "gemma2": WINDOWS,
    "gemma3_text": WINDOWS | {"num_hidden_layers": 7},
    "gpt_oss": {"sliding_window": 20},
    "llama-wide": {"head_dim": 70, "num_hidden_layers": 2},
    "llama-odd": {"head_dim": 34, "num_hidden_layers": 2},
    "llama-20": {"head_dim": 20},
    "llama-22": {"head_dim": 22},
    "qwen2_moe-24": {"head_dim": 24},
    "youtu": {"pad_token_id": None},  # transformers makes zeros of the head's row of padding
}
OWN_WAYS = (
    *("llama", "llama-wide", "llama-odd", "llama-20", "llama-22", "qwen2_moe-24", "gpt2"),
    *("gpt_oss", "gemma3_text", "phi3", "deepseek_v2", "deepseek_v3", "deepseek_v32", "youtu"),
    *("llama4_text", "qwen3_next", "mimo_v2_flash", "kimi_linear", "falcon_h1", "gemma4_text"),
)
"""Sizes of heads, windows, sinks, latents, rows that are chosen, pairs, states beside."""
IN_FLOATS = {case.split("-")[0] for case in FLOAT_CASES if case not in SELDOM}
"""Families that test_family_parity.py has in the suite."""
USUAL = [case for case in CASES if case in OWN_WAYS or case not in IN_FLOATS]
ERROR, ERROR_WITH_EXPERTS = 0.04, 0.3
"""How far rounding moves the logits of these random models at most, as a share of their size. With
experts some rows visit others."""


def make(folder: Path, case: str, **more: Any) -> Path:
    family = case.split("-")[0]
    if family == "gpt2":
        return make_gpt2(folder)
    return make_decoder(folder, family, **CASES[case] | more)


def load(folder: Path, n_stages: int = 1, choice: KernelChoice | None = None) -> StageChain:
    n_layers = Checkpoint.open(folder).config.n_layers
    return StageChain.load(folder, even_split(n_layers, n_stages), choice, kv_dtype=KvDType.INT8)


class GivenCache(DynamicCache):
    """Answers with the keys and values of a stage's cache, and holds them against what comes."""

    def __init__(self, chain: StageChain, config: ModelConfig, theirs: Any) -> None:
        has_layers = config.has_state or config.indexer
        super().__init__(config=theirs if has_layers else None)
        self.kv = chain.stages[0].kv
        self.config = config

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """[1, KV heads, T, D] each; of latents [1, 1, T, L] and [1, 1, T, R]."""
        super().update(keys, values, layer)
        given = list(self.kv.layer(SlotId(0), layer))
        own = [keys, values]
        if self.config.latent is not None:
            own, given = [torch.cat((keys, self._halves(values)), -1)], given[:1]
        is_paired = self.config.has_pairs
        if self.config.family == "llama4_text":
            is_paired = layer not in self.config.nope_layers
        if is_paired:
            own[0] = self._halves(keys)
        kept = []
        for theirs, packed in zip(own, given, strict=True):
            ours = plain_restored(packed[:, : theirs.shape[2]], theirs.shape[3])
            _check_near(theirs[0], ours)
            kept.append(ours[None])
        if self.config.latent is None:
            return self._pairs(kept[0]) if is_paired else kept[0], kept[1]
        rank = self.config.latent.rank
        return kept[0][..., :rank], self._pairs(kept[0][..., rank:])

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """[1, T, D]: what positions are chosen by, which stands in the place of values.

        GLM-5.3's have a mark of padding behind them.
        """
        super().update_indexer(keys, layer)
        assert self.config.indexer is not None
        own, mark = keys.tensor_split([self.config.indexer.width], -1)
        packed = self.kv.layer(SlotId(0), layer)[1]
        ours = plain_restored(packed[:, : own.shape[1]], own.shape[2])
        _check_near(own, ours)
        return torch.cat((ours, mark), -1)

    def _halves(self, heads: Tensor) -> Tensor:
        """transformers leaves the two numbers that turn together side by side in some families."""
        if not self._leaves_pairs:
            return heads
        return self._turned(heads, lambda part: part.unflatten(-1, (-1, 2)))

    def _pairs(self, heads: Tensor) -> Tensor:
        if not self._leaves_pairs:
            return heads
        return self._turned(heads, lambda part: part.unflatten(-1, (2, -1)))

    @property
    def _leaves_pairs(self) -> bool:
        return self.config.has_pairs or self.config.family in ("deepseek_v2", "llama4_text")

    def _turned(self, heads: Tensor, unflatten: Callable[[Tensor], Tensor]) -> Tensor:
        assert self.config.rope is not None
        n = self.config.rope.rotated(self.config.head_size)
        turned = unflatten(heads[..., :n]).transpose(-1, -2).flatten(-2)
        return torch.cat((turned, heads[..., n:]), -1)


def _check_near(theirs: Tensor, ours: Tensor) -> None:
    """Each number within half a step of its group: [KV heads, T, D] both."""
    for row, rounded in zip(
        theirs.flatten(0, 1).tolist(), ours.flatten(0, 1).tolist(), strict=True
    ):
        start = 0
        for part in plain_groups(row):
            most = plain_scale(part) * 0.502 + 1e-5
            near = rounded[start : start + len(part)]
            assert all(abs(x - y) <= most for x, y in zip(part, near, strict=True))
            start += len(part)


def given_logits(reference: Any, cache: GivenCache, ids: list[int]) -> Tensor:
    """transformers' full forward over rounded keys and values: float32 [T, V]."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([ids]), cache=cache).logits[0].float()
    return logits


@pytest.mark.parametrize("case", cases(USUAL, [case for case in CASES if case not in USUAL]))
def test_logits_are_those_of_transformers_with_these_keys_and_values(
    case: str, tmp_path: Path
) -> None:
    """A prompt, then decoding; and how far all of it is from what nobody rounded."""
    folder = make(tmp_path, case)
    chain, reference = load(folder), made_reference(folder)
    prompt = random_prompt(26, 300)
    (logits,) = chain.generate([prompt], 5)
    ids = prompt + logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    config = Checkpoint.open(folder).config
    expected = given_logits(reference, GivenCache(chain, config, reference.config), ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
    plain = reference_logits(reference, ids)
    error = float((logits - plain).norm() / plain.norm())
    assert 0 < error < (ERROR if config.experts is None else ERROR_WITH_EXPERTS)


# --- what may not change a bit ------------------------------------------------------------------

EXACT = cases(["deepseek_v3", "llama-20", "qwen2_moe-24"], ["llama", "gemma2", "llama-22"])


@pytest.fixture(scope="module", params=EXACT)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=[DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
def choice(request: pytest.FixtureRequest) -> KernelChoice:
    return probed(CPU, request.param, None)


def test_every_split_gives_the_same_bits(folder: Path, choice: KernelChoice) -> None:
    prompts = [random_prompt(length, 300, seed=length) for length in (7, 301)]
    whole = load(folder, 1, choice).generate(prompts, 4)
    for n_stages in cases([4], [2]):
        for expected, logits in zip(
            whole, load(folder, n_stages, choice).generate(prompts, 4), strict=True
        ):
            assert torch.equal(logits, expected)


def test_a_row_keeps_its_bits_in_any_batch(folder: Path, choice: KernelChoice) -> None:
    chain = load(folder, 1, choice)
    exact_rows = chain.stages[0].exact_rows  # of these weights: the choice knows others
    n_sequences = min(exact_rows, 5)
    step = 9 if choice.kernel is Kernel.NATIVE else 1  # torch: no more rows at once than are exact
    prompts = [random_prompt(3 + step * i, 300, seed=i) for i in range(n_sequences)]
    together = chain.generate(prompts, 5)
    for slot in range(n_sequences):
        chain.stages[0].kv.free(SlotId(slot))
    for prompt, expected in zip(prompts, together, strict=True):
        (alone,) = chain.generate([prompt], 5)
        assert torch.equal(alone, expected)


def test_rewinding_copying_and_verifying_leave_no_trace(folder: Path, choice: KernelChoice) -> None:
    prompt, drafts = random_prompt(300, 300), random_prompt(5, 300, seed=9)
    chain = load(folder, 2, choice)
    chain.prefill(0, prompt)
    rows = [Rows(slot=0, position=300 + i, ids=[t], n_sampled=1) for i, t in enumerate(drafts)]
    one_by_one = torch.cat([chain.step(row) for row in rows])
    chain.step(Rows(slot=0, position=300, ids=[7, 7, 7], n_sampled=0))
    for stage in chain.stages:
        stage.kv.copy(SlotId(0), SlotId(3), 300)
    for slot in (0, 3):
        again = [Rows(slot=slot, position=row.position, ids=row.ids, n_sampled=1) for row in rows]
        assert torch.equal(torch.cat([chain.step(row) for row in again]), one_by_one)
        if min(stage.exact_rows for stage in chain.stages) >= 5:
            at_once = Rows(slot=slot, position=300, ids=drafts, n_sampled=5)
            assert torch.equal(chain.step(at_once), one_by_one)
