"""Collects the facts that `shardnet doctor` judges, from this machine and the nodes.

Knows which nodes to ask for what, each within a deadline. Must not judge or print. Imports no
torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardnet import __version__
from shardnet.api.client import Client, connect, dial
from shardnet.api.connections import key_path
from shardnet.cluster.diagnosis.facts import Answered, Facts, KeyFacts, ModelAsked, port_of
from shardnet.cluster.machine.addresses import NODE_PORT
from shardnet.cluster.machine.kernels import are_built
from shardnet.cluster.machine.local_nodes import LocalNode
from shardnet.cluster.machine.profile import make_host_id
from shardnet.cluster.machine.virtual_networks import look_at_networks
from shardnet.cluster.machine.windows_system import read_windows_system
from shardnet.cluster.peers.rtt_probe import HANDSHAKE_S, ProbeAnswer, probe_address
from shardnet.cluster.planning.placing import unmeasured
from shardnet.cluster.planning.ring_dtypes import settle_dtype
from shardnet.errors import ShardnetError
from shardnet.runtime.loading.measuring import read_config
from shardnet.runtime.loading.model_facts import ModelFacts, identify_at
from shardnet.threads import DaemonThreads
from shardnet.wire.framing.frames import PROTOCOL_VERSION
from shardnet.wire.messages.diagnostics import AddressView, MdnsRecord
from shardnet.wire.messages.membership import ReportReply

if TYPE_CHECKING:  # not every command needs the libraries behind them
    from shardnet.cluster.discovery.service_browser import NodeRecord
    from shardnet.transport.identity import Identity

ANSWER_S: Final = 3.0
"""Deadline for connecting to all addresses together, and for reading a checkpoint's headers."""

Browse = Callable[[], Awaitable[list["NodeRecord"]]]
"""Looks for nodes by mDNS for a second or so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSources:
    """Where facts come from. `identity` is made of the key that `key` describes, None without one.

    `here` are the nodes of this machine, `named` addresses (host:port) to try; `browse` looks for
    others by mDNS if no node runs here (None: do not). `model` is a path, "" for none.
    `timeout_s` bounds the wait for reports, in seconds. Unknown keys of the model's config count as
    a problem unless `ignore_unknown_config`.
    """

    key: KeyFacts
    identity: Identity | None
    here: Sequence[LocalNode]
    named: Sequence[str]
    browse: Browse | None
    model: str
    timeout_s: float
    ignore_unknown_config: bool = False


async def gather_facts(sources: FactSources) -> Facts:
    """Collect the facts. Raises no ShardnetError: a node that does not answer is itself a fact.

    Ends within `timeout_s` plus the deadlines for connecting (ANSWER_S) and browsing.
    """
    # A node without a key hears its own machine alone.
    is_blind = not (sources.here and sources.key.fingerprint)
    here, named, found, asked_model, networks, system = await asyncio.gather(
        _probe_addresses([node.address for node in sources.here], sources.identity),
        _probe_addresses(sources.named, sources.identity),
        _found(sources, is_wanted=is_blind),
        _look_at(sources.model, ignore_unknown_config=sources.ignore_unknown_config),
        look_at_networks(os.environ),
        read_windows_system(),
    )
    answers = [answer for _, answer in (*here, *named) if answer is not None]
    if not answers and found:
        answers = await _first_found(found, sources)
    replies: list[ReportReply] = []
    failure = ""
    if answers:
        replies, failure = await _ask(answers[0].address, sources, with_peers=True)
    if found is None:
        found = await _found(sources, is_wanted=not any(_has_peers(reply) for reply in replies))
    unknown = _unknown([answer for _, answer in named if answer is not None], answers, replies)
    for answer in unknown:
        replies += (await _ask(answer.address, sources, with_peers=False))[0]
    return Facts(
        key=sources.key,
        software=__version__,
        protocol=PROTOCOL_VERSION,
        asked=f"{answers[0].name} ({answers[0].address})" if answers else "",
        asked_node=answers[0].node if answers else "",
        is_asked_here=any(answer is not None for _, answer in here),
        failure=failure,
        replies=tuple(replies),
        deaf=tuple(view for view, answer in here if answer is None),
        named=tuple(view for view, _ in named),
        unknown=tuple(Answered(node=a.node, name=a.name, address=a.address) for a in unknown),
        found=found,
        model=_model_asked(asked_model, replies, sources),
        has_kernels=are_built(),
        networks=networks,
        windows=system,
        ports=tuple(sorted({port_of(node.address) for node in sources.here})) or (NODE_PORT,),
    )


async def facts_of(client: Client, timeout_s: float) -> Facts:
    """Collect the facts that the node of `client` and its peers report, within `timeout_s`.

    Raises no ShardnetError. What shows from this machine alone is left out: addresses, mDNS.
    """
    replies, failure = await client.reports(timeout_s, probe=True)
    own = next((reply for reply in replies if reply.clock_ahead_s is None and reply.report), None)
    cluster = own.report.cluster if own is not None and own.report is not None else ""
    is_here = own is None or own.info is None or own.info.host_id == make_host_id()
    return Facts(
        key=KeyFacts(path=str(key_path("")), fingerprint=cluster),
        software=__version__,
        protocol=PROTOCOL_VERSION,
        asked=f"{own.name} ({client.address})" if own is not None else client.address,
        asked_node=own.node if own is not None else "",
        is_asked_here=is_here,
        failure=failure,
        replies=tuple(replies),
    )


def _has_peers(reply: ReportReply) -> bool:
    return reply.report is not None and bool(reply.report.peers)


def _unknown(
    named: Sequence[ProbeAnswer], answers: Sequence[ProbeAnswer], replies: Sequence[ReportReply]
) -> list[ProbeAnswer]:
    """Return the named nodes that answered and that the asked one is not linked to."""
    known = {answers[0].node if answers else "", *(reply.node for reply in replies)}
    unknown = {answer.node: answer for answer in named if answer.node not in known}
    return list(unknown.values())


async def _probe_addresses(
    addresses: Sequence[str], identity: Identity | None
) -> list[tuple[AddressView, ProbeAnswer | None]]:
    dial_as_client = partial(dial, identity=identity, handshake_s=HANDSHAKE_S)
    return list(
        await asyncio.gather(*(probe_address(address, dial_as_client) for address in addresses))
    )


async def _found(sources: FactSources, *, is_wanted: bool) -> tuple[MdnsRecord, ...] | None:
    """Browse for nodes by mDNS if that is wanted; None without it."""
    if not is_wanted or sources.browse is None:
        return None
    return tuple(
        MdnsRecord(
            node=candidate.node,
            name=candidate.name,
            version=candidate.version,
            protocol=candidate.protocol,
            cluster=candidate.fingerprint,
            address=candidate.addresses[0],
        )
        for candidate in await sources.browse()
    )


async def _first_found(found: Sequence[MdnsRecord], sources: FactSources) -> list[ProbeAnswer]:
    """Connect to the nodes of this cluster that mDNS found; return those that answer."""
    members = [r.address for r in found if r.cluster == sources.key.fingerprint]
    answers = await _probe_addresses(members, sources.identity)
    return [answer for _, answer in answers if answer is not None]


async def _ask(
    address: str, sources: FactSources, *, with_peers: bool
) -> tuple[list[ReportReply], str]:
    """Return the reports of a node and its peers, and the failure that cut them short, or ""."""
    try:
        async with connect(address, sources.identity) as client:
            return await client.reports(
                sources.timeout_s, probe=True, with_peers=with_peers, model=sources.model
            )
    except ShardnetError as error:
        return [], str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalModel:
    """The checkpoint at --model on this machine, or why it cannot be read."""

    model: str
    facts: ModelFacts | None = None
    failure: str = ""
    remedy: str = ""


async def _look_at(model: str, *, ignore_unknown_config: bool) -> _LocalModel | None:
    if not model:
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            looking = DaemonThreads(1, "shardnet-look").submit(
                partial(identify_at, model, ignore_unknown_config=ignore_unknown_config)
            )
            facts = await asyncio.wrap_future(looking)
            return _LocalModel(model=model, facts=facts)
    except ShardnetError as error:
        return _LocalModel(model=model, failure=error.message, remedy=error.remedy)
    except TimeoutError:
        return _LocalModel(model=model, failure=f"its files were not read within {ANSWER_S:g} s")


def _model_asked(
    looked: _LocalModel | None, replies: Sequence[ReportReply], sources: FactSources
) -> ModelAsked | None:
    """Return the model and the nodes as a plan with no flag sees them.

    What is not on this machine is what the first of the nodes means by that name that has it; how
    that is packed is not known.
    """
    if looked is None:
        return None
    facts = looked.facts or _of_node(looked.model, replies, sources)
    if facts is None:
        return ModelAsked(model=looked.model, failure=looked.failure, remedy=looked.remedy)
    infos = [reply.info for reply in replies if reply.info is not None]
    shape, candidates = unmeasured(facts, infos)
    return ModelAsked(
        model=looked.model,
        model_id=facts.model_id,
        shape=shape,
        held={candidate.node: candidate.held(shape) for candidate in candidates},
        dtype=settle_dtype("auto", facts.config, infos),
    )


def _of_node(model: str, replies: Sequence[ReportReply], sources: FactSources) -> ModelFacts | None:
    """Return what the first node that has a model tells of it, None where none has it."""
    for reply in replies:
        if reply.report is not None and reply.report.model_config:
            with contextlib.suppress(ShardnetError):
                config = read_config(
                    reply.report.model_config,
                    f"{model} on {reply.name}",
                    ignore_unknown_config=sources.ignore_unknown_config,
                )
                return ModelFacts(
                    model_id=reply.report.model_id,
                    path=Path(model),
                    config=config,
                    config_text=reply.report.model_config,
                    stamp=(),
                    is_complete=False,
                    linear_dtype=config.checkpoint_dtype,
                )
    return None
