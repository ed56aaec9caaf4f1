"""Load and run an encoder, by transformers' own class of its family, in float32.

Passes a config and tensors that were read here to transformers, which opens no file, downloads
nothing and runs no code of a checkpoint. Must not know threads, nor who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import damaged, read_stored
from shardnet.errors import NumericalError, ShortageError, UsageError, shortage
from shardnet.model.kernels.devices import capacity_error_for, is_out_of_memory
from shardnet.runtime.encoding.encoder_facts import (
    BATCH_POSITIONS,
    EncoderFacts,
    bare_name,
    is_of_head,
)
from shardnet.runtime.encoding.sentence_modules import DenseLayer, Pooling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BUFFERS: Final = ("position_ids", "token_type_ids", "rotary_emb.inv_freq")
"""Buffers that older checkpoints store although they can be computed."""


Step = Callable[[], None]
"""Called before each step of long work; an exception that it raises ends the work."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The token ids of one text, or of a query and a document, and each token's type id."""

    token_ids: Sequence[int]
    type_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A loaded encoder. Not thread-safe."""

    facts: EncoderFacts
    module: Any
    pad_id: int
    dense: Sequence[Dense]

    def forward(
        self, inputs: Sequence[EncoderInput], pooling: Pooling, step: Step = lambda: None
    ) -> NDArray[np.float32]:
        """Compute a batch: float32 [inputs, hidden size] of vectors, or [inputs, 1] of scores.

        Vectors are pooled but not normalised. `step` is called first. Raises UsageError for a token
        id outside the vocabulary, NumericalError for NaN or infinite outputs, CapacityError if
        memory runs out.
        """
        step()
        n_tokens = self.module.config.vocab_size
        if any(token_id >= n_tokens for given in inputs for token_id in given.token_ids):
            raise UsageError(f"a token id is outside the model's vocabulary of {n_tokens}")
        device = self.module.device
        ids, mask = (tensor.to(device) for tensor in self._padded(inputs))
        arguments = {"input_ids": ids, "attention_mask": mask}
        if self.facts.config.has_types:
            rows = [torch.tensor(given.type_ids) for given in inputs]
            types = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            arguments["token_type_ids"] = types.to(device)
        with memory_for(self.facts), torch.inference_mode():
            found = self.module(**arguments)
            if self.facts.config.kind == "reranker":
                values = found.logits
            else:
                values = pooled(found.last_hidden_state, mask, pooling)
            return finished(self.facts, values, self.dense)

    def _padded(self, inputs: Sequence[EncoderInput]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and mask [inputs, longest], padded at the end."""
        rows = [torch.tensor(given.token_ids) for given in inputs]
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
        return pad(rows, batch_first=True, padding_value=self.pad_id), mask


class Dense:
    """A linear after pooling, in float32: weight [outputs, inputs], bias [outputs] or None."""

    def __init__(self, layer: DenseLayer, device: torch.device) -> None:
        """Read it onto a device. Raises CheckpointError if its file is damaged."""
        weight, *bias = (
            tensor.make(
                [read_stored(layer.folder, one, layer.opened[one.file]) for one in tensor.sources],
                torch.float32,
            ).to(device, torch.float32)
            for tensor in layer.tensors
        )
        self.layer = layer
        self.weight = weight
        self.bias = bias[0] if bias else None

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Apply the linear and its activation: vectors [B, inputs] to [B, outputs]."""
        made = torch.nn.functional.linear(vectors, self.weight, self.bias)
        return made.tanh() if self.layer.activation == "Tanh" else made


@torch.inference_mode()
def finished(
    facts: EncoderFacts, values: torch.Tensor, dense: Sequence[Dense]
) -> NDArray[np.float32]:
    """Apply the linears after pooling to vectors, or scores, [B, E].

    Raises NumericalError for NaN or infinite values.
    """
    values = values.float()
    for layer in dense:
        values = layer(values)
    if not torch.isfinite(values).all():
        raise NumericalError(f"{facts.path}: the model computed what is no number")
    made: NDArray[np.float32] = values.cpu().numpy()
    return made


def pooled(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pool hidden states [B, T, E] to vectors [B, E], over the tokens where `mask` [B, T] is 1."""
    match pooling:
        case "cls":
            return states[:, 0]
        case "last":
            return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        case "mean":
            weights = mask.unsqueeze(-1).to(states.dtype)
            return (states * weights).sum(1) / weights.sum(1)


def batches(lengths: Sequence[int], positions: int = BATCH_POSITIONS) -> Iterator[list[int]]:
    """Divide inputs of these lengths into batches, the shortest first; yield the inputs' indices.

    A batch has at most `positions` positions, padding included, unless it is a single input.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[place] > positions:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def load_encoder(facts: EncoderFacts, device: str, step: Step = lambda: None) -> Encoder:
    """Load an encoder onto a torch device; `step` is called before each tensor. Blocks.

    Raises UsageError without transformers, CheckpointError if the files do not make the model,
    CapacityError if memory runs out.
    """
    made = _class_of(facts)
    with memory_for(facts):
        with _named(facts):
            config = made.config_class.from_dict(dict(facts.config.keys))
            with torch.device("meta"):
                claimed = dict(made(config).named_parameters())
        _check_claimed(facts, claimed)
        tensors = {tensor.name: _read(facts, tensor, step) for tensor in facts.tensors}
        with _named(facts):
            module, said = made.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                output_loading_info=True,
                dtype=torch.float32,
                attn_implementation="sdpa" if made._supports_sdpa else "eager",
                trust_remote_code=False,
            )
        _check_complete(facts, said)
        module = module.to(device).eval().requires_grad_(False)
        return Encoder(
            facts=facts,
            module=module,
            pad_id=config.pad_token_id or 0,
            dense=[Dense(layer, module.device) for layer in facts.modules.dense],
        )


def memory_for(facts: EncoderFacts) -> AbstractContextManager[None]:
    """Raise CapacityError, which names the encoder, if memory runs out inside."""
    return capacity_error_for(
        f"no memory is left for the encoder {facts.path}",
        remedy="free the model of the ring with `shardnet unload`, or end other programs there",
    )


@contextmanager
def _named(facts: EncoderFacts) -> Iterator[None]:
    """Turn transformers' errors inside into CheckpointError, or ShortageError for a shortage."""
    try:
        yield
    except Exception as error:  # strangers' values make it raise anything
        if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
            raise
        if isinstance(error, ShortageError):
            raise
        if (short := shortage(error, facts.path)) is not None:
            raise short from error
        raise damaged(
            f"{facts.path}: transformers makes no {facts.config.class_name} of it: "
            f"{str(error)[:300]}"
        ) from error


def _read(facts: EncoderFacts, tensor: ModelTensor, step: Step) -> torch.Tensor:
    step()
    stored = [read_stored(facts.folder, one, facts.opened[one.file]) for one in tensor.sources]
    return tensor.make(stored, torch.float32)


def _class_of(facts: EncoderFacts) -> Any:
    """Return the encoder's class; turn off transformers' progress bars and load reports."""
    try:
        import transformers

        library: Any = transformers
        found = getattr(library, facts.config.class_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{facts.path}: encoders are computed by transformers, which this node lacks or "
            "has too old",
            remedy="run `pip install 'transformers>=5.24'` there (shardnet's extra `transformers`)",
        ) from error
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return found


def _check_claimed(facts: EncoderFacts, claimed: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError if the config implies more weights than the files have.

    Runs before memory is allocated. Compares numbers of weights, since makers' names of tensors may
    differ from those of transformers.
    """
    claimed = {name: one for name, one in claimed.items() if not _is_unused(facts, name)}
    n_weights = sum(one.numel() for one in claimed.values())
    if n_weights <= facts.n_parameters:
        return
    found = {bare_name(tensor.name) for tensor in facts.tensors}
    _refuse(facts, "lacks", [name for name in claimed if bare_name(name) not in found])
    raise damaged(f"{facts.path} has {facts.n_parameters} weights, and its config {n_weights}")


def _check_complete(facts: EncoderFacts, said: Mapping[str, Any]) -> None:
    """Raise CheckpointError for missing tensors, and for tensors that the model does not use."""
    missing = [name for name in said["missing_keys"] if not _is_unused(facts, name)]
    strange = [name for name in said["unexpected_keys"] if not _is_unused(facts, name)]
    strange = [name for name in strange if not name.endswith(_BUFFERS)]
    _refuse(facts, "lacks", missing)
    _refuse(facts, "has, beyond what the model uses,", strange)


def _refuse(facts: EncoderFacts, what: str, names: Sequence[str]) -> None:
    if names:
        raise damaged(f"{facts.path} {what} {len(names)} tensors, {min(names):.200} among them")


def _is_unused(facts: EncoderFacts, name: str) -> bool:
    """Return whether embeddings need no such tensor: it belongs to a head, or to the pooler."""
    is_before = bare_name(name).startswith("pooler.")
    return facts.config.kind == "embedding" and (is_before or is_of_head(name))
