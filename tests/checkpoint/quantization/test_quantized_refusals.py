"""What config.json says of quantization: read, or refused by name; parts that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder, make_llama
from support.models.quantized_cases import AUTO_ROUND, AWQ, CASES, bnb
from support.models.quantized_checkpoints import quantized
from support.rings.stage_chain import StageChain

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.quantization.registry import take_format
from shardnet.errors import CheckpointError, ShardnetError
from shardnet.types import LayerRange

GPTQ = CASES["gptq-4"].config
FP8 = CASES["fp8-blocks"].config
PACKED = CASES["int4-groups"].config
GROUP = PACKED["config_groups"]["group_0"]
MLX = {"group_size": 64, "bits": 4}
GROUP_64 = {"bits": 4, "group_size": 64}


def with_weights(**changes: Any) -> dict[str, Any]:
    weights = GROUP["weights"] | changes
    return PACKED | {"config_groups": {"group_0": GROUP | {"weights": weights}}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return make_llama(folder, with_tokenizer=False, num_hidden_layers=1, **sizes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq"},
            r"quant_method = 'hqq' is not supported; supported: auto-round, awq, b",
        ),
        ({"bits": 4}, r"quant_method is missing"),
        (GPTQ | {"bits": 5}, r"bits = 5 is not supported; supported: 2, 3, 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin' is not supported"),
        (GPTQ | {"group_size": 0}, r"group_size is 0, expected"),
        (GPTQ | {"dynamic": {"lm_head": {}}}, r"dynamic = .* is not supported"),
        (GPTQ | {"pack_dtype": "int8"}, r"pack_dtype = 'int8' is not supported"),
        (
            AWQ | {"version": "gemv_fast"},
            r"version = 'gemv_fast' is not supported; supported: gemm",
        ),
        (AWQ | {"data_type": "fp"}, r"data_type = 'fp' is not supported"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:fp8"},
            r"packing_format = 'auto_round:fp8' is",
        ),
        (AUTO_ROUND | {"act_bits": 8}, r"act_bits = 8 is not supported; supported: 16 and more"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, r"data_type = 'mx_fp' is not supported"),
        (AUTO_ROUND | {"rotation_configs": [{"a": 1}]}, r"rotation_configs = .* is not known"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {"a": GROUP_64}},
            r"extra_config = \['a'\] is not supported; supported: layers like all others",
        ),
        (
            AUTO_ROUND | {"extra_config": {"lm_head": 4}},
            r"extra_config\.lm_head = 4 is not supported; supported: objects with bits",
        ),
        (
            AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 4, "data_type": "nv_fp"}}},
            r"extra_config\.lm_head\.data_type = 'nv_fp' is not supported",
        ),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (FP8 | {"expert_dtype": "fp6"}, r"expert_dtype = 'fp6' is not supported"),
        (FP8 | {"rotation": "hadamard"}, r"rotation = 'hadamard' is not known"),
        (PACKED | {"format": "marlin-24"}, r"format = 'marlin-24' is not supported; supported: pa"),
        (PACKED | {"transform_config": {"r1": 1}}, r"transform_config = .* is not known"),
        (PACKED | {"sparsity_config": {"format": "sparse-24"}}, r"sparsity_config.format = 'sp"),
        (PACKED | {"config_groups": {}}, r"config_groups is empty"),
        (
            PACKED | {"config_groups": {"a": {"targets": []}}},
            r"config_groups\.a is .*weights in it",
        ),
        (
            PACKED | {"config_groups": {"a": GROUP, "b": GROUP | {"format": "dense"}}},
            r"config_groups\.b\.format = 'dense' is not supported",
        ),
        (with_weights(num_bits=3), r"config_groups = 'int of 3 bits' is not supported"),
        (with_weights(dynamic=True), r"config_groups\.group_0\.weights\.dynamic = True is not"),
        (with_weights(strategy="token"), r"weights\.strategy = 'token' is not supported"),
        (with_weights(group_size=-5), r"group_size of group_0 is -5"),
        (with_weights(strategy="block", block_structure="9x"), r"block_structure is '9x'"),
        (with_weights(spread=2), r"weights\.spread = 2 is not known"),
        (
            PACKED
            | {
                "config_groups": {
                    "a": GROUP,
                    "b": with_weights(symmetric=False)["config_groups"]["group_0"],
                }
            },
            r"config_groups = '2 groups' is not supported",
        ),
        (bnb(4) | {"load_in_4bit": False}, r"says neither or both"),
        (bnb(4) | {"bnb_4bit_quant_storage": "bfloat16"}, r"bnb_4bit_quant_storage = 'bfloat16'"),
        (bnb(8) | {"llm_int8_has_fp16_weight": True}, r"llm_int8_has_fp16_weight = True is not"),
        ({"quant_method": "mxfp4", "block": 16}, r"block = 16 is not known"),
    ],
)
def test_what_is_not_implemented_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardnetError, match=r"^c\.json: .*" + message):
        take_format({"quantization_config": config}, "c.json")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MLX | {"bits": 7}, r"bits = 7 is not supported; supported: 2, 3, 4, 5, 6, 8"),
        (MLX | {"group_size": 0}, r"group_size is 0, expected 1"),
        (MLX | {"mode": "nf4"}, r"mode = 'nf4' is not supported; supported: affine, mxfp4"),
        (MLX | {"mode": "mxfp4"}, r"mode = 'mxfp4 with 4 bits in groups of 64' is not supported"),
        (MLX | {"lm_head": {"bits": 9}}, r"quantization\.lm_head\.bits = 9 is not supported"),
        (MLX | {"lm_head": {"spread": 9}}, r"quantization\.lm_head\.spread = 9 is not known"),
        (MLX | {"spread": 9}, r"quantization\.spread = 9 is not supported"),
    ],
)
def test_what_mlx_says_is_refused_likewise(config: dict[str, Any], message: str) -> None:
    copy = {"quant_method": "fp8"}  # of the model that it was made of
    with pytest.raises(ShardnetError, match=r"^c\.json: .*" + message):
        take_format({"quantization": config, "quantization_config": copy}, "c.json")


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_an_object_is_expected(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^c: {key} is \[1\], expected an object"):
        take_format({key: [1]}, "c")


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_what_a_wrapped_language_model_says_is_read(key: str) -> None:
    """Or refused by the name that it has there; and it is taken, so that no family sees it."""
    said = MLX if key == "quantization" else GPTQ
    outside = take_format({key: dict(said)}, "c")
    wrapped = {"model_type": "gemma3", "text_config": {"hidden_size": 64, key: dict(said)}}
    inside = take_format(wrapped, "c")
    assert inside is not None
    assert outside is not None
    assert (inside.title, inside.markers) == (outside.title, outside.markers)
    assert wrapped["text_config"] == {"hidden_size": 64}
    both = {key: dict(said), "text_config": {key: dict(said)}}
    assert take_format(both, "c") is not None
    with pytest.raises(ShardnetError, match=rf"^c: text_config\.{key}\.bits = 77 is not supp"):
        take_format({"text_config": {key: said | {"bits": 77}}}, "c")
    with pytest.raises(CheckpointError, match=rf"^c: {key} and text_config\.{key} are not the"):
        take_format({key: said, "text_config": {key: said | {"bits": 8, "sym": False}}}, "c")


def test_weights_of_a_wrapped_language_model_are_read_as_it_says(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    plain = make_decoder(
        tmp_path / "plain", "gemma3", with_tokenizer=False, num_hidden_layers=1, **sizes
    )
    folder, case = tmp_path / "quantized", CASES["gptq-4"]
    quantized(plain, folder, case.config, partial(case.write, np.random.default_rng(7)))
    outside = Checkpoint.open(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    inside = Checkpoint.open(folder)
    assert (inside.config.wrapper, inside.form) == ("gemma3", "GPTQ 4-bit")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(inside.read(name), outside.read(name))


def test_without_a_word_in_the_config_integers_are_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    case = CASES["fp8-blocks"]
    quantized(source, folder, case.config, partial(case.write, np.random.default_rng(7)))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="is stored as F8_E4M3; supported: BF16, F16, F32"):
        StageChain.load(folder, [LayerRange(0, 1)])


STEM = "model.layers.0.mlp.up_proj"
STATE = ".weight.quant_state.bitsandbytes__nf4"


def json_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def without(t: torch.Tensor) -> None:
    return None


Change = Callable[[torch.Tensor], torch.Tensor | None]
DAMAGES: dict[str, tuple[str, str, Change, str]] = {
    "no zeros": ("gptq-4", ".qzeros", without, "tensor STEM.qzeros is missing"),
    "no scales": ("awq", ".scales", without, "tensor STEM.scales is missing"),
    "zeros of another shape": (
        *("gptq-4", ".qzeros", lambda t: t[:1].clone()),
        r"STEM\.qzeros is I32 \[1, 12\], expected I32 \[2, 12\]",
    ),
    "integers of another type": (
        *("awq", ".qweight", lambda t: t.long()),
        r"STEM\.qweight is I64 .*, expected I32",
    ),
    "a group beyond the last": (
        *("gptq-4", ".g_idx", lambda t: t + 1),
        "STEM.g_idx does not divide the inputs into 2 groups of 32",
    ),
    "groups of other sizes": (
        *("int4-order", ".weight_g_idx", lambda t: t * 0),
        "STEM.weight_g_idx does not divide the inputs into 2 groups of 32",
    ),
    "biases that say something": (
        *("gptq-biases", ".bias", lambda t: t + 1),
        "STEM.bias is not all zeros, and the model has no such bias",
    ),
    "no matrix": ("awq", ".qweight", lambda t: t.flatten(), r"has shape|is I32 \[768\], expected"),
    "scales of another shape": (
        *("fp8-blocks", ".weight_scale_inv", lambda t: t[:2].clone()),
        r"STEM\.weight_scale_inv is F32 \[2, 2\], expected F32 or F16 or BF16 .* or \[3, 2\]",
    ),
    "a weight that is not narrow": (
        *("fp8-blocks", ".weight", lambda t: t.float()),
        r"STEM\.weight is F32 \[96, 64\], expected F8_E4M3",
    ),
    "zero points of symmetric weights": (
        *("int8", ".weight_zero_point", lambda t: t + 1),
        "STEM.weight_zero_point is not all zeros",
    ),
    "no zero points": ("int4-zeros", ".weight_zero_point", without, "weight_zero_point is missing"),
    "another number of scales": (
        *("nf4", ".weight.absmax", lambda t: t[:5].clone()),
        r"STEM\.weight\.absmax has 5 scales for 6144 weights",
    ),
    "another table": (
        *("nf4", ".weight.quant_map", lambda t: t * 2),
        r"STEM\.weight\.quant_map is not the table of nf4",
    ),
    "a state that is no JSON": (
        *("nf4", STATE, lambda t: json_tensor("{" * 9000)),
        r"STEM\.weight\.quant_state\.bitsandbytes__nf4 is not readable as JSON",
    ),
    "a state of another weight": (
        *("nf4", STATE, lambda t: json_tensor('{"quant_type": "nf4", "blocksize": 32}')),
        r"bitsandbytes__nf4 does not say .*\"blocksize\": 64, \"shape\": \[96, 64\]",
    ),
    "a state without an offset": (
        *("nf4-nested", STATE, lambda t: t[:-24].clone()),
        r"bitsandbytes__nf4 is not readable as JSON",
    ),
    "a state that is too large": (
        *("nf4", STATE, lambda t: torch.zeros(1 << 15, dtype=torch.uint8)),
        r"bitsandbytes__nf4 has shape \[32768\], expected one axis",
    ),
    "scales of scales that are missing": (
        *("nf4-nested", ".weight.nested_absmax", lambda t: t[:0].clone()),
        r"STEM\.weight\.nested_absmax has too few scales",
    ),
    "another layout": (
        *("bnb-8", ".weight_format", lambda t: t + 2),
        r"STEM\.weight_format is not 0, the layout by rows",
    ),
    "words of other bits": (
        *("mlx-4", ".weight", lambda t: t[:, :4].clone()),
        r"STEM\.weight is U32 \[96, 4\], expected U32 \[96, 8\]",
    ),
    "biases of another type": (
        *("mlx-4", ".biases", lambda t: t.float()),
        r"STEM\.biases is F32 \[96, 2\], expected BF16",
    ),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_parts_that_do_not_fit_are_named(name: str, source: Path, tmp_path: Path) -> None:
    form, suffix, change, message = DAMAGES[name]
    case, folder = CASES[form], tmp_path / "quantized"
    quantized(source, folder, case.config, partial(case.write, np.random.default_rng(7)))
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(STEM + suffix))
    if changed is not None:
        tensors[STEM + suffix] = changed
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message.replace("STEM", STEM)) as error:
        Checkpoint.open(folder).read(f"{STEM}.weight")
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("form", ["fp8-blocks", "fp8-16", "mlx-mxfp8"])
def test_floats_of_8_bits_that_are_nan_are_refused(
    form: str, code: int, source: Path, tmp_path: Path
) -> None:
    """CPUs read them unlike."""
    case, folder = CASES[form], tmp_path / "quantized"
    quantized(source, folder, case.config, partial(case.write, np.random.default_rng(7)))
    tensors = load_file(folder / "model.safetensors")
    weight = tensors[f"{STEM}.weight"]
    raw = weight.view(torch.uint8)
    raw[-1, -1] = code
    save_file(tensors | {f"{STEM}.weight": raw.view(weight.dtype)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {STEM}\.weight has weights that are NaN"):
        StageChain.load(folder, [LayerRange(0, 1)])


def test_a_weight_that_is_there_twice_is_refused(source: Path, tmp_path: Path) -> None:
    case, folder = CASES["gptq-4"], tmp_path / "quantized"
    quantized(source, folder, case.config, partial(case.write, np.random.default_rng(7)))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{STEM}.weight": torch.zeros(96, 64)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{STEM}\.weight is there quantised too"):
        Checkpoint.open(folder)


def test_a_weight_that_the_model_has_not_is_refused(source: Path, tmp_path: Path) -> None:
    case, folder = CASES["gptq-4"], tmp_path / "quantized"
    quantized(source, folder, case.config, partial(case.write, np.random.default_rng(7)))
    tensors = load_file(folder / "model.safetensors")
    parts = {name for name in tensors if name.startswith(STEM)}
    more = {name.replace("up_proj", "side_proj"): tensors[name].clone() for name in parts}
    save_file(tensors | more, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"side_proj\.qweight .* has no place in a llama"):
        StageChain.load(folder, [LayerRange(0, 1)])
