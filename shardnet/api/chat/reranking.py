"""How well documents answer a query: by an encoder, or by a causal model's logits of yes and no.

Knows the conversation that Qwen3-Reranker was trained on. Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import exp
from typing import Final, Protocol

from shardnet.api.chat.run import ChatGenerator
from shardnet.api.embedding import EncoderClient, encode, results_of
from shardnet.api.requests import GenerationOptions, Message, Prompt
from shardnet.errors import RemoteProtocolError
from shardnet.output_params import OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.generation import Encode
from shardnet.wire.messages.plans import ModelChoice

INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_ANSWERS: Final = ("yes", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Document number `index`: an encoder's score, or the logit of yes above that of no.

    `n_prompt` are the tokens of the document with its query.
    """

    index: int
    logit: float
    n_prompt: int

    @property
    def score(self) -> float:
        """How well it answers, from 0 to 1: of a causal model the probability of yes."""
        return 1 / (1 + exp(min(-self.logit, 700.0)))


class RankGenerator(ChatGenerator, EncoderClient, Protocol):
    """What chats, and asks encoders."""


async def rerank(
    generator: RankGenerator,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str = INSTRUCTION,
    truncate: bool = True,
    model: ModelChoice,
) -> AsyncGenerator[Scored, None]:
    """Yield the score of each document as it comes: in any order.

    An encoder knows no instruction, and cuts what is too long if it is to `truncate`. Closing the
    iterator cancels the others. Raises the first error of any document.
    """
    encoder = await generator.encode(Encode(request=0, model=model.model))
    if encoder.kind:
        asked = Encode(request=0, model=model.model, query=query, truncate=truncate)
        async with aclosing(encode(generator, asked, documents)) as encoded:
            async for one in encoded:
                yield Scored(index=one.index, logit=float(one.values[0]), n_prompt=one.n_tokens)
        return
    ids = [await _first_id(generator, answer, model) for answer in _ANSWERS]
    options = GenerationOptions(
        max_tokens=0,
        outputs=OutputParams(logit_rows=1),
        template_options={"enable_thinking": False},  # where reasoning would be, there is none
    )
    prompts = [Prompt(conversation(query, document, instruction)) for document in documents]
    events = generator.generate(prompts, SamplingParams(), model=model, **options)
    async with aclosing(results_of(events, "document", len(documents))) as results:
        async for result in results:
            if result.logits is None or result.logits.n_rows != 1:
                raise RemoteProtocolError("the head's answer has no logits of the last token")
            [row] = result.logits.array()
            yield Scored(
                index=result.index,
                logit=float(row[ids[0]]) - float(row[ids[1]]),
                n_prompt=result.usage.n_prompt,
            )


def conversation(query: str, document: str, instruction: str) -> list[Message]:
    """Return the question whether a document answers a query."""
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]


async def _first_id(generator: ChatGenerator, text: str, model: ModelChoice) -> int:
    told = await generator.tokenize(text, model=model, bos="off")
    return told.token_ids[0]
