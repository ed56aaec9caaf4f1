"""Count what look-up drafts of the given texts, without any model: nothing is timed.

*A round* drafts at most so many tokens and keeps those that the text goes on with; *elsewhere* the
prompt is a text of another request. *Second* is how many drafts are wrong where the latest other
token that followed the same n-gram is right: what a branch could gain.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from bench_engine import PROMPT_MARK, TEXTS

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.runtime.scheduling.drafting import SIZES, NgramDrafts
from shardnet.tokenizers.tokenizer import Tokenizer

DRAFTS = (4, 8)
_KEPT = 8
"""Tokens of a prompt before an answer, where the rest of it is elsewhere."""


def main() -> None:
    """Print a row for each text: tokens a round, and the share of drafts that are right."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench lookup")
    parser.add_argument("--tokens", type=int, default=600, help="of each text at most")
    n_tokens = parser.parse_args().tokens
    tokenizer = Tokenizer.load(DEFAULT_MODEL_PATH)
    heads = [f"{place}{limit} drafts" for place in ("", "elsewhere, ") for limit in DRAFTS]
    print(f"| text | {' | '.join(heads)} | second |\n|{'---|' * (len(heads) + 2)}")
    for path in sorted(TEXTS.glob("*.txt")):
        prompt, said = _parts(tokenizer, path, n_tokens)
        cells = [_rounds(NgramDrafts(), prompt, said, limit) for limit in DRAFTS]
        for limit in DRAFTS:
            others: deque[NgramDrafts] = deque()
            other = NgramDrafts(others)
            other.draft(prompt, 1)
            other.close()
            cells.append(_rounds(NgramDrafts(others), prompt[-_KEPT:], said, limit))
        print(f"| {path.stem} | {' | '.join(cells)} | {_second(prompt, said):.1%} |")
    tokenizer.close()


def _parts(tokenizer: Tokenizer, path: Path, n_tokens: int) -> tuple[list[int], list[int]]:
    before, _, after = path.read_text(encoding="utf-8").partition(PROMPT_MARK)
    prompt, said = (tokenizer.encode(part, bos="off") for part in (before, after))
    return prompt, said[:n_tokens]


def _rounds(drafts: NgramDrafts, prompt: list[int], said: list[int], limit: int) -> str:
    text = [*prompt, *said]
    n_rounds = n_drafted = n_right = 0
    at = len(prompt)
    while at < len(text):
        found = drafts.draft(text[:at], limit)
        pairs = enumerate(zip(found, text[at:], strict=False))
        right = next((n for n, (a, b) in pairs if a != b), min(len(found), len(text) - at))
        n_rounds, n_drafted, n_right = n_rounds + 1, n_drafted + len(found), n_right + right
        at += right + 1
    return f"{len(said) / n_rounds:.2f} ({n_right / max(1, n_drafted):.2f})"


def _second(prompt: list[int], said: list[int]) -> float:
    text = [*prompt, *said]
    places = range(len(prompt), len(text))
    found = [(_followers(text[:at]), text[at]) for at in places]
    drafted = [(tokens, token) for tokens, token in found if tokens]
    return sum(token in tokens[1:2] for tokens, token in drafted) / max(1, len(drafted))


def _followers(text: Sequence[int]) -> list[int]:
    """Return the tokens that followed the longest n-gram found, the latest first."""
    for size in SIZES:
        ends = range(len(text) - 1, size - 1, -1)
        tokens = [text[end] for end in ends if text[end - size : end] == text[-size:]]
        if tokens:
            return [*dict.fromkeys(tokens)]
    return []


if __name__ == "__main__":
    main()
