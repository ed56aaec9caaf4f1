"""Announce an HTTP server by mDNS, for programs that look for one ([server](server.md)).

Knows service types, TXT keys, and when to announce again. Must not know what is served.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from zeroconf import DNSQuestionType
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from shardnet import __version__
from shardnet.cluster.discovery.service_browser import MAX_HOSTS, open_mdns
from shardnet.cluster.machine.addresses import is_loopback, rank, reachable_hosts, read_interfaces

TYPES: Final = ("_http._tcp.local.", "_ollama._tcp.local.")
"""The second one is in no register: it is what programs browse for that know Ollama's API."""
SECURE_TYPES: Final = ("_https._tcp.local.",)
ALWAYS: Final = {"auth": "1", "api": "openai,anthropic,ollama", "product": "shardnet"}
MAX_NAME_BYTES: Final = 58
"""Of 63, since a name that is taken gets a number."""
PROBE_S: Final = 1.5
"""How long an answer from who has a name may take: it waits a second after it was last given."""
LOOK_S: Final = 30.0
"""How often the addresses of this machine are read again."""


class HttpServer(NamedTuple):
    """A server at the IP address `host`, of the machine or node `name`, with a page at `path`."""

    name: str
    host: str
    port: int
    path: str
    is_secure: bool = False

    def hosts(self) -> tuple[str, ...]:
        """Return the addresses at which other machines reach it now, () where none does."""
        hosts = reachable_hosts(self.host, rank(read_interfaces()))[:MAX_HOSTS]
        return tuple(host for host in hosts if not is_loopback(host))

    async def register(self, zeroconf: AsyncZeroconf, hosts: Sequence[str]) -> str:
        """Announce one record of each type, under a name that nobody has; return the first one's.

        The library would ask for unicast, which other programs of this machine may get instead.
        """
        kinds = SECURE_TYPES if self.is_secure else TYPES
        plain = f"shardnet on {self.name.replace('.', '-')}".encode()[:MAX_NAME_BYTES]
        name, number = plain.decode(errors="ignore"), 1
        while await AsyncServiceInfo(kinds[0], f"{name}.{kinds[0]}").async_request(
            zeroconf.zeroconf, PROBE_S * 1000, DNSQuestionType.QM
        ):
            number += 1
            name = f"{plain.decode(errors='ignore')}-{number}"
        own = {"txtvers": "1", "path": self.path, "tls": str(int(self.is_secure))}
        server = f"shardnet-{secrets.token_hex(6)}.local."
        records = [
            AsyncServiceInfo(
                kind,
                f"{name}.{kind}",
                port=self.port,
                parsed_addresses=[host.partition("%")[0] for host in hosts],
                server=server,
                properties=own | ALWAYS | {"version": __version__},
            )
            for kind in kinds
        ]
        sent = [
            await zeroconf.async_register_service(record, cooperating_responders=True)
            for record in records
        ]
        await asyncio.gather(*sent)  # each is sent several times
        return records[0].name.removesuffix(".")


async def announce(
    server: HttpServer, interfaces: Sequence[str], log: Callable[[str], None]
) -> None:
    """Announce a server until cancelled, and withdraw its records then.

    Where its addresses change it is announced anew. Multicast goes to `interfaces`, addresses of
    this machine, without any to all that lead to the server. `log` is told under which name it is
    announced, or why it is not, each once.
    """
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            log(line)
        said.add(line)

    while True:
        while not (hosts := server.hosts()):  # noqa: ASYNC110  no event tells of addresses
            await asyncio.sleep(LOOK_S)
        try:
            async with open_mdns(interfaces or hosts) as zeroconf:
                say(f"announced by mDNS as {await server.register(zeroconf, hosts)}")
                while server.hosts() == hosts:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except (OSError, ZeroconfError) as error:
            say(
                f"warning: mDNS does not work here ({error}), so programs do not find this server: "
                "give them its address, or give --no-mdns to hide this warning"
            )
            await asyncio.sleep(LOOK_S)
