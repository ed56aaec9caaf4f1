"""The published sizes of models that are larger than one machine of a home lab.

Of the parts that compute text alone, as the configs say them that tests read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardnet.types import Quant

FP8_BLOCK: Final = 128
"""Rows and columns of weights that share a scale."""
_FOLDER: Final = Path(__file__).parents[2] / "tests/model/families/published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A config, and how its makers store weights: `bf16`, `fp8`, or `fp4` for experts and `fp8`.

    `quant` is what they are to be quantised to.
    """

    config: dict[str, Any]
    form: str
    quant: Quant = ""

    def narrowed(self, **values: Any) -> Published:
        """Return it with other values; what it says layer by layer is cut to as many layers."""
        n_layers, made = self.config["num_hidden_layers"], self.config | values
        for key, value in self.config.items():
            if key not in values and isinstance(value, list) and len(value) == n_layers:
                made[key] = value[: made["num_hidden_layers"]]
        return replace(self, config=made)


def _fp8(**more: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]} | more}


def _published(name: str) -> dict[str, Any]:
    """Return what the config of a model's text says, but for how its weights are stored."""
    raw = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    said: dict[str, Any] = raw.get("text_config", raw)
    return {key: value for key, value in said.items() if key != "quantization_config"}


_DEEPSEEK, _GLM, _QWEN, _HUNYUAN = map(
    _published, ("deepseek-v4-flash", "glm-5.3-flash", "qwen3.8-flash-next", "hy4-preview")
)

MODELS: Final = {
    "deepseek-v4-flash": Published(config=_DEEPSEEK | _fp8(expert_dtype="fp4"), form="fp4"),
    "glm-5.3-flash": Published(config=_GLM | _fp8(), form="fp8"),
    "qwen3.8-flash-next": Published(
        config=_QWEN | _fp8() | {"max_position_embeddings": 1 << 20}, form="fp8"
    ),
    "hy4-preview": Published(config=_HUNYUAN, form="bf16", quant="int4"),
}
SMALL: Final = {
    "deepseek-v4-flash": MODELS["deepseek-v4-flash"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=7,
        num_attention_heads=16,
        head_dim=256,
        n_routed_experts=48,
        moe_intermediate_size=512,
        compress_ratios=[0, 0, 4, 128, 4, 128, 4],
        o_groups=4,
        o_lora_rank=256,
    ),
    "glm-5.3-flash": MODELS["glm-5.3-flash"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=32,
        moe_intermediate_size=512,
        intermediate_size=4096,
        linear_attn_config=_GLM["linear_attn_config"]
        | {"full_attn_layers": [3, 7], "kda_layers": [0, 1, 2, 4, 5, 6, 8], "num_heads": 16},
    ),
    "qwen3.8-flash-next": MODELS["qwen3.8-flash-next"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=8,
        num_experts=48,
        moe_intermediate_size=384,
        shared_expert_intermediate_size=384,
        ple_embed_dim=1024,
        split_ngram_parts=4,
        ngram_vocab_size_base=20000,
    ),
    "hy4-preview": MODELS["hy4-preview"].narrowed(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=512,
        n_routed_experts=32,
        moe_intermediate_size=512,
        intermediate_size=4096,
        indexer_types=["full", "full", "shared", "shared", "shared", "full"],
    ),
}
"""The same kinds of layers, narrow."""
