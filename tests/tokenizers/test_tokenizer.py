"""The tokenizer: encoding and bos, decoding against transformers, bytes of tokens, eos ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import small_tokenizers as small
from support.models.loaded_tokenizers import KINDS, load_here, made_tokenizer, tokenizer_of
from transformers import PreTrainedTokenizerFast

from shardnet.errors import CheckpointError, UsageError
from shardnet.tokenizers.tokenizer import Tokenizer, check_token_ids, read_eos_ids


@cache
def transformers_tokenizer_of(kind: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=small.KINDS[kind](), clean_up_tokenization_spaces=False
    )


# --- encode


def test_text_comes_back(tmp_path: Path) -> None:
    for kind in ("byte_level", "sentencepiece", "metaspace"):
        tokenizer = tokenizer_of(kind)
        for text in small.TEXT:
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace"])
@pytest.mark.parametrize("text", ["the cat", "", " the", "<s>the cat", "a<|end|>b ☕"])
def test_encode_is_that_of_transformers(kind: str, text: str) -> None:
    want = transformers_tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"]
    assert tokenizer_of(kind).encode(text, bos="off") == want


def test_bos_is_as_the_post_processor_says() -> None:
    with_bos, without = (
        made_tokenizer(small.byte_level(bos=True), bos_id=1, eos_ids=()),
        tokenizer_of("byte_level"),
    )
    plain = without.encode("the cat", bos="off")
    assert with_bos.encode("the cat") == [1, *plain]
    assert with_bos.encode("the cat", bos="on") == [1, *plain]
    assert with_bos.encode("the cat", bos="off") == plain
    assert without.encode("the cat") == plain
    assert without.encode("the cat", bos="on") == [1, *plain]
    assert with_bos.encode("") == [1]
    assert without.encode("") == []


def test_bos_is_never_doubled() -> None:
    with_bos = made_tokenizer(small.byte_level(bos=True), bos_id=1, eos_ids=())
    plain = with_bos.encode("the cat", bos="off")
    for bos in ("auto", "on", "off"):
        assert with_bos.encode("<s>the cat", bos=bos) == [1, *plain]
    assert with_bos.encode("<s>", bos="auto") == [1]


def test_bos_that_the_text_spells_twice_is_left_alone_without_a_post_processor() -> None:
    assert tokenizer_of("byte_level").encode("<s><s>") == [1, 1]


def test_bos_on_without_a_bos_token_is_refused() -> None:
    tokenizer = made_tokenizer(small.byte_level(), bos_id=None, eos_ids=())
    with pytest.raises(UsageError, match="no bos token"):
        tokenizer.encode("the cat", bos="on")


def test_special_text_is_parsed_unless_told_otherwise() -> None:
    tokenizer = tokenizer_of("byte_level")
    assert tokenizer.encode("<|end|>") == [3]
    plain = tokenizer.encode("<|end|>", parse_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == "<|end|>"
    assert tokenizer.encode("<|end|>") == [3]  # the setting does not stick


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UsageError, match="at character 3"):
        tokenizer_of("byte_level").encode("abc\ud83d")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = small.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = load_here(small.save(tmp_path, backend))
    text = small.TEXT[1]
    assert tokenizer.encode(text) == tokenizer_of("byte_level").encode(text)


# --- decode


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_decode_is_that_of_transformers(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens - 1), max_size=20))
    keep = data.draw(st.booleans())
    want = transformers_tokenizer_of(kind).decode(ids, skip_special_tokens=not keep)
    assert tokenizer.decode(ids, keep_special_tokens=keep) == want


def test_special_tokens_are_left_out_unless_kept() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = [1, *tokenizer.encode("the cat"), 3, 2]
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, keep_special_tokens=True) == "<s>the cat<|end|></s>"


# --- single tokens


@given(ids=st.lists(st.integers(0, 420), min_size=1, max_size=12))
def test_bytes_of_byte_level_tokens_join_to_the_text(ids: list[int]) -> None:
    tokenizer = tokenizer_of("byte_level")
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, keep_special_tokens=True)


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
@pytest.mark.parametrize("text", ["the cat sat", "你好 the ☕é 🙂", "two  spaces"])
def test_bytes_of_sentencepiece_tokens_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, bos="off")
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert joined == b" " + text.encode()


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_a_fallback_byte_is_one_byte(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_id = len(small.SPECIAL) + 0xE2
    assert tokenizer.token_bytes(token_id) == b"\xe2"
    assert tokenizer.token_text(token_id) == "�"


def test_token_text_of_whole_tokens() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    the = tokenizer.encode("the", bos="off")[0]
    assert tokenizer.token_text(the) == " the"
    assert tokenizer.token_text(2) == "</s>"
    assert tokenizer_of("byte_level").token_text(3) == "<|end|>"


def test_an_id_without_a_token_gives_nothing() -> None:
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        assert not tokenizer.has_token(tokenizer.n_tokens)
        assert tokenizer.token_bytes(tokenizer.n_tokens) == b""
        assert tokenizer.decode([tokenizer.n_tokens]) == ""


def test_n_tokens_counts_added_tokens() -> None:
    tokenizer = tokenizer_of("byte_level")
    assert tokenizer.has_token(tokenizer.n_tokens - 1)
    assert tokenizer.token_text(tokenizer.n_tokens - 2) == "my token"
    assert tokenizer.special_ids == {0, 1, 2, 3}
    added = {text: special for _, text, special in tokenizer.added_tokens(256)}
    assert (added["<|end|>"], added["my token"]) == (True, False)
    assert [text for _, text, _ in tokenizer.added_tokens(7)] == [t for t in added if len(t) < 8]


# --- files


EOS_FILES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, ()),
    ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 8}}, (7,)),
    ({"generation_config": {"eos_token_id": [7, 9]}, "config": {"eos_token_id": 8}}, (7, 9)),
    ({"generation_config": {}, "config": {"eos_token_id": 8}}, (8,)),
    ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [8, 3]}}, (8, 3)),
    ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "</s>"}}, (0, 2)),
    (
        {"generation_config": {"eos_token_id": [7, 2]}, "tokenizer_config": {"eos_token": "</s>"}},
        (7, 2),
    ),
    ({"config": {"eos_token_id": 0}, "special_tokens_map": {"eos_token": "</s>"}}, (0, 2)),
    (
        {
            "tokenizer_config": {"eos_token": "<|end|>"},
            "special_tokens_map": {"eos_token": {"content": "</s>"}},
        },
        (3,),
    ),
    ({"config": {}, "tokenizer_config": {"eos_token": "</s>"}}, (2,)),
    ({"config": {}, "tokenizer_config": {"eos_token": {"content": "<|end|>"}}}, (3,)),
    ({"tokenizer_config": {"eos_token": None}}, ()),
    ({"tokenizer_config": {"eos_token": "<nowhere>"}}, ()),
]


@pytest.mark.parametrize(("files", "eos_ids"), EOS_FILES)
def test_eos_ids_are_those_of_the_first_config_and_that_of_the_tokenizer(
    tmp_path: Path, files: dict[str, Any], eos_ids: tuple[int, ...]
) -> None:
    tokenizer = load_here(small.save(tmp_path, small.byte_level(), **files))
    assert tokenizer.eos_ids == eos_ids
    if files.keys() <= {"config", "generation_config"}:
        (tmp_path / "tokenizer.json").unlink()
        assert read_eos_ids(tmp_path) == eos_ids


@pytest.mark.parametrize(
    ("files", "bos_id"),
    [
        ({}, None),
        ({"tokenizer_config": {"bos_token": "<s>"}, "config": {"bos_token_id": 3}}, 1),
        ({"tokenizer_config": {"bos_token": {"content": "<s>"}}}, 1),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 3}}, 3),
        ({"generation_config": {"bos_token_id": 2}}, 2),
    ],
)
def test_bos_id(tmp_path: Path, files: dict[str, Any], bos_id: int | None) -> None:
    assert load_here(small.save(tmp_path, small.byte_level(), **files)).bos_id == bos_id


@pytest.mark.parametrize("value", ["2", [2, "3"], -1, 2.0, True, {"id": 2}])
def test_an_eos_id_that_is_no_id_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    small.write(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be"):
        read_eos_ids(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{}"])
def test_a_damaged_file_beside_the_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_eos_ids(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load_optional(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"no tokenizer .*--token-ids"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Nope"}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable") as caught:
        Tokenizer.load_optional(tmp_path)
    assert "\n" not in str(caught.value)


# --- check_token_ids


def test_ids_inside_the_vocabulary_pass_and_the_next_does_not() -> None:
    check_token_ids([0, 9, 5], 10)
    with pytest.raises(UsageError, match="token id 9 at place 1"):
        check_token_ids([0, 9, 5], 9)


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_an_id_outside_the_vocabulary_is_named_with_the_limit(bad: int) -> None:
    with pytest.raises(UsageError, match=f"token id {bad} at place 2 .* from 0 to 9"):
        check_token_ids([0, 9, bad], 10)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        check_token_ids([], 10)
