"""Proof that a kernel keeps its contract on this machine, as a file; and which of the files hold today.

A certificate is made by verification (`lz verify`) and says for what it holds: the build of the kernel, the device
with its driver and torch, and the contract as it was. If one of these changes it is void by itself: nothing has to be
deleted. Each file is sealed with a key that only this user can read (or that a fleet shares, LAYERZERO_SEAL_KEY), so
that one that was edited is refused.
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

from ..machine.builds import build_of, sources_of
from ..spec.codec import Count, Record
from ..spec.device import Device
from ..spec.errors import DataError
from ..spec.event import CertificateRefused
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.paths import cache_dir
from ..spec.reading import read_json
from ..spec.reason import Code, Reason
from ..spec.sealed import Store, replace_file, trusted_folder
from . import events

FORMAT = 1


@dataclass(frozen=True)
class Certificate(Record, header={"format": FORMAT}):
    """What was shown of a kernel, and where. `worst` is its error over what was allowed, so at most 1."""

    kernel: str
    op: str
    build: str
    contract: str
    device: str                                # signature
    device_name: str
    cases: Count                               # that ran
    skipped: Count                             # that the kernel's own rules refuse
    dtypes: tuple[str, ...]
    grid: str                                  # hash of the cases
    gradients: int = 0                         # cases whose gradients were compared too
    worst: float = 0.0
    worst_over_eager: float = 0.0              # largest error over that of the eager formula at the same dtype
    deterministic: bool = False                # two runs gave the same bits in every case
    writes_all: bool = False                   # every element of every result was written, over poisoned memory
    nan_propagates: bool | None = None         # None: not asked of this op
    graph_safe: bool | None = None             # by capture and replay; None: no CUDA here, or no case to try it with
    graph_problem: str = ""                    # what came in the way of the capture, where it failed
    graph_bytes: int = 0                       # memory that the largest of the captures kept for itself
    made_at: str = ""
    layerzero: str = ""

    def void(self, kernel: Kernel, device: Device) -> Reason | None:
        """Why it does not hold for this kernel on this device today; None if it does."""
        for name, then, now in (
                ("build", self.build, build_of(kernel)), ("contract", self.contract, contract_of(kernel.op)),
                ("device or driver", self.device, device.signature)):
            if then != now:
                return Reason(Code.CERTIFICATE_VOID, f"{name} {then}", now)
        return None


def contract_of(op: Op) -> str:
    """Changes whenever what the op means, how wrong it may be, or what it is tested with changes."""
    found = _contracts.get(op)
    if found is None:
        found = _contracts[op] = _contract(op)
    return found


_contracts: WeakKeyDictionary[Op, str] = WeakKeyDictionary()


def _contract(op: Op) -> str:
    declared = json.dumps(op.to_json(), sort_keys=True, default=str)
    return hashlib.sha256(f"{declared}\n{sources_of(op.reference)}".encode()).hexdigest()[:16]


def _store() -> Store:
    return Store(cache_dir(), "certificates")


def folder(device: Device) -> Path:
    return _store().path(device.signature)


def write(certificate: Certificate, device: Device) -> Path:
    """Put it where selection finds it. Written whole or not at all."""
    store, body = _store(), certificate.to_json()
    path = trusted_folder(store.root, store.name, device.signature) / f"{certificate.kernel}.json"
    text = json.dumps({"certificate": body, "seal": _seal(body, store.key(create=True))}, indent=1)
    replace_file(path, text.encode())
    return path


def read(path: Path) -> Certificate:
    """Raises DataError for what is no certificate, or was changed since it was sealed."""
    data = read_json(path, "a certificate as lz verify writes it", nan=True)
    if not isinstance(data, Mapping) or not isinstance(data.get("certificate"), Mapping):
        raise DataError(f"{path}: wanted a certificate and its seal, got {str(data)[:120]}")
    seal = str(data.get("seal", "")).encode(errors="replace")   # of text, only ASCII can be compared
    try:
        key = _store().key()
    except FileNotFoundError:
        key = None                             # so nothing was ever sealed here
    except OSError as e:
        raise DataError(f"{path}: the key of its seal cannot be read: {e.strerror}") from e
    if key is None or not hmac.compare_digest(seal, _seal(data["certificate"], key).encode()):
        raise DataError(f"{path}: the seal does not fit: the file was changed after it was written, or comes from "
                        "another machine; run lz verify here, or share the seal key (LAYERZERO_SEAL_KEY)")
    return Certificate.from_json(data["certificate"])


def standing(kernels: Iterable[Kernel], device: Device) -> dict[str, Certificate | Reason]:
    """For each kernel its certificate, or why it has none that holds here."""
    home, found = folder(device), {}           # type: Path, dict[str, Certificate | Reason]
    for kernel in kernels:
        path = home / f"{kernel.id}.json"
        if not path.exists():
            found[kernel.id] = Reason(Code.UNCERTIFIED)
            continue
        try:
            certificate = read(path)
            if certificate.kernel != kernel.id:
                raise DataError(f"{path}: it is the certificate of {certificate.kernel}")
            found[kernel.id] = certificate.void(kernel, device) or certificate
        except DataError as e:
            events.emit(CertificateRefused(op=kernel.op.name, kernel=kernel.id, problem=str(e)))
            found[kernel.id] = Reason(Code.CERTIFICATE_REFUSED, None, str(e))
    return found


def certified(kernels: Iterable[Kernel], device: Device) -> frozenset[str]:
    return frozenset(k for k, c in standing(kernels, device).items() if isinstance(c, Certificate))


# Captures: in a certificate, or tried by this process.

_tried: dict[str, tuple[Kernel, str]] = {}     # kernel -> what came in the way; "" where nothing did


def note_capture(kernel: Kernel, problem: str) -> None:
    """What a capture in this process has shown of a kernel; later selections know it once a world is published."""
    _tried[kernel.id] = kernel, problem


def capture_verdicts(kernels: Iterable[Kernel], device: Device) -> dict[str, bool]:
    """Which kernels can be captured in a CUDA graph here, as was shown by capturing; those not tried are not in it."""
    every = {kernel.id: kernel for kernel in kernels}
    home = folder(device)
    told = [k for k in every.values() if (home / f"{k.id}.json").exists()]
    found = {k: c.graph_safe for k, c in standing(told, device).items()
             if isinstance(c, Certificate) and c.graph_safe is not None}
    return found | {k: not problem for k, (kernel, problem) in _tried.copy().items() if every.get(k) is kernel}


def _seal(body: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, json.dumps(body, sort_keys=True, default=str).encode(), hashlib.sha256).hexdigest()
