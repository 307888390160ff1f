"""Whether a repository of kernels would be loaded here, and why: the checks and their outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import HubError
from .variants import Accepted, Verdict


@dataclass(frozen=True)
class RepositoryCheck:
    """One check of a repository; `error` is what loading it would raise."""

    name: str
    detail: str
    error: HubError | None = None


@dataclass(frozen=True)
class HubExplanation:
    """Explains whether a repository would be loaded here, and why."""

    name: str
    version: str
    checks: tuple[RepositoryCheck, ...]
    verdicts: tuple[Verdict, ...] = ()
    variant: str = ""                          # the build that would be imported
    sha256: str = ""

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def errors(self) -> tuple[HubError, ...]:
        return tuple(c.error for c in self.checks if c.error is not None)

    def __str__(self) -> str:
        lines = [f"{self.name} {self.version}".rstrip()
                 + (f": {self.variant}" if self.ok else ": refused")]
        lines += [f"  {'ok' if c.error is None else '!!'}  {c.name}: {c.detail}"
                  for c in self.checks]
        lines += [f"  {'->' if v.variant == self.variant else '  '}  {v}" for v in self.verdicts]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "ok": self.ok, "variant": self.variant,
                "sha256": self.sha256,
                "checks": [{"name": c.name, "ok": c.error is None, "detail": c.detail,
                            "error": type(c.error).__name__ if c.error else ""}
                           for c in self.checks],
                "variants": [{"variant": v.variant, "accepted": isinstance(v, Accepted),
                              "reason": v.note if isinstance(v, Accepted) else v.reason}
                             for v in self.verdicts]}
