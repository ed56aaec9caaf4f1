"""Another compute: Llama in numpy, in float32. docs/extending.md explains it.

A package adds it to shardnet by an entry point, and `shardnet node --device numpy` uses it:

    [project.entry-points."shardnet.computes"]
    numpy = "numpy_compute:NUMPY"
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shardnet.errors import CapacityError, RemoteProtocolError, UnsupportedModelError
from shardnet.model.config.model_config import RopeKind
from shardnet.model.kernels.codec import pack_rows, unpack_rows
from shardnet.runtime.stage.compute import (
    Activations,
    ComputePlugin,
    PluggedStage,
    Samples,
    StageJob,
)
from shardnet.runtime.stage.row_outputs import SamplingStage
from shardnet.slot_operations import CloseSequence, FreeSlot, OpenSequence, SlotOperation
from shardnet.types import DType, MicroBatch, RowGroup, SlotId, WireDType, blocks_for

Array = npt.NDArray[np.float32]
POSITIONS = 256
"""In a block of the KV cache."""


class Llama:
    """Some layers of a Llama, in plain formulas; the embedding and the LM head with the others.

    T rows, E hidden size, H heads, D head size, N positions so far.
    """

    def __init__(self, job: StageJob) -> None:
        self.config = config = job.checkpoint.config
        if config.family != "llama" or config.rope is None or config.attention_bias:
            raise UnsupportedModelError(f"numpy computes Llama, not {config.family}")
        if config.rope.kind is not RopeKind.DEFAULT:
            raise UnsupportedModelError(f"numpy computes no {config.rope.kind.value} positions")
        half = config.head_size // 2
        self.speeds = config.rope.theta ** (-np.arange(half) / half)
        self.layers = range(job.order.layers.start, job.order.layers.end)
        self.weights: dict[str, Array] = {}
        names = [f"model.layers.{layer}." for layer in self.layers]
        names += ["model.embed_tokens."] if self.layers.start == 0 else []
        self.head = ""
        if job.order.is_tail:
            tied = config.tie_word_embeddings
            self.head = "model.embed_tokens.weight" if tied else "lm_head.weight"
            names += ["model.norm.", self.head]
        wanted = [name for name in job.checkpoint.tensors if name.startswith(tuple(names))]
        for n_done, name in enumerate(wanted, start=1):
            self.weights[name] = job.checkpoint.read(name, torch.float32).float().numpy()
            job.progress(n_done, len(wanted))

    def embed(self, token_ids: Sequence[int]) -> Array:
        """Look tokens up: [T, E]."""
        return self.weights["model.embed_tokens.weight"][list(token_ids)]

    def layer(self, layer: int, rows: Array, past: Array) -> tuple[Array, Array]:
        """Return rows [T, E] after one layer, and keys and values [2, N + T, H, D] with theirs.

        `past` has the keys and values of the N positions before them.
        """
        prefix, start = f"model.layers.{layer}.", past.shape[1]
        normed = self.norm(rows, prefix + "input_layernorm")
        query, key, value = (
            self.linear(normed, f"{prefix}self_attn.{name}_proj").reshape(
                len(rows), -1, self.config.head_size
            )
            for name in "qkv"
        )
        kept = np.concatenate([past, np.stack([self.rotate(key, start), value])], axis=1)
        groups = query.shape[1] // self.config.n_kv_heads
        keys, values = np.repeat(kept, groups, axis=2)
        scores = (
            np.einsum("thd,nhd->htn", self.rotate(query, start), keys) / self.config.head_size**0.5
        )
        hidden = np.arange(keys.shape[0]) > start + np.arange(len(rows))[:, None]
        scores = np.where(hidden, -np.inf, scores)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("htn,nhd->thd", scores / scores.sum(-1, keepdims=True), values)
        rows = rows + self.linear(attended.reshape(len(rows), -1), prefix + "self_attn.o_proj")
        normed = self.norm(rows, prefix + "post_attention_layernorm")
        gate = self.linear(normed, prefix + "mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * self.linear(normed, prefix + "mlp.up_proj")
        return rows + self.linear(inner, prefix + "mlp.down_proj"), kept

    def linear(self, rows: Array, name: str) -> Array:
        """Multiply rows by a matrix."""
        multiplied: Array = rows @ self.weights[f"{name}.weight"].T
        return multiplied

    def norm(self, rows: Array, name: str) -> Array:
        """Divide rows by their root mean square."""
        size = np.square(rows).mean(-1, keepdims=True) + np.float32(self.config.norm_eps)
        normed: Array = rows / np.sqrt(size) * self.weights[f"{name}.weight"]
        return normed

    def rotate(self, heads: Array, start: int) -> Array:
        """Rotate heads [T, H, D] by their positions."""
        angles = (start + np.arange(len(heads)))[:, None, None] * self.speeds
        first, second = np.split(heads, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return np.concatenate(turned, axis=-1).astype(np.float32)

    # --- what shardnet's own sampling asks of the last stage

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply final norm and LM head: float32 [R, V]."""
        return torch.from_numpy(self.normed(rows).numpy() @ self.weights[self.head].T)

    def normed(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the final norm."""
        return torch.from_numpy(self.norm(rows.numpy(), "model.norm"))


class NumpyCompute:
    """A `StageCompute`: who owns which slot, and what the slots hold."""

    def __init__(self, model: Llama, job: StageJob, room_blocks: int) -> None:
        self.model = model
        self.sent = self.received = WireDType.own(job.order.form.dtype)
        self.room_blocks = room_blocks
        self.owners: dict[SlotId, OpenSequence] = {}
        self.slots: dict[SlotId, list[Array]] = {}
        """Keys and values of each layer, [2, N, H, D]."""
        self.tail = job.sampler and SamplingStage(model, job.sampler, self.owners)

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """See `StageCompute`."""
        self.sent, self.received = sent, received

    @property
    def used_blocks(self) -> int:
        """See `StageCompute`."""
        return sum(blocks_for(layers[0].shape[1]) for layers in list(self.slots.values()))

    def reset(self) -> None:
        """See `StageCompute`."""
        self.owners.clear()
        self.slots.clear()
        if self.tail:
            self.tail.clear()

    def operate(self, operation: SlotOperation) -> None:
        """See `StageCompute`. What is said of a slot that somebody else owns is ignored."""
        match operation:
            case OpenSequence(slot=slot, n_kept=n_kept, source=source):
                self.owners[slot] = operation
                self.keep(slot, n_kept, source)
            case CloseSequence(sequence_id=sequence_id, slot=slot, n_kept=n_kept):
                if slot in self.owners and self.owners[slot].sequence_id == sequence_id:
                    del self.owners[slot]
                    self.keep(slot, n_kept, None)
            case FreeSlot(slot=slot):
                if slot not in self.owners:
                    self.keep(slot, 0, None)

    def keep(self, slot: SlotId, n_positions: int, source: SlotId | None) -> None:
        """Keep the first positions of a slot, its own or copied from `source`."""
        held = self.slots.pop(slot, []) if source is None else self.slots.get(source, [])
        if n_positions:
            self.slots[slot] = [layer[:, :n_positions] for layer in held]
        if self.tail:
            self.tail.keep(slot, n_positions, source)

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        """See `StageCompute`."""
        if activations is None:
            rows = self.model.embed(batch.token_ids)
        else:
            width = self.model.config.hidden_size
            if (activations.dtype, activations.width) != (self.received, width):
                raise RemoteProtocolError(f"step {batch.step} came in another form than ordered")
            cpu = torch.device("cpu")
            hidden = unpack_rows(
                activations.payload, activations.dtype, batch.n_rows, activations.width, cpu
            )
            rows = hidden.float().numpy()
        parts, start = [], 0
        for group in batch.groups:
            owner = self.owners.get(group.slot)
            if owner is None or owner.sequence_id != group.sequence_id:
                raise RemoteProtocolError(f"slot {group.slot} is not that sequence's")
            parts.append(self.run(group, rows[start : start + group.n_rows]))
            start += group.n_rows
        hidden = torch.from_numpy(np.concatenate(parts) if parts else rows)
        if self.tail:
            return self.tail.answer(batch, hidden)
        payload = pack_rows(hidden, self.sent)
        return Activations(payload=payload, dtype=self.sent, width=hidden.shape[1])

    def run(self, group: RowGroup, rows: Array) -> Array:
        """Run the layers over the rows of one sequence; what was at their positions is replaced."""
        held = self.slots.get(group.slot)
        if held is None:
            empty = np.zeros(
                (2, 0, self.model.config.n_kv_heads, self.model.config.head_size), np.float32
            )
            held = [empty] * len(self.model.layers)
        n_positions = group.position + group.n_rows
        n_added = blocks_for(n_positions) - blocks_for(held[0].shape[1])
        if self.used_blocks + n_added > self.room_blocks:
            raise CapacityError(f"there is no room for {n_positions} positions")
        kept = []
        for layer, past in zip(self.model.layers, held, strict=True):
            rows, positions = self.model.layer(layer, rows, past[:, : group.position])
            kept.append(positions)
        self.slots[group.slot] = kept
        return rows


def block_bytes(model: Llama) -> int:
    """Return the bytes of a block of 256 positions in all layers: float32 keys and values."""
    return 4 * 2 * POSITIONS * model.config.n_kv_heads * model.config.head_size * len(model.layers)


def load(job: StageJob) -> PluggedStage:
    """Load a stage. Raises UnsupportedModelError, CapacityError."""
    order, form = job.order, job.order.form
    if form.quant or order.n_streamed or form.kv_dtype != "auto":
        raise UnsupportedModelError("numpy computes with whole weights and keys in memory only")
    model = Llama(job)
    weight_bytes = sum(weights.nbytes for weights in model.weights.values())
    room_blocks = (job.memory_bytes - weight_bytes) // block_bytes(model)
    if room_blocks < blocks_for(form.context):
        raise CapacityError("the stage and one context do not fit", remedy="lower --context")
    return PluggedStage(
        compute=NumpyCompute(model, job, room_blocks),
        weight_bytes=weight_bytes,
        room_blocks=room_blocks,
        kernel="numpy",
    )


NUMPY = ComputePlugin(name="numpy", description="numpy", dtypes=(DType.FLOAT32,), load=load)
