"""Which tokenizer of a folder is taken, and that text streams alike from every form."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import small_tokenizers as small
from support.models import trained_tokenizers as trained
from support.models.loaded_tokenizers import gguf_tokenizer, load_here
from support.text_parts import parts_of

from shardnet.checkpoint.tensors.manifest import ID_FILES
from shardnet.errors import CheckpointError
from shardnet.tokenizers.formats.tokenizer_files import TOKENIZER_FILES
from shardnet.tokenizers.tokenizer import Tokenizer

FORMS: dict[str, Callable[[Path], object]] = {
    "llama": lambda folder: trained.write_sentencepiece(folder, "llama"),
    "gemma": lambda folder: trained.write_sentencepiece(folder, "gemma"),
    "unigram": lambda folder: trained.write_sentencepiece(folder, "unigram"),
    "llama3": trained.write_tiktoken,
    "tekken": trained.write_tekken,
    "gpt2": lambda folder: trained.write_gpt2(
        folder, trained.gpt2_backend(), config={"model_type": "gpt2"}
    ),
}
IN_GGUF = ["llama", "llama3", "qwen2"]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def load(form: str) -> Tokenizer:
        if form.startswith("gguf "):
            return gguf_tokenizer(form.removeprefix("gguf "))
        folder = tmp_path_factory.mktemp(form)
        FORMS[form](folder)
        return load_here(folder)

    return load


@pytest.mark.parametrize("form", [*FORMS, *(f"gguf {kind}" for kind in IN_GGUF)])
@given(data=st.data())
def test_parts_join_to_the_whole(
    tokenizer_of: Callable[[str], Tokenizer], form: str, data: st.DataObject
) -> None:
    """Any ids, as a model may draw them, and those of texts."""
    tokenizer = tokenizer_of(form)
    any_ids = st.lists(st.integers(0, tokenizer.n_tokens + 1), max_size=30)
    ids = data.draw(st.one_of(any_ids, trained.TEXTS.map(tokenizer.encode)))
    keep = data.draw(st.booleans())
    whole = tokenizer.decode(ids, keep_special_tokens=keep)
    assert "".join(parts_of(tokenizer, ids, keep=keep)) == whole


@pytest.mark.parametrize("form", [*FORMS, *(f"gguf {kind}" for kind in IN_GGUF)])
@pytest.mark.parametrize("text", ["the cat sat", "你好 the ☕é 🙂", "two  spaces\n\n\ttab"])
def test_bytes_of_tokens_join_to_the_text(
    tokenizer_of: Callable[[str], Tokenizer], form: str, text: str
) -> None:
    tokenizer = tokenizer_of(form)
    ids = tokenizer.encode(text, bos="off")
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert joined.decode().removeprefix(" ") == text.removeprefix(" ")
    assert tokenizer.decode(ids) == text


def test_every_file_is_part_of_the_models_id() -> None:
    assert set(TOKENIZER_FILES) <= set(ID_FILES)
    beside = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    assert beside < set(ID_FILES)


def test_the_first_of_several_tokenizers_is_taken(tmp_path: Path) -> None:
    """Each added in front of those before it; the newest of Mistral's, but the plain name first."""
    n_llama3 = len(trained.ranks(trained.LLAMA3)) + 256
    trained.write_gpt2(tmp_path, trained.gpt2_backend(), config={"model_type": "gpt2"})
    assert load_here(tmp_path).n_tokens == trained.gpt2_backend().get_vocab_size()
    trained.write_sentencepiece(tmp_path, "no_bytes", "tokenizer.model.v1")
    assert load_here(tmp_path).n_tokens not in (420, n_llama3)
    trained.write_sentencepiece(tmp_path, "mistral", "tokenizer.model.v3")
    assert load_here(tmp_path).n_tokens == 420
    trained.write_tiktoken(tmp_path)
    assert load_here(tmp_path).n_tokens == n_llama3
    trained.write_tekken(tmp_path)
    assert load_here(tmp_path).token_text(3) == "[INST]"
    small.byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_here(tmp_path).token_text(3) == "<|end|>"


def test_ranks_and_pieces_share_a_name(tmp_path: Path) -> None:
    trained.write_tiktoken(tmp_path)
    assert load_here(tmp_path).is_byte_level
    trained.write_sentencepiece(tmp_path, "llama")
    assert not load_here(tmp_path).is_byte_level


def test_merges_without_a_vocabulary_are_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "merges.txt").write_text("a b\n")
    assert Tokenizer.load_optional(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "most"),
    [("tekken.json", 32 << 20), ("tokenizer.model", 16 << 20), ("vocab.json", 16 << 20)],
)
def test_a_gigantic_file_is_refused_before_it_is_read(tmp_path: Path, name: str, most: int) -> None:
    small.write(tmp_path, config={"model_type": "gpt2"})
    (tmp_path / "merges.txt").write_text("")
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=f"{name} has 1099511627776 bytes, at most {most}"):
        load_here(tmp_path)


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    small.Tokenizer(small.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="the tokenizer has no tokens"):
        load_here(tmp_path)
