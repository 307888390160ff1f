"""Generated code that a debugger can step through and a traceback can show.

Text that is compiled here is in `linecache`, where pdb, tracebacks and `inspect.getsource` look for
the lines of a file, for as long as code of it lives. Its file is named after what it is and what is
in it, so the same text generated again takes no more room.
"""

from __future__ import annotations

import builtins
import linecache
from hashlib import sha256
from types import CodeType
from weakref import finalize

# The file of each code object that is still there. Changed by append and remove only: a code object
# may end in any thread between any two instructions.
_living: list[str] = []


def compile(source: str, name: str) -> CodeType:
    """Compile generated `source` for exec, under a file name that begins with `<lz {name}`."""
    file = f"<lz {name} {sha256(source.encode()).hexdigest()[:8]}>"
    module = builtins.compile(source, file, "exec")
    for code in (module, *(c for c in module.co_consts if isinstance(c, CodeType))):
        _living.append(file)
        finalize(code, _forget, file).atexit = False
    # Last, as other code of this text may just have ended. An entry without a modification time is
    # never dropped as stale.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return module


def _forget(file: str) -> None:
    _living.remove(file)
    if file not in _living:
        linecache.cache.pop(file, None)


def text(code: CodeType) -> str:
    """Returns the generated source that `code` was compiled from; "" for code from a file."""
    file = code.co_filename
    return "".join(linecache.getlines(file)) if file.startswith("<lz ") else ""
