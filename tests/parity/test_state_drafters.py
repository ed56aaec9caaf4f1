"""Drafters that read hidden states: the drafts of the published modules, which cache nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder
from support.models.drafter_checkpoints import (
    READ,
    SLIDING,
    VOCAB,
    PlainDFlash,
    PlainDrafter,
    PlainEagle3,
    Target,
    make_dflash,
    make_eagle3,
)
from support.models.gguf_files import write_gguf
from support.oracles.oracle import FLOAT32_TOLERANCE
from support.rings.stage_chain import random_prompt
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError
from shardnet.model.kernels.library import native_kernels
from shardnet.stage.drafters import StateDrafterLoader
from shardnet.types import SlotId

SLOT = SlotId(0)
KINDS = ["authors", "specforge", "speculators", "dflash", "sliding"]


class Drafting:
    """A loaded drafter, its oracle, and the states of one text, which it is given in pieces."""

    def __init__(
        self, kind: str, model: Path, folder: Path, context: int = 700, read: Path | None = None
    ) -> None:
        is_block = kind in ("dflash", "sliding")
        oracle: type[PlainDrafter] = PlainDFlash if is_block else PlainEagle3
        self.target = Target(model)
        self.oracle: Any = oracle(folder, self.target)
        self.layers = READ["dflash" if is_block else kind]
        self.drafter: Any = StateDrafterLoader(
            folder, Checkpoint.open(read or model), device="cpu", context=context, n_slots=8
        ).load()
        assert self.drafter.layers == self.layers
        self.logits: list[Tensor] = []
        lm_head = self.drafter.lm_head

        def recorded(rows: Tensor) -> Tensor:
            self.logits.append(lm_head(rows))
            return self.logits[-1]

        self.drafter.lm_head = recorded

    def draft(
        self, tokens: list[int], states: Tensor, position: int, n: int, slot: SlotId = SLOT
    ) -> tuple[list[int], Tensor]:
        """Read positions from `position` on, and draft: the tokens and their logits."""
        self.logits.clear()
        own = states[position : len(tokens) - 1]
        drafts = self.drafter.draft(slot, tokens[position + 1 :], position, own, n)
        return drafts, torch.cat(self.logits) if n else torch.empty(0)

    def check(
        self, tokens: list[int], position: int, n: int = 5, first: int = 0, slot: SlotId = SLOT
    ) -> None:
        """Hold drafts behind `tokens` against the oracle, which sees positions from `first` on."""
        states = self.target.states(tokens[:-1], self.layers)
        expected, logits = self.oracle.logits(tokens[first:], states[first:], n)
        drafts, found = self.draft(tokens, states, position, n, slot)
        torch.testing.assert_close(found, logits, rtol=0, atol=FLOAT32_TOLERANCE)
        assert drafts == expected


def _make(kind: str, folder: Path, **config: Any) -> Path:
    if kind in ("dflash", "sliding"):
        return make_dflash(folder, **(SLIDING if kind == "sliding" else {}), **config)
    return make_eagle3(folder, kind, **config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_decoder(
        folder, "qwen3", num_hidden_layers=8, head_dim=8, max_position_embeddings=1024
    )


@pytest.fixture(scope="module")
def drafting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Drafting]:
    def make(kind: str, context: int = 700, **config: Any) -> Drafting:
        folder = _make(kind, tmp_path_factory.mktemp(kind), **config)
        return Drafting(kind, model, folder, context)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_published_module(
    kind: str, drafting: Callable[..., Drafting]
) -> None:
    """Behind a prompt, behind drafts of which some were right, and beside another slot."""
    made = drafting(kind)
    tokens, others = random_prompt(60, VOCAB), random_prompt(31, VOCAB, seed=5)
    made.check(tokens[:41], 0)
    made.check(others, 0, slot=SlotId(3))
    made.check(tokens[:42], 40)  # none of the drafts was right
    made.check(tokens[:46], 41, n=1)  # four of them were
    made.check([*others, 7, 8], 30, slot=SlotId(3))
    made.check([*tokens[:43], 5, 6], 42)  # back to another text
    made.check(tokens, 0, n=3)  # the slot is used again
    made.drafter.free(SLOT)
    made.check(tokens, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_in_pieces_is_the_prompt(
    kind: str, drafting: Callable[..., Drafting]
) -> None:
    made, tokens = drafting(kind), random_prompt(601, VOCAB)
    made.check(tokens, 0)
    states = made.target.states(tokens[:-1], made.layers)
    whole = made.draft(tokens, states, 0, 5)
    for start in range(0, 590, 59):
        assert made.draft(tokens[: start + 60], states, start, 0)[0] == []
    pieces = made.draft(tokens, states, 590, 5)
    assert pieces[0] == whole[0]
    tolerance = FLOAT32_TOLERANCE if native_kernels() is None else 0
    torch.testing.assert_close(pieces[1], whole[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["authors", "dflash"])
def test_a_full_slot_begins_anew(kind: str, drafting: Callable[..., Drafting]) -> None:
    """So does one that lacks the position before; what is too long loses its beginning."""
    made, tokens = drafting(kind, context=64), random_prompt(120, VOCAB)
    made.check(tokens[:101], 0, first=36)
    made.check(tokens[:104], 100, first=100)
    made.check(tokens[:110], 103, first=100)
    made.check(tokens, 112, first=112)


@pytest.mark.parametrize("kind", ["specforge", "dflash"])
def test_a_slot_without_room_is_begun_anew(kind: str, drafting: Callable[..., Drafting]) -> None:
    """What it was to read counts as read no more."""
    made, tokens = drafting(kind), random_prompt(400, VOCAB)
    made.check(tokens[:101], 0)
    made.drafter.kv.room_blocks = 1
    with pytest.raises(CapacityError):
        made.check(tokens[:301], 100)
    made.drafter.kv.room_blocks = 8
    made.check(tokens, 300, first=300)


def test_layers_with_windows_go_back_as_far_as_they_keep_rows(
    drafting: Callable[..., Drafting],
) -> None:
    made, tokens = drafting("sliding"), random_prompt(601, VOCAB)
    made.check(tokens, 0)
    made.check(tokens[:405], 400)
    made.check(tokens, 404)
    for n_back in (240, 250, 256, 300):  # further back it begins anew
        made.check(tokens, 0)
        made.draft(tokens, made.target.states(tokens[:-1], made.layers), 600 - n_back, 5)


@pytest.mark.parametrize("maker", ["authors", "specforge"])
def test_a_head_without_an_embedding_has_the_models(
    maker: str, drafting: Callable[..., Drafting]
) -> None:
    made, tokens = drafting(maker, with_embedding=False), random_prompt(30, VOCAB)
    made.check(tokens, 0)


@pytest.mark.parametrize("how", ["tied", "gguf"])
def test_what_a_drafter_takes_from_the_model(how: str, model: Path, tmp_path: Path) -> None:
    """Of a tied table, which is the LM head too, and of a GGUF."""
    folder, read = _make("dflash", tmp_path / "drafter"), None
    if how == "tied":
        sizes = {"num_hidden_layers": 8, "head_dim": 8, "tie_word_embeddings": True}
        model = make_decoder(tmp_path / "model", "qwen3", **sizes)
    else:
        read = write_gguf(model, tmp_path / "model.gguf")
    Drafting("dflash", model, folder, read=read).check(random_prompt(30, VOCAB), 0)


@pytest.mark.parametrize("kind", ["specforge", "dflash"])
def test_in_bfloat16(kind: str, model: Path, tmp_path: Path) -> None:
    """Within its rounding of what is computed in float32 of the same weights."""
    folder = _make(kind, tmp_path)
    stored = load_file(folder / "model.safetensors")
    halves = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in stored.items()
    }
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    made, tokens = Drafting(kind, model, folder), random_prompt(30, VOCAB)
    states = made.target.states(tokens[:-1], made.layers)
    for name, tensor in made.oracle.tensors.items():
        made.oracle.tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    _, logits = made.oracle.logits(tokens, states, 1)
    _, found = made.draft(tokens, states, 0, 1)
    torch.testing.assert_close(found.float(), logits, rtol=0, atol=0.1)
