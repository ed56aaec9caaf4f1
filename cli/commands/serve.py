"""`shardnet serve`: the model of the ring over HTTP."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from shardnet import __version__
from shardnet.api.serve.server import serving
from shardnet.cluster.machine.addresses import LOOPBACK_HOST
from shardnet.errors import ShardnetError
from shardnet.transport.address import split_address

from ..finding.target import Target, open_target
from ..flags import options
from ..flags.http_options import HttpOptions
from ..flags.ring_options import RingOptions
from ..output.exit_codes import counted, say, write_out
from .node import stop_signal

DEFAULT_PORT = 8000


@options.takes_groups
async def serve(
    *,
    host: str = options.flag(
        LOOPBACK_HOST, "--host H", "Address to listen on; another than loopback needs --api-key."
    ),
    port: int = options.flag(
        DEFAULT_PORT, "--port N", "Port to listen on; 0 takes a free one.", min=0, max=65535
    ),
    http: HttpOptions,
    ring: RingOptions,
    prefix_cache: options.PrefixCache = "",
    access: options.Access,
    log_format: options.LogFormat = "",
    as_json: options.Json = False,
) -> None:
    """Serve the model over HTTP, as OpenAI's, Anthropic's and Ollama's API; Ctrl-C ends it.

    Asks the nodes of --nodes or --local, else the node of this machine, else the nearest one found
    on the network; without any, the model runs in this process. Prints one line when it is ready.
    """
    options.take_log_format(log_format)
    name = "" if ring.no_mdns else socket.gethostname()
    listening = http.listening(host, port, access, name)
    wanted = replace(
        ring.wanted(access), prefix_cache_bytes=options.parse_prefix_cache(prefix_cache)
    )
    household = http.household_models()
    async with open_target(wanted) as target:
        stopping = stop_signal(until_stdin_closes=False)  # before, Ctrl-C ends it as it does others
        target.client.choice, target.client.if_busy = target.choice, ""  # others ask here
        if household:
            await target.client.name_models(household)
            target.client.choice = replace_struct(target.choice, model=household[0].name)
        model = target.client.choice.model

        def loaded(error: ShardnetError | None) -> None:
            failure = f"warning: {model} cannot be served now: {error}"
            say(f"{model} is loaded" if error is None else failure)

        async with serving(target.client, listening, on_loaded=loaded) as url:
            if as_json:
                _write_ready(target, url)
            else:
                n_keys = len(listening.settings.keys)
                keys = counted(n_keys, "API key") if n_keys else "no API key"
                write_out(f"serving {model} at {url}/v1 ({keys})")
                say(f"dashboard: {url}/")
            await stopping.wait()
    if not as_json:
        say("server stopped")


def _write_ready(target: Target, url: str) -> None:
    host, port = split_address(url.partition("://")[2].partition("/")[0])
    ready = {
        "event": "ready",
        "url": url,
        "host": host,
        "port": port,
        "pid": os.getpid(),
        "model": target.client.choice.model,
        "version": __version__,
    }
    write_out(json.dumps(ready))
