"""A request that another node goes on with: what shows that it does."""

from __future__ import annotations

import pytest

from shardnet.api.events import ActiveRequest
from shardnet.api.requests import Request
from shardnet.api.running_request import Answer, RunningRequest
from shardnet.errors import LinkError
from shardnet.sampling_params import SamplingParams
from shardnet.types import LiveState
from shardnet.wire.messages.generation import Generate, StateChanged, TextPiece
from shardnet.wire.messages.plans import ModelChoice

CHOICE = ModelChoice(model="m")


@pytest.mark.parametrize(
    ("answer", "goes_on"),
    [
        (StateChanged(request=1, state=LiveState.QUEUED), True),
        (StateChanged(request=1, state=LiveState.RUNNING), True),
        (StateChanged(request=1, state=LiveState.RECOVERING), False),
        (TextPiece(request=1, text="a", token_ids=[1], tokens=["a"]), True),
        (LinkError("it is gone"), False),
    ],
    ids=["queued", "running", "recovering", "text", "lost"],
)
def test_what_shows_that_another_node_goes_on(answer: Answer, goes_on: bool) -> None:
    """From then on the next loss has the whole time again: a long prompt makes no text for long."""
    message = Generate(
        request=1, choice=CHOICE, sampling=SamplingParams(), prompt="a", max_tokens=9, key="k"
    )
    request = Request(index=0, sample=0, message=message)
    view = ActiveRequest(request_id=1, index=0, sample=0)
    running = RunningRequest(request=request, view=view, until_s=5.0)
    running.take(answer, "anna")
    assert (running.until_s is None) == goes_on
