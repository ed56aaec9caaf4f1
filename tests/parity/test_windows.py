"""Windows shorter than prompts, drafts and shared prefixes, on whole rings: the same text always.

Sequences are long enough for layers with a window to forget their beginning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.needs import HAS_VECTORS
from support.rings.stage_chain import CPU, even_split, probed, random_prompt
from support.rings.torch_rings import TorchStages, request, run, tokens_of
from support.soak import cases
from transformers import AutoModelForCausalLM

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.runtime.engine.requests import RequestEvent, RequestMoved, Speculation
from shardnet.types import DType, KvDType

CONTEXT = 1280
WINDOW = 6
CASES: dict[str, dict[str, Any]] = {
    "mistral": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 3, "head_dim": 8},
    "llama4_text": {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "attention_chunk_size": WINDOW,
        "no_rope_layer_interval": 2,
        "intermediate_size_mlp": 56,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.fixture(scope="module", params=cases(["mistral", "gemma3_text", "llama4_text"], ["gemma2"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    sizes = {"max_position_embeddings": CONTEXT}
    if request.param != "llama4_text":
        sizes["sliding_window"] = WINDOW
    return make_decoder(path, request.param, **sizes | CASES[request.param])


@pytest.fixture(scope="module")
def stages(folder: Path) -> TorchStages:
    n_layers = Checkpoint.open(folder).config.n_layers
    return TorchStages(folder, even_split(n_layers, 2), context=CONTEXT)


class WrongDrafts:
    """Guesses more tokens than a window holds, nearly always wrong."""

    kinds = range(31)
    flies = True

    def __init__(self) -> None:
        self._random = random.Random(0)

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        return [self._random.randrange(300) for _ in range(limit)]

    def close(self) -> None: ...


def n_kept(events: Sequence[RequestEvent]) -> int:
    """How much of the prompt was there already."""
    return max(event.n_kept for event in events if isinstance(event, RequestMoved))


def test_long_prompts_are_as_in_transformers(folder: Path, stages: TorchStages) -> None:
    prompt = random_prompt(1000, 300)
    (events,) = run(stages, request(prompt, 8), chunk_rows=256)
    tokens = tokens_of(events)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("drafts_always_pay")
def test_wrong_guesses_leave_no_trace(stages: TorchStages) -> None:
    prompt = random_prompt(700, 300, seed=1)
    speculation = Speculation(make_draft_source=lambda wake: WrongDrafts(), most=16)
    (plain,) = run(stages, request(prompt, 40), chunk_rows=256)
    (guessed,) = run(stages, request(prompt, 40, speculation=speculation), chunk_rows=256)
    assert tokens_of(guessed) == tokens_of(plain)
    timing = guessed[-1].timing  # type: ignore[union-attr]
    assert timing.n_drafted > timing.n_accepted + 2 * WINDOW


def test_shared_prefixes_change_no_token(stages: TorchStages) -> None:
    """One that ends where the slot does, one that rewinds it, one from before what it keeps.

    That one begins with rows of windows that were kept apart, where blocks are shared.
    """
    prompt = random_prompt(700, 300, seed=2)
    first = request(prompt, 20)
    turn = [*prompt, *tokens_of(run(stages, first, chunk_rows=256)[0]), 5, 6, 7]
    other = [*prompt[:600], *random_prompt(40, 300, seed=3)]
    far = [*prompt[:300], *random_prompt(400, 300, seed=4)]
    cold = [run(stages, request(ids, 30), chunk_rows=256)[0] for ids in (turn, other, far)]
    warm = run(
        stages,
        first,
        *(request(ids, 30) for ids in (turn, other, far)),
        chunk_rows=256,
        at_once=False,
    )[1:]
    assert [tokens_of(events) for events in warm] == [tokens_of(events) for events in cold]
    kept = 256 if stages.shares_blocks else 0
    assert [n_kept(events) for events in warm] == [719, 600, kept]
    assert [n_kept(events) for events in cold] == [0, 0, 0]


def test_requests_that_begin_alike_run_together_in_the_blocks_of_one_beginning(
    stages: TorchStages,
) -> None:
    """600 positions are 2 whole blocks; each of five requests has a third one for itself."""
    if not stages.shares_blocks:
        pytest.skip("blocks are shared where the compiled library computes")
    system = random_prompt(600, 300, seed=7)
    asked = [request([*system, *random_prompt(30, 300, seed=seed)], 20) for seed in range(8, 13)]
    alone = [tokens_of(run(stages, one, chunk_rows=256)[0]) for one in asked]
    most = [0] * len(stages.caches)

    def note(place: int, used: int) -> None:
        most[place] = max(most[place], used)

    with pytest.MonkeyPatch.context() as patch:
        for place, kv in enumerate(stages.caches):
            kv.clear()
            patch.setattr(kv, "before_write", lambda *_, at=place, of=kv: note(at, of.blocks_used))
        together = run(stages, *asked, chunk_rows=256, room_blocks=2 + 5)
    assert [tokens_of(events) for events in together] == alone
    assert [n_kept(events) for events in together] == [0, 600, 600, 600, 600]
    assert most == [2 + 5] * len(stages.caches)


def test_deterministic_text_with_rounded_keys_and_values_is_the_same_whatever_goes_on(
    folder: Path,
) -> None:
    """Alone from a cold start, or guessed, in company, and from prefixes that are there."""
    choice = probed(CPU, DType.BFLOAT16, None)
    ranges = even_split(Checkpoint.open(folder).config.n_layers, 2)
    stages = TorchStages(folder, ranges, choice, CONTEXT, KvDType.INT8)
    if stages.exact_rows == 1:
        pytest.skip("this machine computes single rows exactly only: speculation is off")
    prompt = random_prompt(700, 300, seed=5)
    prompts = [prompt, [*prompt[:600], *random_prompt(30, 300, seed=6)], random_prompt(9, 300)]
    plain = [request(ids, 20, deterministic=True) for ids in prompts]
    alone = [tokens_of(run(stages, one, chunk_rows=256)[0]) for one in plain]
    speculation = Speculation(make_draft_source=lambda wake: WrongDrafts(), most=16)
    guessed = [request(ids, 20, deterministic=True, speculation=speculation) for ids in prompts]
    for asked in (plain, guessed):
        together = run(stages, *asked, chunk_rows=256)
        assert [tokens_of(events) for events in together] == alone
    one_by_one = run(stages, *guessed, chunk_rows=256, at_once=False)
    assert [tokens_of(events) for events in one_by_one] == alone
    kept = 600 if HAS_VECTORS else 512  # whole chunks, where the bits of a row depend on them
    assert [n_kept(events) for events in one_by_one] == [0, kept, 0]
