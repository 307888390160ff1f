"""Kernels from the Kernel Hub, through `kernels`: see docs/hub.md."""

from __future__ import annotations

from .content import Content, unpack
from .errors import (
    HubError,
    LockViolation,
    NamespaceClash,
    NotAllowed,
    NotHere,
    NoVariant,
    SignatureRefused,
    Tampered,
    Unproven,
    UnsafePath,
)
from .hub import Explanation, Hub, Loaded
from .lockfile import Lock
from .variants import Accepted, Rejected

__all__ = [
    "Accepted", "Content", "Explanation", "Hub", "HubError", "Loaded", "Lock", "LockViolation", "NamespaceClash",
    "NoVariant", "NotAllowed", "NotHere", "Rejected", "SignatureRefused", "Tampered", "Unproven", "UnsafePath",
    "unpack",
]
