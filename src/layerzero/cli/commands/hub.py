"""`lz hub`: list the cached repositories, explain whether they would load here, pin them, verify
the pins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...integrations.hub import Hub, HubError, HubExplanation
from ...integrations.hub.sources import cached
from .. import show
from ..options import Json

app = typer.Typer(no_args_is_help=True,
                  help="Kernels from the Kernel Hub: list, explain, load, lock, verify.")

Name = Annotated[str, typer.Argument(metavar="NAME[@VERSION]",
                                     help="such as kernels-community/activation@1")]
Names = Annotated[list[str], typer.Argument(metavar="NAME[@VERSION]...",
                                            help="as of lz hub list, or of --folder")]
Folders = Annotated[list[str] | None,
                    typer.Option("--folder", metavar="NAME=PATH", help="a local repository")]
Allow = Annotated[list[str] | None,
                  typer.Option("--allow", metavar="PATTERN", help="such as 'kernels-community/*'")]
LockFile = Annotated[Path | None,
                     typer.Option("--lock", help="a hub.lock or kernels.lock to hold to")]
Cache = Annotated[Path | None,
                  typer.Option("--cache",
                               help="default: KERNELS_CACHE, or that of huggingface_hub")]
Portable = Annotated[bool, typer.Option("--portable",
                                        help="demand manylinux_2_28 and Python's stable ABI")]
Signed = Annotated[bool, typer.Option("--signed", help="demand a valid signature")]


@app.command("list")
def list_cached(cache: Cache = None, as_json: Json = False) -> None:
    """The versions in the cache, and the build that fits this machine."""
    hub = Hub(cache=cache, allow=("*",))
    rows = [(name, version, commit, hub.explain(name, version=int(version)))
            for name, version, commit in cached(hub.cache_folder)]
    if as_json:
        kernels = [{"commit": commit, **explanation.to_json()}
                   for _, _, commit, explanation in rows]
        show.as_json({"cache": str(hub.cache_folder), "kernels": kernels})
        return
    show.heading(f"{hub.cache_folder}: {len(rows)} versions")
    show.table(("name", "version", "commit", "build"),
               [(n, v, c[:12], e.variant if e.ok else str(e.errors[0]).splitlines()[0])
                for n, v, c, e in rows])


@app.command()
def explain(name: Name, folder: Folders = None, allow: Allow = None, lock: LockFile = None,
            cache: Cache = None, portable: Portable = False, signed: Signed = False,
            as_json: Json = False) -> None:
    """Every check and every build with its verdict. Runs nothing of it.

    Exit code 1 if it would be refused.
    """
    explanation = _explain(_hub(folder, allow, lock, cache, portable, signed), name)
    show.as_json(explanation.to_json()) if as_json else show.text(str(explanation))
    raise typer.Exit(0 if explanation.ok else 1)


@app.command()
def load(name: Name, folder: Folders = None, allow: Allow = None, lock: LockFile = None,
         cache: Cache = None, portable: Portable = False, signed: Signed = False,
         as_json: Json = False) -> None:
    """Import it, and say what it offers."""
    loaded = _hub(folder, allow, lock, cache, portable, signed).load(name.partition("@")[0],
                                                                     **_version(name))
    data = {"name": loaded.name, "version": loaded.version, "variant": loaded.variant,
            "sha256": loaded.sha256,
            "namespace": loaded.id}
    if as_json:
        show.as_json({**data, "offers": list(loaded.offers)})
    else:
        show.table(("field", "value"), [*data.items(), ("offers", ", ".join(loaded.offers))])


@app.command()
def lock(names: Names,
         out: Annotated[Path, typer.Option(help="the file to write")] = Path("hub.lock"),
         folder: Folders = None, cache: Cache = None) -> None:
    """Pin what is here now: the commit, and the hash of every file of every build.

    To name it is to allow it.
    """
    hub = _hub(folder, [n.partition("@")[0] for n in names], None, cache)
    pins = hub.lockfile(*names)
    pins.write(out)
    builds = sum(len(pin.variants or ()) for pin in pins.pins.values())
    show.text(f"{out}: {', '.join(pins.pins)}, {builds} builds")


@app.command()
def verify(lock: Annotated[Path, typer.Argument(metavar="[LOCK]")] = Path("hub.lock"),
           folder: Folders = None,
           cache: Cache = None, as_json: Json = False) -> None:
    """Is everything that a lockfile pins here, and unchanged? Exit code 1 if not."""
    hub = _hub(folder, None, lock, cache)
    assert hub.locked is not None
    explanations = [_explain(hub, key) for key in hub.locked.pins]
    ok = all(e.ok for e in explanations)
    if as_json:
        show.as_json({"ok": ok, "kernels": [e.to_json() for e in explanations]})
    else:
        show.table(("", "name", "version", "found"), [
            ("ok" if e.ok else "!!", e.name, e.version, e.variant if e.ok else str(e.errors[0]))
            for e in explanations])
    raise typer.Exit(0 if ok else 1)


def _hub(folder: list[str] | None, allow: list[str] | None, lock: Path | None, cache: Path | None,
         portable: bool = False, signed: bool = False) -> Hub:
    for word in folder or ():
        if "=" not in word:
            raise HubError(f"--folder: wanted NAME=PATH, got {word!r}")
    folders = dict(word.split("=", 1) for word in folder or ())
    return Hub(folders, tuple(allow or ()), lock, cache, "required" if signed else "present",
               portable)


def _version(name: str) -> dict[str, Any]:
    """Parse the end of name@1 or name@branch."""
    text = name.partition("@")[2]
    return ({} if not text else {"version": int(text)} if text.isdigit() and len(text) < 40
            else {"revision": text})


def _explain(hub: Hub, name: str) -> HubExplanation:
    return hub.explain(name.partition("@")[0], **_version(name))
