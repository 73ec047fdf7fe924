"""Certificates for a cluster of one's own: an authority, shards' and workers' certificates.

Who has a CA already needs none of this. Keys are of the curve P-256. A server's certificate is good
for both ends of a connection, as members of a group are both; a client's for its own alone, so that
no worker can stand for a shard.

Only files made here are replaced: a certificate that the authority issued under the same name, and
the key of one. A certificate is written as NAME.pem.part, then its key, then it gets its own name:
so a kill leaves a key that belongs to one of the two.
"""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardwell.errors import ArgumentError, StorageError

_CA_DAYS = 3650
_AUTHORITY_NAME = "Shardwell cluster authority"
_BEFORE = datetime.timedelta(hours=1)
"""Clocks of machines differ."""
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")

_CLIENT, _SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
_OTHER_USES = dict.fromkeys(
    (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    ),
    False,
)
_Authority: TypeAlias = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


class Certificates(NamedTuple):
    """The files of a directory."""

    ca: Path
    ca_key: Path
    """The authority's key: its holder can make certificates that all believe."""
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    @staticmethod
    def of(directory: Path) -> Certificates:
        """Returns the names of the files there."""
        pairs = (_pair(directory, name) for name in ("ca", "server", "client"))
        return Certificates(*itertools.chain(*pairs))


def _pair(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"


def make_certificates(directory: Path, hosts: Sequence[str], days: int) -> Certificates:
    """Makes certificates, and an authority where the directory has none; replaces its own.

    Without `hosts`, names and addresses of shards and members, those of the replaced certificate
    count. ArgumentError: a host is none, or none is given, and no certificate to replace exists.
    StorageError: files can't be read or written, or were not made here; those stay.
    """
    files = Certificates.of(directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(files) if os.path.lexists(files.ca) else _made_authority(files)
        for name in ("server", "client"):
            _check_replaceable(directory, name, authority[1].public_key())
        names = x509.SubjectAlternativeName(
            [_name(host) for host in hosts] or _names_of(files.server)
        )
        _issue(
            directory, "server", days, authority, x509.ExtendedKeyUsage([_CLIENT, _SERVER]), names
        )
        _issue(directory, "client", days, authority, x509.ExtendedKeyUsage([_CLIENT]))
    except OSError as error:
        raise StorageError(
            f"{error.filename or directory} can't be used: {error.strerror}"
        ) from error
    return files


def _authority(files: Certificates) -> _Authority:
    if not files.ca_key.exists():
        raise StorageError(
            f"{files.ca} exists, and its key does not: certificates are made where {files.ca_key} "
            "is, and copied"
        )
    try:
        ca = x509.load_pem_x509_certificate(files.ca.read_bytes())
        key = serialization.load_pem_private_key(files.ca_key.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{files.ca} and {files.ca_key} are no authority that was made here: {error}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or ca.public_key() != key.public_key():
        raise StorageError(f"{files.ca_key} is not the key of {files.ca}")
    return ca, key


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _check_replaceable(
    directory: Path, name: str, issuer: ec.EllipticCurvePublicKey | None
) -> None:
    """Refuses to replace files that were not made here; `issuer` None: an authority's own."""
    path, key_path = _pair(directory, name)
    keys = []
    for each in (path, _part(path)):
        if not os.path.lexists(each):
            continue
        try:
            found = x509.load_pem_x509_certificate(b"" if each.is_symlink() else each.read_bytes())
            public = found.public_key()
            signer = public if issuer is None else issuer
            if found.subject != _subject(name) or not isinstance(signer, ec.EllipticCurvePublicKey):
                raise ValueError("it is another's")
            signer.verify(found.signature, found.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
            keys.append(public)
        except (ValueError, TypeError, InvalidSignature):
            raise _not_ours(each, "no certificate that `shardwell certs` made here") from None
    if not os.path.lexists(key_path):
        return
    try:
        given = b"" if key_path.is_symlink() else key_path.read_bytes()
        key = serialization.load_pem_private_key(given, None)
        is_ours = isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() in keys
    except (ValueError, TypeError, UnsupportedAlgorithm):
        is_ours = False
    if not is_ours:
        raise _not_ours(key_path, f"not the key of {path}")


def _not_ours(path: Path, what: str) -> StorageError:
    return StorageError(
        f"{path} is {what}, and is not replaced; move it away, or give another directory"
    )


def _subject(name: str) -> x509.Name:
    known_as = _AUTHORITY_NAME if name == "ca" else f"shardwell-{name}"
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, known_as)])


def _made_authority(files: Certificates) -> _Authority:
    _check_replaceable(files.ca.parent, "ca", None)
    if files.ca_key.exists():  # a process was killed before its certificate had its name
        _part(files.ca).replace(files.ca)
        return _authority(files)
    return _issue(files.ca.parent, "ca", _CA_DAYS, None)


def _issue(
    directory: Path,
    name: str,
    days: int,
    authority: _Authority | None,
    *extensions: x509.ExtensionType,
) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject, is_ca = _subject(name), authority is None
    issuer, issuer_key = (
        (subject, key) if authority is None else (authority[0].subject, authority[1])
    )
    public = issuer_key.public_key()
    identifier = (
        x509.SubjectKeyIdentifier.from_public_key(public)
        if is_ca
        else x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
    )
    now = datetime.datetime.now(datetime.UTC)  # noqa: TID251 (a certificate has the time)
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=is_ca, crl_sign=is_ca, **_OTHER_USES
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in (identifier, *extensions):
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(issuer_key, hashes.SHA256())
    path, key_path = _pair(directory, name)
    _write(_part(path), certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write(key_path, pem, mode=0o600)
    _part(path).replace(path)
    return certificate, key


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ArgumentError(
                f"a host is a name or an IP address, without a port; got {host!r:.80}"
            ) from None
        return x509.DNSName(host)


def _names_of(path: Path) -> list[x509.GeneralName]:
    if not path.exists():
        raise ArgumentError("no hosts were given, and no certificate exists that has some")
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise StorageError(f"{path} is no certificate of a server: {error}") from None
    return list(names.value)


def _write(path: Path, contents: bytes, *, mode: int) -> None:
    """Replaces a file whole; readers never see a part of it, or a key that others may read."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(contents)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
