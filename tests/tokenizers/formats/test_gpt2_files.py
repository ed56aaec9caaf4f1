"""vocab.json and merges.txt: the ids of transformers, added tokens, bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from support.models import trained_tokenizers as trained
from support.models.loaded_tokenizers import load_here
from support.models.trained_tokenizers import gpt2_backend
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import MAX_ID
from shardnet.tokenizers.tokenizer import Tokenizer

END = trained.GPT2_END
QWEN_ADDED = {
    str(420 + place): {"content": text, "special": text.startswith("<|"), "normalized": False}
    for place, text in enumerate(("<|im_start|>", "<|im_end|>", "<think>"))
}
CLASSES = {"GPT2Tokenizer": GPT2Tokenizer, "Qwen2Tokenizer": Qwen2Tokenizer}
FILES: dict[str, dict[str, Any]] = {
    "GPT2Tokenizer": {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"},
        "special_tokens_map": {"bos_token": END, "eos_token": {"content": END}},
    },
    "Qwen2Tokenizer": {
        "tokenizer_config": {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": QWEN_ADDED,
            "eos_token": "<|im_end|>",
        },
    },
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        return trained.write_gpt2(tmp_path_factory.mktemp(name), gpt2_backend(), **FILES[name])

    return make


@pytest.fixture(scope="module")
def pair_of(folder_of: Callable[[str], Path]) -> Callable[[str], tuple[Tokenizer, Any]]:
    @cache
    def load(name: str) -> tuple[Tokenizer, Any]:
        folder = folder_of(name)
        said = json.loads(gpt2_backend().to_str())["model"]
        added = {n: entry["content"] for n, entry in QWEN_ADDED.items()}
        other = CLASSES[name](
            vocab=said["vocab"], merges=[tuple(merge) for merge in said["merges"]]
        )
        if name == "Qwen2Tokenizer":
            other.add_special_tokens({"extra_special_tokens": [*added.values()][:2]})
            other.add_tokens([added["422"]])
        return load_here(folder), other

    return load


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=150)
@given(text=trained.TEXTS)
@example(text="e\u0301 é ①")
@example(text="it's  WE'LL 1234\n\n x<|endoftext|>y")
def test_ids_are_those_of_transformers(
    pair_of: Callable[[str], tuple[Tokenizer, Any]], name: str, text: str
) -> None:
    tokenizer, other = pair_of(name)
    assert tokenizer.encode(text) == other(text, add_special_tokens=False)["input_ids"]


def test_special_tokens(folder_of: Callable[[str], Path]) -> None:
    gpt2 = load_here(folder_of("GPT2Tokenizer"))
    end_id = gpt2_backend().token_to_id(END)
    assert (gpt2.bos_id, gpt2.eos_ids, gpt2.special_ids) == (end_id, (end_id,), {end_id})
    assert gpt2.encode(f"the{END}", bos="on")[0] == end_id
    qwen = load_here(folder_of("Qwen2Tokenizer"))
    assert (qwen.bos_id, qwen.eos_ids) == (None, (421,))
    assert qwen.special_ids == {end_id, 420, 421}
    assert qwen.encode("<|im_start|>a<think>")[::2] == [420, 422]
    assert qwen.n_tokens == 423
    n_words = gpt2_backend().get_vocab_size()
    assert qwen.ids_without_token(425) == (*range(n_words, 420), 423, 424)


def test_the_model_type_stands_in_for_the_class(tmp_path: Path) -> None:
    trained.write_gpt2(tmp_path, gpt2_backend(), config={"model_type": "gpt2"})
    assert load_here(tmp_path).encode("e\u0301") == gpt2_backend().encode("e\u0301").ids
    trained.write_gpt2(tmp_path, gpt2_backend(), config={"model_type": "qwen3"})
    assert load_here(tmp_path).encode("e\u0301") == gpt2_backend().encode("é").ids


def test_a_space_before_the_text_and_a_bos_where_the_config_says_so(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
    trained.write_gpt2(tmp_path, gpt2_backend(), tokenizer_config=config)
    tokenizer = load_here(tmp_path)
    assert tokenizer.encode("the cat") == [0, *gpt2_backend().encode(" the cat").ids]


# --- bad files


def merges(spoil: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / "merges.txt").write_bytes(
        spoil((folder / "merges.txt").read_text()).encode("utf-8", "surrogateescape")
    )


def words(**changes: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        said = json.loads((folder / "vocab.json").read_text()) | changes
        (folder / "vocab.json").write_text(json.dumps(said))

    return spoil


def beside(name: str, content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def added(entry: Any, key: str = "430") -> Callable[[Path], object]:
    return beside("tokenizer_config.json", {"added_tokens_decoder": {key: entry}})


BAD: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a line of one token": (merges(lambda text: text + "abc\n"), "merges.txt", "is not two tokens"),
    "a line of three": (merges(lambda text: text + "a b c\n"), "merges.txt", "is not two tokens"),
    "merges of no tokens": (
        merges(lambda text: text + "q z\n"),
        "merge",
        "'qz', which is not a token",
    ),
    "merges that are no UTF-8": (merges(lambda text: text + "\udcff"), "merges.txt", "not UTF-8"),
    "no words": (lambda f: (f / "vocab.json").write_text("{}"), "vocab.json", "has no tokens"),
    "words twice": (
        lambda f: (f / "vocab.json").write_text('{"a": 0, "a": 1}'),
        "vocab.json",
        "'a' is there twice",
    ),
    "an id twice": (words(zzz=5), "vocab.json", "id 5 is both"),
    "an id that is none": (words(zzz="5"), "vocab.json", "'zzz' must have a token id, not '5'"),
    "a negative id": (words(zzz=-1), "vocab.json", "'zzz' has the id -1"),
    "a gigantic id": (words(zzz=10**15), "vocab.json", "'zzz' has the id 1000000000000000"),
    "another class": (
        beside("tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"}),
        "tokenizer_config.json",
        "tokenizer_class = 'RobertaTokenizer' is not supported without tokenizer.json; supported: "
        "GPT2Tokenizer, Qwen2Tokenizer",
    ),
    "no class": (beside("config.json", {"model_type": "phi"}), "tokenizer_config.json", "'phi'"),
    "an added token under another id": (
        beside("added_tokens.json", {END: 500}),
        "vocab.json",
        "has the ids 0 and 500",
    ),
    "an added id that is a word's": (
        beside("added_tokens.json", {"<x>": 9}),
        "vocab.json",
        "id 9 is both",
    ),
    "an added id twice": (
        beside("added_tokens.json", {"<x>": 500, "<y>": 500}),
        "added_tokens.json",
        "id 500 is both '<x>' and '<y>'",
    ),
    "an added id that is none": (
        beside("added_tokens.json", {"<x>": "500"}),
        "added_tokens.json",
        "'<x>' must be a token id",
    ),
    "an added gigantic id": (
        beside("added_tokens.json", {"<x>": 1 << 60}),
        "added_tokens.json",
        "is not a token id",
    ),
    "an added id behind the last": (
        beside("added_tokens.json", {"<x>": MAX_ID}),
        "added_tokens.json",
        "is not a token id",
    ),
    "an added token without text": (added({}), "added_tokens_decoder", "expected an object with"),
    "a flag that is none": (added({"content": "x", "lstrip": 1}), "added_tokens_decoder", "430"),
    "a key that is no id": (added({"content": "x"}, "x"), "added_tokens_decoder", "not a token id"),
    "a key that is gigantic": (
        added({"content": "x"}, "9" * 300),
        "added_tokens_decoder",
        "not a token id",
    ),
    "bos that is neither true nor false": (
        beside(
            "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": "yes"}
        ),
        "tokenizer_config.json",
        "add_bos_token must be true or false",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    spoil, file, why = BAD[name]
    trained.write_gpt2(tmp_path, gpt2_backend(), config={"model_type": "gpt2"})
    spoil(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_here(tmp_path)
    assert file in str(caught.value)
    assert why in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
