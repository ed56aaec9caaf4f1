"""Keys of config.json that change nothing are read; those that may change the maths are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.models.checkpoints import make_llama
from support.rings.stage_forms import FORM
from transformers import AutoConfig

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import UnsupportedModelError
from shardnet.model.config.fields import MAX_UNKNOWN
from shardnet.model.families.registry import FAMILIES, parse_config
from shardnet.model.families.wrappers import WRAPPERS
from shardnet.runtime.loading.loading import load
from shardnet.runtime.loading.model_facts import identify, identify_at
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.types import LayerRange

TRANSFORMERS_4: dict[str, Any] = {
    "_attn_implementation_autoset": True,
    "_name_or_path": "/root/model",
    "begin_suppress_tokens": [1],
    "chunk_size_feed_forward": 9,
    "decoder_start_token_id": 0,
    "diversity_penalty": 0.5,
    "do_sample": True,
    "exponential_decay_length_penalty": [3, 1.1],
    "finetuning_task": "chat",
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 2,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "num_beam_groups": 1,
    "num_beams": 4,
    "num_return_sequences": 1,
    "output_attentions": True,
    "prefix": "Once",
    "problem_type": "regression",
    "remove_invalid_values": True,
    "repetition_penalty": 1.1,
    "return_dict": True,
    "sep_token_id": 3,
    "suppress_tokens": [4],
    "task_specific_params": {"summarization": {"num_beams": 2}},
    "temperature": 0.7,
    "tf_legacy_loss": True,
    "tie_encoder_decoder": True,
    "tokenizer_class": "LlamaTokenizer",
    "top_k": 50,
    "top_p": 0.9,
    "typical_p": 1.0,
    "use_bfloat16": True,
    "xla_device": True,
}
"""What its PretrainedConfig put into every file, here with values that say something."""

OTHERS: dict[str, Any] = {
    "_attn_implementation": "sdpa",
    "_attn_implementation_internal": "sdpa",
    "_experts_implementation": "eager",
    "_model_name_or_path": "/root/model",
    "add_bos_token": True,
    "add_eos_token": True,
    "attention_probs_dropout_prob": 0.1,
    "auto_map": {"AutoConfig": "configuration_strange.StrangeConfig"},
    "bad_words_ids": [[5]],
    "hidden_dropout_prob": 0.1,
    "init_std": 0.02,
    "initializer_factor": 1.0,
    "kernel_options": {"BLOCK_M": 64},
    "model_max_length": 4096,
    "pad_token": "<pad>",
    "pad_token_id": 0,
    "pretraining_tp": 2,
    "router_z_loss_coef": 0.001,
    "unk_token_id": 0,
    "unsloth_fixed": True,
    "unsloth_version": "2026.1",
    "use_cache": True,
}
"""What programs that train and convert models put there."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 100,
    "vocab_size": 99,
}
STRANGE = {
    "logit_scale": 0.1,
    "embedding_noise": "gauss",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0, "spread": 7},
}
NAMED = ("logit_scale = 0.1", "embedding_noise = 'gauss'", "rope_scaling.spread = 7")


_HALF_ROTATED = {
    "text_config": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
}
_WITHOUT_PLE = {"hidden_size_per_layer_input": 0}
_QSA = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256} | {
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 4},
    "glm4_moe": {"head_dim": 128},
    "glm4v": _HALF_ROTATED,
    "glm46v": _HALF_ROTATED,
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "gemma4_text": _WITHOUT_PLE,
    "gemma4": {"text_config": _WITHOUT_PLE},
    "qwen4_exp_text": _QSA,
    "qwen4_exp": {"text_config": _QSA},
}
"""What checkpoints give, and the defaults lack or have in a way that no model has."""
UNKNOWN_TO_TRANSFORMERS = {"deepseek_v41", "deepseek_v41_text"}


@pytest.mark.parametrize("kind", sorted({*FAMILIES, *WRAPPERS} - UNKNOWN_TO_TRANSFORMERS))
def test_keys_that_change_nothing_are_read_in_every_family(kind: str, tmp_path: Path) -> None:
    """As transformers' own class writes the config, in full and saved, with what others add."""
    theirs = AutoConfig.for_model(kind, **NEEDED.get(kind, {}))
    known = {**FAMILIES, **WRAPPERS}[kind]
    theirs.architectures = [known.architecture]
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    full = json.loads(theirs.to_json_string(use_diff=False))
    plain = parse_config(saved, "config.json")
    assert parse_config(full, "config.json") == plain
    assert parse_config(TRANSFORMERS_4 | OTHERS | saved, "config.json") == plain


def test_layers_with_windows_matter_where_there_are_windows() -> None:
    plain = parse_config(LLAMA, "config.json")
    for off in (
        {"max_window_layers": 21},
        {"max_window_layers": 21, "sliding_window": None},
        {"max_window_layers": 21, "sliding_window": 4096, "use_sliding_window": False},
    ):
        assert parse_config(LLAMA | off, "config.json") == plain
    on = {"max_window_layers": 21, "sliding_window": 4096, "use_sliding_window": True}
    with pytest.raises(UnsupportedModelError, match=r"3 keys are not known .*max_window_layers"):
        parse_config(LLAMA | on, "config.json")


def test_more_unknown_keys_than_any_config_has_are_not_listed() -> None:
    many = {f"key_{n}": n + 1 for n in range(MAX_UNKNOWN + 1)}
    noted: list[str] = []
    with pytest.raises(UnsupportedModelError, match=f"more than {MAX_UNKNOWN} keys .*, key_0 = 1 "):
        parse_config(LLAMA | many, "config.json", noted)
    assert len(noted) == MAX_UNKNOWN


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose config has keys that nobody knows, two of them in objects."""
    folder = tmp_path_factory.mktemp("strange") / "model"
    make_llama(folder, with_tokenizer=False, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    fp8 = {"quantization_config": {"quant_method": "fp8", "rotation": "hadamard"}}
    (folder / "config.json").write_text(json.dumps(config | STRANGE | fp8))
    return folder


ROTATION = "quantization_config.rotation = 'hadamard'"


def test_all_unknown_keys_are_named_at_once(strange: Path) -> None:
    ways: list[Callable[[], object]] = [
        lambda: Checkpoint.open(strange),
        lambda: identify_at(str(strange)),
        lambda: load(order(strange), 1 << 30, lambda *_: None),
    ]
    for way in ways:
        with pytest.raises(UnsupportedModelError) as error:
            way()
        assert "4 keys are not known to shardnet" in error.value.message
        assert all(named in error.value.message for named in (*NAMED, ROTATION))
        assert "--ignore-unknown-config" in error.value.remedy


def order(folder: Path, *, ignore_unknown_config: bool = False) -> StageOrder:
    return StageOrder(
        form=structs.replace(
            FORM, model_id=identify(folder).model_id, ignore_unknown_config=ignore_unknown_config
        ),
        folder=folder,
        layers=LayerRange(0, 1),
        is_tail=True,
    )


def test_unknown_keys_are_ignored_on_request(strange: Path) -> None:
    """A node that only identifies a model, to share it, needs no request."""
    facts = identify(strange)
    assert set(facts.unknown_keys) == {*NAMED, ROTATION}
    asked = order(strange, ignore_unknown_config=True)
    assert load(asked, 1 << 30, lambda *_: None).room_blocks > 0


def test_unknown_keys_of_a_wrapped_language_model_are_named() -> None:
    nested = LLAMA | {"model_type": "gemma3_text", "logit_scale": 0.1, "tie_heads": 3}
    raw = {"model_type": "gemma3", "text_config": nested}
    with pytest.raises(UnsupportedModelError, match=r"2 keys are .*logit_scale = 0.1, tie_heads"):
        parse_config(raw, "config.json")
