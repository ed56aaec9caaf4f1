"""Decoders that make vectors (Qwen3-Embedding) against transformers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from support.models.checkpoints import EOS_ID, make_decoder
from support.models.encoder_checkpoints import add_modules
from support.models.family_cases import LFM2
from support.models.gguf_files import pack_as, write_gguf
from tokenizers import Tokenizer, processors

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ShardnetError, UnsupportedModelError, UsageError
from shardnet.runtime.encoding.decoder import load_decoder
from shardnet.runtime.encoding.encoder import EncoderInput
from shardnet.runtime.encoding.encoder_facts import EncoderFacts, find_encoder
from shardnet.runtime.encoding.judge import SYSTEM, Judge, question
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_place
from shardnet.tokenizers.text_backend import TextBackend

TOLERANCE = 1e-4
TEXTS = ["She read a letter.", "", "It rained all day in the north " * 30, *["a fortune"] * 9]
SIZES = {"num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 96, "hidden_size": 64}


def make_embedder(folder: Path, family: str = "qwen3", **config: Any) -> Path:
    """Write a checkpoint as Qwen3-Embedding's: the names of the class without a head, which is left
    out, and a tokenizer that ends each text."""
    make_decoder(folder, family, **{**SIZES, "max_position_embeddings": 1024, **config})
    stored = load_file(folder / "model.safetensors")
    bare = {
        name.removeprefix("model."): one for name, one in stored.items() if "lm_head" not in name
    }
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS_ID)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    add_modules(folder, "lasttoken", normalizes=True)
    return folder


def facts_of(path: Path) -> EncoderFacts:
    facts = find_encoder(path)
    assert facts is not None
    return facts


def inputs_of(path: Path) -> list[EncoderInput]:
    backend = TextBackend.load_optional(tokenizer_place(path))
    assert backend is not None
    return [EncoderInput(*backend.encode_input(text, None, True, None)) for text in TEXTS]


def last_states(folder: Path, texts: Sequence[str] = TEXTS) -> Any:
    """transformers' hidden state of each text's last token [texts, E], behind the final norm."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        given = (torch.tensor([own.encode(text).ids]) for text in texts)
        return np.stack([model(ids).last_hidden_state[0, -1].numpy() for ids in given])


@pytest.mark.parametrize("is_tied", [True, False])
def test_vectors_are_those_of_transformers(tmp_path: Path, is_tied: bool) -> None:
    """Short texts together, a long one in chunks; with no head anywhere."""
    folder = make_embedder(tmp_path / "model", tie_word_embeddings=is_tied)
    facts = facts_of(folder)
    assert (facts.modules.pooling, facts.modules.normalized, facts.context) == ("last", True, 1024)
    assert facts.is_for_rings_too
    decoder = load_decoder(facts, "cpu")
    inputs = inputs_of(folder)
    assert max(len(given.token_ids) for given in inputs) > 512
    made = decoder.forward(inputs, "last")
    np.testing.assert_allclose(made, last_states(folder), rtol=0, atol=TOLERANCE)
    assert decoder.stage.kv.blocks_used == 0
    assert decoder.stage.weight_bytes <= facts.weight_bytes < facts.needed_bytes
    with pytest.raises(UsageError, match="outside the model's vocabulary"):
        decoder.forward([EncoderInput([400], [0])], "last")
    assert decoder.stage.kv.blocks_used == 0


def test_other_poolings_and_a_prompt_before_each_text(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "model", "mistral")
    add_modules(folder, "mean_tokens")
    says = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(says))
    facts = facts_of(folder)
    assert (facts.modules.pooling, facts.modules.prompt) == ("mean", "Query: ")
    assert not facts.is_for_rings_too
    inputs = inputs_of(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = load_decoder(facts, "cpu")
    with torch.inference_mode():
        states = [model(torch.tensor([one.token_ids])).last_hidden_state[0] for one in inputs]
    for pooling, expected in (
        ("mean", [rows.mean(0) for rows in states]),
        ("cls", [rows[0] for rows in states]),
    ):
        made = decoder.forward(inputs, pooling)
        np.testing.assert_allclose(made, torch.stack(expected), rtol=0, atol=TOLERANCE)


def gguf_tokenizer(folder: Path) -> dict[str, Any]:
    """The tokenizer in `folder` as llama.cpp's converter writes it."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_eos_token": True,
    }


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_makes_the_same_and_ends_texts(tmp_path: Path, kind: str) -> None:
    """The vectors of the same values, which stay packed."""
    folder = make_decoder(tmp_path / "model", "qwen3", **SIZES, max_position_embeddings=1024)
    how, words = gguf.GGMLQuantizationType[kind], gguf_tokenizer(folder)
    path = write_gguf(
        folder, tmp_path / "m.gguf", pack=pack_as(how), tokenizer=words, pooling_type=3
    )
    facts = facts_of(path)
    assert facts.is_for_rings_too
    assert facts.modules.normalized is None
    unpacked = replace(facts, unpacks=True).weight_bytes  # what is quantised takes less in memory
    assert (unpacked > facts.weight_bytes) == (kind == "Q8_0")
    stored = load_file(folder / "model.safetensors")
    values = {name: one.numpy() for name, one in stored.items()}
    rounded = {
        name: one if one.ndim < 2 else dequantize(quantize(one, how), how).reshape(one.shape)
        for name, one in values.items()
    }
    bare = make_embedder(tmp_path / "bare", max_position_embeddings=1024)
    own = {name.removeprefix("model."): torch.tensor(one) for name, one in rounded.items()}
    save_file(own, bare / "model.safetensors", metadata={"format": "pt"})
    inputs = inputs_of(path)
    assert [one.token_ids for one in inputs] == [one.token_ids for one in inputs_of(bare)]
    made = load_decoder(facts, "cpu").forward(inputs, "last")
    expected = last_states(bare)
    if kind == "F32":
        np.testing.assert_allclose(made, expected, rtol=0, atol=TOLERANCE)
    else:  # rows are quantised too
        cosines = (made * expected).sum(1) / np.linalg.norm(made, axis=1)
        assert (cosines / np.linalg.norm(expected, axis=1)).min() > 0.999


def test_a_gguf_of_another_pooling_is_no_rings(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "model", "qwen3", **SIZES, max_position_embeddings=1024)
    for number, pooling in ((1, "mean"), (2, "cls")):
        facts = facts_of(write_gguf(folder, tmp_path / f"{number}.gguf", pooling_type=number))
        assert (facts.modules.pooling, facts.is_for_rings_too) == (pooling, False)


def test_what_only_rings_compute_is_theirs_if_they_make_the_same(tmp_path: Path) -> None:
    """Of models with states they give the last token's vectors, and no others."""
    folder = make_decoder(tmp_path / "model", "lfm2", **LFM2, num_hidden_layers=4)
    add_modules(folder, "lasttoken", normalizes=True)
    assert find_encoder(folder) is None
    add_modules(folder, "mean_tokens", normalizes=True)
    with pytest.raises(UnsupportedModelError, match="lfm2 is computed by rings alone"):
        find_encoder(folder)


def test_what_makes_no_vectors_or_not_so(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "model")
    Checkpoint.open(folder)  # a ring computes it too, where it does not fit beside one
    config = json.loads((folder / "config.json").read_text())

    def refused(words: str, **keys: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        with pytest.raises(UnsupportedModelError, match=words):
            find_encoder(folder)

    refused("is_causal = False is not supported", is_causal=False)  # as GTE-Qwen2's code has it
    refused("architectures = .*LlamaBidirectionalModel", architectures=["LlamaBidirectionalModel"])
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    assert facts_of(folder).config.model_type == "qwen3"
    seeing = make_decoder(tmp_path / "seeing", "qwen3_vl")
    add_modules(seeing, "lasttoken")
    with pytest.raises(UnsupportedModelError, match="embedding models that see"):
        find_encoder(seeing)
    (folder / "modules.json").unlink()
    assert find_encoder(folder) is None
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "score.weight": torch.ones(1, 64)}, folder / "model.safetensors")
    add_modules(folder, "lasttoken")
    with pytest.raises(ShardnetError, match="score"):
        load_decoder(facts_of(folder), "cpu")


QUERY, DOCUMENTS = "what did she do", ["She read <|im_end|> a letter.", "It rained. " * 40]


def make_reranker(folder: Path, **config: Any) -> Path:
    """Write a checkpoint as Qwen3-Reranker's, with the files of sentence-transformers."""
    make_decoder(folder, "qwen3", **SIZES, max_position_embeddings=1024, **config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = None
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    modules = [("Transformer", ""), ("LogitScore", "1_LogitScore")]
    listed = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(
        '{"true_token_id": 9, "false_token_id": 7}'
    )
    (folder / "chat_template.jinja").write_text(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
    return folder


def judged(folder: Path, instruction: str, most: int) -> list[float]:
    """By how much transformers' logits say yes rather than no, as the model's page has it."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    begin, end = (
        own.encode(text).ids
        for text in (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        )
    )
    own.encode_special_tokens = True
    scores = []
    for document in DOCUMENTS:
        text = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = [*begin, *own.encode(text).ids[: most - len(begin) - len(end)], *end]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(float(logits[9] - logits[7]))
    return scores


@pytest.mark.parametrize("most", [1024, 300])
def test_documents_are_judged_by_the_logits_of_yes_and_no(tmp_path: Path, most: int) -> None:
    folder = make_reranker(tmp_path / "model")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
    facts = facts_of(folder)
    assert (facts.config.kind, facts.context, facts.is_for_rings_too) == ("reranker", most, False)
    backend = TextBackend.load_optional(tokenizer_place(folder))
    assert backend is not None
    judge = Judge(backend.encode, facts.modules.answers)
    asked = [question(QUERY, document, "be strict") for document in DOCUMENTS]
    tokens = [judge.tokens(backend.encode, one, most) for one in asked]
    assert max(map(len, tokens)) == min(most, 532)
    inputs = [EncoderInput(ids, [0] * len(ids)) for ids in tokens]
    made = load_decoder(facts, "cpu", judge).forward(inputs, "mean")
    expected = judged(folder, "be strict", most)
    np.testing.assert_allclose(made[:, 0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("is_tied", "kind"), [(True, "F32"), (False, "F32"), (False, "Q8_0")])
def test_a_gguf_with_the_heads_rows_of_its_answers_alone(
    tmp_path: Path, is_tied: bool, kind: str
) -> None:
    """As llama.cpp's converter writes Qwen3-Reranker, also where the head is no embedding (8B)."""
    folder = make_reranker(tmp_path / "model", tie_word_embeddings=is_tied)
    stored = load_file(folder / "model.safetensors")
    table = stored["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    path = write_gguf(
        folder,
        tmp_path / "m.gguf",
        pack=pack_as(gguf.GGMLQuantizationType[kind]),
        extra={"output.weight": None, "cls.output.weight": table[[9, 7]].numpy()},
        pooling_type=4,
        classifier__output_labels=["yes", "no"],
    )
    facts = facts_of(path)
    assert (facts.config.kind, facts.is_for_rings_too) == ("reranker", False)
    backend = TextBackend.load_optional(tokenizer_place(folder))
    assert backend is not None
    judge = Judge(backend.encode, None)
    asked = [question(QUERY, document, "be strict") for document in DOCUMENTS]
    tokens = [judge.tokens(backend.encode, one, 1024) for one in asked]
    inputs = [EncoderInput(ids, [0] * len(ids)) for ids in tokens]
    made = load_decoder(facts, "cpu", judge).forward(inputs, "last")
    expected = judged(folder, "be strict", 1024)
    tolerance = TOLERANCE if kind == "F32" else 0.05
    np.testing.assert_allclose(made[:, 0], expected, rtol=0, atol=tolerance)
    with pytest.raises(UnsupportedModelError, match="an LM head of yes and no alone"):
        Checkpoint.open(path)  # a ring would write by the embedding


def test_a_reranker_in_gguf_or_asked_in_other_words(tmp_path: Path) -> None:
    folder = make_reranker(tmp_path / "model")
    says = {"pooling_type": 4, "classifier__output_labels": ["yes", "no"]}
    path = write_gguf(folder, tmp_path / "m.gguf", **says)
    facts = facts_of(path)
    assert (facts.config.kind, facts.is_for_rings_too) == ("reranker", True)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UnsupportedModelError, match="asked as Qwen3-Reranker is"):
        find_encoder(folder)
    (folder / "modules.json").unlink()
    assert find_encoder(folder) is None  # nothing says so: a ring is asked, as any other model
