"""Goal: a JWT is believed if a key here signed it for this cluster and now, and no other is.

Method: tokens put together by hand, byte by byte, from the RFCs; a clock that is passed in.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shardwell.errors import ArgumentError, AuthenticationError
from shardwell_server.access.access import Access
from shardwell_server.access.rights import Grant, Right
from shardwell_server.access.web_tokens import LEEWAY_S, read_keys

PEM = b"-----BEGIN PUBLIC KEY-----\nAAAAAAAAAAAA\n-----END PUBLIC KEY-----"
SHARED = b"a secret of at least 32 bytes...."
SIGNER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = SIGNER.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
NOW_S = time.time()  # noqa: TID251
CLAIMS: dict[str, Any] = {"sub": "trainer", "exp": NOW_S + 86400, "rights": ["contribute:prod-"]}


def text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


OCT = {"kty": "oct", "k": text(SHARED), "kid": "one"}
RSA_SIGNER = rsa.generate_private_key(65537, 2048)
EC_SIGNER = ec.generate_private_key(ec.SECP256R1())


def rsa_key(signer: rsa.RSAPrivateKey, **more: Any) -> dict[str, Any]:
    numbers = signer.public_key().public_numbers()
    modulus = numbers.n.to_bytes(signer.key_size // 8)
    return {"kty": "RSA", "n": text(modulus), "e": "AQAB", "kid": "three", **more}


def ec_key(signer: ec.EllipticCurvePrivateKey, **more: Any) -> dict[str, Any]:
    point = signer.public_key().public_numbers()
    size = (signer.key_size + 7) // 8
    x, y = text(point.x.to_bytes(size)), text(point.y.to_bytes(size))
    return {"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": "four", **more}


RSA, EC = rsa_key(RSA_SIGNER, use="sig", alg="RS256"), ec_key(EC_SIGNER)
RSA_PEM = RSA_SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
EC_PEM = EC_SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
KIDS = {"HS256": "one", "EdDSA": "two", "RS256": "three", "ES256": "four"}
OKP = {"kty": "OKP", "crv": "Ed25519", "x": text(PUBLIC), "kid": "two", "alg": "EdDSA"}


def signed(
    claims: dict[str, Any],
    algorithm: str = "HS256",
    secret: bytes = SHARED,
    **header: Any,
) -> str:
    head = {"alg": algorithm, "typ": "JWT", **header}
    body = f"{text(json.dumps(head).encode())}.{text(json.dumps(claims).encode())}"
    if algorithm.startswith("HS"):
        digest = getattr(hashlib, f"sha{algorithm[2:]}")
        return f"{body}.{text(hmac.new(secret, body.encode(), digest).digest())}"
    if algorithm.lower() == "none":
        return f"{body}."
    if algorithm in ("RS256", "PS256"):
        pads = padding.PSS(padding.MGF1(hashes.SHA256()), 32)
        pad = padding.PKCS1v15() if algorithm == "RS256" else pads
        return f"{body}.{text(RSA_SIGNER.sign(body.encode(), pad, hashes.SHA256()))}"
    if algorithm == "ES256":
        r, s = decode_dss_signature(EC_SIGNER.sign(body.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{body}.{text(r.to_bytes(32) + s.to_bytes(32))}"
    return f"{body}.{text(SIGNER.sign(body.encode()))}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "keys.json"
    found.write_text(json.dumps({"keys": [OCT, OKP, RSA, EC]}))
    return found


@pytest.fixture
def access(path: Path) -> Access:
    return Access(jwt_keys=path, cluster_id="mine", now_s=lambda: NOW_S)


@pytest.mark.parametrize("algorithm", KIDS)
@pytest.mark.parametrize("key_id", [{}, "its own"])
@pytest.mark.parametrize("more", [{}, {"aud": "mine"}, {"aud": ["theirs", "mine"]}])
def test_what_is_believed(access: Access, algorithm: str, key_id: Any, more: Any) -> None:
    header = {"kid": KIDS[algorithm]} if key_id else {}
    token = signed({**CLAIMS, **more, "quota": {"streams": 3}}, algorithm, **header)
    found = access.principal(f"Bearer {token}")
    assert found.name == "jwt:trainer"  # and no token of the file
    assert found.grants == (Grant(Right.CONTRIBUTE, "prod-"),)
    assert found.expires_s == CLAIMS["exp"]
    assert found.quota.streams == 3
    access.check_still(found)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (signed(CLAIMS, "none"), "signed by no key"),
        (signed(CLAIMS, "None"), "signed by no key"),
        (signed(CLAIMS, "HS512"), "signed by no key"),
        # The public key, which everybody knows, as a secret: "algorithm confusion".
        (signed(CLAIMS, "HS256", PUBLIC), "signed by no key"),
        (signed(CLAIMS, "HS256", text(PUBLIC).encode()), "signed by no key"),
        (signed(CLAIMS, "HS256", b"another secret of 32 bytes ......"), "signed by no key"),
        (signed(CLAIMS, "EdDSA")[:-4] + "AAAA", "signed by no key"),
        (signed(CLAIMS, kid="two"), "signed by no key"),
        (signed(CLAIMS, kid="five"), r"signed by no key .*'five' \(kid\)"),
        (signed(CLAIMS, kid="three"), "signed by no key"),
        (signed(CLAIMS, "RS256", kid="one"), "signed by no key"),
        (signed(CLAIMS, "HS256", RSA_PEM, kid="three"), "signed by no key"),
        (signed(CLAIMS, "HS256", RSA_PEM), "signed by no key"),
        (signed(CLAIMS, "HS256", EC_PEM, kid="four"), "signed by no key"),
        (signed(CLAIMS, "HS256", json.dumps(RSA).encode()), "signed by no key"),
        (signed(CLAIMS, "PS256"), "signed by no key"),
        (signed(CLAIMS, "none", kid="three"), "signed by no key"),
        (signed(CLAIMS, "ES256", jwk=EC)[:-4] + "AAAA", "signed by no key"),
        (signed(CLAIMS, "RS256", kid=["three"]), "no JWT"),
        (signed({**CLAIMS, "iat": NOW_S + 3600}), "not yet valid"),
        (signed({**CLAIMS, "exp": NOW_S - 3600}, "RS256"), "has expired"),
        (signed({**CLAIMS, "exp": NOW_S - 60}), "has expired"),
        (signed({**CLAIMS, "nbf": NOW_S + 86400}), "not yet valid"),
        (signed({key: CLAIMS[key] for key in ("sub", "rights")}), 'missing the "exp" claim'),
        (signed({key: CLAIMS[key] for key in ("exp", "rights")}), 'missing the "sub" claim'),
        (signed({key: CLAIMS[key] for key in ("exp", "sub")}), "rights must be a list"),
        (signed({**CLAIMS, "exp": "tomorrow"}), "not good"),
        (signed({**CLAIMS, "exp": 1e400}), "not good|no JWT"),
        (signed({**CLAIMS, "sub": "a b"}), "sub must be"),
        (signed({**CLAIMS, "sub": 5}), "not good"),
        (signed({**CLAIMS, "rights": ["root"]}), "a right is RIGHT"),
        (signed({**CLAIMS, "rights": "read"}), "rights must be a list"),
        (signed({**CLAIMS, "quota": {"streams": "many"}}), "quota streams must be"),
        (signed({**CLAIMS, "aud": "theirs"}), "is for 'theirs'"),
        (signed({**CLAIMS, "aud": ["theirs"]}), "is for"),
        ("a.b.c", "no JWT"),
        ("..", "no JWT"),
        ("a.b", "no such token"),
    ],
)
def test_what_is_not(access: Access, token: str, reason: str) -> None:
    with pytest.raises(AuthenticationError, match=reason) as caught:
        access.principal(f"Bearer {token}")
    assert text(SHARED) not in caught.value.message


def test_an_end_that_comes_and_a_key_that_goes(path: Path) -> None:
    now_s = [NOW_S]
    access = Access(jwt_keys=path, cluster_id="mine", now_s=lambda: now_s[0])
    one = access.principal(f"Bearer {signed(CLAIMS)}")
    two = access.principal(f"Bearer {signed(CLAIMS, 'EdDSA')}")
    path.write_text(json.dumps({"keys": [OKP]}))
    access.refresh()
    with pytest.raises(AuthenticationError, match="'jwt:trainer' was revoked"):
        access.check_still(one)
    access.check_still(two)
    now_s[0] = CLAIMS["exp"] + LEEWAY_S - 1
    access.check_still(two)
    now_s[0] = CLAIMS["exp"] + LEEWAY_S
    with pytest.raises(AuthenticationError, match="'jwt:trainer' expired at 20"):
        access.check_still(two)


@pytest.mark.parametrize("claim", ["iat", "nbf", "exp"])
def test_clocks_that_are_a_little_apart(path: Path, claim: str) -> None:
    """An issuer's clock may be ahead of the shard's, or behind it."""
    access = Access(jwt_keys=path, cluster_id="mine")
    now_s = time.time()  # noqa: TID251
    sign = -1 if claim == "exp" else 1
    near, far = (signed({**CLAIMS, claim: int(now_s + sign * apart)}) for apart in (30, 3600))
    assert access.principal(f"Bearer {near}").name == "jwt:trainer"
    with pytest.raises(AuthenticationError, match=r"expired|not yet valid"):
        access.principal(f"Bearer {far}")


def test_keys_are_rotated_by_replacing_the_file(access: Access, path: Path) -> None:
    """The next key is published beside the old one, whose tokens go on, and then alone."""
    kept = access.principal(f"Bearer {signed(CLAIMS, 'ES256', kid='four')}")
    before = f"Bearer {signed(CLAIMS, 'RS256', kid='next')}"
    with pytest.raises(AuthenticationError, match="'next'"):
        access.principal(before)
    rsa_next = {**dict(reversed(RSA.items())), "kid": "next"}
    path.write_text(json.dumps({"keys": [dict(reversed(EC.items())), rsa_next]}))
    assert access.principal(before).name == "jwt:trainer"
    access.check_still(kept)
    path.write_text(json.dumps({"keys": [rsa_next]}))
    access.refresh()
    with pytest.raises(AuthenticationError, match="was revoked"):
        access.check_still(kept)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ([], "of 1 to 64 keys"),
        ("", "of 1 to 64 keys"),
        ([5], "key 1 must be a JSON object"),
        ([{**OCT, "k": text(b"short")}], "HS256 needs 32 drawn at random"),
        ([{**OCT, "k": 5}], "can't be read as a key"),
        ([{**OCT, "use": "enc"}], "is for another use"),
        ([{**OCT, "k": text(PEM)}], "can't be read as a key"),
        ([{"kty": "oct"}], "can't be read as a key"),
        ([{**OCT, "alg": "HS512"}], "must be for RS256"),
        ([{**OCT, "kid": 5}], "kid must be a string"),
        ([{**OKP, "alg": "HS256"}], "must be for RS256"),
        ([{**OKP, "crv": "Ed448"}], "must be for RS256"),
        ([{**OKP, "crv": ["Ed25519"]}], "must be for RS256"),
        ([{**OKP, "x": "AAAA"}], "can't be read as a key"),
        ([{**OKP, "d": text(bytes(range(32)))}], "is a private one"),
        ([{"kty": "RSA", "n": "AQAB", "e": "AQAB"}], "RS256"),
        ([OCT, {"kty": "EC"}], "key 2 must be for RS256"),
        ([ec_key(ec.generate_private_key(ec.SECP384R1()), crv="P-384")], "must be for RS256"),
        ([{**EC, "y": EC["x"]}], "can't be read as a key for ES256"),
        ([{**EC, "d": EC["x"]}], "is a private one"),
        ([{**RSA, "d": RSA["n"]}], "is a private one"),
        ([{**RSA, "alg": "HS256"}], "must be for RS256"),
        ([{**RSA, "use": "enc"}], "is for another use"),
        ([rsa_key(rsa.generate_private_key(65537, 1024))], "has 1024 bits; RS256 needs 2048"),
        ([RSA, {**EC, "kid": "three"}], "two keys have the same kid, 'three'"),
    ],
)
def test_keys_that_are_none(path: Path, keys: Any, reason: str) -> None:
    path.write_text(json.dumps({"keys": keys}))
    with pytest.raises(ArgumentError, match=reason) as caught:
        read_keys(path)
    assert str(path) in caught.value.message
    for secret in (text(SHARED), text(PUBLIC), text(bytes(range(32)))):
        assert secret not in caught.value.message


def test_a_token_names_its_key_where_there_are_several(path: Path) -> None:
    """Or strangers could have each of them tried."""
    other = {**OCT, "kid": "other", "k": text(bytes(32))}
    path.write_text(json.dumps({"keys": [OCT, other, OKP]}))
    access = Access(jwt_keys=path, cluster_id="mine", now_s=lambda: NOW_S)
    assert access.principal(f"Bearer {signed(CLAIMS, kid='one')}").name == "jwt:trainer"
    assert access.principal(f"Bearer {signed(CLAIMS, 'EdDSA')}").name == "jwt:trainer"
    with pytest.raises(AuthenticationError, match="does not name its key"):
        access.principal(f"Bearer {signed(CLAIMS)}")


def test_what_was_believed_is_looked_at_once(access: Access, path: Path, monkeypatch) -> None:
    """As long as its key exists, and no longer than it is good."""
    token = f"Bearer {signed(CLAIMS, 'EdDSA')}"
    first = access.principal(token)
    monkeypatch.setattr("jwt.decode", lambda *_, **__: pytest.fail("it was looked at again"))
    assert access.principal(token) is first
    monkeypatch.undo()
    monkeypatch.setattr(access, "_now_s", lambda: CLAIMS["exp"] + LEEWAY_S)
    with pytest.raises(AuthenticationError, match="expired"):
        access.principal(token)
    monkeypatch.undo()
    path.write_text(json.dumps({"keys": [OCT]}))
    access.refresh()
    with pytest.raises(AuthenticationError, match="signed by no key"):
        access.principal(token)


def test_keys_are_not_shown(path: Path) -> None:
    shown = repr(read_keys(path))
    assert text(SHARED) not in shown
    assert repr(SHARED) not in shown
