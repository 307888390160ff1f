"""transformers' own attention tests, with LayerZero's attention in the place of `sdpa`.

    python benchmarks/transformers_equivalence.py PATH [--models llama,t5] [-k sdpa] [--jobs 2] [--stock]

PATH is a checkout of transformers (its tests are not in the wheel). Its own source is what is
tested, with the installed torch. The tests are not changed: they ask for
`attn_implementation="sdpa"`, and that name then means our attention and our masks. --stock runs
them without, to tell a test that fails here anyway. Needs pytest, pytest-xdist and parameterized.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attention_calls import pytest_runtest_call  # noqa: F401  a hook

HERE = Path(__file__).resolve()
MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "gpt2",
          "gpt_neox", "t5", "bart", "bert", "vit", "clip", "whisper", "mixtral", "deepseek_v3",
          "gpt_oss", "modernbert", "mimi")
# What compares attention implementations, and what a wrong mask would break.
TESTS = (
    "eager_matches_sdpa or sdpa_padding_matches or left_padding or sdpa_can_compile or "
    "assisted_decoding or generate_from_inputs_embeds or generate_continue or static_cache or "
    "past_key_values_format or attention_outputs")


def pytest_configure(config: Any) -> None:
    """As a pytest plugin: from now on `sdpa` is ours."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from layerzero.integrations.transformers.attention import attention_forward
    from layerzero.integrations.transformers.masks import attention_mask

    AttentionInterface.register("sdpa", attention_forward)
    AttentionMaskInterface.register("sdpa", attention_mask)


def run(checkout: Path, models: list[str], pattern: str, jobs: int, stock: bool) -> int:
    folders = []
    for model in models:
        found = checkout / "tests" / "models" / model
        if not found.is_dir():
            raise SystemExit(
                f"{checkout} has no tests/models/{model}; give the folder of a transformers "
                "checkout, and models it has tests for")
        folders.append(str(found.relative_to(checkout)))
    paths = [str(checkout / "src"), str(HERE.parent), str(HERE.parents[1] / "src"),
             os.environ.get("PYTHONPATH", "")]
    with TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", *folders, "-k", pattern, "-q", "--no-header",
                   "-p", "no:cacheprovider", "--tb=line", f"--junitxml={report}", "-n", str(jobs)]
        if not stock:
            command += ["-p", HERE.stem]
        subprocess.run(command, cwd=checkout,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False)
        if not report.exists():
            return 2                            # pytest has said why
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    by_model: dict[str, Counter[str]] = {}
    failed, reached = [], 0
    for case in cases:
        name = case.attrib["classname"].partition("models.")[2].partition(".")[0] or "not collected"
        kinds = {child.tag for child in case}
        outcome = ("failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds
                   else "passed")
        by_model.setdefault(name, Counter())[outcome] += 1
        calls = next((int(p.attrib["value"]) for p in case.iter("property")
                      if p.attrib["name"] == "calls"), 0)
        reached += outcome == "passed" and calls > 0
        if outcome == "failed":
            failed.append(f"{case.attrib['classname']}.{case.attrib['name']}")
    print(f"\n{'model':16}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for name, counts in sorted(by_model.items()):
        print(f"{name:16}{counts['passed']:8}{counts['failed']:8}{counts['skipped']:8}")
    total = sum(by_model.values(), Counter())
    print(f"{'all':16}{total['passed']:8}{total['failed']:8}{total['skipped']:8}")
    print(f"{reached} of those that passed called LayerZero's attention")
    for line in failed:
        print("failed:", line)
    return 1 if failed or not total["passed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="PATH")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("-k", dest="pattern", default=TESTS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stock", action="store_true", help="without LayerZero")
    given = parser.parse_args()
    return run(given.checkout.resolve(), given.models.split(","), given.pattern, given.jobs,
               given.stock)


if __name__ == "__main__":
    raise SystemExit(main())
