"""What a rank is: everything that two ranks must have in common to choose alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...machine import hardware
from ...machine.builds import build_of
from ...machine.loading import installed_version
from ...operate.readiness import identity
from ...plan.table import distribution_of
from ...world.snapshot import World


class Profile(NamedTuple):
    """Versions, hashes and kernels of one rank."""

    identity: Mapping[str, str]                # layerzero, torch, policy, table, capabilities
    libraries: Mapping[str, str]               # distribution -> version
    builds: Mapping[str, str]                  # kernel that can be loaded here -> its build
    device: str                                # signature of the device its work is on

    @classmethod
    def of(cls, world: World) -> Profile:
        absent = world.availability()
        here = [k for k in world.catalog.kernels if k.id not in absent]
        libraries = sorted({distribution_of(k) for k in here})
        return cls(identity(world),
                   {name: installed_version(name) or "unknown" for name in libraries},
                   {k.id: build_of(k) for k in here},
                   world.device(hardware.main_kind()).signature)

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Profile:
        return cls(*data)

    def differences(self, other: Profile, devices: bool) -> list[str]:
        """Return what `other` has otherwise, each as "name other instead of own"."""
        pairs = [(name, value, other.identity.get(name, "absent"))
                 for name, value in self.identity.items()]
        pairs += [(name, self.libraries.get(name, "absent"), other.libraries.get(name, "absent"))
                  for name in sorted({*self.libraries, *other.libraries})
                  if name not in self.identity]
        if devices:
            pairs.append(("device", self.device, other.device))
        texts = [f"{name} {there or 'none'} instead of {here or 'none'}"
                 for name, here, there in pairs if here != there]
        kernels = sorted(k for k in {*self.builds, *other.builds}
                         if self.builds.get(k) != other.builds.get(k))
        if kernels and not texts:              # where a version differs, that says it already
            more = f" and {len(kernels) - 4} more" if len(kernels) > 4 else ""
            texts.append(f"another build of {', '.join(kernels[:4])}{more}")
        return texts


def not_shared(profiles: Sequence[Profile], world: World) -> tuple[str, ...]:
    """Return the kernels of this world that some rank lacks or has in another build.

    Torch's own and the references stay in that case: every rank has some of them, and a call must
    be served by something.
    """
    always_shared = {k.id for k in world.catalog.kernels if k.baseline or k.backend == "reference"}
    builds = [p.builds for p in profiles]
    return tuple(k for k in sorted(set().union(*builds)) if k in world.catalog.by_id
                 and k not in always_shared and len({b.get(k) for b in builds}) > 1)
