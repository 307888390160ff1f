"""Build the wheel and the source distribution, and prove that the wheel works away from the tree.

The wheel and the sdist must hold every file of src/ that git tracks. The wheel is then installed,
without dependencies, into a fresh virtual environment that sees the torch and the libraries of this
Python, and is imported, called and asked by `lz` from an empty folder.

    python .ci/dist.py                           into dist/
    python .ci/dist.py --out DIR --no-isolation  with the setuptools that is installed here
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (".py", ".pyi", ".cpp", ".cu", ".h", ".json", ".html", "py.typed")

# What the installed package is asked. Its files are found through itself, so that a missing
# template, table or source shows as it would to a user.
PROBE = """
import sys
from pathlib import Path
import torch
import layerzero as lz
home = Path(lz.__file__).resolve().parent
assert home.is_relative_to(Path(sys.prefix).resolve()), f"imported from {home}"
q = torch.randn(1, 4, 16, 32)
want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
torch.testing.assert_close(lz.attention(q, q, q, is_causal=True), want, rtol=1e-4, atol=1e-5)
from importlib.metadata import version
assert version("layerzero") == lz.__version__, (version("layerzero"), lz.__version__)
from layerzero.perf import shipped
assert list(shipped.FOLDER.glob("*.json")), f"no shipped measurements in {shipped.FOLDER}"
from layerzero.dispatch import native
assert native.SOURCE.is_file(), native.SOURCE
print(f"layerzero {lz.__version__}, torch {torch.__version__}: imported and called")
"""


def build(out: Path, isolated: bool = True,
          kinds: Sequence[str] = ("wheel", "sdist")) -> list[Path]:
    """Build these archives from a copy of the tree; its own build/ and egg-info stay out."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("layerzero-*.whl"), *out.glob("layerzero-*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        for name in tracked():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        isolation = () if isolated else ("--no-isolation",)
        run(sys.executable, "-m", "build", *isolation, *(f"--{kind}" for kind in kinds),
            "--outdir", str(out), str(copy))
    return sorted(out.glob("layerzero-*"))


def tracked() -> list[str]:
    """Return the files of the tree: what git knows or would add; without git, all that is here."""
    asked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT,
                           capture_output=True, text=True)
    if asked.returncode:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
                 if not {".venv", "__pycache__", "dist", "build"} & set(path.parts)]
    else:
        names = asked.stdout.split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def missing(archive: Path) -> list[str]:
    """Name the files of the package that an archive lacks."""
    wanted = [name for name in tracked() if name.startswith("src/layerzero/")
              and name.endswith(SOURCES)]
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            held = {f"src/{name}" for name in wheel.namelist()}
    else:
        with tarfile.open(archive) as sdist:
            held = {name.partition("/")[2] for name in sdist.getnames()}
    return [f"{archive.name} has no {name}" for name in wanted if name not in held]


def install_and_call(wheel: Path, commands: bool = True) -> str:
    """Install the wheel into a fresh environment, use it in an empty folder, say what it said."""
    with tempfile.TemporaryDirectory() as folder:
        # In PYTHONPATH pip would find this tree, and install nothing.
        environ = {name: value for name, value in os.environ.items()
                   if name != "PYTHONPATH" and not name.startswith("LAYERZERO_")}
        environ["LAYERZERO_CACHE_DIR"] = str(Path(folder) / "cache")
        venv = Path(folder) / "venv"
        run(sys.executable, "-m", "venv", "--without-pip", str(venv))
        python = str(venv / "bin" / "python")
        run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check",
            "install", "-q", "--no-deps", "--no-index", "--no-compile", str(wheel), env=environ)
        # The libraries of this Python come after the wheel's own folder; .pth files in them, and so
        # an editable install of this tree, are not read.
        (site,) = venv.glob("lib/python*/site-packages")
        libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (site / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
        here = Path(folder) / "empty"
        here.mkdir()
        said = [run(python, "-c", PROBE, cwd=here, env=environ)]
        if commands:
            lz = str(venv / "bin" / "lz")
            said.append(run(lz, "--version", cwd=here, env=environ))
            run(lz, "report", "--out", "page.html", cwd=here, env=environ)
            said.append(f"lz report: {(here / 'page.html').stat().st_size} bytes")
    return "\n".join(line.strip() for line in said)


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        words = command[0] if len(command) < 3 else " ".join(command[:4])
        raise SystemExit(f"{words} ... failed with exit {done.returncode}:\n"
                         f"{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument("--no-isolation", action="store_true",
                        help="build with the setuptools of this Python")
    asked = parser.parse_args(words)
    archives = build(asked.out.resolve(), not asked.no_isolation)
    absent = [line for archive in archives for line in missing(archive)]
    if absent:
        print("\n".join(absent))
        return 1
    for archive in archives:
        print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB")
    (wheel,) = (archive for archive in archives if archive.suffix == ".whl")
    print(install_and_call(wheel))
    return 0


if __name__ == "__main__":
    sys.exit(main())
