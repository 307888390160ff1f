"""`lz report`: what was gained here and what to run next, as one HTML page or as JSON."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ...machine import hardware
from ...report.advice import advise
from ...report.gathering import Source, gather
from ...report.overview import Overview
from ...report.page import headline, render
from ...report.regret import read_regret
from ...report.saved import read_report
from ...spec.codec import encode
from ...spec.errors import ConfigError
from ...tuning.workload import calls_for
from .. import show
from ..options import Batch, CallsFile, Context, DeviceKind, Json, Model, Prompt, check_calls_file

DEFAULT_PAGE = Path("report.html")


def report(
    out: Annotated[Path | None, typer.Option(
        "--out", "-o", help="the page; replaced if it exists. Default: report.html, with --json "
        "none")] = None,
    regret: Annotated[Path | None, typer.Option(
        "--regret", help="a file of lz regret --json, to be shown too")] = None,
    device: DeviceKind = None,
    calls: CallsFile = None,
    model: Model = None,
    dtype: Annotated[str, typer.Option(help="of --model; auto: bfloat16 where the device computes "
                                       "in it, else float32")] = "auto",
    batch: Batch = 1, prompt: Prompt = 512, context: Context = 4096,
    against: Annotated[list[Path] | None, typer.Option(
        "--against", help="an earlier lz report --json: what changed since; may be given several "
                          "times: all are drawn over time, the newest is compared")] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page: what was gained, where the time goes and is lost, and what to run next.

    Every number is weighted by the calls of --calls or --model; without them each measured kind of
    call counts once. --json prints what a later --against reads.
    """
    page = out if out is not None or as_json else DEFAULT_PAGE
    if page is not None and not page.parent.is_dir():
        raise ConfigError(f"--out {page}: the folder {page.parent} does not exist; make it first")
    earlier = [read_report(path) for path in against or ()]
    replayed = read_regret(regret) if regret is not None else None
    source = _source(calls, model, dtype, device, batch, prompt, context)
    overview = gather(device, replayed, source, earlier)
    if page is not None:
        _write(page, overview)
    if as_json:
        show.as_json({**overview.saved.to_json(), "summary": _summary(overview)})
        return
    show.text(f"{page}: {', '.join(filter(None, headline(overview)))}")
    if overview.kinds:
        show.text(f"{overview.measurements} measurements of {len(overview.kinds)} kinds of call on "
                  f"{overview.device}")
    for advice in advise(overview)[:1]:
        show.text(f"next: {advice.command}")


def _source(calls: Path | None, model: str | None, dtype: str, device: str | None, batch: int,
            prompt: int, context: int) -> Source | None:
    if calls is not None and model is not None:
        raise ConfigError(f"give one of --calls and --model, got {calls} and {model}")
    check_calls_file(calls)
    if calls is not None:
        return Source(calls.name, f"--calls {shlex.quote(str(calls))}", calls_for(calls))
    if model is None:
        return None
    if dtype == "auto":
        kind = device or hardware.main_kind()
        dtype = "bfloat16" if hardware.probe(kind).supports_bf16 else "float32"
    sizes = {"batch": (batch, 1), "prompt": (prompt, 512), "context": (context, 4096)}
    words = [f"--model {model}", f"--dtype {dtype}",
             *(f"--{name} {n}" for name, (n, default) in sizes.items() if n != default)]
    name = f"{model}: a prompt of {prompt} tokens and one token after {context}, {dtype}" + (
        f", batch {batch}" if batch != 1 else "")
    return Source(name, " ".join(words),
                  calls_for(model, dtype=dtype, batch=batch, prompt=prompt, context=context))


def _write(page: Path, overview: Overview) -> None:
    try:                                       # a plugin's note may hold a lone surrogate
        page.write_text(render(overview), "utf-8", errors="xmlcharrefreplace")
    except OSError as e:
        raise ConfigError(f"--out {page}: cannot write the page: {e.strerror}; "
                          "name another file") from e


def _summary(overview: Overview) -> dict[str, object]:
    total, compared, against = overview.total, overview.total.compared, overview.against
    unmeasured = overview.workload.unmeasured if overview.workload else ()
    return {
        "calls": total.calls, "us": total.us, "compared_us": compared.us,
        "torch_us": total.torch_us, "gain": total.gain, "lost_us": total.lost_us,
        "beyond_roof_us": total.headroom_us, "kinds": len(total.kinds),
        "unmeasured": len(unmeasured),
        "operations": [{"op": op, "us": part.us, "torch_us": part.torch_us, "gain": part.gain}
                       for op, part in overview.totals_by_op],
        "history": encode(overview.history), "next": encode(advise(overview)),
        "against": None if against is None else {
            "created_at": against.before.created_at, "gain": against.gain,
            **{verdict: len(against.with_verdict(verdict))
               for verdict in ("faster", "slower", "same", "new", "gone")}}}
