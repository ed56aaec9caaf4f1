"""A stage of a model that transformers' own modules compute: the whole model, cut around layers.

The class is built on the meta device. Layers of other stages stay there, without memory, and hand
the hidden state on in their place, so that numbers, kinds of layers and caches stay right. The pass
ends after the last layer of the stage. Final norm and LM head run in a pass of their own, in which
no layer computes. Must not know files, slots or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardnet.model.config.module_outline import ModuleOutline
from shardnet.model.modules.meta_model import build_on_meta, compute_buffers, fill, parse_text
from shardnet.model.modules.slot_cache import SlotCache
from shardnet.types import LayerRange

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[str, torch.dtype], Tensor]
"""Reads a parameter by name, in the given dtype, to the stage's device."""


class _LayersDone(Exception):
    """The layers of the stage have run."""


@dataclass(slots=True)
class _Pass:
    """A forward pass: what comes into the layers of the stage, None in its first one's place.

    Without `runs_layers` they hand on what comes in. `outputs` are the hidden states after so many
    layers of the model: those `kept`, and those after the last layer of the stage.
    """

    hidden: Tensor | None
    runs_layers: bool = True
    kept: Collection[int] = ()
    outputs: dict[int, Tensor] = field(default_factory=dict)


class CutModel:
    """The layers of one stage, with the embedding on the first and the LM head on the last.

    T rows of one sequence, R rows whose logits are wanted, E hidden size, V vocabulary.
    """

    def __init__(
        self,
        outline: ModuleOutline,
        layers: LayerRange,
        dtype: torch.dtype,
        device: torch.device,
        hidden_dtype: torch.dtype | None = None,
    ) -> None:
        """Build the model without its parameters.

        What layers return is rounded to `hidden_dtype`, None for `dtype`. Raises
        UnsupportedModelError.
        """
        self._outline = outline
        self._layers = layers
        self._dtype = dtype
        self._hidden_dtype = hidden_dtype or dtype
        self._device = device
        self._pass = _Pass(hidden=None)
        config = parse_text(outline.config_text)
        self._model: PreTrainedModel = build_on_meta(config, dtype, "config.json")
        self._config = self._model.config
        modules = self._model.get_submodule(outline.layer_list)
        for number, layer in enumerate(modules.children()):
            layer.forward = self._forward_of(number, layer.forward)
        if not outline.embedding or layers.start == 0:
            return
        self._model.get_input_embeddings().forward = self._no_embedding  # of another stage

    def load(self, names: Sequence[str], read: Read) -> None:
        """Read the parameters `names`; compute buffers that no checkpoint has."""
        tied = _tied_names(self._model)
        for name in names:
            value = read(name, _get(self._model, name).dtype)
            for each in tied.get(name, (name,)):
                value = fill(self._model, each, value)
        compute_buffers(self._model, self._device, self._is_elsewhere)

    def new_slot(self) -> SlotCache:
        """Return an empty cache of the layers of this stage."""
        return SlotCache(self._config, self._layers)

    def run(
        self,
        token_ids: Sequence[int],
        hidden: Tensor | None,
        slot: SlotCache,
        kept: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """Run the next rows of a sequence through the layers; what they cache is added to `slot`.

        `hidden` is [T, E] in the compute dtype, None on the first stage. Returns the hidden states
        [T, E] by the number of layers before them: those `kept`, and those behind this stage.
        """
        running = _Pass(hidden=None if hidden is None else hidden[None], kept=kept)
        self._pass = running
        positions = torch.arange(slot.length, slot.length + len(token_ids), device=self._device)
        try:
            self._model(
                input_ids=torch.tensor([token_ids], device=self._device),
                position_ids=positions[None],
                cache=slot.cache,
                use_cache=True,
            )
        except _LayersDone:
            slot.moved_to(slot.length + len(token_ids))
            return {number: output[0] for number, output in running.outputs.items()}
        finally:
            self._pass = _Pass(hidden=None)
        raise AssertionError("the last layer of a stage ends the pass")

    def logits(self, rows: Tensor) -> Tensor:
        """Apply final norm and LM head: [R, E] to float32 [R, V]."""
        logits: Tensor = self._behind_layers(self._model, rows).logits
        return logits[0].float()

    def normed(self, rows: Tensor) -> Tensor:
        """Apply the final norm: [R, E] in and out."""
        normed: Tensor = self._behind_layers(self._model.base_model, rows).last_hidden_state
        return normed[0]

    def _behind_layers(self, model: Any, rows: Tensor) -> Any:
        """Run what comes after the layers."""
        self._pass = _Pass(hidden=rows[None].to(self._dtype), runs_layers=False)
        try:
            return model(
                input_ids=torch.zeros(1, len(rows), dtype=torch.long, device=self._device),
                position_ids=torch.arange(len(rows), device=self._device)[None],
                use_cache=False,
            )
        finally:
            self._pass = _Pass(hidden=None)

    def _forward_of(self, number: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a layer does in this stage: compute, or hand the hidden state on."""
        count, layers = self._outline.output_counts[number], self._layers

        def returned(hidden: Tensor) -> Any:
            return (hidden, *[None] * (count - 1)) if count else hidden

        def forward(*args: Any, **kwargs: Any) -> Any:
            running = self._pass
            came: Tensor = args[0] if args else kwargs["hidden_states"]
            if running.hidden is not None and number == layers.start - running.runs_layers:
                return returned(running.hidden)
            if not running.runs_layers or number not in layers:
                return returned(came)
            output = own(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            if number == layers.start and number in running.kept:
                running.outputs[number] = came
            hidden = hidden.to(self._hidden_dtype).to(self._dtype)
            if number + 1 in running.kept or number == layers.end - 1:
                running.outputs[number + 1] = hidden
            if number == layers.end - 1:
                raise _LayersDone
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return forward

    def _no_embedding(self, token_ids: Tensor) -> Tensor:
        """Stand for the embedding of another stage: whatever reads it computes no number."""
        width = self._config.hidden_size
        shape = (*token_ids.shape, width)
        return torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a name is of a layer of another stage."""
        path = f"{self._outline.layer_list}."
        if not name.startswith(path):
            return False
        return int(name.removeprefix(path).partition(".")[0]) not in self._layers


def _tied_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return all names of each parameter, by its first one."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {own[0]: own for own in names.values()}


def _get(model: nn.Module, name: str) -> Tensor:
    module, _, key = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(module), key)
    return found
