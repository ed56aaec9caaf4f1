"""Writes drafters as their makers publish them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig

from shardnet.assets import DEFAULT_MODEL_PATH

from .block import BLOCK, BLOCK_LAYERS, MASK, N_LAYERS, Block
from .chains import N_EXPERTS, N_SHARED, TOP_K, Chain, Eagle, Mtp, Small

SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act"),
    *("bos_token_id", "eos_token_id"),
)


def model_config() -> dict[str, Any]:
    """Return the bundled model's config."""
    config: dict[str, Any] = json.loads((DEFAULT_MODEL_PATH / "config.json").read_text("utf-8"))
    return config


def glm_config() -> dict[str, Any]:
    """Say in GLM-4.5's keys what the model's config says."""
    raw = model_config()
    return {key: raw[key] for key in (*SAME, "num_hidden_layers", "tie_word_embeddings")} | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": raw["rope_theta"],
            "partial_rotary_factor": 1.0,
        },
        "use_qk_norm": False,
        "attention_bias": False,
        "first_k_dense_replace": raw["num_hidden_layers"] - 1,
        "n_routed_experts": N_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": N_SHARED,
        "moe_intermediate_size": raw["intermediate_size"] // N_SHARED,
        "num_mtp_layers": 1,
    }


def write_eagle(folder: Path, eagle: Eagle) -> None:
    """Write an EAGLE-3 head: `d2t` holds differences of ids, embeddings are the model's."""
    raw, vocabulary = model_config(), eagle.vocabulary
    assert vocabulary is not None
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: raw[key] for key in SAME},
        "rope_theta": raw["rope_theta"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
    }
    can_say = torch.zeros(raw["vocab_size"], dtype=torch.bool)
    can_say[vocabulary] = True
    maps = {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": can_say}
    _write(folder, config, eagle.state_dict(), maps)


def write_block(folder: Path, block: Block) -> None:
    """Write a DFlash block drafter: embeddings and head are the model's."""
    raw = model_config()
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{key: raw[key] for key in SAME},
        "rope_theta": raw["rope_theta"],
        "rope_scaling": None,
        "attention_bias": False,
        "num_hidden_layers": N_LAYERS,
        "num_target_layers": raw["num_hidden_layers"],
        "layer_types": ["full_attention"] * N_LAYERS,
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": BLOCK,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [layer - 1 for layer in BLOCK_LAYERS],
        },
        "tie_word_embeddings": False,
    }
    _write(folder, config, block.state_dict(), {})


def write_small(folder: Path, small: Small) -> None:
    """Write a small Llama with the model's embeddings."""
    config = model_config() | {"num_hidden_layers": small.n_layers}
    stored = {f"model.{name}": tensor for name, tensor in small.state_dict().items()}
    table = "model.embed_tokens.weight"
    stored[table] = load_file(DEFAULT_MODEL_PATH / "model.safetensors")[table]
    _write(folder, config, stored, {})
    _copy_tokenizer(folder)


def write_mtp(folder: Path, mtp: Mtp) -> None:
    """Write the model as a GLM-4.5 that says the same, and the layer behind its last.

    Its last layer has experts that answer nothing beside a shared one, which is its MLP.
    """
    raw = glm_config()
    n_layers, width, inner = (
        raw[key] for key in ("num_hidden_layers", "hidden_size", "moe_intermediate_size")
    )
    stored: dict[str, Tensor] = {}
    mlp = f"model.layers.{n_layers - 1}.mlp"
    for name, tensor in load_file(DEFAULT_MODEL_PATH / "model.safetensors").items():
        stored[name.replace(f"{mlp}.", f"{mlp}.shared_experts.")] = tensor
    stored[f"{mlp}.gate.weight"] = torch.zeros(N_EXPERTS, width)
    stored[f"{mlp}.gate.e_score_correction_bias"] = torch.zeros(N_EXPERTS)
    for expert in range(N_EXPERTS):
        for part, shape in (
            ("gate", (inner, width)),
            ("up", (inner, width)),
            ("down", (width, inner)),
        ):
            stored[f"{mlp}.experts.{expert}.{part}_proj.weight"] = torch.zeros(shape)
    behind = f"model.layers.{n_layers}"
    for name, tensor in mtp.state_dict().items():
        ours = name.replace("block.", "") if name.startswith("block.") else name
        stored[f"{behind}.{'shared_head.norm.weight' if ours == 'norm.weight' else ours}"] = tensor
    _write(
        folder,
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **raw},
        stored,
        {},
    )
    _copy_tokenizer(folder)


def _write(
    folder: Path, config: dict[str, Any], stored: dict[str, Tensor], maps: dict[str, Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    held = {
        name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in stored.items()
    }
    save_file(held | maps, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEFAULT_MODEL_PATH / name, folder / name)


def load_drafter(folder: Path, model: Any) -> Chain | Block:
    """Load what one of these wrote, told by its config. `model` is the bundled one."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    stored = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    drafter: Chain | Block
    match config["architectures"][0]:
        case "LlamaForCausalLMEagle3":
            drafter = Eagle(model, stored.pop("d2t") + torch.arange(config["draft_vocab_size"]))
            del stored["t2d"]
        case "DFlashDraftModel":
            drafter = Block(model)
        case "LlamaForCausalLM":
            drafter = Small(model)
            stored = {
                name.removeprefix("model."): tensor
                for name, tensor in stored.items()
                if "embed_tokens" not in name
            }
        case _:
            drafter = make_mtp(model)
            behind = f"model.layers.{config['num_hidden_layers']}."
            stored = {
                _mtp_name(name.removeprefix(behind)): tensor
                for name, tensor in stored.items()
                if name.startswith(behind)
            }
    drafter.load_state_dict(stored)
    return drafter.eval().requires_grad_(requires_grad=False)


def make_mtp(model: Any) -> Mtp:
    """Make the layer of `write_mtp`, untrained."""
    made: Any = Glm4MoeConfig
    config = made(**glm_config(), attn_implementation="eager", experts_implementation="eager")
    return Mtp(model, config)


def _mtp_name(stored: str) -> str:
    if stored == "shared_head.norm.weight":
        return "norm.weight"
    return stored if stored.startswith(("enorm", "hnorm", "eh_proj")) else f"block.{stored}"
