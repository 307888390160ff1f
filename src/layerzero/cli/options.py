"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..spec.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
DeviceKind = Annotated[str | None, typer.Option(
    "--device", help="cpu, cuda, ...; default: this machine's accelerator, else its CPU")]

# Where calls come from.
CallsFile = Annotated[Path | None,
                      typer.Option("--calls", help="a file of calls, as lz record writes it")]
Model = Annotated[str | None,
                  typer.Option("--model", help="a model that lz knows, such as llama-3-8b")]
OpCases = Annotated[str | None,
                    typer.Option("--op", help="the contract's own cases of an operation")]
Batch = Annotated[int, typer.Option(help="of --model")]
Prompt = Annotated[int, typer.Option(help="of --model: tokens of a prompt")]
Context = Annotated[int, typer.Option(help="of --model: tokens that decoding looks back on")]


def check_calls_file(path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise ConfigError(
            f"--calls {path}: there is no such file; lz record -- python app.py writes one")
