"""`lz report`: what was gained here and what to run next, as one HTML page or as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ....files.sealed import replace_output
from ....machine import hardware
from ....report.advice import advise
from ....report.gathering import Source, gather
from ....report.overview import Overview
from ....report.page import headline, render
from ....report.regret import read_regret
from ....report.saved import read_report
from ....spec.codec import encode
from ....spec.display import plural
from ....spec.errors import ConfigError
from ....tuning.workload import calls_for
from ... import show
from ...options import STDOUT

DEFAULT_PAGE = Path("report.html")


def report(out: Path | None = None, regret: Path | None = None, device: str | None = None,
           calls: Path | None = None, model: str | None = None, dtype: str = "auto",
           batch: int = 1, prompt: int = 512, context: int = 4096,
           against: Sequence[Path] = (), as_json: bool = False) -> int:
    """Write the page; its options are declared in panels/measure.py."""
    page = out if out is not None or as_json else DEFAULT_PAGE
    earlier = [read_report(path) for path in against]
    replayed = read_regret(regret) if regret is not None else None
    source = _source(calls, model, dtype, device, batch, prompt, context)
    overview = gather(device, replayed, source, earlier)
    if page == STDOUT:
        show.piece(render(overview).encode("utf-8", "xmlcharrefreplace").decode("utf-8"))
        return 0
    if page is not None:
        _write(page, overview)
    if as_json:
        show.as_json({**overview.saved.to_json(), "summary": _summary(overview)})
        return 0
    show.text(f"{page}: {', '.join(filter(None, headline(overview)))}")
    if overview.kinds:
        show.text(f"{plural(overview.measurements, 'measurement')} of "
                  f"{plural(len(overview.kinds), 'kind')} of call on {overview.device}")
    for advice in advise(overview)[:1]:
        show.text(f"next: {advice.command}")
    return 0


def _source(calls: Path | None, model: str | None, dtype: str, device: str | None, batch: int,
            prompt: int, context: int) -> Source | None:
    if calls is not None and model is not None:
        raise ConfigError(f"give one of --calls and --model, got {calls} and {model}")
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
        replace_output(page, render(overview), errors="xmlcharrefreplace")
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
