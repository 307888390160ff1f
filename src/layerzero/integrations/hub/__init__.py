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
from .explanation import HubExplanation
from .hub import Hub, Loaded
from .lockfile import HubLock
from .variants import Accepted, Rejected

__all__ = [
    "Accepted",
    "Content",
    "Hub",
    "HubError",
    "HubExplanation",
    "HubLock",
    "Loaded",
    "LockViolation",
    "NamespaceClash",
    "NoVariant",
    "NotAllowed",
    "NotHere",
    "Rejected",
    "SignatureRefused",
    "Tampered",
    "Unproven",
    "UnsafePath",
    "unpack",
]
