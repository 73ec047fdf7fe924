"""Certificates for tests: made once a process, by an authority each."""

from __future__ import annotations

import datetime
import functools
import ipaddress
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from shardwell import Tls
from shardwell_server.operations.certificates import Certificates, make_certificates

HOSTS = ("localhost", "127.0.0.1")


@functools.cache
def authority(name: str = "ours", hosts: tuple[str, ...] = HOSTS) -> Certificates:
    """Those of an authority of that name, in a directory that ends with the process."""
    _directories.append(tempfile.TemporaryDirectory(prefix=f"certificates-{name}-"))
    return make_certificates(Path(_directories[-1].name), hosts, 90)


_directories: list[tempfile.TemporaryDirectory[str]] = []


def of_server(files: Certificates) -> Tls:
    """What a shard, or a member of a group, is given; mutual."""
    return Tls(ca=files.ca, cert=files.server, key=files.server_key)


def of_client(files: Certificates) -> Tls:
    """What a worker is given; mutual."""
    return Tls(ca=files.ca, cert=files.client, key=files.client_key)


KEYS = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}
"""By the names of their kinds."""


def write_pair(
    kind: str,
    cert: Path,
    key: Path,
    files: Certificates,
    days: float = 7,
    *,
    age_days: float = 1,
) -> None:
    """A certificate for localhost and its key, of a kind, by the authority of `files`."""
    made = KEYS[kind]()
    ca = x509.load_pem_x509_certificate(files.ca.read_bytes())
    ca_key = serialization.load_pem_private_key(files.ca_key.read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.UTC)  # noqa: TID251 (a certificate has the time)
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    signed = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, kind)]))
        .issuer_name(ca.subject)
        .public_key(made.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=age_days))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        made.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
