"""The HTTP server on a socket: addresses, TLS, what cannot be used."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.cluster.scripted_node import ScriptedNode, client_of

from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening
from shardnet.errors import ConfigurationError


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
