"""People and programs: the client of a ring. docs/api.md shows how it is used.

Imports no torch: the work is done where the nodes are.
"""

from shardnet.api.client import Client
from shardnet.api.events import (
    Generation,
    GenerationEvent,
    GenerationResult,
    LikelyToken,
    RequestState,
    StageTime,
    Timing,
    TokenLogprob,
    Usage,
)
from shardnet.api.opening import connect, in_process, local_ring
from shardnet.api.requests import GenerationOptions, Prompt
from shardnet.types import SamplingParams
from shardnet.wire.control import ModelChoice

__all__ = [
    "Client",
    "Generation",
    "GenerationEvent",
    "GenerationOptions",
    "GenerationResult",
    "LikelyToken",
    "ModelChoice",
    "Prompt",
    "RequestState",
    "SamplingParams",
    "StageTime",
    "Timing",
    "TokenLogprob",
    "Usage",
    "connect",
    "in_process",
    "local_ring",
]
