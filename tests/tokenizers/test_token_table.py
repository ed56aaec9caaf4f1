"""Decoding by the table: as the library decodes, for every kind of tokenizer, and in parts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import small_tokenizers as small
from support.models import trained_tokenizers as trained
from support.models.loaded_tokenizers import (
    GGUF_WORDS,
    InThisProcess,
    gguf_tokenizer,
    made_tokenizer,
    tokenizer_of,
)
from support.text_parts import parts_of
from tokenizers import AddedToken, decoders

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.errors import CheckpointError
from shardnet.tokenizers import token_table
from shardnet.tokenizers.text_backend import TextBackend
from shardnet.tokenizers.token_table import ByteStrings, Joins, TokenTable
from shardnet.tokenizers.tokenizer import Tokenizer

SPACES = decoders.Replace("▁", " ")
DECODERS: dict[str, tuple[Any, Joins]] = {
    "gemma": ([SPACES, decoders.ByteFallback(), decoders.Fuse()], Joins.PIECES),
    "llama": (
        [SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        Joins.PIECES,
    ),
    "strips two": ([SPACES, decoders.Fuse(), decoders.Strip(" ", 2, 0)], Joins.PIECES),
    "bytes and metaspace": (
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)],
        Joins.PIECES,
    ),
    "metaspace never": ([decoders.Metaspace(prepend_scheme="never", split=False)], Joins.PIECES),
    "metaspace": ([decoders.Metaspace()], Joins.PIECES),
    "several texts": ([decoders.Replace("the", "▁"), SPACES, decoders.Fuse()], Joins.PIECES),
    "nothing": ([], Joins.PIECES),
    "byte level": ([decoders.ByteLevel()], Joins.BYTES),
    "strips each": ([SPACES, decoders.Strip(" ", 1, 0)], Joins.OTHERWISE),
    "expressions": ([decoders.Replace(tokenizers.Regex("▁+"), " ")], Joins.OTHERWISE),
    "replaces late": ([decoders.ByteFallback(), SPACES], Joins.OTHERWISE),
    "two byte levels": ([decoders.ByteLevel(), decoders.ByteLevel()], Joins.OTHERWISE),
}
NOT_IN_PARTS = {"strips two"}
"""Here what a token adds depends on more than the tokens just before it."""
OTHER_KINDS = {
    "wordpiece": Joins.OTHERWISE,
    "suffixed": Joins.OTHERWISE,
    "plain_words": Joins.WORDS,
    "byte_level": Joins.BYTES,
}
RUNS = [*("<0xE2>", "<0x96>", "<0x81>", "<0x41>", "<0xFF>", "▁", "▁the", "▁▁", "t", "</s>")]
"""Pieces that matter to some decoder: a ▁ in bytes, among others."""


@cache
def decoded_by(name: str) -> Tokenizer:
    """The pieces of sentencepiece with a decoder of DECODERS, and odd byte pieces."""
    steps, _ = DECODERS[name]
    backend = small.sentencepiece()
    backend.decoder = steps[0] if len(steps) == 1 else decoders.Sequence(steps)
    backend.add_tokens([AddedToken(text) for text in ("<0xe2>", "<0x+4>", "<0x4>", "<0x041>")])
    return made_tokenizer(backend, bos_id=1, eos_ids=(2,))


@cache
def bundled() -> Tokenizer:
    return made_tokenizer(
        tokenizers.Tokenizer.from_file(str(DEFAULT_MODEL_PATH / "tokenizer.json"))
    )


def check_decodes(
    tokenizer: Tokenizer, data: st.DataObject, joins: Joins, *, in_parts: bool = True
) -> None:
    """Check that any ids are decoded as by the library, whole and in parts."""
    table, coder = tokenizer.table, tokenizer._coder
    assert isinstance(coder, InThisProcess)
    assert table.joins is joins
    known = [
        n for piece in RUNS if (n := coder.backend.loaded.backend.token_to_id(piece)) is not None
    ]
    any_id = st.integers(0, tokenizer.n_tokens + 1)
    ids = data.draw(st.lists(st.sampled_from(known) | any_id if known else any_id, max_size=16))
    keep = data.draw(st.booleans())
    want = coder.backend.decode(ids, keep)
    if table.joins is not Joins.OTHERWISE:
        assert table.decode(ids, keep_special_tokens=keep) == want
        unpacked = TokenTable.unpack(*table.pack())
        assert unpacked.decode(ids, keep_special_tokens=keep) == want
    if in_parts:
        assert "".join(parts_of(tokenizer, ids, keep=keep)) == want


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=12)
@given(data=st.data())
def test_decoders_of_many_steps(name: str, data: st.DataObject) -> None:
    check_decodes(decoded_by(name), data, DECODERS[name][1], in_parts=name not in NOT_IN_PARTS)


@pytest.mark.parametrize("kind", sorted(small.KINDS))
@settings(max_examples=12)
@given(data=st.data())
def test_kinds_of_tokenizer_json(kind: str, data: st.DataObject) -> None:
    check_decodes(tokenizer_of(kind), data, OTHER_KINDS.get(kind, Joins.PIECES))


@pytest.mark.parametrize("kind", [*trained.KINDS, *GGUF_WORDS])
@settings(max_examples=12)
@given(data=st.data())
def test_kinds_that_shardnet_builds(kind: str, data: st.DataObject) -> None:
    joins = Joins.BYTES if kind in GGUF_WORDS else Joins.PIECES
    check_decodes(gguf_tokenizer(kind), data, joins)


@settings(max_examples=12)
@given(data=st.data())
def test_the_bundled_model(data: st.DataObject) -> None:
    check_decodes(bundled(), data, Joins.BYTES)


def test_ids_without_a_token_and_special_ones() -> None:
    table = TokenTable(
        joins=Joins.BYTES, flags=bytes([1, 0, 3, 7, 5, 0]), later=ByteStrings.of([b"a"] * 6)
    )
    assert table.ids_without_token(4) == (1,)
    assert table.ids_without_token(8) == (1, 5, 6, 7)
    assert table.special_ids() == {2, 3}


def test_a_table_of_too_many_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_table, "MAX_TOKEN_BYTES", 10)
    monkeypatch.setattr(token_table, "MAX_TABLE_BYTES", 20)
    assert list(ByteStrings.of([b"a" * 10, b"b" * 10])) == [b"a" * 10, b"b" * 10]
    with pytest.raises(CheckpointError, match="token 1 has 11 bytes; expected at most 10, and 20"):
        ByteStrings.of([b"a" * 9, b"b" * 11])
    with pytest.raises(CheckpointError, match="token 2 has 1 bytes"):
        ByteStrings.of([b"a" * 10, b"b" * 10, b"c"])


def test_too_many_special_tokens_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardnet.tokenizers.text_backend.MAX_SPECIAL", 3)
    path = small.save(tmp_path, small.byte_level())
    assert json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    backend = TextBackend.load_optional(path)
    assert backend is not None
    with pytest.raises(CheckpointError, match="4 special tokens, at most 3 are read"):
        backend.table()
