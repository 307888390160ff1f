"""`lz hub`: list the cached repositories, explain if they load here, pin and verify them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....integrations.hub import Hub, HubExplanation
from ....integrations.hub.sources import cached
from ... import show


def list_cached(cache: Path | None, as_json: bool) -> int:
    hub = Hub(cache=cache, allow=("*",))
    rows = [(name, version, commit, hub.explain(name, version=int(version)))
            for name, version, commit in cached(hub.cache_folder)]
    if as_json:
        kernels = [{"commit": commit, **explanation.to_json()}
                   for _, _, commit, explanation in rows]
        show.as_json({"cache": str(hub.cache_folder), "kernels": kernels})
        return 0
    show.heading(f"{hub.cache_folder}: {len(rows)} versions")
    show.table(("name", "version", "commit", "build"),
               [(n, v, c[:12], e.variant if e.ok else str(e.errors[0]).splitlines()[0])
                for n, v, c, e in rows])
    return 0


def explain(name: str, folder: list[str] | None, allow: list[str] | None, lock: Path | None,
            cache: Path | None, portable: bool, signed: bool, as_json: bool) -> int:
    explanation = _explain(_hub(folder, allow, lock, cache, portable, signed), name)
    show.as_json(explanation.to_json()) if as_json else show.text(str(explanation))
    return 0 if explanation.ok else 1


def load(name: str, folder: list[str] | None, allow: list[str] | None, lock: Path | None,
         cache: Path | None, portable: bool, signed: bool, as_json: bool) -> int:
    loaded = _hub(folder, allow, lock, cache, portable, signed).load(name.partition("@")[0],
                                                                     **_version(name))
    data = {"name": loaded.name, "version": loaded.version, "variant": loaded.variant,
            "sha256": loaded.sha256,
            "namespace": loaded.id}
    if as_json:
        show.as_json({**data, "offers": list(loaded.offers)})
    else:
        show.table(("field", "value"), [*data.items(), ("offers", ", ".join(loaded.offers))])
    return 0


def lock(names: Sequence[str], out: Path, folder: list[str] | None, cache: Path | None,
         as_json: bool) -> int:
    hub = _hub(folder, [n.partition("@")[0] for n in names], None, cache)
    pins = hub.lockfile(*names)
    pins.write(out)
    builds = sum(len(pin.variants or ()) for pin in pins.pins.values())
    if as_json:
        show.as_json({"path": str(out), "pins": list(pins.pins), "builds": builds})
    else:
        show.text(f"{out}: {', '.join(pins.pins)}, {builds} builds")
    return 0


def verify(lock: Path, folder: list[str] | None, cache: Path | None, as_json: bool) -> int:
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
    return 0 if ok else 1


def _hub(folder: list[str] | None, allow: list[str] | None, lock: Path | None, cache: Path | None,
         portable: bool = False, signed: bool = False) -> Hub:
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
