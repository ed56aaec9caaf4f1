"""A checkup: collects the facts that `shardnet doctor` judges, from this machine and the nodes.

Knows which nodes to ask for what, each within a deadline. Must not judge, nor print. Imports no
torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from shardnet import __version__
from shardnet.api.client import connect, dial
from shardnet.cluster.diagnosis.facts import Facts, KeyFacts, ModelAsked
from shardnet.cluster.head.model_shape import model_shape
from shardnet.cluster.head.ring_dtypes import settle_dtype
from shardnet.cluster.machine.local_nodes import LocalNode
from shardnet.cluster.peers.address_diagnosis import HANDSHAKE_S, probe_address
from shardnet.cluster.peers.rtt_probe import ProbeAnswer
from shardnet.errors import ShardnetError
from shardnet.runtime.stage.loading import ModelFacts, identify_at
from shardnet.wire.framing.frames import PROTOCOL_VERSION
from shardnet.wire.messages.diagnostics import AddressView, RecordSeen
from shardnet.wire.messages.membership import NodeInfo, ReportReply

if TYPE_CHECKING:  # not every command needs the libraries behind them
    from shardnet.cluster.discovery.node_record import NodeRecord
    from shardnet.transport.identity import Identity

ANSWER_S: Final = 3.0
"""Deadline for connecting to all addresses together, and for reading a checkpoint's headers."""

Browse = Callable[[], Awaitable[list["NodeRecord"]]]
"""Looks for nodes by mDNS for a second or so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What to check. `identity` is made of the key that `key` describes, None without one.

    `here` are the nodes of this machine, `named` addresses (host:port) to try, `browse` looks for
    others by mDNS where no node runs here (None: do not). `model` is a path, "" for none.
    `timeout_s` bounds the wait for reports, in seconds.
    """

    key: KeyFacts
    identity: Identity | None
    here: Sequence[LocalNode]
    named: Sequence[str]
    browse: Browse | None
    model: str
    timeout_s: float


async def gather(checkup: Checkup) -> Facts:
    """Collect the facts. Raises nothing: a node that does not answer is a fact of its own.

    Ends within `timeout_s` plus the deadlines for connecting (ANSWER_S) and browsing.
    """
    here, named, found, asked_model = await asyncio.gather(
        _probe_addresses([node.address for node in checkup.here], checkup.identity),
        _probe_addresses(checkup.named, checkup.identity),
        _found(checkup),
        _look_at(checkup.model),
    )
    answers = [answer for _, answer in (*here, *named) if answer is not None]
    if not answers and found:
        answers = await _first_found(found, checkup)
    replies: list[ReportReply] = []
    failure = ""
    if answers:
        replies, failure = await _ask(answers[0].address, checkup)
    infos = [reply.info for reply in replies if reply.info is not None]
    return Facts(
        key=checkup.key,
        software=__version__,
        protocol=PROTOCOL_VERSION,
        asked=f"{answers[0].name} ({answers[0].address})" if answers else "",
        failure=failure,
        replies=tuple(replies),
        deaf=tuple(view for view, answer in here if answer is None),
        named=tuple(view for view, _ in named),
        found=found,
        model=_model_asked(asked_model, infos),
    )


async def _probe_addresses(
    addresses: Sequence[str], identity: Identity | None
) -> list[tuple[AddressView, ProbeAnswer | None]]:
    dial_as_client = partial(dial, identity=identity, handshake_s=HANDSHAKE_S)
    return list(
        await asyncio.gather(*(probe_address(address, dial_as_client) for address in addresses))
    )


async def _found(checkup: Checkup) -> tuple[RecordSeen, ...] | None:
    """Browse for nodes by mDNS where no node runs here; None where that was not done."""
    if checkup.here or checkup.browse is None:
        return None
    return tuple(
        RecordSeen(
            node=candidate.node,
            name=candidate.name,
            version=candidate.version,
            protocol=candidate.protocol,
            cluster=candidate.fingerprint,
            address=candidate.addresses[0],
        )
        for candidate in await checkup.browse()
    )


async def _first_found(found: Sequence[RecordSeen], checkup: Checkup) -> list[ProbeAnswer]:
    """Connect to the nodes of this cluster that mDNS shows; return those that answer."""
    members = [r.address for r in found if r.cluster == checkup.key.fingerprint]
    answers = await _probe_addresses(members, checkup.identity)
    return [answer for _, answer in answers if answer is not None]


async def _ask(address: str, checkup: Checkup) -> tuple[list[ReportReply], str]:
    """Return the reports of a node and its peers that came in time, and the failure, if any."""
    replies: list[ReportReply] = []
    try:
        async with (
            asyncio.timeout(checkup.timeout_s),
            connect(address, checkup.identity) as client,
            aclosing(client.report(probe=True, with_peers=True, model=checkup.model)) as answers,
        ):
            async for reply in answers:
                replies.append(reply)
    except ShardnetError as error:
        return replies, str(error)
    except TimeoutError:
        return replies, f"it took longer than {checkup.timeout_s:g} s"
    return replies, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalModel:
    """What this machine has at the path of the model that was named."""

    model: str
    facts: ModelFacts | None = None
    failure: str = ""
    remedy: str = ""


async def _look_at(model: str) -> _LocalModel | None:
    if not model:
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            return _LocalModel(model=model, facts=await asyncio.to_thread(identify_at, model))
    except ShardnetError as error:
        return _LocalModel(model=model, failure=error.message, remedy=error.remedy)
    except TimeoutError:
        return _LocalModel(model=model, failure=f"its files were not read within {ANSWER_S:g} s")


def _model_asked(looked: _LocalModel | None, infos: Sequence[NodeInfo]) -> ModelAsked | None:
    """Give the model's size in the dtype that these nodes would choose with --dtype auto."""
    if looked is None:
        return None
    if looked.facts is None:
        return ModelAsked(model=looked.model, failure=looked.failure, remedy=looked.remedy)
    config = looked.facts.config
    dtype = settle_dtype("auto", config, infos)
    return ModelAsked(
        model=looked.model,
        model_id=looked.facts.model_id,
        shape=model_shape(config, dtype, config.default_context),
        dtype=dtype,
    )
