"""What drafters draft at every place of given texts, in plain torch: to count, and to replay.

At a place, the model's states and the tokens are known up to it, and the token behind it. Greedy
drafts go on behind that; beside them stand the other tokens that were likely, and what would be
drafted behind the likeliest of those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardnet.assets import DEFAULT_MODEL_PATH

from .block import BLOCK, BLOCK_LAYERS, Block
from .chains import EAGLE_LAYERS, Chain
from .files import load_drafter
from .layer import Keys
from .texts import BOS, go_on
from .training import Texts, read

DEPTH, RANKS = 12, 3
"""Drafts behind each other; tokens that are recorded at each depth, the likeliest first."""


@dataclass(frozen=True)
class Text:
    """A prompt and what is said behind it: token ids, `n_prompt` of them the prompt's."""

    ids: list[int]
    n_prompt: int


@dataclass(frozen=True)
class Recorded:
    """Drafts `ids` [P, B, D, R] of the places from 0 on, and how likely the drafter held them.

    B is which of the likeliest tokens is drafted first, D the depth and R the rank. At depth 0, B
    says nothing.
    """

    ids: Tensor
    chances: Tensor

    def chain(self, place: int) -> list[int]:
        """Return the greedy drafts for the tokens from `place` + 2 on."""
        chain: list[int] = self.ids[place, 0, :, 0].tolist()
        return chain


def load_model() -> Any:
    """Load the bundled model in float32."""
    model: Any = LlamaForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, dtype=torch.float32)
    return model.eval().requires_grad_(requires_grad=False)


def given_text(path: Path, mark: str, most: int, context: int) -> Text:
    """Read a prompt and what is said behind it, at most `most` tokens."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL_PATH / "tokenizer.json"))
    before, _, after = path.read_text("utf-8").partition(mark)
    prompt, said = (
        tokenizer.encode(part, add_special_tokens=False).ids for part in (before, after)
    )
    ids = [BOS, *prompt, *said[:most]]
    return Text(ids[:context], 1 + len(prompt))


def own_text(model: Any, prompt: Text, n_tokens: int, temperature: float) -> Text:
    """Have the model go on behind a prompt, the same whenever it is asked."""
    torch.manual_seed(0)
    ids = torch.tensor([prompt.ids[: prompt.n_prompt]])
    said = go_on(model, ids, prompt.n_prompt + n_tokens, torch.tensor([temperature]))
    return Text(said[0].tolist(), prompt.n_prompt)


@torch.no_grad()
def record(drafter: nn.Module, model: Any, text: Text) -> Recorded:
    """Record what a drafter drafts at every place but the last, where nothing is known behind."""
    layers = {*EAGLE_LAYERS, *BLOCK_LAYERS, model.config.num_hidden_layers}
    texts = read(model, torch.tensor([text.ids]), torch.zeros(1, dtype=torch.bool), (*layers,))
    texts = texts.some(torch.arange(1))
    if isinstance(drafter, Block):
        return _record_block(drafter, texts)
    assert isinstance(drafter, Chain)
    return _record_chain(drafter, texts)


def _record_chain(chain: Chain, texts: Texts) -> Recorded:
    texts = texts.led(chain.n_before)
    keys = [Keys() for _ in range(chain.n_layers)]
    known = chain.read({layer: rows[:, :-1] for layer, rows in texts.states.items()})
    known, rows = chain.step(known, texts.table[texts.ids[:, 1:]], keys)
    first = _likeliest(chain, rows, texts.table)
    branches = []
    for rank in range(RANKS):
        depths, behind, held = [first], known, [layer.branch() for layer in keys]
        tokens = first[0][..., rank]
        for _ in range(1, DEPTH):
            behind, rows = chain.step(behind, texts.table[tokens], held)
            depths.append(_likeliest(chain, rows, texts.table))
            tokens = depths[-1][0][..., 0]
        branches.append([torch.stack(part, 2)[0] for part in zip(*depths, strict=True)])
    ids, chances = (torch.stack(part, 1)[chain.n_before :] for part in zip(*branches, strict=True))
    return Recorded(ids, chances)


def _likeliest(chain: Chain, rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    chances, ids = chain.score(rows, table).softmax(-1).topk(RANKS)
    return (ids if chain.vocabulary is None else chain.vocabulary[ids]), chances


def _record_block(block: Block, texts: Texts) -> Recorded:
    found = []
    for anchors in torch.split(torch.arange(1, texts.ids.shape[1]), 128):
        rows = block(texts.states, texts.ids, anchors, texts.table)[0, :, 1:]
        found.append((rows @ texts.table.T).softmax(-1).topk(RANKS))
    chances, ids = (
        torch.cat(part)[:, None].expand(-1, RANKS, -1, -1) for part in zip(*found, strict=True)
    )
    assert ids.shape[2] == BLOCK - 1
    return Recorded(ids, chances)


def load_drafters(folder: Path, model: Any) -> dict[str, nn.Module]:
    """Load the drafters in a folder's folders, by their names."""
    return {
        path.parent.name: load_drafter(path.parent, model)
        for path in sorted(folder.glob("*/config.json"))
        if json.loads(path.read_text("utf-8")).get("architectures")
    }
