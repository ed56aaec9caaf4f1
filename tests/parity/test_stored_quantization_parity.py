"""Quantized checkpoints: what transformers says of the weights that they mean."""

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
from support.models.checkpoints import make_decoder, make_llama
from support.models.family_cases import CASES as CASES_OF_FAMILIES
from support.models.quantized_cases import CASES
from support.models.quantized_checkpoints import (
    Parts,
    fp4_values,
    fp8,
    gptq,
    mlx,
    modelopt,
    mxfp4,
    nvfp4,
    quantized,
)
from support.oracles.oracle import (
    FLOAT32_TOLERANCE,
    check_generation,
    load_reference,
    reference_logits,
)
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.soak import cases
from transformers import AutoModelForCausalLM

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.kernels import panel_linear
from shardnet.stage.estimate.memory_estimate import WeightForm, stage_weight_bytes
from shardnet.types import DType, LayerRange

USUAL = ["gptq-order", "awq", "fp8-blocks", "int4-zeros", "nf4-nested", "bnb-8", "mlx-4"]


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch multiply packed weights: the library rounds tokens to int8."""
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)


def make_source(folder: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    return make_llama(folder, with_tokenizer=False, num_hidden_layers=2, **sizes)


@pytest.mark.parametrize("name", cases(USUAL, [name for name in CASES if name not in USUAL]))
def test_quantized_weights_are_what_they_mean(name: str, tmp_path: Path) -> None:
    case, source = CASES[name], make_source(tmp_path / "source")
    write = partial(case.write, np.random.default_rng(7))
    meant = quantized(source, tmp_path / "quantized", case.config, write, case.also)
    chain = StageChain.load(tmp_path / "quantized", even_split(2, 2))
    reference = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    reference.load_state_dict(meant)
    reference.double()  # in float32 it is itself 2e-4 off at a token of mxfp8, on some CPUs
    prompts = [random_prompt(40, 300, seed=3), random_prompt(5, 300, seed=4)]
    check_generation(chain, reference, prompts, 8)


def test_memory_counts_what_is_resident_and_moving_what_is_stored(tmp_path: Path) -> None:
    case, source = CASES["awq"], make_source(tmp_path / "source")
    write = partial(case.write, np.random.default_rng(7))
    quantized(source, tmp_path / "quantized", case.config, write)
    checkpoint, whole = Checkpoint.open(tmp_path / "quantized"), Checkpoint.open(source)
    layers = LayerRange(0, 1)
    form = WeightForm(dtype=DType.BFLOAT16)
    sizes = [stage_weight_bytes(c.config, layers, form) for c in (checkpoint, whole)]
    assert sizes[0] == sizes[1]
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.tensors[name].size_bytes < whole.tensors[name].size_bytes / 4


def rewrite(folder: Path, stored: Parts, **config: object) -> Path:
    """Replace the tensors of a checkpoint, and add to its config."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    save_file(
        {name: part.contiguous() for name, part in stored.items()}, folder / "model.safetensors"
    )
    return folder


def check_experts(packed: Path, plain: Path, one: str, n_experts: int) -> None:
    """Hold packed experts against the same ones in float32, and transformers on them.

    An expert's parameter reads its own bytes: those of all `n_experts` are those of the stacks.
    """
    prompt = random_prompt(40, 300)
    logits = StageChain.load(packed, even_split(2, 2)).prefill(0, prompt)
    expected = reference_logits(load_reference(plain), prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
    tensors = Checkpoint.open(packed).tensors
    experts = [tensors[one.format(number)] for number in range(n_experts)]
    assert all(expert.packed is not None for expert in experts)
    parts = [(part.name, part.offset, part.size_bytes) for e in experts for part in e.sources]
    assert len(set(parts)) == n_experts * len(experts[0].sources)
    stored = Checkpoint.open(packed).stored
    names = {name for name, _, _ in parts}
    assert sum(size for *_, size in parts) == sum(stored[name].size_bytes for name in names)


def test_mxfp4_experts_run_as_what_they_mean(tmp_path: Path) -> None:
    """gpt-oss as it is published, and with the same experts in float32."""
    plain = make_decoder(
        tmp_path / "plain", "gpt_oss", num_hidden_layers=2, hidden_size=64, intermediate_size=32
    )
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    rng = np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        n_experts, n_in, n_out = tensors[name].shape
        parts, tensors[name] = mxfp4(rng, n_experts, n_out, n_in)
        del stored[name]
        stored |= {name + suffix: part for suffix, part in parts.items()}
    packed = shutil.copytree(plain, tmp_path / "packed")
    rewrite(plain, tensors)
    rewrite(packed, stored, quantization_config={"quant_method": "mxfp4"})
    check_experts(packed, plain, "model.layers.0.mlp.experts.{}.gate_up_proj.weight", 5)


def four_bits(rng: np.random.Generator, n: int, k: int) -> tuple[Parts, torch.Tensor]:
    """Expert weights of DeepSeek-V4: two 4-bit floats in a byte, powers of two for 32 inputs."""
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    exponents = torch.from_numpy(rng.integers(119, 123, (n, k // 32), dtype=np.uint8))
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    scales = 2.0 ** (exponents.float() - 127)
    meant = torch.from_numpy(fp4_values(codes)) * scales.repeat_interleave(32, 1)
    return {".weight": packed, ".scale": exponents.view(torch.float8_e8m0fnu)}, meant


def eight_bits(rng: np.random.Generator, n: int, k: int) -> tuple[Parts, torch.Tensor]:
    """Other weights of DeepSeek-V4: FP8 whose blocks have powers of two."""
    parts, _ = fp8(rng, n, k, scales="block", group=32)
    shape = parts[".weight_scale_inv"].shape
    exponents = torch.from_numpy(rng.integers(119, 123, tuple(shape), dtype=np.uint8))
    wide = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 0).repeat_interleave(32, 1)
    meant = parts[".weight"].float() * wide[:n, :k]
    return {".weight": parts[".weight"], ".scale": exponents.view(torch.float8_e8m0fnu)}, meant


def test_deepseek_v4_runs_as_it_is_published(tmp_path: Path) -> None:
    """Experts in 4 bits, other linears in FP8, scales that are powers of two."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "q_lora_rank": 32}
    plain = make_decoder(
        tmp_path / "plain", "deepseek_v4", **CASES_OF_FAMILIES["deepseek_v4"] | sizes
    )
    tensors = load_file(plain / "model.safetensors")
    stored, rng = dict(tensors), np.random.default_rng(5)
    linear = re.compile(r".*\.(wq_a|wq_b|wkv|wo_b|w[123])\.weight")
    for name in [name for name in tensors if linear.fullmatch(name) and "compressor" not in name]:
        make = four_bits if ".ffn.experts." in name else eight_bits
        parts, tensors[name] = make(rng, *tensors[name].shape)
        stored |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    packed = shutil.copytree(plain, tmp_path / "packed")
    rewrite(plain, tensors)
    method = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    published = {
        name.removeprefix("model.")
        .replace("embed_tokens", "embed")
        .replace("head.hc_", "head_"): one
        for name, one in stored.items()
    }
    assert {"embed.weight", "norm.weight", "hc_head_fn", "layers.0.attn.wkv.scale"} <= {*published}
    rewrite(packed, published, quantization_config=method | {"weight_block_size": [32, 32]})
    prompt = random_prompt(40, 300)
    logits = StageChain.load(packed, even_split(4, 2)).prefill(0, prompt)
    expected = reference_logits(load_reference(plain), prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)


def test_deepseek_v41_runs_as_it_is_published(tmp_path: Path) -> None:
    """Blocks of 32 x 32 in FP8, n-gram tables in FP8, experts in 4 bits, all of them in powers."""
    make_decoder(tmp_path, "deepseek_v41_text", is_published=True, num_hidden_layers=8)
    prompt = random_prompt(150, 300)
    logits = StageChain.load(tmp_path, even_split(8, 2)).prefill(0, prompt)
    expected = reference_logits(load_reference(tmp_path), prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
    tensors = Checkpoint.open(tmp_path).tensors
    experts = [tensor for name, tensor in tensors.items() if ".experts." in name]
    assert experts
    assert all(expert.packed is not None for expert in experts)


NVFP4_MODELS: dict[str, dict[str, Any]] = {
    "glm5_next_text": {"moe_intermediate_size": 32},
    "qwen4_exp_text": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}


@pytest.mark.parametrize("family", NVFP4_MODELS)
@pytest.mark.parametrize(
    "maker", ["modelopt", "modelopt-stacked", "compressed-tensors", "compressed-tensors-mixed"]
)
def test_nvfp4_experts_run_as_what_they_mean(maker: str, family: str, tmp_path: Path) -> None:
    """As GLM-5.3-Flash and Qwen 3.8 are published with them; other linears are plain, or FP8."""
    sizes = CASES_OF_FAMILIES[family] | NVFP4_MODELS[family] | {"hidden_size": 64}
    plain = make_decoder(tmp_path / "plain", family, **sizes)
    tensors, rng = load_file(plain / "model.safetensors"), np.random.default_rng(5)
    is_compressed = maker.startswith("compressed-tensors")
    case = CASES["nvfp4" if is_compressed else "modelopt-nvfp4"]
    writers = {".mlp.experts.": nvfp4 if is_compressed else modelopt}
    said = case.config
    if maker == "compressed-tensors-mixed":
        writers["_proj.weight"] = partial(fp8, scales="row")
        groups = {
            f"group_{n}": CASES[name].config["config_groups"]["group_0"]
            | {"format": CASES[name].config["format"]}
            for n, name in enumerate(("nvfp4", "float-rows"))
        }
        said = said | {"format": "mixed-precision", "config_groups": groups}
    stored: Parts = {}
    for name, part in list(tensors.items()):
        write = next((write for key, write in writers.items() if key in name), None)
        if write is None or part.ndim != 2 or "visual" in name:
            stored[name] = part
            continue
        parts, tensors[name] = write(rng, *part.shape)
        stored |= {name.removesuffix(".weight") + suffix: one for suffix, one in parts.items()}
    if maker == "modelopt-stacked":
        stored = stacked(stored)
    packed = shutil.copytree(plain, tmp_path / "packed")
    rewrite(plain, tensors)
    rewrite(packed, stored, quantization_config=said)
    prompt, n_layers = random_prompt(40, 300), Checkpoint.open(packed).config.n_layers
    logits = StageChain.load(packed, even_split(n_layers, 2)).prefill(0, prompt)
    expected = reference_logits(load_reference(plain), prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)
    found = Checkpoint.open(packed).tensors.items()
    experts = [tensor for name, tensor in found if ".mlp.experts." in name]
    assert all(expert.packed is not None for expert in experts)


def stacked(stored: Parts) -> Parts:
    """Put all experts of a layer into one tensor for each part, gate's rows before up's."""
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    made: Parts = {}
    for name, part in stored.items():
        match = re.fullmatch(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight(.*)", name)
        if match is None:
            made.update({} if name.endswith(".input_scale") else {name: part})
            continue
        linear = "down" if match[3] == "down" else "gate_up"
        suffix = f"_weight{match[4]}" if match[4] else ""
        own = found.setdefault(f"{match[1]}{linear}_proj{suffix}", {})
        own[int(match[2]), match[3]] = part
    for name, parts in found.items():
        n_experts = len({number for number, _ in parts})
        rows = [
            torch.cat([parts[n, kind].view(-1, *parts[n, kind].shape[1:]) for kind in kinds])
            for n in range(n_experts)
            for kinds in (["gate", "up"] if (n, "gate") in parts else ["down"],)
        ]
        made[name] = torch.stack(rows)
    return made


def test_stacked_experts_in_fp8_run_as_what_they_mean(tmp_path: Path) -> None:
    """Mistral 4 as its makers publish it: a scale for all of an expert's gate and up."""
    plain = make_decoder(tmp_path / "plain", "mistral4", num_hidden_layers=2)
    tensors = load_file(plain / "model.safetensors")
    stored, rng = dict(tensors), np.random.default_rng(5)
    for name in [name for name in tensors if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        n_experts, n, k = tensors[name].shape
        made = [fp8(rng, n, k, scales="one") for _ in range(n_experts)]
        stored[name] = torch.stack([parts[".weight"] for parts, _ in made])
        scales = [parts[".weight_scale"].view(1, 1) for parts, _ in made]
        stored |= {f"{name}_scale_inv": torch.stack(scales)}
        stored[f"{name}_activation_scale"] = torch.ones(n_experts, 1, 1)
        tensors[name] = torch.stack([meant for _, meant in made])
    assert len(stored) > len(tensors)
    packed = shutil.copytree(plain, tmp_path / "packed")
    rewrite(plain, tensors)
    rewrite(packed, stored, quantization_config={"quant_method": "fp8"})
    prompt = random_prompt(40, 300)
    logits = StageChain.load(packed, even_split(2, 2)).prefill(0, prompt)
    expected = reference_logits(load_reference(plain), prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32_TOLERANCE)


MOE = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize("maker", ["gptq", "mlx"])
def test_experts_of_other_makers_run_as_what_they_mean(maker: str, tmp_path: Path) -> None:
    """Qwen3-MoE with GPTQ's tensors for each expert, and with MLX's for all of a layer."""
    plain = make_decoder(tmp_path / "plain", "qwen3_moe", num_hidden_layers=2, **MOE)
    tensors = load_file(plain / "model.safetensors")
    stored = {name: part for name, part in tensors.items() if ".experts." not in name}
    rng = np.random.default_rng(5)
    for name in [name for name in tensors if ".experts." in name]:
        n_out, n_in = tensors[name].shape
        stem, _, linear = name.removesuffix(".weight").rpartition(".")
        write = gptq if maker == "gptq" else partial(mlx, bits=4)
        parts, tensors[name] = write(rng, n_out, n_in, group=32)
        block, _, _ = stem.partition(".experts.")
        for suffix, part in parts.items():
            if maker == "gptq":
                stored[f"{stem}.{linear}{suffix}"] = part
            else:
                stack = f"{block}.switch_mlp.{linear}{suffix}"
                stored[stack] = torch.cat(
                    (*([stored[stack]] if stack in stored else []), part[None])
                )
    config = {"group_size": 32, "bits": 4}
    packed = shutil.copytree(plain, tmp_path / "packed")
    rewrite(plain, tensors)
    said = {"quantization": config, "quantization_config": config}
    if maker == "gptq":
        said = {"quantization_config": CASES["gptq-4"].config}
    rewrite(packed, stored, **said)
    check_experts(packed, plain, "model.layers.0.mlp.experts.{}.up_proj.weight", 6)
