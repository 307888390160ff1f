"""The root of the command line: help in panels, an example per command, exit codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from .. import __version__
from .streams import PIPE_CLOSED

INTERRUPTED = 130
# The same for every command; docs/reference/commands.md prints this table.
EXIT_CODES = {
    0: "yes, or done",
    1: "the answer is no: broken, not equal, not ready, not good enough, or nothing can serve",
    2: "an error: a wrong argument, or work that could not be done; one message on stderr says "
       "what was wanted, what came and what to do",
    3: "a fault of lz itself; the traceback on stderr belongs in a bug report",
    INTERRUPTED: "interrupted (Ctrl-C); what was finished by then is kept",
    PIPE_CLOSED: "the reader of the output went away, as `head` does; the command ended there",
}
NAMES = {"help_option_names": ["-h", "--help"]}

Function = TypeVar("Function", bound=Callable[..., Any])


class PanelGroup(TyperGroup):
    """A group with its commands by panel, in plain text; an interrupt is an exit code."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands",
                              []).append((name, command))
        width = max(len(name) for commands in panels.values() for name, _ in commands)
        for panel, commands in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(width),
                                     command.get_short_help_str(formatter.width - width - 6))
                                    for name, command in commands])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def group(help: str, **settings: Any) -> typer.Typer:
    return typer.Typer(cls=PanelGroup, help=help, no_args_is_help=True,
                       pretty_exceptions_enable=False,
                       rich_markup_mode=None, context_settings=NAMES, **settings)


app = group("LayerZero: which kernel serves a call on this machine, and why.", epilog=(
    "\b\nExit codes: 0 yes or done, 1 the answer is no, 2 an error, 3 a fault of lz, 130 "
    "interrupted,\n141 the reader of a pipe went away.\n"
    "lz COMMAND -h has an example of each; lz --install-completion makes Tab work."))


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option(
        "--version", "-V", help="print the version and exit")] = False) -> None:
    if version:
        print(f"layerzero {__version__}")
        raise typer.Exit()


def declare(panel: str, example: str, name: str | None = None, *, short: str | None = None,
            to: typer.Typer = app, **settings: Any) -> Callable[[Function], Function]:
    """Add a command to a panel of the help, with an example below its options."""
    return to.command(name, rich_help_panel=panel or None, short_help=short,
                      epilog=f"\b\nExample:\n  {example}", **settings)
