"""Certificates: files that prove that a kernel keeps its contract on this machine, and which of
them are valid.

Verification (`lz verify kernels`) writes a certificate for one build of the kernel, one device with
its driver and torch, and one version of the contract. If one of these changes the certificate is
void; nothing has to be deleted. Each file is sealed with a key that only this user can read (or
that a fleet shares, LAYERZERO_SEAL_KEY): an edited one is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ..machine.builds import build_of, source_digest
from ..spec.codec import Count, Record
from ..spec.device import Device
from ..spec.errors import DataError
from ..spec.event import CertificateRefused
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.paths import cache_dir
from ..spec.reading import read_json
from ..spec.reason import Code, Reason
from ..spec.sealed import SealedFolder, replace_file, trusted_folder
from . import events

FORMAT = 1


@dataclass(frozen=True)
class Certificate(Record, header={"format": FORMAT}):
    """What was verified of a kernel, and where. `worst` is its largest error over the allowed
    error, at most 1."""

    kernel: str
    op: str
    build: str
    contract: str
    device: str                                # signature
    device_name: str
    cases: Count                               # cases that ran
    skipped: Count                             # cases that the kernel's own rules refuse
    dtypes: tuple[str, ...]
    grid: str                                  # hash of the cases
    gradients: int = 0                         # cases whose gradients were compared too
    worst: float = 0.0
    # largest error over that of the eager formula at the same dtype
    worst_over_eager: float = 0.0
    deterministic: bool = False                # two runs gave the same bits in every case
    # every element of every result was written, over poisoned memory
    writes_all: bool = False
    nan_propagates: bool | None = None         # None: not checked for this op
    # by capture and replay; None: no CUDA, or no case to capture
    graph_safe: bool | None = None
    graph_problem: str = ""                    # why the capture failed, if it did
    graph_bytes: int = 0                       # memory pool of the largest capture
    made_at: str = ""
    layerzero: str = ""

    def void_reason(self, kernel: Kernel, device: Device) -> Reason | None:
        """Returns why the certificate is not valid for this kernel and device; None if it is."""
        for name, expected, actual in (
                ("build", self.build, build_of(kernel)),
                ("contract", self.contract, contract_of(kernel.op)),
                ("device or driver", self.device, device.signature)):
            if expected != actual:
                return Reason(Code.CERTIFICATE_VOID, f"{name} {expected}", actual)
        return None


def contract_of(op: Op) -> str:
    """Returns a hash that changes with what the op computes, its tolerance, and its test cases."""
    contract = _contracts.get(op)
    if contract is None:
        contract = _contracts[op] = _contract_hash(op)
    return contract


_contracts: WeakKeyDictionary[Op, str] = WeakKeyDictionary()


def _contract_hash(op: Op) -> str:
    declared = json.dumps(op.to_json(), sort_keys=True, default=str)
    return hashlib.sha256(f"{declared}\n{source_digest(op.reference)}".encode()).hexdigest()[:16]


def _store() -> SealedFolder:
    return SealedFolder(cache_dir(), "certificates")


def folder(device: Device) -> Path:
    return _store().path(device.signature)


def write(certificate: Certificate, device: Device) -> Path:
    """Writes the certificate where selection finds it, whole or not at all."""
    store, body = _store(), certificate.to_json()
    path = trusted_folder(store.root, store.name, device.signature) / f"{certificate.kernel}.json"
    text = json.dumps({"certificate": body, "seal": _seal(body, store.key(create=True))}, indent=1)
    replace_file(path, text.encode())
    return path


def read(path: Path) -> Certificate:
    """Reads a certificate; DataError if it is none, or was changed after it was sealed."""
    data = read_json(path, "a certificate as lz verify kernels writes it", nan=True)
    if not isinstance(data, Mapping) or not isinstance(data.get("certificate"), Mapping):
        raise DataError(f"{path}: wanted a certificate and its seal, got {str(data)[:120]}")
    # compare_digest takes only ASCII text
    seal = str(data.get("seal", "")).encode(errors="replace")
    try:
        key = _store().key()
    except FileNotFoundError:
        key = None                             # nothing was ever sealed here
    except OSError as e:
        raise DataError(f"{path}: the key of its seal cannot be read: {e.strerror}") from e
    if key is None or not hmac.compare_digest(seal, _seal(data["certificate"], key).encode()):
        raise DataError(
            f"{path}: the seal does not fit: the file was changed after it was written, or comes "
            "from another machine; run lz verify kernels here, or share the seal key "
            "(LAYERZERO_SEAL_KEY)")
    return Certificate.from_json(data["certificate"])


def statuses(kernels: Iterable[Kernel], device: Device) -> dict[str, Certificate | Reason]:
    """Returns for each kernel its certificate, or why it has no valid one here."""
    certificates, status = folder(device), {}  # type: Path, dict[str, Certificate | Reason]
    for kernel in kernels:
        path = certificates / f"{kernel.id}.json"
        if not path.exists():
            status[kernel.id] = Reason(Code.UNCERTIFIED)
            continue
        try:
            certificate = read(path)
            if certificate.kernel != kernel.id:
                raise DataError(f"{path}: it is the certificate of {certificate.kernel}")
            status[kernel.id] = certificate.void_reason(kernel, device) or certificate
        except DataError as e:
            events.emit(CertificateRefused(op=kernel.op.name, kernel=kernel.id, problem=str(e)))
            status[kernel.id] = Reason(Code.CERTIFICATE_REFUSED, None, str(e))
    return status


def certified_ids(kernels: Iterable[Kernel], device: Device) -> frozenset[str]:
    return frozenset(k for k, c in statuses(kernels, device).items() if isinstance(c, Certificate))


# CUDA graph captures: recorded in a certificate, or tried by this process.

_captures: dict[str, tuple[Kernel, str]] = {}  # kernel -> what went wrong; "" if nothing


def record_capture(kernel: Kernel, problem: str) -> None:
    """Records the result of a capture in this process; selection uses it once a world is
    published."""
    _captures[kernel.id] = kernel, problem


def capture_verdicts(kernels: Iterable[Kernel], device: Device) -> dict[str, bool]:
    """Returns whether each kernel that was captured here is safe in a CUDA graph."""
    by_id = {kernel.id: kernel for kernel in kernels}
    certificates = folder(device)
    certified = [k for k in by_id.values() if (certificates / f"{k.id}.json").exists()]
    verdicts = {k: c.graph_safe for k, c in statuses(certified, device).items()
                if isinstance(c, Certificate) and c.graph_safe is not None}
    return verdicts | {k: not problem for k, (kernel, problem) in _captures.copy().items()
                       if by_id.get(k) is kernel}


def _seal(body: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, json.dumps(body, sort_keys=True, default=str).encode(),
                    hashlib.sha256).hexdigest()
