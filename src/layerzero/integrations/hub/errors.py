"""The errors of kernels from repositories, each a DataError: files that cannot be used or trusted.

    HubError
    ├── NotHere             not in the cache or the folder; nothing is downloaded
    ├── NotAllowed          neither allowed nor pinned
    ├── UnsafePath          a name, link or archive member that leads out of the repository
    ├── NoVariant           no build of it fits this machine; every variant with its reason
    ├── LockViolation       other than the lockfile says
    │   └── Tampered        its files are not those that were pinned or signed
    ├── SignatureRefused    missing where one is demanded, or not valid
    ├── NamespaceClash      its torch operations would land among those of another
    └── Unproven            it does not keep the contract of the operation here
"""

from __future__ import annotations

from ...spec.errors import DataError


class HubError(DataError):
    """A kernel from a repository was refused; none of its code ran, or nothing of it was
    registered."""


class NotHere(HubError):
    """There is no such repository, version or function on this machine."""


class NotAllowed(HubError):
    """Nobody said that code of this repository may run."""


class UnsafePath(HubError):
    """A path leads out of the folder it belongs to."""


class NoVariant(HubError):
    """None of the builds in the repository fits this machine."""


class LockViolation(HubError):
    """The repository is not as the lockfile says."""


class Tampered(LockViolation):
    """A file was changed, added or removed since it was pinned."""


class SignatureRefused(HubError):
    """A signature is missing where one is demanded, or is not valid."""


class NamespaceClash(HubError):
    """Two kernels would register torch operations under one name."""


class Unproven(HubError):
    """The kernel was run against the contract of its operation and failed."""
