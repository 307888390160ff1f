"""The tables of docs/support.md, from the declarations of the backends and from pyproject.toml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from layerzero.spec.kernel import Kernel

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64",
          "float8_e4m3fn": "fp8"}
TEXT = ("tokenize", "detokenize")
TITLES = {"torch": "torch", "native": "our CPU kernels", "cuda": "our CUDA kernels",
          "triton": "our Triton kernels", "reference": "reference formulas", "ipex": "IPEX",
          "flash_attn": "FlashAttention", "flashinfer": "FlashInfer", "liger": "Liger",
          "quack": "QuACK", "xformers": "xFormers", "zentorch": "ZenDNN (zentorch)",
          "tokenizers": "Hugging Face tokenizers", "aiter": "AITER", "habana": "Gaudi's own",
          "xpu": "torch's and IPEX's for XPU"}


def families(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels by library: the prefix of their ids; ours and torch's first."""
    found: dict[str, list[Kernel]] = {name: [] for name in ("torch", "native", "cuda", "triton")}
    for kernel in kernels:
        found.setdefault(kernel.id.partition(".")[0], []).append(kernel)
    return {name: found[name] for name in (*list(found)[:4], *sorted(list(found)[4:]))}


def values(kernels: Iterable[Kernel], fact: str) -> list[Any]:
    """What the rules of these kernels want a fact to be one of; empty if one does not care."""
    named: list[Any] = []
    for kernel in kernels:
        leaves = [leaf for rule in kernel.requires for leaf in rule.leaves()
                  if leaf.fact == fact and leaf.test == "in"]
        if not leaves:
            return []
        named += [value for leaf in leaves for value in leaf.value]
    return list(dict.fromkeys(named))


def oldest(kernels: Iterable[Kernel]) -> str:
    """The lowest compute capability that a rule of these kernels names."""
    named = [leaf.value for kernel in kernels for rule in kernel.requires for leaf in rule.leaves()
             if leaf.fact == "sm" and leaf.test == "ge"]
    return f" {min(named) / 10:.1f} and later" if named else ""


def devices(kernels: list[Kernel]) -> str:
    where = values(kernels, "device")
    if all(k.op.name in TEXT for k in kernels):
        return "text, no tensors"
    if not where:
        return "whatever torch has"
    makers = {"nvidia": f"NVIDIA GPU{oldest(kernels)}", "amd": "AMD GPU"}
    gpus = [makers[maker] for maker in values(kernels, "vendor") if maker in makers] or ["GPU"]
    words = {"cpu": "CPU", "cuda": " or ".join(gpus), "xpu": "Intel GPU", "hpu": "Gaudi"}
    return " or ".join(words.get(name, name) for name in where)


def package(kernels: list[Kernel]) -> str:
    """What one installs, with the ranges that the kernels were written for."""
    foreign = [k for k in kernels if k.package and not k.package.startswith("layerzero")]
    named = {f"{k.distribution or k.package.partition('.')[0].replace('_', '-')} {k.version}"
             for k in foreign}
    return ", ".join(f"`{name.strip()}`" for name in sorted(named)) or "comes with LayerZero"


def library_rows(kernels: list[Kernel]) -> list[tuple[Any, ...]]:
    rows = []
    for name, ours in families(kernels).items():
        dtypes = [DTYPES.get(d, d) for d in values(ours, "dtype")]
        untested = sum(k.untested for k in ours)
        rows.append((
            TITLES.get(name, name), "comes with torch" if name == "torch" else package(ours),
            devices(ours), ", ".join(dtypes) or "as torch", len(ours), untested or ""))
    return rows


def op_rows(kernels: list[Kernel]) -> tuple[list[str], list[tuple[str, ...]]]:
    """For each operation, which library has a kernel, and whether gradients flow through it."""
    kernels = [k for k in kernels if k.op.name not in TEXT and not k.id.startswith("reference.")]
    columns = families(kernels)
    rows = []
    for op in sorted({k.op.name: k.op for k in kernels}.values(), key=lambda op: op.name):
        cells = []
        for ours in columns.values():
            found = [k for k in ours if k.op is op]
            grad = op.differentiable and any(k.differentiable for k in found)
            cells.append("" if not found else "grad" if grad else "yes")
        rows.append((f"[`{op.name}`](reference/ops.md#{op.name})", *cells))
    return [name.replace("_", "-") for name in columns], rows


def requirements() -> list[tuple[str, str]]:
    text = PROJECT.read_text("utf-8")
    python = re.search(r'requires-python = "(.*?)"', text)
    torch = re.search(r'"torch(>=.*?)"', text)
    if python is None or torch is None:
        raise SystemExit("pyproject.toml must have requires-python and a dependency on torch")
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    rows = [("Python", f"`{python[1]}`"), ("torch", f"`{torch[1]}`")]
    for name, listed in re.findall(r"^(\w+) = \[(.*?)\]$", extras, re.MULTILINE | re.DOTALL):
        if name not in ("dev", "all", "docs"):
            needs = ", ".join(f"`{need}`" for need in re.findall(r'"([^"]+)"', listed))
            rows.append((f"`pip install '.[{name}]'`", needs))
    return rows
