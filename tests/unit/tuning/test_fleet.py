"""Tuning on a fleet, as far as it goes without Ray: what a node does, and the places of a store."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.cli.commands.plan.tables import diff
from layerzero.perf.record import Measurement, Rates
from layerzero.perf.store import SqliteStore
from layerzero.plan.places import compare_places, find_place, places
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.errors import ConfigError
from layerzero.tuning import fleet
from layerzero.world import measurements

CALLS = [Call("rms_norm", {"x": TensorSpec((n, 64), "float32")}) for n in (2, 256)]
OPTIONS = fleet.Options(device="cpu", rounds=3, compile=False)


@pytest.mark.usefixtures("world")
def test_a_node_times_one_kind_at_a_time_and_keeps_nothing():
    node = fleet.NodeTuner()
    name, place, digest = node.start("gpu-7", fleet.release(), OPTIONS, torch.get_num_threads(), 8)
    assert name == lz.doctor().devices[0].name and len(digest) == 16
    assert place.endswith(f"-{torch.get_num_threads()}t")
    tasks, already, skipped = node.survey(CALLS, [], {place: Rates(1e5, 1e4)})
    assert [t.call.arguments["x"].shape for t in tasks] == [(256, 64), (2, 64)]    # largest first
    assert not already and not skipped
    report, rows, environments, rates = node.tune(tasks[0], 20.0, {})
    assert len(report.tuned) == 1 and rows and {m.place for m in rows} == {place}
    (environment,) = environments.values()
    assert environment["node"] == "gpu-7" and {m.environment for m in rows} == set(environments)
    with pytest.raises(ConfigError, match="perfdb is 'off'"):
        measurements.store()
    # another worker of the model, which is told what is measured
    other = fleet.NodeTuner()
    other.start("gpu-8", fleet.release(), OPTIONS, torch.get_num_threads(), 8)
    tasks, already, _ = other.survey(CALLS, rows, rates)
    assert len(tasks) == len(already) == 1


@pytest.mark.usefixtures("world")
def test_a_node_with_another_release_says_so():
    with pytest.raises(ConfigError, match=r"node a has layerzero .*, the tuning process has 9\.9"):
        fleet.NodeTuner().start("a", "9.9", OPTIONS, 1, 1)


@pytest.mark.usefixtures("world")
@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_the_error_says_what_to_install(tmp_path):
    lz.configure(perfdb=str(tmp_path / "p.sqlite"))
    with pytest.raises(ConfigError, match=r"pip install 'layerzero\[ray\]'"):
        fleet.tune_fleet(CALLS)


def row(kernel: str, rows: int, place: str, us: float, environment: str = "") -> Measurement:
    return Measurement(kernel, "rms_norm", f"float32 rows={rows}", place, us, family="float32",
                       sizes=f"rows={rows}", build="v1", environment=environment)


@pytest.fixture
def store(tmp_path):
    """Two machines of one model, and one of another."""
    one, other = "aaaa-2t", "bbbb"
    with SqliteStore(tmp_path / "p.sqlite") as opened:
        opened.put([row("lib.a", 1, one, 1.0), row("lib.b", 1, one, 2.0)],
                   {"node": "n1", "machine": "x", "device": {"name": "Xeon"}})
        opened.put([row("lib.a", 8, one, 5.0), row("lib.b", 8, one, 4.0)],
                   {"node": "n2", "machine": "y", "device": {"name": "Xeon"}})
        opened.put([row("lib.a", 1, other, 3.0), row("lib.b", 1, other, 2.0)],
                   {"machine": "z", "device": {"name": "H200"}})
        yield opened


def test_machines_of_one_model_are_one_place_and_two_places_are_compared(store):
    known = places(store.rows(), store.environments())
    assert [(p.place, p.device, p.threads, p.machines, p.measurements) for p in known] == [
        ("aaaa-2t", "Xeon", 2, ("n1", "n2"), 4), ("bbbb", "H200", 0, ("z",), 2)]
    assert {find_place(name, known).place for name in ("n1", "n2", "Xeon", "aaaa")} == {"aaaa-2t"}
    comparison = compare_places(store, "n1", "H200")
    assert [(d.calls, d.a, d.b, d.verdict) for d in comparison] == [
        ("float32 rows=1", "lib.a", "lib.b", "different"),
        ("float32 rows=8", "lib.b", "", "only in A")]
    assert all(d.verdict == "same" for d in compare_places(store, "n1", "n2"))
    with pytest.raises(ConfigError, match="lz perf places lists them"):
        compare_places(store, "n1", "n9")


@pytest.mark.usefixtures("world")
def test_lz_diff_takes_nodes_where_there_are_no_such_files(store, tmp_path, capsys):
    lz.configure(perfdb=str(tmp_path / "p.sqlite"))
    assert diff(Path("n1"), Path("z"), False, False) == 1
    assert "0 ranges are the same, 2 are not" in capsys.readouterr().out
    assert diff(Path("n1"), Path("n2"), False, False) == 0
