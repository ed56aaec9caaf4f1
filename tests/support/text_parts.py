"""Text as the detokenizer releases it, push by push."""

from __future__ import annotations

from collections.abc import Sequence

from shardnet.tokenizers.detokenizer import IncrementalDecoder
from shardnet.tokenizers.tokenizer import Tokenizer


def parts_of(
    tokenizer: Tokenizer, ids: Sequence[int], *, keep: bool = False, behind: Sequence[int] = ()
) -> list[str]:
    """What each push releases, and `finish` last."""
    decoder = IncrementalDecoder(tokenizer, keep_special_tokens=keep, behind=behind)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]
