"""Tiny checkpoints with a layer that predicts a further token (MTP), as their makers name it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_decoder, make_tokenizer
from support.models.gguf_files import converted, gguf_metadata, write_gguf
from support.oracles.oracle import first_of_equal, reference_logits
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

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
    "deepseek_v4": {
        "layer_types": [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "swiglu_limit": 0.02,
    },
    "hy_v4": {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
        "index_topk": 20,
        "swiglu_limit": 0.02,
        "hc_mult": 3,
    },
    "glm_moe_dsa": {
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
        "index_topk": 20,
    },
    "glm5_next_text": {
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full"] * 3,
        "index_kpool": 4,
        "index_topk": 24,
        "swiglu_limit": 0.05,
        "hc_mult": 3,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"]
    },
}
"""By family: more of its config. The last of three layers is the one that predicts further."""
_PLACES = {"deepseek_v4": "mtp.0.", "hy_v4": "model.mtp_layers.0."}
_MIXERS = {
    "deepseek_v4": ("hc_head.hc_", "hc_head_"),
    "qwen4_exp_text": ("hyper_connection_mixer.", "hyper_connection_mixer."),
}
"""By family whose layer has several streams: before names of what joins the model's, and its."""
_KINDS = {"layer_types", "mlp_layer_types", "indexer_types"}
_ONE_STREAM = ("hy_v4", "glm5_next_text")
_GGUF_OWN = {
    "shared_head.norm": "shared_head_norm",
    "mixer.hc_norm.weight": "hc_head_norm",
    "mixer.input_mix_weight_down.weight": "hc_head_down",
    "mixer.input_mix_weight_up.weight": "hc_head_up",
}
_QWEN4 = {"e_proj": "fc_embedding", "h_proj": "fc_hidden"}
_QWEN = {"shared_head.norm": "norm", "enorm": "pre_fc_norm_embedding"} | {
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
}


def is_qwen(family: str) -> bool:
    """Whether the layer is below `mtp.`, and norms store what exceeds 1."""
    return family.startswith("qwen")


def make_mtp(
    folder: Path, family: str, *, seed: int = 0, n_layers: int = N_LAYERS, **config: Any
) -> Path:
    """Write a random checkpoint of two layers and one that predicts further. Return `folder`.

    `folder`/whole is what transformers makes of all three layers. Kinds of more than two layers are
    repeated.
    """
    sizes = CASES[family] | {"num_hidden_layers": n_layers + 1} | config
    for kinds in sizes.keys() & _KINDS:
        sizes[kinds] = [*sizes[kinds][:N_LAYERS] * n_layers][:n_layers] + sizes[kinds][-1:]
    whole = make_decoder(folder / "whole", family, with_tokenizer=False, seed=seed, **sizes)
    stored = load_file(whole / "model.safetensors")
    raw = json.loads((whole / "config.json").read_text())
    text = raw.get("text_config", raw)
    own = random_own(text["hidden_size"], seed, centre=0.0 if is_qwen(family) else 1.0)
    if family in _MIXERS:  # each stream is joined, and all of them by another mixer
        mixer, _ = _MIXERS[family]
        joins = own.pop("eh_proj").split(text["hidden_size"], 1)
        own |= {name: part.clone() for name, part in zip(("e_proj", "h_proj"), joins, strict=True)}
        own |= {
            f"mixer.{name.split(mixer)[1]}": tensor.flip(0).clone()
            for name, tensor in stored.items()
            if mixer in name
        }
    if family == "qwen4_exp_text":  # the mixer norms what it joins
        own["hnorm"] = own["hnorm"].repeat(text["hc_count"])
        del own["shared_head.norm"]
    block = next(name for name in stored if f"layers.{n_layers}." in name)
    block = block[: block.index(f"layers.{n_layers}.")] + f"layers.{n_layers}."
    usual = "mtp.layers.0." if is_qwen(family) else block
    place = _PLACES.get(family, usual)
    named: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if family not in _ONE_STREAM or not (name.startswith(block) and "hc_" in name):
            named[name.replace(block, place)] = tensor
    named |= {_own_name(family, place, name): tensor for name, tensor in own.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(own, whole / "own.safetensors")
    text["num_hidden_layers"] = n_layers
    for kinds in text.keys() & _KINDS:
        text[kinds] = text[kinds][:n_layers]
    (folder / "config.json").write_text(json.dumps(raw))
    make_tokenizer(folder)
    return folder


def _own_name(family: str, place: str, name: str) -> str:
    """What a checkpoint calls a parameter that no decoder layer has."""
    if name.startswith("mixer."):
        place = place.removesuffix("layers.0.")
        return place + _MIXERS[family][1] + name.removeprefix("mixer.")
    if is_qwen(family):
        return f"mtp.{(_QWEN | _QWEN4)[name]}.weight"
    norms = {"deepseek_v4": "norm", "hy_v4": "final_layernorm"}
    own = norms.get(family, name) if name == "shared_head.norm" else name
    return f"{place}{own}.weight"


def random_own(width: int, seed: int, centre: float) -> dict[str, Tensor]:
    """The norms and the linear that no decoder layer has."""
    generator = torch.Generator().manual_seed(seed + 1)
    made = {name: centre + 0.1 * torch.randn(width, generator=generator) for name in OWN[:-1]}
    return made | {"eh_proj": 0.15 * torch.randn(width, 2 * width, generator=generator)}


def write_mtp_gguf(folder: Path, path: Path, *, is_apart: bool = False) -> Path:
    """Write what `make_mtp` has written as llama.cpp's converters do, as the GGUF `path`.

    The last layer may stand apart, in a file beside it that has embedding and LM head too.
    What joins the embedding and each stream is one linear; in DeepSeek-V4's files it is two.
    """
    own = {name: rows.numpy() for name, rows in load_file(folder / "whole/own.safetensors").items()}
    config = json.loads((folder / "whole" / "config.json").read_text())
    config = config.get("text_config", config)
    family, block = config["model_type"], f"blk.{N_LAYERS}"
    if is_qwen(family):  # the converter adds 1 to norms
        own |= {name: own[name] + 1 for name in own if "norm" in name}
    if family == "qwen4_exp_text":
        own["eh_proj"] = np.concatenate([own.pop("e_proj"), own.pop("h_proj")], 1)
        norms = {"hnorm", "mixer.hc_norm.weight"}
        own |= {name: own[name].reshape(config["hc_count"], -1) for name in norms}
    named = {_GGUF_OWN.get(name, name).replace("mixer.", "hc_head_"): own[name] for name in own}
    extra: dict[str, Any] = {f"{block}.nextn.{name}.weight": named[name] for name in named}
    if family in _ONE_STREAM:
        stored = converted(folder / "whole")
        extra |= {name: None for name in stored if name.startswith(f"{block}.hc_")}
    raw: dict[str, Any] = {"block_count": N_LAYERS + 1, "nextn_predict_layers": 1}
    if is_apart:
        stored = converted(folder / "whole")
        of_model = {name: None for name in stored if not name.startswith(block)}
        shared = ("token_embd.", "output")
        extra = {n: None for n in of_model if not n.startswith(shared)} | extra
        write_gguf(folder / "whole", path.with_name(f"mtp-{path.name}"), extra=extra, **raw)
        lists = {k: v for k, v in gguf_metadata(config).items() if isinstance(v, list)}
        raw = {k.replace(".", "__"): v[:-1] for k, v in lists.items() if len(v) > N_LAYERS}
        raw["block_count"] = N_LAYERS
        extra = dict.fromkeys(stored.keys() - of_model)
    return write_gguf(folder / "whole", path, extra=extra, **raw)


class PlainMtp:
    """What the published modules compute: transformers' model, and its last layer behind it.

    Norms of embedding and output, joined by a linear; a decoder layer; a norm; the model's head.
    Of DeepSeek-V4 and Qwen 3.8 each residual stream is joined (vLLM, SGLang), as it leaves the last
    layer; GLM-5.3's layer and Hunyuan 4's have one.
    """

    def __init__(self, folder: Path) -> None:
        """Load what `make_mtp` has written."""
        whole = json.loads((folder / "whole" / "config.json").read_text())
        kind = AutoModelForImageTextToText if "text_config" in whole else AutoModelForCausalLM
        model: PreTrainedModel = kind.from_pretrained(
            folder / "whole",
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        ).eval()
        self.model: Any = model
        self.base: Any = model.get_decoder()
        self.config: Any = self.base.config
        self.block: Any = self.base.layers[N_LAYERS]
        del self.base.layers[N_LAYERS]
        self.config.num_hidden_layers = N_LAYERS
        self.own = load_file(folder / "whole" / "own.safetensors")
        self.has_streams = self.config.model_type in _MIXERS
        self.mixer: Any = None
        if self.has_streams:
            name = "hc_head" if hasattr(self.base, "hc_head") else "hyper_connection_mixer"
            self.mixer = copy.deepcopy(getattr(self.base, name))
            own = {name[6:]: t for name, t in self.own.items() if name.startswith("mixer.")}
            own = {name if "." in name else f"hc_{name}": t for name, t in own.items()}
            self.mixer.load_state_dict(own)
        self.streams: list[Tensor] = []
        self.base.layers[-1].register_forward_hook(
            lambda _, given, output: self.streams.append(output)
        )

    def norm(self, rows: Tensor, name: str) -> Tensor:
        """Divide by the root mean square; Qwen3-Next stores what exceeds 1."""
        weight = self.own[name] + is_qwen(self.config.model_type)
        rows = rows.unflatten(-1, (-1, len(weight)))
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (rows * scale * weight).flatten(-2)

    @torch.inference_mode()
    @mock.patch.object(Tensor, "topk", first_of_equal)
    def drafts(self, tokens: list[int], n_drafts: int) -> list[int]:
        """The likeliest drafts behind `tokens`, the last of which the model has just sampled."""
        known = torch.tensor([tokens[:-1]])
        states = self.base(known).last_hidden_state[0]  # after the final norm
        if self.has_streams:
            states = self.streams[-1][0].flatten(1)
        inputs = self._join(states, tokens[1:])
        made: list[int] = []
        while len(made) < n_drafts:
            out = self._layer(inputs, [*tokens[1:], *made])
            out = out[0] if isinstance(out, tuple) else out
            last = out.reshape(len(inputs), -1)[-1:]
            if not self.has_streams:
                last = self.norm(last, "shared_head.norm")
            made.append(int(self.model.lm_head(self._joined(last))[0].argmax()))
            inputs = torch.cat((inputs, self._join(last, made[-1:])))
        return made

    def _layer(self, inputs: Tensor, following: list[int]) -> Any:
        """Run all rows [T, E] through the layer."""
        base, block, rows = self.base, self.block, inputs[None]
        positions = torch.arange(len(inputs))[None]
        mask = torch.full((len(inputs), len(inputs)), -torch.inf).triu(1)[None, None]
        kind = self.config.model_type
        if kind == "deepseek_v4":
            seen = torch.ones(mask.shape[2:]).tril(-self.config.sliding_window)
            mask.masked_fill_(seen.bool(), -torch.inf)
            rotary = {
                each: base.rotary_emb(rows, position_ids=positions, layer_type=each)
                for each in ("main", "compress")
            }
            return block(
                rows.unflatten(-1, (self.config.hc_mult, -1)),
                input_ids=torch.tensor([following]),
                position_embeddings=rotary,
                position_ids=positions,
                attention_mask=mask,
            )
        if kind not in _ONE_STREAM:
            is_four = kind == "qwen4_exp_text"
            rotary = base.rotary_emb(rows, positions.expand(3, 1, -1) if is_four else positions)
            return block(rows, attention_mask=mask, position_embeddings=rotary)
        more: dict[str, Any] = {"attention_mask": torch.ones(positions.shape, dtype=torch.bool)}
        if kind == "hy_v4":
            rotary = base.rotary_emb(rows, positions)
            more = {"attention_mask": mask, "position_embeddings": rotary}
        given = block.self_attn(block.input_layernorm(rows), position_ids=positions, **more)
        rows = rows + given[0]
        return rows + block.mlp(block.post_attention_layernorm(rows))

    def _joined(self, last: Tensor) -> Tensor:
        """What the LM head gets of what the layer gives, and is given again."""
        if self.mixer is None:
            return last
        if self.config.model_type == "qwen4_exp_text":
            joined: Tensor = self.mixer(last)
            return joined
        streams = last.view(1, 1, self.config.hc_mult, -1)
        return self.norm(self.mixer(streams)[0], "shared_head.norm")

    def tokens(self, tokens: list[int], n_tokens: int) -> list[int]:
        """The model's own next tokens, greedily."""
        made = [*tokens]
        for _ in range(n_tokens):
            made.append(int(reference_logits(self.model, made)[-1].argmax()))
        return made[len(tokens) :]

    def _join(self, states: Tensor, following: list[int]) -> Tensor:
        embedded = self.base.embed_tokens(torch.tensor(following))
        both = (self.norm(embedded, "enorm"), self.norm(states, "hnorm"))
        if not self.has_streams:
            return torch.cat(both, -1) @ self.own["eh_proj"].T
        streams = both[1].unflatten(-1, (-1, both[0].shape[-1])) @ self.own["h_proj"].T
        return (streams + (both[0] @ self.own["e_proj"].T)[:, None]).flatten(1)
