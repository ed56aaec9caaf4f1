"""Control messages about a household: several models at one address, each with a ring of its own.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of how
memory is divided, nor how a ring is built.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from shardnet.types import PathText, Report, TaggedReport
from shardnet.wire.framing import schema
from shardnet.wire.messages.plans import ModelChoice

MAX_HOUSEHOLD: Final = 64
"""Models of one household."""

HOUSEHOLD_STORE: Final = "household"
"""Where lists say that a model is which was given its name in a household."""

ModelState = Literal["unloaded", "waiting", "loading", "loaded", "lost"]


class HouseholdModel(Report, frozen=True, kw_only=True):
    """A model of a household: clients ask for its `name` and get what `choice` says.

    The more important one, by `priority`, is loaded first and stays longer; one that is `kept` is
    loaded at once and not unloaded for others. One that no request has used for `idle_s` seconds is
    unloaded, never for null. There is to be memory for `parallel` texts of its context. It uses the
    nodes called `only`, [] for any.
    """

    name: schema.Name
    choice: ModelChoice
    priority: schema.Priority = 0
    kept: bool = False
    idle_s: schema.Seconds | None = None
    parallel: Annotated[int, Meta(ge=1, le=256)] = 1
    only: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)] = []


class RunnerShare(Report, frozen=True, kw_only=True):
    """What one node has for a model of the household: at most `memory_bytes`, and which layers."""

    name: schema.Name
    memory_bytes: schema.Count
    layers: schema.Layers | None = None


class HouseholdModelState(Report, frozen=True, kw_only=True):
    """How a model of the household is: what it waits for (`why`), and where it is (`shares`).

    `n_requests` run or wait on its ring, which `predicted_tok_s` was predicted of; `n_waiting` wait
    for the ring. It was asked for last `idle_s` seconds ago.
    """

    model: HouseholdModel
    state: ModelState
    why: schema.Explanation = ""
    shares: Annotated[list[RunnerShare], Meta(max_length=schema.MAX_STAGES)] = []
    n_requests: schema.Count = 0
    n_waiting: schema.Count = 0
    predicted_tok_s: schema.Figure | None = None
    idle_s: schema.Seconds = 0.0


class OpenRunner(schema.Numbered, frozen=True, kw_only=True):
    """Have a node run one further node in its process, for the household's model called `model`.

    Its stages take at most `memory_bytes`, and it knows the runners at `peers`. Where there is one
    for that model it gets these; null asks which there is. A request that it is sent is for
    `choice`. Answered by RunnerOpened.
    """

    model: schema.Name
    choice: ModelChoice
    memory_bytes: schema.Count | None
    peers: schema.Addresses = []


class RunnerOpened(schema.Reply, frozen=True, kw_only=True):
    """Answers OpenRunner: the id of the runner, where it listens, "" for none, and what it has."""

    node: schema.Name
    address: schema.Address
    memory_bytes: schema.Count


class MakeRoom(schema.Numbered, frozen=True, kw_only=True):
    """Have models of the household unloaded until the sender has `free_bytes` for `model`.

    That is an encoder of the household. Answered by Done.
    """

    model: schema.Name
    free_bytes: schema.Count


class LedModel(Report, frozen=True, kw_only=True):
    """A model that the leader of a household loads for those who ask; `address` is where its ring
    is asked, "" while it has none. One that is an encoder has no ring, and is asked for by what
    `encoder` says.
    """

    model: HouseholdModel
    address: schema.Address = ""
    encoder: PathText = ""


class HouseholdLed(TaggedReport, frozen=True, kw_only=True):
    """The sender leads the household of these models. Sent to each peer, and at changes.

    Of two who say so the one with the higher `term` leads, of equal ones that with the larger id.
    """

    term: schema.Count
    models: Annotated[list[LedModel], Meta(max_length=MAX_HOUSEHOLD)]


class ListHousehold(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the household. Answered by HouseholdListed, or Redirect to the node that leads it."""


class HouseholdListed(schema.Reply, frozen=True, kw_only=True):
    """Answers ListHousehold: the most important models first."""

    models: Annotated[list[HouseholdModelState], Meta(max_length=MAX_HOUSEHOLD)]


class NameModels(schema.Numbered, frozen=True, kw_only=True):
    """Have the household have these models, and not those called `dropped`.

    A node leads the household that it was first told so, where none leads one. Answered by Done, or
    Redirect to the node that leads.
    """

    models: Annotated[list[HouseholdModel], Meta(max_length=MAX_HOUSEHOLD)] = []
    dropped: Annotated[list[schema.Name], Meta(max_length=MAX_HOUSEHOLD)] = []


HouseholdRequest: TypeAlias = OpenRunner | MakeRoom | ListHousehold | NameModels
"""Requests about the household."""
HouseholdMessage: TypeAlias = HouseholdRequest | RunnerOpened | HouseholdListed | HouseholdLed
"""These, their answers, and what is sent unasked."""
