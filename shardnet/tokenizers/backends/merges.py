"""From ranked tokens to the merges that a BPE applies.

Knows that sentencepiece and tiktoken keep no merges: any two neighbours whose joined text is a
token may merge, the best ranked first, the leftmost of equals. Must not know files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable


def merges_of(ranked: Iterable[str], known: Container[str]) -> list[tuple[str, str]]:
    """List the pairs of tokens of `known` that make the tokens of `ranked`, the best first.

    A token is made in several ways. Of those the pair with the longer first part goes first: where
    two of them overlap in a text (aa a aa), it is the one more to the left.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
