"""Encoders of every family against transformers, pooling by plain formulas, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models.encoder_checkpoints import add_dense, add_modules, make_encoder

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.hub_cache import choose_files
from shardnet.errors import (
    CapacityError,
    CheckpointError,
    ShardnetError,
    UnsupportedModelError,
    UsageError,
)
from shardnet.runtime.encoding import encoder as encoder_module
from shardnet.runtime.encoding.encoder import EncoderInput, batches, load_encoder
from shardnet.runtime.encoding.encoder_facts import EncoderFacts, find_encoder

TOLERANCE = 1e-4
TEXTS = [[2, 5, 6, 3], [2, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 3], [2, 3]]
CLASSES = [
    *("BertModel", "BertForPreTraining", "BertForSequenceClassification"),
    *("XLMRobertaModel", "XLMRobertaForSequenceClassification", "RobertaForMaskedLM"),
    *("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    *("NomicBertModel", "MPNetModel", "DistilBertForMaskedLM"),
]


def facts_of(folder: Path) -> EncoderFacts:
    facts = find_encoder(folder)
    assert facts is not None
    return facts


def inputs_of(texts: list[list[int]]) -> list[EncoderInput]:
    return [EncoderInput(ids, [int(place > 2) for place in range(len(ids))]) for ids in texts]


def reference(folder: Path, given: EncoderInput) -> Any:
    """transformers' hidden states [T, E], or its score [1]."""
    [name] = json.loads((folder / "config.json").read_text())["architectures"]
    kind: Any = getattr(transformers, name)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    more = {}
    if name.startswith(("Bert", "NomicBert")):
        more["token_type_ids"] = torch.tensor([given.type_ids], dtype=torch.long)
    ids = torch.tensor([given.token_ids])
    with torch.inference_mode():
        if name.endswith("Classification"):
            return model(ids, **more).logits[0].numpy()
        return model.base_model(ids, **more).last_hidden_state[0].numpy()


@pytest.mark.parametrize("name", CLASSES)
def test_a_batch_is_what_transformers_makes_of_each_text(tmp_path: Path, name: str) -> None:
    folder = make_encoder(tmp_path / "model", name)
    facts = facts_of(folder)
    behind = 1 if name.startswith(("XLMRoberta", "Roberta", "MPNet")) else 0
    assert facts.context == 48 - behind
    assert facts.weight_bytes == 4 * sum(np.prod(one.shape) for one in facts.tensors)
    heads = ("cls.", "lm_head.", "vocab_", "head.", "decoder.")
    if facts.config.kind == "embedding":  # they are not read
        assert not [one.name for one in facts.tensors if one.name.startswith(heads)]
    inputs = inputs_of(TEXTS)
    encoder = load_encoder(facts, "cpu")
    made = encoder.forward(inputs, "mean")
    assert made.dtype == np.float32
    for given, found in zip(inputs, made, strict=True):
        expected = reference(folder, given)
        if facts.config.kind == "embedding":
            expected = expected.mean(0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_pooling_is_what_the_files_say(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "BertModel")
    said = facts_of(folder).modules
    assert (said.pooling, said.normalized) == ("mean", None)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 18}')
    inputs = inputs_of(TEXTS)
    states = [reference(folder, given) for given in inputs]
    for said, expected in (
        ("mean_tokens", [rows.mean(0) for rows in states]),
        ("cls_token", [rows[0] for rows in states]),
        ("lasttoken", [rows[-1] for rows in states]),
    ):
        add_modules(folder, said, normalizes=said == "cls_token")
        if said == "lasttoken":  # as newer versions write it
            newer = {"embedding_dimension": 32, "pooling_mode": said}
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(newer))
        facts = facts_of(folder)
        assert (facts.context, facts.modules.normalized) == (18, said == "cls_token")
        made = load_encoder(facts, "cpu").forward(inputs, facts.modules.pooling)
        np.testing.assert_allclose(made, np.stack(expected), rtol=0, atol=TOLERANCE)


def test_linears_behind_the_pooling(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "BertModel")
    dense = add_dense(folder, "mean_tokens", [(48, "Tanh", True), (24, "Identity", False)])
    inputs = inputs_of(TEXTS)
    made = load_encoder(facts_of(folder), "cpu").forward(inputs, "mean")
    expected = dense(torch.tensor(np.stack([reference(folder, one).mean(0) for one in inputs])))
    assert made.shape == (3, 24)
    np.testing.assert_allclose(made, expected, rtol=0, atol=TOLERANCE)
    said = json.loads((folder / "2_Dense" / "config.json").read_text())

    def refused(words: str, **keys: Any) -> None:
        (folder / "2_Dense" / "config.json").write_text(json.dumps({**said, **keys}))
        with pytest.raises(ShardnetError, match=words):
            find_encoder(folder)

    refused("activation_function = .*ReLU", activation_function="torch.nn.ReLU")
    refused("module_input_name = 'token_emb", module_input_name="token_embeddings")
    refused("its tensors are not", out_features=30)


def test_embedding_gemma_attends_both_ways(tmp_path: Path) -> None:
    """Longer than its windows, with names that have nothing in front, two linears, no head."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0}
    more = {
        "use_bidirectional_attention": True,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 4,
    }
    folder = make_encoder(tmp_path / "model", "Gemma3TextModel", **sizes, **more)
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    dense = add_dense(folder, "mean_tokens", [(64, "Identity", False), (32, "Identity", False)])
    facts = facts_of(folder)
    assert (facts.config.model_type, facts.context, facts.model) == ("gemma3_text", 48, None)
    inputs = inputs_of(TEXTS)
    made = load_encoder(facts, "cpu").forward(inputs, facts.modules.pooling)
    expected = dense(torch.tensor(np.stack([reference(folder, one).mean(0) for one in inputs])))
    np.testing.assert_allclose(made, expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(UnsupportedModelError, match="an encoder, which makes vectors"):
        Checkpoint.open(folder)


def test_nomics_own_keys_and_names(tmp_path: Path) -> None:
    """As the model's makers publish it: a config of other keys, projections in one tensor."""
    folder = make_encoder(tmp_path / "model", "NomicBertModel")
    expected = load_encoder(facts_of(folder), "cpu").forward(inputs_of(TEXTS), "mean")
    stored = load_file(folder / "model.safetensors")
    assert "encoder.layers.0.attn.Wqkv.weight" in stored
    old = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling.NomicBertModel"},
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": 48,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000.0,
        "prenorm": False,
        "activation_function": "swiglu",
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "vocab_size": stored["embeddings.word_embeddings.weight"].shape[0],
    }
    (folder / "config.json").write_text(json.dumps(old))
    made = load_encoder(facts_of(folder), "cpu").forward(inputs_of(TEXTS), "mean")
    np.testing.assert_allclose(made, expected, rtol=0, atol=TOLERANCE)
    for key, value in (("prenorm", True), ("num_experts", 8)):  # the latter as v2
        (folder / "config.json").write_text(json.dumps({**old, key: value}))
        with pytest.raises(UnsupportedModelError, match=f"{key} = {value} is not supported"):
            find_encoder(folder)


def test_what_is_not_implemented_or_damaged_is_named(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "BertForSequenceClassification")
    with pytest.raises(UnsupportedModelError, match="an encoder, which makes vectors"):
        Checkpoint.open(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")

    def refused(words: str, **keys: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        with pytest.raises(ShardnetError, match=words):
            load_encoder(facts_of(folder), "cpu")

    refused("num_labels = 2 is not supported", id2label={"0": "a", "1": "b"})
    refused("architectures = .*Question.* is not supported", architectures=["BertForQuestion"])
    refused(r"architectures = \[\[\]\] is not supported", architectures=[[]])
    refused("is_decoder = True", is_decoder=True)
    refused(
        "position_embedding_type = 'relative_key_query' .*: absolute",
        position_embedding_type="relative_key_query",
    )
    refused("position_embedding_type = 'rotary'", position_embedding_type="rotary")
    refused("expected 1 to 512", num_hidden_layers=10**9)
    refused("FP8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    refused("transformers makes no BertForSequence", num_attention_heads=5)
    refused("transformers makes no BertForSequence", hidden_size=16)
    refused("lacks .* tensors, bert.encoder.layer.2", num_hidden_layers=3)
    refused("has, beyond what the model uses, .* tensors, bert.enc", num_hidden_layers=1)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": []}))
    assert find_encoder(folder) is None
    with pytest.raises(CheckpointError, match=r"model_type is .*, expected str"):
        Checkpoint.open(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"classifier.weight": torch.full((1, 32), float("nan"))}, folder / "m")
    (folder / "m").rename(folder / "model.safetensors")
    with pytest.raises(ShardnetError, match="no number"):
        load_encoder(facts_of(folder), "cpu").forward(inputs_of(TEXTS), "mean")
    with pytest.raises(UsageError, match="outside the model's vocabulary"):
        load_encoder(facts_of(folder), "cpu").forward(inputs_of([[4000]]), "mean")


def test_keys_that_change_what_a_call_returns_do_not_count(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "BertModel")
    expected = load_encoder(facts_of(folder), "cpu").forward(inputs_of(TEXTS), "mean")
    config = json.loads((folder / "config.json").read_text())
    for keys in (
        {"return_dict": False, "torch_dtype": "float16"},
        {"output_attentions": True, "output_hidden_states": True},
        {"chunk_size_feed_forward": 5},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        made = load_encoder(facts_of(folder), "cpu").forward(inputs_of(TEXTS), "mean")
        np.testing.assert_array_equal(made, expected)


def test_weights_that_only_a_config_has_are_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(tmp_path / "model", "BertForMaskedLM")
    config = json.loads((folder / "config.json").read_text())
    monkeypatch.setattr(encoder_module, "read_stored", None)
    for keys, words in (
        ({"num_hidden_layers": 512}, "lacks 8160 tensors, encoder.layer.10."),
        ({"hidden_size": 16384}, "and its config 2"),
        ({"vocab_size": 10**6}, "and its config 32"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        with pytest.raises(CheckpointError, match=words):
            load_encoder(facts_of(folder), "cpu")


def test_memory_that_runs_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(make_encoder(tmp_path / "model", "BertModel"))
    loaded = load_encoder(facts, "cpu")

    def run_out(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(loaded.module, "forward", run_out)
    with pytest.raises(CapacityError, match="no memory is left for the encoder"):
        loaded.forward(inputs_of(TEXTS), "mean")
    for where, name in ((encoder_module, "read_stored"), (transformers.BertModel, "__init__")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, run_out)
            with pytest.raises(CapacityError, match="no memory is left for the encoder"):
                load_encoder(facts, "cpu")


def test_modules_that_are_not_implemented_are_named(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "BertModel")
    for said, more, words in (
        ("max_tokens", (), "pooling by .*max_tokens"),
        ("mean_tokens", ("CNN",), "module 'CNN'"),
        ("mean_tokens", ("Normalize", "Normalize"), "in the order .* are not implemented"),
    ):
        add_modules(folder, said, more=more)
        with pytest.raises(UnsupportedModelError, match=words):
            find_encoder(folder)
    add_modules(folder, "cls_token")
    (folder / "1_Pooling").rename(tmp_path / "elsewhere")
    (folder / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        find_encoder(folder)
    (folder / "modules.json").write_text('[{"type": "x.Transformer", "path": "../other"}]')
    with pytest.raises(UnsupportedModelError, match="other folders"):
        find_encoder(folder)


def test_batches_are_bounded_and_hold_each_text_once() -> None:
    lengths = [5000, *[100] * 90, *range(1, 200), 4096]
    made = [*batches(lengths)]
    assert sorted(place for batch in made for place in batch) == [*range(len(lengths))]
    for batch in made:
        longest = max(lengths[place] for place in batch)
        assert len(batch) == 1 or len(batch) * longest <= 4096


def test_a_pull_brings_what_says_how_to_pool() -> None:
    names = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"]
    names += ["2_Dense/config.json", "2_Dense/model.safetensors"]
    chosen = choose_files([*names, "onnx/model.onnx", "2_Dense/README.md"], "", "org/name")
    assert sorted([*chosen.whole, *chosen.tensors]) == sorted(names)


def test_without_transformers_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(tmp_path / "model", "BertModel")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"run `pip install 'transformers>=5\.24'` there"):
        load_encoder(facts_of(folder), "cpu")
