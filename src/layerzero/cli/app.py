"""The commands of `lz`: each asks the library one question and prints the answer; none decides
anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..dispatch import native
from ..machine import hardware
from ..operate import inspection
from ..spec.device import Device
from ..spec.errors import ConfigError, NoKernelFoundError
from ..spec.names import find_kernel, find_kernels
from ..spec.plan import Plan
from ..spec.reading import read_json
from ..world import snapshot as worlds
from . import show
from .arguments import parse_call
from .commands import hub, perf, workload
from .commands.bundle import bundle
from .commands.demo import run_demo
from .commands.fit import SIZES
from .commands.gate import gate
from .commands.generate import generate
from .commands.plan import diff, dry_run, lock, solve
from .commands.ready import ready
from .commands.report import report
from .commands.serve import serve_metrics
from .commands.soak import command as soak
from .commands.tune import tune
from .commands.verify import command as verify
from .commands.warmup import warmup
from .options import DeviceKind, Json

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  rich_markup_mode=None,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="LayerZero: which kernel serves a call on this machine, and why.")
app.add_typer(perf.app, name="perf")
app.add_typer(hub.app, name="hub")

OpName = Annotated[str, typer.Argument(metavar="OP", help="an operation, such as attention")]
Words = Annotated[list[str],
                  typer.Argument(metavar="SHAPE...", help="query=1x32x1x128 is_causal=true ...")]
MaybeWords = Annotated[list[str] | None, typer.Argument(
    metavar="[SHAPE...]", help="query=1x32x1x128 is_causal=true ...")]
Dtype = Annotated[str, typer.Option(help="dtype of the tensors; one tensor's own: mask=8x8:bool")]
Backend = Annotated[str | None,
                    typer.Option("--backend", help="ask for this kernel or library by name")]
On = Annotated[Path | None, typer.Option(
    "--on",
    help="a device as JSON, one of `devices` in lz doctor --json: answers for that machine")]


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool,
                       typer.Option("--version", "-V", help="print the version and exit")] = False,
) -> None:
    if version:
        show.text(f"layerzero {__version__}")
        raise typer.Exit()


@app.command()
def doctor(deep: Annotated[bool,
                           typer.Option("--deep",
                                        help="import each library in a process of its own")] = False,
           as_json: Json = False) -> None:
    """What is here, what is broken, and what to do. Exit code 1 if something is broken."""
    diagnosis = inspection.doctor(deep)
    if as_json:
        show.as_json(diagnosis.to_json())
    else:
        show.devices(diagnosis.devices)
        show.heading(", ".join(f"{name} {version}" for name, version in diagnosis.versions.items()))
        show.table(("", "check", "found", "hint"),
                   [("ok" if c.ok else "!!", c.name, c.found, c.hint) for c in diagnosis.checks])
    raise typer.Exit(0 if diagnosis.ok else 1)


@app.command("list")
def list_kernels(op: Annotated[str | None,
                               typer.Argument(metavar="[OP]",
                                              help="only kernels of this op")] = None,
                 device: DeviceKind = None, as_json: Json = False) -> None:
    """Every kernel, how it stands on this machine, and if it does not, why."""
    kind = _kind(device)
    rows = inspection.list_kernels(op, kind)
    if as_json:
        show.as_json({"device": kind, "kernels": [row.to_json() for row in rows]})
        return
    show.table(("kernel", "op", "status", "why not"),
               [(r.id, r.op, r.status, "; ".join(reason.message for reason in r.reasons))
                for r in rows])


@app.command()
def kernels(kernel: Annotated[str,
                              typer.Argument(metavar="KERNEL_ID", help="such as torch.sdpa_math")],
            device: DeviceKind = None, as_json: Json = False) -> None:
    """One kernel in full: its limits, its library, how it stands here."""
    catalog = worlds.current().catalog
    kernel = find_kernel(kernel, catalog.op_of_kernel)
    declared, kind = catalog.by_id[kernel], _kind(device)
    info = next(row for row in inspection.list_kernels(declared.op.name, kind) if row.id == kernel)
    data = {**declared.to_json(), "device": kind, "status": info.status,
            "reasons": [reason.to_json() for reason in info.reasons]}
    if as_json:
        show.as_json(data)
        return
    reasons = "; ".join(map(str, info.reasons))
    rows = [("op", declared.op.name),
            (f"status on {kind}", info.status + (f": {reasons}" if reasons else ""))]
    rows += [("requires", str(rule)) for rule in declared.requires]
    rows += [(name, str(data[name])) for name in (
        "package", "distribution", "version", "torch", "note", "workspace", "variants", "prior",
        "overhead_us")
        if data[name] not in ("", [], "0")]
    rows += [("properties", ", ".join(name for name in (
        "differentiable", "deterministic", "graph_safe", "traceable", "baseline", "jit", "untested")
                                      if data[name]))]
    show.heading(kernel)
    show.table(("field", "value"), rows)


@app.command()
def explain(op: OpName, words: MaybeWords = None, dtype: Dtype = "bfloat16",
            device: DeviceKind = None, backend: Backend = None, on: On = None,
            as_json: Json = False,
            code: Annotated[bool,
                            typer.Option("--code",
                                         help="print the generated call path of the op")] = False,
            ) -> None:
    """The whole decision for a call: every kernel, accepted or rejected, every reason.

    Runs nothing.
    """
    if code:
        text = inspection.generated_code(op)
        show.as_json({"op": op, "code": text}) if as_json else show.text(text)
        return
    if not words:
        raise ConfigError(
            "lz explain wants a call, such as query=1x32x1x128 key=1x8x4096x128 "
            "value=1x8x4096x128; or --code for the generated call path of the op")
    plan = _plan(op, words, dtype, device, backend, on)
    show.as_json(plan.to_json()) if as_json else show_plan(plan)
    raise typer.Exit(0 if plan.steps else 1)


@app.command()
def which(op: OpName, words: Words, dtype: Dtype = "bfloat16", device: DeviceKind = None,
          backend: Backend = None,
          on: On = None, as_json: Json = False) -> None:
    """The kernel that would serve a call; an error if there is none."""
    plan = _plan(op, words, dtype, device, backend, on)
    if plan.kernel is None:
        raise NoKernelFoundError(f"no kernel can serve this call\n{plan}")
    show.as_json({"op": plan.op, "kernel": plan.kernel}) if as_json else show.text(plan.kernel)


@app.command()
def config(as_json: Json = False) -> None:
    """Every setting with its value and where it comes from, and the rules in force."""
    values = inspection.get_config()
    if as_json:
        show.as_json(values)
        return
    show.table(("setting", "value", "from"),
               [(name, json.dumps(value), values["source"][name])
                for name, value in values["settings"].items()])
    show.heading(f"policy {values['policy_hash']}, file: {values['policy_file'] or 'none'}")
    show.table(("layer", "rule", "written in"),
               [(r["layer"], r["text"], r["origin"]) for r in values["rules"]])


@app.command()
def build(force: Annotated[bool,
                           typer.Option("--force",
                                        help="compile even if it is built already")] = False) -> None:
    """Compile the native call path for this Python and this torch, and our own CPU kernels for this
    processor.
    """
    with show.spinner("compiling (once)") as print_line:
        path = native.build(force=force, say=print_line)
    state = native.status()
    show.text(f"{path}\nnative fast path: {state.text}" + (f"\nhint: {state.hint}" if state.hint
                                                           else ""))
    raise typer.Exit(0 if state.ok or not state.expected else 1)


@app.command()
def demo(as_json: Json = False, device: DeviceKind = None,
         seconds: Annotated[float,
                            typer.Option(
                                help="the time for all of it; what does not fit is left out")] = 45.0,
         ) -> None:
    """A decoder block through lz and through plain torch: who serves, why, is it equal, what is
    gained.
    """
    kind = _kind(device)
    if kind not in SIZES:
        if device is not None:
            raise ConfigError(f"lz demo runs on {' or '.join(SIZES)}, got {device!r}")
        kind = "cpu"
    raise typer.Exit(run_demo(kind, seconds, as_json))


app.command(context_settings=workload.PASS_ON)(workload.record)
app.command()(workload.regret)
app.command()(tune)
app.command()(solve)
app.command()(lock)
app.command()(diff)
app.command("dry-run")(dry_run)
app.command("verify")(verify)
app.command()(gate)
app.command("soak")(soak)
app.command()(warmup)
app.command()(ready)
app.command("serve-metrics")(serve_metrics)
app.command()(bundle)
app.command()(report)
app.command()(generate)


def show_plan(plan: Plan) -> None:
    if not show.console().is_terminal:
        show.text(str(plan))
        return
    show.heading(str(plan).splitlines()[0])
    rows = [("->" if i == 0 else "", step.kernel, f"{step.score.total_us:.2f} us", "; ".join(
        part for part in (step.score.source, "after " + ", ".join(map(str, step.transforms))
                          if step.transforms else "",
                          step.note) if part)) for i, step in enumerate(plan.steps)]
    rows += [("x", r.kernel, "", "; ".join(map(str, r.reasons))) for r in plan.rejected]
    show.table(("", "kernel", "expected", "why"), rows, right=("expected",))


def _plan(op: str, words: list[str], dtype: str, device: str | None, backend: str | None,
          on: Path | None) -> Plan:
    declared = inspection.dispatcher_of(op).op
    if backend is not None:
        find_kernels(backend, worlds.current().catalog.op_of_kernel, op, "--backend")
    machine = _device_file(on) if on is not None else hardware.probe(_kind(device))
    return inspection.explain(op, backend=backend, on=machine, **parse_call(declared, words, dtype))


def _kind(device: str | None) -> str:
    """Return the type of the named device, else of this machine's accelerator, else "cpu"."""
    return hardware.probe(device).type if device is not None else hardware.main_kind()


def _device_file(path: Path) -> Device:
    return Device.from_json(read_json(path,
                                      "a device as JSON, one of `devices` in lz doctor --json"))
