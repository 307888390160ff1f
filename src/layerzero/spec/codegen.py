"""Generated code that a debugger can step through and a traceback can show.

Text that is compiled here stays in `linecache`, where pdb, tracebacks and `inspect.getsource` look
for the lines of a file. Its file is named after what it is and what is in it, so the same text
generated again takes no more room.
"""

from __future__ import annotations

import builtins
import linecache
from hashlib import sha256
from types import CodeType


def compile(source: str, name: str) -> CodeType:
    """Compile generated `source` for exec, under a file name that begins with `<lz {name}`."""
    file = f"<lz {name} {sha256(source.encode()).hexdigest()[:8]}>"
    # An entry without a modification time is never dropped as stale.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return builtins.compile(source, file, "exec")


def text(code: CodeType) -> str:
    """The generated source that `code` was compiled from; "" for code from a file."""
    file = code.co_filename
    return "".join(linecache.getlines(file)) if file.startswith("<lz ") else ""
