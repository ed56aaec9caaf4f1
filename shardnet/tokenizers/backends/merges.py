"""Derives BPE merges from ranked tokens.

Knows that sentencepiece and tiktoken store no merges: any two neighbours whose joined text is a
token may merge, the best ranked first, the leftmost of equals. Must not know files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable


def merges_of(ranked: Iterable[str], known: Container[str]) -> list[tuple[str, str]]:
    """List the pairs of tokens in `known` that merge to tokens of `ranked`, the best first.

    Several pairs may merge to the same token. The pair with the longer first part goes first: where
    two overlap in a text (aa a aa), it is the leftmost.
    """
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
