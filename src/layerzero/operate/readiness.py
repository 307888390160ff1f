"""Is this process ready to serve? The report, and the checks that need no calls.

A check says ok, warning or fail, what was wanted, what came and what to do. None of them writes
anything, starts a device that is not asked about, or waits for another process. The checks of the
calls themselves (kernels, certificates, warm-up, measurements, tables) are in plan/readiness.py.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..dispatch import native
from ..machine import hardware
from ..machine.loading import installed_version, satisfies
from ..machine.memory import free_bytes, headroom
from ..perf.interface import StoreError
from ..selection.policy import REDACTIONS, PolicyRule
from ..spec.codec import Record, encode
from ..spec.display import Cells, Displayed
from ..spec.errors import LayerZeroError
from ..spec.reason import Code
from ..world import capabilities, config, measurements, perf_loading, redaction
from ..world import snapshot as worlds
from ..world.snapshot import World
from ..world.tables import AgreedTable

SCHEMA = "layerzero.readiness/1"
OK, WARNING, FAIL = "ok", "warning", "fail"
TESTED = {"python": ">=3.10,<3.14", "torch": ">=2.8,<2.14"}    # what the test suite runs on
# of all memory: with less free, an allocation is likely to fail
LITTLE_MEMORY = 0.05
READ_SECONDS = 2.0                             # for a database that another process writes


class ReadinessFinding(NamedTuple):
    """One thing that is wrong, or may be."""

    state: str
    text: str
    hint: str = ""


def warning(text: str, hint: str) -> ReadinessFinding:
    return ReadinessFinding(WARNING, text, hint)


def failure(text: str, hint: str) -> ReadinessFinding:
    return ReadinessFinding(FAIL, text, hint)


@dataclass(frozen=True)
class ReadinessCheck(Record):
    """One line of the report."""

    name: str
    state: str                                 # ok | warning | fail
    want: str
    got: str
    hint: str = ""
    details: tuple[str, ...] = ()              # each finding, where there are several

    @classmethod
    def of(cls, name: str, want: str, findings: Iterable[ReadinessFinding],
           otherwise: str) -> ReadinessCheck:
        """Return the verdict over all findings; without any, ok, and `otherwise` says why."""
        ordered = sorted(dict.fromkeys(findings), key=lambda f: f.state != FAIL)
        if not ordered:
            return cls(name, OK, want, otherwise)
        more = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
        return cls(name, ordered[0].state, want, ordered[0].text + more,
                   "; ".join(dict.fromkeys(f.hint for f in ordered if f.hint)),
                   tuple(f"{f.state}: {f.text}" for f in ordered) if more else ())


@dataclass(frozen=True, repr=False)
class Readiness(Displayed):
    """The whole report. It is true where nothing failed."""

    checks: tuple[ReadinessCheck, ...]
    device: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[ReadinessCheck, ...]:
        return tuple(c for c in self.checks if c.state == FAIL)

    @property
    def warnings(self) -> tuple[ReadinessCheck, ...]:
        return tuple(c for c in self.checks if c.state == WARNING)

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, name: str) -> ReadinessCheck:
        return next(c for c in self.checks if c.name == name)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "ready": self.ok, "failed": len(self.failed),
                "warnings": len(self.warnings), "device": self.device,
                "checks": encode(self.checks)}

    def _cells(self) -> Cells:
        return ("state", "check", "found", "wanted", "do"), [
            (c.state, c.name, c.got, c.want, c.hint) for c in self.checks]

    def __str__(self) -> str:
        lines = [
            f"{'ready' if self.ok else 'not ready'}: {len(self.checks)} checks, {len(self.failed)} "
            f"failed, {len(self.warnings)} warnings"]
        for c in self.checks:
            lines.append(f"  {c.state:<8} {c.name:<13} {c.got}")
            lines += [f"           wanted: {c.want}"] * (c.state != OK)
            lines += [f"           do: {c.hint}"] * bool(c.hint)
        return "\n".join(lines)


# policy

def check_policy(world: World) -> ReadinessCheck:
    settings = world.policy.settings
    findings = [f for layer in world.policy.layers for rule in layer.rules
                for f in _rule_findings(rule, world)]
    if world.policy_file is not None:
        ops = {op.name: op.fact_names for op in world.catalog.ops.values()}
        try:
            config.load_policy_file(world.policy_file, ops)
        except LayerZeroError as e:
            findings.append(failure(
                f"the policy file is broken, the one before is in force: {first_line(e)}",
                "correct the policy file"))
    if settings["disabled"]:
        findings.append(warning("disabled is set: every call goes to torch's default",
                                "unset disabled"))
    if settings["strict_mode"] and settings["allow_adaptation"]:
        findings.append(warning(
            "strict_mode and allow_adaptation are both set; strict_mode wins", "unset one"))
    if settings["jit"] == "in_request":
        findings.append(warning(
            "jit is in_request: a request waits while a kernel is compiled for it",
            "set jit to background, or warm up all calls"))
    rules = sum(len(layer.rules) for layer in world.policy.layers)
    return ReadinessCheck.of(
        "policy", "a policy that loads and whose rules name kernels that are here", findings,
        f"policy {world.policy.hash}, {rules} rules, file: {world.policy_file or 'none'}")


def _rule_findings(rule: PolicyRule, world: World) -> Iterator[ReadinessFinding]:
    state = FAIL if rule.action == "lock" else WARNING
    for text in rule.unknown_kernels(world.catalog.op_of_kernel):
        yield ReadinessFinding(state, f"'{rule}' ({rule.origin}): {text}",
                               "correct the rule; lz list shows the kernels")


# capabilities

def check_capabilities(world: World, path: Path | str | None = None) -> ReadinessCheck:
    """Check the capabilities in force, and a file of them if one is to be used."""
    want = f"capabilities of schema {capabilities.SCHEMA} that fit the kernels here"
    data = capabilities.export(world.catalog)
    findings: list[ReadinessFinding] = []
    digest = capabilities.capabilities_hash(data)
    text = f"{len(data['kernels'])} kernels, hash {digest[:16]}"
    try:
        capabilities.validate(data, world.catalog)
        if path is not None:
            file_digest = capabilities.capabilities_hash(capabilities.load(path, world.catalog))
            text = f"{path} is valid, hash {file_digest[:16]}; " + (
                "it is in force" if file_digest == digest
                else f"in force are those with hash {digest[:16]}")
    except LayerZeroError as e:
        findings = [failure(" ".join(str(e).split()),
                            "correct the file, or export it again from this release")]
    return ReadinessCheck.of("capabilities", want, findings, text)


# database

def check_database(world: World) -> ReadinessCheck:
    """Check the database of measurements; nothing is written, not even beside it."""
    want = "a database of measurements that can be read"
    where = perf_loading.location(world.policy)
    if where is None:
        return ReadinessCheck("database", OK, want, "switched off: perfdb is off, nothing is kept")
    # a server: the status of its loading; no second connection is made
    if isinstance(where, str):
        status = measurements.status()
        return ReadinessCheck("database", OK if status.ok else FAIL, want, status.text,
                              "" if status.ok else status.hint)
    if not where.exists():
        return ReadinessCheck("database", OK, want, f"{where}: nothing was measured yet")
    from ..perf import snapshot  # sqlite3 is not loaded without a database
    try:
        summary = snapshot.summary(where, READ_SECONDS)
    except StoreError as e:
        return ReadinessCheck("database", FAIL, want, str(e),
                              "lz perf show says more; move the file away to begin anew")
    damaged = warning(f"{where}: {summary.damaged} rows are damaged and count for nothing",
                      "run lz tune again for them")
    return ReadinessCheck.of(
        "database", want, [damaged] if summary.damaged else [],
        f"{where}: schema {summary.version}, {summary.rows} measurements, "
        f"{summary.bytes >> 10} KiB")


# memory

def check_memory(world: World, kind: str, workspace: int = 0) -> ReadinessCheck:
    """Check free memory; `workspace` is the most that the kernels chosen for the calls need."""
    want = (f"room for {workspace:,} bytes of workspace and more than {LITTLE_MEMORY:.0%} of the "
            "memory free")
    if kind == "cuda" and not torch.cuda.is_initialized():
        return ReadinessCheck("memory", OK, want, "not asked: this process has not started the GPU")
    total, free = world.device(kind).total_memory, free_bytes(kind)
    available = headroom(kind, world.policy)
    findings = []
    if workspace > available:
        findings.append(failure(
            f"{workspace:,} bytes of workspace are needed, the headroom is {available:,}",
            "free memory, or raise memory_headroom"))
    if total and free < LITTLE_MEMORY * total:
        findings.append(warning(f"{free:,} of {total:,} bytes are free",
                                "free memory on the device"))
    headroom_setting = world.policy.setting("memory_headroom")
    if headroom_setting is not None and headroom_setting > free:
        findings.append(warning(
            f"memory_headroom promises {headroom_setting:,} bytes, {free:,} are free",
            "lower memory_headroom, or unset it to follow what is free"))
    return ReadinessCheck.of(
        "memory", want, findings,
        f"{free:,} of {total:,} bytes free on {kind}, headroom {available:,}")


# versions

def check_versions(world: World) -> ReadinessCheck:
    want = ", ".join(f"{name} {tested}"
                     for name, tested in TESTED.items()) + ", libraries in their ranges"
    installed = {"python": platform.python_version(), "torch": torch.__version__}
    findings = [warning(f"{name} {installed[name]} is outside {tested}, which is what was tested",
                        "run the release gate on it, or take a version of the range")
                for name, tested in TESTED.items()
                if not satisfies(installed[name].partition("+")[0], tested)]
    findings += _requirement_findings()
    for kernel, reason in {**world.availability(), **world.unloadable}.items():
        if reason.code in (Code.VERSION_CONFLICT, Code.ABI_MISMATCH, Code.IMPORT_FAILED):
            backend = kernel.partition(".")[0]
            findings.append(warning(f"{backend}: {reason.message}",
                                    "install the version its kernels take"))
    version = installed_version("layerzero") or "unknown"
    return ReadinessCheck.of(
        "versions", want, findings,
        f"layerzero {version}, python {installed['python']}, torch {installed['torch']}")


def _requirement_findings() -> Iterator[ReadinessFinding]:
    """Compare the installed packages with the requirements in our own metadata."""
    from packaging.requirements import InvalidRequirement, Requirement
    try:
        texts = importlib.metadata.requires("layerzero") or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is None or not satisfies(version, str(requirement.specifier)):
            yield failure(f"layerzero needs {requirement.name} {requirement.specifier}, "
                          f"{version or 'none'} is here",
                          f"pip install '{requirement.name}{requirement.specifier}'")


# health

def check_health(world: World) -> ReadinessCheck:
    """Check the breakers, kernels that failed to load, and the native call path."""
    findings = []
    for group, state in sorted(world.health.items()):
        if state.blocks is not None:
            is_final = state.state == "disabled"
            reason_text = state.reason.message if state.reason else f"{state.failures} faults"
            text = f"{group} is {state.state}: {reason_text}"
            findings.append(failure(text, "restart the process") if is_final
                            else warning(text, "it is tried again by itself"))
    for kernel, reason in sorted(world.unloadable.items()):
        findings.append(warning(f"{kernel}: {reason.message}", reason.code.advice))
    path = native.status()
    if path.hint and not path.ok:
        findings.append(warning(f"native call path: {path.text}", path.hint))
    return ReadinessCheck.of("health", "no kernel out of service, the native call path loaded",
                             findings, f"no breaker is open; native call path: {path.text}")


# ranks

def identity(world: World) -> dict[str, str]:
    """Return what must be equal on all ranks for them to select alike."""
    table = world.table.table.id if world.table is not None else ""
    return {"layerzero": installed_version("layerzero") or "unknown", "torch": torch.__version__,
            "policy": world.policy.hash, "table": table,
            "capabilities": capabilities.hash_of(world.catalog)[:16]}


def check_ranks(world: World, store: Any = None, rank: int = 0,
                size: int = 0) -> ReadinessCheck | None:
    """Compare this rank with the others; None if there is one process only.

    Each rank writes its identity into the store of the process group and reads those that are
    there. This is no collective: it cannot hang, and may run beside a model that communicates.
    """
    want = "the same policy, capabilities, table and versions on every rank"
    if store is None:
        distributed = sys.modules.get("torch.distributed")     # not imported: not initialised
        if (distributed is None or not distributed.is_available()
            or not distributed.is_initialized()):
            return None
        rank, size = distributed.get_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()
    own_identity = _line(identity(world))
    try:
        store.set(_key(rank), own_identity)
        identities = {r: store.get(_key(r)).decode() for r in range(size) if r == rank
                      or store.check([_key(r)])}
    # DistStoreError is a RuntimeError: the rank with the store is gone
    except (RuntimeError, ValueError) as e:
        return ReadinessCheck("ranks", FAIL, want,
                              f"the store of the process group does not answer: {first_line(e)}",
                              "restart the process group")
    findings = [failure(f"rank {r}: {_difference(own_identity, line)}",
                        "give every rank the same files and settings")
                for r, line in sorted(identities.items()) if line != own_identity]
    missing = [r for r in range(size) if r not in identities]
    if missing:
        findings.append(warning(f"{len(missing)} of {size} ranks have not been checked yet: "
                                f"{', '.join(map(str, missing[:8]))}",
                                "check readiness on every rank"))
    text = f"{size} ranks, all alike"
    if world.table is not None and isinstance(world.table.table, AgreedTable):
        agreement = world.table.table.agreement
        text = f"{agreement}, all alike"
        if agreement.mode == "inference":          # it goes on with what all ranks have
            findings = [f if f.state != FAIL else f._replace(state=WARNING) for f in findings]
    return ReadinessCheck.of("ranks", want, findings, text)


def _key(rank: int) -> str:
    return f"layerzero/readiness/{rank}"


def _line(data: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in data.items())


def _difference(here: str, there: str) -> str:
    pairs = zip(here.split(), there.split())
    return ", ".join(f"{b} instead of {a}" for a, b in pairs if a != b) or there


# all of them

def check_surroundings(world: World, kind: str, workspace: int = 0,
                       capabilities_file: Path | str | None = None) -> Iterator[ReadinessCheck]:
    yield check_policy(world)
    yield check_capabilities(world, capabilities_file)
    yield check_database(world)
    yield check_memory(world, kind, workspace)
    yield check_versions(world)
    yield check_health(world)
    if (check := check_ranks(world)) is not None:
        yield check


def without_world(error: LayerZeroError) -> Readiness:
    """Return the report where the policy cannot be read: nothing else can be checked."""
    return Readiness((ReadinessCheck(
        "policy", FAIL, "a policy that loads", " ".join(str(error).split()),
        "correct the policy file or the LAYERZERO_* variables"),))


def current_world() -> World | Readiness:
    try:
        return worlds.current()
    except LayerZeroError as e:
        # what policy hides is unknown, so everything is hidden
        redaction.use(",".join(REDACTIONS))
        return without_world(e)


def device_kind(device: str | None) -> str:
    """Return the kind of `device` if the machine has it; default: an accelerator, else CPU."""
    if device is None:
        return hardware.main_kind()
    return hardware.probe(device.partition(":")[0]).type


def redacted(report: Readiness) -> dict[str, Any]:
    """Return the report as JSON, redacted so that it may leave the machine."""
    shown: dict[str, Any] = redaction.data(report.to_json())
    return shown


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
