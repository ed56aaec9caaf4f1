"""How Ollama's converter writes each architecture: one record for each, by its name of it.

Knows what is written by convert/convert_*.go at github.com/ollama/ollama, and what of it llama.cpp
takes otherwise (llama/compat there). Must not know files, nor families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shardnet.checkpoint.formats.gguf_header import MetadataValue
from shardnet.errors import UnsupportedModelError, shown

TOKENIZER: Final = "tokenizer.ggml."
_EPS: Final = 9.999999974752427e-07
"""1e-6 in 32 bits, as files have it."""
_HALF: Final[MetadataValue] = [0.5, 0.5, 0.5]
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_IMAGE_END = re.compile(r"<(start|end)_of_image>")
_NORMAL, _CONTROL, _BYTE_KIND = 1, 3, 6
_PATTERN: Final = "attention.sliding_window_pattern"
Metadata = dict[str, MetadataValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is told of a file: its `metadata` by now, and the shapes of its tensors.

    Keys are given without the `architecture` in front of them.
    """

    where: str
    architecture: str
    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]

    def get(self, key: str) -> MetadataValue | None:
        """Return the value of a key, None where it is missing."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def counts(self, key: str) -> list[int]:
        """Return the integers that a key has for each layer, none where it has anything else."""
        each = self.get(key)
        found = [one for one in each if type(one) is int] if isinstance(each, list) else []
        return found if found == each else []

    def put(self, key: str, value: MetadataValue) -> None:
        """Set the value of a key."""
        self.metadata[f"{self.architecture}.{key}"] = value

    def default(self, key: str, value: MetadataValue) -> None:
        """Set the value of a key that is missing."""
        self.metadata.setdefault(f"{self.architecture}.{key}", value)

    def drop(self, *starts: str) -> None:
        """Leave out all keys that begin so."""
        for key in [*self.metadata]:
            if key.startswith(tuple(f"{self.architecture}.{start}" for start in starts)):
                del self.metadata[key]

    def retype(self, tokens: re.Pattern[str], kind: int) -> None:
        """Set the kind of tokens with such texts that are plain text in the file."""
        texts, kinds = (self.metadata.get(f"{TOKENIZER}{key}") for key in ("tokens", "token_type"))
        if isinstance(texts, list) and isinstance(kinds, list) and len(texts) == len(kinds):
            self.metadata[f"{TOKENIZER}token_type"] = [
                kind if own == _NORMAL and tokens.fullmatch(str(text)) else own
                for text, own in zip(texts, kinds, strict=True)
            ]

    def period(self, key: str, last: object, others: object) -> int | None:
        """Return the n of every nth layer with the value `last`, where the rest have `others`.

        None where the key has no value for each layer. Raises UnsupportedModelError for another
        pattern.
        """
        each = self.get(key)
        if not isinstance(each, list):
            return None
        period = (each.index(last) if last in each else len(each)) + 1
        if each != [others if n % period else last for n in range(1, len(each) + 1)]:
            raise self.refused(f"{key} = {shown(each)} is not supported")
        return period

    def refused(self, why: str) -> UnsupportedModelError:
        """Make the error that names the file, and says why."""
        return UnsupportedModelError(
            f"{self.where}: by Ollama's converter: {why}",
            remedy="use a GGUF that llama.cpp's has made, or the makers' own checkpoint",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """What reads pictures: its type, patterns in tensors' names, keys that are missing.

    `has_halves`: rows of queries and keys stand as in transformers, where llama.cpp has pairs.
    """

    kind: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, MetadataValue] = field(default_factory=dict)
    has_halves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How an architecture is written: llama.cpp's name of it, other names of keys, patterns in
    tensors' names and what they become, keys that are left out, those of the tokenizer that are
    wrong. Of those that it `needs` no value is known where a file leaves them out.

    `fix` completes what follows from others.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, MetadataValue] = field(default_factory=dict)
    tokenizer: Mapping[str, MetadataValue] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    fix: Callable[[Told], None] = lambda told: None
    projector: Projector | None = None


def _fix_gemma3(told: Told) -> None:
    """Scale the rotations of all but the 1B, whose context is shorter, say once which layers have
    no window, and that tokens around pictures are no text.
    """
    told.retype(_IMAGE_END, _CONTROL)
    if (period := told.period(_PATTERN, False, True)) is not None:
        told.put(_PATTERN, period)
    context = told.get("context_length")
    if isinstance(context, int) and context >= 1 << 17:
        told.default("rope.scaling.type", "linear")
        told.default("rope.scaling.factor", 8.0)


def _fix_gemma4(told: Told) -> None:
    """Say which tokens are bytes: the converter knows none where it reads a tokenizer.json."""
    told.retype(_BYTE, _BYTE_KIND)


def _fix_experts(told: Told) -> None:
    """Say how wide an expert is."""
    if len(shape := told.shapes.get("blk.0.ffn_gate_exps.weight", ())) == 3:
        told.default("expert_feed_forward_length", shape[1])


def _fix_scaling(told: Told) -> None:
    """Take an empty kind of scaling for none; the numbers beside it are zeros."""
    if told.get("rope.scaling.type") in ("", "default"):
        told.drop("rope.scaling.")


def _fix_axes(told: Told) -> None:
    """Say how many columns turn by which axis, as all of Qwen3-VL's published models have it."""
    if told.get("attention.key_length") == 128:
        told.default("rope.dimension_sections", [24, 20, 20, 0])
    _fix_experts(told)


def _fix_hybrid(told: Told) -> None:
    """Say once what is said for each layer, and that which heads share a key's is llama.cpp's."""
    if told.get("ssm.v_head_reordered") is False:
        raise told.refused("ssm.v_head_reordered = False is not implemented")
    told.drop("ssm.v_head_reordered")
    if told.architecture != "qwen3next" and any(".ssm_ba." in name for name in told.shapes):
        raise told.refused(f"ssm_ba tensors are not implemented in {told.architecture}")
    if told.get("feed_forward_length") == 0:  # no layer has a plain MLP
        told.drop("feed_forward_length")
    if any(counts := told.counts("attention.head_count_kv")):
        most = max(counts)
        period = told.period("attention.head_count_kv", most, 0)
        assert period is not None, "it is a list"
        told.default("full_attention_interval", period)
        told.put("attention.head_count_kv", most)


def _fix_latent(told: Told) -> None:
    """Say sizes of heads alone: what is said of them beside are those of a cached latent."""
    told.drop("attention.key_length_mla", "attention.value_length_mla")


def _fix_convolutions(told: Told) -> None:
    """Say how many heads of queries there are, and how wide an MLP is: some files say another."""
    if heads := told.counts("attention.head_count"):
        told.put("attention.head_count", max(heads))
    if (shape := told.shapes.get("blk.0.ffn_gate.weight")) is not None:
        told.put("feed_forward_length", shape[0])


def _fix_windows(told: Told) -> None:
    """Refuse other windows than llama.cpp's: in all layers but every fourth."""
    if told.period(_PATTERN, False, True) not in (None, 4):
        raise told.refused(f"{_PATTERN} = {shown(told.get(_PATTERN))} is not supported")


def _fix_nemotron(told: Told) -> None:
    """Refuse experts that compute in a narrower space."""
    if any(".ffn_latent_" in name for name in told.shapes):
        raise told.refused("experts between latent projections (ffn_latent) are not implemented")


_CLIP_LEVELS: Final[Mapping[str, MetadataValue]] = {
    "clip.vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
    "clip.vision.image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF_LEVELS: Final[Mapping[str, MetadataValue]] = {
    "clip.vision.image_mean": _HALF,
    "clip.vision.image_std": _HALF,
    "clip.use_gelu": True,
}
_AXES: Final = {
    "mrope_sections": "rope.dimension_sections",
    "rope.mrope_section": "rope.dimension_sections",
    "norm_top_k_prob": "expert_weights_norm",
}
_DECAY: Final = {r"\.ssm_dt$": ".ssm_dt.bias"}
_QWEN3_VISION: Final = Projector(
    kind="qwen3vl_merger",
    tensors={
        r"^v\.pos_embed": "v.position_embd",
        r"^v\.patch_embed": "v.patch_embd",
        r"^v\.merger\.norm": "v.post_ln",
        r"^v\.merger\.linear_fc1": "mm.0",
        r"^v\.merger\.linear_fc2": "mm.2",
        r"\.mlp\.linear_fc1": ".ffn_up",
        r"\.mlp\.linear_fc2": ".ffn_down",
        r"\.norm([12])\.": r".ln\1.",
    },
    keys=_HALF_LEVELS,
)
_HYBRID: Final = {
    name: Dialect(
        architecture=name,
        keys=_AXES,
        tensors=_DECAY,
        fix=_fix_hybrid,
        projector=_QWEN3_VISION,
    )
    for name in ("qwen35", "qwen35moe", "qwen3next")
}
_QWEN3: Final = {
    name: Dialect(architecture=name, keys=_AXES, fix=fix, projector=projector)
    for name, fix, projector in (
        ("qwen3moe", _fix_experts, None),
        ("qwen3vl", _fix_axes, _QWEN3_VISION),
        ("qwen3vlmoe", _fix_axes, _QWEN3_VISION),
    )
}
_LFM2: Final = {
    name: Dialect(
        architecture=name,
        tensors={r"^output_norm\.": "token_embd_norm."},
        tokenizer={"pre": "lfm2"},
        needs=("rope.freq_base",),
        fix=_fix_convolutions,
    )
    for name in ("lfm2", "lfm2moe")
}
_LATENT: Final = {
    r"\.ffn_latent_in\.": ".ffn_latent_down.",
    r"\.ffn_latent_out\.": ".ffn_latent_up.",
}
_NEMOTRON: Final = {
    name: Dialect(architecture=told, tensors=_LATENT, fix=_fix_nemotron)
    for name, told in (
        ("nemotron_h", "nemotron_h"),
        ("nemotron_h_moe", "nemotron_h_moe"),
        ("nemotron_h_omni", "nemotron_h_moe"),
    )
}
DIALECTS: Final = {
    **_HYBRID,
    **_QWEN3,
    **_LFM2,
    **_NEMOTRON,
    "gemma3": Dialect(
        architecture="gemma3",
        keys={
            "rope.global.freq_base": "rope.freq_base",
            "rope.local.freq_base": "rope.freq_base_swa",
        },
        missing={"attention.layer_norm_rms_epsilon": _EPS, "rope.freq_base": 1e6},
        tokenizer={"add_space_prefix": False},
        fix=_fix_gemma3,
        projector=Projector(
            kind="gemma3",
            tensors={
                r"^v\.patch_embedding": "v.patch_embd",
                r"^v\.position_embedding": "v.position_embd",
                r"^v\.post_layernorm": "v.post_ln",
                r"\.layer_norm([12])": r".ln\1",
                r"\.attn_output": ".attn_out",
                r"\.mlp\.fc1": ".ffn_up",
                r"\.mlp\.fc2": ".ffn_down",
                r"^mm\.mm_input_projection": "mm.input_projection",
                r"^mm\.mm_soft_emb_norm": "mm.soft_emb_norm",
            },
            keys=_HALF_LEVELS,
        ),
    ),
    "gemma4": Dialect(
        architecture="gemma4",
        tensors={r"\.ffn_gate_inp\.per_expert_scale$": ".ffn_down_exps.scale"},
        tokenizer={"model": "gemma4", "add_space_prefix": False},
        fix=_fix_gemma4,
        projector=Projector(
            kind="gemma4v",
            keys={
                "clip.vision.image_mean": [0.0, 0.0, 0.0],
                "clip.vision.image_std": [1.0, 1.0, 1.0],
            },
        ),
    ),
    "glm4moelite": Dialect(architecture="deepseek2", tokenizer={"pre": "glm4"}, fix=_fix_latent),
    "gptoss": Dialect(
        architecture="gpt-oss",
        tensors={
            r"\.attn_out\.": ".attn_output.",
            r"\.attn_sinks$": ".attn_sinks.weight",
            r"\.ffn_norm": ".post_attention_norm",
        },
        missing={"rope.scaling.type": "yarn"},
        tokenizer={"pre": "gpt-4o"},
        fix=_fix_experts,
    ),
    "llama4": Dialect(
        architecture="llama4",
        keys={"attention.chunk_size": "attention.sliding_window"},
        projector=Projector(
            kind="llama4",
            tensors={
                r"^v\.vision_adapter\.mlp\.fc": "mm.model.mlp.",
                r"^mm\.linear_1": "mm.model.fc",
                r"^v\.class_embedding": "v.class_embd",
                r"^v\.positional_embedding_vlm$": "v.position_embd.weight",
                r"^v\.patch_embedding": "v.patch_embd",
                r"^v\.layernorm_(pre|post)": r"v.\1_ln",
                r"\.attn_output": ".attn_out",
                r"\.attn_norm": ".ln1",
                r"\.ffn_norm": ".ln2",
                r"\.mlp\.fc1": ".ffn_up",
                r"\.mlp\.fc2": ".ffn_down",
            },
            keys=_HALF_LEVELS,
        ),
    ),
    "mistral3": Dialect(
        architecture="mistral3",
        keys={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
        tokenizer={"pre": "tekken"},
        fix=_fix_scaling,
        projector=Projector(
            kind="pixtral",
            tensors={
                r"^v\.patch_conv": "v.patch_embd",
                r"^v\.encoder_norm": "v.pre_ln",
                r"\.attn_output": ".attn_out",
                r"\.attn_norm": ".ln1",
                r"\.ffn_norm": ".ln2",
                r"^mm\.linear_": "mm.",
                r"^mm\.patch_merger\.merging_layer": "mm.patch_merger",
                r"^mm\.norm": "mm.input_norm",
            },
            keys={**_CLIP_LEVELS, "clip.use_silu": True},
            has_halves=True,
        ),
    ),
    "olmo3": Dialect(
        architecture="olmo2",
        tokenizer={"pre": "dbrx"},
        needs=("rope.freq_base",),
        fix=_fix_windows,
    ),
    "qwen25vl": Dialect(
        architecture="qwen2vl",
        keys={"rope.mrope_section": "rope.dimension_sections"},
        projector=Projector(
            kind="qwen2.5vl_merger",
            tensors={
                r"^v\.merger\.ln_q": "v.post_ln",
                r"^v\.merger\.mlp": "mm",
                r"^v\.patch_embd_0\.weight": "v.patch_embd.weight",
                r"^v\.patch_embd_1\.weight": "v.patch_embd.weight.1",
            },
            keys={**_CLIP_LEVELS, "clip.use_silu": True, "clip.vision.image_size": 560},
        ),
    ),
}
"""By Ollama's name of an architecture."""
GEMMA_EMBEDDING: Final = Dialect(
    architecture="gemma-embedding",
    keys=DIALECTS["gemma3"].keys,
    tensors={r"^dense\.0\.": "dense_2.", r"^dense\.1\.": "dense_3."},
    tokenizer={"add_space_prefix": False},
)
