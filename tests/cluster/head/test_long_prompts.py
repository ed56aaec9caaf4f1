"""A prompt that fills the context: the error names what it has and what would do."""

from __future__ import annotations

import pytest

from shardnet.cluster.head.requests import too_long


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "room", "remedy"),
    [
        (9000, 256, 20480, "give --context 9256: the model takes up to 32768, and the nodes have"),
        (32600, 256, 65536, "give --context 32768: "),
        (9000, 256, 9216, "give --context 9216: "),
        (9000, 0, 9216, "give --context 9000: "),
        (32768, 0, 65536, "give --context 32768: "),
        (32768, 1, 65536, "shorten the prompt: the model takes 32768 tokens at most"),
        (9000, 256, 8192, "or give the nodes more --memory or the ring --kv-dtype int8"),
    ],
)
def test_what_would_do_is_named(n_prompt: int, max_tokens: int, room: int, remedy: str) -> None:
    error = too_long(n_prompt, max_tokens, context=8192, most_positions=32768, room_positions=room)
    assert f"the prompt has {n_prompt} tokens and the context holds 8192" in str(error)
    assert remedy in str(error)
