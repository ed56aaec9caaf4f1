"""`shardnet serve`: the model of the ring over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Annotated

import typer

from shardnet import __version__
from shardnet.api.serve.server import serving
from shardnet.cluster.machine.addresses import LOOPBACK_HOST
from shardnet.errors import ShardnetError
from shardnet.transport.address import split_address

from ..finding.target import Target, open_target
from ..flags.cluster_access import Access
from ..flags.http_options import HttpOptions
from ..flags.option_groups import takes_groups
from ..flags.options import Json, PrefixCache, parse_prefix_cache
from ..flags.ring_options import RingOptions, Wanted
from ..output.exit_codes import counted, run_command, say, write_out
from .node import stop_signal

DEFAULT_PORT = 8000


@takes_groups
def serve(
    *,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="H",
            help="Address to listen on; another than loopback needs --api-key.",
        ),
    ] = LOOPBACK_HOST,
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="Port to listen on; 0 takes a free one."
        ),
    ] = DEFAULT_PORT,
    http: HttpOptions,
    ring: RingOptions,
    prefix_cache: PrefixCache = "",
    access: Access,
    as_json: Json = False,
) -> None:
    """Serve the model over HTTP, as OpenAI's API and Ollama's; Ctrl-C ends it.

    Asks the nodes of --nodes or --local, else the node of this machine, else the nearest one found
    on the network; without any, the model runs in this process. Prints one line when it is ready.
    """
    wanted = replace(ring.wanted(access), prefix_cache_bytes=parse_prefix_cache(prefix_cache))
    run_command(_run(host, port, http, wanted, as_json=as_json))


async def _run(host: str, port: int, http: HttpOptions, wanted: Wanted, *, as_json: bool) -> None:
    listening = http.listening(host, port)
    stopping = stop_signal(until_stdin_closes=False)
    async with open_target(wanted) as target:
        target.client.choice = target.choice
        async with serving(target.client, listening) as url:
            if as_json:
                _write_ready(target, url)
            else:
                n_keys = len(listening.settings.keys)
                keys = counted(n_keys, "API key") if n_keys else "no API key"
                write_out(f"serving {target.choice.model} at {url}/v1 ({keys})")
            loading = asyncio.create_task(_load(target))
            await stopping.wait()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
    if not as_json:
        say("server stopped")


async def _load(target: Target) -> None:
    """Have the ring built before the first request comes."""
    try:
        await target.client.tokenize("Hello")
    except ShardnetError as error:
        say(f"warning: {target.choice.model} cannot be served now: {error}")
    else:
        say(f"{target.choice.model} is loaded")


def _write_ready(target: Target, url: str) -> None:
    host, port = split_address(url.partition("://")[2].partition("/")[0])
    ready = {
        "event": "ready",
        "url": url,
        "host": host,
        "port": port,
        "pid": os.getpid(),
        "model": target.choice.model,
        "version": __version__,
    }
    write_out(json.dumps(ready))
