"""The files that `lz init` writes into a project. Nothing here imports torch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..files.sealed import replace_output
from ..selection.policy import SETTINGS
from ..spec.errors import ConfigError

POLICY, CALLS = "layerzero.yaml", "layerzero.calls.jsonl"
WORKFLOW = ".github/workflows/layerzero.yml"

_HEAD = """\
# The policy of this project: what you decide about the choice of kernels. Everything else is
# decided by what each kernel can do and how fast it was measured here.
#
#   export LAYERZERO_POLICY={policy}    puts it in force, as lz.load_config does
#   lz config                           shows what is in force, and where each value comes from
#
# Every line below shows the default; take the # away from what you change.
version: 1

# settings:
"""
_RULES = """
# rules:
#   - deny: "flash_attn.*"             # never these kernels; lz list shows the ids
#   - lock: torch.sdpa_math            # exactly this one, where it applies
#     op: attention
#     when: {head_dim: "> 256"}
#   - boost: "triton.*"                # counts as twice as fast when kernels are ranked
#     factor: 2.0
"""
_WORKFLOW = """\
# Fails where the policy cannot be read, something is broken, a recorded call has no kernel, or a
# kernel gives a wrong answer. Exit codes: 0 yes, 1 no, 2 an error.
name: layerzero
on: [push, pull_request]
jobs:
  layerzero:
    runs-on: ubuntu-latest
    env:
      LAYERZERO_POLICY: {policy}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install 'layerzero[cli]'
      - run: lz build
      - run: lz config
      - run: lz doctor
"""


def targets(folder: Path, workload: bool) -> tuple[Path, ...]:
    """Return the files that are written; the workload only where there is one."""
    names = (POLICY, WORKFLOW, CALLS) if workload else (POLICY, WORKFLOW)
    return tuple(folder / name for name in names)


def check_absent(paths: Sequence[Path]) -> None:
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        verb = "is" if len(existing) == 1 else "are"
        raise ConfigError(f"lz init: {', '.join(existing)} {verb} there already; --force replaces, "
                          "or --dir names another project")


def policy_text() -> str:
    """Return a policy file: every setting is a comment with its default and what it does."""
    lines = []
    for name, setting in SETTINGS.items():
        lines += [f"#   {line}" for line in textwrap.wrap(
            f"# {setting.doc}", 94, subsequent_indent="# ")]
        lines.append(f"#   {name}: {json.dumps(setting.default)}")
    return _HEAD.format(policy=POLICY) + "\n".join(lines) + "\n" + _RULES


def workflow_text(ops: Sequence[str]) -> str:
    """Return a workflow of GitHub Actions that checks the workload, whose operations are `ops`."""
    steps = [f"lz dry-run --calls {CALLS} --device cpu",
             *(f"lz verify kernels {op} --quick --device cpu" for op in ops)]
    lines = [f"      - run: {step}" for step in steps] if ops else [
        f"      # once lz record -o {CALLS} -- python app.py has written a workload:",
        f"      # - run: {steps[0]}"]
    return _WORKFLOW.format(policy=POLICY) + "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_output(path, text)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}; give a --dir that can") from e
