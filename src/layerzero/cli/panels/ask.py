"""Questions about a call and about this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...spec.errors import ConfigError
from .. import options as o
from ..root import declare

PANEL = "Ask which kernel, and why"

Backend = Annotated[str | None, typer.Option(
    "--backend", help="ask for this kernel or library by name")]
On = Annotated[Path | None, typer.Option(
    "--on",
    help="a device as JSON, one of `devices` in lz doctor --json: answers for that machine")]
KernelId = Annotated[str, typer.Argument(metavar="KERNEL_ID", help="such as torch.sdpa_math")]
CALL = "query=1x32x1x128 key=1x8x4096x128 value=1x8x4096x128"


@declare(PANEL, f"lz explain attention {CALL} --dtype bf16",
         short="The whole decision for a call: every kernel, every reason.")
def explain(op: o.OpName, words: o.OneCall = None, dtype: o.Dtype = "bfloat16",
            device: o.DeviceKind = None, backend: Backend = None, on: On = None,
            code: Annotated[bool, typer.Option(
                "--code", help="print the generated call path of the op")] = False,
            as_json: o.Json = False) -> None:
    """The whole decision for a call: every kernel, accepted or rejected, every reason. Runs
    nothing."""
    if not words and not code:
        raise ConfigError(f"lz explain wants a call, such as {CALL}; or --code for the generated "
                          "call path of the op")
    _check_on(on)
    from ..commands import ask
    raise typer.Exit(ask.generated_code(op, as_json) if code else ask.explain(
        op, words or (), dtype, device, backend, on, as_json))


@declare(PANEL, f"lz which attention {CALL}")
def which(op: o.OpName, words: o.OneCall = None, dtype: o.Dtype = "bfloat16",
          device: o.DeviceKind = None,
          backend: Backend = None, on: On = None, as_json: o.Json = False) -> None:
    """The kernel that would serve a call. Exit code 1 if there is none."""
    if not words:
        raise ConfigError(f"lz which wants a call, such as {CALL}")
    _check_on(on)
    from ..commands import ask
    raise typer.Exit(ask.which(op, words, dtype, device, backend, on, as_json))


@declare(PANEL, "lz doctor --deep")
def doctor(deep: Annotated[bool, typer.Option(
        "--deep", help="import each library in a process of its own")] = False,
           matrix: Annotated[bool, typer.Option(
        "--matrix", help="the versions that kernels declare against those found, here and in the "
                         "interpreters of workers")] = False,
           as_json: o.Json = False) -> None:
    """What is here, what is broken, and what to do. Exit code 1 if something is broken."""
    from ..commands import ask
    raise typer.Exit(ask.matrix(deep, as_json) if matrix else ask.doctor(deep, as_json))


@declare(PANEL, "lz list attention --device cpu", "list",
         short="Every kernel, and how it stands on this machine.")
def list_kernels(op: o.OnlyOp = None, device: o.DeviceKind = None, as_json: o.Json = False) -> None:
    """Every kernel, how it stands on this machine, and if it does not, why."""
    from ..commands import ask
    raise typer.Exit(ask.list_kernels(op, device, as_json))


@declare(PANEL, "lz kernels torch.sdpa_flash",
         short="One kernel in full: its limits, its library, its status.")
def kernels(kernel: KernelId, device: o.DeviceKind = None, as_json: o.Json = False) -> None:
    """One kernel in full: its limits, its library, how it stands here."""
    from ..commands import ask
    raise typer.Exit(ask.kernels(kernel, device, as_json))


@declare(PANEL, "lz config --json",
         short="Every setting, where it comes from, and the rules in force.")
def config(as_json: o.Json = False) -> None:
    """Every setting with its value and where it comes from, and the rules in force."""
    from ..commands import ask
    raise typer.Exit(ask.config(as_json))


def _check_on(path: Path | None) -> None:
    o.check_file("--on", path, "lz doctor --json prints devices; wanted a device as JSON, one of "
                               "them")
