"""Kernels from repositories laid out as the Kernel Hub does it: found, checked, imported, registered.

A repository is code of strangers. Before any of it runs: it is allowed or pinned, its build fits this machine, its
files are those that were pinned or signed, and what is imported is a copy nobody else writes to. Before selection may
choose it, it has kept the contract of its operation on this machine.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ...machine import hardware
from ...machine.builds import sources_of
from ...machine.loading import installed_version, satisfies
from ...spec.errors import RegistrationError
from ...spec.kernel import Direct, Kernel
from ...spec.op import Op
from ...spec.rules import Condition, device
from ...verify.kernel.certify import certify_all
from ...world import certificates
from ...world import snapshot as worlds
from ...world.catalog import builtin_ops
from . import importing, lockfile, sources
from .content import Content, home_of_copy, private_copy
from .errors import HubError, LockViolation, NotAllowed, NotHere, NoVariant, SignatureRefused, Tampered, Unproven
from .sources import Place
from .variants import Accepted, Verdict, judge

PEER = ">=0.17"                                # of `kernels`
SIGNATURE = "metadata.json.sigstore"
SIGNATURES = ("present", "required", "ignored")
VALID, VERIFIED = "valid", "signature-valid"   # what is said of one, and the file that remembers it


@dataclass(frozen=True)
class Check:
    """One question that was asked of a repository. `error` is what loading it would raise."""

    name: str
    found: str
    error: HubError | None = None


@dataclass(frozen=True)
class Explanation:
    """What would happen to a repository here, and why."""

    name: str
    version: str
    checks: tuple[Check, ...]
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
        lines = [f"{self.name} {self.version}".rstrip() + (f": {self.variant}" if self.ok else ": refused")]
        lines += [f"  {'ok' if c.error is None else '!!'}  {c.name}: {c.found}" for c in self.checks]
        lines += [f"  {'->' if v.variant == self.variant else '  '}  {v}" for v in self.verdicts]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "ok": self.ok, "variant": self.variant,
                "sha256": self.sha256,
                "checks": [{"name": c.name, "ok": c.error is None, "found": c.found,
                            "error": type(c.error).__name__ if c.error else ""} for c in self.checks],
                "variants": [{"variant": v.variant, "accepted": isinstance(v, Accepted),
                              "reason": v.note if isinstance(v, Accepted) else v.reason} for v in self.verdicts]}


@dataclass(frozen=True)
class Loaded:
    """A build that was checked and imported."""

    name: str
    version: str
    variant: str
    sha256: str
    module: ModuleType = field(repr=False)
    id: str = ""                               # also the namespace of its torch operations

    @property
    def offers(self) -> tuple[str, ...]:
        said = getattr(self.module, "__all__", None)
        return tuple(said if said is not None else (n for n in vars(self.module) if not n.startswith("_")))


@dataclass(frozen=True)
class _Checked:
    place: Place
    folder: Path                               # of the build in the repository
    content: Content
    metadata: Any

    def copied(self) -> _Checked:
        folder = private_copy(self.folder, self.place.root, self.content)
        return replace(self, folder=folder, metadata=importing.metadata_of(folder))


@dataclass(frozen=True)
class Hub:
    """Where repositories come from, and what is asked of them.

    `folders` are local repositories by name, or by name@version; what is in none of them is looked for in the cache
    that `kernels` downloads to. A name is allowed if `allow` has a pattern for it or the lockfile pins it. With a
    lockfile everything must be pinned.
    """

    folders: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)
    allow: tuple[str, ...] = ()                # "kernels-community/*"
    lock: str | os.PathLike[str] | None = None
    cache: str | os.PathLike[str] | None = None
    signature: str = "present"                 # "required"; "present": must be valid where there is one; "ignored"
    portable: bool = False                     # also demand manylinux_2_28 and the stable ABI of Python
    backend: str | None = None                 # cpu, cuda, ...; None: what torch was built for

    def __post_init__(self) -> None:
        if isinstance(self.allow, str):
            raise HubError(f"allow= takes several patterns, such as ('kernels-community/*',); got {self.allow!r}")
        if self.signature not in SIGNATURES:
            raise HubError(f"signature= is one of {', '.join(SIGNATURES)}; got {self.signature!r}")
        for key in self.folders:
            sources.checked_name(key.partition("@")[0])

    @cached_property
    def locked(self) -> lockfile.Lock | None:
        return None if self.lock is None else lockfile.read(Path(self.lock))

    @property
    def cache_folder(self) -> Path:
        return Path(self.cache) if self.cache is not None else sources.default_cache()

    # Asking

    def explain(self, name: str, *, version: int | None = None, revision: str | None = None) -> Explanation:
        """Every check and every build with its verdict. Runs none of the repository's code."""
        return self._ask(name, sources.checked_version(version, revision))[0]

    def _ask(self, name: str, version: str) -> tuple[Explanation, _Checked | None]:
        need_peer()
        sources.checked_name(name)
        asked: list[Check] = []

        def ask(what: str, question: Callable[[], tuple[Any, str]]) -> Any:
            try:
                answer, found = question()
            except HubError as e:
                asked.append(Check(what, str(e), e))
                return None
            asked.append(Check(what, found))
            return answer

        verdicts: tuple[Verdict, ...] = ()
        chosen, found = "", None
        ask("allowed", lambda: self._allowed(name))
        if not version and self.locked is not None and name in self.locked:
            version = self.locked.pin(name, "")[0].rpartition("@")[2] if self._pins(name) == 1 else ""
        place = ask("place", lambda: self._place(name, version))
        if place is not None:
            verdicts = judge(place.build, place.root, self.backend, self.portable)
            chosen = ask("build", lambda: _chosen(place, verdicts)) or ""
        if chosen:
            found = ask("files", lambda: _read(place, place.build / chosen))
        if found is not None:
            version = version or str(found.metadata.version)
            ask("version", lambda: _same_version(found, version))
            ask("lockfile", lambda: self._pinned(found, version))
            ask("digest", lambda: _digest(found))
            ask("signature", lambda: self._signature(found))
        sha256 = found.content.sha256 if found is not None else ""
        return Explanation(name, version, tuple(asked), verdicts, chosen, sha256), found

    def _pins(self, name: str) -> int:
        return sum(key.rpartition("@")[0] == name for key in (self.locked.pins if self.locked else ()))

    def _allowed(self, name: str) -> tuple[bool, str]:
        if pattern := next((p for p in self.allow if fnmatchcase(name, p)), ""):
            return True, f"by {pattern!r}"
        if self.locked is not None and name in self.locked:
            return True, f"pinned by {self.lock}"
        wanted = [*([f"a name like {', '.join(self.allow)}"] if self.allow else ()),
                  *([f"one that {self.lock} pins"] if self.lock else ())]
        raise NotAllowed(f"{name} is not allowed to run here: {'wanted ' if wanted else 'nothing is yet'}"
                         f"{' or '.join(wanted)}. Read it first; then allow=({name!r},), or pin it: lz hub lock")

    def _place(self, name: str, version: str) -> tuple[Place, str]:
        folders = {key: Path(folder) for key, folder in self.folders.items()}
        place = sources.find(name, version, folders, self.cache_folder)
        return place, f"{place.build}{f', commit {place.commit}' if place.commit else ''}"

    def _pinned(self, found: _Checked, version: str) -> tuple[bool, str]:
        if self.locked is None:
            return True, "none is asked for"
        key, pin = self.locked.pin(found.place.name, version)
        pin.check(key, found.place.commit, found.folder.name, found.content, str(self.lock))
        return True, f"{key} as pinned by {self.lock}" + ("" if pin.variants is not None else ", the commit only")

    def _signature(self, found: _Checked) -> tuple[bool, str]:
        if self.signature == "ignored":
            return True, "ignored"
        if not (found.folder / SIGNATURE).is_file():
            if self.signature == "required":
                raise SignatureRefused(f"{found.folder}: wanted a signature in {SIGNATURE}, got none; take a signed "
                                       "build, or pin its content instead: lz hub lock")
            return True, "none, and none is demanded"
        if (home_of_copy(found.folder, found.content) / VERIFIED).is_file():
            return True, "valid when it was verified here"
        return True, _verify_signature(found.folder, self.signature == "required")

    # Loading

    def load(self, name: str, *, version: int | None = None, revision: str | None = None) -> Loaded:
        """Import a repository's build for this machine. Raises the first thing that explain finds wrong."""
        return self._load(name, sources.checked_version(version, revision))

    def _load(self, name: str, version: str) -> Loaded:
        explained, found = self._ready(name, version)
        needed = self._dependencies(found, ())
        for key, build in needed.items():      # the innermost first
            needed[key] = importing.home_of(importing.import_build(build, needed, self.backend))
        module = importing.import_build(found.folder, needed, self.backend)
        return Loaded(name, explained.version, explained.variant, explained.sha256, module, found.metadata.id)

    def _ready(self, name: str, version: str) -> tuple[Explanation, _Checked]:
        """A private copy that passed every check. What reads the files again reads those of the copy."""
        explained, found = self._ask(name, version)
        if explained.errors:
            raise explained.errors[0]
        assert found is not None
        copy = found.copied()
        _digest(copy)
        if self._signature(copy)[1] == VALID:
            (copy.folder.parent / VERIFIED).touch()            # of this content: it is not asked again
        return explained, copy

    def _dependencies(self, found: _Checked, above: tuple[str, ...]) -> dict[str, Path]:
        """The builds of the kernels it needs, and of those that they need, each checked like itself."""
        needed: dict[str, Path] = {}
        for wanted in found.metadata.kernel_depends:
            if wanted.repo_id in (*above, found.place.name):
                raise HubError(f"{wanted.repo_id} needs itself, by way of {' -> '.join((*above, found.place.name))}; "
                               "this repository cannot be loaded")
            key = importing.dependency_key(wanted)
            _, other = self._ready(wanted.repo_id, key.rpartition("@")[2])
            needed |= self._dependencies(other, (*above, found.place.name))
            needed[key] = other.folder
        return needed

    # A kernel of ours

    def register(self, name: str, op: str | Op, function: str = "", *, version: int | None = None,
                 revision: str | None = None, adapt: Callable[[ModuleType], Callable[..., Any] | Direct] | None = None,
                 requires: Iterable[Condition] = (), id: str = "", certify: bool = True, on: str | None = None,
                 **fields: Any) -> Kernel:
        """Let selection choose from it: `function` of the module, or what `adapt(module)` returns, serves `op`.

        It is imported when it is first needed. `certify`: it must keep the contract of the op on the device `on` first;
        a certificate that holds is not made anew. Unless `fields` say otherwise it has no backward, cannot be
        traced and cannot be captured.
        """
        if not function and adapt is None:
            raise HubError(f"{name}: say which function serves the op, or give adapt=, got neither")
        explained, found = self._ready(name, sources.checked_version(version, revision))
        kind = _device_of(found)
        kernel = Kernel(
            id or kernel_id(name, explained.version, function or getattr(adapt, "__name__", "adapted")), _op(op),
            _Load(self, name, explained.version, explained.variant, explained.sha256, function, adapt),
            requires=(*((device(kind),) if kind else ()), *requires),
            **{"differentiable": False, "traceable": False, "graph_safe": False,
               "note": f"{name}@{explained.version}, {explained.variant}", **fields})
        if certify:
            self._prove(kernel, on or kind or hardware.main_kind())
        worlds.register(kernel, f"{name}@{explained.version}")
        return kernel

    def _prove(self, kernel: Kernel, on: str) -> None:
        standing = certificates.standing([kernel], hardware.probe(on))[kernel.id]
        if isinstance(standing, certificates.Certificate):
            return
        verdict = next(iter(certify_all([kernel], on)))
        if verdict.status == "passed":
            return
        why = verdict.refusal if verdict.status == "skipped" else (
            f"{verdict.diagnosis.kind}: {verdict.diagnosis.says}" if verdict.diagnosis else str(verdict.failures[0]))
        raise Unproven(f"{kernel.id} {'serves no case' if verdict.status == 'skipped' else 'breaks the contract'} of "
                       f"lz.{kernel.op.name} on {on}: {why}. Nothing was registered; mend adapt= or requires=")

    # Pinning

    def lockfile(self, *wanted: str) -> lockfile.Lock:
        """What is here now of `wanted` ("org/name@1", or org/name of a folder), with every build of it."""
        need_peer()
        pins = {}
        for key in wanted:
            name, _, version = key.partition("@")
            self._allowed(sources.checked_name(name))
            place = self._place(name, sources.checked_version(None, version or None))[0]
            builds = {f.name: _read(place, f)[0] for f in sorted(place.build.iterdir())
                      if f.is_dir() and (f / "metadata.json").is_file()}
            if not builds:
                raise NoVariant(f"{place.build}: wanted builds with a metadata.json, got none")
            version = version or str(next(iter(builds.values())).metadata.version)
            for found in builds.values():
                _same_version(found, version)
                _digest(found)
            pins[f"{name}@{version}"] = lockfile.Pin(place.commit, {v: b.content.files for v, b in builds.items()})
        return lockfile.Lock(pins)


@dataclass(frozen=True)
class _Load:
    """What a kernel's `load` is. A build is told apart by the text of this object, as it has no module of its own."""

    hub: Hub = field(repr=False)
    name: str
    version: str
    variant: str
    sha256: str
    function: str
    adapt: Callable[[ModuleType], Any] | None = field(repr=False)
    adapted_by: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapted_by", sources_of(self.adapt) if self.adapt else "")
        object.__setattr__(self, "__module__", f"{self.name}@{self.version}")
        object.__setattr__(self, "__qualname__", self.function or "adapted")

    def __call__(self) -> Callable[..., Any] | Direct:
        loaded = self.hub._load(self.name, self.version)
        if loaded.sha256 != self.sha256:
            raise Tampered(f"{self.name}@{self.version} {loaded.variant}: its content was {self.sha256[:16]}... when "
                           f"it was registered, now it is {loaded.sha256[:16]}...; register it again")
        if self.adapt is not None:
            run: Callable[..., Any] | Direct = self.adapt(loaded.module)
            return run
        found: Any = loaded.module
        for part in self.function.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise NotHere(f"{self.name}@{self.version} has no function {self.function!r}; it offers "
                          f"{', '.join(loaded.offers)}")
        return found  # type: ignore[no-any-return]


def kernel_id(name: str, version: str, function: str) -> str:
    """hub.<organisation>_<name>.v<version>.<function>, in the letters an id may have."""
    tag = f"v{version}" if version.isdigit() else version
    parts = (name.replace("/", "_"), tag, function)
    return ".".join(["hub", *("".join(c if c.isalnum() and c.isascii() else "_" for c in p).lower() for p in parts)])


def need_peer() -> None:
    found = installed_version("kernels")
    if found is None or not satisfies(found, PEER):
        raise NotHere(f"repositories are loaded by the package kernels{PEER}, which is "
                      f"{f'here as {found}' if found else 'not installed'}; pip install 'kernels{PEER}'")
    module = importlib.import_module("kernels")
    if not hasattr(module, "get_kernel"):
        raise NotHere(f"wanted the package kernels {found}, got {module.__file__} under that name; rename it")


def _op(op: str | Op) -> Op:
    if isinstance(op, Op):
        return op
    known = {**builtin_ops(), **worlds.current().catalog.ops}
    if op not in known:
        raise RegistrationError(f"there is no op {op!r}; known are {', '.join(sorted(known))}")
    return known[op]


def _chosen(place: Place, verdicts: tuple[Verdict, ...]) -> tuple[str, str]:
    first = next((v for v in verdicts if isinstance(v, Accepted)), None)
    if first is None:
        lines = "".join(f"\n  {v}" for v in verdicts)
        raise NoVariant(f"{place.key}: none of its {len(verdicts)} builds fits this machine; ask for another version, "
                        f"or build it for this torch:{lines}")
    return first.variant, str(first)


def _read(place: Place, folder: Path) -> tuple[_Checked, str]:
    content = Content.of(folder, place.root)
    return (_Checked(place, folder, content, importing.metadata_of(folder)),
            f"{len(content.files)}, sha256 {content.sha256[:16]}...")


def _same_version(found: _Checked, version: str) -> tuple[bool, str]:
    if version.isdigit() and len(version) < 40 and found.metadata.version != int(version):
        raise LockViolation(f"{found.place.key}: wanted version {version}, got a build that says it is version "
                            f"{found.metadata.version}; name the folder of that version, or ask for the other one")
    return True, version


def _digest(found: _Checked) -> tuple[bool, str]:
    """The digest that a repository may carry of its own files. It is worth as much as the signature over it."""
    from kernels._rust import Digest, DigestValidationError

    wanted = found.metadata.digest
    if wanted is None:
        return True, "none in metadata.json"
    try:
        wanted.validate(Digest.hash_variant(wanted.algorithm, found.folder))
    except DigestValidationError as e:
        raise Tampered(f"{found.folder} is not what its metadata.json says: {'; '.join(map(str, e.violations))}; "
                       "fetch the repository again") from e
    return True, f"{len(wanted.files)} files as metadata.json says"


def _verify_signature(folder: Path, required: bool) -> str:
    """`kernels` asks who signed it, and whether the files are those that were."""
    from kernels.verify import VerificationResult, verify_variant
    from sigstore.errors import Error, TUFError

    try:
        result = verify_variant(folder)
    except (TUFError, OSError) as e:           # the keys to verify with are fetched from the network
        if required:
            raise SignatureRefused(f"{folder}: its signature cannot be verified here: {e}; go where there is a "
                                   "network, or pin its content instead: lz hub lock") from e
        return f"there is one; it could not be verified here: {e}"
    except Error as e:
        raise SignatureRefused(f"{folder}: its signature cannot be verified: {e}; fetch the repository again") from e
    if not isinstance(result, VerificationResult.Success):
        raise SignatureRefused(f"{folder}: wanted a valid signature, got {result}; fetch the repository again")
    return VALID


def _device_of(found: _Checked) -> str:
    """The device type a build is for; "" for one that runs wherever torch does."""
    if found.folder.name == "torch-universal":
        return ""
    name = str(found.metadata.backend.backend_type).rpartition(".")[2].lower()
    return {"rocm": "cuda", "metal": "mps"}.get(name, name)
