"""Towers and processors of multimodal checkpoints that have no record here: transformers' own.

The whole model is built on the meta device and its language model taken out; what is left computes
the rows of a picture, all at once. Knows the package. Must not know files but by their folder, nor
run code of one.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from shardnet.errors import UnsupportedModelError, UsageError
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.modules.conversions import Conversions
from shardnet.model.modules.meta_model import (
    MODULE_ERRORS,
    build_on_meta,
    compute_buffers,
    fill,
    one_line,
    parse_text,
)
from shardnet.model.vision.patches import MAX_RATIO, check_ratio
from shardnet.model.vision.picture import EncodedPicture, EncoderWalk, PreparedPicture

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

_MAX_CROPPED_RATIO: Final = 20
"""Of pictures that grow to some length of the shorter side before they are cropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTower:
    """A model without its language model, on the meta device until it is loaded; see Tower.

    `rules` are those of the whole model's stored tensors.
    """

    model: PreTrainedModel
    rules: Conversions

    @property
    def takes(self) -> frozenset[str]:
        """The arguments by which it takes a picture, and how to read it."""
        inner: Any = self.model.base_model
        return frozenset(inspect.signature(inner.get_image_features).parameters)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Its parameters."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    def load(self, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> ModuleTower:
        """Take the parameters; compute buffers that no checkpoint has."""
        for name, meta in [*self.model.state_dict(keep_vars=True).items()]:
            value = weights.parameter(name).to(device, dtype if meta.is_floating_point() else None)
            fill(self.model, name, value)
        compute_buffers(self.model, device)
        return self

    def walk(self, pixels: Tensor, grid: tuple[int, int, int], **arrays: Tensor) -> EncoderWalk:
        """Encode a picture at once, given what its processor says of it in `arrays` too."""
        yield None
        inner: Any = self.model.base_model
        try:
            found = inner.get_image_features(pixel_values=pixels, **arrays)
        except MODULE_ERRORS as error:
            raise UsageError(
                f"transformers does not encode the picture: {one_line(error)}"
            ) from error
        rows = getattr(found, "pooler_output", found)
        if not isinstance(rows, Tensor):
            rows = torch.cat([*rows])
        rows = rows.reshape(-1, rows.shape[-1])
        if len(rows) != math.prod(grid):
            raise UsageError(
                f"transformers encodes the picture to {len(rows)} rows, and its processor has "
                f"{math.prod(grid)} tokens for them"
            )
        yield EncodedPicture(rows=rows.to(pixels.dtype))


def build_tower(config_text: str, where: str) -> ModuleTower:
    """Build the tower of a config.json, which errors call `where`.

    Raises CheckpointError and UnsupportedModelError for what transformers does not take or build.
    """
    model = build_on_meta(parse_text(config_text), torch.float32, where, sees=True)
    rules = Conversions(model)
    of_language = model.get_decoder(), model.get_output_embeddings()
    for name, module in [*model.named_modules()]:
        if module in of_language:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, nn.Module())
    return ModuleTower(model=model, rules=rules)


@dataclass(frozen=True)
class ModuleProcessor:
    """The makers' processor in a checkpoint's `folder`; see PictureProcessor.

    `row_id` is the token that takes a row of the tower's, which `takes` arrays by these names.
    """

    folder: Path
    row_id: int
    takes: frozenset[str]

    @cached_property
    def _own(self) -> Any:
        return _open_processor(str(self.folder))

    @cached_property
    def key(self) -> str:
        """What stands for all of its settings."""
        return hashlib.sha256(self._own.to_json_string().encode()).hexdigest()

    @property
    def placeholder(self) -> str:
        """The text of the token that stands for a picture in a prompt."""
        token: str = self._own.image_token
        return token

    @property
    def templated(self) -> str:
        """What chat templates write for a picture."""
        return self.placeholder

    @cached_property
    def placeholder_id(self) -> int:
        """Its id."""
        return int(self._own.tokenizer.convert_tokens_to_ids(self.placeholder))

    def surround(self, prompt: str) -> str:
        """Return the prompt as it is: what stands around a picture comes with its tokens."""
        return prompt

    def prepare(self, rgb: NDArray[np.uint8], detail: str = "auto") -> PreparedPicture:
        """Prepare a picture [H, W, 3]; see PictureProcessor."""
        from PIL import Image  # which transformers needs for pictures

        own = getattr(self._own, "image_processor", None)
        size = dict(getattr(own, "size", None) or {})
        is_cropped = "shortest_edge" in size and "longest_edge" not in size
        check_ratio(rgb, _MAX_CROPPED_RATIO if is_cropped else MAX_RATIO)
        try:
            made: Mapping[str, Any] = self._own(
                text=[self.placeholder],
                images=[Image.fromarray(rgb)],
                add_special_tokens=False,
                return_tensors="pt",
            )
            ids = np.asarray(made["input_ids"])[0]
            arrays = {name: np.asarray(made[name]) for name in made if name in self.takes}
            pixels = np.asarray(arrays.pop("pixel_values"), np.float32)
        except Exception as error:  # whatever the makers' code raises
            raise UsageError(
                f"transformers does not take the picture: {one_line(error)}"
            ) from error
        is_row = ids == self.row_id
        return PreparedPicture(
            pixels=pixels,
            arrays=arrays,
            grid=(1, 1, int(is_row.sum())),
            token_ids=tuple(ids.tolist()),
            is_row=is_row,
        )


@lru_cache(maxsize=4)
def _open_processor(folder: str) -> Any:
    from transformers import AutoProcessor

    remedy = "fetch the checkpoint again, with preprocessor and tokenizer"
    try:
        found = AutoProcessor.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever its files make it raise
        if isinstance(error, ImportError):
            remedy = "install on this node what it asks for, as by pip install torchvision"
        raise UnsupportedModelError(
            f"{folder}: transformers does not open its processor: {one_line(error)}", remedy=remedy
        ) from error
    if not hasattr(found, "tokenizer") or not hasattr(found, "image_token"):
        raise UnsupportedModelError(
            f"{folder}: what transformers opens as its processor, a {type(found).__name__}, has no "
            "token for pictures",
            remedy=remedy,
        )
    return found


def row_token(config_text: str) -> int:
    """Return the token of a config.json that takes a row of the tower's, or of its class."""
    raw = json.loads(config_text)
    own = getattr(parse_text(config_text), "image_token_id", -1)
    return int(raw.get("image_token_id", raw.get("image_token_index", own)))
