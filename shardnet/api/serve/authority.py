"""Certificates for HTTPS: an authority that the cluster key makes, and leaves for this machine.

Knows what browsers ask of certificates, which is why this is another authority than that of links.
Must not know where keys are kept, nor how HTTP is served. Facts behind it: docs/security.md.
"""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID

from shardnet.transport.identity import (
    as_file,
    certificate,
    common_name,
    derive_authority_key,
    fingerprint,
    key_usage,
    with_key,
)

HOME_NAMES: Final = ("localhost", "local", "lan", "home", "home.arpa", "internal")
"""Names for which the authority may speak, and all below them: none is one of the Internet."""

HOME_NETWORKS: Final = tuple(
    map(
        ip_network,
        (
            "127.0.0.0/8",
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "169.254.0.0/16",
            "100.64.0.0/10",
            "::1/128",
            "fc00::/7",
            "fe80::/10",
        ),
    )
)
"""The same for addresses: private ones, and those of overlay networks."""

LEAF_DAYS: Final = 800
"""Apple's systems take no leaf that is valid for longer than 825 days."""
BEGUN_DAYS: Final = 20
"""A leaf is valid from before it was made: clocks at home are wrong."""


class HttpAuthority:
    """The authority of one cluster, the same for every holder of its key."""

    def __init__(self, secret: bytes) -> None:
        # P-256: browsers take no Ed25519. 48 bytes leave no bias worth naming.
        derived = HKDF(hashes.SHA256(), 48, salt=b"shardnet", info=b"http authority 1")
        number = int.from_bytes(derived.derive(secret)) % (_P256_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        cluster = fingerprint(derive_authority_key(secret))
        self._name = common_name(f"shardnet HTTPS of cluster {cluster}")

    def certificate(self) -> bytes:
        """Write the authority's certificate (PEM), which clients have to trust.

        It may speak for names and addresses at home alone: whoever steals the cluster key can pose
        as no site of the Internet.
        """
        public = self._key.public_key()
        permitted: list[x509.GeneralName] = [
            *map(x509.DNSName, HOME_NAMES),
            *map(x509.IPAddress, HOME_NETWORKS),
        ]
        made = (
            certificate(self._name, self._name, x509.random_serial_number())
            .public_key(public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.NameConstraints(permitted, None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    def leaf(self, hosts: Sequence[str], now: datetime.datetime) -> bytes:
        """Make a certificate for these names and addresses, and its private key, both PEM.

        They must be at home, as `at_home` says.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        begin = now - datetime.timedelta(days=BEGUN_DAYS)
        end, serial = begin + datetime.timedelta(days=LEAF_DAYS), x509.random_serial_number()
        made = (
            certificate(common_name(hosts[0]), self._name, serial, begin, end)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(names, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return with_key(made, key)


def at_home(host: str) -> bool:
    """Say whether the authority may speak for a name or an address."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return any(host == name or host.endswith(f".{name}") for name in HOME_NAMES)
    return any(address in network for network in HOME_NETWORKS)


def hosts_of(hostname: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the names and addresses at home of a machine, which its certificate names."""
    short = hostname.partition(".")[0].lower()
    names = [f"{short}.{name}" for name in HOME_NAMES if name != "localhost" and _is_label(short)]
    found = ["localhost", "127.0.0.1", "::1", *names]
    found += [name for name in (hostname.lower(), *addresses) if at_home(name)]
    return tuple(dict.fromkeys(host.partition("%")[0] for host in found))


def server_context(
    authority: HttpAuthority,
    addresses: Callable[[], Iterable[str]],
    now: Callable[[], datetime.datetime],
    hostname: str = "",
) -> ssl.SSLContext:
    """Make the TLS context of a server on this machine.

    Every handshake gets a leaf that names the addresses that the machine has then: DHCP changes
    them. `hostname` is that of the system unless it is given.
    """
    hostname = hostname or socket.gethostname()
    current: list[tuple[tuple[str, ...], datetime.datetime, ssl.SSLContext]] = []

    def fresh() -> ssl.SSLContext:
        hosts, moment = hosts_of(hostname, addresses()), now()
        if current:
            known, until, context = current[0]
            if known == hosts and moment < until:
                return context
        context = _context(authority.leaf(hosts, moment))
        until = moment + datetime.timedelta(days=LEAF_DAYS - 2 * BEGUN_DAYS)
        current[:] = [(hosts, until, context)]
        return context

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = fresh()

    first = _context(authority.leaf(hosts_of(hostname, addresses()), now()))
    first.sni_callback = choose
    return first


def _context(leaf: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with as_file(leaf) as path:
        context.load_cert_chain(path)
    return context


def _is_label(text: str) -> bool:
    return 0 < len(text) <= 63 and text.replace("-", "").isalnum() and text.isascii()


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of the curve's base point (SEC 2, section 2.4.2)."""
