"""What the makers of quantised checkpoints write: config.json, and a weight in that form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from support.models.quantized_checkpoints import (
    Made,
    awq,
    awq_gemv,
    bnb_blocks,
    bnb_rows,
    fp8,
    gptq,
    integers,
    mlx,
    mlx_floats,
    modelopt,
    nvfp4,
)

Write = Callable[..., Made]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PROJECTION = "model.layers.0.self_attn.q_proj"
LINEARS = [
    f"model.layers.{layer}.{kind}_proj"
    for layer in range(2)
    for kind in (*(f"self_attn.{one}" for one in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One form: what config.json says of it, how a weight is written, which are, beside linears.

    `form` names the panels, "" where there can be none.
    """

    config: dict[str, Any]
    write: Write
    form: str
    also: tuple[str, ...] = ()


def gptq_case(group: int = 32, form: str = "GPTQ 4", config: Any = None, **made: Any) -> Case:
    bits = made.get("bits", 4)
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    size = 1 << 20 if group == -1 else group
    return Case(config=said | (config or {}), write=partial(gptq, group=size, **made), form=form)


def compressed(name: str, weights: dict[str, Any], write: Write, form: str, **more: Any) -> Case:
    usual = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "symmetric": True}
    usual |= {"actorder": None, "block_structure": None, "group_size": None, "type": "int"}
    group = {
        "targets": ["Linear"],
        "weights": usual | weights,
        "input_activations": {"num_bits": 8, "dynamic": True, "type": "int"},
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "provider": "auto-round",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.11.0",
    }
    return Case(config=config | more, write=write, form=form)


def bnb(bits: int, kind: str = "nf4", *, nested: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": bits == 4,
        "_load_in_8bit": bits == 8,
        "load_in_4bit": bits == 4,
        "load_in_8bit": bits == 8,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ_MODEL: dict[str, Any] = {
    "act_group_aware": True,
    "damp_percent": 0.05,
    "data_type": "int",
    "desc_act": False,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:5.8.0"]},
    "pack_dtype": "int32",
    "pack_impl": "cpu",
    "provider": "auto-round",
    "scale_dtype": "torch.float16",
    "sym": True,
    "true_sequential": True,
}
"""What GPTQModel, AutoRound and transformers 5 write for GPTQ and AWQ alike."""
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "autoround_version": "0.9.0",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
    "group_size": 32,
    "iters": 0,
    "model_free": True,
    "packing_format": "auto_round:auto_gptq",
    "sym": True,
}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    "ignore": ["lm_head", "*.mlp.gate*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
E5M2 = torch.float8_e5m2
CASES: dict[str, Case] = (
    {
        "gptq-2": gptq_case(bits=2, form="GPTQ 2"),
        "gptq-3": gptq_case(bits=3, form="GPTQ 3"),
        "gptq-4": gptq_case(),
        "gptq-8": gptq_case(
            bits=8,
            form="GPTQ 8",
            first=False,
            config=GPTQ_MODEL | {"method": "gptq", "format": "gptq_v2"},
        ),
        "gptq-order": gptq_case(ordered=False, config={"desc_act": True}),
        "gptq-3-order": gptq_case(16, bits=3, ordered=False, form="GPTQ 3"),
        "gptq-v2": gptq_case(first=False, config={"checkpoint_format": "gptq_v2"}),
        "gptq-row": gptq_case(-1),
        "gptq-16": gptq_case(16, form=""),
        "gptq-24": gptq_case(24, form=""),
        "gptq-8-order": gptq_case(8, form="", ordered=False),
        "gptq-biases": gptq_case(bias=True),
        "awq": Case(config=AWQ, write=partial(awq, group=32), form="AWQ 4", also=(HEAD,)),
        "awq-24": Case(
            config=AWQ
            | GPTQ_MODEL
            | {"checkpoint_format": "gemm", "group_size": 24, "zero_point": False},
            write=partial(awq, group=24),
            form="",
        ),
        "awq-gemv": Case(
            config=AWQ | {"version": None, "format": "gemv"},
            write=partial(awq_gemv, group=32),
            form="AWQ 4",
        ),
        "auto-round": gptq_case(config=AUTO_ROUND),
        "auto-round-v2": gptq_case(
            bits=8,
            form="GPTQ 8",
            first=False,
            config=AUTO_ROUND
            | {"bits": 4, "packing_format": "auto_round", "sym": False}
            | {"extra_config": {name: {"bits": 8, "act_bits": 16} for name in LINEARS}},
        ),
        "auto-round-awq": Case(
            config=AUTO_ROUND | {"packing_format": "auto_round:auto_awq"},
            write=partial(awq, group=32),
            form="AWQ 4",
        ),
        "fp8-blocks": Case(
            config={"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"},
            write=partial(fp8, scales="block", group=32),
            form="F8_E4M3",
            also=(HEAD,),
        ),
        "fp8-16": Case(
            config={
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "dequantize": False,
                "expert_dtype": "fp8",
                "modules_to_convert": ["lm_head"],
                "modules_to_not_convert": None,
                "scale_fmt": "float",
                "weight_block_size": [16, 16],
            },
            write=partial(fp8, scales="block"),
            form="",
        ),
        "fp8-rows": Case(
            config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            write=partial(fp8, scales="row"),
            form="F8_E4M3",
        ),
        "fp8-one": Case(
            config={"quant_method": "fp8", "activation_scheme": "static"},
            write=partial(fp8, scales="one"),
            form="F8_E4M3",
        ),
        "fp8-e5m2": Case(
            config={"quant_method": "fp8"},
            write=partial(fp8, scales="row", dtype=E5M2),
            form="F8_E5M2",
        ),
        "int4-groups": compressed(
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32},
            partial(integers, bits=4, group=32),
            "INT4",
        ),
        "int4-zeros": compressed(
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
            partial(integers, bits=4, group=32, symmetric=False),
            "INT4",
        ),
        "int4-order": compressed(
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"},
            partial(integers, bits=4, group=32, ordered=False),
            "INT4",
        ),
        "int8-channels": compressed(
            "pack-quantized",
            {"num_bits": 8, "strategy": "channel", "symmetric": False},
            partial(integers, bits=8, group=None, symmetric=False),
            "INT8",
        ),
        "int8": compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            partial(integers, bits=8, group=None, packed=False),
            "INT8",
        ),
        "int8-zeros": compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
            partial(integers, bits=8, group=32, packed=False, symmetric=False),
            "INT8",
        ),
        "float-blocks": compressed(
            "float-quantized",
            {"num_bits": 8, "strategy": "block", "block_structure": [32, 32], "type": "float"},
            lambda *how: renamed(fp8(*how, scales="block", group=32)),
            "F8_E4M3",
        ),
        "float-rows": compressed(
            "float-quantized",
            {"num_bits": 8, "strategy": "channel", "type": "float"},
            partial(fp8, scales="row"),
            "F8_E4M3",
        ),
        "nvfp4": compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "type": "float"},
            nvfp4,
            "NVFP4",
        ),
        "mxfp4": compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "type": "float"},
            lambda *how: as_bytes(mlx_floats(*how, mode="mxfp4")),
            "MXFP4",
        ),
        "modelopt-nvfp4": Case(config=MODELOPT, write=modelopt, form="NVFP4", also=(HEAD,)),
        "modelopt-fp8": Case(
            config=MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            write=partial(modelopt, kind="fp8"),
            form="F8_E4M3",
        ),
        "modelopt-mxfp8": Case(
            config=MODELOPT | {"quant_algo": "MXFP8"},
            write=partial(modelopt, kind="mxfp8"),
            form="F8_E4M3",
        ),
        "nf4": Case(config=bnb(4), write=partial(bnb_blocks, kind="nf4", nested=False), form="NF4"),
        "nf4-nested": Case(
            config=bnb(4, nested=True),
            write=partial(bnb_blocks, kind="nf4", nested=True),
            form="NF4",
        ),
        "fp4": Case(
            config=bnb(4, "fp4"), write=partial(bnb_blocks, kind="fp4", nested=False), form="FP4"
        ),
        "bnb-8": Case(config=bnb(8), write=bnb_rows, form="INT8"),
    }
    | {
        f"mlx-{bits}": Case(
            config={"group_size": 32, "bits": bits, "mode": "affine", PROJECTION: True},
            write=partial(mlx, bits=bits, group=32, dtype=dtype),
            form=f"MLX {bits}",
            also=(HEAD, EMBEDDING),
        )
        for bits, dtype in (
            *((2, torch.float16), (3, torch.float16), (4, torch.bfloat16)),
            *((5, torch.bfloat16), (6, torch.bfloat16), (8, torch.float32)),
        )
    }
    | {
        f"mlx-{mode}": Case(
            config={"group_size": group, "bits": bits, "mode": mode},
            write=partial(mlx_floats, mode=mode),
            form=form,
        )
        for mode, bits, group, form in (
            *(("mxfp4", 4, 32, "MXFP4"), ("mxfp8", 8, 32, "MXFP8")),
            ("nvfp4", 4, 16, "NVFP4"),
        )
    }
)


def renamed(made: Made) -> Made:
    """Spell the scales of blocks as compressed-tensors does."""
    parts, weight = made
    return {suffix.removesuffix("_inv"): part for suffix, part in parts.items()}, weight


def as_bytes(made: Made) -> Made:
    """Spell 4-bit floats as compressed-tensors does."""
    parts, weight = made
    words = parts[".weight"].view(torch.uint8)
    return {".weight_packed": words, ".weight_scale": parts[".scales"]}, weight
