"""The page of the commands, from their declarations: panels, options, examples, exit codes."""

from __future__ import annotations

from typing import Any

import typer

from layerzero.cli.app import app
from layerzero.cli.root import EXIT_CODES

HEAD = """\
# Commands

`lz COMMAND -h` says the same. Every command takes `--json`, which prints one JSON object and
nothing else on stdout; warnings and errors go to stderr. An operation, sizes, a dtype, a device and
a model are given the same way everywhere: see [the `lz` command](../cli.md). `lz
--install-completion` makes Tab complete commands, options, operations, models, dtypes and devices
in bash, zsh, fish and PowerShell.

## Exit codes

"""
TAIL = "\n`lz record` ends with the exit code of the command that it ran.\n"


def page() -> str:
    rows = "".join(f"| {code} | {text} |\n" for code, text in EXIT_CODES.items())
    text = f"{HEAD}| exit code | meaning |\n|---|---|\n{rows}{TAIL}"
    root: Any = typer.main.get_command(app)
    panel = ""
    for command in root.commands.values():
        if command.rich_help_panel != panel and not hasattr(command, "commands"):
            panel = command.rich_help_panel
            inside = {n: c for n, c in root.commands.items() if c.rich_help_panel == panel}
            text += f"\n## {panel}\n" + "".join(
                section(f"lz {n}", c) for n, c in inside.items())
    return text


def section(name: str, command: Any) -> str:
    """The paragraph and the options of a command, or of each command of a group."""
    words = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    if hasattr(command, "commands"):
        return f"\n### {name}\n\n{words}\n" + "".join(
            section(f"{name} {n}", c) for n, c in command.commands.items())
    example = command.epilog.rpartition("Example:\n")[2].strip()
    rows = [(usage(p), words_of(p)) for p in command.params if p.name != "help"]
    table = "".join(f"| `{a}` | {b} |\n".replace("||", "|") for a, b in rows)
    return (f"\n### {name}\n\n{words}\n\n```console\n{example}\n```\n\n"
            f"| argument | meaning |\n|---|---|\n{table}")


def usage(param: Any) -> str:
    if param.param_type_name == "argument":
        return (param.metavar or param.name.upper()) + ("..." if param.nargs == -1 else "")
    return ", ".join(sorted(param.opts, key=len, reverse=True)) + (
        f"/{param.secondary_opts[0]}" if param.secondary_opts else "")


def words_of(param: Any) -> str:
    default = param.default
    shown = default not in (None, "", False, True, 0, 0.0, ()) and not callable(default)
    text = (getattr(param, "help", "") or "") + (f"; default: `{default}`" if shown else "")
    return text.replace("|", "\\|") + (" (required)" if param.required else "")
