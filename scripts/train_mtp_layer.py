#!/usr/bin/env python3
"""Give the bundled model a layer that predicts a further token, to try `--speculate mtp` with.

The model becomes a GLM-4.5 checkpoint that says the same: its last layer has experts that answer
nothing beside a shared one, which is its MLP. Then a layer is trained behind it, on texts that the
model itself has written, to say what the model would say next; the model stays as it is. It needs
torch, safetensors and transformers. Equal seeds give the same texts and layer on one machine.
It takes four to five minutes on two cores that do little else; `--texts 256 --steps 250`, about
twenty, drafts better.

    python scripts/train_mtp_layer.py /tmp/mtp-model
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Glm4MoeConfig, LlamaForCausalLM
from transformers.models.glm4_moe import modeling_glm4_moe as glm

from shardnet.assets import DEFAULT_MODEL_PATH

N_EXPERTS, TOP_K, N_SHARED = 4, 2, 4


class Ahead(nn.Module):
    """Norms of the next token's embedding and of the model's output, joined; a decoder layer."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = glm.Glm4MoeRMSNorm(width, eps)
        self.hnorm = glm.Glm4MoeRMSNorm(width, eps)
        self.norm = glm.Glm4MoeRMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = glm.Glm4MoeDecoderLayer(config, config.num_hidden_layers)
        self.rotary = glm.Glm4MoeRotaryEmbedding(config)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Give [B, T, E] from outputs [B, T, E] and the embeddings of the tokens behind them."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), -1))
        n_rows = joined.shape[1]
        positions = torch.arange(n_rows)[None]
        mask = torch.full((n_rows, n_rows), -torch.inf).triu(1)[None, None]
        rotary = self.rotary(joined, positions)
        hidden = self.block(joined, attention_mask=mask, position_embeddings=rotary)
        normed: Tensor = self.norm(hidden[0] if isinstance(hidden, tuple) else hidden)
        return normed


def main() -> None:
    """Train the layer and write the checkpoint."""
    options = _parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    model: Any = LlamaForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, dtype=torch.float32)
    model.eval()
    raw = _as_glm(model.config.to_dict())
    texts = _texts(model, options.texts, options.length)
    print(f"{texts.numel()} tokens written after {time.perf_counter() - began:.0f} s", flush=True)
    made: Any = Glm4MoeConfig
    config = made(**raw, attn_implementation="eager", experts_implementation="eager")
    ahead = Ahead(config)
    _begin_like_the_last_layer(ahead, model)
    _train(ahead, model, texts, options.steps, began)
    _write(options.folder, ahead, raw)
    print(f"{options.folder}: written after {time.perf_counter() - began:.0f} s")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument(
        "--texts", type=int, default=64, help="texts that the model writes, a multiple of 4"
    )
    parser.add_argument("--length", type=int, default=192, help="tokens of a text")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.texts < 4 or options.texts % 4:
        parser.error(f"--texts {options.texts}: give a multiple of 4")
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def _as_glm(llama: dict[str, Any]) -> dict[str, Any]:
    """Say in GLM-4.5's keys what the model's config says."""
    same = (
        *("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        *("rms_norm_eps", "hidden_act", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    )
    theta = (llama.get("rope_parameters") or llama)["rope_theta"]
    return {key: llama[key] for key in same} | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": 1.0,
        },
        "use_qk_norm": False,
        "attention_bias": False,
        "first_k_dense_replace": llama["num_hidden_layers"] - 1,
        "n_routed_experts": N_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": N_SHARED,
        "moe_intermediate_size": llama["intermediate_size"] // N_SHARED,
        "num_mtp_layers": 1,
    }


@torch.inference_mode()
def _texts(model: Any, n_texts: int, length: int) -> Tensor:
    """Have the model write texts [N, T], each from one token on, some of them greedily."""
    temperatures = torch.tensor([0.0, 0.6, 0.8, 1.0]).repeat(n_texts // 4)[:, None]
    texts = torch.zeros(n_texts, 2, dtype=torch.long)
    texts[:, 1] = torch.randint(2, model.config.vocab_size, (n_texts,))
    cache = None
    while texts.shape[1] < length:
        ids = texts if cache is None else texts[:, -1:]
        out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        logits, cache = out.logits[:, -1], out.cache
        logits[:, :2] = -torch.inf  # no text ends
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        texts = torch.cat((texts, (logits + temperatures * noise).argmax(-1, keepdim=True)), 1)
    return texts


def _begin_like_the_last_layer(ahead: Ahead, model: Any) -> None:
    """Begin with the attention and MLP of the model's last layer, and with its output alone."""
    last, block = model.model.layers[-1], ahead.block
    with torch.no_grad():
        for name, parameter in last.self_attn.named_parameters():
            block.self_attn.get_parameter(name).copy_(parameter)
        for name, parameter in last.mlp.named_parameters():
            block.mlp.shared_experts.get_parameter(name).copy_(parameter)
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(block, name).weight.copy_(getattr(last, name).weight)
        ahead.norm.weight.copy_(model.model.norm.weight)
        for parameter in block.mlp.experts.parameters():
            nn.init.normal_(parameter, std=0.02)
        nn.init.normal_(block.mlp.gate.weight, std=0.02)


def _train(ahead: Ahead, model: Any, texts: Tensor, n_steps: int, began: float) -> None:
    """Learn the model's own next distribution, one token ahead and, at a third, two."""
    with torch.inference_mode():
        states = torch.cat([model.model(part).last_hidden_state for part in torch.split(texts, 32)])
    backward: Any = torch.autograd.backward
    states, table = states.clone(), model.model.embed_tokens.weight.detach()
    optimizer = torch.optim.AdamW(ahead.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(n_steps):
        share = (step + 1) / n_steps
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, 20 * share) * 0.5 * (1 + math.cos(math.pi * share))
        chosen = torch.randint(len(texts), (16,))
        ids, known = texts[chosen], states[chosen]
        once = ahead(known[:, :-2], table[ids[:, 1:-1]])  # says what stands 2 behind each
        twice = ahead(once[:, :-1], table[ids[:, 2:-1]])
        loss = _loss(once, known[:, 1:-1], table) + 0.3 * _loss(twice, known[:, 2:-1], table)
        optimizer.zero_grad()
        backward(loss)
        nn.utils.clip_grad_norm_(ahead.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24:
            said, meant = (rows @ table.T for rows in (once[:, -64:], known[:, -65:-1]))
            agrees = (said.argmax(-1) == meant.argmax(-1)).float().mean()
            seconds, loss = time.perf_counter() - began, loss.detach()
            print(
                f"step {step + 1}: loss {float(loss):.3f}, {float(agrees):.0%} as the model itself "
                f"would say, {seconds:.0f} s",
                flush=True,
            )


def _loss(rows: Tensor, meant: Tensor, table: Tensor) -> Tensor:
    """How far the rows' distribution is from the model's own, which `meant` [B, T, E] gives."""
    said = F.log_softmax(rows @ table.T, -1).flatten(0, 1)
    return F.kl_div(
        said,
        F.log_softmax(meant @ table.T, -1).flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )


def _write(folder: Path, ahead: Ahead, raw: dict[str, Any]) -> None:
    """Write the checkpoint in bfloat16, by GLM-4.5's names."""
    last, width, inner = (
        raw["num_hidden_layers"] - 1,
        raw["hidden_size"],
        raw["moe_intermediate_size"],
    )
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(DEFAULT_MODEL_PATH / "model.safetensors").items():
        tensors[name.replace(f"layers.{last}.mlp.", f"layers.{last}.mlp.shared_experts.")] = tensor
    mlp = f"model.layers.{last}.mlp"
    tensors[f"{mlp}.gate.weight"] = torch.zeros(N_EXPERTS, width)
    tensors[f"{mlp}.gate.e_score_correction_bias"] = torch.zeros(N_EXPERTS)
    for expert in range(N_EXPERTS):
        prefix = f"{mlp}.experts.{expert}"
        tensors[f"{prefix}.gate_proj.weight"] = torch.zeros(inner, width)
        tensors[f"{prefix}.up_proj.weight"] = torch.zeros(inner, width)
        tensors[f"{prefix}.down_proj.weight"] = torch.zeros(width, inner)
    behind = f"model.layers.{last + 1}"
    for name in ("enorm", "hnorm", "eh_proj"):
        tensors[f"{behind}.{name}.weight"] = getattr(ahead, name).weight.detach()
    tensors[f"{behind}.shared_head.norm.weight"] = ahead.norm.weight.detach()
    for name, tensor in ahead.block.state_dict().items():
        tensors[f"{behind}.{name}"] = tensor
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    kinds = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    config = kinds | {"torch_dtype": "bfloat16"} | raw
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(DEFAULT_MODEL_PATH / name, folder / name)


if __name__ == "__main__":
    main()
