"""Identity: what is derived from the key, and who is refused, with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.servers.proxy import Proxy
from support.transport_harness import HARNESSES, OPTIONS, Harness, hello

from shardnet.errors import (
    AuthenticationError,
    LinkClosedError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
)
from shardnet.transport.identity import (
    Identity,
    certificate,
    derive_authority_key,
    make_authority,
    make_identity,
    make_leaf,
)
from shardnet.transport.link import Link, LinkOptions
from shardnet.transport.listener import Listener
from shardnet.transport.tcp import connect, listen
from shardnet.wire.framing.frames import PREAMBLE, Frame, FrameKind

LOCAL = "127.0.0.1"
OTHER = make_identity(b"another cluster!")


@pytest.fixture(params=["tls-asyncio", "tls-uvloop"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return HARNESSES[request.param]


async def keep(link: Link) -> None:
    """A handler that leaves the link to the test."""


def holding(identity: Identity | None) -> LinkOptions:
    return replace(OPTIONS, identity=identity)


# --- what is derived


def test_equal_keys_give_the_same_authority_byte_for_byte() -> None:
    first, second = (make_authority(derive_authority_key(b"k" * 16)) for _ in range(2))
    other = make_authority(derive_authority_key(b"l" * 16))
    encoding = serialization.Encoding.DER
    assert first.public_bytes(encoding) == second.public_bytes(encoding)
    assert first.public_bytes(encoding) != other.public_bytes(encoding)


def test_a_leaf_names_nobody_and_is_valid_by_any_clock() -> None:
    key = derive_authority_key(b"k" * 16)
    leaf = make_leaf(make_authority(key), key, Ed25519PrivateKey.generate())
    assert leaf.subject.rfc4514_string() == "CN=shardnet node"
    assert leaf.not_valid_before_utc.year == 2000
    assert leaf.not_valid_after_utc.year == 9999


def test_the_certificates_pass_the_strict_checks_of_newer_pythons() -> None:
    """Python 3.13 asks for these extensions, critical where the standard says so."""
    key = derive_authority_key(b"k" * 16)
    authority = make_authority(key)
    leaf = make_leaf(authority, key, Ed25519PrivateKey.generate())
    for made, is_authority in ((authority, True), (leaf, False)):
        extensions = made.extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints)
        usage = extensions.get_extension_for_class(x509.KeyUsage)
        assert constraints.critical
        assert constraints.value.ca is is_authority
        assert usage.critical
        assert usage.value.key_cert_sign is is_authority
        extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        issuer = extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        expected = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
        assert issuer.key_identifier == expected.digest


def test_links_come_up_under_strict_verification(harness: Harness) -> None:
    strict = make_identity(bytes(16))
    for context in (strict.server, strict.client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN

    async def scenario(harness: Harness) -> None:
        listener = await harness.listen(keep)
        link = await connect(LOCAL, listener.port, hello(), options=holding(strict))
        await link.close()

    harness.run(scenario)


def test_the_leafs_private_key_stays_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    make_identity(b"k" * 16)
    assert list(tmp_path.iterdir()) == []


# --- who is refused


class Reported:
    """A listener that is never to give a link, and what it reports."""

    def __init__(self) -> None:
        self.errors: asyncio.Queue[ShardnetError] = asyncio.Queue()
        self.listener: Listener

    @property
    def port(self) -> int:
        return self.listener.port

    @classmethod
    async def listen(cls, harness: Harness, options: LinkOptions = OPTIONS) -> Reported:
        async def never(link: Link) -> None:
            raise AssertionError(f"{link.peer.node} came in")

        reported = cls()
        reported.listener = await harness.listen(never, reported.errors.put_nowait, options)
        return reported


def foreign_context(
    maximum_version: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED,
) -> ssl.SSLContext:
    """A client that takes any server and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = maximum_version
    return context


def self_signed_context(tmp_path: Path) -> ssl.SSLContext:
    """A client that shows a certificate of an authority of its own with our authority's name."""
    key = Ed25519PrivateKey.generate()
    leaf_key = Ed25519PrivateKey.generate()
    leaf = make_leaf(make_authority(key), key, leaf_key)
    path = tmp_path / "chain.pem"
    path.write_bytes(
        leaf.public_bytes(serialization.Encoding.PEM)
        + leaf_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = foreign_context()
    context.load_cert_chain(path)
    return context


async def read_all(port: int, context: ssl.SSLContext | None, sent: bytes) -> bytes:
    """Connect, send, and give what comes back until the end of the connection."""
    reader, writer = await asyncio.open_connection(LOCAL, port, ssl=context)
    writer.write(sent)
    try:
        return await reader.read()
    finally:
        writer.transport.abort()


def test_another_key_is_refused_by_both_sides_by_name(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        match = f"^{LOCAL}:{reported.port}: it holds another cluster key; .* join --replace`"
        with pytest.raises(AuthenticationError, match=match):
            await connect(LOCAL, reported.port, hello(), options=holding(OTHER))
        error = await reported.errors.get()
        assert isinstance(error, AuthenticationError)
        assert "it holds another cluster key" in str(error)

    harness.run(scenario)


def test_a_client_without_a_key_is_refused_and_told_why(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        match = "the peer speaks TLS.* this side holds none; run `shardnet key join` here"
        with pytest.raises(AuthenticationError, match=match):
            await connect(LOCAL, reported.port, hello(), options=holding(None))
        error = await reported.errors.get()
        assert isinstance(error, AuthenticationError)
        assert "it has no cluster key; run `shardnet key join` there" in str(error)

    harness.run(scenario)


def test_a_node_without_a_key_is_named_by_a_client_with_one(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        errors: asyncio.Queue[ShardnetError] = asyncio.Queue()
        plain = await listen(
            LOCAL, 0, hello("b"), keep, on_failure=errors.put_nowait, options=OPTIONS
        )
        match = f"{LOCAL}:{plain.port}: it has no cluster key; run `shardnet key join` there"
        with pytest.raises(AuthenticationError, match=match):
            await connect(LOCAL, plain.port, hello(), options=holding(OTHER))
        assert "the peer speaks TLS" in str(await errors.get())
        await plain.close()

    harness.run(scenario)


@pytest.mark.parametrize("sent", [b"SSH-2.0-something\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_something_else_behind_the_port_is_named(harness: Harness, sent: bytes) -> None:
    async def scenario(harness: Harness) -> None:
        left = asyncio.Event()

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(sent)
            await reader.read()
            writer.transport.abort()
            left.set()

        server = await asyncio.start_server(speak, LOCAL, 0)
        port = server.sockets[0].getsockname()[1]
        match = f"{LOCAL}:{port}: it does not speak TLS; check the address and port"
        with pytest.raises(AuthenticationError, match=match):
            await connect(LOCAL, port, hello(), options=holding(OTHER))
        await left.wait()
        server.close()
        await server.wait_closed()

    harness.run(scenario)


def test_a_client_without_a_certificate_is_refused(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            await read_all(reported.port, foreign_context(), PREAMBLE)
        assert "it showed no certificate" in str(await reported.errors.get())

    harness.run(scenario)


def test_a_certificate_of_another_authority_with_the_same_name_is_refused(
    harness: Harness, tmp_path: Path
) -> None:
    """This client takes any server, so that it is the server's check that refuses it."""

    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        with pytest.raises(ssl.SSLError, match=r"UNKNOWN_CA|DECRYPT_ERROR|BAD_CERTIFICATE"):
            await read_all(reported.port, self_signed_context(tmp_path), PREAMBLE)
        assert "it holds another cluster key" in str(await reported.errors.get())

    harness.run(scenario)


def test_a_link_that_trusts_us_though_we_do_not_trust_it_is_told(harness: Harness) -> None:
    """Its handshake has succeeded on its own side: only the missing hello tells."""
    trusting = make_identity(b"another cluster!")
    trusting.client.verify_mode = ssl.CERT_NONE

    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        match = "it refuses our certificate: it holds another cluster key"
        with pytest.raises(AuthenticationError, match=match):
            await connect(LOCAL, reported.port, hello(), options=holding(trusting))
        assert isinstance(await reported.errors.get(), AuthenticationError)

    harness.run(scenario)


def test_tls_1_2_is_refused(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        old = foreign_context(ssl.TLSVersion.TLSv1_2)
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            await read_all(reported.port, old, PREAMBLE)
        assert "it does not speak TLS 1.3" in str(await reported.errors.get())

    harness.run(scenario)


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (PREAMBLE, "it has no cluster key"),
        (b"GET / HTTP/1.1\r\n\r\n", "it does not speak TLS; it is no node of this cluster"),
        (bytes(100_000), "it does not speak TLS; it is no node of this cluster"),
        (b"\x16\x03\x01\x40\x00" + bytes(20_000), "the TLS handshake failed"),
        (b"\x16\x03\x01\xff\xff" + bytes(100_000), "the TLS handshake failed"),
        (b"\x15\x03\x03\x00\x02\x02\x74", "the TLS handshake failed"),
    ],
    ids=["plain", "http", "zeros", "no client hello", "too long a record", "an alert"],
)
def test_what_is_no_tls_is_refused_before_our_protocol_begins(
    harness: Harness, sent: bytes, what: str
) -> None:
    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # what was not read is of no use
            received = await read_all(reported.port, None, sent)
        assert received == b"" or (received[0] == 0x15 and len(received) == 7)  # one alert
        error = await reported.errors.get()
        assert isinstance(error, AuthenticationError)
        assert str(error).startswith(f"{LOCAL}:")
        assert what in str(error)

    harness.run(scenario)


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_handshake_that_is_not_finished_is_given_up(harness: Harness, sent: bytes) -> None:
    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness, replace(OPTIONS, handshake_s=0.1))
        assert await read_all(reported.port, None, sent) == b""
        assert isinstance(await reported.errors.get(), PeerSilentError)

    harness.run(scenario)


@pytest.mark.parametrize(
    ("sent", "what"), [(b"", "and said nothing"), (b"\x16\x03", "during the TLS handshake")]
)
def test_a_client_that_leaves_during_the_handshake(
    harness: Harness, sent: bytes, what: str
) -> None:
    async def scenario(harness: Harness) -> None:
        reported = await Reported.listen(harness)
        _, writer = await asyncio.open_connection(LOCAL, reported.port)
        writer.write(sent)
        writer.close()
        error = await reported.errors.get()
        assert isinstance(error, LinkClosedError)
        assert what in str(error)

    harness.run(scenario)


def test_a_stranger_is_reported_once_and_a_member_is_served_meanwhile(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        errors: list[ShardnetError] = []
        listener = await harness.listen(keep, errors.append)
        for _ in range(5):
            with pytest.raises(AuthenticationError):
                await connect(LOCAL, listener.port, hello(), options=holding(OTHER))
        member = await harness.connect(listener)
        await member.close()
        assert len(errors) == 1

    harness.run(scenario)


# --- what travels


def test_nothing_readable_travels(harness: Harness) -> None:
    """Everything both sides send passes a proxy that keeps it."""
    secret = b"a very secret prompt"

    async def scenario(harness: Harness) -> None:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        listener = await harness.listen(accepted.put)
        seen = bytearray()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(LOCAL, listener.port)
            await asyncio.gather(relay(reader, far_writer), relay(far_reader, writer))

        server = await asyncio.start_server(between, LOCAL, 0)
        port = server.sockets[0].getsockname()[1]
        identity = harness.identity
        link = await connect(LOCAL, port, hello("known"), options=holding(identity))
        link.send(Frame(kind=FrameKind.DATA, meta=secret, payload=secret * 5000))
        received = await (await accepted.get()).receive()
        assert bytes(received.payload) == secret * 5000
        await link.close()
        server.close()
        await server.wait_closed()
        assert len(seen) > 100_000
        for readable in (secret, PREAMBLE[:6], b"known"):
            assert readable not in seen

    harness.run(scenario)


def test_a_changed_byte_ends_the_link_by_name(harness: Harness) -> None:
    async def scenario(harness: Harness) -> None:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        listener = await harness.listen(accepted.put)
        with Proxy(LOCAL, listener.port) as proxy:
            link = await connect(LOCAL, proxy.port, hello(), options=holding(harness.identity))
            far = await accepted.get()
            proxy.garble()
            link.send(Frame(kind=FrameKind.TOKENS, step=1))
            with pytest.raises(RemoteProtocolError, match="the encrypted stream is damaged"):
                await far.receive()
            with pytest.raises(RemoteProtocolError, match=r"damaged .*ALERT_"):
                await link.receive()
            await asyncio.gather(link.close(), far.close())

    harness.run(scenario)


def test_a_stream_that_is_cut_off_is_no_goodbye(harness: Harness) -> None:
    """Whoever sits between may end the connection below TLS; it is not taken for a clean end."""

    async def scenario(harness: Harness) -> None:
        accepted: asyncio.Queue[Link] = asyncio.Queue()
        listener = await harness.listen(accepted.put)
        link = await harness.connect(listener)
        far = await accepted.get()
        link._transport._tcp.write_eof()  # type: ignore[attr-defined]
        with pytest.raises(LinkClosedError, match="without saying goodbye"):
            await far.receive()
        await asyncio.gather(link.close(), far.close())

    harness.run(scenario)


# --- two keys, and clocks


def shake_hands(acceptor: Identity, initiator: Identity) -> tuple[bytes, bytes] | None:
    """Shake hands in memory; return by which keys initiator and acceptor came, None if refused."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        initiator.client.wrap_bio(back, there),
        acceptor.server.wrap_bio(there, back, server_side=True),
    ]
    try:
        for end in (*ends, *ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError:
        return None
    initiator_is, acceptor_is = (end.getpeercert(binary_form=True) for end in reversed(ends))
    assert initiator_is is not None
    assert acceptor_is is not None
    return Identity.signer_of(initiator_is), Identity.signer_of(acceptor_is)


@pytest.mark.parametrize("is_strict", [False, True])
def test_who_holds_two_keys_is_believed_by_holders_of_either(is_strict: bool) -> None:
    old, new = b"o" * 16, b"n" * 16
    sides = {"old": make_identity(old), "both": make_identity(new, old), "new": make_identity(new)}
    if is_strict:
        for side in sides.values():
            side.server.verify_flags |= ssl.VERIFY_X509_STRICT
            side.client.verify_flags |= ssl.VERIFY_X509_STRICT
    for one, other in product(sides, sides):
        shown = sides[one].signer, sides[other].signer
        met = shake_hands(sides[other], sides[one])
        assert met == (None if {one, other} == {"old", "new"} else shown), (one, other)
        assert shake_hands(OTHER, sides[one]) is shake_hands(sides[one], OTHER) is None
    assert sides["both"].fingerprints == (sides["new"].fingerprint, sides["old"].fingerprint)
    assert sides["both"].fingerprint == sides["old"].fingerprint


@pytest.mark.parametrize("years", [(2000, 2001), (2999, 9999)])
def test_no_clock_keeps_members_apart(
    years: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dates that are over, or still to come, as where a board without a clock starts in 1970."""
    begin, end = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in years)
    monkeypatch.setattr(certificate, "__defaults__", (begin, end))
    member = make_identity(b"k" * 16)
    assert shake_hands(member, member) == (member.signer, member.signer)
