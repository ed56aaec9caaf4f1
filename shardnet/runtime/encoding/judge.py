"""How a decoder is asked whether a document answers a query: in the words of Qwen3-Reranker.

Knows texts and tokens. Must not know models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from shardnet.tokenizers.token_table import Bos

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
ANSWERS: Final = ("yes", "no")
_BEGIN: Final = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
_END: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

Encode: TypeAlias = "Callable[[str, Bos, bool], list[int]]"
"""Encodes a text, with or without what begins it, reading names of special tokens or not."""
Answers = tuple[int, int | None]
"""The tokens of yes and no; None where the logit of yes alone is the score."""


def question(query: str, document: str, instruction: str) -> str:
    """Ask whether a document answers a query; the instruction says what a good answer is."""
    return f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"


class Judge:
    """The tokens around a question, and those of the answers."""

    def __init__(self, encode: Encode, answers: Answers | None) -> None:
        """Make it by a model's tokenizer, which knows the `answers` if no file says them."""
        yes, no = (encode(text, "off", False)[0] for text in ANSWERS)
        begin, end = (encode(text, "off", True) for text in (_BEGIN, _END))
        self.begin = begin
        self.end = end
        self.answers = answers or (yes, no)

    def tokens(self, encode: Encode, text: str, most_tokens: int | None) -> list[int]:
        """Encode a question, cut so that there are at most `most_tokens` in all, None for any.

        Nothing in it is read as a special token.
        """
        asked = encode(text, "off", False)
        if most_tokens is not None:
            asked = asked[: max(0, most_tokens - len(self.begin) - len(self.end))]
        return [*self.begin, *asked, *self.end]
