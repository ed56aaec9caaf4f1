"""Models of the installed transformers package, built without memory for their parameters.

Knows which families it has, and that the package is optional. No code of a model's folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from shardnet.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

OLDEST: Final = (5, 24)
"""The version that calls a cache `cache`."""
MODULE_ERRORS: Final = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
"""What a module raises that is called otherwise than its makers meant."""
_NOT_A_MODEL: Final = ("auto_map", "quantization_config", "torch_dtype", "dtype")
"""Keys of config.json that name code of the folder, or how its weights are stored."""


def causal_class(model_type: str, *, sees: bool = False) -> str | None:
    """Return the class that computes a family as a causal language model, None for no such.

    Or one that `sees`: with pictures. Raises ImportError where the package is not installed, or too
    old.
    """
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImportError(f"transformers {transformers.__version__} is too old")
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    names: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if sees:
        names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    found = names.get(model_type)
    return found if isinstance(found, str) or found is None else found[0]


def text_class(kind: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """Make a causal class of a language model that transformers has within a larger one alone.

    `kind` is the class of its config. None where transformers has such a class, or no such model.
    """
    import transformers
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    decoder: Any = getattr(transformers, kind.__name__.removesuffix("Config") + "Model", None)
    if decoder is None:
        return None

    class TextModel(decoder.__bases__[0]):  # type: ignore[misc]
        """The decoder with a head of its own."""

        base_model_prefix = "model"

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, **inputs: Any) -> CausalLMOutputWithPast:
            """Return logits."""
            hidden = self.model(**inputs).last_hidden_state
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))

    return TextModel


def part_class(model_type: str) -> str | None:
    """Return the name of what computes a part of a larger model as a causal one, None for no such.

    Raises ImportError where the package is not installed.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    found = text_class(CONFIG_MAPPING[model_type])
    return None if found is None else found.__name__


def read_module_config(raw: Mapping[str, Any], where: str) -> PreTrainedConfig:
    """Read a config.json as transformers does; `where` is its path, for messages.

    Raises CheckpointError for values that it does not take.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kept = {key: value for key, value in raw.items() if key not in _NOT_A_MODEL}
    keys = json.loads(json.dumps(kept), object_hook=_special_float)
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[raw["model_type"]].from_dict(keys)
    except Exception as error:  # whatever its validators raise
        raise CheckpointError(
            f"{where}: transformers does not take this config: {one_line(error)}"
        ) from error
    return config


def build_on_meta(
    config: PreTrainedConfig, dtype: torch.dtype, where: str, *, sees: bool = False
) -> PreTrainedModel:
    """Build the causal language model of `config`, or one that `sees`, which takes no memory.

    Raises UnsupportedModelError where its class cannot be built.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    made: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            own = None if sees else text_class(type(config))
            model: PreTrainedModel = (
                made.from_config(config, dtype=dtype, trust_remote_code=False)
                if own is None
                else own._from_config(config, dtype=dtype)
            )
    except Exception as error:  # a package that it needs, or a value that no validator knows
        raise UnsupportedModelError(
            f"{where}: transformers does not build this {config.model_type} model: "
            f"{one_line(error)}"
        ) from error
    model.eval()
    model.requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "zero_expert_num") and hasattr(module, "down_proj"):
            n_computing = len(module.down_proj)  # the others have no weights where it is published
            module.gate_up_proj = nn.Parameter(module.gate_up_proj[:n_computing], False)
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it looks at token ids
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _say_nothing
    return model


def fill(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """Put a parameter or buffer of a checkpoint in the place of that on the meta device.

    Returns what was put there, which may be put in the places of tied ones too.
    """
    module, _, key = name.rpartition(".")
    place = model.get_submodule(module)
    if isinstance(getattr(place, key), nn.Parameter) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(place, key, value)
    return value


def compute_buffers(
    model: PreTrainedModel,
    device: torch.device,
    is_left: Callable[[str], bool] = lambda name: False,
) -> None:
    """Compute the buffers that no checkpoint has, but for those whose names are left."""
    for name, buffer in [*model.named_non_persistent_buffers()]:
        if not is_left(name):
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, torch.empty_like(buffer, device=device))
    with torch.device(device):
        model.initialize_weights()


def _say_nothing(*args: object, **kwargs: object) -> None:
    """Warn of nothing: no row is padding."""


def parse_text(config_text: str) -> PreTrainedConfig:
    """Read a config again that `read_module_config` has taken."""
    return read_module_config(json.loads(config_text), "config.json")


def _special_float(value: dict[str, Any]) -> Any:
    """Return a number that JSON has no form for, as transformers writes it; else the object."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def one_line(error: Exception) -> str:
    """Return the name and message of an error of transformers, at most 300 characters."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]
