"""A stage of a model that transformers' own modules compute: the whole model, cut around layers.

The class is built on the meta device. Layers of other stages stay there, without memory, and hand
on in their place what came from them, so that numbers, kinds of layers and caches stay right. The
pass ends after the last layer of the stage. Final norm and LM head run in a pass of their own, in
which no layer computes. Must not know files, slots or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardnet.model.config.module_outline import HandedPart, ModuleOutline
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
    """A forward pass: what layers have returned that later ones read, by layer and output.

    Without `runs_layers` they hand on what comes in. `rows` are those after so many layers of the
    model: those `kept`, and those after the last layer of the stage.
    """

    handed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    runs_layers: bool = True
    kept: Collection[int] = ()
    rows: dict[int, Tensor] = field(default_factory=dict)
    n_last: int = 0
    """How often the last layer of the stage has run."""


class CutModel:
    """The layers of one stage, with the embedding on the first and the LM head on the last.

    T rows of one sequence, R rows whose logits are wanted, E hidden size, W the outline's width of
    rows, V vocabulary.
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
        self._pass = _Pass()
        config = parse_text(outline.config_text)
        self._model: PreTrainedModel = build_on_meta(config, dtype, "config.json")
        self._config = self._model.config
        modules = self._model.get_submodule(outline.layer_list)
        for number, layer in enumerate(modules.children()):
            layer.forward = self._forward_of(number, layer.forward)
        embedding = self._model.get_input_embeddings()
        is_elsewhere = bool(outline.embedding) and layers.start > 0
        embedding.forward = self._embedding(
            self._no_embedding if is_elsewhere else embedding.forward
        )

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
        return SlotCache(self._config, self._outline, self._layers)

    def run(
        self,
        token_ids: Sequence[int],
        hidden: Tensor | None,
        slot: SlotCache,
        kept: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """Run the next rows of a sequence through the layers; what they cache is added to `slot`.

        `hidden` is [T, W] in the compute dtype, None on the first stage. Returns rows [T, W] by the
        number of layers before them: those `kept`, and those behind this stage.
        """
        handed = {} if hidden is None else self._parts_of(hidden, self._layers.start)
        running = self._pass = _Pass(handed=handed, kept=kept)
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
            return running.rows
        finally:
            self._pass = _Pass()
        raise AssertionError("the last layer of a stage ends the pass")

    def logits(self, rows: Tensor) -> Tensor:
        """Apply final norm and LM head: [R, W] to float32 [R, V]."""
        logits: Tensor = self._behind_layers(self._model, rows).logits
        return logits[0].float()

    def normed(self, rows: Tensor) -> Tensor:
        """Apply the final norm: [R, W] to [R, E]."""
        normed: Tensor = self._behind_layers(self._model.base_model, rows).last_hidden_state
        return normed[0]

    def _behind_layers(self, model: Any, rows: Tensor) -> Any:
        """Run what comes after the layers."""
        handed = self._parts_of(rows.to(self._dtype), len(self._outline.layers))
        self._pass = _Pass(handed=handed, runs_layers=False)
        try:
            return model(
                input_ids=torch.zeros(1, len(rows), dtype=torch.long, device=self._device),
                position_ids=torch.arange(len(rows), device=self._device)[None],
                use_cache=False,
            )
        finally:
            self._pass = _Pass()

    def _forward_of(self, number: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a layer does in this stage: compute, or hand on what came from it."""
        count, layers = self._outline.output_counts[number], self._layers
        of_borders = {(p.layer, p.output) for parts in self._outline.borders for p in parts}
        read = [index for index in range(count or 1) if (number, index) in of_borders]

        def forward(*args: Any, **kwargs: Any) -> Any:
            running = self._pass
            came: Tensor = args[0] if args else kwargs["hidden_states"]
            if not running.runs_layers or number not in layers:
                first, *more = (running.handed.get((number, n)) for n in range(count or 1))
                first = came if first is None else first
                return (first, *more) if count else first
            if number == 0 and number in running.kept:
                running.rows[0] = self._row({(0, 0): came}, self._outline.borders[0][:1])
            output = own(*args, **kwargs)
            outputs = [*output] if count else [output]
            for index in read:
                outputs[index] = outputs[index].to(self._hidden_dtype).to(self._dtype)
                running.handed[number, index] = outputs[index]
            if number + 1 in running.kept or number == layers.end - 1:
                parts = self._outline.borders[number]
                running.rows[number + 1] = self._row(running.handed, parts)
            running.n_last += number == layers.end - 1
            if running.n_last == self._outline.n_passes[layers.end - 1]:
                raise _LayersDone
            return tuple(outputs) if count else outputs[0]

        return forward

    def _row(self, handed: Mapping[tuple[int, int], Tensor], parts: Sequence[HandedPart]) -> Tensor:
        """Join parts side by side: [T, W], zeros behind them."""
        columns = [
            handed[part.layer, part.output].movedim(part.shape.index(-1), 0).flatten(1)
            for part in parts
        ]
        rows = torch.cat(columns, 1) if len(columns) > 1 else columns[0]
        return nn.functional.pad(rows, (0, self._outline.row_width - rows.shape[1]))

    def _parts_of(self, rows: Tensor, n_layers: int) -> dict[tuple[int, int], Tensor]:
        """Cut rows [T, W] that come out of so many layers."""
        parts, begin = dict[tuple[int, int], Tensor](), 0
        for part in self._outline.borders[n_layers - 1]:
            axis, end = part.shape.index(-1), begin + part.width
            others = part.shape[:axis] + part.shape[axis + 1 :]
            columns = rows[:, begin:end].reshape(len(rows), *others)
            parts[part.layer, part.output] = columns.movedim(0, axis)
            begin = end
        return parts

    def _embedding(self, own: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what the embedding does: compute, or hand on what came of it from elsewhere."""

        def forward(token_ids: Tensor) -> Tensor:
            handed = self._pass.handed.get((-1, 0))
            if handed is None or self._pass.runs_layers:
                handed = own(token_ids)
            if self._pass.runs_layers:
                self._pass.handed[-1, 0] = handed
            return handed

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
