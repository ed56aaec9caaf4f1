"""Embed texts: by an encoder, or from the hidden states after a model's final norm.

Knows how vectors are pooled, cut and normalised, and how much one message to an encoder holds. Must
not know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, TypeVar, Unpack, cast

import msgspec
from msgspec import structs

from shardnet.api.events import GenerationEvent, GenerationResult
from shardnet.api.generation import Generator
from shardnet.api.requests import GenerationOptions, Prompt
from shardnet.errors import ContextExceededError, NumericalError, RemoteProtocolError, UsageError
from shardnet.output_params import ALL_ROWS, OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.tokenizers.token_table import Bos
from shardnet.wire.messages.generation import MAX_ENCODED, Encode, Encoded, Tokenized
from shardnet.wire.messages.plans import ModelChoice

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pooling: TypeAlias = Literal["last", "mean", "cls"]

MAX_VALUES: Final = 1 << 23
"""Most numbers in all vectors of one request together, 170 MB as JSON."""

_OUTPUTS: Final[dict[str, OutputParams]] = {
    "last": OutputParams(hidden_rows=1),
    "mean": OutputParams(hidden_rows=ALL_ROWS, hidden_mean=True),
}


PIECE_LENGTH: Final = 1 << 18
"""Most characters, or token ids, in one message; a longer text has a message of its own."""
GivenText = str | Sequence[int]
Text = TypeVar("Text", bound=GivenText)


class EncoderClient(Protocol):
    """A client of encoders, or a wrapper of one."""

    async def encode(self, message: Encode) -> Encoded:
        """Return vectors or scores as `shardnet.api.Client.encode` does."""


class EmbeddingGenerator(Generator, EncoderClient, Protocol):
    """A client that generates, tokenises, and asks encoders."""

    async def tokenize(
        self, prompt: str, *, model: ModelChoice, **options: Unpack[GenerationOptions]
    ) -> Tokenized:
        """Return a text's token ids as `shardnet.api.Client.tokenize` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How hidden states become vectors.

    `pooling`: the hidden state of the last token, of the first ("cls", encoders only), or the mean
    of all; None for the encoder's own pooling, else the last. `dimensions`: how many of the first
    numbers are kept, None for all; with `at_most` it may exceed the model's width. `normalized`:
    whether vectors are scaled to length 1; with None they are, unless an encoder's files say no and
    no number is cut off.
    """

    pooling: Pooling | None = None
    dimensions: int | None = None
    at_most: bool = False
    normalized: bool | None = None

    def n_kept(self, width: int, n_texts: int) -> int:
        """Return how many numbers of vectors of this `width` are kept.

        Raises UsageError for more `dimensions`, or more than MAX_VALUES numbers of all texts.
        """
        n_kept = width if self.dimensions is None else self.dimensions
        if n_kept > width and not self.at_most:
            raise UsageError(
                f"dimensions is {n_kept} and the model has {width} numbers", remedy="ask for fewer"
            )
        n_kept = min(n_kept, width)
        if n_kept * n_texts > MAX_VALUES:
            raise UsageError(
                f"{n_texts} texts with {n_kept} dimensions have more than {MAX_VALUES} numbers",
                remedy="send fewer texts at once",
            )
        return n_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The vector of text number `index`, float32 [dimensions], and the text's number of tokens."""

    index: int
    vector: NDArray[np.float32]
    n_prompt: int

    def as_json(self) -> list[float]:
        """Return what msgspec writes as the numbers; Python's own would take four times as much."""
        return cast("list[float]", msgspec.Raw(msgspec.json.encode(self.vector.tolist())))


async def embed(
    generator: EmbeddingGenerator,
    texts: Sequence[str] | Sequence[Sequence[int]],
    shape: Shape,
    *,
    model: ModelChoice,
    truncate: bool = False,
    **options: Unpack[GenerationOptions],
) -> AsyncGenerator[Embedding, None]:
    """Yield the vector of each text, or list of token ids, in the order of completion.

    With `truncate` texts that are too long are cut, and keep the special tokens at their end.
    Closing the iterator cancels the texts not done. Raises the first error of any text, what
    `Shape.n_kept` raises, NumericalError for a model that overflows.
    """
    encoder = await generator.encode(Encode(request=0, model=model.model))
    if encoder.kind:
        asked = Encode(
            request=0,
            model=model.model,
            pooling=shape.pooling or "",
            special_tokens=options.get("bos") != "off",
            truncate=truncate,
        )
        is_cut = encoder.width > shape.n_kept(encoder.width, len(texts))
        if shape.normalized is None:
            shape = replace(shape, normalized=is_cut or encoder.normalized)
        async with aclosing(encode(generator, asked, texts)) as encoded:
            async for one in encoded:
                yield _embedding(one.index, one.values, one.n_tokens, shape, len(texts))
        return
    if shape.pooling == "cls":
        raise UsageError("pooling cls is for encoders", remedy="ask for last or mean")
    given: Sequence[GivenText] = texts
    if truncate:
        given = await _cut(generator, texts, model, options.get("bos", "auto"))
    options = {**options, "max_tokens": 0, "outputs": _OUTPUTS[shape.pooling or "last"]}
    prompts = [Prompt(text) for text in given]
    events = generator.generate(prompts, SamplingParams(), model=model, **options)
    async with aclosing(results_of(events, "input", len(texts))) as results:
        async for result in results:
            states = _hidden_state(result)
            yield _embedding(result.index, states, result.usage.n_prompt, shape, len(texts))


async def _cut(
    generator: EmbeddingGenerator, texts: Sequence[GivenText], model: ModelChoice, bos: Bos
) -> list[GivenText]:
    """Tokenise texts and cut those longer than the context; special tokens at their end stay."""
    cut: list[GivenText] = []
    n_end = None
    for text in texts:
        if not isinstance(text, str):
            cut.append(text)
            continue
        told = await _tokenized(generator, text, model, bos)
        ids = told.token_ids
        if len(ids) > told.context:
            n_end = await _n_end(generator, model, bos) if n_end is None else n_end
            ids = [*ids[: told.context - n_end], *ids[len(ids) - n_end :]]
        cut.append(ids)
    return cut


async def _tokenized(
    generator: EmbeddingGenerator, text: str, model: ModelChoice, bos: Bos
) -> Tokenized:
    try:
        return await generator.tokenize(text, model=model, bos=bos)
    except ContextExceededError as error:
        if not error.n_prompt:
            raise
        # Refused by its length alone: `n_prompt` is a lower bound, so no longer text can fit.
        most = len(text) * error.n_context // error.n_prompt
        return await generator.tokenize(text[:most], model=model, bos=bos)


async def _n_end(generator: EmbeddingGenerator, model: ModelChoice, bos: Bos) -> int:
    """Count the special tokens that the tokenizer appends to each text."""
    whole = (await generator.tokenize("a", model=model, bos=bos)).token_ids
    bare = (await generator.tokenize("a", model=model, bos="off")).token_ids
    n_begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return len(whole) - n_begin - len(bare)


async def results_of(
    events: AsyncGenerator[GenerationEvent, None], what: str, n: int
) -> AsyncGenerator[GenerationResult, None]:
    """Yield the result of each of `n` prompts in the order of completion.

    Raises the first error; of several prompts it names the failed one by `what` and its number.
    """
    async with aclosing(events):
        async for event in events:
            if event.error is not None:
                which = f"{what} {event.index + 1} of {n}"
                raise event.error.at(which) if n > 1 else event.error
            if event.result is not None:
                yield event.result


def _hidden_state(result: GenerationResult) -> NDArray[np.float32]:
    """Return the one hidden state of a result. Raises RemoteProtocolError without it."""
    if result.hidden is None or result.hidden.n_rows != 1:
        raise RemoteProtocolError(
            "the head's answer has no hidden states of the input's last token"
        )
    states: NDArray[np.float32] = result.hidden.array()[0]
    return states


def _embedding(
    index: int, states: NDArray[np.float32], n_prompt: int, shape: Shape, n_texts: int
) -> Embedding:
    import numpy as np

    vector = states[: shape.n_kept(len(states), n_texts)]
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(length):
        raise NumericalError("the model computed hidden states that are no numbers")
    if shape.normalized is not False:
        vector = vector / np.float32(length or 1.0)
    return Embedding(index=index, vector=vector, n_prompt=n_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """An encoder's output for text number `index`, float32, and the text's number of tokens."""

    index: int
    values: NDArray[np.float32]
    n_tokens: int


async def encode(
    client: EncoderClient, message: Encode, texts: Sequence[GivenText]
) -> AsyncGenerator[EncodedText, None]:
    """Yield an encoder's output for each text, in order; `message` has the encoder and the options.

    Raises the error of the first text that fails.
    """
    index = 0
    for piece in _pieces(texts):
        answer = await client.encode(structs.replace(message, texts=piece, first=index))
        for values, n_tokens in zip(_rows(answer, len(piece)), answer.n_tokens, strict=True):
            yield EncodedText(index=index, values=values, n_tokens=n_tokens)
            index += 1


def _pieces(texts: Sequence[GivenText]) -> Iterator[list[str | list[int]]]:
    piece: list[str | list[int]] = []
    length = 0
    for text in texts:
        if piece and (len(piece) == MAX_ENCODED or length + len(text) > PIECE_LENGTH):
            yield piece
            piece, length = [], 0
        piece.append(text if isinstance(text, str) else list(text))
        length += len(text)
    if piece:
        yield piece


def _rows(answer: Encoded, n_texts: int) -> NDArray[np.float32]:
    """Return the values [texts, width]. Raises RemoteProtocolError for another number of them."""
    import numpy as np

    n_values = n_texts * answer.width
    if not n_values or len(answer.values) != 4 * n_values or len(answer.n_tokens) != n_texts:
        raise RemoteProtocolError(f"an encoder's answer has not the values of {n_texts} texts")
    return np.frombuffer(answer.values, "<f4").astype(np.float32).reshape(n_texts, answer.width)
