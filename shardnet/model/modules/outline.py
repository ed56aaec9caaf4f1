"""Outline a model of transformers for stages: parameter names, shapes, cache sizes.

One forward pass on the meta device, without memory, shows which modules are used before the layers
and which after them, what layers return, which later layers read it, and what the cache holds.
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
from shardnet.model.config.module_outline import HandedPart, ModuleOutline, Shapes
from shardnet.model.modules.meta_model import (
    MODULE_ERRORS,
    build_on_meta,
    one_line,
    read_module_config,
)
from shardnet.model.modules.slot_cache import cached_numbers, cached_tensors, whole_cache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import DynamicCache

_TRIAL_ROWS = 5
"""Rows of the forward pass on the meta device."""


@dataclass(slots=True)
class _Trial:
    """What the forward pass showed: modules by name, layers by number in the order of their calls.

    `caches` are the layers that fill each layer of the cache.

    `rereads`: whether layers after the first one use the embedding again. `borders` as in
    ModuleOutline.
    """

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    called: list[int] = field(default_factory=list)
    caches: dict[int, int] = field(default_factory=dict)
    output_counts: list[int] = field(default_factory=list)
    rereads: bool = False
    borders: list[tuple[HandedPart, ...]] = field(default_factory=list)


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
        path = layer_path(model, text)
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        trial, cache = _try(model, layers, text)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{where}: {error.message}") from error
    names = _Names(model, path)
    in_trial = [cached_numbers(layer, _TRIAL_ROWS) for layer in cache.layers]
    if not any(numbers or n_bytes for numbers, n_bytes in in_trial):
        raise UnsupportedModelError(
            f"{where}: layers of {config.model_type} keep nothing in a cache of transformers, so "
            "each token would be computed with all before it"
        )
    caches = [[n for n, by in trial.caches.items() if by == k] for k in range(len(layers))]
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
        borders=tuple(trial.borders),
        n_passes=tuple(trial.called.count(number) for number in range(len(layers))),
        caches=tuple(map(tuple, caches)),
        kv_numbers=tuple(sum(in_trial[n][0] for n in own) for own in caches),
        state_bytes=tuple(sum(in_trial[n][1] for n in own) for own in caches),
        shared_kv_from=_shared_kv_from(text),
    )


def layer_path(model: PreTrainedModel, config: PreTrainedConfig) -> str:
    """Find the list of a model's layers. Raises UnsupportedModelError without one.

    LongCat has two sub-layers with a cache in each of its `num_layers`.
    """
    for n_layers in (config.num_hidden_layers, getattr(config, "num_layers", None)):
        found: list[str] = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == n_layers
        ]
        if found:
            return min(found, key=lambda name: name.count("."))
    raise UnsupportedModelError(
        f"{model.config.model_type} has no list of its {config.num_hidden_layers} layers, so it "
        "cannot be cut"
    )


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
        with _watched(model, layers, trial, cache), torch.inference_mode():
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
    return trial, cache


_Source = tuple[int, int]
"""What a layer returned: the layer and the output's number; layer -1 is the embedding."""


class _Lineage(TorchDispatchMode):
    """Tracks which outputs of layers each tensor is made of, and which layer reads them last.

    What is computed between layers is computed again on each stage, from what came out of layers,
    the embedding and positions; what is made inside a layer stays there.
    """

    def __init__(self, family: str, n_layers: int, last: int | None) -> None:
        super().__init__()
        self._family = family
        self._n_layers = n_layers
        self._last = n_layers if last is None else last  # layers behind it are never divided
        self._made: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets its id
        self._sources: dict[int, frozenset[_Source]] = {}
        self._made_in: dict[int, int] = {}
        self._inside: int | None = None
        self._n_returned = 0
        self._barred: Set[int] = frozenset()
        self._unclear: set[int] = set()
        self._embedded: set[int] = set()
        self.outputs: dict[_Source, Tensor] = {}
        self.read_until: dict[_Source, int] = {}
        self.rereads = False

    def embedded(self, output: Tensor) -> None:
        """Record `output`, and what is computed from it before the layers, as the embedding."""
        self._embedded.add(id(output))
        self._hand((-1, 0), output)

    def layer_begins(self, number: int) -> None:
        """Record what is made from now on as made inside a layer."""
        self._inside = number

    def layer_returned(self, number: int, outputs: tuple[object, ...]) -> None:
        """Record the tensors in `outputs` as what a layer hands on."""
        self._inside, self._n_returned = None, max(self._n_returned, number + 1)
        for index, output in enumerate(outputs):
            for each in _tensors(output):
                self._hand((number, index), each)
        if self._n_returned == self._n_layers:
            self._barred = self._made.keys() - {
                key for key in self._sources if key not in self._unclear
            }

    def _hand(self, source: _Source, tensor: Tensor) -> None:
        self._made[id(tensor)] = tensor
        self.outputs[source] = tensor
        self._sources[id(tensor)] = frozenset([source])
        self._made_in.pop(id(tensor), None)
        self._unclear.discard(id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; check its inputs, and record its outputs."""
        inputs = [*_tensors((args, [*(kwargs or {}).values()]))]
        self._check(inputs)
        sources = frozenset[_Source]().union(*(self._sources.get(id(t), ()) for t in inputs))
        makers = [self._made_in[id(t)] for t in inputs if id(t) in self._made_in]
        is_embedded = any(id(each) in self._embedded for each in inputs)
        is_unclear = any(
            id(t) in self._unclear or (id(t) in self._made and id(t) not in self._sources)
            for t in inputs
            if t.numel()
        )
        self.rereads |= is_embedded and (self._n_returned > 0 or bool(self._inside))
        if self._inside is not None or self._n_returned == self._n_layers:
            reader = self._n_layers if self._inside is None else self._inside
            for source in sources:
                self.read_until[source] = max(reader, self.read_until.get(source, 0))
        if func is torch.ops.aten.nonzero.default:  # which rows an expert has: none, in a trial
            result = args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        else:
            result = func(*args, **(kwargs or {}))
        for each in _tensors(result):
            key = id(each)
            self._made[key] = each
            if is_embedded and self._n_returned == 0 and self._inside is None:
                self._embedded.add(key)
            if self._inside is not None and (makers or any(n >= 0 for n, _ in sources)):
                self._made_in[key] = self._inside
            elif self._inside is None:
                if makers:
                    self._made_in[key] = max(makers)
                if sources:
                    self._sources[key] = sources
                if is_unclear:
                    self._unclear.add(key)
        return result

    def _check(self, inputs: list[Tensor]) -> None:
        """Refuse tensors that a stage beginning here would lack."""
        reader = self._n_layers if self._inside is None else self._inside
        for each in inputs:
            is_old = self._made_in.get(id(each), reader) < min(reader, self._last)
            is_barred = each.numel() > 0 and id(each) in self._barred
            if (self._inside is not None and is_old) or is_barred:
                raise _refused(self._family, "read what others have computed and do not return")

    def borders(self) -> Iterator[tuple[HandedPart, ...]]:
        """Yield what comes out of so many layers and is read later, from 1 layer on.

        Raises UnsupportedModelError for what is no row of numbers for each token.
        """
        for border in range(1, self._n_layers + 1):
            sources = [
                source
                for source, reader in self.read_until.items()
                if source[0] < border <= reader and (source[0] >= 0 or border == self._n_layers)
            ]
            sources.sort(key=lambda source: (source != (border - 1, 0), source))
            yield tuple(self._part(source) for source in sources)

    def _part(self, source: _Source) -> HandedPart:
        tensor, shape = self.outputs[source], [*self.outputs[source].shape]
        axes = [
            axis
            for axis, size in enumerate(shape)
            if size == _TRIAL_ROWS and axis and shape[axis - 1] == 1
        ]
        if tensor.dtype is not torch.float32:
            raise _refused(self._family, f"hand on numbers of {tensor.dtype}")
        if not axes:
            raise _refused(self._family, "hand on other rows than one for each token")
        shape[axes[0]] = -1
        return HandedPart(layer=source[0], output=source[1], shape=tuple(shape))


def _is_in_order(called: list[int], n_layers: int) -> bool:
    """Say whether layers run in order, some of them perhaps several times, again in order."""
    looped = [number for number in range(n_layers) if called.count(number) > 1]
    n_passes = called.count(looped[0]) if looped else 1
    first, end = (looped[0], looped[-1] + 1) if looped else (0, n_layers)
    before, behind = range(first), range(end, n_layers)
    return called == [*before, *[*range(first, end)] * n_passes, *behind]


def _refused(family: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"layers of {family} {what}, so it cannot be cut between them")


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield the tensors in `values`, and in lists within them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


@contextmanager
def _watched(
    model: PreTrainedModel, layers: nn.ModuleList, trial: _Trial, cache: DynamicCache
) -> Iterator[None]:
    """Record which modules with parameters run, and the inputs and outputs of layers."""
    inside = {id(module) for module in layers.modules()}
    hooks, family = [], model.config.model_type
    text = model.config.get_text_config(decoder=True)
    lineage = _Lineage(family, len(layers), _shared_kv_from(text))
    held: dict[int, list[int]] = {}

    def note_module(name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            (trial.after if len(layers) - 1 in trial.called else trial.before).append(name)

        return note

    def note_begin(number: int) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            lineage.layer_begins(number)

        return note

    def note_layer(number: int) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
            if any(isinstance(each, list | tuple) and [*_tensors(each)] for each in outputs):
                raise _refused(family, "hand on lists")
            lineage.layer_returned(number, outputs)
            if number not in trial.called:
                trial.output_counts.append(len(outputs) if outputs[0] is not output else 0)
            trial.called.append(number)
            for index, kept in enumerate(cache.layers):
                now = [id(tensor) for tensor in cached_tensors(kept)]
                if now != held.get(index, []):
                    held[index], trial.caches[index] = now, number

        return note

    for name, module in model.named_modules():
        if id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(note_module(name)))

    def note_embedding(module: nn.Module, args: Any, output: Tensor) -> None:
        lineage.embedded(output)

    hooks.append(model.get_input_embeddings().register_forward_hook(note_embedding))
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(note_begin(number)))
        hooks.append(layer.register_forward_hook(note_layer(number)))
    try:
        with lineage:
            yield
        trial.rereads = lineage.rereads
        if not _is_in_order(trial.called, len(layers)):
            raise UnsupportedModelError(
                f"{family} does not run its layers one after the other, so it cannot be cut"
            )
        trial.borders = [*lineage.borders()]
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
