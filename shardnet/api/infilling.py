"""Prompts for the middle of a text, by the tokens that a family has for it.

Pure. Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.errors import UsageError
from shardnet.wire.messages.chat import TokenizerDescribed

_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
"""What stands before the text that is there, between that and what follows, and behind both."""
_SUFFIX_FIRST: Final = (
    ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),  # Seed-Coder
    ("[SUFFIX]", "[PREFIX]", ""),  # Codestral
)
"""The same for families that are shown what follows first."""
_ENDS: Final = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "<repo_name>")
"""Tokens with which another file would begin."""
_REPOSITORIES: Final = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
"""What begins a repository, and each file of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Infilling:
    """The prompt for the middle of a text, and the token ids at which that ends."""

    prompt: str
    stop_ids: Sequence[int]


def has_marks(added: Container[str]) -> bool:
    """Say whether a model with these tokens writes what stands between two texts."""
    families = (*_MARKS, *_SUFFIX_FIRST)
    return any(all(mark in added for mark in marks if mark) for marks in families)


def added_ids(described: TokenizerDescribed) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens by their texts."""
    return {token.text: token.token_id for token in described.added}


def infill(
    prefix: str,
    suffix: str,
    added: Mapping[str, int],
    extra: Sequence[tuple[str, str]] = (),
    field: str = "suffix",
) -> Infilling:
    """Write the prompt for what stands between two texts; `added` are ids of tokens by text.

    Before it stand `extra` texts, each with the name of its file. Raises UsageError, which begins
    with the request's `field`, for a model without tokens for it.
    """
    before = _before(extra, added)
    for marks, first, second in (
        *((marks, prefix, suffix) for marks in _MARKS),
        *((marks, suffix, prefix) for marks in _SUFFIX_FIRST),
    ):
        if all(mark in added for mark in marks if mark):
            ends = [mark for mark in (*marks, *_ENDS) if mark in added]
            return Infilling(
                prompt=f"{before}{marks[0]}{first}{marks[1]}{second}{marks[2]}",
                stop_ids=[added[end] for end in ends],
            )
    raise UsageError(
        f"{field} needs a model with tokens for the middle of a text, which this one has not",
        remedy="leave it out, or name a model that was trained for it, such as Qwen-Coder",
    )


def _before(extra: Sequence[tuple[str, str]], added: Mapping[str, int]) -> str:
    """Write other texts as files of a repository where the model has tokens for that."""
    if not extra:
        return ""
    for repository, file in _REPOSITORIES:
        if repository in added and file in added:
            files = "".join(f"{file}{name or 'filename'}\n{text}" for name, text in extra)
            return f"{repository}repository\n{files}{file}filename\n"
    return "".join(f"{text}\n" for _, text in extra)
