"""PyTorch's own attention tests, with lz.attention in the place of F.scaled_dot_product_attention.

    python benchmarks/pytorch_attention_tests.py PATH [-k EXPRESSION] [--limit 16] [--prefer KERNEL]

PATH is test/test_transformers.py of the PyTorch release that is installed (no wheel has it). The
tests run twice, unchanged: with torch's function, then with ours. What passes in stock alone is
listed: a test that asserts which of torch's implementations ran may be among it, others may not.
--limit N runs N parametrizations of each test, evenly spread: some tests have thousands.
--prefer names a kernel to use wherever it can serve. LAYERZERO_NATIVE=0 tests the path in Python.
Needs pytest and expecttest.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from attention_calls import pytest_runtest_call  # noqa: F401  a hook

HERE = Path(__file__).resolve()
OURS, LIMIT, PREFER = "LZ_PYTORCH_TESTS", "LZ_PYTORCH_TESTS_LIMIT", "LZ_PYTORCH_TESTS_PREFER"


class Outcome(NamedTuple):
    result: str                                # passed | failed | skipped
    calls: int                                 # of our attention
    why: str = ""


def pytest_configure(config: Any) -> None:
    """As a pytest plugin: from now on F.scaled_dot_product_attention is ours."""
    if OURS not in os.environ:
        return
    import torch
    from torch import Tensor

    import layerzero as lz
    from layerzero.machine.loading import LoadFailed
    from layerzero.world import snapshot as worlds
    from layerzero.world.incidents import loaded

    # Some kernels keep the function that is there when they are loaded.
    for kernel in worlds.current().catalog.kernels:
        if kernel.id.startswith("torch."):
            try:
                loaded(kernel)
            except LoadFailed:
                continue
    if os.environ[PREFER]:
        lz.prefer(os.environ[PREFER]).__enter__()      # for the rest of the process

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                  dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                  enable_gqa: bool = False) -> Tensor:
        out: Tensor = lz.attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                   enable_gqa)
        return out

    # TorchScript compiles what it finds by this name: it keeps torch's.
    torch.jit._builtins._register_builtin(attention, "aten::scaled_dot_product_attention")
    torch.nn.functional.scaled_dot_product_attention = attention


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps LIMIT parametrizations of each test, evenly spread."""
    limit, by_test = int(os.environ[LIMIT]), defaultdict(list)
    for item in items:
        by_test[item.parent, inspect.unwrap(item.function).__name__].append(item)  # type: ignore[attr-defined]
    kept = {item for same in by_test.values() for item in same[::max(-(-len(same) // limit), 1)]}
    items[:] = [item for item in items if item in kept]


def run(tests: Path, pattern: str, limit: int, ours: bool, prefer: str) -> dict[str, Outcome]:
    paths = [str(HERE.parent), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    settings = {LIMIT: str(limit), **({OURS: "1", PREFER: prefer} if ours else {})}
    with TemporaryDirectory() as scratch:
        report, log = Path(scratch) / "report.xml", Path(scratch) / "log"
        command = [sys.executable, "-m", "pytest", tests.name, "-k", pattern, "-q", "--no-header",
                   "-p", "no:cacheprovider", "--tb=short", "-p", HERE.stem, f"--junitxml={report}"]
        with log.open("w") as output:
            environ = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(paths)}
            subprocess.run(command, cwd=tests.parent, check=False, stdout=output, stderr=output,
                           env=environ)
        if not report.exists():
            raise SystemExit(f"pytest ran nothing:\n{log.read_text()[-3000:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    return {f"{case.attrib['classname'].partition('.')[2]}.{case.attrib['name']}": _outcome(case)
            for case in cases}


def _outcome(case: ElementTree.Element) -> Outcome:
    kinds = {child.tag: child for child in case}
    broken = kinds.get("failure", kinds.get("error"))
    calls = next((int(p.attrib["value"]) for p in case.iter("property")
                  if p.attrib["name"] == "calls"), 0)
    if broken is not None:
        return Outcome("failed", calls, broken.attrib.get("message", "").partition("\n")[0])
    return Outcome("skipped" if "skipped" in kinds else "passed", calls)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, metavar="PATH")
    parser.add_argument("-k", dest="pattern", default="")
    parser.add_argument("--limit", type=int, default=sys.maxsize)
    parser.add_argument("--prefer", default="", metavar="KERNEL")
    given = parser.parse_args()
    tests = given.tests.resolve()
    if not tests.is_file():
        raise SystemExit(f"there is no {tests}; give the path of PyTorch's test_transformers.py")
    stock = run(tests, given.pattern, given.limit, False, "")
    ours = run(tests, given.pattern, given.limit, True, given.prefer)
    print(f"{'':8}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for label, outcomes in (("stock", stock), ("lz", ours)):
        counts = Counter(outcome.result for outcome in outcomes.values())
        print(f"{label:8}{counts['passed']:8}{counts['failed']:8}{counts['skipped']:8}")
    reached = sum(o.result == "passed" and o.calls > 0 for o in ours.values())
    print(f"{reached} of those that passed called LayerZero's attention")
    lost = {name: o for name, o in ours.items()
            if o.result != "passed" and stock[name].result == "passed"}
    for name, outcome in lost.items():
        print(f"in stock alone: {name}: {outcome.why}")
    return 1 if lost or not reached else 0


if __name__ == "__main__":
    raise SystemExit(main())
