"""Tokenizers of GGUF metadata: ids as in the tokenizer's first form, templates, bad keys."""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import assume, example, given, settings
from support.models import trained_tokenizers as trained
from support.models.loaded_tokenizers import GGUF_WORDS, gguf_tokenizer, gguf_tokenizer_of
from tokenizers import models, normalizers, pre_tokenizers

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.pretokenizers import GGUF_NAMES, LLAMA3, QWEN2
from shardnet.tokenizers.chat.chat_template import ChatTemplate
from shardnet.tokenizers.chat.template_renderer import render_template
from shardnet.tokenizers.formats.gguf_tokenizer import read_gguf_tokenizer
from shardnet.tokenizers.text_backend import TextBackend
from shardnet.tokenizers.tokenizer import Tokenizer


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, bos="off", parse_special=False)


@pytest.mark.parametrize("kind", ["llama", "gemma", "symbols", "collapsing"])
@given(text=trained.TEXTS)
def test_pieces_give_the_ids_of_sentencepiece(kind: str, text: str) -> None:
    other = sentencepiece.SentencePieceProcessor(model_proto=trained.sentencepiece_model(kind))
    collapses = {"tokenizer.ggml.remove_extra_whitespaces": True} if kind == "collapsing" else {}
    tokenizer = (
        gguf_tokenizer_of(trained.gguf_pieces(kind) | collapses)
        if collapses
        else gguf_tokenizer(kind)
    )
    assert plain(tokenizer, text) == other.encode(text)


@given(text=trained.TEXTS)
def test_pieces_with_merges_give_the_ids_of_sentencepiece(text: str) -> None:
    """Of a text that occurs twice the last one counts."""
    other = sentencepiece.SentencePieceProcessor(model_proto=trained.sentencepiece_model("gemma"))
    said = trained.gguf_pieces_with_merges()
    tokens = said["tokenizer.ggml.tokens"]
    last = {text: token_id for token_id, text in enumerate(tokens)}
    tokenizer = gguf_tokenizer_of(said)
    expected = [last[tokens[token_id]] for token_id in other.encode(text)]
    assert plain(tokenizer, text) == expected
    assert tokenizer.decode(expected) == other.decode(other.encode(text))


@given(text=trained.TEXTS)
def test_pieces_of_an_encoder_give_the_ids_of_sentencepiece_and_marks(text: str) -> None:
    assume(not any(mark in text for mark in ("<s>", "<pad>", "</s>", "<unk>")))  # read as ids
    other = sentencepiece.SentencePieceProcessor(model_proto=trained.sentencepiece_model("xlm"))
    loaded = read_gguf_tokenizer(trained.gguf_pieces_of_an_encoder(), "a.gguf")
    assert loaded is not None
    ids = [token_id + 1 or 3 for token_id in other.encode(text)]
    ids = [3 if token_id == 1 else token_id for token_id in ids]  # that of <unk> was 0
    assert loaded.backend.encode(text).ids == [0, *ids, 2]
    assert loaded.backend.encode("the", text).ids[-len(ids) - 3 :] == [2, 2, *ids, 2]


def test_a_normalization_that_ollama_wrote() -> None:
    """In base64, a character each: so are those of bge-m3 and snowflake-arctic-embed2."""
    said, key = trained.gguf_pieces_of_an_encoder(), "tokenizer.ggml.precompiled_charsmap"
    written = base64.b64encode(bytes(said[key])).decode()
    one, other = (read_gguf_tokenizer(said | more, "a.gguf") for more in ({}, {key: [*written]}))
    assert one is not None
    assert other is not None
    text = "the ﬁ ① cat"
    assert other.backend.encode(text).ids == one.backend.encode(text).ids
    with pytest.raises(CheckpointError, match="precompiled_charsmap is not base64"):
        read_gguf_tokenizer(said | {key: ["!", "="]}, "a.gguf")


def test_texts_for_vectors_end_as_the_file_says() -> None:
    said = trained.gguf_pieces("llama") | {"general.architecture": "llama"}
    [first, last] = (said.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos"))
    for more, begins, ends in (
        ({"llama.pooling_type": 3}, [first], [last]),
        ({"llama.pooling_type": 3, "tokenizer.ggml.add_bos_token": False}, [], [last]),
        ({}, [first], []),  # a text that is gone on with has no end
    ):
        loaded = read_gguf_tokenizer(said | more | {"tokenizer.ggml.add_eos_token": True}, "a.gguf")
        assert loaded is not None
        backend = TextBackend.of(loaded)
        inner = backend.encode("the cat", "off", parse_special=False)
        assert backend.encode("the cat", "auto", parse_special=False) == [*begins, *inner, *ends]
    del said["tokenizer.ggml.eos_token_id"]
    with pytest.raises(CheckpointError, match="eos_token_id is missing, and add_eos_token"):
        read_gguf_tokenizer(
            said | {"llama.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}, "a.gguf"
        )


WORDS = ["the", "cat", "##s", "caf", "##e", "e", "Paris", "paris", "##é"]


@pytest.mark.parametrize(
    ("left_out", "lowers", "strips"),
    [(["Paris", "##é"], True, True), (["Paris"], True, False), ([], False, False)],
)
def test_words_are_changed_as_their_tokens_show(
    left_out: list[str], lowers: bool, strips: bool
) -> None:
    """BERT's kind: no key says whether it lowers and strips accents."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*special, "[unused0]", *(word for word in WORDS if word not in left_out)]
    vocabulary = {word: place for place, word in enumerate(words)}
    other = tokenizers.BertWordPieceTokenizer(vocabulary, lowercase=lowers, strip_accents=strips)
    said = {
        "general.architecture": "nomic-bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [
            word if word[0] == "[" else word[2:] if word[:2] == "##" else f"▁{word}"
            for word in words
        ],
        "tokenizer.ggml.token_type": [3] * 4 + [1] * (len(words) - 4),
    }
    loaded = read_gguf_tokenizer(said, "a.gguf")
    assert loaded is not None
    for text in ("The cats,  café CAFÉ Paris 中the", "[UNK][SEP] [unused0]", ""):
        found, expected = loaded.backend.encode(text, "the"), other.encode(text, "the")
        assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)


def test_two_marks_are_between_two_texts_of_roberta() -> None:
    for arch, between in (("bert", 2), ("modern-bert", 1)):
        said = trained.gguf_ranks(LLAMA3, "roberta-bpe") | {"general.architecture": arch}
        loaded = read_gguf_tokenizer(said, "a.gguf")
        assert loaded is not None
        begin, end = loaded.backend.encode("").ids
        plain_ids = loaded.backend.encode("the", add_special_tokens=False).ids
        expected = [begin, *plain_ids, *[end] * between, *plain_ids, end]
        assert loaded.backend.encode("the", "the").ids == expected


@pytest.mark.parametrize("kind", ["llama3", "tekken"])
@settings(max_examples=80)
@given(text=trained.TEXTS)
@example(text="zzqq")
def test_ranked_tokens_give_the_ids_of_tiktoken(kind: str, text: str) -> None:
    split, _ = GGUF_WORDS[kind]
    other = tiktoken.Encoding(
        name="small",
        pat_str=split.patterns[0],
        mergeable_ranks={token: rank for rank, token in enumerate(trained.ranks(split))},
        special_tokens={"<think>": len(trained.ranks(split)) + 2},
    )
    ids = other.encode(text, allowed_special="all")
    assert plain(gguf_tokenizer(kind), text) == ids
    assert gguf_tokenizer(kind).decode(ids) == text


@given(text=trained.TEXTS)
def test_qwen_tokens_give_the_ids_of_the_tokenizer_json(text: str) -> None:
    """Composed first, as Qwen's tokenizer.json does and llama.cpp does not."""
    said = trained.gguf_ranks(*GGUF_WORDS["qwen2"])
    tokens = said["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in said["tokenizer.ggml.merges"]]
    other = tokenizers.Tokenizer(
        models.BPE(vocab={text: n for n, text in enumerate(tokens[:-5])}, merges=merges)
    )
    other.normalizer = normalizers.NFC()
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2.patterns[0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert plain(gguf_tokenizer("qwen2"), text) == other.encode(text).ids


DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
GLM4 = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
PUBLISHED: dict[str, tuple[list[str], bool]] = {
    **dict.fromkeys(("deepseek-v3", "joyai-llm", "hunyuan-dense", "hy_v4"), (DEEPSEEK_V3, False)),
    **dict.fromkeys(("glm4", "glm5"), (GLM4, True)),
    "hunyuan": ([GLM4[0].replace("{1,3}", "")], True),
}
"""As tokenizer.json has it: patterns one after another, and whether merges are ignored.

Hunyuan-A13B has tiktoken instead, which looks words up first, behind Python code that composes.
"""


@pytest.mark.parametrize("pre", PUBLISHED)
@settings(max_examples=60)
@given(text=trained.TEXTS)
@example(text="zzqq 世界123456あ\n\n !a'LL x\u0301")
def test_tokens_are_those_of_the_published_tokenizer_json(pre: str, text: str) -> None:
    """Where merges are ignored, a word that no merge makes is still a token: zzqq."""
    patterns, ignores_merges = PUBLISHED[pre]
    said = trained.gguf_ranks(LLAMA3, pre)
    tokens = said["tokenizer.ggml.tokens"]
    other = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: n for n, text in enumerate(tokens[:-5])},
            merges=[tuple(line.split(" ")) for line in said["tokenizer.ggml.merges"]],
            ignore_merges=ignores_merges,
        )
    )
    cuts = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    other.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    composed = unicodedata.normalize("NFC", text) if pre == "hunyuan" else text
    assert plain(gguf_tokenizer_of(said), text) == other.encode(composed).ids


def test_special_ids_and_padding() -> None:
    llama = gguf_tokenizer("llama")
    assert (llama.bos_id, llama.eos_ids) == (1, (2,))
    assert llama.encode("the cat") == [1, *plain(llama, "the cat")]
    assert llama.ids_without_token(llama.n_tokens + 3) == tuple(
        llama.n_tokens + place for place in range(3)
    )
    ranked = gguf_tokenizer("llama3")
    first = len(trained.ranks(LLAMA3))
    assert (ranked.bos_id, ranked.eos_ids) == (first, (first + 1, first + 2))
    assert ranked.special_ids == {first, first + 1}
    assert ranked.encode("<think><|end|>") == [first, first + 2, first + 1]
    assert ranked.n_tokens == first + 3


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (["<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"]),
        (["<|user|>", "<|end|>"], ["<|end|>"]),
        (["<|return|>", "<|end|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|return|>", "<|end|>"], ["<|return|>", "<|end|>"]),
    ],
)
def test_turns_end_by_tokens_that_the_file_does_not_name(marks: list[str], ends: list[str]) -> None:
    """As in Gemma's, Phi-3's and gpt-oss' files; a message of Harmony is not the whole answer."""
    said = trained.gguf_pieces("llama")
    tokens = said["tokenizer.ggml.tokens"]
    said["tokenizer.ggml.tokens"] = [*tokens, *marks]
    said["tokenizer.ggml.scores"] += [0.0] * len(marks)
    said["tokenizer.ggml.token_type"] += [3] * len(marks)
    expected = (2, *(len(tokens) + marks.index(end) for end in ends))
    assert gguf_tokenizer_of(said).eos_ids == expected


def test_a_bos_stands_before_a_text_as_the_file_or_else_its_kind_says() -> None:
    for pre, by_default in (("llama-bpe", True), ("qwen2", False), ("tekken", True)):
        said = trained.gguf_ranks(LLAMA3, pre)
        bos_id = said["tokenizer.ggml.bos_token_id"]
        for key, want in ((None, by_default), (True, True), (False, False)):
            ids = gguf_tokenizer_of(said | {"tokenizer.ggml.add_bos_token": key}).encode("the")
            assert (ids[0] == bos_id) == want


def test_every_name_of_a_split_can_be_read() -> None:
    for pre in GGUF_NAMES:
        tokenizer = gguf_tokenizer_of(trained.gguf_ranks(LLAMA3, pre))
        for text in trained.TEXT:
            assert tokenizer.decode(plain(tokenizer, text)) == text


WORDS_OF = {
    "gpt-2": ["a", "1234", "'s", " b", "  ", " c"],
    "llama-bpe": ["a", "123", "4", "'s", " b", "  ", " c"],
    "qwen2": ["a", "1", "2", "3", "4", "'s", " b", "  ", " c"],
    "qwen35": ["a", "1", "2", "3", "4", "'s", " b", "  ", " c"],
    "refact": ["a", "1", "2", "3", "4", "'s", " b", "  ", " c"],
    "deepseek-llm": ["a", "1234", "'", "s", " b", "  ", " c"],
    "exaone4": ["a", "1234", "'s", " b", "  ", " c"],
    "glm4": ["a", "123", "4", "'s", " b", "  ", " c"],
    "minimax-m2": ["a", "123", "4", "'s", " b", "  ", " c"],
    "seed-coder": ["a", "1", "2", "3", "4", "'s", " b", "  ", " c"],
    "deepseek-v3": ["a", "123", "4", "'s", " b", "  ", " c"],
    "jais-2": ["a", "123", "4", "'s", " b", "  ", " c"],
    "exaone-moe": ["a", "1", "2", "3", "4", "'s", " b", "  ", " c"],
    "bailingmoe": ["a", "1", "2", "3", "4", "'s", " b", "  ", " c"],
}


def test_marks_belong_to_letters_in_qwen_3_5() -> None:
    """A vowel sign between letters: a word ends before it in Qwen2's split."""
    cuts = [GGUF_NAMES[pre].pre_tokenizer().pre_tokenize_str("नमस्ते") for pre in ("qwen35", "qwen2")]
    assert [len(words) for words in cuts] == [1, 3]


def test_lines_end_apart_from_signs_in_seed_coder() -> None:
    cuts = [
        GGUF_NAMES[pre].pre_tokenizer().pre_tokenize_str("!\n") for pre in ("seed-coder", "glm4")
    ]
    assert [len(words) for words in cuts] == [2, 1]


@pytest.mark.parametrize("pre", WORDS_OF)
def test_words_of_a_text(pre: str) -> None:
    """Written out by hand."""
    cut = GGUF_NAMES[pre].pre_tokenizer().pre_tokenize_str("a1234's b   c")
    assert [word.replace("Ġ", " ") for word, _ in cut] == WORDS_OF[pre]


def test_the_template_comes_with_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer("llama")
    assert tokenizer.template is not None
    assert (
        render_template(tokenizer.template, [{"role": "user", "content": "hi"}], 0) == "<s>[hi]</s>"
    )
    assert ChatTemplate.find(tmp_path, tokenizer.template) is tokenizer.template
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert ChatTemplate.find(tmp_path, tokenizer.template).source == "beside"
    assert gguf_tokenizer("llama3").template is None
    said = trained.gguf_pieces("llama") | {"tokenizer.chat_template.tool_use": "tools"}
    of_both = gguf_tokenizer_of(said).template
    assert of_both is not None
    assert (of_both.source, of_both.with_tools) == (tokenizer.template.source, "tools")


def test_metadata_without_a_tokenizer() -> None:
    assert read_gguf_tokenizer({"general.architecture": "llama"}, "small.gguf") is None
    assert read_gguf_tokenizer({"tokenizer.ggml.model": "none"}, "small.gguf") is None


# --- bad metadata

Said = dict[str, Any]


def with_key(key: str, value: Any) -> Callable[[Said], Said]:
    return lambda said: said | {f"tokenizer.ggml.{key}": value}


def element(key: str, place: int, value: Any) -> Callable[[Said], Said]:
    def spoil(said: Said) -> Said:
        values = list(said[f"tokenizer.ggml.{key}"])
        values[place] = value
        return said | {f"tokenizer.ggml.{key}": values}

    return spoil


LLAMA_BAD = {
    "another kind": (
        with_key("model", "rwkv"),
        "tokenizer.ggml.model = 'rwkv' is not supported; supported: llama, gpt2, gemma4, bert",
    ),
    "a kind that is a number": (with_key("model", 7), "model must be of type str"),
    "no tokens": (with_key("tokens", None), "tokens is missing or empty"),
    "tokens that are numbers": (with_key("tokens", [1, 2]), "tokens must be an array of str"),
    "a token twice": (element("tokens", 300, "▁the"), "'▁the' occurs 2 times"),
    "a token that is no UTF-8": (element("tokens", 300, "a\udcff"), "tokens[300] is not UTF-8"),
    "an empty token": (element("tokens", 300, ""), "piece 300 has 0 characters"),
    "a huge token": (element("tokens", 300, "a" * 9999), "piece 300 has 9999 characters"),
    "scores too few": (with_key("scores", [0.0]), "scores must have one number for each"),
    "a score that is none": (element("scores", 300, float("inf")), "has the score inf"),
    "types too few": (with_key("token_type", [1]), "token_type has 1 elements for"),
    "a type nobody knows": (element("token_type", 7, 9), "token_type[7] is 9, expected 1 to 6"),
    "a bos beyond the tokens": (with_key("bos_token_id", 10**9), "bos_token_id is 1000000000, but"),
    "an eos that is text": (with_key("eos_token_id", "2"), "eos_token_id must be of type int"),
    "bos that is neither": (with_key("add_bos_token", 1), "add_bos_token must be of type bool"),
    "a prefix that is neither": (with_key("add_space_prefix", "no"), "add_space_prefix must be"),
    "a template that is none": (
        lambda said: said | {"tokenizer.chat_template": 5},
        "tokenizer.chat_template must be a text",
    ),
    "a gigantic template": (
        lambda said: said | {"tokenizer.chat_template": "a" * (1 << 21)},
        "tokenizer.chat_template must be a text of at most",
    ),
}
GPT2_BAD = {
    "no way to split": (with_key("pre", None), "pre is missing; supported: gpt-2,"),
    "a way nobody knows": (with_key("pre", "chatglm"), "pre = 'chatglm' is not supported; supp"),
    "no merges": (with_key("merges", None), "merges is missing or empty"),
    "a merge of one": (element("merges", 5, "ab"), "merges[5] is 'ab', not two tokens"),
    "a merge of no tokens": (element("merges", 5, "q zqz"), "needs 'zqz', which is not a token"),
    "a token twice": (element("tokens", 9, "a"), "tokens 9 and "),
}


@pytest.mark.parametrize("name", [*LLAMA_BAD, *(f"gpt2: {name}" for name in GPT2_BAD)])
def test_bad_metadata_is_refused_by_key(name: str) -> None:
    said = (
        trained.gguf_ranks(LLAMA3, "llama-bpe")
        if name.startswith("gpt2: ")
        else trained.gguf_pieces("llama")
    )
    spoil, why = LLAMA_BAD[name] if name in LLAMA_BAD else GPT2_BAD[name.removeprefix("gpt2: ")]
    with pytest.raises(CheckpointError) as caught:
        read_gguf_tokenizer(spoil(said), "small.gguf")
    assert str(caught.value).startswith("small.gguf: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
