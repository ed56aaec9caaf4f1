"""Encoders from GGUF against transformers on the same weights, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from runtime.encoding.test_encoder_families import TEXTS, TOLERANCE, facts_of, inputs_of, reference
from support.models.encoder_checkpoints import add_dense, make_encoder, write_encoder_gguf

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ShardnetError, UnsupportedModelError
from shardnet.runtime.encoding.encoder import load_encoder
from shardnet.runtime.encoding.encoder_facts import find_encoder
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_place
from shardnet.tokenizers.text_backend import TextBackend

WIDE = {"intermediate_size": 64}
"""Rows of whole blocks, also where they are packed."""
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("BertModel", "Q8_0", WIDE),
    ("BertForMaskedLM", "F16", {}),
    ("XLMRobertaModel", "F32", {"type_vocab_size": 1}),
    ("RobertaForMaskedLM", "Q8_0", {**WIDE, "type_vocab_size": 1}),
    ("XLMRobertaForSequenceClassification", "F16", {"type_vocab_size": 1}),
    ("DistilBertModel", "F32", {}),
    ("NomicBertModel", "Q8_0", WIDE),
    ("ModernBertModel", "F16", {"num_hidden_layers": 4}),
    ("ModernBertForSequenceClassification", "Q8_0", {**WIDE, "classifier_pooling": "mean"}),
]


@pytest.mark.parametrize(("name", "kind", "keys"), CASES)
def test_a_gguf_is_what_transformers_makes_of_its_weights(
    tmp_path: Path, name: str, kind: str, keys: dict[str, Any]
) -> None:
    folder = make_encoder(tmp_path / "model", name, **keys)
    facts = facts_of(write_encoder_gguf(folder, tmp_path / "m.gguf", kind))
    behind = 1 if "oberta" in name else 0
    assert (facts.context, facts.modules.pooling) == (48 - behind, "mean")
    assert facts.modules.normalized is None
    inputs = inputs_of(TEXTS)
    if not facts.config.has_types:
        inputs = [type(one)(one.token_ids, [0] * len(one.token_ids)) for one in inputs]
    made = load_encoder(facts, "cpu").forward(inputs, "mean")
    for given, found in zip(inputs, made, strict=True):
        expected = reference(folder, given)
        if facts.config.kind == "embedding":
            expected = expected.mean(0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("kind", "is_ollamas"), [("F32", False), ("Q8_0", False), ("F32", True)])
def test_embedding_gemma_by_llama_cpp_and_by_ollama(
    tmp_path: Path, kind: str, is_ollamas: bool
) -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0}
    more = {"query_pre_attn_scalar": 8, "use_bidirectional_attention": True, **WIDE}
    local = {"rope_type": "default", "rope_theta": 77.0}
    rope = {"full_attention": {**local, "rope_theta": 1e6}, "sliding_attention": local}
    sizes["num_hidden_layers"] = 7
    folder = make_encoder(
        tmp_path / "model", "Gemma3TextModel", **sizes, **more, rope_parameters=rope
    )
    dense = add_dense(folder, "mean_tokens", [(64, "Identity", False), (32, "Identity", False)])
    said = {"attention.sliding_window_pattern": [True] * 5 + [False, True]} if is_ollamas else {}
    path = write_encoder_gguf(folder, tmp_path / "m.gguf", kind, is_ollamas=is_ollamas, **said)
    inputs = inputs_of(TEXTS)
    expected = dense(torch.tensor(np.stack([reference(folder, one).mean(0) for one in inputs])))
    facts = facts_of(path)
    assert (facts.context, facts.config.model_type) == (48, "gemma3_text")
    made = load_encoder(facts, "cpu").forward(inputs, facts.modules.pooling)
    np.testing.assert_allclose(made, expected, rtol=0, atol=TOLERANCE)
    backend = TextBackend.load_optional(tokenizer_place(path))
    assert backend is not None
    ids, _ = backend.encode_input("a", None, True, None)
    assert (ids[0], ids[-1], len(ids)) == (2, 3, 3)  # what begins a text, and what ends it
    with pytest.raises(UnsupportedModelError, match="an encoder, which makes vectors"):
        Checkpoint.open(path)
    (folder / "3_Dense" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="lacks the linears behind its pooling"):
        find_encoder(write_encoder_gguf(folder, path, kind, is_ollamas=is_ollamas))


def test_how_vectors_are_pooled_and_texts_are_cut_to_tokens(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "BertModel")
    texts = ("She read a letter, it rained.", "a")
    own: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    own.model_input_names = ["input_ids", "token_type_ids"]
    for number, pooling in enumerate(("mean", "cls", "last"), 1):
        path = write_encoder_gguf(folder, tmp_path / f"{number}.gguf", pooling_type=number)
        assert facts_of(path).modules.pooling == pooling
        backend = TextBackend.load_optional(tokenizer_place(path))
        assert backend is not None
        for pair in (None, texts[1]):
            ids, types = backend.encode_input(texts[0], pair, True, None)
            expected = own(texts[0], pair)
            assert (ids, types) == (expected.input_ids, expected.token_type_ids)


def test_what_is_not_read_from_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def refused(words: str, name: str = "BertModel", **metadata: Any) -> None:
        folder = make_encoder(tmp_path / name, name)
        write_encoder_gguf(folder, path, **metadata)
        with pytest.raises(ShardnetError, match=words):
            load_encoder(facts_of(path), "cpu")

    refused(r"bert\.pooling_type = 9 is not supported", pooling_type=9)
    refused(r"bert\.attention\.causal = True is not supported", **{"attention.causal": True})
    refused(r"bert\.embedding_length is missing", embedding_length=None)
    refused("lacks .* tensors, encoder.layer.2", block_count=3)
    refused("lacks 2 tensors, .*pooler", "BertForSequenceClassification")  # llama.cpp leaves it out
    refused("rerankers of DistilBERT", "DistilBertForSequenceClassification")
    with pytest.raises(UnsupportedModelError, match="an encoder, which makes vectors"):
        Checkpoint.open(path)
    raw = path.read_bytes().replace(b"\x04\0\0\0\0\0\0\0bert", b"\x04\0\0\0\0\0\0\0bort")
    path.write_bytes(raw)
    assert find_encoder(path) is None
