"""`shardnet models`: the models that this machine and its peers have."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.wire.messages.membership import ModelsListed
from shardnet.wire.messages.plans import ModelChoice

from ..finding.target import open_target
from ..flags.cluster_access import Access
from ..flags.option_groups import takes_groups
from ..flags.options import (
    Json,
    ModelFolder,
    Nodes,
    NoMdns,
    Peer,
    check_addresses,
    keep_model_folders,
    split_nodes,
)
from ..flags.ring_options import Wanted
from ..output.columns import terminal_width
from ..output.exit_codes import run_command, say, write_out
from ..output.model_table import model_lines, models_json, remarks


@takes_groups
def models(
    *,
    nodes: Nodes = "",
    peer: Peer = None,
    no_mdns: NoMdns = False,
    model_folder: ModelFolder = None,
    access: Access,
    as_json: Json = False,
) -> None:
    """List the models of the node that is asked and of its peers; --model takes every name.

    They are looked for in the caches of Hugging Face and shardnet, in Ollama's and LM Studio's
    stores, and in --model-folder. Part of a name is enough for --model where it means one of them.
    Whether a model fits is estimated from the memory of the nodes together. What cannot be used is
    listed on standard error, with the reason.
    """
    keep_model_folders(model_folder)
    wanted = Wanted(
        choice=ModelChoice(model=DEFAULT_MODEL_NAME, nodes=split_nodes(nodes)),
        local=0,
        peers=check_addresses(peer),
        mdns=not no_mdns,
        access=access,
    )
    run_command(_run(wanted, as_json))


async def _run(wanted: Wanted, as_json: bool) -> None:
    lists: list[ModelsListed] = []
    async with open_target(wanted) as target, aclosing(target.client.models()) as pieces:
        async for piece in pieces:
            lists.append(piece)
    if as_json:
        write_out(msgspec.json.encode(models_json(lists)).decode())
        return
    for line in model_lines(lists, terminal_width()):
        write_out(line)
    for line in remarks(lists):
        say(line)
