"""Asks a server as programs' frameworks do, each in its own way; prints a line of JSON for each.

Run by an interpreter that has the packages (tests/system/test_programs.py makes it). The variable
SHARDNET_URL is the server's address with /v1.
"""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal, TypedDict

import agents
import instructor
import litellm
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = os.environ["SHARDNET_URL"]
MODEL, KEY = "tools", "one"
LONG = "word " * 20_000


class Place(BaseModel):
    """What the model must answer with."""

    city: Literal["Bern", "Uri"]


def told(package: str, what: str, ask: Callable[[], Any]) -> None:
    """Print what came of a request, or the name of the error."""
    try:
        result = ask()
    except Exception as error:
        result = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps([package, version(package), what, result]), flush=True)


def litellm_overflow(provider: str, base: str) -> str:
    """Return the error that its fallbacks look for."""
    try:
        litellm.completion(
            model=f"{provider}/{MODEL}",
            api_base=base,
            api_key=KEY,
            messages=[{"role": "user", "content": LONG}],
        )
    except litellm.ContextWindowExceededError as error:
        return type(error).__name__
    return ""


def langchain_overflow() -> str:
    """Return the error at which its middleware shortens a conversation."""
    try:
        chat.invoke(LONG)
    except ContextOverflowError:
        return "ContextOverflowError"
    return ""


told("litellm", "overflow", lambda: litellm_overflow("openai", URL))
told("litellm", "overflow in Anthropic's form", lambda: litellm_overflow("anthropic", URL[:-3]))
told(
    "litellm",
    "rerank",
    lambda: len(
        litellm.rerank(
            model=f"jina_ai/{MODEL}",
            api_base=f"{URL}/rerank",
            api_key=KEY,
            query="a",
            documents=["b", "c"],
        ).results
    ),
)

chat = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_tokens=99)
told("langchain-openai", "overflow", langchain_overflow)
for method in ("json_schema", "function_calling"):
    told(
        "langchain-openai",
        method,
        lambda method=method: chat.with_structured_output(Place, method=method).invoke("a").city,
    )

plain = openai.OpenAI(base_url=URL, api_key=KEY)
told(
    "instructor",
    "response model",
    lambda: (
        instructor.from_openai(plain)
        .chat.completions.create(
            model=MODEL, response_model=Place, messages=[{"role": "user", "content": "a"}]
        )
        .city
    ),
)


class State(TypedDict, total=False):
    """What a graph hands on."""

    city: str


def graph_state() -> str:
    """Return what a graph of one step, which asks the model, ends with."""
    shaped = chat.with_structured_output(Place)
    graph = StateGraph(State)
    graph.add_node("ask", lambda state: {"city": shaped.invoke("a").city})
    graph.add_edge(START, "ask")
    return graph.compile().invoke({})["city"]


told("langgraph", "graph", graph_state)

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
told(
    "pydantic-ai-slim",
    "output type",
    lambda: Agent(model, output_type=Place).run_sync("a").output.city,
)

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=URL, api_key=KEY)
for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    agent = agents.Agent(
        name="a",
        instructions="Say a place.",
        model=kind(model=MODEL, openai_client=client),
        output_type=Place,
    )
    told(
        "openai-agents",
        kind.__name__,
        lambda agent=agent: agents.Runner.run_sync(agent, "a").final_output.city,
    )
