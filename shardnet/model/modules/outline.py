"""Outline a model of transformers for stages: parameter names, shapes, cache sizes.

One forward pass on the meta device, without memory, shows which modules are used before the layers
and which after them, what a layer returns, and what the cache holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardnet.errors import UnsupportedModelError
from shardnet.model.config.module_outline import ModuleOutline, Shapes
from shardnet.model.modules.meta_model import (
    MODULE_ERRORS,
    build_on_meta,
    one_line,
    read_module_config,
)
from shardnet.model.modules.slot_cache import cached_numbers, whole_cache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import DynamicCache

_TRIAL_ROWS = 5
"""Rows of the forward pass on the meta device."""


@dataclass(slots=True)
class _Trial:
    """What the forward pass showed: modules by name, layers by number.

    `rereads`: whether layers after the first one use the embedding again.
    """

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    called: list[int] = field(default_factory=list)
    output_counts: list[int] = field(default_factory=list)
    rereads: bool = False


@lru_cache(maxsize=4)
def read_outline(config_text: str, where: str) -> ModuleOutline:
    """Read the outline of the model of a config.json; `where` is its path, for messages.

    Raises CheckpointError for a config that transformers does not take, UnsupportedModelError for a
    model that cannot be cut between layers.
    """
    config = read_module_config(json.loads(config_text), where)
    text = config.get_text_config(decoder=True)
    model = build_on_meta(config, torch.float32, where)
    try:
        path = layer_path(model, text.num_hidden_layers)
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        trial, cache = _try(model, layers, text)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{where}: {error.message}") from error
    names = _Names(model, path)
    in_trial = [cached_numbers(layer, _TRIAL_ROWS) for layer in cache.layers]
    sizes = in_trial + [(0, 0)] * (len(layers) - len(in_trial))
    before = names.of_modules(trial.before)
    is_plain = trial.before == [names.embedding] and not trial.rereads
    head = names.of_modules(trial.after)
    rest = {n: s for n, s in names.outside.items() if n not in before and n not in head}
    return ModuleOutline(
        model_type=config.model_type,
        config_text=config_text,
        layer_list=path,
        layers=tuple(names.of_layer(number) for number in range(len(layers))),
        embedding=before if is_plain else {},
        everywhere=rest if is_plain else before | rest,
        head=head,
        output_counts=tuple(trial.output_counts),
        kv_numbers=tuple(numbers for numbers, _ in sizes),
        state_bytes=tuple(n_bytes for _, n_bytes in sizes),
        shared_kv_from=_shared_kv_from(text),
    )


def layer_path(model: PreTrainedModel, n_layers: int) -> str:
    """Find the list of a model's `n_layers` layers. Raises UnsupportedModelError without one."""
    found: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    ]
    if not found:
        raise UnsupportedModelError(
            f"{model.config.model_type} has no list of its {n_layers} layers, so it cannot be cut"
        )
    return min(found, key=lambda name: name.count("."))


def _try(
    model: PreTrainedModel, layers: nn.ModuleList, config: PreTrainedConfig
) -> tuple[_Trial, DynamicCache]:
    """Run a few rows through a model on the meta device."""
    config._experts_implementation = "batched_mm"  # others read which experts are chosen
    config._attn_implementation = "eager"  # others read the mask's values
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UnsupportedModelError(
            f"{config.model_type} counts positions from its token for padding: not implemented"
        )
    trial, cache = _Trial(), whole_cache(config)
    try:
        with _watched(model, layers, trial, config), torch.inference_mode():
            model(
                input_ids=torch.zeros(1, _TRIAL_ROWS, dtype=torch.long, device="meta"),
                position_ids=torch.arange(_TRIAL_ROWS, device="meta")[None],
                cache=cache,
                use_cache=True,
            )
    except MODULE_ERRORS as error:
        raise UnsupportedModelError(
            f"{config.model_type} is not called as other models are: {one_line(error)}"
        ) from error
    if trial.called != [*range(len(layers))]:
        raise UnsupportedModelError(
            f"{config.model_type} does not run its layers once each in order, so it cannot be cut"
        )
    return trial, cache


class _Lineage(TorchDispatchMode):
    """Tracks which layer made each tensor, and refuses what a later stage would lack."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self._family = family
        self._made: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets its id
        self._layer_of: dict[int, int] = {}
        self._first_allowed = 0
        self._hidden: Tensor | None = None
        self._barred: Set[int] = frozenset()
        self._embedded: set[int] = set()
        self._is_before_layers = True
        self.rereads = False

    def embedded(self, output: Tensor) -> None:
        """Record `output`, and what is computed from it before the layers, as the embedding."""
        self._embedded.add(id(output))

    def layers_begin(self) -> None:
        """Record no more tensors as the embedding."""
        self._is_before_layers = False

    def layer_returned(self, number: int, output: object) -> None:
        """Record the tensors in `output`, and what is computed from them, as made by a layer."""
        self._layer_of.update((id(each), number) for each in _tensors(output))

    def layer_begins(self, number: int, hidden: Tensor) -> None:
        """Forbid tensors of earlier layers but `hidden`: a stage that begins here lacks them."""
        self._first_allowed, self._hidden = number, hidden

    def layers_ended(self, hidden: Tensor) -> None:
        """Forbid all tensors made so far, except `hidden`: the last norm and the head get nothing
        else.
        """
        self._barred = self._made.keys() - {id(hidden)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; check its inputs, and record its outputs."""
        number, reads_embedding = -1, False
        for each in _tensors((args, [*(kwargs or {}).values()])):
            reads_embedding |= id(each) in self._embedded
            made_in = self._layer_of.get(id(each), -1)
            is_old = 0 <= made_in < self._first_allowed and each is not self._hidden
            if is_old or id(each) in self._barred:
                raise _handed_on(self._family)
            number = max(number, made_in)
        result = func(*args, **(kwargs or {}))
        self._made.update((id(each), each) for each in _tensors(result))
        self.rereads |= reads_embedding and self._first_allowed > 0
        if reads_embedding and self._is_before_layers:
            self._embedded.update(id(each) for each in _tensors(result))
        if number >= 0:
            self.layer_returned(max(number, self._first_allowed), result)
        return result


def _handed_on(family: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"layers of {family} hand on more than one hidden state")


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in `values`, and in lists within them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


@contextmanager
def _watched(
    model: PreTrainedModel, layers: nn.ModuleList, trial: _Trial, config: PreTrainedConfig
) -> Iterator[None]:
    """Record which modules with parameters run, and the inputs and outputs of layers."""
    inside = {id(module) for module in layers.modules()}
    hooks, family = [], model.config.model_type
    lineage, hidden = _Lineage(family), list[Tensor]()
    last = _shared_kv_from(config)  # layers from there on are never divided

    def note_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
        came = args[0] if args else kwargs.get("hidden_states")
        lineage.layers_begin()
        if hidden and (last is None or len(hidden) <= last):
            if came is not hidden[-1]:
                raise _handed_on(family)
            lineage.layer_begins(len(hidden), came)

    def note_module(name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            (trial.after if len(trial.called) == len(layers) else trial.before).append(name)

        return note

    def note_layer(number: int) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            left = output[0] if isinstance(output, tuple) else output
            is_hidden = isinstance(left, Tensor)
            if not is_hidden or left.shape != (1, _TRIAL_ROWS, config.hidden_size):
                raise _handed_on(family)
            hidden.append(left)
            lineage.layer_returned(number, output)
            if number == len(layers) - 1:
                lineage.layers_ended(left)
            trial.called.append(number)
            trial.output_counts.append(len(output) if isinstance(output, tuple) else 0)

        return note

    for name, module in model.named_modules():
        if id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(note_module(name)))

    def note_embedding(module: nn.Module, args: Any, output: Tensor) -> None:
        lineage.embedded(output)

    hooks.append(model.get_input_embeddings().register_forward_hook(note_embedding))
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(note_inputs, with_kwargs=True))
        hooks.append(layer.register_forward_hook(note_layer(number)))
    try:
        with lineage:
            yield
        trial.rereads = lineage.rereads
    finally:
        for hook in hooks:
            hook.remove()


class _Names:
    """The parameters of a model by module; tied ones have the name of the first."""

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self._prefix = f"{path}."
        self._state = model.state_dict(keep_vars=True)
        self._first: dict[int, str] = {}
        for name, tensor in self._state.items():
            self._first.setdefault(id(tensor), name)
        self._modules = dict(model.named_modules())
        embedding = model.get_input_embeddings()
        self.embedding = next(n for n, module in self._modules.items() if module is embedding)

    @property
    def outside(self) -> Shapes:
        """The shapes of the parameters outside the layers."""
        return {
            name: tuple(tensor.shape)
            for name, tensor in self._state.items()
            if not name.startswith(self._prefix) and self._first[id(tensor)] == name
        }

    def of_layer(self, number: int) -> Shapes:
        """The shapes of a layer's parameters; those shared with an earlier layer have its names."""
        prefix = f"{self._prefix}{number}."
        own = {name: tensor for name, tensor in self._state.items() if name.startswith(prefix)}
        return {self._first[id(tensor)]: tuple(tensor.shape) for tensor in own.values()}

    def of_modules(self, modules: list[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters of modules outside the layers."""
        return {
            self._first[id(tensor)]: tuple(tensor.shape)
            for module in modules
            for name, tensor in self._state.items()
            if name.rpartition(".")[0] == module
        }


def _shared_kv_from(config: PreTrainedConfig) -> int | None:
    """Return the first layer whose keys and values others read, None where none do."""
    modes = list(getattr(config, "kv_sharing_modes", None) or ())
    return modes.index("store") if "reuse" in modes else None
