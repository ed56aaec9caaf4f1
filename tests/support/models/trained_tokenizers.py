"""Tokenizers trained on the spot by the programs whose files shardnet reads, and texts to try."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from hypothesis import strategies as st
from support.models import small_tokenizers as small
from tokenizers import models, pre_tokenizers, trainers

from shardnet.tokenizers.backends.byte_level import byte_of_character, merges_of
from shardnet.tokenizers.backends.pretokenizers import LLAMA3, TEKKEN, Pretokenizer
from shardnet.tokenizers.formats.sentencepiece_file import protobuf_fields

TEXT = [
    "hello world the cat sat on the mat " * 3,
    "Café crème, naïve façade 你好,世界! two  spaces   three",
    "abab abba aaaa aabb aaaaaa bababa",
    "It is a truth universally acknowledged, I'm we'LL 1234 5678   \n\n  in possession",
]

_IN_SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama": {"split_digits": True, "allow_whitespace_only_pieces": True},
    "mistral": {"control_symbols": ["[INST]", "[/INST]"]},
    "gemma": {
        "user_defined_symbols": ["<sep>", "▁▁", "▁▁▁", "\n"],
        "add_dummy_prefix": False,
        "split_by_whitespace": False,
    },
    "symbols": {"user_defined_symbols": ["<sep>", "▁▁", "ab"]},
    "no_bytes": {"byte_fallback": False},
    "collapsing": {"remove_extra_whitespaces": True},
    "nfkc": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "unigram": {"model_type": "unigram", "vocab_size": 320},
    "xlm": {
        "model_type": "unigram",
        "vocab_size": 300,
        "byte_fallback": False,
        "normalization_rule_name": "nmt_nfkc",
        "remove_extra_whitespaces": True,
    },
    "unigram_symbols": {
        "model_type": "unigram",
        "vocab_size": 330,
        "user_defined_symbols": ["<sep>", "\n"],
    },
}
KINDS = sorted(_IN_SENTENCEPIECE)


@cache
def sentencepiece_model(kind: str) -> bytes:
    """A `.model` file of some kind, as sentencepiece trains it."""
    settings = {
        "vocab_size": 420,
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.99,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        "num_threads": 1,
    }
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 5),
        model_writer=written,
        **settings | _IN_SENTENCEPIECE[kind],
    )
    return written.getvalue()


def user_defined(kind: str) -> list[str]:
    """The pieces that are found as wholes."""
    symbols: list[str] = _IN_SENTENCEPIECE[kind].get("user_defined_symbols", [])
    return symbols


def write_sentencepiece(folder: Path, kind: str, name: str = "tokenizer.model") -> Path:
    (folder / name).write_bytes(sentencepiece_model(kind))
    return folder / name


@cache
def ranks(split: Pretokenizer, n_ranks: int = 380) -> tuple[bytes, ...]:
    """Tokens in the order in which plain byte-pair training finds them; the last is never made."""
    (pattern,) = split.patterns
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    counts = Counter(word for text in TEXT for word, _ in cut.pre_tokenize_str(text))
    words = {tuple(bytes([byte]) for byte in word.encode()): n for word, n in counts.items()}
    found = [bytes([byte]) for byte in range(256)]
    while len(found) < n_ranks - 1:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if b"".join(best) not in found:
            found.append(b"".join(best))
        merged: dict[tuple[bytes, ...], int] = {}
        for word, n in words.items():
            whole = _merge(word, best)
            merged[whole] = merged.get(whole, 0) + n
        words = merged
    return (*found, b"zzqq")


def _merge(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    merged: list[bytes] = []
    place = 0
    while place < len(word):
        together = word[place : place + 2] == pair
        merged.append(b"".join(pair) if together else word[place])
        place += 2 if together else 1
    return tuple(merged)


def write_tiktoken(
    folder: Path, name: str = "tokenizer.model", words: Pretokenizer = LLAMA3
) -> Path:
    lines = [base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(ranks(words))]
    (folder / name).write_bytes(b"".join(lines))
    return folder / name


N_TEKKEN_SPECIAL, N_TEKKEN_UNUSED = 24, 3


def tekken() -> dict[str, Any]:
    """A tekken.json of version 3, whose last tokens the model does not have."""
    tokens = ranks(TEKKEN)
    return {
        "config": {
            "pattern": TEKKEN.patterns[0],
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) - N_TEKKEN_UNUSED + N_TEKKEN_SPECIAL,
            "default_num_special_tokens": N_TEKKEN_SPECIAL,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }


def write_tekken(folder: Path, **changes: Any) -> Path:
    (folder / "tekken.json").write_text(json.dumps(tekken() | changes))
    return folder / "tekken.json"


GPT2_END = "<|endoftext|>"


@cache
def gpt2_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE of 400 tokens, trained once."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[GPT2_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXT, *small.TEXT], trainer)
    return tokenizer


def write_gpt2(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """Write vocab.json and merges.txt of a byte-level backend, and JSON files beside them."""
    said = json.loads(backend.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(said["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in said["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


GGUF_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"


def gguf_pieces(kind: str) -> dict[str, Any]:
    """The metadata of a sentencepiece model, as llama.cpp's converter writes it.

    It writes the ▁ of user-defined pieces as spaces.
    """
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(kind))
    n_pieces = model.get_piece_size()
    pieces = [model.id_to_piece(token_id) for token_id in range(n_pieces)]
    symbols = user_defined(kind)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [
            *(piece.replace("▁", " ") if piece in symbols else piece for piece in pieces),
            *(f"[PAD{n_pieces + number}]" for number in range(3)),
        ],
        "tokenizer.ggml.scores": [model.get_score(n) for n in range(n_pieces)] + [-1e4] * 3,
        "tokenizer.ggml.token_type": [_kind_of(model, kind, n) for n in range(n_pieces)] + [5] * 3,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": kind != "gemma",
        "tokenizer.chat_template": GGUF_TEMPLATE,
    }


def gguf_pieces_with_merges() -> dict[str, Any]:
    """The metadata of Gemma's pieces with their merges, as Gemma 4's: one text occurs twice."""
    said = gguf_pieces("gemma")
    kinds = said["tokenizer.ggml.token_type"]
    scored = zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.scores"], kinds, strict=True)
    normal = [(text, score) for text, score, kind in scored if kind == 1]
    ranked = [text for text, _ in sorted(normal, key=lambda piece: -piece[1])]
    merges = merges_of(ranked, set(ranked))
    first = kinds.index(1)
    return said | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*said["tokenizer.ggml.tokens"], ranked[0]],
        "tokenizer.ggml.scores": [0.0] * (len(kinds) + 1),
        "tokenizer.ggml.token_type": [*kinds, kinds[first]],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }


def gguf_pieces_of_an_encoder() -> dict[str, Any]:
    """The metadata of XLM-RoBERTa's tokenizer: four special tokens before the pieces, and a mask.

    The id of each piece is one more than sentencepiece's.
    """
    said = gguf_pieces("xlm")
    own = {key: said[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")}
    (normalizer,) = (
        value
        for number, value in protobuf_fields(memoryview(sentencepiece_model("xlm")), 1 << 16)
        if number == 3
    )
    assert isinstance(normalizer, memoryview)
    charsmap = dict(protobuf_fields(normalizer, 99))[2]
    return said | {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<s>", "<pad>", "</s>", "<unk>", *own["tokens"][3:]],
        "tokenizer.ggml.scores": [0.0] * 4 + own["scores"][3:],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *own["token_type"][3:]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.precompiled_charsmap": [*bytes(charsmap)],
        "tokenizer.ggml.remove_extra_whitespaces": False,
    }


def _kind_of(model: sentencepiece.SentencePieceProcessor, kind: str, token_id: int) -> int:
    if model.id_to_piece(token_id) in user_defined(kind):
        return 4
    if model.is_unknown(token_id):
        return 2
    return 3 if model.is_control(token_id) else 6 if model.is_byte(token_id) else 1


def gguf_ranks(split: Pretokenizer, pre: str) -> dict[str, Any]:
    """The metadata of ranked tokens with two special ones and one word behind them."""
    tokens_of_split = ranks(split)
    table = {byte: character for character, byte in byte_of_character().items()}
    tokens = ["".join(table[byte] for byte in token) for token in tokens_of_split]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<|begin|>", "<|end|>", "<think>", "[PAD383]", "[PAD1]"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4, 5, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges_of(tokens, set(tokens))],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.ggml.eot_token_id": len(tokens) + 1,
        "tokenizer.ggml.eom_token_id": len(tokens) + 2,
    }


PARTS = [
    *"abab   thecsHo'<s>\n\r\t▁é你🙂0x41ſ\0",
    *("<sep>", "the cat", "<s>", "[INST]", "<0x41>", " hello", "①", "ﬁ", "'ll", "'S", "ABC"),
    *("  \n", "ǅ", "12345", "\u0085", "\u3000", "e\u0301", "zzqq", "<|eot_id|>", "</s>", "👩‍👩‍👧"),
]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(PARTS), max_size=25).map("".join),
    st.text(alphabet="ab ▁", max_size=40),
)
"""Any Unicode; the parts that matter to some tokenizer; and what merges in many ways."""
