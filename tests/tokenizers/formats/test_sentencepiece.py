"""sentencepiece's `.model` files: the ids and texts of sentencepiece itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models import trained_tokenizers as trained
from support.models.loaded_tokenizers import load_here
from support.soak import examples

from shardnet.errors import CheckpointError
from shardnet.tokenizers.formats.sentencepiece_file import protobuf_fields
from shardnet.tokenizers.tokenizer import Tokenizer


@cache
def oracle(kind: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=trained.sentencepiece_model(kind))


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def load(kind: str) -> Tokenizer:
        folder = tmp_path_factory.mktemp(kind)
        trained.write_sentencepiece(folder, kind)
        return load_here(folder)

    return load


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """As sentencepiece encodes: no bos, and special tokens are text like any other."""
    return tokenizer.encode(text, bos="off", parse_special=False)


@pytest.mark.parametrize("kind", trained.KINDS)
@settings(max_examples=examples(25))
@given(text=trained.TEXTS)
@example(text="")
@example(text=" ")
@example(text="   the  cat  ")
@example(text="aaaaaaa abababab bababab")
@example(text="<s>[INST]<0x41><sep>ab  ab")
@example(text="0<s>")
def test_ids_are_those_of_sentencepiece(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, text: str
) -> None:
    """But for unknown text on both sides of what reads like a special token: one unknown each."""
    unknown = oracle(kind).unk_id()

    def fused(ids: list[int]) -> list[int]:
        return [a for a, b in zip(ids, [-1, *ids], strict=False) if not a == b == unknown]

    assert fused(plain(tokenizer_of(kind), text)) == fused(oracle(kind).encode(text))


@pytest.mark.parametrize("kind", trained.KINDS)
@settings(max_examples=examples(25))
@given(text=trained.TEXTS)
def test_text_is_that_of_sentencepiece(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, text: str
) -> None:
    """But for what sentencepiece writes in place of an unknown token, and a ▁ in the text.

    It takes every ▁ from the beginning where it has removed spaces; here one, as streams need it.
    """
    ids = oracle(kind).encode(text.replace("▁", "_"))
    if oracle(kind).unk_id() not in ids:
        assert tokenizer_of(kind).decode(ids) == oracle(kind).decode(ids)


@pytest.mark.parametrize("kind", trained.KINDS)
def test_special_ids_are_those_of_sentencepiece(
    tokenizer_of: Callable[[str], Tokenizer], kind: str
) -> None:
    tokenizer, other = tokenizer_of(kind), oracle(kind)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (other.bos_id(), (other.eos_id(),))
    assert tokenizer.n_tokens == other.get_piece_size()
    control = {n for n in range(tokenizer.n_tokens) if other.is_control(n) or other.is_unknown(n)}
    assert tokenizer.special_ids == control
    assert tokenizer.ids_without_token(tokenizer.n_tokens) == ()


def test_bos_stands_before_a_text_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    trained.write_sentencepiece(tmp_path, "llama")
    ids = oracle("llama").encode("the cat")
    assert load_here(tmp_path).encode("the cat") == [1, *ids]
    for said, want in ((False, ids), (True, [1, *ids]), (None, [1, *ids])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": said}))
        assert load_here(tmp_path).encode("the cat") == want
        assert load_here(tmp_path).encode("the cat", bos="on") == [1, *ids]
        assert load_here(tmp_path).encode("<s>the cat", bos="auto") == [1, *ids]


def test_every_part_between_special_tokens_begins_with_a_space(tmp_path: Path) -> None:
    """Each part is encoded alone, as mistral-common and Meta's code do it."""
    trained.write_sentencepiece(tmp_path, "mistral")
    other = oracle("mistral")
    begin, end = other.piece_to_id("[INST]"), other.piece_to_id("[/INST]")
    text = "<s>[INST]the cat[/INST]hello</s>"
    each = [1, begin, *other.encode("the cat"), end, *other.encode("hello"), 2]
    assert load_here(tmp_path).encode(text) == each


def test_only_the_beginning_has_a_space_where_the_config_says_so(tmp_path: Path) -> None:
    """`legacy: false`: what stands behind a special token is a text that goes on."""
    trained.write_sentencepiece(tmp_path, "mistral")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": False}))
    other = oracle("mistral")
    begin = other.piece_to_id("[INST]")
    tokenizer = load_here(tmp_path)
    behind = [token_id for token_id in other.encode("xthe cat") if token_id]
    assert other.decode(behind) == "xthe cat"
    the_cat = tokenizer.encode("[INST]the cat", bos="off")
    assert the_cat[0] == begin
    assert tokenizer.decode([*other.encode("x"), *the_cat[1:]]) == "xthe cat"
    assert tokenizer.encode("the cat[INST]", bos="off") == [*other.encode("the cat"), begin]


def test_no_space_is_put_before_a_text_where_the_config_says_so(tmp_path: Path) -> None:
    trained.write_sentencepiece(tmp_path, "llama")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": False}))
    tokenizer = load_here(tmp_path)
    assert tokenizer.encode(" the cat", bos="off") == oracle("llama").encode("the cat")
    assert tokenizer.decode(tokenizer.encode(" the cat")) == " the cat"


def test_tokens_that_files_add(tmp_path: Path) -> None:
    """Beyond the pieces, with a gap; a control piece renamed; a piece made special by its role."""
    trained.write_sentencepiece(tmp_path, "mistral")
    n_pieces = oracle("mistral").get_piece_size()
    inst = oracle("mistral").piece_to_id("[INST]")
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({"<|im_start|>": n_pieces + 3, "a word": n_pieces})
    )
    config = {
        "eos_token": "<|im_start|>",
        "added_tokens_decoder": {str(inst): {"content": "[BEGIN]", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_here(tmp_path)
    ids = tokenizer.encode("[BEGIN]the cat<|im_start|>a word", bos="off")
    assert ids == [inst, *oracle("mistral").encode("the cat"), n_pieces + 3, n_pieces]
    assert tokenizer.eos_ids == (n_pieces + 3,)
    assert tokenizer.special_ids >= {inst, n_pieces + 3}
    assert n_pieces not in tokenizer.special_ids
    assert tokenizer.n_tokens == n_pieces + 4
    assert tokenizer.ids_without_token(n_pieces + 6) == tuple(
        n_pieces + extra for extra in (1, 2, 4, 5)
    )


# --- bad files


def number(value: int) -> bytes:
    """A varint."""
    head = b""
    while value > 0x7F:
        head, value = head + bytes([value & 0x7F | 0x80]), value >> 7
    return head + bytes([value])


def field(place: int, value: int | float | bytes) -> bytes:
    """A field of a message."""
    match value:
        case float():
            return number(place << 3 | 5) + struct.pack("<f", value)
        case int():
            return number(place << 3) + number(value)
        case _:
            return number(place << 3 | 2) + number(len(value)) + bytes(value)


def with_piece(data: bytes, place: int, more: bytes) -> bytes:
    """The file with fields added to a piece: the last of several counts."""
    written, pieces = b"", 0
    for key, value in protobuf_fields(memoryview(data), 1 << 20):
        assert not isinstance(value, int)
        if key == 1:
            value = bytes(value) + (more if pieces == place else b"")
            pieces += 1
        written += field(key, bytes(value))
    return written


def with_spec(data: bytes, key: int, more: bytes) -> bytes:
    """The file with fields added to its trainer_spec (2) or normalizer_spec (3)."""
    (spec,) = [value for place, value in protobuf_fields(memoryview(data), 1 << 20) if place == key]
    assert not isinstance(spec, int)
    return data + field(key, bytes(spec) + more)


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "no pieces|0 pieces"),
    "text": (lambda data: b"hello world\n" * 9, "no sentencepiece model"),
    "truncated": (lambda data: data[: len(data) // 2], "truncated or no sentencepiece"),
    "a length beyond the end": (
        lambda data: b"\x0a\xff\xff\xff\xff\x0f" + data,
        "field 1 claims 4294967295 bytes",
    ),
    "a number without end": (lambda data: b"\x0a" + b"\xff" * 20, "unterminated varint"),
    "a group": (lambda data: b"\x0b" + data, "wire type 3 of field 1"),
    "pieces that are numbers": (lambda data: b"\x08\x05" + data, r"pieces\[0\] is a number"),
    "a piece of a float": (
        lambda data: field(1, field(1, 1.0)) + data,
        r"pieces\[0\]: field 1 is not UTF-8|piece 0 ",
    ),
    "a piece that is no UTF-8": (
        lambda data: field(1, field(1, b"\xc3\x28")) + data,
        r"pieces\[0\]: field 1 is not UTF-8",
    ),
    "a piece twice": (
        lambda data: with_piece(data, 300, field(1, "▁the".encode())),
        "the piece '▁the' occurs 2 times",
    ),
    "an empty piece": (
        lambda data: with_piece(data, 300, field(1, b"")),
        "piece 300 has 0 characters",
    ),
    "a huge piece": (
        lambda data: with_piece(data, 300, field(1, b"a" * 10_000)),
        "piece 300 has 10000 characters",
    ),
    "a score that is none": (
        lambda data: with_piece(data, 300, field(2, float("nan"))),
        "piece 300 .* has the score nan",
    ),
    "a type nobody knows": (
        lambda data: with_piece(data, 300, field(3, 9)),
        "has type 9; known: 1 NORMAL",
    ),
    "an unused piece": (
        lambda data: with_piece(data, 300, field(3, 5)),
        r"pieces\[300\] .* is of type UNUSED",
    ),
    "a byte piece missing": (
        lambda data: with_piece(data, 3, field(3, 1)),
        "only 255 of 256",
    ),
    "a byte piece that is none": (
        lambda data: with_piece(data, 3, field(1, b"<0xGG>")),
        "'<0xGG>' is none of <0x00>",
    ),
    "bytes that the trainer denies": (
        lambda data: with_spec(data, 2, field(35, 0)),
        "byte_fallback is false, and there are byte pieces",
    ),
    "a model of words": (
        lambda data: with_spec(data, 2, field(3, 3)),
        "trainer_spec.model_type has a value that is not supported",
    ),
    "spaces behind words": (
        lambda data: with_spec(data, 2, field(24, 1)),
        "treat_whitespace_as_suffix",
    ),
    "a charsmap that is none": (
        lambda data: with_spec(data, 3, field(2, b"\xff" * 9)),
        "precompiled_charsmap",
    ),
    "two unknown pieces": (
        lambda data: with_piece(data, 300, field(3, 2)),
        "2 pieces are the unknown one",
    ),
    "a pointer of Git LFS": (
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    spoil, why = BAD[name]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(spoil(trained.sentencepiece_model("llama")))
    with pytest.raises(CheckpointError, match=why) as caught:
        load_here(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.mark.parametrize("kind", ["llama", "unigram"])
@given(data=st.data())
def test_damage_ends_in_a_tokenizer_or_in_a_named_error(
    damaged: Path, kind: str, data: st.DataObject
) -> None:
    content = bytearray(trained.sentencepiece_model(kind))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (damaged / "tokenizer.model").write_bytes(content)
    refused = ""
    try:
        load_here(damaged).encode("the cat")
    except CheckpointError as error:
        refused = str(error)
    assert not refused or str(damaged) in refused
