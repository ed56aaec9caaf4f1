"""Multimodal checkpoints whose language part is a model of a family: what stands around it.

Knows where such a config.json has the language model's own config, and how its tensors are called.
What belongs to images, sound or video is left out by name: it is no part of the language model.
Pictures are read by the towers of model/vision, on the ring's first node. Must not know families
but by name, nor import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shardnet.model.config.fields import TEXT, Fields
from shardnet.model.vision import gemma4, glm4v, llama4, pixtral, qwen2_5_vl, qwen3_vl, siglip
from shardnet.model.vision.vision_family import VisionFamily

_LANGUAGE: Final = re.compile(
    r"(model\.(language|text)_model\.|language_model\.model\.|language_model\.)"
)
"""Before names of the language model: of transformers 5, and of those that were there before."""
_OTHERS: Final = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|embed_vision"
    r"|vision_embedder|audio_tower|embed_audio|connector|image_newline)(\..*)?"
)
"""Whole names of what turns images and sound into embeddings."""
_BARE: Final = re.compile(r"model\.(layers|embed_tokens|norm|embedding_norm)\.|lm_head\.")
"""Before names of a language model that nothing else stands before."""
_OF_OTHERS: Final = frozenset(
    (
        *("boi_token_index", "eoi_token_index", "image_token_id", "image_token_index"),
        *("mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act"),
        *("spatial_merge_size", "video_token_id", "vision_config", "vision_end_token_id"),
        *("vision_feature_layer", "vision_start_token_id", "vision_token_id"),
        *("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
        *("boi_token_id", "eoi_token_id", "vision_soft_tokens_per_image"),
        *("image_start_token_id", "image_end_token_id"),
        *("video_start_token_id", "video_end_token_id"),
    )
)
"""Keys of config.json that matter to images and sound alone."""
_OUTER_FIRST: Final = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
"""Keys of the language model that count as they stand outside, where they do."""
_SHARED: Final = (*(*_OUTER_FIRST, "pad_token_id", "dtype", "torch_dtype", "quantization_config"),)
"""Keys that belong to the language model too where all others outside do not."""
_ROPES: Final = ("rope_parameters", "rope_scaling")
_ROPE_KINDS: Final = ("rope_type", "type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """One kind of multimodal checkpoint.

    `model_type` is its name in config.json and `architecture` its class in transformers. The
    language model is of the `family`; `text_types` are what its own config may be called.
    `others` are further text types, each with the family that its language model is of.
    `defaults` are keys that published configs leave out and the family insists on.
    `sections` are by default how many rotary columns turn by time, height and width (M-RoPE), None
    where positions have one axis; with `takes_turns` they do not stand together. `vision` is its
    tower, None where transformers' own computes: then `text_config` has all of the language model,
    and `bare` names begin those of its tensors that nothing else stands before.
    """

    model_type: str
    architecture: str
    family: str
    text_types: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[int, int, int] | None = None
    takes_turns: bool = True
    vision: VisionFamily | None = None
    bare: re.Pattern[str] = _BARE

    @property
    def families(self) -> tuple[str, ...]:
        """Those that its language model may be of."""
        return self.family, *self.others.values()

    def knows(self, text: object) -> bool:
        """Whether its language model's own config is as it is here, or may be refused here.

        Where transformers computes the tower, others may be found by what it knows of them.
        """
        kind = text.get("model_type") if isinstance(text, dict) else None
        return self.vision is not None or kind is None or kind in (*self.text_types, *self.others)

    def unwrap(self, fields: Fields, raw: Mapping[str, Any]) -> Fields:
        """Return the language model's own config, as its family reads it.

        `raw` is what `fields` reads. It has the config under `text_config`, or among its own keys,
        or both. Raises UnsupportedModelError for another language model, CheckpointError for a
        malformed config.
        """
        nested: dict[str, Any] = fields.take(TEXT, dict, {})
        kind = nested.get("model_type")
        is_usual = kind is None or kind in self.text_types
        family = self.family if is_usual else self.others.get(str(kind))
        if family is None:
            named = ", ".join((*self.text_types, *self.others))
            raise fields.unsupported(f"{TEXT}.model_type", kind, named)
        outer = {key: raw[key] for key in raw if key not in _OF_OTHERS | {TEXT}}
        if self.vision is None and nested:
            fields.ignore(*raw.keys() - {"model_type", "architectures"})
            outer = {key: raw[key] for key in _SHARED if key in raw}
        own = {key: nested[key] for key in nested if key not in _OF_OTHERS}
        text = {**self.defaults, **outer, **own}
        text |= {key: outer[key] for key in _OUTER_FIRST if outer.get(key) is not None}
        if self.sections is not None:
            ropes = [key for key in _ROPES if isinstance(text.get(key), dict)]
            text |= {key: self._rope(text.get(key) or {}) for key in ropes or _ROPES[1:]}
        text.pop("architectures", None)
        return Fields(text | {"model_type": family}, fields.where, unknown=fields.unknown)

    def _rope(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Complete rotary positions with three axes."""
        sections = own.get("mrope_section") or [*(self.sections or ())]
        kinds = {key: "default" for key in _ROPE_KINDS if own.get(key) == "mrope"}
        axes = {"mrope_section": sections, "mrope_interleaved": self.takes_turns}
        return {"rope_type": "default"} | dict(own) | kinds | axes


def language_name(name: str, wrapper: str = "") -> str | None:
    """Return the name that a family has for a wrapped tensor, None for one of images.

    What is named otherwise (`lm_head`, or all in checkpoints of old) keeps its name; in a `wrapper`
    whose tower is not known here it is one of images, too.
    """
    if _OTHERS.fullmatch(name):
        return None
    match = _LANGUAGE.match(name)
    if match is None:
        record = WRAPPERS.get(wrapper)
        is_known = not wrapper or (record is not None and record.vision is not None)
        bare = _BARE if record is None else record.bare
        return name if is_known or bare.match(name) else None
    rest = name[match.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def _with_tower(
    vision: VisionFamily,
    model_type: str,
    architecture: str,
    family: str,
    *text_types: str,
    **more: Any,
) -> Wrapper:
    """Make the row of a kind whose tower is computed here; its text type is the family by default.

    `more` are further fields.
    """
    return Wrapper(
        model_type=model_type,
        architecture=architecture,
        family=family,
        text_types=text_types or (family,),
        vision=vision,
        **more,
    )


def _by_modules(model_type: str, architecture: str, family: str, *others: str) -> Wrapper:
    """Make the row of a kind whose tower transformers computes."""
    return Wrapper(
        model_type=model_type,
        architecture=architecture,
        family=family,
        text_types=(family,),
        others={other: other for other in others},
    )


_QWEN2_VL: Final[dict[str, Any]] = {
    "defaults": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "sections": (16, 24, 24),
    "takes_turns": False,
}
_QWEN3_VL: Final = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_GLM_AXES: Final[dict[str, Any]] = {"sections": (8, 12, 12), "takes_turns": False}
_GLM: Final[dict[str, Any]] = {
    "defaults": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
    | {"partial_rotary_factor": 1.0},
    **_GLM_AXES,
}
_ROWS: Final = (
    _with_tower(
        siglip.VISION,
        *("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
        defaults={"vocab_size": 262208, "num_attention_heads": 8},
    ),
    _with_tower(gemma4.VISION, "gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"),
    _with_tower(
        gemma4.UNIFIED,
        *("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_text"),
        "gemma4_unified_text",
        defaults={"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
        | {"max_position_embeddings": 262144, "sliding_window": 1024},
    ),
    _with_tower(
        glm4v.VISION, "glm4v", "Glm4vForConditionalGeneration", "glm4", "glm4v_text", **_GLM
    ),
    _with_tower(
        glm4v.VISION, "glm46v", "Glm46VForConditionalGeneration", "glm4", "glm4v_text", **_GLM
    ),
    _with_tower(
        glm4v.VISION,
        *("glm4v_moe", "Glm4vMoeForConditionalGeneration", "glm4_moe", "glm4v_moe_text"),
        defaults={"attention_bias": True, "max_position_embeddings": 65536},
        **_GLM_AXES,
    ),
    _with_tower(llama4.VISION, "llama4", "Llama4ForConditionalGeneration", "llama4_text"),
    _with_tower(
        pixtral.VISION,
        *("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
        others={"ministral3": "ministral3", "mistral4": "mistral4"},
    ),
    _with_tower(
        qwen2_5_vl.QWEN2,
        *("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2", "qwen2_vl_text", "qwen2"),
        **_QWEN2_VL,
    ),
    _with_tower(
        qwen2_5_vl.VISION,
        *("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2"),
        *("qwen2_5_vl_text", "qwen2"),
        **_QWEN2_VL,
    ),
    _with_tower(
        qwen3_vl.VISION,
        *("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3", "qwen3_vl_text"),
        defaults=_QWEN3_VL,
        sections=(24, 20, 20),
    ),
    _with_tower(
        qwen3_vl.VISION,
        *("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_moe", "qwen3_vl_moe_text"),
        defaults=_QWEN3_VL
        | {"moe_intermediate_size": 1408, "norm_topk_prob": True, "num_experts_per_tok": 4}
        | {"num_key_value_heads": 16},
        sections=(24, 20, 20),
    ),
    _with_tower(
        qwen3_vl.SHALLOW,
        *("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
        sections=(11, 11, 10),
    ),
    _with_tower(
        qwen3_vl.SHALLOW,
        *("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
        sections=(11, 11, 10),
    ),
    _with_tower(
        qwen3_vl.SHALLOW,
        *("qwen4_exp", "Qwen4ExpForConditionalGeneration", "qwen4_exp_text"),
        sections=(11, 11, 10),
    ),
    Wrapper(
        model_type="deepseek_v41",
        architecture="DeepseekV41ForCausalLM",
        family="deepseek_v41_text",
        text_types=("deepseek_v41_text",),
        bare=re.compile(r"(model\.)?(layers|embed|norm|head|embed_tokens)\.|lm_head\."),
    ),
    _by_modules("exaone4_5", "Exaone4_5_ForConditionalGeneration", "exaone4"),
    _by_modules("glm5_next", "Glm5NextForConditionalGeneration", "glm5_next_text"),
    _by_modules("got_ocr2", "GotOcr2ForConditionalGeneration", "qwen2"),
    _by_modules("idefics2", "Idefics2ForConditionalGeneration", "mistral"),
    _by_modules("idefics3", "Idefics3ForConditionalGeneration", "llama"),
    _by_modules(
        *("internvl", "InternVLForConditionalGeneration"), *("qwen2", "qwen3", "qwen3_moe", "llama")
    ),
    _by_modules("kimi_k25", "Kimi_K25ForConditionalGeneration", "deepseek_v3"),
    _by_modules("lfm2_vl", "Lfm2VlForConditionalGeneration", "lfm2"),
    _by_modules("lfm3_vl", "Lfm3VlForConditionalGeneration", "lfm3"),
    _by_modules("lighton_ocr", "LightOnOcrForConditionalGeneration", "qwen3"),
    _by_modules("llava", "LlavaForConditionalGeneration", "llama", "mistral", "qwen2"),
    _by_modules("llava_next", "LlavaNextForConditionalGeneration", "llama", "mistral", "qwen2"),
    _by_modules("llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2"),
    _by_modules("smolvlm", "SmolVLMForConditionalGeneration", "llama"),
    _by_modules("step3p7", "Step3p7ForConditionalGeneration", "step3p5"),
    _by_modules("video_llama_3", "VideoLlama3ForConditionalGeneration", "qwen2"),
)

WRAPPERS: Final[Mapping[str, Wrapper]] = {row.model_type: row for row in _ROWS}
"""By `model_type`. Defaults are what transformers takes, unlike the family's own."""

VISIONS: Final = tuple(
    {id(each.vision): each.vision for each in WRAPPERS.values() if each.vision}.values()
)
"""All kinds of towers."""
