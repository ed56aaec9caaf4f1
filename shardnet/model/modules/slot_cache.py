"""The cache of one slot as transformers' modules fill it: keys and values, or states, by layer.

Knows transformers' cache layers, and which of them can be cropped. Layers of other stages take no
memory: they only say how many positions they would hold, which masks are made from. Windows are
kept whole, so that every layer with keys and values alone can be cropped. Must not know slots.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from shardnet.errors import UnsupportedModelError
from shardnet.model.config.module_outline import ModuleOutline
from shardnet.slot_operations import MAX_DRAFTS
from shardnet.types import LayerRange

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
_CROPPED: Final = (DynamicLayer, DynamicIndexedLayer, DummyLayer)
"""Layers with nothing but what `crop` takes back."""
_SPARSE: Final = "minimax_m3_sparse"
"""What MiniMax-M3 calls its own layers of that kind, which no other module knows."""
_PER_POSITION: Final = ("keys", "values", "indexer_keys", "idx_keys")
_STATES: Final = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
_STATE_PARTS: Final = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
"""Attributes of a layer that make up its states."""


class _Elsewhere(DynamicLayer):
    """Keys and values that another stage has, `length` positions of them."""

    length = 0

    def get_seq_length(self) -> int:
        """Return how many positions the other stage holds."""
        return self.length


class _NoState:
    """Stands for states of another stage: there are some after `length` positions, if any."""

    length = 0
    number_of_states: int

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether there is a state, of each of the layer's."""
        return dict.fromkeys(range(self.number_of_states), self.length > 0)

    @has_previous_state.setter
    def has_previous_state(self, value: dict[int, bool]) -> None:
        """Ignore what the base class sets at first."""


class _StateElsewhere(_NoState, LinearAttentionLayer):
    """A state that another stage has."""


class _BothElsewhere(_NoState, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """Both: keys and values, and a state."""

    def get_seq_length(self) -> int:
        """Return how many positions the other stage holds."""
        return self.length


_ELSEWHERE: Final = (_Elsewhere, _StateElsewhere, _BothElsewhere)

LayerStates = dict[int, dict[str, Any]]
"""Of each layer that keeps states, by its number, what they consist of."""


def whole_cache(config: PreTrainedConfig) -> DynamicCache:
    """Make the cache of all layers of a model, with windows kept whole.

    Raises UnsupportedModelError for a model whose layers keep something else.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_unwindowed(layer) for layer in cache.layers]
    for layer in cache.layers:
        is_sparse = isinstance(layer, DynamicLayer) and layer._layer_type == _SPARSE
        if type(layer) not in (*_CROPPED, *_STATES) and not is_sparse:
            raise UnsupportedModelError(
                f"layers of {config.model_type} models keep a {type(layer).__name__}, which is "
                "neither keys and values nor a state"
            )
    return cache


class SlotCache:
    """What a slot holds in `layers` of a model: the first `length` positions of its sequence."""

    def __init__(
        self, config: PreTrainedConfig, outline: ModuleOutline, layers: LayerRange
    ) -> None:
        self.cache = whole_cache(config)
        own = {number for layer in layers for number in outline.caches[layer]}
        self.cache.layers = [
            layer if number in own else _elsewhere(layer)
            for number, layer in enumerate(self.cache.layers)
        ]
        self._elsewhere = [one for one in self.cache.layers if isinstance(one, _ELSEWHERE)]
        self.length = 0

    @property
    def can_crop(self) -> bool:
        """Whether positions can be taken back."""
        return not any(isinstance(one, LinearAttentionLayer) for one in self.cache.layers)

    def moved_to(self, length: int) -> None:
        """Note that the layers of this stage hold `length` positions now."""
        self.length = length
        for layer in self._elsewhere:
            layer.length = length

    def states(self) -> LayerStates:
        """Copy the states of the stage's layers."""
        return copy.deepcopy(
            {
                number: {name: vars(layer)[name] for name in _STATE_PARTS}
                for number, layer in enumerate(self.cache.layers)
                if type(layer) in _STATES
            }
        )

    def put(self, states: LayerStates) -> None:
        """Go on with a copy of these states: those after the positions that are held."""
        for number, parts in copy.deepcopy(states).items():
            vars(self.cache.layers[number]).update(parts)

    def crop(self, length: int) -> None:
        """Keep the first `length` positions, no more than there are; states stay as they are.

        The memory of more than some drafts is given back; of fewer the next step does so.
        """
        self._keep(length, is_copy=self.length - length > MAX_DRAFTS)

    def _keep(self, length: int, *, is_copy: bool) -> None:
        assert length <= self.length
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and not isinstance(layer, _ELSEWHERE):
                kind = DynamicLayer if isinstance(layer, LinearAttentionLayer) else type(layer)
                kind.crop(layer, length - self.length)
                for name in _PER_POSITION if is_copy else ():
                    if isinstance(kept := getattr(layer, name, None), Tensor):
                        setattr(layer, name, kept.clone())
        self.moved_to(length)

    def copied(self, length: int) -> SlotCache:
        """Return a copy of the first `length` positions that shares no memory with this one.

        With fewer positions than there are, states are to be `put`.
        """
        if length >= self.length:
            return copy.deepcopy(self)
        made = copy.copy(self)
        made.cache = copy.copy(self.cache)
        made.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        made._elsewhere = [one for one in made.cache.layers if isinstance(one, _ELSEWHERE)]
        made._keep(length, is_copy=True)
        return made


def cached_tensors(layer: CacheLayer) -> list[Tensor]:
    """Return what a cache layer holds."""
    held = [getattr(layer, name, None) for name in _PER_POSITION]
    return [*(t for t in held if isinstance(t, Tensor)), *_state_tensors(layer)]


def cached_numbers(layer: CacheLayer, n_positions: int) -> tuple[int, int]:
    """Return the numbers that a cache layer holds per position, and the bytes whatever its length.

    It holds `n_positions`.
    """
    per_position = [getattr(layer, name, None) for name in _PER_POSITION]
    numbers = sum(t.numel() for t in per_position if isinstance(t, Tensor)) // n_positions
    return numbers, sum(tensor.nbytes for tensor in _state_tensors(layer))


def _state_tensors(layer: CacheLayer) -> Iterator[Tensor]:
    if isinstance(layer, LinearAttentionLayer):
        for states in (layer.conv_states, layer.recurrent_states):
            yield from (state for state in states.values() if state is not None)


def _unwindowed(layer: CacheLayer) -> CacheLayer:
    if type(layer) is DynamicSlidingWindowLayer:
        return DynamicLayer()
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return layer


def _elsewhere(layer: CacheLayer) -> CacheLayer:
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return _BothElsewhere(number_of_states=layer.number_of_states)
    if type(layer) is LinearAttentionLayer:
        return _StateElsewhere(number_of_states=layer.number_of_states)
    return layer if isinstance(layer, DummyLayer) else _Elsewhere()
