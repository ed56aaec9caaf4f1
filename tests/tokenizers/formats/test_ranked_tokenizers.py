"""Ranks of bytes, Llama 3's, Kimi's and tekken: the ids of tiktoken, special tokens, bad files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given, settings
from support.models import trained_tokenizers as trained
from support.models.loaded_tokenizers import load_here

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.byte_level import ranked_backend
from shardnet.tokenizers.backends.pretokenizers import (
    KIMI,
    LLAMA3,
    O200K,
    TEKKEN,
    Pretokenizer,
)
from shardnet.tokenizers.tokenizer import Tokenizer

N_RANKS = len(trained.ranks(LLAMA3))


@cache
def oracle(split: Pretokenizer, n_unused: int = 0) -> tiktoken.Encoding:
    tokens = trained.ranks(split)
    return tiktoken.Encoding(
        name="small",
        pat_str=split.patterns[0],
        mergeable_ranks={t: rank for rank, t in enumerate(tokens[: len(tokens) - n_unused])},
        special_tokens={},
    )


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama3")
    trained.write_tiktoken(folder)
    return load_here(folder)


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tekken")
    trained.write_tekken(folder)
    return load_here(folder)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, bos="off", parse_special=False)


@settings(max_examples=80)
@given(text=trained.TEXTS)
@example(text="zzqq zzqqz")
@example(text="aaaaaaa abababab bababab")
def test_llama3_ids_are_those_of_tiktoken(llama3: Tokenizer, text: str) -> None:
    ids = plain(llama3, text)
    assert ids == oracle(LLAMA3).encode_ordinary(text)
    assert llama3.decode(ids) == text
    assert b"".join(llama3.token_bytes(token_id) for token_id in ids) == text.encode()


@settings(max_examples=80)
@given(text=trained.TEXTS)
@example(text="Café ABCdef fooBar 123/\n")
def test_tekken_ids_are_those_of_tiktoken_behind_the_special_ones(
    tekken: Tokenizer, text: str
) -> None:
    ids = plain(tekken, text)
    want = oracle(TEKKEN, trained.N_TEKKEN_UNUSED).encode_ordinary(text)
    assert ids == [rank + trained.N_TEKKEN_SPECIAL for rank in want]
    assert tekken.decode(ids) == text


KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
"""As Kimi's own program has it."""


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its published files, with few ranks."""
    folder, first = tmp_path_factory.mktemp("kimi"), len(trained.ranks(KIMI))
    trained.write_tiktoken(folder, "tiktoken.model", KIMI)
    named = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 17: "<|im_middle|>"}
    config = {
        "added_tokens_decoder": {
            str(first + place): {"content": text, "special": True} for place, text in named.items()
        },
        "additional_special_tokens": [*named.values()],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_here(folder)


@settings(max_examples=80)
@given(text=trained.TEXTS)
@example(text="Don't 你好world 世界 ABCdef's 12345\r\n カタカナ漢字 한국어")
def test_kimi_ids_are_those_of_tiktoken(kimi: Tokenizer, text: str) -> None:
    tokens = trained.ranks(KIMI)
    other = tiktoken.Encoding(
        name="small",
        pat_str=KIMI_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={},
    )
    assert kimi.encode(text, parse_special=False) == other.encode_ordinary(text)


def test_special_tokens_of_kimi(kimi: Tokenizer) -> None:
    """Names as tokenizer_config.json has them, the others by their ids; bos stands in templates."""
    first = len(trained.ranks(KIMI))
    assert (kimi.n_tokens, kimi.bos_id, kimi.eos_ids) == (first + 256, first, (first + 1,))
    hello = plain(kimi, "hello")
    assert kimi.encode("<|im_user|>hello<|im_end|>") == [first + 3, *hello, first + 2]
    assert kimi.token_text(first + 255) == f"<|reserved_token_{first + 255}|>"


@given(text=trained.TEXTS)
def test_o200k_words_are_those_of_tiktoken(text: str) -> None:
    """gpt-oss's pattern, which GGUF files name gpt-4o."""
    backend = ranked_backend(trained.ranks(O200K), [], O200K, first_id=0, where="")
    ids = backend.encode(text, add_special_tokens=False).ids
    assert ids == oracle(O200K).encode_ordinary(text)


def test_a_word_that_is_a_token_is_taken_whole(llama3: Tokenizer) -> None:
    """Though no merges lead there."""
    assert plain(llama3, "zzqq") == [N_RANKS - 1]
    assert len(plain(llama3, "azzqq")) > 2


def test_special_tokens_of_llama3(llama3: Tokenizer) -> None:
    """The names and places of llama-models' models/llama3/tokenizer.py."""
    assert llama3.n_tokens == N_RANKS + 256
    assert llama3.bos_id == N_RANKS
    assert llama3.eos_ids == (N_RANKS + 1, N_RANKS + 8, N_RANKS + 9)
    text = "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
    user, hello = (oracle(LLAMA3).encode_ordinary(t) for t in ("user", "\n\nhello"))
    ids = [N_RANKS + 6, *user, N_RANKS + 7, *hello, N_RANKS + 9]
    assert llama3.encode(text) == [N_RANKS, *ids]
    assert llama3.encode("<|begin_of_text|>" + text) == [N_RANKS, *ids]
    assert llama3.decode(ids) == "user\n\nhello"
    texts = [llama3.token_text(N_RANKS + place) for place in range(256)]
    assert len(set(texts)) == 256
    assert texts[:6] == [
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
        *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>"),
        "<|reserved_special_token_2|>",
    ]
    assert texts[8:12] == [
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|reserved_special_token_3|>"),
    ]
    assert texts[255] == "<|reserved_special_token_247|>"


def test_special_tokens_may_be_renamed_beside_the_file(tmp_path: Path) -> None:
    trained.write_tiktoken(tmp_path)
    config = {
        "added_tokens_decoder": {str(N_RANKS + 20): {"content": "<|mine|>", "special": True}},
        "eos_token": "<|mine|>",
        "add_bos_token": False,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_here(tmp_path)
    assert tokenizer.encode("<|mine|>") == [N_RANKS + 20]
    assert tokenizer.eos_ids == (N_RANKS + 20,)


def test_special_tokens_of_tekken(tekken: Tokenizer) -> None:
    first = trained.N_TEKKEN_SPECIAL
    assert (tekken.bos_id, tekken.eos_ids) == (1, (2,))
    hi = [rank + first for rank in oracle(TEKKEN).encode_ordinary("hello")]
    assert tekken.encode("[INST]hello[/INST]") == [1, 3, *hi, 4]
    assert tekken.special_ids == set(range(first))
    assert [tekken.token_text(place) for place in (0, 9, 11, 18, 20, 23)] == [
        *("<unk>", "[TOOL_CALLS]", "<pad>", "[/SYSTEM_PROMPT]", "<SPECIAL_20>", "<SPECIAL_23>")
    ]
    n_ranks = len(trained.ranks(TEKKEN)) - trained.N_TEKKEN_UNUSED
    assert tekken.n_tokens == first + n_ranks


def test_tekken_files_name_their_special_tokens(tmp_path: Path) -> None:
    listed = [
        {"rank": 0, "token_str": "<unk>", "is_control": True},
        {"rank": 2, "token_str": "</s>", "is_control": True},
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 5, "token_str": "[THINK]", "is_control": False},
    ]
    trained.write_tekken(tmp_path, special_tokens=listed)
    tokenizer = load_here(tmp_path)
    assert tokenizer.encode("<s>[THINK]") == [1, 5]
    assert tokenizer.decode([1, 5]) == "[THINK]"
    assert tokenizer.token_text(3) == "<SPECIAL_3>"


# --- bad files

Lines = list[bytes]


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


BAD_RANKS: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "a line cut short": (lambda lines: [*lines[:-1], b"AAAA"], "line 380 is not a token in base64"),
    "a rank left out": (lambda lines: lines[:9] + lines[10:], "line 10 has rank 10, expected 9"),
    "a rank twice": (lambda lines: [*lines[:10], *lines[9:]], "line 11 has rank 9, expected 10"),
    "a gigantic rank": (lambda lines: [*lines, b"AAAA " + b"9" * 40], "line 381 is not a token"),
    "broken base64": (lambda lines: [*lines, b"AAAAA 380"], "line 381: base64"),
    "a token twice": (
        lambda lines: [*lines, line(b"zzqq", 380)],
        "ranks 379 and 380 are both b'zzqq'",
    ),
    "a huge token": (
        lambda lines: [*lines, line(b"a" * 4000, 380)],
        "rank 380 has 4000 bytes",
    ),
    "a byte missing": (
        lambda lines: [*lines[:255], line(b"\xfe\xfe", 255), *lines[256:]],
        "no rank is the single byte 0xFF",
    ),
}


@pytest.mark.parametrize("name", BAD_RANKS)
def test_a_bad_file_of_ranks_is_refused_by_line(tmp_path: Path, name: str) -> None:
    spoil, why = BAD_RANKS[name]
    path = trained.write_tiktoken(tmp_path)
    path.write_bytes(b"\n".join(spoil(path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(CheckpointError, match=why) as caught:
        load_here(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_added_tokens_do_not_take_the_place_of_ranks(tmp_path: Path) -> None:
    trained.write_tiktoken(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 9}))
    with pytest.raises(CheckpointError, match="id 9 is a rank, and '<x>'"):
        load_here(tmp_path)


def config(**changes: Any) -> dict[str, Any]:
    return {"config": trained.tekken()["config"] | changes}


def vocab(place: int, **changes: Any) -> dict[str, Any]:
    entries = trained.tekken()["vocab"]
    entries[place] = entries[place] | changes
    return {"vocab": entries}


BAD_TEKKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no config": ({"config": None}, "config is missing"),
    "a gigantic vocabulary": (
        config(default_vocab_size=10**12),
        "config.default_vocab_size must be 1 to",
    ),
    "more tokens than listed": (config(default_vocab_size=9999), "vocab lists 380 tokens"),
    "nothing but special tokens": (
        config(default_num_special_tokens=401),
        "default_num_special_tokens is 401, of 401 tokens",
    ),
    "no pattern": (config(pattern=None), "config.pattern must be a text"),
    "a pattern that is none": (config(pattern="(["), "invalid pattern to split words"),
    "a gigantic pattern": (config(pattern="a" * 20_000), "config.pattern must be a text"),
    "a rank that is another's": (vocab(7, rank=8), r"vocab\[7\] is not a token of rank 7"),
    "bytes that are none": (vocab(7, token_bytes="A"), r"vocab\[7\]\.token_bytes"),
    "bytes that are no ASCII": (vocab(7, token_bytes="é"), r"vocab\[7\]\.token_bytes"),
    "vocab is no list": ({"vocab": {"a": 1}}, "vocab is no list"),
    "special tokens are no list": ({"special_tokens": {"a": 1}}, "special_tokens must be a list"),
    "a special token twice": (
        {"special_tokens": [{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]},
        "the token 'a' has the ids",
    ),
    "a special rank twice": (
        {"special_tokens": [{"rank": 0, "token_str": "<a>"}, {"rank": 0, "token_str": "<b>"}]},
        r"special_tokens\[1\] needs token_str and a rank of its own",
    ),
    "a special rank beyond the block": (
        {"special_tokens": [{"rank": 24, "token_str": "<a>"}]},
        r"special_tokens\[0\] needs token_str and a rank of its own below 24",
    ),
}


@pytest.mark.parametrize("name", BAD_TEKKEN)
def test_a_bad_tekken_is_refused_by_field(tmp_path: Path, name: str) -> None:
    changes, why = BAD_TEKKEN[name]
    path = trained.write_tekken(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=why) as caught:
        load_here(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
