"""Tiny checkpoints with a layer that predicts a further token (MTP), as their makers name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder, make_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

N_LAYERS = 2
OWN = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"use_qk_norm": True, "first_k_dense_replace": 1},
    "glm4_moe_lite": {},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "mlp_only_layers": [0],
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
}
"""By family: more of its config. The last of three layers is the one that predicts further."""
_QWEN = {"shared_head.norm": "norm", "enorm": "pre_fc_norm_embedding"} | {
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
}


def is_qwen(family: str) -> bool:
    """Whether the layer is below `mtp.`, and norms store what exceeds 1."""
    return family.startswith("qwen3_")


def make_mtp(folder: Path, family: str, *, seed: int = 0, **config: Any) -> Path:
    """Write a random checkpoint of two layers and one that predicts further. Return `folder`.

    `folder`/whole is what transformers makes of all three layers.
    """
    sizes = CASES[family] | {"num_hidden_layers": N_LAYERS + 1} | config
    whole = make_decoder(folder / "whole", family, with_tokenizer=False, seed=seed, **sizes)
    stored = load_file(whole / "model.safetensors")
    raw = json.loads((whole / "config.json").read_text())
    own = random_own(raw["hidden_size"], seed, centre=0.0 if is_qwen(family) else 1.0)
    block = f"model.layers.{N_LAYERS}."
    named: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        is_ahead = is_qwen(family) and name.startswith(block)
        named[f"mtp.layers.0.{name.removeprefix(block)}" if is_ahead else name] = tensor
    for name, tensor in own.items():
        named[f"mtp.{_QWEN[name]}.weight" if is_qwen(family) else f"{block}{name}.weight"] = tensor
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(own, whole / "own.safetensors")
    raw["num_hidden_layers"] = N_LAYERS
    for kinds in raw.keys() & {"layer_types", "mlp_layer_types"}:
        raw[kinds] = raw[kinds][:N_LAYERS]
    (folder / "config.json").write_text(json.dumps(raw))
    make_tokenizer(folder)
    return folder


def random_own(width: int, seed: int, centre: float) -> dict[str, Tensor]:
    """The norms and the linear that no decoder layer has."""
    generator = torch.Generator().manual_seed(seed + 1)
    made = {name: centre + 0.1 * torch.randn(width, generator=generator) for name in OWN[:-1]}
    return made | {"eh_proj": 0.15 * torch.randn(width, 2 * width, generator=generator)}


class PlainMtp:
    """What the published modules compute: transformers' model, and its last layer behind it.

    Norms of embedding and output, joined by a linear; a decoder layer; a norm; the model's head.
    """

    def __init__(self, folder: Path) -> None:
        """Load what `make_mtp` has written."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder / "whole",
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        ).eval()
        self.model: Any = model
        self.block: Any = self.model.model.layers[N_LAYERS]
        del self.model.model.layers[N_LAYERS]
        self.model.config.num_hidden_layers = N_LAYERS
        self.own = load_file(folder / "whole" / "own.safetensors")

    def norm(self, rows: Tensor, name: str) -> Tensor:
        """Divide by the root mean square; Qwen3-Next stores what exceeds 1."""
        config = self.model.config
        weight = self.own[name] + is_qwen(config.model_type)
        return (
            rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight
        )

    @torch.inference_mode()
    def drafts(self, tokens: list[int], n_drafts: int) -> list[int]:
        """The likeliest drafts behind `tokens`, the last of which the model has just sampled."""
        base = self.model.model
        known = torch.tensor([tokens[:-1]])
        states = base(known).last_hidden_state[0]  # after the final norm
        inputs = self._join(states, tokens[1:])
        made: list[int] = []
        while len(made) < n_drafts:
            positions = torch.arange(len(inputs))[None]
            mask = torch.full((len(inputs), len(inputs)), -torch.inf).triu(1)[None, None]
            rotary = base.rotary_emb(inputs[None], positions)
            out = self.block(inputs[None], attention_mask=mask, position_embeddings=rotary)
            out = out[0] if isinstance(out, tuple) else out
            last = self.norm(out.reshape(-1, out.shape[-1])[-1:], "shared_head.norm")
            made.append(int(self.model.lm_head(last)[0].argmax()))
            inputs = torch.cat((inputs, self._join(last, made[-1:])))
        return made

    @torch.inference_mode()
    def tokens(self, tokens: list[int], n_tokens: int) -> list[int]:
        """The model's own next tokens, greedily."""
        made = [*tokens]
        for _ in range(n_tokens):
            made.append(int(self.model(torch.tensor([made])).logits[0, -1].argmax()))
        return made[len(tokens) :]

    def _join(self, states: Tensor, following: list[int]) -> Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor(following))
        both = (self.norm(embedded, "enorm"), self.norm(states, "hnorm"))
        return torch.cat(both, -1) @ self.own["eh_proj"].T
