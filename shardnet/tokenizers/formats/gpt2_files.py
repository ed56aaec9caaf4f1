"""Reads GPT-2's tokenizer format, vocab.json and merges.txt, and the one file tokenizer.json.

Knows the pretokenizer of each tokenizer class, which tokenizer_config.json names, else the model's
type implies.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from shardnet.checkpoint.tensors.json_files import MAX_WHOLE_BYTES
from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import NamedToken, read_added_tokens
from shardnet.tokenizers.backends.byte_level import merged_backend
from shardnet.tokenizers.backends.pretokenizers import GGUF_NAMES, GPT2, QWEN2, Pretokenizer
from shardnet.tokenizers.backends.token_files import (
    LoadedTokenizer,
    damaged,
    read_bytes,
    read_lines,
    read_object,
)

_CLASSES = {"GPT2Tokenizer": GPT2, "Qwen2Tokenizer": QWEN2}
_ENDOFTEXT = "<|endoftext|>"


def read_gpt2_files(folder: Path) -> LoadedTokenizer:
    """Read vocab.json, merges.txt and the added tokens of the files beside them.

    Raises CheckpointError, which names the file and the entry or line.
    """
    pretokenizer = _pretokenizer(folder)
    vocabulary = _vocabulary(folder / "vocab.json")
    added = read_added_tokens(folder, vocabulary)
    if _ENDOFTEXT in vocabulary:
        token_id = vocabulary[_ENDOFTEXT]
        end = NamedToken(text=_ENDOFTEXT, token_id=token_id, special=True)
        added.setdefault(token_id, end)
    end_id = next((t.token_id for t in added.values() if t.text == _ENDOFTEXT), None)
    backend = merged_backend(
        vocabulary,
        _merges(folder / "merges.txt"),
        added.values(),
        pretokenizer,
        where=str(folder / "vocab.json"),
        prefix_space=_flag(folder, "add_prefix_space"),
    )
    return LoadedTokenizer(
        backend=backend,
        bos_id=end_id if pretokenizer is GPT2 else None,
        eos_ids=() if end_id is None else (end_id,),
        adds_bos=False,
    )


def _pretokenizer(folder: Path) -> Pretokenizer:
    path = folder / "tokenizer_config.json"
    named = read_object(path).get("tokenizer_class")
    if named is None:
        from shardnet.model.families.registry import find_family  # all families: 0.3 s

        model_type = read_object(folder / "config.json").get("model_type")
        family = find_family(model_type) if isinstance(model_type, str) else None
        if family is not None and family.pretokenizer:
            return GGUF_NAMES[family.pretokenizer]
        raise CheckpointError(
            f"{path}: tokenizer_class is missing, and nothing says how vocab.json splits words "
            f"for model_type = {model_type!r:.80}",
            remedy="add tokenizer.json or tokenizer_class",
        )
    pretokenizer = _CLASSES.get(named.removesuffix("Fast")) if isinstance(named, str) else None
    if pretokenizer is None:
        raise CheckpointError(
            f"{path}: tokenizer_class = {named!r:.80} is not supported without tokenizer.json; "
            f"supported: {', '.join(_CLASSES)}"
        )
    return pretokenizer


def _flag(folder: Path, key: str) -> bool:
    path = folder / "tokenizer_config.json"
    value = read_object(path).get(key)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"{path}: {key} must be true or false, not {value!r:.80}")
    return bool(value)


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_object(path, distinct=True)
    if not vocabulary:
        raise damaged(f"{path} has no tokens")
    for text, token_id in vocabulary.items():
        if type(token_id) is not int:
            raise CheckpointError(
                f"{path}: {text!r:.80} must have a token id, not {token_id!r:.80}"
            )
    return vocabulary


def _merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, data in enumerate(read_lines(path), 1):
        try:
            line = data.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise damaged(f"{path}: line {number} is not UTF-8: {error}") from error
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        first, _, second = line.partition(" ")
        if not first or not second or " " in second:
            raise damaged(f"{path}: line {number} is not two tokens")
        merges.append((first, second))
    return merges


def read_tokenizer_json(path: Path) -> LoadedTokenizer:
    """Read the file. Raises CheckpointError if it is damaged or not supported."""
    data = read_bytes(path, MAX_WHOLE_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a usable tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return LoadedTokenizer(backend=backend)
