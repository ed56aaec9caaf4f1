"""GGUF files made from tiny Hugging Face checkpoints, as llama.cpp's converter makes them.

Written with `gguf`'s own writer. What the converter does to the values is done here anew, in numpy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[Any]
Pack = Callable[[str, Array], tuple[Array, gguf.GGMLQuantizationType | None]]
"""From a tensor's GGUF name and values to what is stored, and its type (None: as numpy has it)."""

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gpt_oss": "gpt-oss",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "arcee": "arcee",
    "starcoder2": "starcoder2",
    "nemotron": "nemotron",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "minimax_m2": "minimax-m2",
    "mimo_v2_flash": "mimo2",
    "kimi_linear": "kimi-linear",
    "qwen4_exp_text": "qwen4exp",
    "glm5_next_text": "glm5-next",
    "afmoe": "afmoe",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "ministral3": "mistral3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "solar_open": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "minicpm3": "minicpm3",
    "glm_moe_dsa": "glm-dsa",
    "deepseek_v4": "deepseek4",
    "hy_v4": "hy_v4",
    "gpt2": "gpt2",
    "gemma": "gemma",
    "olmo": "olmo",
    "jais2": "jais2",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "phimoe": "phimoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "dots1": "dots1",
    "exaone": "exaone",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
}
"""From `model_type` to `general.architecture`."""
HYPER = {
    f"hc_{part}_layer.hc_{kind}": f"hc_{stored}_{kind}"
    for part, stored in (("attn", "attn"), ("mlp", "ffn"))
    for kind in ("fn", "base", "scale")
}
COMPRESSOR = {
    f"attn.{begin}compressor.{own}": f"{stored}_compressor_{kind}"
    for begin, stored in (("", "attn"), ("indexer.", "indexer"))
    for own, kind in (("wkv", "kv"), ("wgate", "gate"), ("ape", "ape"), ("norm", "norm"))
}
OWN_NAMES = {
    "deepseek_v4": {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "head": "output",
        "attn_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "attn.attn_sink": "attn_sinks",
        "attn.wq_a": "attn_q_a",
        "attn.wq_b": "attn_q_b",
        "attn.q_norm": "attn_q_a_norm",
        "attn.wkv": "attn_kv",
        "attn.norm": "attn_kv_a_norm",
        "attn.wo_a": "attn_output_a",
        "attn.wo_b": "attn_output_b",
        "attn.indexer.wq_b": "indexer.attn_q_b",
        "attn.indexer.weights_proj": "indexer.proj",
        "ffn.gate": "ffn_gate_inp",
        "ffn.gate.tid2eid": "ffn_gate_tid2eid",
        "ffn.shared_experts.w1": "ffn_gate_shexp",
        "ffn.shared_experts.w2": "ffn_down_shexp",
        "ffn.shared_experts.w3": "ffn_up_shexp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        **{f"hc_head.hc_{kind}": f"output_hc_{kind}" for kind in ("fn", "base", "scale")},
        **{name: name for name in HYPER.values()},
        **COMPRESSOR,
    },
    "hy_v4": {
        "self_attn.learnable_sink_param": "attn_sinks",
        "self_attn.linear_gate": "attn_gate",
        "mlp.linear_gate": "ffn_gate",
        "mlp.shared_experts.linear_gate": "ffn_gate_shexp",
        **{f"hc_head.hc_head_{kind}": f"output_hc_{kind}" for kind in ("fn", "base", "scale")},
        **HYPER,
    },
    "qwen4_exp_text": {
        **{
            f"{own}.{kind}": f"{stored}_{short}"
            for own, stored in (
                ("attn_hyper_connection", "hc_attn"),
                ("mlp_hyper_connection", "hc_ffn"),
                ("hyper_connection_mixer", "output_hc"),
            )
            for kind, short in (
                ("hc_norm", "norm"),
                ("input_mix_weight_down", "down"),
                ("input_mix_weight_up", "up"),
                ("block_inject_weight", "inject"),
            )
        },
        "per_layer_token_embd": "per_layer_token_embd",
        "self_attn.indexer.q_proj": "indexer.q_proj",
        "self_attn.indexer.k_proj": "indexer.k_proj",
        "self_attn.indexer.q_layernorm": "indexer.q_norm",
        "self_attn.indexer.k_layernorm": "indexer.k_norm",
        "ple.key_proj": "ple_key",
        "ple.value_proj": "ple_value",
        "ple.norm_key": "ple_norm_key",
        "ple.norm_query": "ple_norm_query",
        "ple.norm_conv": "ple_norm_conv",
        "ple.conv1d": "ple_conv1d",
    },
    "glm5_next_text": {
        **{name: name for name in HYPER.values()},
        "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate",
        "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape",
        "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.proj",
        "self_attn.indexer.wk": "indexer.attn_k",
        "self_attn.indexer.wq_b": "indexer.attn_q_b",
    },
}
"""What the converter calls what the `gguf` package does not know, by the makers' names."""
NAMED_AS = {
    "deepseek4": "deepseek2",
    "hy_v4": "glm-dsa",
    "qwen4exp": "qwen35moe",
    "glm5-next": "kimi-linear",
}
"""Architectures that the package does not know: another one with the other names."""
INTERLEAVED = (
    *("llama", "mistral", "mixtral", "granite", "smollm3", "ministral3", "arcee", "olmo"),
    *("granitemoe", "granitemoeshared", "granitemoehybrid"),
)


def write_gguf(
    source: Path,
    path: Path,
    *,
    pack: Pack | None = None,
    extra: Mapping[str, Array | None] | None = None,
    split_max_tensors: int = 0,
    tokenizer: Mapping[str, Any] | None = None,
    architecture: str = "",
    has_whole_latents: bool = False,
    **metadata: Any,
) -> Path:
    """Write the checkpoint folder `source` as the GGUF `path`. Return `path`.

    With `split_max_tensors` it is written in parts, whose names follow from `path`. `extra` are
    more tensors; None leaves one out. `metadata` is put over what follows from config.json, the
    names without the architecture, dots as double underscores; None leaves a key out. `tokenizer`
    has whole keys. `architecture` is another one than the family's. With `has_whole_latents`
    DeepSeek's kv_b_proj is one tensor, as in older files.
    """
    config = _text_config(source)
    arch = architecture or ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    own = gguf_metadata(config) | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in (own | _ngram_factors(source)).items():
        if value is not None:
            add_value(writer, f"{arch}.{key}", value)
    ids = {f"tokenizer.ggml.{role}_token_id": config[f"{role}_token_id"] for role in ("bos", "eos")}
    for key, value in (tokenizer or ids).items():
        add_value(writer, key, value)
    whole = converted(source) | dict(extra or {})
    tensors = {name: values for name, values in whole.items() if values is not None}
    if not has_whole_latents:
        tensors = {k: v for name in tensors for k, v in _halves(config, name, tensors[name])}
    for name, values in tensors.items():
        stored, kind = (pack or _as_it_is)(name, values)
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _text_config(source: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    return config.get("text_config", config)


def _halves(config: dict[str, Any], name: str, values: Array) -> list[tuple[str, Array]]:
    """DeepSeek's keys and values of latents, apart; anything else as it is."""
    if "attn_kv_b" not in name:
        return [(name, values)]
    n_nope = config["qk_nope_head_dim"]
    heads = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
    return [
        (name.replace("kv_b", "k_b"), heads[:, :n_nope].swapaxes(1, 2)),
        (name.replace("kv_b", "v_b"), heads[:, n_nope:]),
    ]


def pack_as(kind: gguf.GGMLQuantizationType) -> Pack:
    """Store matrices as `kind`, for which the package can quantize, and the rest in float32."""

    def pack(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType | None]:
        is_packed = values.ndim == 2 and values.shape[0] > 1 and not name.endswith("bias")
        return (quantize(values, kind), kind) if is_packed or values.ndim > 2 else (values, None)

    return pack


def converted(source: Path) -> dict[str, Array]:
    """The tensors of a checkpoint folder under GGUF's names, as the converter changes them."""
    config = _text_config(source)
    family, arch = config["model_type"], ARCHITECTURES[config["model_type"]]
    n_layers = config.get("num_hidden_layers") or config.get("n_layer", 9)
    known = NAMED_AS.get(arch, arch)
    number = next(kind for kind in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[kind] == known)
    names = gguf.get_tensor_name_map(number, n_layers)
    made = {}
    stored = load_file(source / "model.safetensors")
    if family == "kimi_linear":  # transformers saves MLPs under the name of experts
        stored = {name.replace("block_sparse_moe", "mlp"): stored[name] for name in stored}
    if family == "glm5_next_text":
        plain = {name.replace("language_model.", ""): stored[name] for name in stored}
        stored = {name: plain[name] for name in plain if ".visual." not in name}
    if family == "qwen4_exp_text":
        stored = _with_one_table(config, stored)
    tensors = _stacked(stored)
    for name, values in _with_split_gates(config, tensors).items():
        spoken = name.replace("correction_bias", "correction.bias")
        spoken = spoken.replace(".expert_bias", ".expert_bias.bias")
        renamed = spoken.replace(".dt_bias", ".dt_proj.bias")
        found = _own_name(family, name) or names.get_name(
            renamed, try_suffixes=(".weight", ".bias")
        )
        if name.endswith(("_exps.scale", "_inp.scale")):
            found = name.replace("model.layers.", "blk.")
        assert found is not None, name
        if config.get("num_local_experts") == 0:
            found = found.replace("_shexp", "")
        is_bare = name.endswith(("sinks", "sink_bias", "layer_scalar")) or found.endswith("_exps")
        found += ".weight" if is_bare else ""
        made[found] = _converted(family, config, name, values)
    return made


def _own_name(family: str, name: str) -> str | None:
    """What the converter calls a tensor by a table of its own, None for one of the package's."""
    place = re.fullmatch(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+?)", name.replace(".hc_pre.", "."))
    assert place is not None, name
    part = place[2].removeprefix("hc_pre.")
    if part == "ffn.gate.bias":
        return f"blk.{place[1]}.exp_probs_b.bias"
    kind = "bias" if part.endswith("k_norm.bias") else "weight"
    stored = OWN_NAMES.get(family, {}).get(part.removesuffix(f".{kind}"))
    return stored and (f"blk.{place[1]}.{stored}.{kind}" if place[1] else f"{stored}.{kind}")


def _stacked(tensors: dict[str, Array]) -> dict[str, Array]:
    """All experts of a layer in one tensor, outputs before inputs, gate and up apart."""
    made: dict[str, Array] = {}
    for name, values in tensors.items():
        if one := re.fullmatch(r"(.*\.)\w+\.experts\.0\.(\w+)\.weight", name):
            kind = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(one[2], one[2])
            numbers = re.findall(r"\.experts\.(\d+)\.", " ".join(tensors))
            n_experts = 1 + max(int(number) for number in numbers)
            of_all = [
                tensors[name.replace(".experts.0.", f".experts.{n}.")] for n in range(n_experts)
            ]
            layer = one[1].replace("backbone.", "model.")
            made[f"{layer}mlp.experts.{kind}.weight"] = np.stack(of_all)
        elif re.search(r"\.experts\.\d", name):
            continue
        elif turned := re.fullmatch(r"(.*\.feed_forward\.experts\.)(gate_up|down)_proj", name):
            outputs = values.swapaxes(1, 2)
            if turned[2] == "down":
                made[f"{name}.weight"] = outputs
            else:
                gate, up = np.split(outputs, 2, axis=1)
                made |= {f"{turned[1]}gate_proj.weight": gate, f"{turned[1]}up_proj.weight": up}
        elif ".input_linear." in name:
            both = np.split(values, 2, axis=-2)
            where = name.replace("block_sparse_moe.", "mlp.experts.").replace("input_linear", "{}")
            where = where.replace("shared_mlp.", "mlp.shared_mlp.")
            made |= {
                where.format(f"{part}_proj"): half
                for part, half in zip(("gate", "up"), both, strict=True)
            }
        elif ".output_linear." in name or ".block_sparse_moe.router.layer." in name:
            where = name.replace("block_sparse_moe.router.layer.", "mlp.gate.")
            where = where.replace("block_sparse_moe.", "mlp.experts.")
            where = where.replace("shared_mlp.", "mlp.shared_mlp.")
            made[where.replace("output_linear", "down_proj")] = values
        elif name.endswith(".mlp.gate.wg.weight"):
            made[name.replace(".wg.", ".")] = values
        elif name.endswith(".per_expert_scale"):
            made[name.replace("router.per_expert_scale", "ffn_down_exps.scale")] = values
        elif name.endswith(".router.scale"):
            made[name.replace("router.scale", "ffn_gate_inp.scale")] = values
        elif re.fullmatch(r"model\.layers\.\d+\.experts\.\w+", name):
            made[name] = values  # gate and up in one, as Gemma 4's are kept
        elif name.endswith("mlp.experts.down_proj") and f"{name}_bias" not in tensors:
            made[f"{name}.weight"] = values  # Hunyuan 4's: gate's outputs before those of up
        elif name.endswith("mlp.experts.gate_up_proj") and f"{name}_bias" not in tensors:
            gate, up = np.split(values, 2, axis=1)
            where = name.removesuffix("gate_up_proj")
            made |= {f"{where}gate_proj.weight": gate, f"{where}up_proj.weight": up}
        elif both := re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj(_bias)?", name):
            kind = "bias" if both[3] else "weight"
            outputs = values if both[3] else values.swapaxes(1, 2)
            if both[2] == "down":
                made[f"{both[1]}down_proj.{kind}"] = outputs
            else:
                made[f"{both[1]}gate_proj.{kind}"] = outputs[:, ::2]
                made[f"{both[1]}up_proj.{kind}"] = outputs[:, 1::2]
        else:
            made[name] = values[0] if name.endswith("shared_expert_gate.weight") else values
    return made


def _with_split_gates(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """Qwen3-Next's linears of a DeltaNet, grouped by key head, as one of each kind and the gate."""
    made: dict[str, Array] = {}
    for name, values in tensors.items():
        if not name.endswith("in_proj_qkvz.weight"):
            made[name] = values
            continue
        n_heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
        groups = values.reshape(n_heads, -1, values.shape[-1])
        of_values = (groups.shape[1] - 2 * size) // 2
        parts = np.split(groups, [size, 2 * size, 2 * size + of_values], axis=1)
        *mixed, gate = (part.reshape(-1, values.shape[-1]) for part in parts)
        made[name.replace("qkvz", "qkv")] = np.concatenate(mixed)
        made[name.replace("qkvz", "z")] = gate
    return made


def _ngram_factors(source: Path) -> dict[str, Any]:
    """What Qwen 3.8's token ids are multiplied by."""
    stored = load_file(source / "model.safetensors")
    found = [stored[name] for name in stored if name.endswith(".layer_multipliers")]
    return {"ple.layer_multipliers": found[0].tolist()} if found else {}


def _with_one_table(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """Qwen 3.8's table of n-grams in one, its queries and keys of an index apart, and no hashes."""
    made = {name: tensors[name] for name in tensors if ".ple_embedding." not in name}
    parts = {name: tensors[name] for name in tensors if ".ngram_embedding.shard_" in name}
    if parts:
        ordered = sorted(parts, key=lambda name: int(name.split("shard_")[1].split(".")[0]))
        made["per_layer_token_embd.weight"] = np.concatenate([parts[name] for name in ordered])
    for name in [name for name in made if "index_qk_proj" in name]:
        both, n_keys = made.pop(name), config["indexer_head_dim"]
        made |= {
            name.replace("index_qk", "q"): both[:-n_keys],
            name.replace("index_qk", "k"): both[-n_keys:],
        }
    return made


def _multiplied(config: dict[str, Any], name: str, values: Array) -> Array:
    """Falcon-H1's weights with the config's factors in them."""
    gate, down = config["mlp_multipliers"]
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": config["attention_in_multiplier"],
        "k_proj": config["attention_in_multiplier"] * config["key_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = [inner, inner, states, states, config["mamba_n_heads"]]
        each = np.repeat(config["ssm_multipliers"], widths) * config["ssm_in_multiplier"]
        return (values * each[:, None]).astype(values.dtype)
    return (values * factors.get(part, 1)).astype(values.dtype)


def _converted(family: str, config: dict[str, Any], name: str, values: Array) -> Array:
    if family == "falcon_h1":
        values = _multiplied(config, name, values)
    if family == "hy_v4":
        return in_pairs(config, name, values)
    if values.dtype == np.int64:
        return values.astype(np.int32)
    if family in INTERLEAVED and ".q_proj." in name:
        return interleaved(values, config["num_attention_heads"])
    if family in INTERLEAVED and ".k_proj." in name:
        return interleaved(values, config["num_key_value_heads"])
    if "linear_num_key_heads" in config:
        return _converted_hybrid(config, name, values)
    if name.endswith("A_log") and "linear_num_key_heads" not in config:
        is_flat = family in ("kimi_linear", "glm5_next_text")
        return -np.exp(values) if is_flat else -np.exp(values)[:, None]
    if name.endswith((".mamba.D", ".mixer.D")):
        return values[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return values.reshape(config.get("mamba_n_groups", config.get("n_groups")), -1)
    if name.endswith("conv1d.weight") and "linear_num_key_heads" not in config:
        return values.squeeze(1)
    if "_conv1d." in name:
        return values[None].swapaxes(1, 2).reshape(1, len(values), 1, -1)
    if family == "gpt_neox" and "query_key_value" in name:
        heads = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        return heads.swapaxes(0, 1).reshape(values.shape)
    if family in ("gemma", "gemma2", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
        return values + 1
    if family == "gpt2" and ".h." in name and values.ndim == 2:
        return values.T
    return values


def _converted_hybrid(config: dict[str, Any], name: str, values: Array) -> Array:
    """Decays, norms, the convolution; in Qwen 3.5 value heads take turns over the key heads."""
    is_norm = name.endswith("norm.weight") or ".ple.norm_" in name
    if is_norm and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    if name.endswith(".ple.conv1d.weight"):
        return values.squeeze()
    if ".linear_attn." not in name or name.endswith("norm.weight"):
        return values
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = -np.exp(values) if name.endswith("A_log") else values
    if config["model_type"] == "qwen3_next":
        return values.squeeze()
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = values.squeeze()
        return np.concatenate((values[:keys], _taking_turns(config, values[keys:])))
    if name.endswith("out_proj.weight"):
        return _taking_turns(config, values.T).T
    return _taking_turns(config, values)


def _taking_turns(config: dict[str, Any], values: Array) -> Array:
    """Put the first value heads of all key heads first, then the second ones, and so on."""
    n_keys, n_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = values.reshape(n_values, -1, *values.shape[1:])
    n_shared = n_values // n_keys
    order = [head for first in range(n_shared) for head in range(first, n_values, n_shared)]
    return heads[order].reshape(values.shape)


def interleaved(values: Array, n_heads: int) -> Array:
    """Rows of queries or keys with the two that rotate together side by side, as Meta has them."""
    size = values.shape[0] // n_heads
    made = np.empty_like(values)
    for head in range(n_heads):
        for pair in range(size // 2):
            made[head * size + 2 * pair] = values[head * size + pair]
            made[head * size + 2 * pair + 1] = values[head * size + size // 2 + pair]
    return made


def in_pairs(config: dict[str, Any], name: str, values: Array) -> Array:
    """One of Hunyuan 4's tensors with rotated pairs side by side, as in the makers' checkpoint.

    transformers' modules turn halves: of one checkpoint they compute something else than llama.cpp
    and vLLM, which agree.
    """
    turned = config["qk_rope_head_dim"]
    heads_of = {".q_b_proj.": config["num_attention_heads"]}
    heads_of |= {".indexer.wq_b.": config["index_n_heads"]}
    heads_of |= dict.fromkeys((".kv_a_proj_with_mqa.", ".indexer.wk.", ".indexer.k_norm."), 1)
    n_heads = next((n for part, n in heads_of.items() if part in name), None)
    if n_heads is None:
        return values
    heads = values.reshape(n_heads, -1, *values.shape[1:])
    pairs = [n for pair in range(turned // 2) for n in (pair, turned // 2 + pair)]
    ends = heads[:, -turned:][:, pairs]
    return np.concatenate((heads[:, :-turned], ends), 1).reshape(values.shape)


def _as_it_is(name: str, values: Array) -> tuple[Array, None]:
    return values, None


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key of whatever type its value has."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():  # also an empty one, which add_string leaves out
            writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
        case _ if any(type(one) is int and one >= 1 << 31 for one in value):
            kind = gguf.GGUFValueType
            writer.add_key_value(key, value, kind.ARRAY, sub_type=kind.UINT64)
        case _:
            writer.add_array(key, value)


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """What a file says of a config, by keys without the architecture; None for what it does not."""
    if config["model_type"] == "gpt2":
        return {
            "block_count": config["n_layer"],
            "context_length": config["n_positions"],
            "embedding_length": config["n_embd"],
            "feed_forward_length": config["n_inner"] or 4 * config["n_embd"],
            "attention.head_count": config["n_head"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters", {"rope_theta": 10000.0})
    of_all = rope.get("full_attention", rope.get("main", rope))
    made = {
        "block_count": len(config.get("layers_block_type", ())) or config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings") or config["model_max_length"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": next(
            (
                config[key]
                for key in ("norm_epsilon", "norm_eps", "layer_norm_eps")
                if key in config
            ),
            None,
        ),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * of_all.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(of_all["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if "num_experts_per_tok" in config:
        counts = ("num_local_experts", "n_routed_experts", "num_experts")
        made |= {
            "expert_count": next(config[key] for key in counts if key in config),
            "expert_used_count": config["num_experts_per_tok"],
        }
    match config["model_type"]:
        case "qwen2_moe" | "qwen3_next" | "qwen3_5_moe_text" | "qwen4_exp_text":
            made |= {
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
            }
        case "ernie4_5_moe":
            made |= {
                "expert_count": config["moe_num_experts"],
                "expert_used_count": config["moe_k"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_count": config["moe_num_shared_experts"],
                "interleave_moe_layer_step": config["moe_layer_interval"],
                "leading_dense_block_count": config["moe_layer_start_index"],
            }
        case "minimax_m2":
            made |= {
                "expert_feed_forward_length": config["intermediate_size"],
                "expert_gating_func": 2,
            }
        case "qwen3_moe":
            made |= {
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_feed_forward_length": 0,
            }
        case "gpt_oss":
            made |= {
                "expert_feed_forward_length": config["intermediate_size"],
                "attention.sliding_window": config["sliding_window"],
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": of_all["factor"],
                "rope.scaling.original_context_length": of_all["original_max_position_embeddings"],
            }
        case "granite" | "granitemoe" | "granitemoeshared":
            made |= _multipliers(config)
        case "gemma2":
            made |= {
                "attn_logit_softcapping": config["attn_logit_softcapping"],
                "final_logit_softcapping": config["final_logit_softcapping"],
                "attention.sliding_window": config["sliding_window"],
            }
        case "gemma4_text":
            made |= _heads_of_two_kinds(config, size, rope)
        case "lfm2" | "lfm2_moe":
            made |= _convolutions(config)
        case "llama4_text":
            made |= {
                "feed_forward_length": config["intermediate_size_mlp"],
                "expert_feed_forward_length": config["intermediate_size"],
                "interleave_moe_layer_step": config["interleave_moe_layer_step"],
            }
        case "deepseek_v2" | "deepseek_v3" | "glm4_moe_lite":
            made |= _latents(config, rope) | _grouped_experts(config)
        case "minicpm3":
            rotated, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
            made |= {
                "attention.kv_lora_rank": config["kv_lora_rank"],
                "attention.q_lora_rank": config["q_lora_rank"],
                "attention.key_length": rotated + nope,
                "attention.value_length": None,
                "rope.dimension_count": rotated,
            }
        case "glm_moe_dsa":
            made |= _latents(config, rope) | _grouped_experts(config) | _indexer(config)
        case "deepseek_v4":
            made |= _compressed(config, rope)
        case "hy_v4":
            n_dense = config["mlp_layer_types"].count("dense")
            made |= _latents(config, rope) | _grouped_experts(config | {"n_group": None})
            made |= _indexer(config) | {
                "leading_dense_block_count": n_dense,
                "expert_group_used_count": None,
                "swiglu_clamp_exp": [config["swiglu_limit"]] * config["num_hidden_layers"],
                "hyper_connection.count": config["hc_mult"],
                "hyper_connection.epsilon": config["hc_eps"],
                "hyper_connection.magnitude": config["hc_magnitude"],
                "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
            }
        case "glm5_next_text":
            made |= _glm5(config)
        case "kimi_linear":
            spelled = {
                "norm_topk_prob": "moe_renormalize",
                "n_group": "num_expert_group",
                "n_shared_experts": "num_shared_experts",
            }
            same = {name: config[key] for name, key in spelled.items()}
            made |= _latents(config, {"rope_type": "default"})
            made |= _grouped_experts(config | same) | {
                "expert_weights_norm": None,
                "expert_used_count": config["num_experts_per_token"],
                "expert_count": config["num_experts"],
                "kda.head_dim": config["linear_head_dim"],
                "ssm.conv_kernel": config["linear_conv_kernel_dim"],
                "attention.head_count_kv": [
                    int(kind == "full_attention") for kind in config["layer_types"]
                ],
            }
        case "afmoe":
            made |= {
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_count": config["num_shared_experts"],
                "leading_dense_block_count": config["num_dense_layers"],
                "expert_weights_norm": True,
                "expert_weights_scale": config["route_scale"],
                "expert_gating_func": 2,
                "attention.sliding_window": config["sliding_window"],
            }
        case "granitemoehybrid":
            made |= {
                **_multipliers(config),
                **_mamba(config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
                "ssm.state_size": config["mamba_d_state"],
                "ssm.conv_kernel": config["mamba_d_conv"],
                "rope.scaling.finetuned": False,
                "attention.head_count_kv": [
                    config["num_key_value_heads"] if kind == "full_attention" else 0
                    for kind in config["layer_types"]
                ],
            }
        case "falcon_h1":
            made |= {
                **_mamba(config, "mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
                "ssm.state_size": config["mamba_d_state"],
                "ssm.conv_kernel": config["mamba_d_conv"],
            }
        case "nemotron_h":
            kinds = config["layers_block_type"]
            wide = ("mlp", "moe")
            made |= {
                **_mamba(config, "mamba_num_heads", "mamba_head_dim", "n_groups"),
                "ssm.state_size": config["ssm_state_size"],
                "ssm.conv_kernel": config["conv_kernel"],
                "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
                "attention.head_count_kv": [
                    config["num_key_value_heads"] if kind == "full_attention" else 0
                    for kind in kinds
                ],
                "feed_forward_length": [80 if kind in wide else 0 for kind in kinds],
                **_grouped_experts(config | {"first_k_dense_replace": 0}),
                "leading_dense_block_count": None,
                "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            }
        case "hunyuan_v1_moe":
            made |= {
                "expert_count": config["num_experts"],
                "expert_used_count": config["moe_topk"],
                "expert_feed_forward_length": config["intermediate_size"],
                "expert_shared_count": 1,
            }
        case "stablelm" | "gpt_neox":
            made |= {"use_parallel_residual": config["use_parallel_residual"]}
        case "cohere" | "cohere2":
            made |= {"logit_scale": config["logit_scale"]}
            made |= {"attention.sliding_window": config.get("sliding_window")}
        case "phimoe":
            made |= {"attention.sliding_window": 0}
        case "olmo":
            made |= {"attention.layer_norm_epsilon": 1e-5}
        case "mimo_v2_flash":
            is_local = [int(kind == "sliding_attention") for kind in config["layer_types"]]
            made |= {
                **_grouped_experts(config),
                "leading_dense_block_count": None,
                "attention.value_length": config["v_head_dim"],
                "attention.value_scale": config["attention_value_scale"],
                "attention.sliding_window": config["sliding_window"] - 1,
                "attention.sliding_window_pattern": is_local,
                "attention.head_count_kv": [
                    config["num_key_value_heads"] * (1 + local) for local in is_local
                ],
                "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
            }
        case "glm4_moe" | "solar_open" | "dots1":
            made |= _grouped_experts(config)
        case "gemma3_text" | "exaone4" | "olmo3" | "phi3":
            made |= {"attention.sliding_window": config["sliding_window"]}
    if config.get("shared_intermediate_size"):
        made |= {"expert_shared_feed_forward_length": config["shared_intermediate_size"]}
    if "linear_num_key_heads" in config:
        n_values, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
        made |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": n_values,
            "ssm.inner_size": n_values * size,
            "rope.dimension_sections": [11, 11, 10, 0],
        }
        if config["model_type"] == "qwen4_exp_text":
            return made | _qwen4(config)
        made["full_attention_interval"] = 1 + config["layer_types"].index("full_attention")
    return made


def _qwen4(config: dict[str, Any]) -> dict[str, Any]:
    """Qwen 3.8's keys beside Qwen 3.5's."""
    ratio, hidden = config["indexer_compress_ratio"], config["hidden_size"]
    is_linear = [kind == "linear_attention" for kind in config["layer_types"]]
    made = {
        "feed_forward_length": None,
        "full_attention_interval": 4,
        "attention.recurrent_layers": is_linear,
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "attention.compress_ratios": [0 if own else ratio for own in is_linear],
    }
    if not config["ple_layer_ids"]:
        return made
    n_heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
    primes = _first_primes(config["ngram_vocab_size_base"], n_heads)
    return made | {
        "ple.layers": [n - 1 for n in config["ple_layer_ids"]],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "ple.image_token_id": 7,
        "ple.head_vocab_sizes": primes,
        "ple.head_offsets": [sum(primes[:n]) for n in range(n_heads)],
        "embedding_length_per_layer_input": (config["ple_embed_dim"] or hidden) // n_heads,
    }


def _first_primes(least: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        if all(least % divisor for divisor in range(2, least)):
            found.append(least)
        least += 1
    return found


def _glm5(config: dict[str, Any]) -> dict[str, Any]:
    """GLM-5.3-Flash's keys."""
    n_layers, limit = config["num_hidden_layers"], config["swiglu_limit"]
    kinds = config["mlp_layer_types"]
    made = _latents(config, {"rope_type": "default"}) | _grouped_experts(config)
    return made | {
        "rope.freq_base": None,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.head_count_kv": [
            int(kind != "linear_attention") for kind in config["layer_types"]
        ],
        "leading_dense_block_count": kinds.index("sparse") if "sparse" in kinds else n_layers,
        "kda.head_dim": config["linear_head_dim"],
        "kda.gate_lower_bound": config["linear_lower_bound"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        **_indexer(config),
        "attention.indexer.kpool": config["index_kpool"],
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"],
        "swiglu_clamp_exp": [limit] * n_layers,
        "swiglu_clamp_shexp": [limit] * n_layers,
    }


def _heads_of_two_kinds(config: dict[str, Any], size: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Gemma 4's keys: the plain ones are of layers without a window."""
    is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
    others = {int(layer): said for layer, said in config["per_layer_config"].items()}
    full, of_all = next(iter(others.values())), config["num_key_value_heads"]
    made = {
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": size,
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": is_local,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.head_count_kv": [
            others.get(layer, {}).get("num_key_value_heads", of_all)
            for layer in range(len(is_local))
        ],
    }
    if config["enable_moe_block"]:
        made |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return made


def _multipliers(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _mamba(config: dict[str, Any], heads: str, size: str, groups: str) -> dict[str, Any]:
    """Mamba-2's keys."""
    return {
        "ssm.time_step_rank": config[heads],
        "ssm.inner_size": config[heads] * config[size],
        "ssm.group_count": config[groups],
    }


def _convolutions(config: dict[str, Any]) -> dict[str, Any]:
    """LFM2's keys: layers with a convolution have no heads of keys."""
    n_kv_heads = config["num_key_value_heads"]
    has_attention = [kind == "full_attention" for kind in config["layer_types"]]
    made = {
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "attention.layer_norm_epsilon": None,
        "attention.head_count_kv": [n_kv_heads if own else 0 for own in has_attention],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if config["model_type"] == "lfm2":
        inner = int(2 * config["intermediate_size"] / 3)
        multiple = config["block_multiple_of"]
        return made | {"feed_forward_length": -(-inner // multiple) * multiple}
    return made | {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": 2,
    }


def _latents(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek's keys, as newer converters write them."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    made = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": turned,
    }
    if rope["rope_type"] == "yarn":
        made |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return made


def _indexer(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of what chooses positions."""
    return {
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }


def _compressed(config: dict[str, Any], ropes: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V4's keys."""
    rates = config["compress_rates"] | {"sliding_attention": 0}
    rope, limits = ropes["compress"], [config["swiglu_limit"]] * config["num_hidden_layers"]
    made = _indexer(config) | {
        "rope.freq_base": ropes["main"]["rope_theta"],
        "rope.dimension_count": config["qk_rope_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.sliding_window": config["sliding_window"],
        "attention.output_group_count": config["o_groups"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "attention.compress_ratios": [rates[kind] for kind in config["layer_types"]] + [0],
        "attention.compress_rope_freq_base": rope["rope_theta"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
        "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.epsilon": config["hc_eps"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "embedding_length_out": config["hc_mult"] * config["hidden_size"],
    }
    if rope["rope_type"] == "yarn":
        made |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    return made


def _grouped_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of experts in groups, chosen by softmax in DeepSeek-V2 and else by sigmoid."""
    is_sigmoid = config["model_type"] != "deepseek_v2"
    return {
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config.get("n_shared_experts"),
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": is_sigmoid and config["norm_topk_prob"],
        "expert_gating_func": 2 if is_sigmoid else None,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }
