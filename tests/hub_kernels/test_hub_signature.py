"""Signatures, which `kernels` verifies: missing, malformed, forged, and where the keys cannot be
fetched.
"""

from __future__ import annotations

import base64
import datetime
import errno
import hashlib
import json
import os
import socket
from pathlib import Path

import pytest
from hub_repositories import build

from layerzero.integrations.hub import Hub, HubError, SignatureRefused

NAME = "me/norm"


def hub_of(folder: Path, signature: str = "present") -> Hub:
    return Hub({NAME: folder}, ("me/*",), signature=signature, backend="cpu")


def test_a_missing_signature_where_one_is_demanded(tmp_path):
    build(tmp_path / "r", id="_sign_a")
    with pytest.raises(SignatureRefused, match="wanted a signature"):
        hub_of(tmp_path / "r", signature="required").load(NAME)
    assert hub_of(tmp_path / "r").explain(NAME).ok


@pytest.mark.parametrize("wanted", ["required", "present"])
def test_a_signature_that_is_none(tmp_path, wanted):
    folder = build(tmp_path / "r", id="_sign_b")
    (folder / "metadata.json.sigstore").write_text(
        '{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}')
    with pytest.raises(SignatureRefused, match="SignatureBundleInvalid"):
        hub_of(tmp_path / "r", signature=wanted).load(NAME)
    assert hub_of(tmp_path / "r", signature="ignored").explain(NAME).ok
    with pytest.raises(HubError, match="signature= is one of"):
        hub_of(tmp_path / "r", signature="yes")


def forge_signature(signed: bytes) -> str:
    """A bundle as it should be, by somebody who may not sign."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def text(data: bytes) -> str:
        return base64.b64encode(data).decode()

    key, start = ec.generate_private_key(ec.SECP256R1()), datetime.datetime(2026, 1, 1)
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "nobody")])
    cert = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(
        key.public_key()).serial_number(1)
    cert = cert.not_valid_before(start).not_valid_after(start + datetime.timedelta(1))
    cert = cert.add_extension(x509.KeyUsage(True, *[False] * 8), True)
    cert = cert.add_extension(x509.BasicConstraints(False, None), True)
    cert = cert.add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CODE_SIGNING]),
                              False)
    certificate = cert.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    zero = text(bytes(32))
    entry = {"logIndex": "1", "logId": {"keyId": zero},
             "kindVersion": {"kind": "hashedrekord", "version": "0.0.1"},
             "integratedTime": str(int(start.timestamp())),
             "inclusionPromise": {"signedEntryTimestamp": zero},
             "inclusionProof": {"logIndex": "1", "rootHash": zero, "treeSize": "2", "hashes": [],
                                "checkpoint": {"envelope": "x"}}, "canonicalizedBody": text(b"{}")}
    return json.dumps({
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"certificate": {"rawBytes": text(certificate)},
                                 "tlogEntries": [entry]},
        "messageSignature": {
            "messageDigest": {"algorithm": "SHA2_256",
                              "digest": text(hashlib.sha256(signed).digest())},
            "signature": text(key.sign(signed, ec.ECDSA(hashes.SHA256())))}})


@pytest.fixture
def signed(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))         # where keys are kept
    folder = build(tmp_path / "r", id="_sign_c", digest=True)
    signature = forge_signature((folder / "metadata.json").read_bytes())
    (folder / "metadata.json.sigstore").write_text(signature)
    return tmp_path / "r"


def test_a_forged_signature(signed, monkeypatch):
    """With the keys that the verifier brings: the real verification, without asking for newer ones.
    """
    from kernels.verify import Verifier

    verifier = Verifier.production(offline=True)
    monkeypatch.setattr(Verifier, "production", lambda: verifier)
    for wanted in ("required", "present"):
        with pytest.raises(SignatureRefused, match="SignatureVerificationFailure"):
            hub_of(signed, wanted).load(NAME)
    assert not hub_of(signed).explain(NAME).ok and hub_of(signed, "ignored").explain(NAME).ok


def test_where_the_keys_cannot_be_fetched(signed, monkeypatch):
    def unreachable(self: socket.socket, address: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(SignatureRefused, match="cannot be verified here"):
        hub_of(signed, "required").load(NAME)
    explanation = hub_of(signed).explain(NAME)
    assert explanation.ok                      # a signature is not required
    assert "could not be verified here" in str(explanation)
