"""`lz init`: a policy, a CI workflow and a first workload for a project."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ....files.calls import read_calls, write_calls
from ....spec.call import Call
from ... import project, show
from ..measure.workload import record_calls


def init(folder: Path, command: Sequence[str], calls: Path | None, as_json: bool) -> int:
    """Write the files; returns 1 if the command fails or makes no lz call, and then writes the
    others."""
    code, workload = 0, tuple[Call, ...]()
    if command:
        code, workload = record_calls(command)
    elif calls is not None:
        workload = read_calls(calls)
    ops = sorted({call.op for call in workload})
    policy, workflow, *_ = project.targets(folder, bool(workload))
    project.write(policy, project.policy_text())
    project.write(workflow, project.workflow_text(ops))
    written = [policy, workflow]
    if workload:
        written.append(folder / project.CALLS)
        write_calls(written[-1], workload)
    next_step = f"lz tune --calls {shlex.quote(str(written[-1]))}" if workload else (
        f"lz record -o {shlex.quote(str(folder / project.CALLS))} -- python app.py")
    if as_json:
        show.as_json({"written": [str(path) for path in written], "calls": len(workload),
                      "ops": ops, "command_exit": code if command else None, "next": next_step})
    else:
        show.text("\n".join(f"wrote {path}" for path in written))
        if command and not workload:
            show.text(f"!!  {shlex.join(command)} ended with {code} and made no lz call: no "
                      "workload was written")
        show.text(f"next: export LAYERZERO_POLICY={shlex.quote(str(policy))}; {next_step}")
    return 1 if command and (code or not workload) else 0
