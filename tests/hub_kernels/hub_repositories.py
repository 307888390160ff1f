"""Repositories of kernels on disk: builds of pure Python, a compiled one, and the cache that
`kernels` downloads to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

UNIVERSAL = "torch-universal"
TORCH = "".join(torch.__version__.split(".")[:2])
STABLE = f"torch-stable-abi{TORCH}-cpu-{platform.machine()}-linux"

RMS_NORM = '''
import torch

VERSION = {version}


def rms_norm(x, weight=None, eps=1e-6):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps{mistake})
    return (out if weight is None else out * weight).to(x.dtype)


__all__ = ["rms_norm"]
'''


def build(repository: Path, variant: str = UNIVERSAL, version: int = 1, *, id: str = "",
          name: str = "norm", files: dict[str, str | bytes] | None = None, digest: bool = False,
          mistake: str = "", depends: tuple = (), nested: bool = False) -> Path:
    """One build in `repository`; returns its folder."""
    folder = repository / "build" / variant
    folder.mkdir(parents=True, exist_ok=True)
    contents = files or {"__init__.py": RMS_NORM.format(version=version, mistake=mistake)}
    for path, content in contents.items():
        target = folder / name / path if nested else folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = {"id": id or f"_norm_cpu_v{version}", "name": name, "version": version,
            "license": "Apache-2.0",
            "python-depends": [], "backend": {"type": "cpu"}}
    if depends:
        data["kernel-depends"] = list(depends)
    if digest:
        hashes = {p.relative_to(folder).as_posix(): base64.b64encode(
            hashlib.sha256(p.read_bytes()).digest()).decode()
                  for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "metadata.json"}
        data["digest"] = {"algorithm": "sha256", "files": hashes}
    (folder / "metadata.json").write_text(json.dumps(data))
    return folder


def commit_of(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def in_cache(cache: Path, repository: Path, name: str, version: int) -> str:
    """Put a repository into a download cache as version `version`: blobs, links to them, and a
    reference."""
    home = cache / f"kernels--{name.replace('/', '--')}"
    commit = commit_of(f"{name} {version}")
    for path in sorted(p for p in repository.rglob("*") if p.is_file()):
        blob = home / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blob)
        link = home / "snapshots" / commit / path.relative_to(repository)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(link.relative_to(home).parts) - 1), "blobs", blob.name))
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / f"v{version}").write_text(commit)
    return commit


# A compiled kernel, in torch's stable ABI

SOURCE = """
#include <cmath>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;

Tensor rms_norm(Tensor x, double eps) {
  Tensor out = torch::stable::empty_like(x);
  const int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
  const float* in = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(out.data_ptr());
  for (int64_t r = 0; r < rows; ++r, in += width, to += width) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += double(in[i]) * in[i];
    const double scale = 1.0 / std::sqrt(sum / width + eps);
    for (int64_t i = 0; i < width; ++i) to[i] = float(in[i] * scale);
  }
  return out;
}

int64_t version() { return KERNEL_VERSION; }

STABLE_TORCH_LIBRARY(KERNEL_ID, m) {
  m.def("rms_norm(Tensor x, float eps) -> Tensor");
  m.def("version() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(KERNEL_ID, CPU, m) { m.impl("rms_norm", TORCH_BOX(&rms_norm)); }
STABLE_TORCH_LIBRARY_IMPL(KERNEL_ID, CompositeExplicitAutograd, m) { m.impl("version", TORCH_BOX(&version)); }
"""

MODULE = """
from pathlib import Path

import torch

torch.ops.load_library(next(str(p) for p in Path(__file__).parent.glob("*.so")))
ops = torch.ops.{id}


def rms_norm(x, eps=1e-6):
    return ops.rms_norm(x, eps)


def version():
    return ops.version()


__all__ = ["rms_norm", "version"]
"""


def native_id(version: int) -> str:
    return f"_native_norm_cpu_{commit_of(str(version))[:7]}"


PYELFTOOLS = "needs pyelftools: pip install 'layerzero[hub]'"


def compile_versions(factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Compiled once per machine and torch; a few seconds."""
    pytest.importorskip("elftools", reason=PYELFTOOLS)
    if not sys.platform.startswith("linux") or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++")
    home = factory.getbasetemp().parent / f"lz-hub-{torch.__version__}-{commit_of(SOURCE)[:12]}"
    home.mkdir(exist_ok=True)
    root = Path(torch.__file__).parent
    results = {}
    for version in (1, 2):
        library = home / f"{native_id(version)}.abi3.so"
        if not library.exists():
            source, draft = factory.mktemp("native") / "kernel.cpp", factory.mktemp(
                "native") / library.name
            source.write_text(SOURCE)
            done = subprocess.run(
                ["g++", "-O1", "-std=c++20", "-shared", "-fPIC",
                 f"-DKERNEL_ID={native_id(version)}", f"-DKERNEL_VERSION={version}",
                 f"-I{root / 'include'}", str(source), "-o", str(draft),
                 f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(
                    f"the stable ABI of torch {torch.__version__} does not compile it: "
                    f"{done.stderr[-300:]}")
            draft.replace(library)
        results[version] = library
    return results


def native_build(repository: Path, compiled: dict[int, Path], version: int,
                 variant: str = STABLE) -> Path:
    """A repository whose build holds the compiled library and a module that loads it."""
    id = native_id(version)
    return build(repository, variant, version, id=id, name="native-norm", files={
        "__init__.py": MODULE.format(id=id), f"{id}.abi3.so": compiled[version].read_bytes()})


def plain_library(folder: Path, name: str = "plain.abi3.so",
                  source: str = "int f(void) { return 1; }",
                  *options: str) -> Path:
    """A small C library, for what is read from the file alone."""
    pytest.importorskip("elftools", reason=PYELFTOOLS)
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / name), *options],
                   input=source,
                   text=True, check=True)
    return folder / name
