"""Small tokenizers of the kinds that checkpoints have, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = [
    "Hello world, hello again; the cat sat on the mat and the dog sat on the cat.",
    "It is a truth universally acknowledged, that a single man in possession",
    "Café crème, naïve façade: déjà vu. 你好,世界! 🙂🙃 ☕  two  spaces\nand lines",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]


def byte_level(bos: bool = False) -> Tokenizer:
    """GPT-2's kind; with `bos` the post-processor puts `<s>` in front, as in Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("my token"), AddedToken("über")])
    if bos:
        tokenizer.post_processor = bos_processor(tokenizer)
    return tokenizer


def bos_processor(tokenizer: Tokenizer) -> Any:
    return processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


def byte_fallback_model(alphabet: str) -> models.BPE:
    """A BPE whose pieces are SPECIAL, 256 bytes, the characters and a few merges."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("a", "t"), ("▁", "c")]
    merges.append(("▁c", "at"))
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )


ALPHABET = "▁abcdefghijklmnopqrstuvwxyzHI.,;:!\né☕"


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: a space is put in front, unknown characters fall back to bytes."""
    tokenizer = Tokenizer(byte_fallback_model(ALPHABET))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = bos_processor(tokenizer)
    return tokenizer


def metaspace() -> Tokenizer:
    """The newer form of the same: Metaspace on both sides."""
    tokenizer = Tokenizer(byte_fallback_model(ALPHABET))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def wordpiece() -> Tokenizer:
    pieces = [*SPECIAL, "the", "cat", "##s", "sat", ".", ",", "##at", "'", "do", "n"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def suffixed() -> Tokenizer:
    """The first GPT's kind: `</w>` ends a word."""
    pieces = [*SPECIAL, "the</w>", "c", "at</w>", "s", "a", "t</w>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def plain_words() -> Tokenizer:
    """No decoder at all: words are joined by spaces."""
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, "the", "cat", "sat"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "suffixed": suffixed,
    "plain_words": plain_words,
}


def save(folder: Path, backend: Tokenizer, **files: Any) -> Path:
    """Write tokenizer.json and JSON files beside it: `config={...}` makes config.json."""
    backend.save(str(folder / "tokenizer.json"))
    write(folder, **files)
    return folder


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
