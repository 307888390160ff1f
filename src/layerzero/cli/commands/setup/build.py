"""`lz build`: compile the native call path and our own CPU kernels."""

from __future__ import annotations

from ....backends.native import build as cpu_kernels
from ....dispatch import native
from ... import show


def build(force: bool, as_json: bool) -> int:
    if as_json:
        path = native.build(force=force, say=lambda line: None)
    else:
        with show.spinner("compiling, once for this machine: a minute or two") as print_line:
            path = native.build(force=force, say=print_line)
    state, kernels = native.status(), cpu_kernels.library_path()
    ok = state.ok or not state.expected
    if as_json:
        show.as_json({"ok": ok, "path": str(path), "kernels": str(kernels), "status": state.text,
                      "hint": state.hint})
    else:
        show.text(f"native fast path: {state.text}\n  {path}\n"
                  f"CPU kernels: compiled for this processor\n  {kernels}"
                  + (f"\nhint: {state.hint}" if state.hint else ""))
    return 0 if ok else 1
