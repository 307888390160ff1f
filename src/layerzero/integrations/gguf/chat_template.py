"""Renders the chat template of a model file in a child process with little time and memory.

A template is a program: nested loops may never end, a text doubled thirty times exceeds memory.
Jinja's sandbox only protects the interpreter's internals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ...spec.errors import ConfigError, DataError

MAX_CHARACTERS = 1 << 20                       # of a template; real ones have some thousand
SECONDS = 10.0
MEMORY = 1 << 30                               # bytes of the child, Python included
MAX_OUTPUT = 1 << 22                           # characters

_CHILD = """
import json, sys
task = json.loads(sys.stdin.read())
sys.path[:] = task["path"]
try:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as e:
    print(json.dumps({"missing": str(e)}))
    raise SystemExit
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (task["memory"], task["memory"]))
except (ImportError, ValueError, OSError):
    pass
def raise_exception(message):
    raise TemplateError(message)
try:
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals["raise_exception"] = raise_exception
    parts, length = [], 0
    for part in sandbox.from_string(task["template"]).generate(
            messages=task["messages"], add_generation_prompt=True, **task["tokens"]):
        parts.append(part)
        length += len(part)
        if length > task["output"]:
            raise TemplateError("it renders more than " + str(task["output"]) + " characters")
    text = "".join(parts)
    print(json.dumps({"text": text}))
except Exception as e:
    print(json.dumps({"error": f"{type(e).__name__}: {e}"[:500]}))
"""


def render(template: str, messages: Sequence[tuple[str, str]], owner: str,
           tokens: Mapping[str, str] | None = None) -> str:
    """Render (role, content) pairs; DataError for a template that is wrong or needs too much.
    tokens: the texts of the tokens "bos" and "eos"."""
    if len(template) > MAX_CHARACTERS:
        raise DataError(
            f"{owner}: wanted a chat template of at most {MAX_CHARACTERS} characters, got "
            f"{len(template)}")
    known = {f"{side}_token": (tokens or {}).get(side, "") for side in ("bos", "eos")}
    task = {"path": sys.path, "memory": MEMORY, "template": template, "output": MAX_OUTPUT,
            "tokens": known,
            "messages": [{"role": role, "content": content} for role, content in messages]}
    try:
        done = subprocess.run([sys.executable, "-c", _CHILD], input=json.dumps(task),
                              capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(
            f"{owner}: the chat template did not end within {SECONDS:g} seconds; give the text "
            "itself (raw)") from None
    try:
        result: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        raise DataError(f"{owner}: the chat template ended the process that rendered it "
                        f"(status {done.returncode}); give the text itself (raw)") from None
    if "missing" in result:
        raise ConfigError(
            f"a chat template wants the library jinja2: {result['missing']}; pip install jinja2, "
            "or give the text itself (raw)")
    if "error" in result:
        raise DataError(f"{owner}: the chat template cannot be rendered: {result['error']}")
    return result["text"]
