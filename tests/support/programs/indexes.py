"""Asks a server as LlamaIndex does; prints a line of JSON for each, as frameworks.py does."""

import json
import os
from importlib.metadata import version
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = os.environ["SHARDNET_URL"]


class Place(BaseModel):
    """What the model must answer with."""

    city: Literal["Bern", "Uri"]


llm = OpenAILike(
    model="tools",
    api_base=URL,
    api_key="one",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=99,
)
embedding = OpenAILikeEmbedding(model_name="tools", api_base=URL, api_key="one")
message = [ChatMessage(role="user", content="a")]
results = {
    "stream": "".join(part.delta or "" for part in llm.stream_chat(message))
    == llm.chat(message).message.content,
    "structured output": llm.as_structured_llm(Place).chat(message).raw.city,
    "embeddings": len(embedding.get_text_embedding("a")),
}
for what, result in results.items():
    print(json.dumps(["llama-index-core", version("llama-index-core"), what, result]))
