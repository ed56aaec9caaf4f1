"""A node's TLS identity, derived from the cluster key.

Knows certificates: every holder of the key derives the same authority and mints its own leaf in
memory at start. Must not know files of keys or links. Facts behind it: docs/security.md.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import ssl
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_BEGIN: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""Clocks at home are wrong, and who holds the key can mint any leaf: dates would buy nothing."""

_AUTHORITY_NAME: Final = "shardnet cluster"
_LEAF_NAME: Final = "shardnet node"
"""The same for every node: who connects without the key is shown a leaf, and may learn no more. A
node says who it is in its hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a node or client needs to speak to its cluster, and to nobody else.

    `fingerprint` names the cluster (16 hex digits) and reveals nothing of the key.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    fingerprint: str
    _wheel_key: bytes = field(repr=False)

    def wheel_proof(self, name: str, sha256: str) -> str:
        """Return what only holders of the key can say of a wheel, in hex."""
        return hmac.new(self._wheel_key, f"{name}\n{sha256}".encode(), hashlib.sha256).hexdigest()


def make_identity(secret: bytes) -> Identity:
    """Derive the authority from the cluster key's bytes and mint a leaf of our own."""
    authority_key = derive_authority_key(secret)
    authority = make_authority(authority_key)
    leaf_key = Ed25519PrivateKey.generate()
    leaf = make_leaf(authority, authority_key, leaf_key)
    with as_file(with_key(leaf, leaf_key)) as path:
        return Identity(
            server=_context(ssl.PROTOCOL_TLS_SERVER, authority, path),
            client=_context(ssl.PROTOCOL_TLS_CLIENT, authority, path),
            fingerprint=fingerprint(authority_key),
            _wheel_key=_derived(secret, b"wheels 1"),
        )


def derive_authority_key(secret: bytes) -> Ed25519PrivateKey:
    """Derive the private key of the cluster's certificate authority."""
    return Ed25519PrivateKey.from_private_bytes(_derived(secret, b"certificate authority 1"))


def _derived(secret: bytes, info: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=b"shardnet", info=info).derive(secret)


def fingerprint(authority_key: Ed25519PrivateKey) -> str:
    """Name the cluster: 16 hex digits of the SHA-256 of the authority's public key."""
    public = authority_key.public_key().public_bytes_raw()
    return hashlib.sha256(public).hexdigest()[:16]


def make_authority(key: Ed25519PrivateKey) -> x509.Certificate:
    """Make the authority's certificate: the same bytes on every node.

    Nothing in it is random, and Ed25519 signs without chance.
    """
    public = key.public_key()
    name = common_name(_AUTHORITY_NAME)
    return (
        certificate(name, name, 1)
        .public_key(public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, None)
    )


def make_leaf(
    authority: x509.Certificate, authority_key: Ed25519PrivateKey, key: Ed25519PrivateKey
) -> x509.Certificate:
    """Make a certificate by which the holder of `key` proves that it holds the cluster key."""
    public, issuer = key.public_key(), authority_key.public_key()
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        certificate(common_name(_LEAF_NAME), authority.subject, x509.random_serial_number())
        .public_key(public)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        .sign(authority_key, None)
    )


def _context(protocol: int, authority: x509.Certificate, chain_path: str) -> ssl.SSLContext:
    """TLS 1.3 only, both sides prove that they hold the key; names do not matter."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(
        cadata=authority.public_bytes(serialization.Encoding.PEM).decode()
    )
    context.load_cert_chain(chain_path)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a link is never resumed
    return context


def certificate(
    subject: x509.Name,
    issuer: x509.Name,
    serial: int,
    begin: datetime.datetime = _BEGIN,
    end: datetime.datetime = _END,
) -> x509.CertificateBuilder:
    """Begin to make a certificate."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(serial)
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def common_name(text: str) -> x509.Name:
    """Return a name of at most 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def with_key(made: x509.Certificate, key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    """Write a certificate and its private key (PEM)."""
    return made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Say what a certificate is for: signing others, or proving who one is."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


@contextlib.contextmanager
def as_file(content: bytes) -> Iterator[str]:
    """Yield a path to `content`: ssl reads certificates from paths only.

    On Linux it never reaches a disk; elsewhere it is a file of mode 600 that lives for a moment.
    """
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shardnet-identity", os.MFD_CLOEXEC)
        path, is_on_disk = f"/proc/self/fd/{descriptor}", False
    else:
        descriptor, path = tempfile.mkstemp(prefix="shardnet-")
        is_on_disk = True
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            yield path
    finally:
        if is_on_disk:
            os.unlink(path)
