"""A decoder that makes vectors or scores, computed whole by layers of our own, as by a ring.

Weights stay as they are stored. Must not know threads, nor who asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.formats.gguf import ANSWERS, ANSWERS_HEAD
from shardnet.checkpoint.formats.gguf_types import PLAIN, unpack
from shardnet.checkpoint.tensors.stored_tensor import FileState, damaged, read_stored
from shardnet.errors import CheckpointError
from shardnet.model.kernels.linear import probe
from shardnet.runtime.encoding.encoder import (
    Dense,
    EncoderInput,
    Step,
    finished,
    memory_for,
    pooled,
)
from shardnet.runtime.encoding.encoder_facts import MAX_TOGETHER, EncoderFacts
from shardnet.runtime.encoding.judge import Answers, Judge
from shardnet.runtime.encoding.sentence_modules import Pooling
from shardnet.runtime.loading.model_facts import check_model_id
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    DType,
    Epoch,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A loaded decoder, in the place of an Encoder. Not thread-safe."""

    facts: EncoderFacts
    stage: StageModel
    dense: Sequence[Dense]
    judge: Judge | None
    """How documents are judged, None where vectors are made."""
    head: torch.Tensor | None = None
    """The rows [2, E] of the LM head for yes and no, where a file has these apart; float32."""

    def forward(
        self, inputs: Sequence[EncoderInput], pooling: Pooling, step: Step = lambda: None
    ) -> NDArray[np.float32]:
        """Compute float32 [inputs, width] of vectors, or [inputs, 1] of scores.

        As `Encoder.forward`, and raises the same. `step` is called before each chunk.
        """
        given = [one.token_ids for one in inputs]
        with memory_for(self.facts):
            states = [one for texts in _together(given) for one in self._states(texts, step)]
            if self.judge is not None:
                return finished(self.facts, self._scores(states, self.judge.answers), ())
            vectors = [self._vector(one, pooling) for one in states]
            return finished(self.facts, torch.cat(vectors), self.dense)

    def _vector(self, states: torch.Tensor, pooling: Pooling) -> torch.Tensor:
        """Pool hidden states [T, E] to float32 [1, E]."""
        rows = self.stage.normed(states[-1:] if pooling == "last" else states)[None].float()
        return pooled(rows, torch.ones_like(rows[:, :, 0]).long(), pooling)

    def _scores(self, states: Sequence[torch.Tensor], answers: Answers) -> torch.Tensor:
        """Return by how much each text's last token says yes rather than no: float32 [texts, 1]."""
        last = torch.cat([one[-1:] for one in states])
        if self.head is not None:
            logits = self.stage.normed(last).float() @ self.head.T
            return logits[:, :1] - logits[:, 1:]
        yes, no = answers
        if max(yes, no or 0) >= self.stage.vocab_size:
            raise CheckpointError(f"{self.facts.path}: its answers {answers} are no tokens")
        logits = self.stage.logits(last)
        scores = logits[:, yes] if no is None else logits[:, yes] - logits[:, no]
        return scores[:, None]

    def _states(self, texts: Sequence[Sequence[int]], step: Step) -> list[torch.Tensor]:
        """Return hidden states [T, E] of texts, before the final norm.

        They are short ones, of one chunk together, or one of any length.
        """
        most = max(map(len, texts))
        chunks = []
        try:
            for start in range(0, most, PREFILL_CHUNK_ROWS):
                step()
                rows = [text[start : start + PREFILL_CHUNK_ROWS] for text in texts]
                chunks.append(self.stage.run(_batch(rows, start), None).clone())
        finally:
            for slot in range(len(texts)):
                self.stage.kv.free(SlotId(slot))
        lengths = [len(text) for text in texts]
        return [*torch.split(torch.cat(chunks), lengths)]


def _batch(rows: Sequence[Sequence[int]], start: int) -> MicroBatch:
    """Make a batch of the tokens from position `start` on of texts, each in a slot of its own."""
    groups = tuple(
        RowGroup(
            sequence_id=SequenceId(slot),
            slot=SlotId(slot),
            position=start,
            n_rows=len(own),
            n_sampled=0,
        )
        for slot, own in enumerate(rows)
    )
    token_ids = [token_id for own in rows for token_id in own]
    return MicroBatch(epoch=Epoch(0), step=StepId(0), groups=groups, token_ids=token_ids)


def _together(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Divide texts, in their order: what fits into one chunk is computed at once."""
    some: list[Sequence[int]] = []
    for text in texts:
        n_rows = len(text) + sum(map(len, some))
        if some and (n_rows > PREFILL_CHUNK_ROWS or len(some) == MAX_TOGETHER):
            yield some
            some = []
        some.append(text)
    if some:
        yield some


def load_decoder(
    facts: EncoderFacts, device: str, judge: Judge | None = None, step: Step = lambda: None
) -> Decoder:
    """Load a decoder onto a torch device; with a `judge` it gives scores. Blocks.

    `step` is called between tensors.
    Raises CheckpointError if its files have changed or do not make the model, CapacityError if
    memory runs out.
    """
    checkpoint = Checkpoint.open(facts.path, ignore_unknown_config=True)  # they are looked at
    check_model_id(facts.path, checkpoint.model_id, facts.model_id)
    own, place = checkpoint.config.checkpoint_dtype, torch.device(device)
    stage = load_stage(
        checkpoint,
        LayerRange(0, checkpoint.config.n_layers),
        choice=probe(place, own or DType.FLOAT32, own),
        device=place,
        room_blocks=facts.room_blocks,
        context=facts.context,
        progress=lambda done, total: step(),
    )
    with memory_for(facts):
        dense = [Dense(layer, place) for layer in facts.modules.dense]
        head = _answers_head(checkpoint, place) if judge is not None else None
    return Decoder(facts=facts, stage=stage, dense=dense, judge=judge, head=head)


def _answers_head(checkpoint: Checkpoint, device: torch.device) -> torch.Tensor | None:
    """Read the rows of the LM head for yes and no, [2, E] in float32; None where none are apart.

    Raises CheckpointError for another shape, or if the file is damaged.
    """
    source = checkpoint.stored.get(ANSWERS_HEAD)
    if source is None:
        return None
    shape = (len(ANSWERS), checkpoint.config.hidden_size)
    if source.shape != shape:
        raise damaged(f"{checkpoint.path}: {ANSWERS_HEAD} is {source.shape}, not {shape}")
    opened = FileState.of(checkpoint.folder / source.file)
    raw = read_stored(checkpoint.folder, source, opened)
    values = raw if source.dtype in PLAIN else unpack(raw, source.dtype, shape, torch.float32)
    return values.to(device, torch.float32)
