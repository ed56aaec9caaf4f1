"""Text as it comes: equal to the whole decoded at once, stop strings never shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.models import small_tokenizers as small
from support.models.loaded_tokenizers import KINDS, in_this_process, tokenizer_of
from support.text_parts import parts_of

from shardnet.errors import SamplingError
from shardnet.tokenizers.backends.token_files import LoadedTokenizer
from shardnet.tokenizers.detokenizer import StopScanner, TextStream
from shardnet.tokenizers.text_backend import TextBackend
from shardnet.tokenizers.tokenizer import Tokenizer

# --- incremental decoder


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_parts_join_to_the_whole(kind: str, data: st.DataObject) -> None:
    """Any ids: broken bytes, special tokens and ids without a token among them."""
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens + 1), max_size=40))
    keep = data.draw(st.booleans())
    assert "".join(parts_of(tokenizer, ids, keep=keep)) == tokenizer.decode(
        ids, keep_special_tokens=keep
    )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_behind_a_prompt_parts_join_to_what_it_goes_on_with(kind: str, data: st.DataObject) -> None:
    """A space between both is not lost; a bos alone is no text."""
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "the cat", "sat on the"])), bos="off")
    prompt += data.draw(st.sampled_from([[], [1]]))
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens + 1), max_size=20))
    whole, before = tokenizer.decode([*prompt, *ids]), tokenizer.decode(prompt)
    assert "".join(parts_of(tokenizer, ids, behind=prompt)) == whole[len(before) :]


@given(text=st.text(max_size=30))
def test_encoded_text_comes_back_without_broken_characters(text: str) -> None:
    tokenizer = tokenizer_of("byte_level")
    parts = parts_of(tokenizer, tokenizer.encode(text, parse_special=False))
    assert "".join(parts) == text
    assert all("�" not in part for part in parts) or "�" in text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace"])
def test_text_is_not_held_longer_than_its_characters_need(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the cat sat", bos="off")
    parts = parts_of(tokenizer, ids)
    assert parts == [*(tokenizer.token_text(token_id) for token_id in ids), ""] or parts == [
        tokenizer.token_text(ids[0]).lstrip(),
        *(tokenizer.token_text(token_id) for token_id in ids[1:]),
        "",
    ]


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    ids = tokenizer.encode("a🙂b", bos="off")
    assert parts_of(tokenizer, ids) == ["", "a", "", "", "", "", "🙂b", ""]
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("𝄞", bos="off")
    assert parts_of(tokenizer, ids) == ["", "", "", "𝄞", ""]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("a𝄞", bos="off")[:-1]
    assert parts_of(tokenizer, ids) == ["a", "", "", "", "�"]


class CountingTokenizer(Tokenizer):
    """Records how many ids each decode was asked for."""

    lengths: list[int]

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        self.lengths.append(len(token_ids))
        return super().decode(token_ids, keep_special_tokens=keep_special_tokens)

    def decode_behind(self, token_ids: Sequence[int]) -> str:
        self.lengths.append(len(token_ids))
        return super().decode_behind(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_work_per_token_does_not_grow_with_the_text(kind: str) -> None:
    backend = TextBackend(LoadedTokenizer(backend=small.KINDS[kind](), bos_id=1, eos_ids=(2,)))
    tokenizer = in_this_process(backend, CountingTokenizer)
    tokenizer.lengths = []
    ids = tokenizer.encode(" ".join(small.TEXT[:2] * 20), bos="off")
    parts_of(tokenizer, ids)
    assert len(ids) > 500
    assert len(ids) <= sum(tokenizer.lengths) < 4 * len(ids)


# --- stop scanner


def scan(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, bool]:
    """What is shown of `parts`, and whether a stop string ended it."""
    scanner = StopScanner(stops)
    shown = ""
    for part in parts:
        emitted, stopped = scanner.push(part)
        shown += emitted
        if stopped:
            return shown, True
    return shown + scanner.finish(), False


def plain_scan(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The same on the whole text: the match complete first, then the longest."""
    matches = [
        (text.find(stop) + len(stop), text.find(stop)) for stop in stops if text.find(stop) >= 0
    ]
    return (text[: min(matches)[1]], True) if matches else (text, False)


ABC = st.text(alphabet="abc", max_size=4)


@given(
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    parts=st.lists(ABC, max_size=15),
)
@example(stops=["abac", "bab"], parts=["ab", "ab", "ac"])
@example(stops=["cd", "abcde"], parts=["abcde"])
@example(stops=["bc", "abc"], parts=["a", "bc"])
def test_any_parts_give_what_the_whole_text_gives(stops: list[str], parts: list[str]) -> None:
    shown, stopped = scan(stops, parts)
    assert (shown, stopped) == plain_scan(stops, "".join(parts))
    assert not any(stop in shown for stop in stops)


@given(
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text(alphabet="abc", max_size=30),
)
def test_only_what_may_begin_a_match_is_held_back(stops: list[str], text: str) -> None:
    scanner, shown = StopScanner(stops), ""
    for end, character in enumerate(text, 1):
        emitted, stopped = scanner.push(character)
        shown += emitted
        if stopped:
            return
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [text[start:end] for start in range(len(shown))]
        assert not any(stop.startswith(suffix) for stop in stops for suffix in longer)


def test_text_after_a_match_is_swallowed() -> None:
    scanner = StopScanner(["\n\n"])
    assert scanner.push("one\n") == ("one", False)
    assert scanner.push("\ntwo") == ("", True)
    assert scanner.stopped
    assert scanner.push("three") == ("", True)
    assert scanner.finish() == ""


def test_without_stop_strings_everything_passes() -> None:
    assert scan([], ["a", "", "b"]) == ("ab", False)


def test_held_text_is_shown_when_the_text_ends() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("the EN") == ("the ", False)
    assert scanner.finish() == "EN"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(SamplingError, match="must not be empty"):
        StopScanner(["a", ""])


# --- both together


def stream(ids: Sequence[int], **options: Any) -> tuple[str, bool]:
    """What a reader sees of these tokens, and whether a stop string ended it."""
    text = TextStream(tokenizer_of("byte_level"), **options)
    shown = ""
    for token_id in ids:
        more, stopped = text.push(token_id)
        shown += more
        if stopped:
            return shown, True
    return shown + text.finish(), False


@given(
    words=st.lists(st.sampled_from(["the", " cat", "☕", "🙂", " sat", "</s>"]), max_size=12),
    stops=st.lists(st.sampled_from(["cat", "e c", "☕🙂", "🙂", "t"]), max_size=2),
)
def test_a_stream_is_the_decoded_text_up_to_the_first_stop(
    words: list[str], stops: list[str]
) -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("".join(words))
    assert stream(ids, stops=stops) == plain_scan(stops, tokenizer.decode(ids))


def test_a_stream_shows_what_it_held_when_the_tokens_end() -> None:
    ids = tokenizer_of("byte_level").encode("the 𝄞")[:-1]
    assert stream(ids, stops=["e \ufffdx"]) == ("the \ufffd", False)
    assert stream([1, *ids], keep_special_tokens=True) == ("<s>the \ufffd", False)


def test_a_stream_without_a_tokenizer_has_no_text() -> None:
    text = TextStream(None, stops=["a"])
    assert [text.push(token_id) for token_id in range(3)] == [("", False)] * 3
    assert text.finish() == ""


def test_a_stream_refuses_an_empty_stop_string() -> None:
    with pytest.raises(SamplingError, match="must not be empty"):
        TextStream(None, stops=[""])
