"""A node's TLS identity, derived from the cluster key.

Knows certificates: every holder of the key derives the same authority and mints its own leaf in
memory at start, and who holds two keys while one replaces the other is believed by holders of
either. Must not know files of keys or links. Facts behind it: docs/security.md, docs/adr/0094.
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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from shardnet.transport.link import Link

_BEGIN: Final = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""Clocks at home are wrong, and who holds the key can mint any leaf: dates would buy nothing."""
_NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME, which Python does not name: boards without a clock start in 1970."""

_AUTHORITY_NAME: Final = "shardnet cluster"
_LEAF_NAME: Final = "shardnet node"
"""The same for every node: who connects without the key is shown a leaf, and may learn no more. A
node says who it is in its hello."""


class KeyKeeper(Protocol):
    """Keeps the keys of an identity on disk, and changes them there and in the identity."""

    def take(self, secret: bytes, grace_s: float, after: bytes = b"") -> None:
        """Use a key from now on, and believe holders of the one before for `grace_s` more.

        It replaces the key with the signer `after`, b"" where that is not known.
        """

    def forget_if_due(self) -> None:
        """Forget the old key if its time is over."""


class Identity:
    """What a node or client needs to speak to its cluster, and to nobody else.

    It is that of a cluster key, `secret`, and while that replaces the `old` one of both. Links use
    what it is when they begin.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    secret: bytes
    old: bytes
    signer: bytes
    """Id of the authority of the present key, as leaves name it."""
    signers: tuple[bytes, ...]
    """Those of all keys whose holders are believed."""
    fingerprints: tuple[str, ...]
    """Names of the cluster by these keys, the present one first."""
    until_s: float = 0.0
    """When the old key is forgotten, in seconds since 1970."""
    keeper: KeyKeeper | None = None

    def __init__(self, secret: bytes, old: bytes = b"") -> None:
        self.use(secret, old)

    def use(self, secret: bytes, old: bytes = b"") -> None:
        """Derive the authorities from the keys' bytes and mint a leaf of our own."""
        keys = [derive_authority_key(each) for each in (secret, old) if each]
        authorities = [make_authority(key) for key in keys]
        leaf_key = Ed25519PrivateKey.generate()
        leaf = make_leaf(authorities[0], keys[0], leaf_key)
        chain = with_key(leaf, leaf_key)
        if old:  # by which those believe it that know the old key alone
            chain += _pem(make_authority(keys[0], issuer=keys[1]))
        with as_file(chain) as path:
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, authorities, path)
            self.client = _context(ssl.PROTOCOL_TLS_CLIENT, authorities, path)
        self.secret, self.old = secret, old
        self.signers = tuple(map(_key_id, keys))
        self.signer = self.signers[0]
        self.fingerprints = tuple(map(fingerprint, keys))

    @property
    def fingerprint(self) -> str:
        """The name of the cluster (16 hex digits), which reveals nothing of the key.

        It is that of the old key as long as its holders are believed: they look for it.
        """
        return self.fingerprints[-1]

    @staticmethod
    def signer_of(leaf: bytes) -> bytes:
        """Return the id of the authority that has signed a leaf (DER) which TLS has verified.

        The name of the authority is the same for all keys: TLS has found it by this id too.
        """
        extensions = x509.load_der_x509_certificate(leaf).extensions
        with contextlib.suppress(x509.ExtensionNotFound):
            by = extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
            return by.key_identifier or b""
        return b""

    def is_present(self, link: Link) -> bool:
        """Return whether both ends of a link have come by the present key."""
        shown = link.signers
        return shown is None or shown.own == shown.peer == self.signer

    def accepts(self, link: Link) -> bool:
        """Return whether the peer of a link has shown the present key, or would be believed now.

        One that has a newer key is: an older one vouches for it.
        """
        shown = link.signers
        return shown is None or shown.peer == self.signer or shown.oldest in self.signers

    def wheel_proofs(self, name: str, sha256: str) -> list[str]:
        """Return what only holders of a key can say of a wheel (hex), by each; the oldest last."""
        said = f"{name}\n{sha256}".encode()
        keys = [_derived(each, b"wheels 1") for each in (self.secret, self.old) if each]
        return [hmac.new(key, said, hashlib.sha256).hexdigest() for key in keys]


def make_identity(secret: bytes, old: bytes = b"") -> Identity:
    """Make the identity of a cluster key, and of the one that it replaces."""
    return Identity(secret, old)


def derive_authority_key(secret: bytes) -> Ed25519PrivateKey:
    """Derive the private key of the cluster's certificate authority."""
    return Ed25519PrivateKey.from_private_bytes(_derived(secret, b"certificate authority 1"))


def _derived(secret: bytes, info: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=b"shardnet", info=info).derive(secret)


def fingerprint(authority_key: Ed25519PrivateKey) -> str:
    """Name the cluster: 16 hex digits of the SHA-256 of the authority's public key."""
    public = authority_key.public_key().public_bytes_raw()
    return hashlib.sha256(public).hexdigest()[:16]


def make_authority(
    key: Ed25519PrivateKey, *, issuer: Ed25519PrivateKey | None = None
) -> x509.Certificate:
    """Make the authority's certificate: the same bytes on every node.

    Nothing in it is random, and Ed25519 signs without chance. With an `issuer` that one vouches for
    it.
    """
    public, by = key.public_key(), issuer or key
    name = common_name(_AUTHORITY_NAME)
    return (
        certificate(name, name, 1)
        .public_key(public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False
        )
        .sign(by, None)
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


def _context(
    protocol: int, authorities: Sequence[x509.Certificate], chain_path: str
) -> ssl.SSLContext:
    """TLS 1.3 only, both sides prove that they hold the key; names do not matter."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _NO_CHECK_TIME
    context.load_verify_locations(cadata=b"".join(map(_pem, authorities)).decode())
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
    return _pem(made) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _pem(made: x509.Certificate) -> bytes:
    return made.public_bytes(serialization.Encoding.PEM)


def _key_id(key: Ed25519PrivateKey) -> bytes:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest


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
