"""Language models of multimodal checkpoints that have no record, against the whole models."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.module_vision import CLIP, TEXT, make_by_modules, write_model
from support.models.quantized_checkpoints import Made, fp8, modelopt
from support.oracles.oracle import check_generation, load_reference, reference_logits
from support.rings.module_stages import load as load_by_modules
from support.rings.module_stages import rows, step
from support.rings.stage_chain import StageChain, even_split, random_prompt
from test_transformers_modules import make as make_causal

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import open_pictures
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.families.registry import parse_config
from shardnet.model.kernels import panel_linear
from shardnet.model.modules.module_tower import row_token
from shardnet.types import DType

SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16} | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
Case = tuple[str, str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "vipllava": ("vipllava", "mistral", CLIP, {"vision_feature_layers": [-1]}),
    "deepseek_vl": ("deepseek_vl", "llama", SIGLIP, {}),
    "minicpmv4_6": ("minicpmv4_6", "qwen3_5_text", {}, {}),
    "hyperclovax_vision_v2": (
        "hyperclovax_vision_v2",
        "hyperclovax",
        {"depth": 1, "num_heads": 4, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
        {},
    ),
    "cohere_compass": (
        "cohere_compass",
        "cohere_compass_text",
        {"depth": 1, "num_heads": 1, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        {},
    ),
    "llava_next-gemma": ("llava_next", "gemma", CLIP, {"image_grid_pinpoints": [[28, 56]]}),
}
"""The kind, its language model's family, its tower and its own keys."""
OWN_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "gemma": {"head_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 7,
        "logit_scale": 0.5,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
    },
    "mistral": {"sliding_window": None},  # left out, it would be one of 4096
    "minimax_m3_vl_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "dense_intermediate_size": 40,
        "shared_intermediate_size": 20,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "step3p5": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 24,
        "sliding_window": 16,
        "num_sliding_attention_heads": 4,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "pad_token_id": 0,
        "num_nextn_predict_layers": 1,
        "swiglu_limits": [0.0, 0.5],
        "swiglu_limits_shared": [0.0, 0.7],
    },
    "glm_ocr_text": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "inkling2_text": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 8,
        "unpadded_vocab_size": 300,
        "sliding_window": 16,
    },
}


def make(folder: Path, case: Case) -> Path:
    kind, text, tower, outer = case
    write_model(kind, folder, text, OWN_TEXT.get(text, {}), tower, outer)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_plain_language_model_is_read_as_its_family(case: str, tmp_path: Path) -> None:
    folder = make(tmp_path, CASES[case])
    checkpoint = Checkpoint.open(folder)
    kind, family, _, _ = CASES[case]
    assert (checkpoint.config.wrapper, checkpoint.config.family) == (kind, family)
    assert checkpoint.config.outline is None
    assert checkpoint.config.smallest_window == OWN_TEXT.get(family, {}).get("sliding_window")
    reference, prompts = load_reference(folder), [random_prompt(19, 300, seed=1)]
    for n_stages in (1, 2):
        chain = StageChain.load(folder, even_split(2, n_stages))
        check_generation(chain, reference, prompts, 6)
    with pytest.raises(UnsupportedModelError, match=f"tower of {kind}"):
        open_pictures(checkpoint, {}.get)


BY_MODULES: dict[str, Case] = {
    "minimax_m3_vl": ("minimax_m3_vl", "minimax_m3_vl_text", {}, {}),
    "inkling2": ("inkling2", "inkling2_text", {"text_hidden_size": 48}, {}),
    "glm_ocr": ("glm_ocr", "glm_ocr_text", {"depth": 1, "num_heads": 4, "out_hidden_size": 48}, {}),
}


@pytest.mark.parametrize("case", BY_MODULES)
def test_a_language_model_without_a_record_is_computed_by_modules(
    case: str, tmp_path: Path
) -> None:
    """With the names that its makers give tensors, experts and linears that are joined."""
    make(tmp_path, BY_MODULES[case])
    checkpoint = Checkpoint.open(tmp_path)
    config, prompt = checkpoint.config, random_prompt(30, 300, seed=2)
    assert (config.wrapper, config.family) == BY_MODULES[case][:2]
    wanted = reference_logits(load_reference(tmp_path), prompt)
    for n_stages in (1, 2):
        stages = load_by_modules(tmp_path, even_split(config.n_layers, n_stages))
        found = [step(stages, rows(0, 0, prompt[:20])), step(stages, rows(0, 20, prompt[20:]))]
        torch.testing.assert_close(torch.cat(found), wanted, rtol=0, atol=1e-4)
        if config.outline is not None and not config.outline.has_state:  # rows are taken back
            again = step(stages, rows(0, 9, prompt[9:]))
            torch.testing.assert_close(again, wanted[9:], rtol=0, atol=1e-4)
    with pytest.raises(UnsupportedModelError, match=f"tower of {case}"):
        open_pictures(checkpoint, {}.get)


def as_published(folder: Path, how: str) -> tuple[Path, Path]:
    """Quantise linears as makers do: a folder with values that are meant, and one as published."""
    rng, plain = np.random.default_rng(3), load_file(folder / "model.safetensors")
    packed, meant = dict(plain), dict(plain)
    for name, values in plain.items():
        if not QUANTISED[how].search(name):
            continue
        own = "nvfp4" if how == "modelopt" and ".experts." in name else WRITTEN[how]
        *stack, n, k = values.shape
        made = [WRITERS[own](rng, n, k) for _ in range(stack[0] if stack else 1)]
        meant[name] = torch.stack([values for _, values in made]).view(values.shape)
        del packed[name]
        for suffix in made[0][0]:
            parts = torch.stack([parts[suffix] for parts, _ in made])
            packed[name.removesuffix(".weight") + suffix] = parts if stack else parts[0]
    published = shutil.copytree(folder, folder.with_name("published"))
    save_file(meant, folder / "model.safetensors", {"format": "pt"})
    save_file(packed, published / "model.safetensors", {"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = SAID[how]
    (published / "config.json").write_text(json.dumps(config))
    return folder, published


def mxfp8(rng: np.random.Generator, n: int, k: int) -> Made:
    parts, meant = modelopt(rng, n, k, kind="mxfp8")
    return {".weight": parts[".weight"], ".weight_scale_inv": parts[".weight_scale"]}, meant


WRITERS = {
    "fp8": partial(fp8, scales="block", group=4),
    "mxfp8": mxfp8,
    "modelopt-mxfp8": partial(modelopt, kind="mxfp8"),
    "nvfp4": modelopt,
}
WRITTEN = {"fp8": "fp8", "stacked": "fp8", "mxfp8": "mxfp8", "modelopt": "modelopt-mxfp8"} | {
    "nvfp4": "nvfp4"
}
LINEARS = re.compile(r"layers\.\d+\..*(?<!index_[qk])_proj\.weight|\.w[123]\.weight")
QUANTISED = dict.fromkeys(WRITTEN, LINEARS) | dict.fromkeys(
    ("stacked", "nvfp4"), re.compile(r"layers\.\d+\.moe\.\w+_proj\.weight")
)
SAID: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic"},
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": []},
}
SAID |= {"stacked": SAID["fp8"], "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("minimax_m3_vl", "mxfp8"),
        ("minimax_m3_vl", "modelopt"),
        ("longcat_flash", "fp8"),
    ],
)
def test_quantised_as_its_makers_publish_it(case: str, how: str, tmp_path: Path) -> None:
    """MiniMax's linears in MXFP8, or as NVIDIA has them; LongCat's in FP8.

    LongCat's experts without weights are in no file.
    """
    if case == "longcat_flash":
        folder = make_causal(tmp_path / "plain", case)
    else:
        folder = make(tmp_path / "plain", BY_MODULES[case])
    plain, published = as_published(folder, how)
    file = published / "model.safetensors"
    stored = load_file(file)
    assert len(stored) > len(load_file(plain / "model.safetensors"))
    given = {name: part for name, part in stored.items() if not re.search(r"experts\.[45]\.", name)}
    save_file(given, file, {"format": "pt"})
    prompt = random_prompt(30, 300, seed=2)
    wanted = reference_logits(load_reference(plain), prompt)
    n_layers = Checkpoint.open(published).config.n_layers
    stages = load_by_modules(published, even_split(n_layers, 2))
    found = step(stages, rows(0, 0, prompt))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


STEP: dict[str, Any] = {
    "num_attention_groups": 2,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 8,
        "true_head_dim": 8,
    },
    "att_impl_type": "GQA",
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "zero_centered": True,
    "sink": False,
    "layer_types": ["full_attention", *["sliding_attention"] * 2],
    "rope_theta": [5e6, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "use_rope_layers": [],
    "num_nextn_predict_layers": 1,
    "use_moe": True,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_every_n_layer": 1,
    "moe_layer_offset": 0,
    "moe_layers_enum": "1,2",
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "share_expert_dim": 24,
    "moe_intermediate_size": 32,
    "swiglu_limits": [0.0, 0.1, 0.0],
    "swiglu_limits_shared": [0.2, 0.15, 0.0],
    "sliding_window": 16,
    "head_dim": 8,
}
"""Keys of the makers of Step 3.7, lists of which go on with a layer that is not run."""


@pytest.mark.parametrize("how", ["plain", "alone", "stacked", "nvfp4"])
def test_step_is_computed_as_its_makers_publish_it(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their keys and names; stacked experts plain, in FP8, or as ModelOpt writes NVFP4.

    Step 3.5 is the same language model alone.
    """
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)  # which rounds tokens
    folder = make(tmp_path / "plain", ("step3p7", "step3p5", {}, {}))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = {"model_type": "step3p5", **TEXT, **STEP, "pad_token_id": 0}
    del config["text_config"]["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    published = shutil.copytree(folder, tmp_path / "alone")
    if how in QUANTISED:
        folder, published = as_published(folder, how)
    file = published / "model.safetensors"
    stored = load_file(file) | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    if how == "alone":
        own = config["text_config"] | {"architectures": ["Step3p5ForCausalLM"]}
        (published / "config.json").write_text(json.dumps(own))
        stored = {name: part for name, part in stored.items() if not name.startswith("vi")}
    save_file(stored, file, {"format": "pt"})
    found = Checkpoint.open(published).config
    assert (found.wrapper, found.family) == ("" if how == "alone" else "step3p7", "step3p5")
    assert found.query_heads == (6, 4)
    reference, prompts = load_reference(folder), [random_prompt(40, 300, seed=1)]
    for n_stages in (1, 2):
        chain = StageChain.load(published, even_split(2, n_stages))
        check_generation(chain, reference, prompts, 6)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (("paligemma", "gemma", SIGLIP, {}), "its layers depend on position_ids"),
        (("cohere2_vision", "cohere2", SIGLIP, {}), "computed otherwise than a cohere2 model"),
        (("llava", "granite", CLIP, {}), "computed otherwise than a granite model"),
    ],
)
def test_others_are_refused_by_name(case: Case, why: str, tmp_path: Path) -> None:
    """Whose text sees what is behind it, and whose logits are not scaled as the family's are."""
    config = json.loads((make(tmp_path, case) / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=f"language model of this {case[0]} .*{why}"):
        parse_config(config | {"text_config": config["text_config"] | {"logits_scaling": 4}}, "")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_checkpoint_stands_inside_or_outside(key: str, tmp_path: Path) -> None:
    config = json.loads((make(tmp_path, CASES["deepseek_vl"]) / "config.json").read_text())
    config.pop("dtype")
    inner = {name: config["text_config"][name] for name in config["text_config"].keys() - {"dtype"}}
    for outside, inside in (({key: "bfloat16"}, {}), ({key: "float32"}, {key: "bfloat16"})):
        read = parse_config(config | outside | {"text_config": inner | inside}, "")
        assert read.checkpoint_dtype is DType.BFLOAT16


def test_as_the_makers_of_kimi_write_it(tmp_path: Path) -> None:
    """With their names of the class, the language model and the token for a row of a picture."""
    folder = make_by_modules("kimi_k25", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    expected, row_id = parse_config(config, ""), config.pop("image_token_id")
    config |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    config["media_placeholder_token_id"] = row_id
    config["text_config"] |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    config["text_config"]["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    path.write_text(json.dumps(config))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == expected
    open_pictures(checkpoint, {}.get)
    assert row_token(path.read_text()) == 163605


def test_damage(tmp_path: Path) -> None:
    """A tower that nobody could build, even without memory for its weights."""
    config = json.loads((make(tmp_path, CASES["deepseek_vl"]) / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 10**9
    with pytest.raises(CheckpointError, match=r"vision_config\.num_hidden_layers is 1000000000"):
        parse_config(config, "")
