"""A chat template of a model file, rendered where it can do no harm.

A template is a program: loops in loops never end, a text doubled thirty times is larger than memory. Jinja's sandbox
keeps it from the interpreter's insides and from nothing else, so it is rendered by a process of its own that has
little time and little memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from ..spec.errors import ConfigError, DataError

MOST_CHARACTERS = 1 << 20                      # of a template; those of models have some thousand
SECONDS = 10.0
MEMORY = 1 << 30                               # bytes of the process, Python included

_CHILD = """
import json, sys
given = json.loads(sys.stdin.read())
sys.path[:] = given["path"]
try:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as e:
    print(json.dumps({"missing": str(e)}))
    raise SystemExit
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
except (ImportError, ValueError, OSError):
    pass
try:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(given["template"])
    text = made.render(messages=given["messages"], add_generation_prompt=True, bos_token="", eos_token="")
    print(json.dumps({"text": text}))
except Exception as e:
    print(json.dumps({"error": f"{type(e).__name__}: {e}"[:500]}))
"""


def render(template: str, messages: Sequence[tuple[str, str]], owner: str) -> str:
    """The text of (role, content) pairs; DataError for a template that is wrong, or takes too much."""
    if len(template) > MOST_CHARACTERS:
        raise DataError(f"{owner}: wanted a chat template of at most {MOST_CHARACTERS} characters, got {len(template)}")
    given = {"path": sys.path, "memory": MEMORY, "template": template,
             "messages": [{"role": role, "content": content} for role, content in messages]}
    try:
        done = subprocess.run([sys.executable, "-c", _CHILD], input=json.dumps(given), capture_output=True, text=True,
                              timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"{owner}: the chat template did not end within {SECONDS:g} seconds; give the text itself "
                        "(raw)") from None
    try:
        said: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        raise DataError(f"{owner}: the chat template ended the process that rendered it "
                        f"(status {done.returncode}); give the text itself (raw)") from None
    if "missing" in said:
        raise ConfigError(f"a chat template wants the library jinja2: {said['missing']}; pip install jinja2, or give "
                          "the text itself (raw)")
    if "error" in said:
        raise DataError(f"{owner}: the chat template cannot be rendered: {said['error']}")
    return said["text"]
