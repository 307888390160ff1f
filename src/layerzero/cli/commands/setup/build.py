"""`lz build`: compile the native call path and our own CPU kernels."""

from __future__ import annotations

from ....dispatch import native
from ... import show


def build(force: bool, as_json: bool) -> int:
    if as_json:
        path = native.build(force=force, say=lambda line: None)
    else:
        with show.spinner("compiling (once)") as print_line:
            path = native.build(force=force, say=print_line)
    state = native.status()
    ok = state.ok or not state.expected
    if as_json:
        show.as_json({"ok": ok, "path": str(path), "status": state.text, "hint": state.hint})
    else:
        show.text(f"{path}\nnative fast path: {state.text}"
                  + (f"\nhint: {state.hint}" if state.hint else ""))
    return 0 if ok else 1
