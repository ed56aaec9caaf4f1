"""Tokens whose texts are alike: which they are, by the makers' description of Engram."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from shardnet.errors import CheckpointError
from shardnet.guard.helper_process import HelperProcess
from shardnet.tokenizers.tokenizer import token_classes

TEXTS = [
    *("the", "The", "THE", " the", "\tthe\n", "thé", "the ", "t he", "ﬁne", "fine", "Ｆine"),
    *(
        " ",
        "  ",
        "\n",
        "\r\n\t",
        "　",
        "",
        "\ue000",
        " \ue000 ",
        "é",
        "e",
        "É",
        "\u0301",
        " \u0301",
    ),
    *("ß", "ss", "İ", "i", "中", "文", "中文", "１", "1", "①", "…", "..."),
]
N_TOKENS = 330
"""A few more than there are texts for."""


def written(folder: Path) -> Tokenizer:
    """Write a tokenizer with bytes that are no characters, texts alike, and special tokens."""
    alphabet = decoders.ByteLevel()
    spelled = {byte: char for char, byte in _bytes_of().items()}
    pieces = ["".join(spelled[byte] for byte in text.encode()) for text in TEXTS]
    vocab: dict[str, int] = {}
    for piece in [*map(str, spelled.values()), *pieces]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = alphabet
    tokenizer.add_special_tokens(["<｜End｜>", "<｜end｜>", AddedToken(" <x> ", lstrip=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def _bytes_of() -> dict[str, int]:
    """The characters by which a byte-level tokenizer spells bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def described(tokenizer: Tokenizer) -> list[int]:
    """The classes, one token after the other."""
    steps = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase(), normalizers.Replace(Regex("[ \t\r\n]+"), " ")]
    steps += [normalizers.Replace(Regex("^ $"), "\ue000"), normalizers.Strip()]
    normalizer = normalizers.Sequence([*steps, normalizers.Replace("\ue000", " ")])
    keys: list[str] = []
    found = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = normalizer.normalize_str(text) or text
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token_id)
        if key not in keys:
            keys.append(key)
        found.append(keys.index(key))
    return found + [0] * (N_TOKENS - len(found))


def test_texts_are_alike_but_for_case_accents_and_spaces(tmp_path: Path) -> None:
    tokenizer = written(tmp_path)
    wanted = described(tokenizer)
    found = token_classes(tmp_path, N_TOKENS, max(wanted) + 1)
    assert torch.frombuffer(found, dtype=torch.int32).tolist() == wanted

    def of(text: str) -> int:
        spelled = {byte: char for char, byte in _bytes_of().items()}
        return wanted[tokenizer.token_to_id("".join(spelled[byte] for byte in text.encode()))]

    assert of("the") == of("THE") == of("\tthe\n") == of("thé") != of("t he")
    assert of(" ") == of("\n") == of("  ") != of("e")
    assert wanted[tokenizer.token_to_id("<｜End｜>")] == wanted[tokenizer.token_to_id("<｜end｜>")]


def test_they_are_found_once_for_a_folder_and_anew_when_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    call = HelperProcess.call

    def counted(self: HelperProcess, job: str, *rest: object) -> object:
        started.append(job)
        return call(self, job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(HelperProcess, "call", counted)
    n_classes = max(described(written(tmp_path))) + 1
    first = token_classes(tmp_path, N_TOKENS, n_classes)
    assert token_classes(tmp_path, N_TOKENS, n_classes) == first
    assert started == ["classes"]
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<｜End｜>", "<｜Fin｜>"))
    with pytest.raises(CheckpointError, match=f"engram_compressed_vocab_size is {n_classes}"):
        token_classes(tmp_path, N_TOKENS, n_classes)
    assert token_classes(tmp_path, N_TOKENS, n_classes + 1) != first
    assert started == ["classes"] * 2


def test_a_folder_without_a_tokenizer_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer \(tokenizer.json, .* n-grams"):
        token_classes(tmp_path, N_TOKENS, 9)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE"}}))
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not a usable tokenizer"):
        token_classes(tmp_path, N_TOKENS, 9)
