"""From the names of stored tensors to those of a model's parameters, by transformers' own rules.

Knows renamings, and what is computed of several stored tensors (experts that are stacked, say).
Must not know files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from shardnet.errors import CheckpointError
from shardnet.model.modules.meta_model import build_on_meta, one_line, parse_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNUSED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that older versions of transformers stored in every family."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTensor:
    """A parameter `name` of `shape` that is made of the stored tensors `sources`, in this order.

    `make` maps their values to it; None where it is the one source unchanged.
    """

    name: str
    shape: Shape
    sources: tuple[str, ...]
    make: Callable[[Sequence[Tensor]], Tensor] | None = None


class Conversions:
    """The rules of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._state = model.state_dict(keep_vars=True)
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {p: rule for rule in self._converters for p in rule.source_patterns}
        key = "_keys_to_ignore_on_load_unexpected"
        own = (getattr(module, key, None) or () for module in model.modules())
        unused = {*_UNUSED, *(pattern for patterns in own for pattern in patterns)}
        self._unused = re.compile("|".join(f"({pattern})" for pattern in sorted(unused)))
        first: dict[int, str] = {}
        self._tied: dict[str, str] = {}
        """The names of tied parameters, and the ones that they go by."""
        for name, tensor in self._state.items():
            known = first.setdefault(id(tensor), name)
            if known != name:
                self._tied[name] = known

    def convert(self, stored: Mapping[str, Shape]) -> list[ConvertedTensor]:
        """Say which parameters `stored` tensors give, which are told by name and shape.

        What the model has no place for keeps its name; what transformers leaves out is left out.
        Raises CheckpointError for tensors that a rule cannot convert.
        """
        plain: dict[str, str] = {}
        groups: dict[str, list[tuple[str, str]]] = {}
        for source in sorted(stored, key=dot_natural_key):
            name, pattern = self._renamed(source)
            if name in self._state and pattern is not None:
                groups.setdefault(name, []).append((source, pattern))
            elif name in self._state:
                plain[name] = source
            elif not self._unused.search(name):
                plain[source] = source
        for other, first in self._tied.items():
            if other in plain:
                plain.setdefault(first, plain.pop(other))
        made = [
            ConvertedTensor(name=name, shape=stored[source], sources=(source,))
            for name, source in plain.items()
        ]
        for name, sources in groups.items():
            made += self._group(name, sources, stored)
        return made

    def renamed(self, source: str) -> str:
        """Return the name that the model has for a stored tensor, or for what it is a part of."""
        return self._renamed(source)[0]

    def _renamed(self, source: str) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(
            source, self._renamings, self._converters, prefix, self._state
        )
        if name not in self._state and source in self._state:
            return source, None
        return name, pattern

    def _group(
        self, name: str, sources: Sequence[tuple[str, str]], stored: Mapping[str, Shape]
    ) -> Iterable[ConvertedTensor]:
        """Convert the sources that a rule collects under one name: to one tensor or several."""
        empty = [torch.empty(stored[source], device="meta") for source, _ in sources]
        for target, tensor in self._run(name, sources, empty).items():

            def make(values: Sequence[Tensor], target: str = target) -> Tensor:
                return self._run(name, sources, values)[target]

            names = tuple(source for source, _ in sources)
            shape = tuple(tensor.shape)
            yield ConvertedTensor(name=target, shape=shape, sources=names, make=make)

    def _run(
        self, name: str, sources: Sequence[tuple[str, str]], values: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        rule: Any = deepcopy(self._by_pattern[sources[0][1]])
        for (source, pattern), value in zip(sources, values, strict=True):
            rule.add_tensor(name, source, pattern, value)
        try:
            made = rule.convert(name, model=self._model, config=self._model.config)
        except Exception as error:  # whatever a rule does with shapes that it does not expect
            raise CheckpointError(
                f"tensor {sources[0][0]} and those beside it do not make {name}: {one_line(error)}",
                remedy="fetch the checkpoint again",
            ) from error
        whole = {key: one[0] if isinstance(one, list) else one for key, one in made.items()}
        return {key: self._with_idle(key, tensor) for key, tensor in whole.items()}

    def _with_idle(self, name: str, tensor: Tensor) -> Tensor:
        """Add zeros for experts that compute nothing, which no file has (LongCat)."""
        n_idle, own = getattr(self._model.config, "zero_expert_num", None), self._state.get(name)
        if not n_idle or own is None or len(own) != len(tensor) + n_idle:
            return tensor
        return torch.cat((tensor, tensor.new_zeros(n_idle, *tensor.shape[1:])))


@lru_cache(maxsize=2)
def conversions_of(config_text: str, *, sees: bool = False) -> Conversions:
    """Return the rules of the model of a config.json that has been read before.

    Of one that `sees` they are those of all of it, not of the language model alone.
    """
    config = parse_text(config_text)
    return Conversions(build_on_meta(config, torch.float32, "config.json", sees=sees))
