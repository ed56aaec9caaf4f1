"""Derives BPE merges from ranked tokens, and checks those that a file has.

Knows that sentencepiece and tiktoken store no merges: any two neighbours whose joined text is a
token may merge, the best ranked first, the leftmost of equals. Must not know files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from shardnet.errors import CheckpointError


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


def check_merges(merges: Iterable[tuple[str, str]], vocabulary: Container[str], where: str) -> None:
    """Raise CheckpointError, which names the merge and `where` it is, for one of unknown tokens."""
    for first, second in merges:
        for text in (first, second, first + second):
            if text not in vocabulary:
                raise CheckpointError(
                    f"{where}: the merge {first!r:.80} {second!r:.80} needs {text!r:.80}, which is "
                    "not a token"
                )
