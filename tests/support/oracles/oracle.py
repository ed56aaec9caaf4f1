"""transformers as the oracle: what a stage chain's tokens and logits are held against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from support.models.checkpoints import last_made
from support.oracles.plain_deepseek_v41 import PlainDeepseekV41
from support.rings.stage_chain import StageChain
from torch import Tensor

FLOAT32_TOLERANCE = 1e-4
CLOSE_CALL = 1e-3
"""A step whose two best logits are closer than this may go either way; it is counted."""
CLOSE_CALLS_ALLOWED = 0.02


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own class, with plain products: its grouped ones take no odd widths."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    if name == "DeepseekV41ForCausalLM":
        return PlainDeepseekV41.load(folder, dtype)
    kind = getattr(transformers, name)
    model = kind.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    return _mended(model)


def made_reference(folder: Path) -> Any:
    """The model that was written to `folder` last of all, in float32: it need not be read again."""
    model: Any = last_made(folder)
    assert model.dtype is torch.float32
    if isinstance(model, PlainDeepseekV41):
        return model
    model.set_experts_implementation("eager")
    return _mended(model.eval())


def _mended(model: Any) -> Any:
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model.language_model.register_forward_hook(_without_image_outputs)
    return model


def _without_image_outputs(module: Any, given: Any, output: Any) -> None:
    """Give what transformers 5.24 reads of the language model's output and never puts there."""
    output.image_outputs = None


def reference_logits(model: Any, ids: list[int]) -> Tensor:
    """transformers' full forward over `ids`: float32 [T, V]."""
    with torch.inference_mode(), mock.patch.object(Tensor, "topk", first_of_equal):
        logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def first_of_equal(scores: Tensor, k: int, dim: int = -1, *_: bool, **__: bool) -> Any:
    """Take the largest, of equal ones the first: topk itself may take any of them."""
    found = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk(tuple(part.narrow(dim, 0, k) for part in found))  # type: ignore[attr-defined]


def check_generation(
    chain: StageChain, reference: Any, prompts: Sequence[list[int]], n_tokens: int
) -> None:
    """Hold prompts in chunks, then decoding in one micro-batch, against full forwards."""
    close_calls = 0
    for prompt, logits in zip(prompts, chain.generate(prompts, n_tokens), strict=True):
        tokens = logits.argmax(-1)[len(prompt) - 1 :].tolist()
        expected = reference_logits(reference, prompt + tokens[:-1])
        torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
        for token, row in zip(tokens, expected[len(prompt) - 1 :], strict=True):
            first, second = row.topk(2).values
            if first - second < CLOSE_CALL:
                close_calls += 1
            else:
                assert token == row.argmax()
    assert close_calls <= CLOSE_CALLS_ALLOWED * n_tokens * len(prompts)
