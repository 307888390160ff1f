"""Proving: kernels, models and definitions against references, and the gate of a release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...spec.errors import ConfigError
from .. import options as o
from ..root import app, declare, group

PANEL = "Prove the answers"
# of lz verify models: rungs of the ladder
CHECKS = {"layer": 2, "stages": 3, "logits": 4, "training": 5}
PEER_CHECKS = ("stages", "logits")
SIZES = ("small", "medium", "large")
STAGES = ("static", "models", "correctness", "schema", "performance", "soak", "readiness")
FAMILIES = ("decoder", "encoder-decoder", "image")

Quick = Annotated[bool, typer.Option("--quick", help="a minute or so; the default")]
Full = Annotated[bool, typer.Option("--full", help="every case")]
Stress = Annotated[bool, typer.Option("--stress", help="every case with many seeds")]
Backend = Annotated[str, typer.Option("--backend", help="only kernels of this library")]
Config = Annotated[list[str] | None, typer.Option("--config", help=(
    "a decoder: tiny, gqa, deep, wide, no_rope, medium, or its numbers: hidden=96,heads=6; may be "
    "repeated"))]
Gguf = Annotated[str, typer.Option("--model", help=(
    "a GGUF file, for stages and logits; default: SmolLM2 where it is installed; none: random "
    "weights"))]
Text = Annotated[str, typer.Option("--text", help="what the model reads")]
Verbose = Annotated[bool, typer.Option("--verbose", help="a table for every layer")]
Seed = Annotated[int, typer.Option(help="seed of the random inputs")]

verify = group("Kernels, models and definitions against references. Exit code 1 if something "
               "disagrees.")
app.add_typer(verify, name="verify", rich_help_panel=PANEL)


@verify.callback(invoke_without_command=True)
def against(
    context: typer.Context, peer: Annotated[str, typer.Option("--peer", metavar="NAME", help=(
        "llama.cpp: a GGUF model through lz against it, by logits and KL; it is installed from a "
        "wheel into an environment of its own"))] = "",
    quick: Quick = False, full: Annotated[bool, typer.Option(
        "--full", help="with --peer: more positions, and a decode of 512 tokens")] = False,
    perf: Annotated[bool, typer.Option("--perf", help="with --peer: tokens/s, in turns")] = False,
    build: Annotated[bool, typer.Option("--build", help=(
        "with --peer: compile it for this machine, a quarter of an hour the first time"))] = False,
    threads: Annotated[int, typer.Option(
        "--threads", min=0, help="with --peer: CPU threads; 0: as many as torch")] = 0,
    model: Annotated[str, typer.Option(
        "--model", help="with --peer: a GGUF file; default: SmolLM2")] = "",
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE", help="with --peer: write the report there too")] = None,
    level: Annotated[int, typer.Option("--level", min=0, max=1, help=(
        "1: kernels against their contracts, as lz verify kernels"))] = 0,
    device: o.DeviceKind = None,
    allow_untested: Annotated[bool, typer.Option("--allow-untested", help=(
        "with --level 1: also kernels that were never run on their hardware"))] = False,
    report: Annotated[bool, typer.Option("--report", help=(
        "with --level 1: write lz-verify-DEVICE.json, to be sent to the project"))] = False,
    as_json: o.Json = False,
) -> None:
    """Kernels, models and definitions against references. Exit code 1 if something disagrees."""
    if context.invoked_subcommand is not None:
        if peer:
            raise ConfigError(f"lz verify takes --peer or {context.invoked_subcommand}, got both")
        return
    if level == 1 and not peer:
        lane = _lane("lz verify --level 1", quick=quick, full=full)
        from ..calls import device_kind
        from ..commands.prove.kernels import verify_kernels
        path = Path(f"lz-verify-{device_kind(device)}.json") if report else None
        raise typer.Exit(verify_kernels(lane, device=device, untested=allow_untested, report=path,
                                        as_json=as_json))
    if peer != "llama.cpp":
        raise ConfigError(f"lz verify wants --peer llama.cpp, or one of its commands (lz verify "
                          f"-h); got {f'--peer {peer}' if peer else 'neither'}")
    lane = _lane("lz verify --peer", quick=quick, full=full, perf=perf)
    o.check_file("--model", Path(model) if model else None, "give a GGUF file")
    o.check_out("--out", out)
    from ..commands.prove.llama_cpp import verify_llama_cpp as run
    raise typer.Exit(run(lane, model, build=build, threads=threads, out=out, as_json=as_json))


@declare("", "lz verify kernels attention --full", to=verify,
         short="Every kernel against its contract; certificates.")
def kernels(
    op: o.OnlyOp = None, quick: Quick = False, full: Full = False, stress: Stress = False,
    backend: Backend = "", kernel: Annotated[str, typer.Option(
        "--kernel", help="only this kernel; * and ? match several")] = "",
    isolated: Annotated[bool, typer.Option("--isolated", help=(
        "libraries without a certificate run in a process of their own first"))] = False,
    workers: Annotated[int, typer.Option(min=0, help=(
        "processes that verify at once; 0: one for each core of a CPU, 1: this one"))] = 0,
    device: o.DeviceKind = None, as_json: o.Json = False,
) -> None:
    """Every kernel against the contract of its operation; those that pass get a certificate."""
    lane = _lane("lz verify kernels", quick=quick, full=full, stress=stress)
    from ..commands.prove.kernels import verify_kernels as run
    raise typer.Exit(run(lane, backend=backend, kernel=kernel, op=op or "", device=device,
                         as_json=as_json, isolated=isolated, workers=workers))


@declare("", "lz verify models logits --dtype fp32", to=verify,
         short="A layer, stages, logits or training, against plain torch.")
def models(
    check: Annotated[str, typer.Argument(
        metavar="CHECK", autocompletion=o.complete(tuple(CHECKS)), help=(
            "layer: every stage and gradient of one; stages: each stage of each layer of a real "
            "model; logits: the whole forward; training: steps of SGD and AdamW"))] = "logits",
    quick: Quick = False, full: Full = False, stress: Stress = False, config: Config = None,
    dtype: o.FloatDtypes = None, backend: Annotated[str, typer.Option(
        "--backend", help="a library that serves wherever it can")] = "",
    kernel: Annotated[str, typer.Option(
        "--kernel", help="a kernel that serves wherever it can")] = "",
    steps: Annotated[int, typer.Option(
        min=0, help="training steps of each optimizer; 0: as many as the effort takes")] = 0,
    model: Gguf = "", text: Text = "", verbose: Verbose = False, seed: Seed = 0,
    device: o.DeviceKind = None, as_json: o.Json = False,
) -> None:
    """A layer, a real model's stages or logits, or training, against plain torch in float64."""
    if check not in CHECKS:
        raise ConfigError(f"lz verify models takes one of {', '.join(CHECKS)}, got {check!r}")
    lane = _lane("lz verify models", quick=quick, full=full, stress=stress)
    _check_gguf(model)
    from ..commands.prove.ladder import ladder
    raise typer.Exit(ladder(CHECKS[check], effort=lane, backend=backend, kernel=kernel,
                            configs=tuple(config or ()), dtypes=tuple(dtype or ()), device=device,
                            seed=seed,
                            steps=steps, model=model, text=text, verbose=verbose, as_json=as_json))


@declare("", "lz verify peer stages", to=verify,
         short="A real model against transformers' own Llama.")
def peer(
    check: Annotated[str, typer.Argument(
        metavar="CHECK", autocompletion=o.complete(PEER_CHECKS),
        help="stages or logits")] = "stages",
    quick: Quick = False, full: Full = False, stress: Stress = False, dtype: o.FloatDtypes = None,
    backend: Annotated[str, typer.Option(
        "--backend", help="a library that serves wherever it can")] = "",
    kernel: Annotated[str, typer.Option(
        "--kernel", help="a kernel that serves wherever it can")] = "",
    model: Gguf = "", text: Text = "", verbose: Verbose = False, seed: Seed = 0,
    device: o.DeviceKind = None, as_json: o.Json = False,
) -> None:
    """A real model through lz against the same weights in transformers' own Llama."""
    if check not in PEER_CHECKS:
        other = "; lz verify --peer llama.cpp compares with that" if check == "llama.cpp" else ""
        raise ConfigError(f"lz verify peer takes one of {', '.join(PEER_CHECKS)}, got "
                          f"{check!r}{other}")
    if model == "none":
        raise ConfigError("lz verify peer wants a real model: a GGUF file, or SmolLM2 by default; "
                          "got none")
    lane = _lane("lz verify peer", quick=quick, full=full, stress=stress)
    _check_gguf(model)
    from ..commands.prove.ladder import ladder
    raise typer.Exit(ladder(CHECKS[check], effort=lane, backend=backend, kernel=kernel,
                            dtypes=tuple(dtype or ()), device=device, seed=seed, model=model,
                            text=text, against="transformers", verbose=verbose, as_json=as_json))


@declare("", "lz verify definitions rmsnorm_h128 --dir flashinfer-trace", to=verify,
         short="Definitions in the FlashInfer-Trace schema.")
def definitions(
    names: Annotated[list[str] | None, typer.Argument(
        metavar="NAME", help="these definitions; default: every one below --dir")] = None,
    folder: Annotated[Path, typer.Option(
        "--dir", help="where definitions are looked for: a dataset in the FlashInfer-Trace schema, "
                      "or one file",
    )] = Path(), op_type: Annotated[str | None, typer.Option(
        "--op-type", metavar="T", help="only those of this type")] = None,
    size: Annotated[list[str] | None, typer.Option(
        "--size", autocompletion=o.complete(SIZES),
        help=f"{', '.join(SIZES)}; may be repeated")] = None,
    workloads: Annotated[int, typer.Option(
        min=0, help="also this many of the dataset's own workloads")] = 0,
    trust: Annotated[list[Path] | None, typer.Option(
        "--trust", metavar="DIR", help="run the references below DIR, which is code; may be "
                                       "repeated")] = None,
    timeout: Annotated[float, typer.Option(
        min=0.0, help="seconds that a reference may take")] = 60.0,
    tolerance: Annotated[float | None, typer.Option(
        min=0.0, help="atol and rtol, instead of those of the dtype")] = None,
    as_is: Annotated[bool, typer.Option(
        "--as-is", help="never make a large definition smaller")] = False,
    seed: Seed = 0, device: o.DeviceKind = None, traces: Annotated[Path | None, typer.Option(
        metavar="DIR", help="write the results as Traces")] = None,
    write_tests: Annotated[Path | None, typer.Option(
        "--write-tests", metavar="DIR", help="write a pytest file for each definition "
                                             "instead")] = None,
    force: Annotated[bool, typer.Option(
        "--force", help="with --write-tests: also where there is one")] = False,
    mutate: Annotated[int | None, typer.Option(
        "--mutate", metavar="N", min=0, help="change each reference in N ways, 0: in all, and tell "
                                             "which changes are not noticed")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE", help="with --mutate: write the result there too")] = None,
    as_json: o.Json = False,
) -> None:
    """Definitions of others, in the FlashInfer-Trace schema, against lz."""
    o.check_out("--out", out)
    unknown = [s for s in size or () if s not in SIZES]
    if unknown:
        raise ConfigError(f"--size must be one of {', '.join(SIZES)}, got {unknown[0]!r}")
    from ..commands.prove.definitions import verify_definitions as run
    raise typer.Exit(run(names or (), folder, op_type=op_type or "", sizes=size or ("small",),
                         workloads=workloads, trust=trust or (), timeout=timeout,
                         tolerance=tolerance, as_is=as_is, seed=seed, device=device, traces=traces,
                         write_tests=write_tests, force=force, mutate=mutate, out=out,
                         as_json=as_json))


@declare("", "lz verify report false-alarms.jsonl --out proof-x86.json", to=verify,
         short="What was verified, when and on what.")
def report(
    logs: Annotated[list[Path], typer.Argument(
        metavar="LOG", help="what benchmarks/false_alarms.py wrote")],
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE", help="write the summary there too, as docs/generate.py reads "
                                      "it")] = None,
    as_json: o.Json = False,
) -> None:
    """Logged verdicts, summarised for each machine. Exit code 1 if one of them failed."""
    for path in logs:
        o.check_file("LOG", path, "benchmarks/false_alarms.py writes one")
    o.check_out("--out", out)
    from ..commands.prove.definitions import verify_report as run
    raise typer.Exit(run(logs, out, as_json))


@declare(PANEL, "lz gate --quick --out report", short="May this be released?")
def gate(
    stages: Annotated[list[str] | None, typer.Option("--stages", help=(
        f"of {', '.join(STAGES)}; separated by commas, may be repeated; default: all"))] = None,
    static: Annotated[bool, typer.Option(
        "--static", help="as --stages static; runs no kernel")] = False,
    models: Annotated[bool, typer.Option("--models", help="as --stages models")] = False,
    quick: Annotated[bool, typer.Option(
        "--quick", help="a minute or two: fewer cases, a short soak")] = False,
    full: Annotated[bool, typer.Option(
        "--full", help="every case of every contract, a soak of two hours")] = False,
    target: Annotated[str, typer.Option("--target", help=(
        "the hardware class: cpu-x86, cpu-arm, hopper, ...; default: this machine's accelerator, "
        "else its CPU"))] = "",
    device: o.DeviceKind = None, family: Annotated[list[str] | None, typer.Option(
        "--family", help=f"families of models: {', '.join(FAMILIES)}; may be repeated")] = None,
    backend: Annotated[str, typer.Option(
        "--backend", help="for models: a kernel or library that serves wherever it can")] = "",
    baseline: Annotated[Path | None, typer.Option("--baseline", metavar="FILE", help=(
        "performance baseline; default: benchmarks/baselines/TARGET.json"))] = None,
    waivers: Annotated[Path | None, typer.Option("--waivers", metavar="FILE", help=(
        "thresholds that may be passed, why and until when; default: "
        "benchmarks/baselines/waivers.yaml"))] = None,
    soak_minutes: Annotated[float, typer.Option(
        "--soak-minutes", min=0.0, help="default: 10")] = 0.0,
    write_baseline: Annotated[bool, typer.Option(
        "--write-baseline", help="time the calls now, write the baseline and end")] = False,
    write_schemas: Annotated[bool, typer.Option(
        "--write-schemas", help="record the structure of every kind of file and end")] = False,
    combined: Annotated[list[Path] | None, typer.Option("--combine", metavar="GATE.JSON", help=(
        "judge the reports of several targets instead; may be repeated"))] = None,
    require: Annotated[list[str] | None, typer.Option("--require", metavar="TARGET", help=(
        "with --combine: a target that must have passed every stage; may be repeated"))] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="DIR", help="write gate.json, gate.html and gate.txt there too")] = None,
    as_json: o.Json = False,
) -> None:
    """May this be released? Exit code 1 if not; each finding says what is wrong and what to do."""
    if quick and full:
        raise ConfigError("lz gate takes one of --quick and --full, got both")
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out: wanted a folder, {out} is a file")
    lane = "quick" if quick else "full" if full else "usual"
    words = [*(stages or ()), *(["static"] if static else ()), *(["models"] if models else ())]
    from ..commands.prove import gate as commands
    if combined or require:
        raise typer.Exit(commands.combine_reports(combined or (), require or (), as_json))
    raise typer.Exit(commands.gate(
        words, lane, target=target, device=device or "", families=tuple(family or ()),
        backend=backend, baseline=baseline, waivers=waivers, soak_seconds=soak_minutes * 60,
        write_baseline=write_baseline, write_schemas=write_schemas, out=out, as_json=as_json))


@declare(PANEL, "lz soak --minutes 20 --out soak.json",
         short="Hours of calls under faults: nothing wrong, nothing grows.")
def soak(
    ops: Annotated[list[str] | None, typer.Argument(
        metavar="OP", autocompletion=o.complete(o.OPS),
        help="only calls of these operations")] = None,
    hours: Annotated[float, typer.Option("--hours", min=0.0, help="how long")] = 0.0,
    minutes: Annotated[float, typer.Option(
        "--minutes", min=0.0, help="how long; added to --hours")] = 0.0,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="FILE", help=(
        "add a part to this report; without --hours or --minutes what it was to run "
        "longer"))] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help=(
        "the report, written after every sample; default: that of --resume, else "
        "soak.json"))] = None,
    threads: Annotated[int, typer.Option(
        "--threads", min=1, max=256, help="threads that call at once")] = 4,
    faults: Annotated[float, typer.Option("--faults", min=0.0, max=0.5, help=(
        "share of the calls of planted kernels that fail"))] = 0.02,
    forks: Annotated[bool, typer.Option(
        "--forks/--no-forks", help="fork now and then; never once CUDA is in use")] = True,
    device: o.DeviceKind = None, as_json: o.Json = False,
) -> None:
    """Calls of every operation under faults, policy changes, forks and memory pressure, for hours.

    Exit code 1 if an answer was wrong, a call raised, or memory or latency grow; 130 if interrupted
    and good so far.
    """
    if resume is None and not hours + minutes:
        raise ConfigError("lz soak wants --hours or --minutes, or --resume FILE; got none of them")
    o.check_file("--resume", resume, "lz soak --out writes one")
    o.check_out("--out", out)
    from ..commands.prove.soak import command as run
    raise typer.Exit(run(hours * 3600 + minutes * 60, resume, out, threads=threads, faults=faults,
                         forks=forks, ops=tuple(ops or ()), device=device, as_json=as_json))


def _lane(command: str, **chosen: bool) -> str:
    lanes = [name for name, on in chosen.items() if on]
    if len(lanes) > 1:
        raise ConfigError(f"{command} takes one of {', '.join(f'--{n}' for n in chosen)}, got "
                          f"{' and '.join(lanes)}")
    return lanes[0] if lanes else "quick"


def _check_gguf(model: str) -> None:
    if model not in ("", "none"):
        o.check_file("--model", Path(model), "give a GGUF file, or none for random weights")
