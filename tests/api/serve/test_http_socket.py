"""The HTTP server on a socket: addresses, TLS, what cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import resource
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.cluster.scripted_node import ScriptedNode, client_of

from shardnet.api.serve import server
from shardnet.api.serve.authority import HttpAuthority, at_home, server_context
from shardnet.api.serve.server import serving
from shardnet.api.server import bodies
from shardnet.api.server.settings import Listening, Settings
from shardnet.errors import ConfigurationError
from shardnet.transport.identity import as_file


def certificate(folder: Path) -> tuple[str, str]:
    """Write a certificate of its own authority and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    day = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(day)
        .not_valid_after(day.replace(year=2099))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(form))
    (folder / "key.pem").write_bytes(
        key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_https_with_given_files(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)

    async def main() -> bytes:
        listening = Listening(host="127.0.0.1", port=0, certificate=cert, private_key=key)
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            assert url.startswith("https://127.0.0.1:")
            reader, writer = await asyncio.open_connection(
                "127.0.0.1",
                int(url.rpartition(":")[2]),
                ssl=ssl.create_default_context(cafile=cert),
                server_hostname="localhost",
            )
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            return answer

    assert b'"status":"ok"' in asyncio.run(main())


def test_what_strangers_ask_for_in_vain_is_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    """Java's client asks with each request for HTTP/2; others speak TLS, or nothing at all."""
    upgrade = b"Connection: close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA"

    async def main() -> None:
        listening = Listening(host="127.0.0.1", port=0)
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            for sent, status in (
                (b"GET /healthz HTTP/1.1\r\nHost: a\r\n" + upgrade + b"\r\n\r\n", b"200"),
                (b"\x16\x03\x01\r\n\r\n", b"400"),
            ):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", int(url.rpartition(":")[2])
                )
                writer.write(sent)
                assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
                writer.close()

    asyncio.run(main())
    assert capfd.readouterr().err == ""


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    empty = str(tmp_path / "empty.pem")

    async def begin(listening: Listening) -> None:
        async with client_of(ScriptedNode()) as client, serving(client, listening):
            pass

    async def main() -> None:
        wrong = Listening(host="127.0.0.1", port=0, certificate=empty, private_key=empty)
        with pytest.raises(ConfigurationError, match=r"empty\.pem cannot be used for TLS"):
            await begin(wrong)
        with pytest.raises(ConfigurationError, match="choose an address of this machine"):
            await begin(Listening(host="203.0.113.1", port=0))
        with pytest.raises(ConfigurationError, match="is no address of this machine"):
            await begin(Listening(host="nowhere.invalid", port=0))
        free = Listening(host="127.0.0.1", port=0)
        async with client_of(ScriptedNode()) as client, serving(client, free) as url:
            taken = int(url.rpartition(":")[2])
            with pytest.raises(ConfigurationError, match="choose another port"):
                await begin(Listening(host="127.0.0.1", port=taken))

    asyncio.run(main())


def test_half_handshakes_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in the same queue as half requests do, and end with the server."""
    monkeypatch.setattr(server, "HEADERS_S", 3.0)
    cert, key = certificate(tmp_path)
    lines: list[str] = []

    async def ended(*opened: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        async with asyncio.timeout(9):
            await asyncio.gather(*(one.read() for one, _ in opened), return_exceptions=True)
        for _, writer in opened:
            writer.transport.abort()

    async def main() -> None:
        settings = Settings(log=lines.append)
        listening = Listening(
            host="127.0.0.1", port=0, certificate=cert, private_key=key, settings=settings
        )
        context = ssl.create_default_context(cafile=cert)
        async with client_of(ScriptedNode()) as client, AsyncExitStack() as stack:
            url = await stack.enter_async_context(serving(client, listening))
            port = int(url.rpartition(":")[2])
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
            assert b'"text":"the owner asks"' in await asked(port, ssl=context)
            await ended(*opened[:36])  # more than 64 of one address
            await ended(*opened[36:])
            last = await asyncio.open_connection("127.0.0.1", port)
            await stack.aclose()
            await ended(last)

    asyncio.run(main())
    assert any("connections without a whole request" in line for line in lines)


HALF = b"GET /healthz HTTP/1.1\r\nHost: a"
WHOLE = HALF + b"\r\nConnection: close\r\n\r\n"


async def half_open(port: int, n: int, n_hosts: int) -> list[asyncio.StreamWriter]:
    """Open connections from so many addresses of this machine that send half a request each."""
    writers = []
    for number in range(n):
        here = (f"127.0.0.{2 + number % n_hosts}", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=here)
        writer.write(HALF)
        writers.append(writer)
    return writers


async def asked(port: int, **options: Any) -> bytes:
    """Ask for a text, which is the prompt."""
    host = {"server_hostname": "localhost"} if options else {}
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options, **host)
    body = b'{"prompt": "the owner asks"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: "
    writer.write(head + b"%d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return answer


def test_all_that_one_host_asks_at_once_is_answered() -> None:
    async def main() -> None:
        listening = Listening(host="127.0.0.1", port=0)
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            port = int(url.rpartition(":")[2])
            answers = await asyncio.gather(*(asked(port) for _ in range(200)))
            assert all(b'"text":"the owner asks"' in answer for answer in answers)

    asyncio.run(main())


@pytest.mark.parametrize("n_hosts", [1, 40])
def test_half_requests_keep_nobody_out(n_hosts: int) -> None:
    """A thousand of them, of one address or of many, and the owner is answered at once."""
    lines: list[str] = []

    async def main() -> None:
        listening = Listening(host="127.0.0.1", port=0, settings=Settings(log=lines.append))
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            port = int(url.rpartition(":")[2])
            writers = await half_open(port, 1000, n_hosts)
            async with asyncio.timeout(server.HEADERS_S / 2):  # before any half one is cut off
                assert b'"text":"the owner asks"' in await asked(port)
            for writer in writers:
                writer.transport.abort()

    with descriptors(2048):
        asyncio.run(main())
    assert any("connections without a whole request" in line for line in lines)


def test_who_sends_no_whole_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.3)
    monkeypatch.setattr(bodies, "BODY_S", 0.3)

    async def main() -> None:
        listening = Listening(host="127.0.0.1", port=0)
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            port = int(url.rpartition(":")[2])
            for sent in (b"", HALF, WHOLE.replace(b"Connection: close\r\n", b"") + HALF):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(sent)
                with contextlib.suppress(ConnectionResetError):
                    async with asyncio.timeout(10):
                        await reader.read()
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
            writer.write(head)
            async with asyncio.timeout(10):
                assert b"HTTP/1.1 408" in await reader.read()
            writer.close()

    asyncio.run(main())


def test_a_connection_is_kept_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than one may take to send its headers, which count from its first byte on."""
    monkeypatch.setattr(server, "HEADERS_S", 0.3)
    whole = WHOLE.replace(b"Connection: close\r\n", b"")

    async def main() -> None:
        listening = Listening(host="127.0.0.1", port=0)
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(whole)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                [length] = re.findall(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.8):
                        await reader.read(1)
            writer.write(HALF)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    assert not await reader.read()
            writer.close()

    assert server.KEPT_S > 60
    asyncio.run(main())


@contextlib.contextmanager
def descriptors(n: int) -> Iterator[None]:
    """Let this process have so many files and sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        pytest.skip(f"needs {n} descriptors, {hard} may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Shake hands in memory. Raises ssl.SSLCertVerificationError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=name)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (ours, theirs, ours, theirs):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    ours.do_handshake()


def test_https_by_the_clusters_authority() -> None:
    """Who trusts the authority reaches the machine by its names and addresses, without a file."""
    secret = bytes(range(16))
    trusting = ssl.create_default_context(cadata=HttpAuthority(secret).certificate().decode())

    async def main() -> bytes:
        listening = Listening(host="127.0.0.1", port=0, cluster_secret=secret)
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            assert url.startswith("https://127.0.0.1:")
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(url.rpartition(":")[2]), ssl=trusting
            )
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer

    assert b'"status":"ok"' in asyncio.run(main())
    addresses = ["192.168.7.9", "8.8.8.8"]
    server = server_context(HttpAuthority(secret), lambda: addresses, now, "Attic.example.org")
    for name in ("attic.local", "attic.home.arpa", "localhost", "192.168.7.9"):
        shake(server, trusting, name)
    for name in ("attic.example.org", "8.8.8.8", "192.168.7.10"):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
            shake(server, trusting, name)
    addresses[0] = "192.168.7.10"  # DHCP gave it another one
    shake(server, trusting, "192.168.7.10")
    other = ssl.create_default_context(cadata=HttpAuthority(bytes(16)).certificate().decode())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server, other, "attic.local")


def test_the_authority_speaks_for_home_alone() -> None:
    """Whoever has the cluster key can pose as no bank to those who trust the authority."""
    authority = HttpAuthority(bytes(16))
    trusting = ssl.create_default_context(cadata=authority.certificate().decode())
    for name in ("bank.example", "8.8.8.8", "notlocal"):
        assert not at_home(name)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with as_file(authority.leaf([name], now())) as path:
            server.load_cert_chain(path)
        with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
            shake(server, trusting, name)
