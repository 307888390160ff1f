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
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...files.paths import cache_dir
from ...files.reading import read_json
from ...files.sealed import SealedFolder, replace_file, trusted_folder
from ...machine.builds import build_of, source_digest
from ...spec.codec import Count, Record
from ...spec.device import Device
from ...spec.errors import DataError
from ...spec.event import CertificateRefused
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.reason import Code, Reason
from .. import events

FORMAT = 1
FAILED = ".failed.json"                        # beside the certificates


@dataclass(frozen=True)
class Certificate(Record, header={"format": FORMAT}):
    """Certifies what was verified of a kernel, and where. `worst` is its largest error over the
    allowed error, at most 1."""

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
    # a gradient's own gradient is right, or raises; None: not checked, as of libraries
    second_order: bool | None = None
    # by capture and replay; None: no CUDA, or no case to capture
    graph_safe: bool | None = None
    graph_problem: str = ""                    # why the capture failed, if it did
    graph_bytes: int = 0                       # memory pool of the largest capture
    covers: str = ""                           # the largest sizes and the pairs of arguments
    misses: str = ""                           # what was not run
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


@dataclass(frozen=True)
class FailedCertification(Record, header={"format": FORMAT}):
    """Records that a kernel failed verification: its build, contract and device, the class of the
    mistake and its evidence. It holds as long as a certificate would."""

    kernel: str
    op: str
    build: str
    contract: str
    device: str                                # signature
    kind: str
    says: str
    made_at: str = ""
    layerzero: str = ""

    def applies(self, kernel: Kernel, device: Device) -> bool:
        return (self.kernel, self.build, self.contract, self.device) == (
            kernel.id, build_of(kernel), contract_of(kernel.op), device.signature)


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
    """Writes the certificate for selection, whole or not at all; failures are forgotten."""
    path = _write(f"{certificate.kernel}.json", certificate.to_json(), device)
    path.with_name(f"{certificate.kernel}{FAILED}").unlink(missing_ok=True)
    return path


def write_failure(failure: FailedCertification, device: Device) -> Path:
    """Writes that a kernel failed, which keeps selection from it; a certificate it had is gone."""
    path = _write(f"{failure.kernel}{FAILED}", failure.to_json(), device)
    path.with_name(f"{failure.kernel}.json").unlink(missing_ok=True)
    return path


def _write(name: str, body: Mapping[str, Any], device: Device) -> Path:
    store = _store()
    try:
        path = trusted_folder(store.root, store.name, device.signature) / name
        seal = _seal(body, store.key(create=True))
        replace_file(path, json.dumps({"certificate": body, "seal": seal}, indent=1).encode())
    except OSError as e:
        raise DataError(f"{folder(device) / name}: the certificate cannot be kept: {e.strerror}; "
                        "set LAYERZERO_CACHE_DIR to a folder that can be written") from e
    return path


def _file_names(device: Device) -> frozenset[str]:
    """Returns the names of the certificates of a device. A folder that cannot be read, which a
    call must survive, holds none, and an event says so."""
    try:
        return frozenset(os.listdir(folder(device)))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as e:
        events.emit(CertificateRefused(problem=f"{folder(device)} cannot be read: {e.strerror}"))
        return frozenset()


def read(path: Path) -> Certificate:
    """Reads a certificate; DataError if it is none, or was changed after it was sealed."""
    return Certificate.from_json(_sealed_body(path))


def _sealed_body(path: Path) -> Mapping[str, Any]:
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
    body: Mapping[str, Any] = data["certificate"]
    return body


def failures(kernels: Iterable[Kernel], device: Device) -> dict[str, Reason]:
    """Returns why kernels failed verification here, as they are now. A file that is not trusted
    keeps nobody out, and says so."""
    names = _file_names(device)
    failed = {}
    for kernel in kernels if names else ():
        if kernel.backend == "reference" or f"{kernel.id}{FAILED}" not in names:
            continue
        try:
            failure = FailedCertification.from_json(
                _sealed_body(folder(device) / f"{kernel.id}{FAILED}"))
        except DataError as e:
            events.emit(CertificateRefused(op=kernel.op.name, kernel=kernel.id, problem=str(e)))
            continue
        if failure.applies(kernel, device):
            failed[kernel.id] = Reason(Code.CERTIFICATION_FAILED, None,
                                       f"{failure.kind}: {failure.says[:200]}")
    return failed


def statuses(kernels: Iterable[Kernel], device: Device) -> dict[str, Certificate | Reason]:
    """Returns for each kernel its certificate, or why it has no valid one here."""
    names, status = _file_names(device), {}  # type: frozenset[str], dict[str, Certificate | Reason]
    for kernel in kernels:
        path = folder(device) / f"{kernel.id}.json"
        if path.name not in names:
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
    """Records the result of a capture here; selection uses it from the next world on."""
    _captures[kernel.id] = kernel, problem


def capture_verdicts(kernels: Iterable[Kernel], device: Device) -> dict[str, bool]:
    """Returns whether each kernel that was captured here is safe in a CUDA graph."""
    by_id = {kernel.id: kernel for kernel in kernels}
    names = _file_names(device)
    certified = [k for k in by_id.values() if f"{k.id}.json" in names]
    verdicts = {k: c.graph_safe for k, c in statuses(certified, device).items()
                if isinstance(c, Certificate) and c.graph_safe is not None}
    return verdicts | {k: not problem for k, (kernel, problem) in _captures.copy().items()
                       if by_id.get(k) is kernel}


def _seal(body: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, json.dumps(body, sort_keys=True, default=str).encode(),
                    hashlib.sha256).hexdigest()
