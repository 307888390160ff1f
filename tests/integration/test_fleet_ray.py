"""Tuning on a real Ray cluster of several nodes on this machine: `make test-fleet`.

A node's CPUs are the threads it is tuned with, so a node with one CPU and a node with two are two
models of device; nodes with as many are machines of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs Ray: make test-fleet installs it and runs this")
pytest.importorskip("sqlalchemy", reason="needs the extra layerzero[fleet]: make test-fleet")

import ray
from helpers import world
from ray import cloudpickle
from ray.cluster_utils import Cluster

import layerzero as lz
from layerzero.plan.places import compare_places, places
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.errors import ConfigError
from layerzero.tuning import fleet
from layerzero.world import measurements

__all__ = ["world"]
pytestmark = [pytest.mark.integration, pytest.mark.distributed]
QUICK = {"rounds": 3, "compile": False}


def calls(*rows: int) -> list[Call]:
    return [Call("rms_norm", {"x": TensorSpec((n, 64), "float32")}) for n in rows]


KINDS = calls(2, 16, 128, 1024, 8192)


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs: it only schedules."""
    os.environ.pop("OMP_NUM_THREADS", None)            # it would count on every node
    small = {"object_store_memory": 80 << 20}
    ray_cluster = Cluster(initialize_head=True,
                          head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
    try:
        yield ray_cluster
    finally:
        if ray.is_initialized():
            ray.shutdown()
        ray_cluster.shutdown()


@pytest.fixture
def nodes(cluster, request):
    """Adds nodes by name; they leave with the test."""
    added = {}

    def add(**cpus: int):
        for name, count in cpus.items():
            added[name] = cluster.add_node(num_cpus=count, node_name=name,
                                           object_store_memory=80 << 20)
        cluster.wait_for_nodes()
        return added

    yield add
    for node in added.values():
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)
    if ray.is_initialized():
        ray.shutdown()


def stored():
    with measurements.open_store(read_only=True) as store:
        return list(store.rows()), store.environments()


def test_machines_of_one_model_share_the_work_and_others_do_their_own(cluster, nodes, world,
                                                                      tmp_path):
    nodes(a=1, b=1, c=2)
    lz.configure(perfdb=str(tmp_path / "p.sqlite"))
    seen = []
    report = fleet.tune_fleet(KINDS, address=cluster.address, progress=lambda *p: seen.append(p),
                              **QUICK)
    machines = {m.node: m for m in report.machines}
    assert not report.left and not report.skipped and not any(m.problem for m in report.machines)
    assert machines["a"].place == machines["b"].place != machines["c"].place
    assert machines["a"].place.endswith("-1t") and machines["c"].place.endswith("-2t")
    assert machines["a"].tuned + machines["b"].tuned == len(KINDS) == machines["c"].tuned
    assert min(m.tuned for m in report.machines) > 0
    assert seen[-1] == (2 * len(KINDS), 2 * len(KINDS), "")
    assert any(" on a" in what for _, _, what in seen) and any(" on c" in w for _, _, w in seen)

    rows, environments = stored()
    assert {(m.place, m.bucket) for m in rows} == {
        (m.place, t.bucket) for m in report.machines for t in report.measurements}
    assert {environments[m.environment]["node"] for m in rows} == {"a", "b", "c"}
    known = {p.place: p for p in places(rows, environments)}
    assert known[machines["a"].place].machines == ("a", "b")

    again = fleet.tune_fleet(KINDS, address=cluster.address, **QUICK)
    assert not again.tuned and len(again.already) == 2 * len(KINDS)

    environment = {**os.environ, "LAYERZERO_PERFDB": str(tmp_path / "p.sqlite")}

    def run(*words: str) -> tuple[int, dict]:
        done = subprocess.run([sys.executable, "-m", "layerzero", *words, "--json"],
                              capture_output=True, text=True, env=environment, timeout=240)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode, json.loads(done.stdout)

    _, listed = run("perf", "places")
    assert {tuple(p["machines"]) for p in listed["places"]} == {("a", "b"), ("c",)}
    code, same = run("diff", "a", "b", "--all")        # one place: nothing can differ
    assert code == 0 and len(same["differences"]) == len(KINDS)
    with measurements.open_store(read_only=True) as store:
        across = compare_places(store, "a", "c")
    assert len(across) == len(KINDS) and all(d.a and d.b for d in across)
    code, other = run("diff", "a", "c", "--all")
    assert [d["a"] for d in other["differences"]] == [d.a for d in across]
    assert code == int(any(d.a != d.b for d in across))


def test_a_node_lost_midway_loses_nothing_and_one_that_joins_helps(cluster, nodes, world, url):
    alive = nodes(kept=1, lost=1)
    lz.configure(perfdb=url)

    def progress(done: int, total: int, what: str) -> None:
        if what.endswith(" on lost") and alive["lost"] in cluster.list_all_nodes():
            cluster.remove_node(alive["lost"])         # its kind of call has just been handed out
            nodes(joined=1)

    report = fleet.tune_fleet(KINDS, address=cluster.address, progress=progress, **QUICK)
    machines = {m.node: m for m in report.machines}
    assert not report.left and not report.skipped and not report.stopped
    assert "lost" in machines["lost"].problem and machines["lost"].tuned == 0
    assert machines["kept"].tuned + machines["joined"].tuned == len(KINDS)
    assert machines["joined"].place == machines["kept"].place
    rows, environments = stored()                      # of PostgreSQL
    assert {m.bucket for m in rows} == {m.bucket for m in report.measurements}
    assert len({m.bucket for m in rows}) == len(KINDS)
    assert {e["node"] for e in environments.values()} <= {"kept", "joined"}


class Dying(fleet.NodeTuner):
    def tune(self, task, seconds, rates):
        if task.call.arguments["x"].shape[0] == 128:
            os._exit(3)
        return super().tune(task, seconds, rates)


def test_a_call_that_kills_its_process_is_given_up_and_the_others_are_tuned(
        cluster, nodes, world, tmp_path, monkeypatch):
    nodes(a=1, b=1)
    lz.configure(perfdb=str(tmp_path / "p.sqlite"))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(fleet, "NodeTuner", Dying)
    report = fleet.tune_fleet(calls(2, 16, 128, 1024), address=cluster.address, **QUICK)
    (skipped,) = report.skipped
    assert skipped.call.arguments["x"].shape == (128, 64)
    assert f"{fleet.ATTEMPTS} workers failed" in skipped.reason
    assert len(report.tuned) == 3 and not report.left


def test_time_runs_out_and_the_rest_is_left_for_the_next_run(cluster, nodes, world, tmp_path):
    nodes(a=1)
    lz.configure(perfdb=str(tmp_path / "p.sqlite"))

    def progress(done: int, total: int, what: str) -> None:
        if done == 2 and " on " in what:
            raise KeyboardInterrupt

    report = fleet.tune_fleet(KINDS, address=cluster.address, progress=progress, **QUICK)
    assert report.stopped == "interrupted" and len(report.tuned) == 2 and len(report.left) == 3
    late = fleet.tune_fleet(KINDS, address=cluster.address, seconds=0.0, **QUICK)
    assert late.stopped == "out of time" and not late.tuned
    rest = fleet.tune_fleet(KINDS, address=cluster.address, **QUICK)
    assert len(rest.already) == 2 and len(rest.tuned) == 3


def test_a_device_that_no_node_has_and_a_cluster_that_is_not_there(cluster, nodes, world, tmp_path):
    nodes(a=1)
    lz.configure(perfdb=str(tmp_path / "p.sqlite"))
    with pytest.raises(ConfigError, match="none has a GPU"):
        fleet.tune_fleet(KINDS, address=cluster.address, device="cuda")
    with pytest.raises(ConfigError, match="ray start --head"):
        fleet.tune_fleet(KINDS, address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="perfdb is 'off'"):
        lz.configure(perfdb="off")
        fleet.tune_fleet(KINDS, address=cluster.address)


def test_the_command_tunes_the_cluster_and_shows_its_nodes(cluster, nodes, tmp_path):
    nodes(a=1, c=2)
    environment = {**os.environ, "LAYERZERO_PERFDB": str(tmp_path / "p.sqlite")}
    command = [sys.executable, "-m", "layerzero", "tune", "rms_norm", "x=16x64", "--dtype", "fp32",
               "--rounds", "3", "--no-compile", "--ray", cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "2 machines of 2 models" in done.stdout and "2 kinds of call tuned" in done.stdout
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment,
                           timeout=240)
    report = json.loads(again.stdout)
    assert {m["node"] for m in report["machines"]} == {"a", "c"} and len(report["already"]) == 2
