"""The contents of a tokenizer's file in any format: the backend, and its ids and settings.

Must not know folders: tokenizers/tokenizer.py combines it with the files beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

    from shardnet.tokenizers.chat.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A backend without truncation and padding.

    `adds_bos`: whether bos is prepended unless another file says otherwise; None leaves it to the
    backend's post-processor. `template` is the file's own chat template.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool | None = None
    template: ChatTemplate | None = None
