"""lz hub: the same answers, printed."""

from __future__ import annotations

import json

import pytest
from hub_repositories import UNIVERSAL, build, in_cache
from typer.testing import CliRunner

from layerzero.cli.app import app
from layerzero.integrations.hub import NotAllowed
from layerzero.spec.errors import ConfigError


def lz_hub(*words: object, ok: int | None = 0) -> str:
    done = CliRunner().invoke(app, ["hub", *map(str, words)])
    if ok is None:
        assert done.exception is not None
        raise done.exception
    assert done.exit_code == ok, done.output
    return done.output


def test_from_the_cache_to_a_lockfile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for version in (1, 2):
        build(tmp_path / "r", version=version, id=f"_cli_{version}")
        in_cache(tmp_path / "cache", tmp_path / "r", "me/norm", version)
    cache = ("--cache", tmp_path / "cache")
    rows = json.loads(lz_hub("list", *cache, "--json"))["kernels"]
    assert [(r["name"], r["version"], r["variant"]) for r in rows] == [("me/norm", v, UNIVERSAL)
                                                                       for v in "12"]
    assert "me/norm" in lz_hub("list", *cache)
    assert "me/norm@2, 1 builds" in lz_hub("lock", "me/norm@2", *cache)
    assert json.loads(lz_hub("verify", *cache, "--json"))["ok"]
    assert json.loads(lz_hub("load", "me/norm", *cache, "--lock", "hub.lock",
                             "--json"))["namespace"] == "_cli_2"
    assert "does not pin me/norm version 1" in lz_hub("explain", "me/norm@1", *cache, "--lock",
                                                      "hub.lock", ok=1)
    changed = next(p for p in (tmp_path / "cache").rglob("__init__.py")
                   if "VERSION = 2" in p.read_text())
    changed.resolve().write_text("x = 1")
    assert "__init__.py: wanted sha256" in lz_hub("verify", *cache, ok=1)


def test_a_folder(tmp_path):
    build(tmp_path / "r", id="_cli_folder")
    folder = ("--folder", f"me/norm={tmp_path / 'r'}")
    output = lz_hub("explain", "me/norm", *folder, ok=1)
    assert ("!!  allowed: me/norm is not allowed" in output
            and f"->  {UNIVERSAL}: accepted" in output)
    with pytest.raises(NotAllowed):
        lz_hub("load", "me/norm", *folder, ok=None)
    assert "rms_norm" in lz_hub("load", "me/norm@1", *folder, "--allow", "me/*")
    with pytest.raises(ConfigError, match="wanted NAME=PATH"):
        lz_hub("explain", "me/norm", "--folder", "x", ok=None)
