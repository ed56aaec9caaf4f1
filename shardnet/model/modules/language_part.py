"""The language model within a multimodal one that has no record here, if it is a plain one.

Both are built on the meta device: the whole model, and the causal one of its language model's own
config. Their parts are compared, and what goes in and out of the decoder, in a trial with text.
Knows the package. Must not know files, nor families.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from shardnet.errors import UnsupportedModelError
from shardnet.model.modules.meta_model import build_on_meta, one_line, parse_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_N_TOKENS: Final = 5
_N_LOGITS: Final = 7


@lru_cache(maxsize=4)
def read_language_part(config_text: str, where: str) -> str:
    """Return the config.json of the language model within that of a multimodal one, without dtype.

    `where` is the path of `config_text`, for messages. Raises UnsupportedModelError for a language
    model that the whole one does not run as transformers' causal class of its `model_type` does,
    CheckpointError for values that transformers does not take.
    """
    model = build_on_meta(parse_text(config_text), torch.float32, where, sees=True)
    decoder: Any = model.get_decoder()
    config = decoder.config
    causal = build_on_meta(config, torch.float32, where)
    kind = model.config.model_type
    try:
        is_same = _parts(decoder) == _parts(causal.get_decoder())
        is_same = is_same and decoder.get_input_embeddings() is model.get_input_embeddings()
        whole, alone = _try_with_text(model), _try_with_text(causal)
        is_same = is_same and all(map(torch.equal, whole, alone))
        why = "" if is_same else f"it is computed otherwise than a {config.model_type} model alone"
    except Exception as error:  # whatever a module does that is called otherwise than it expects
        why = one_line(error)
    if why:
        raise UnsupportedModelError(
            f"{where}: the language model of this {kind} model is not implemented: {why}"
        )
    text: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    text.pop("dtype", None)  # that of the trial
    return json.dumps(text)


def _parts(decoder: Any) -> list[object]:
    """Return what a decoder is made of: names, classes and shapes."""
    shapes = [(name, tensor.shape) for name, tensor in decoder.state_dict().items()]
    return [*((name, type(module)) for name, module in decoder.named_modules()), *shapes]


class _Decoded(BaseModelOutputWithPast):
    """An output of a decoder that has nothing but hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _try_with_text(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Run what stands around a decoder, itself left out: what the LM head got, and the logits.

    Its layers are given numbers instead. Raises ValueError where the decoder gets more than
    embeddings or ids at the positions from 0 on.
    """
    settings = model.config.to_dict().items()
    special = [value for key, value in settings if "token" in key]  # pictures' are among them
    token_ids = torch.tensor([[n for n in range(64) if n not in special][:_N_TOKENS]])
    embedding: Any = model.get_input_embeddings()
    rows = torch.linspace(-1, 1, _N_TOKENS * embedding.weight.shape[1]).view(1, _N_TOKENS, -1)
    found: list[Tensor] = []

    def embed(given: Tensor) -> Tensor:
        if not torch.equal(given, token_ids):
            raise ValueError("it embeds other tokens than those of the text")
        return rows

    def decode(**given: Any) -> _Decoded:
        expected = {"inputs_embeds": rows, "input_ids": token_ids}
        expected["position_ids"] = torch.arange(_N_TOKENS)[None]
        for name, value in given.items():
            is_known = isinstance(value, Tensor) and name in expected
            if not (torch.equal(value, expected[name]) if is_known else _is_setting(value)):
                raise ValueError(f"its layers depend on {name} of the whole model")
        return _Decoded(last_hidden_state=rows.square())

    def project(hidden: Tensor) -> Tensor:
        found.append(hidden)
        return hidden[..., :_N_LOGITS].clone()

    stubs = (embedding, embed), (model.get_decoder(), decode)
    for module, stub in (*stubs, (model.get_output_embeddings(), project)):
        if not isinstance(module, nn.Module):
            raise TypeError("it has no embedding, decoder or LM head by the usual names")
        module.__dict__["forward"] = stub
    logits = model(input_ids=token_ids, use_cache=False).logits
    [hidden] = found
    return hidden, logits


def _is_setting(value: object) -> bool:
    """Whether a decoder's argument says how to compute, not of what."""
    return value is None or isinstance(value, (bool, int, str))
