"""Kernels from repositories in the layout of the Kernel Hub: found, checked, imported, registered.

A repository is the code of third parties. Before any of it runs, it must be allowed or pinned, its
build must fit this machine, its files must be the pinned or signed ones, and a private copy is
imported. Before selection may choose a kernel of it, the kernel must pass the contract of its
operation on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ...machine import hardware
from ...machine.builds import source_digest
from ...spec.errors import RegistrationError
from ...spec.kernel import Direct, Kernel
from ...spec.op import Op
from ...spec.rules import Condition, device
from ...verify.certification.certify import certify_all
from ...world import snapshot as worlds
from ...world.registry import certificates
from ...world.registry.catalog import builtin_ops
from . import importing, lockfile, sources
from .content import Content, copy_home, private_copy
from .errors import (
    HubError,
    LockViolation,
    NotAllowed,
    NotHere,
    NoVariant,
    SignatureRefused,
    Tampered,
    Unproven,
)
from .explanation import HubExplanation, RepositoryCheck
from .library import require_kernels
from .sources import RepositoryVersion
from .variants import Accepted, Verdict, judge

SIGNATURE = "metadata.json.sigstore"
SIGNATURES = ("present", "required", "ignored")
VALID, VERIFIED = "valid", "signature-valid"   # the verdict, and the file that records it


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
        exported = getattr(self.module, "__all__", None)
        return tuple(exported if exported is not None
                     else (n for n in vars(self.module) if not n.startswith("_")))


@dataclass(frozen=True)
class _CheckedBuild:
    repo: RepositoryVersion
    folder: Path                               # of the build in the repository
    content: Content
    metadata: Any

    def copied(self) -> _CheckedBuild:
        folder = private_copy(self.folder, self.repo.root, self.content)
        return replace(self, folder=folder, metadata=importing.metadata_of(folder))


@dataclass(frozen=True)
class Hub:
    """Where repositories come from, and how they are checked.

    `folders` are local repositories by name, or by name@version; others are looked for in the cache
    of `kernels`. A name is allowed if a pattern in `allow` matches it or the lockfile pins it. With
    a lockfile everything must be pinned.
    """

    folders: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)
    allow: tuple[str, ...] = ()                # "kernels-community/*"
    lock: str | os.PathLike[str] | None = None
    cache: str | os.PathLike[str] | None = None
    # "required"; "present": valid if there is one; "ignored"
    signature: str = "present"
    # also demand manylinux_2_28 and the stable ABI of Python
    portable: bool = False
    backend: str | None = None                 # cpu, cuda, ...; None: what torch was built for

    def __post_init__(self) -> None:
        if isinstance(self.allow, str):
            raise HubError(
                "allow= takes several patterns, such as ('kernels-community/*',); got "
                f"{self.allow!r}")
        if self.signature not in SIGNATURES:
            raise HubError(f"signature= is one of {', '.join(SIGNATURES)}; got {self.signature!r}")
        for key in self.folders:
            sources.check_name(key.partition("@")[0])

    @cached_property
    def locked(self) -> lockfile.HubLock | None:
        return None if self.lock is None else lockfile.read(Path(self.lock))

    @property
    def cache_folder(self) -> Path:
        return Path(self.cache) if self.cache is not None else sources.default_cache()

    # Checks

    def explain(self, name: str, *, version: int | None = None,
                revision: str | None = None) -> HubExplanation:
        """Return every check and every build with its verdict; runs no code of the repository."""
        return self._check(name, sources.check_version(version, revision))[0]

    def _check(self, name: str, version: str) -> tuple[HubExplanation, _CheckedBuild | None]:
        require_kernels()
        sources.check_name(name)
        checks: list[RepositoryCheck] = []

        def run(check: str, function: Callable[[], tuple[Any, str]]) -> Any:
            try:
                result, text = function()
            except HubError as e:
                checks.append(RepositoryCheck(check, str(e), e))
                return None
            checks.append(RepositoryCheck(check, text))
            return result

        verdicts: tuple[Verdict, ...] = ()
        variant, build = "", None
        run("allowed", lambda: self._is_allowed(name))
        if not version and self.locked is not None and name in self.locked:
            version = (self.locked.pin(name, "")[0].rpartition("@")[2] if self._pins(name) == 1
                       else "")
        repo = run("place", lambda: self._find_repository(name, version))
        if repo is not None:
            verdicts = judge(repo.build, repo.root, self.backend, self.portable)
            variant = run("build", lambda: _choose_variant(repo, verdicts)) or ""
        if variant:
            build = run("files", lambda: _read_build(repo, repo.build / variant))
        if build is not None:
            version = version or str(build.metadata.version)
            run("version", lambda: _check_version(build, version))
            run("lockfile", lambda: self._check_pin(build, version))
            run("digest", lambda: _check_digest(build))
            run("signature", lambda: self._check_signature(build))
        sha256 = build.content.sha256 if build is not None else ""
        return HubExplanation(name, version, tuple(checks), verdicts, variant, sha256), build

    def _pins(self, name: str) -> int:
        return sum(key.rpartition("@")[0] == name
                   for key in (self.locked.pins if self.locked else ()))

    def _is_allowed(self, name: str) -> tuple[bool, str]:
        if pattern := next((p for p in self.allow if fnmatchcase(name, p)), ""):
            return True, f"by {pattern!r}"
        if self.locked is not None and name in self.locked:
            return True, f"pinned by {self.lock}"
        allowed = [*([f"a name like {', '.join(self.allow)}"] if self.allow else ()),
                   *([f"one that {self.lock} pins"] if self.lock else ())]
        raise NotAllowed(
            f"{name} is not allowed to run here: {'wanted ' if allowed else 'nothing is yet'}"
            f"{' or '.join(allowed)}. Read it first; then allow=({name!r},), or pin it: lz hub "
            "lock")

    def _find_repository(self, name: str, version: str) -> tuple[RepositoryVersion, str]:
        folders = {key: Path(folder) for key, folder in self.folders.items()}
        repo = sources.find(name, version, folders, self.cache_folder)
        return repo, f"{repo.build}{f', commit {repo.commit}' if repo.commit else ''}"

    def _check_pin(self, build: _CheckedBuild, version: str) -> tuple[bool, str]:
        if self.locked is None:
            return True, "none is asked for"
        key, pin = self.locked.pin(build.repo.name, version)
        pin.check(key, build.repo.commit, build.folder.name, build.content, str(self.lock))
        return True, f"{key} as pinned by {self.lock}" + ("" if pin.variants is not None
                                                          else ", the commit only")

    def _check_signature(self, build: _CheckedBuild) -> tuple[bool, str]:
        if self.signature == "ignored":
            return True, "ignored"
        if not (build.folder / SIGNATURE).is_file():
            if self.signature == "required":
                raise SignatureRefused(
                    f"{build.folder}: wanted a signature in {SIGNATURE}, got none; take a signed "
                    "build, or pin its content instead: lz hub lock")
            return True, "none, and none is demanded"
        if (copy_home(build.folder, build.content) / VERIFIED).is_file():
            return True, "valid when it was verified here"
        return True, _verify_signature(build.folder, self.signature == "required")

    # Loading

    def load(self, name: str, *, version: int | None = None, revision: str | None = None) -> Loaded:
        """Import a repository's build for this machine; raises what explain reports first."""
        return self._load(name, sources.check_version(version, revision))

    def _load(self, name: str, version: str) -> Loaded:
        explanation, build = self._copy(name, version)
        dependencies = self._dependencies(build, ())
        for key, folder in dependencies.items():               # the innermost first
            dependencies[key] = importing.home_of(importing.import_build(folder, dependencies,
                                                                         self.backend))
        module = importing.import_build(build.folder, dependencies, self.backend)
        return Loaded(name, explanation.version, explanation.variant, explanation.sha256, module,
                      build.metadata.id)

    def _copy(self, name: str, version: str) -> tuple[HubExplanation, _CheckedBuild]:
        """Return a private copy that passed every check; files are checked again on the copy."""
        explanation, build = self._check(name, version)
        if explanation.errors:
            raise explanation.errors[0]
        assert build is not None
        copy = build.copied()
        _check_digest(copy)
        if self._check_signature(copy)[1] == VALID:
            (copy.folder.parent / VERIFIED).touch()            # this content is not verified again
        return explanation, copy

    def _dependencies(self, build: _CheckedBuild, parents: tuple[str, ...]) -> dict[str, Path]:
        """Return the builds of all kernels it depends on, each checked too."""
        builds: dict[str, Path] = {}
        path = (*parents, build.repo.name)
        for dependency in build.metadata.kernel_depends:
            if dependency.repo_id in path:
                raise HubError(f"{dependency.repo_id} needs itself, by way of {' -> '.join(path)}; "
                               "this repository cannot be loaded")
            key = importing.dependency_key(dependency)
            _, copy = self._copy(dependency.repo_id, key.rpartition("@")[2])
            builds |= self._dependencies(copy, path)
            builds[key] = copy.folder
        return builds

    # Registration

    def register(self, name: str, op: str | Op, function: str = "", *, version: int | None = None,
                 revision: str | None = None,
                 adapt: Callable[[ModuleType], Callable[..., Any] | Direct] | None = None,
                 requires: Iterable[Condition] = (), id: str = "", certify: bool = True,
                 on: str | None = None, **fields: Any) -> Kernel:
        """Register a kernel for `op`: `function` of the module, or what `adapt(module)` returns.

        The module is imported on first use. With `certify` the kernel must first pass the contract
        of the op on the device `on`; a valid certificate is reused. Unless `fields` say otherwise
        the kernel has no backward, and cannot be traced or captured.
        """
        if not function and adapt is None:
            raise HubError(f"{name}: say which function serves the op, or give adapt=, got neither")
        explanation, build = self._copy(name, sources.check_version(version, revision))
        kind = _device_type(build)
        kernel = Kernel(
            id or kernel_id(name, explanation.version, function
                            or getattr(adapt, "__name__", "adapted")), _op(op),
            _Load(self, name, explanation.version, explanation.variant, explanation.sha256,
                  function, adapt),
            requires=(*((device(kind),) if kind else ()), *requires),
            **{"differentiable": False, "traceable": False, "graph_safe": False,
               "note": f"{name}@{explanation.version}, {explanation.variant}", **fields})
        if certify:
            self._certify(kernel, on or kind or hardware.main_kind())
        worlds.register(kernel, f"{name}@{explanation.version}")
        return kernel

    def _certify(self, kernel: Kernel, on: str) -> None:
        status = certificates.statuses([kernel], hardware.probe(on))[kernel.id]
        if isinstance(status, certificates.Certificate):
            return
        verdict = next(iter(certify_all([kernel], on)))
        if verdict.status == "passed":
            return
        why = verdict.refusal if verdict.status == "skipped" else (
            f"{verdict.diagnosis.kind}: {verdict.diagnosis.says}" if verdict.diagnosis
            else str(verdict.failures[0]))
        raise Unproven(
            f"{kernel.id} "
            f"{'serves no case' if verdict.status == 'skipped' else 'breaks the contract'} of "
            f"lz.{kernel.op.name} on {on}: {why}. Nothing was registered; mend adapt= or requires=")

    # Pinning

    def lockfile(self, *names: str) -> lockfile.HubLock:
        """Pin every build of `names` ("org/name@1", or org/name of a folder) as they are now."""
        require_kernels()
        pins = {}
        for key in names:
            name, _, version = key.partition("@")
            self._is_allowed(sources.check_name(name))
            repo = self._find_repository(name, sources.check_version(None, version or None))[0]
            builds = {f.name: _read_build(repo, f)[0] for f in sorted(repo.build.iterdir())
                      if f.is_dir() and (f / "metadata.json").is_file()}
            if not builds:
                raise NoVariant(f"{repo.build}: wanted builds with a metadata.json, got none")
            version = version or str(next(iter(builds.values())).metadata.version)
            for build in builds.values():
                _check_version(build, version)
                _check_digest(build)
            pins[f"{name}@{version}"] = lockfile.HubPin(repo.commit,
                                                        {v: b.content.files
                                                         for v, b in builds.items()})
        return lockfile.HubLock(pins)


@dataclass(frozen=True)
class _Load:
    """The `load` of a kernel; its repr identifies the build, which has no module of its own."""

    hub: Hub = field(repr=False)
    name: str
    version: str
    variant: str
    sha256: str
    function: str
    adapt: Callable[[ModuleType], Any] | None = field(repr=False)
    adapted_by: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapted_by", source_digest(self.adapt) if self.adapt else "")
        object.__setattr__(self, "__module__", f"{self.name}@{self.version}")
        object.__setattr__(self, "__qualname__", self.function or "adapted")

    def __call__(self) -> Callable[..., Any] | Direct:
        loaded = self.hub._load(self.name, self.version)
        if loaded.sha256 != self.sha256:
            raise Tampered(
                f"{self.name}@{self.version} {loaded.variant}: its content was "
                f"{self.sha256[:16]}... when it was registered, now it is {loaded.sha256[:16]}...; "
                "register it again")
        if self.adapt is not None:
            run: Callable[..., Any] | Direct = self.adapt(loaded.module)
            return run
        function: Any = loaded.module
        for part in self.function.split("."):
            function = getattr(function, part, None)
        if not callable(function):
            raise NotHere(
                f"{self.name}@{self.version} has no function {self.function!r}; it offers "
                f"{', '.join(loaded.offers)}")
        return function  # type: ignore[no-any-return]


    @property
    def remote(self) -> dict[str, Any] | None:
        """Returns how a worker process (world/registry/isolation.py) loads it. Each has one
        version, so that two whose torch operations share a namespace serve beside each other."""
        if self.adapt is not None:             # a function of this process
            return None
        hub = {f.name: getattr(self.hub, f.name) for f in fields(self.hub)}
        hub.update({name: os.fspath(path) for name in ("lock", "cache")
                    if (path := hub[name]) is not None},
                   folders={name: os.fspath(path) for name, path in self.hub.folders.items()})
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name in (
            "name", "version", "variant", "sha256", "function")}
        return {"load": f"{__name__}:load_elsewhere", "worker": f"{self.name}@{self.version}",
                "arguments": {**own, "hub": hub}}


def load_elsewhere(hub: Mapping[str, Any], **build: str) -> Callable[..., Any] | Direct:
    """Load a function of a repository in a worker process."""
    return _Load(Hub(**{**hub, "allow": tuple(hub["allow"])}), adapt=None, **build)()


def kernel_id(name: str, version: str, function: str) -> str:
    """Return hub.<organisation>_<name>.v<version>.<function>, in the letters an id may have."""
    tag = f"v{version}" if version.isdigit() else version
    parts = (name.replace("/", "_"), tag, function)
    return ".".join(["hub", *("".join(c if c.isalnum() and c.isascii() else "_" for c in p).lower()
                              for p in parts)])


def _op(op: str | Op) -> Op:
    if isinstance(op, Op):
        return op
    known = {**builtin_ops(), **worlds.current().catalog.ops}
    if op not in known:
        raise RegistrationError(f"there is no op {op!r}; known are {', '.join(sorted(known))}")
    return known[op]


def _choose_variant(repo: RepositoryVersion, verdicts: tuple[Verdict, ...]) -> tuple[str, str]:
    first = next((v for v in verdicts if isinstance(v, Accepted)), None)
    if first is None:
        lines = "".join(f"\n  {v}" for v in verdicts)
        raise NoVariant(
            f"{repo.key}: none of its {len(verdicts)} builds fits this machine; ask for another "
            f"version, or build it for this torch:{lines}")
    return first.variant, str(first)


def _read_build(repo: RepositoryVersion, folder: Path) -> tuple[_CheckedBuild, str]:
    content = Content.of(folder, repo.root)
    return (_CheckedBuild(repo, folder, content, importing.metadata_of(folder)),
            f"{len(content.files)}, sha256 {content.sha256[:16]}...")


def _check_version(build: _CheckedBuild, version: str) -> tuple[bool, str]:
    if version.isdigit() and len(version) < 40 and build.metadata.version != int(version):
        raise LockViolation(
            f"{build.repo.key}: wanted version {version}, got a build that says it is version "
            f"{build.metadata.version}; name the folder of that version, or ask for the other one")
    return True, version


def _check_digest(build: _CheckedBuild) -> tuple[bool, str]:
    """Check the digest a repository may carry of its own files; worth as much as its signature."""
    from kernels._rust import Digest, DigestValidationError

    digest = build.metadata.digest
    if digest is None:
        return True, "none in metadata.json"
    try:
        digest.validate(Digest.hash_variant(digest.algorithm, build.folder))
    except DigestValidationError as e:
        raise Tampered(
            f"{build.folder} is not what its metadata.json says: "
            f"{'; '.join(map(str, e.violations))}; fetch the repository again") from e
    return True, f"{len(digest.files)} files as metadata.json says"


def _verify_signature(folder: Path, required: bool) -> str:
    """Let `kernels` verify the signer and the signed files."""
    from kernels.verify import VerificationResult, verify_variant
    from sigstore.errors import Error, TUFError

    try:
        result = verify_variant(folder)
    except (TUFError, OSError) as e:           # the keys come from the network
        if required:
            raise SignatureRefused(
                f"{folder}: its signature cannot be verified here: {e}; go where there is a "
                "network, or pin its content instead: lz hub lock") from e
        return f"there is one; it could not be verified here: {e}"
    except Error as e:
        raise SignatureRefused(
            f"{folder}: its signature cannot be verified: {e}; fetch the repository again") from e
    if not isinstance(result, VerificationResult.Success):
        raise SignatureRefused(
            f"{folder}: wanted a valid signature, got {result}; fetch the repository again")
    return VALID


def _device_type(build: _CheckedBuild) -> str:
    """Return the device type a build is for; "" if it runs wherever torch does."""
    if build.folder.name == "torch-universal":
        return ""
    name = str(build.metadata.backend.backend_type).rpartition(".")[2].lower()
    return {"rocm": "cuda", "metal": "mps"}.get(name, name)
