"""JSON Web Tokens (RFC 7519): tokens that another service signs, with the same rights and quotas.

    {"sub": "trainer", "exp": 1800000000, "aud": "CLUSTER_ID", "rights": ["contribute:prod-"],
     "quota": {"streams": 64}}

Keys are a JSON Web Key Set (RFC 7517) in a file. A key is good for one algorithm (RS256, ES256,
EdDSA or HS256) by its kind, whatever a token says of itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt

from shardwell.errors import ArgumentError, AuthenticationError
from shardwell.specs.names import check_name
from shardwell_server.access.rights import Principal, grants_of
from shardwell_server.access.tokens import json_of, quota_of

_SECRET_BYTES_MIN = 32
"""The least secret of HS256: as many as its digest has (RFC 7518)."""
_RSA_BITS_MIN = 2048
"""The least key of RS256 (RFC 7518)."""
LEEWAY_S = 60.0
"""The difference that clocks of issuers and shards may have: a token is good so long before its nbf
and iat, and after its exp."""
_KEY_COUNT_MAX = 64
_TRIED_COUNT_MAX = 4
PREFIX = "jwt:"
"""A prefix of names in JWTs, which no name in the file has."""
_ALGORITHMS = {
    "RSA None": ("RS256",),
    "EC P-256": ("ES256",),
    "OKP Ed25519": ("EdDSA", "Ed25519"),
    "oct None": ("HS256",),
}
"""The spellings of the one algorithm of each kind of key."""


@dataclass(frozen=True)
class Key:
    """A key that signs tokens."""

    name: str | None
    algorithms: tuple[str, ...]
    value: Any = field(repr=False)
    proof: bytes = field(repr=False)


def read_keys(path: Path) -> list[Key]:
    """Reads all keys of a file. No error has a key in it."""
    found = json_of(path)
    keys = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(keys, list) or not 0 < len(keys) <= _KEY_COUNT_MAX:
        raise ArgumentError(
            f'{path} must be a JSON Web Key Set, {{"keys": [...]}}, of 1 to {_KEY_COUNT_MAX} keys'
        )
    found = [_key_of(f"{path}: key {number}", given) for number, given in enumerate(keys, 1)]
    names = [key.name for key in found if key.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(f"{path}: two keys have the same kid, {name!r:.80}")
    return found


def _key_of(what: str, given: object) -> Key:
    if not isinstance(given, dict):
        raise ArgumentError(f"{what} must be a JSON object")
    name = given.get("kid")
    algorithms = _ALGORITHMS.get(f"{given.get('kty')} {given.get('crv')}", ())
    if not algorithms or given.get("alg") not in (None, *algorithms):
        raise ArgumentError(
            f'{what} must be for RS256 ("kty": "RSA"), ES256 ("kty": "EC", "crv": "P-256"), EdDSA '
            '("kty": "OKP", "crv": "Ed25519") or HS256 ("kty": "oct")'
        )
    if given.get("use") not in (None, "sig"):
        raise ArgumentError(f'{what} is for another use: expected "use": "sig", or none')
    algorithm = algorithms[0]
    if algorithm != "HS256" and "d" in given:
        raise ArgumentError(f"{what} is a private one; shards need the public one alone, without d")
    if not isinstance(name, str | None):
        raise ArgumentError(f"{what}: kid must be a string")
    try:
        made = jwt.PyJWK(given, algorithm)
        value = made.Algorithm.prepare_key(made.key)
    except (
        jwt.PyJWTError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
    ):  # its text has the key
        raise ArgumentError(f"{what} can't be read as a key for {algorithm}") from None
    if algorithm == "HS256" and len(value) < _SECRET_BYTES_MIN:
        raise ArgumentError(
            f"{what} has {len(value)} bytes; HS256 needs {_SECRET_BYTES_MIN} drawn at random"
        )
    if algorithm == "RS256" and value.key_size < _RSA_BITS_MIN:
        raise ArgumentError(f"{what} has {value.key_size} bits; RS256 needs {_RSA_BITS_MIN}")
    proof = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).digest()
    return Key(name, algorithms, value, proof)


def principal_of(token: str, keys: list[Key], cluster_id: str) -> Principal:
    """Returns the principal that calls with a JWT; AuthenticationError: it is not believed."""
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise AuthenticationError("no such token is known here, and it is no JWT") from None
    name, algorithm = header.get("kid"), str(header.get("alg"))
    fitting = [key for key in keys if algorithm in key.algorithms]
    if name is not None:
        fitting = [key for key in fitting if key.name in (None, name)]
        fitting.sort(key=lambda key: key.name is None)
    elif len(fitting) > 1:  # or strangers could have all of them tried
        raise AuthenticationError("the JWT does not name its key (kid), and there are several")
    for key in fitting[:_TRIED_COUNT_MAX]:
        try:
            claims = jwt.decode(
                token,
                key.value,
                algorithms=[algorithm],
                leeway=LEEWAY_S,
                options={"require": ["exp", "sub"], "verify_aud": False},
            )
        except jwt.InvalidSignatureError:
            continue
        except jwt.ExpiredSignatureError:
            raise AuthenticationError("the JWT has expired; put a new one into its file") from None
        except jwt.PyJWTError as error:
            raise AuthenticationError(f"the JWT is not good: {error}") from None
        return _principal(claims, key, cluster_id)
    of = "" if name is None else f"; it names the key {name!r:.80} (kid)"
    raise AuthenticationError(f"the JWT is signed by no key that is believed here{of}")


def _principal(claims: dict[str, Any], key: Key, cluster_id: str) -> Principal:
    audience = claims.get("aud")
    if audience is not None and cluster_id not in (
        audience if isinstance(audience, list) else [audience]
    ):
        raise AuthenticationError(
            f"the JWT is for {audience!r:.200}, its aud; this cluster is {cluster_id!r}"
        )
    try:
        return Principal(
            name=PREFIX + check_name("sub", claims["sub"]),
            grants=grants_of(claims.get("rights")),
            expires_s=float(claims["exp"]),
            leeway_s=LEEWAY_S,
            quota=quota_of(claims.get("quota", {})),
            proof=key.proof,
        )
    except (ArgumentError, ValueError, OverflowError) as error:
        raise AuthenticationError(f"the JWT is not good: {error}") from None
