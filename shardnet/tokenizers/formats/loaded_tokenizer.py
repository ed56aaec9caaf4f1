"""What a tokenizer's file says, whatever its form: the backend, and its own ids and rules.

Must not know folders: tokenizers/tokenizer.py weighs it against what stands beside the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import tokenizers

if TYPE_CHECKING:
    from shardnet.tokenizers.chat.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTokenizer:
    """A backend without truncation and padding.

    `adds_bos`: whether bos stands before a text where no other file says so; None: the backend has
    a post-processor, which decides. `template` is the file's own chat template.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool | None = None
    template: ChatTemplate | None = None
