"""Kernels in worker processes: for each kernel that policy isolates, the catalog has a second one,
`worker.<id>`, which is selected, measured, verified and explained like any other.

What it costs to reach the worker is in what is measured of it, so it serves only where it pays. It
has no gradient, and is not captured or traced.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import codegen
from ...machine import builds, loading
from ...machine.faults import WorkerFault
from ...machine.isolation import pool
from ...machine.isolation.process import Limits, environment
from ...selection.isolation import Isolation, parse
from ...selection.policy import Policy
from ...spec import rules as r
from ...spec.kernel import SDPA, Kernel
from ...spec.op import Op
from ...spec.reason import Code, Reason
from .catalog import Catalog

if TYPE_CHECKING:
    from ..snapshot import World

MIN_BYTES = 16 << 20                           # that a worker shares with this process
ANSWER_SECONDS = 20.0                          # for an interpreter to say where its packages are
OVERHEAD_US = 30.0                             # of a small call, until it is measured
# why a library cannot be used in this process and might be in another
CONFLICTS = (Code.VERSION_CONFLICT, Code.ABI_MISMATCH, Code.IMPORT_FAILED)
_NO_DROPOUT = r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED)


def apply(old: World, new: World, policy_in_force: Callable[[], Policy]) -> World:
    """Returns the new world with the worker kernels that its policy asks for."""
    if all(getattr(old, name) is getattr(new, name)
           for name in ("catalog", "policy", "unloadable")):
        return new
    catalog = isolate(new.catalog, new.policy, new.unloadable, policy_in_force)
    return new if catalog is new.catalog else new.replace(catalog=catalog)


def isolate(catalog: Catalog, policy: Policy, unloadable: Mapping[str, Reason],
            policy_in_force: Callable[[], Policy]) -> Catalog:
    """Returns the catalog with the worker kernels of the policy; the same one if it has them."""
    entries = parse(policy.setting("isolation"))
    present = {k.id: _origin(k) for k in catalog.kernels if k.isolated and _origin(k)}
    if not entries and not present:
        return catalog
    kernels = [_declared(k) for k in catalog.kernels if not (k.isolated and _origin(k))]
    wanted: dict[str, tuple[Kernel, Isolation]] = {}
    for kernel in kernels:
        entry = next((e for e in entries if e.covers(kernel.id)), None)
        if entry is not None and not why_not_in_worker(kernel) and (
                entry.mode == "worker" or conflicts(kernel, entry, unloadable)):
            wanted[f"worker.{kernel.id}"] = kernel, entry
    if wanted == present:
        return catalog
    pool.close_others({(_worker(k), entry.python) for k, entry in wanted.values()})
    by_id = {k.id: k for k in catalog.kernels}
    workers = [by_id[name] if present.get(name) == origin
               else worker_kernel(name, *origin, policy_in_force)
               for name, origin in wanted.items()]
    moved = {k.id for k, entry in wanted.values() if entry.mode == "worker"}
    origins = {name: o for name, o in catalog.origins.items() if name not in present}
    here = (_in_worker(k) if k.id in moved else k for k in kernels)
    return Catalog(catalog.ops, (*here, *workers),
                   {**origins, **dict.fromkeys(wanted, "isolation")})


def why_not_in_worker(kernel: Kernel) -> str:
    """Says why a kernel cannot run in a worker; "" if it can."""
    op = kernel.op
    if kernel.backend == "reference":
        return "the reference is what the others fall back to"
    strange = [p.name for p in op.params if p.kind in ("generator", "object")]
    if op.read is not None or strange:
        return f"lz.{op.name} takes what does not travel: {', '.join(strange) or 'objects'}"
    if _remote(kernel) is None and (_module(kernel) in ("__main__", "")
                                    or _module(kernel) not in sys.modules):
        return "its load is not of a module that another process can import"
    return ""


def conflicts(kernel: Kernel, entry: Isolation, unloadable: Mapping[str, Reason]) -> bool:
    """Returns whether the library is unusable here and may be usable in the interpreter."""
    reason = unloadable.get(kernel.id) or loading.availability(kernel)
    if reason is None or not kernel.package:
        return False
    if entry.python:
        return (reason.code in (*CONFLICTS, Code.NOT_INSTALLED)
                and version_in(entry.python, loading.distribution_of(kernel)) != "")
    # the same interpreter has the same versions: only what clashes with this process is left
    return kernel.id in unloadable and reason.code in CONFLICTS


def worker_kernel(name: str, kernel: Kernel, entry: Isolation,
                  policy_in_force: Callable[[], Policy]) -> Kernel:
    """Returns the kernel that has a worker run `kernel`."""
    where = entry.python or "an interpreter like this one"
    # what travels is memory: no subclass, no tangent, no wrapper of a transform
    added = (r.plain_tensors(), *((_NO_DROPOUT,) if "dropout_p" in kernel.op.by_name else ()))
    return replace(
        kernel, id=name, load=_loader(kernel, entry, policy_in_force),
        requires=(*kernel.requires, *(a for a in added if a not in kernel.requires)), package="",
        distribution="", version="", torch="", prior=kernel.prior * 0.8,
        overhead_us=kernel.overhead_us + OVERHEAD_US, differentiable=False, graph_safe=False,
        traceable=False, baseline=False, less_work="", less_work_when=(), jit=False,
        sdpa_backend="" if kernel.sdpa_backend == SDPA else kernel.sdpa_backend, replayable=False,
        note=f"{kernel.id} in a process of its own ({where})", built=None)


def _loader(kernel: Kernel, entry: Isolation,
            policy_in_force: Callable[[], Policy]) -> Callable[[], Callable[..., Any]]:
    last: tuple[Policy | None, Limits] = None, Limits(0.0, 0)

    def limits() -> Limits:
        nonlocal last
        policy = policy_in_force()
        if last[0] is not policy:              # one tuple: other threads read it
            seconds = policy.setting("isolation_timeout"), policy.setting("call_timeout")
            nbytes = policy.setting("isolation_memory") or _half_of_memory()
            last = policy, Limits(min(s for s in seconds if s is not None),
                                  max(nbytes, MIN_BYTES))
        return last[1]

    def load() -> Callable[..., Any]:
        workers = pool.pool_of(_worker(kernel), entry.python, limits,
                               lambda: int(policy_in_force().setting("isolation_workers")))
        declared = kernel.to_json()
        try:
            accepted = workers.load({"id": kernel.id, "module": _module(kernel),
                                     "path": _folder(kernel), "kernel": declared,
                                     "remote": _remote(kernel)})
        except (WorkerFault, OSError) as e:
            raise loading.LoadFailed(Reason(Code.WORKER_UNAVAILABLE, None, str(e)[:300])) from e
        unknown = [name for name in accepted if name not in kernel.op.by_name]
        if unknown:                            # another release of ours, perhaps
            raise loading.LoadFailed(Reason(
                Code.WORKER_UNAVAILABLE, None,
                f"it takes {', '.join(unknown)}, which lz.{kernel.op.name} has not"[:300]))
        return _proxy(kernel.op, kernel.id, accepted, workers)

    load.build = partial(_build, kernel, entry.python)  # type: ignore[attr-defined]
    load.origin = kernel, entry  # type: ignore[attr-defined]
    return load


def _proxy(op: Op, kernel: str, accepted: tuple[str, ...],
           workers: pool.Pool) -> Callable[..., Any]:
    """Returns a function of the parameters that the kernel takes, which calls it in a worker."""
    in_place = tuple(i for i, name in enumerate(accepted) if name in op.in_place)
    names = ", ".join(accepted)
    scope: dict[str, Any] = {"CALL": workers.call, "KERNEL": kernel, "IN_PLACE": in_place}
    source = f"def run({names}):\n    return CALL(KERNEL, ({names},), IN_PLACE)"
    exec(codegen.compile(source, f"{op.name} in a worker"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


def _in_worker(kernel: Kernel) -> Kernel:
    """Returns the kernel marked as isolated: it is not loaded in this process."""
    def built() -> Reason:
        return Reason(Code.ISOLATED, "the setting isolation", f"worker.{kernel.id}")

    built.declared = kernel  # type: ignore[attr-defined]
    return replace(kernel, built=built)


def _declared(kernel: Kernel) -> Kernel:
    declared: Kernel = getattr(kernel.built, "declared", kernel)
    return declared


def _origin(kernel: Kernel) -> tuple[Kernel, Isolation] | None:
    return getattr(kernel.load, "origin", None)


def _remote(kernel: Kernel) -> dict[str, Any] | None:
    """Returns how a worker loads what is not declared in a module; None for what is."""
    remote: dict[str, Any] | None = getattr(kernel.load, "remote", None)
    return remote


def _worker(kernel: Kernel) -> str:
    """Kernels with one name share a worker: those of a library, or of a version of a repository."""
    remote = _remote(kernel)
    return kernel.backend if remote is None else str(remote["worker"])


def _module(kernel: Kernel) -> str:
    return builds.module_of(kernel.load)


def _folder(kernel: Kernel) -> list[str]:
    """Returns where a worker finds the module of a kernel that is not ours; never a folder of
    installed packages, which may hold another torch than the worker's."""
    top = _module(kernel).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if top == "layerzero" or not file:
        return []
    path = Path(file).parent
    path = path.parent if Path(file).name == "__init__.py" else path
    return [] if path.name in ("site-packages", "dist-packages") else [str(path)]


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@lru_cache(maxsize=None)
def installed(python: str) -> Mapping[str, str]:
    """Returns the distributions of another interpreter and their versions; "" is this one's."""
    distributions = (importlib.metadata.distributions(path=_search_path(python)) if python
                     else importlib.metadata.distributions())
    versions: dict[str, str] = {}
    for d in distributions:                    # the first of a name is the one that is imported
        if d.metadata["Name"]:
            versions.setdefault(d.metadata["Name"].lower().replace("_", "-"), d.version)
    return versions


def _search_path(python: str) -> list[str]:
    """Returns where an interpreter looks for packages. It is asked, since an environment may take
    some from the system's or by a .pth file; one that does not answer has its own folder."""
    try:
        answer = subprocess.run(
            [python, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS,
            env=environment(python))
        return [str(folder) for folder in json.loads(answer.stdout)]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return [str(p) for p in Path(python).parent.parent.glob("lib/python3*/site-packages")]


def version_in(python: str, distribution: str) -> str:
    """Returns the version of a distribution in another interpreter; "" if it is not there."""
    return installed(python).get(distribution.lower().replace("_", "-"), "")


def _build(kernel: Kernel, python: str) -> str:
    """Returns a worker kernel's build: the kernel's in its interpreter, and torch there."""
    if not python:
        return f"worker {builds.build_of(kernel)}"
    name = loading.distribution_of(kernel)
    return (f"worker {name}=={version_in(python, name)} torch=={version_in(python, 'torch')}"
            f"#{builds.source_digest(kernel.load)}")
