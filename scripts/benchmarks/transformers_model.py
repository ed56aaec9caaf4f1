"""transformers' reading of a GGUF file, in float32: the reference for logits and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Logits = NDArray[np.float32]
"""Logits [T, V]."""


class TransformersModel:
    """A GGUF file whose weights transformers has dequantised to float32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._path = path
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Return the logits [T, V] of tokens."""
        made: Logits = self._model(torch.tensor([list(token_ids)])).logits[0].numpy()
        return made

    def token_ids(self, text: str) -> list[int]:
        """Encode a text."""
        return list(self._tokenizer(text)["input_ids"])

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a conversation up to where the answer begins."""
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path.parent, gguf_file=self._path.name)
