"""The Python client of a ring; docs/api.md shows its use.

Imports no torch: nodes compute.
"""

from shardnet.api.client import Client
from shardnet.api.connections import connect, in_process, local_ring
from shardnet.api.events import (
    ActiveRequest,
    GenerationEvent,
    GenerationResult,
    GenerationTiming,
    LikelyToken,
    RequestState,
    Routing,
    Rows,
    StageTime,
    TokenLogprob,
    Usage,
)
from shardnet.api.requests import GenerationOptions, Message, Prompt
from shardnet.constraints import Constraint
from shardnet.output_params import ALL_ROWS, OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.plans import ModelChoice

__all__ = [
    "ALL_ROWS",
    "ActiveRequest",
    "Client",
    "Constraint",
    "GenerationEvent",
    "GenerationOptions",
    "GenerationResult",
    "GenerationTiming",
    "LikelyToken",
    "Message",
    "ModelChoice",
    "OutputParams",
    "Prompt",
    "RequestState",
    "Routing",
    "Rows",
    "SamplingParams",
    "StageTime",
    "TokenLogprob",
    "Usage",
    "connect",
    "in_process",
    "local_ring",
]
