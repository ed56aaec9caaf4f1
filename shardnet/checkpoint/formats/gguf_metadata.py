"""Convert the metadata of a GGUF to the keys and values of config.json.

Knows the keys that all architectures have, and how a family is found; the family reads its own
keys. An unknown key is noted by name. Must not know files.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

from shardnet.checkpoint.formats.gguf_header import MetadataValue
from shardnet.errors import UnsupportedModelError, shown
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import Factors
from shardnet.model.families.encoders import GGUF_TYPES, writes_nothing
from shardnet.model.families.registry import gguf_families

ANSWERS: Final = ["yes", "no"]
"""What a reranker answers; others' rows of the LM head are no use to it."""


def config_of_metadata(
    metadata: Mapping[str, MetadataValue],
    tensors: Container[str],
    vocab_size: int,
    factors: Factors,
    dtype: str,
    where: str,
    unknown: list[str],
) -> dict[str, Any]:
    """Convert the metadata of the file `where` to the keys and values of config.json.

    `tensors` are the names in the file, `factors` what divides rotary frequencies, `dtype` what
    most of the file is stored in. Unknown keys are added to the list `unknown`. Raises
    UnsupportedModelError for an architecture or a value that is not implemented, CheckpointError
    for one that is malformed.
    """
    general = Fields(metadata, where)
    arch = general.take("general.architecture", str)
    families = gguf_families()
    if arch == "clip":
        raise UnsupportedModelError(
            f"{where}: general.architecture = 'clip': this projects images into a language model's "
            "inputs, and images are not implemented",
            remedy="name the file of the language model",
        )
    if arch in GGUF_TYPES:
        raise writes_nothing(where)
    if "bert" in arch:
        raise UnsupportedModelError(
            f"{where}: general.architecture = {shown(arch)}: of encoders these are read from GGUF: "
            f"{', '.join(GGUF_TYPES)}",
            remedy="take the model's own repository, with safetensors",
        )
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{arch}.")
    }
    fields = Fields(own, where, f"{arch}.", unknown)
    n_ahead = _n_layers_ahead(fields)
    if n_ahead:
        own["block_count"] = fields.positive("block_count") - n_ahead
    config = None
    for family in families.get(arch, ()):
        if config is None and family.gguf is not None and family.gguf.claims(fields):
            read = family.gguf.read(fields, tensors, factors)
            config = {"model_type": family.model_type} | read
            if arch in family.gguf.multimodal:
                fields.ignore("n_deepstack_layers")
            if arch.startswith(("qwen", "glm4")):
                takes_turns = arch != "qwen2vl" and arch.startswith("qwen")
                config |= _read_axes(fields, config, takes_turns=takes_turns)
    if config is None:
        raise general.unsupported("general.architecture", arch, ", ".join(sorted(families)))
    fields.ignore("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
    if own.get("pooling_type") in (
        0,
        3,
        4,
    ):  # none, that of vectors by the last token, a reranker's
        fields.ignore("pooling_type")
    labels = fields.take("classifier.output_labels", list, ANSWERS)
    if labels != ANSWERS:
        raise fields.unsupported("classifier.output_labels", labels, str(ANSWERS))
    fields.require("attention.causal", True)
    fields.note_the_rest()
    ends = ("eos", "eot", "eom")
    eos = [general.take(f"tokenizer.ggml.{end}_token_id", int, None) for end in ends]
    return config | {
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": dtype,
        "bos_token_id": general.take("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": list(dict.fromkeys(token for token in eos if token is not None)),
    }


def _read_axes(fields: Fields, config: Mapping[str, Any], *, takes_turns: bool) -> dict[str, Any]:
    """Read of how many rotary columns turn by time, height and width, as config.json would say."""
    sections = fields.take("rope.dimension_sections", list, None)
    if sections is None:
        return {}
    rope = {"rope_type": "default"} | (config["rope_scaling"] or {})
    return {
        "rope_scaling": rope | {"mrope_section": sections[:3], "mrope_interleaved": takes_turns}
    }


def _n_layers_ahead(fields: Fields) -> int:
    """Return how many of the last layers predict tokens further ahead, by an architecture's keys.

    They count among its blocks, and are left out.
    """
    key = "nextn_predict_layers"
    return fields.positive(key) if fields.take(key, int, 0) else 0
