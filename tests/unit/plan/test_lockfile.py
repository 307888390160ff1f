"""Lockfiles and comparisons: what is pinned is checked, and two machines' choices are told apart
exactly.
"""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from helpers import Fake, register, run_lz
from hypothesis import given, settings
from hypothesis import strategies as st
from test_table import norm, prefer

import layerzero as lz
from layerzero.files.calls import write_calls
from layerzero.machine.builds import build_of
from layerzero.plan.lockfile import (
    SCHEMA,
    Lockfile,
    Pin,
    compare,
    intersection,
    load_choices,
    load_lockfile,
    subtraction,
)
from layerzero.plan.table import Choice, Row, Span, Table
from layerzero.spec.errors import DataError
from layerzero.spec.reason import Code
from layerzero.spec.rules import at_most
from layerzero.world import snapshot as worlds
from layerzero.world.registry import certificates


@pytest.fixture
def table(world) -> Table:
    return lz.tables.solve([norm(1), norm(100)], device="cpu")


@pytest.fixture
def lock(table) -> Lockfile:
    return Lockfile.of(table, worlds.current())


def row(kernel: str = "a.a", op: str = "rms_norm", when: tuple = (("dtype", "float32"),),
        **sizes: Span) -> Row:
    return Row(op, when, tuple(sizes.items()), (Choice(kernel),))


def pin_of(kernel: str) -> Pin:
    return Pin.of(worlds.current().catalog.by_id[kernel], worlds.current().device("cpu"))


# the file

def test_a_lockfile_pins_the_first_kernel_of_each_row(table, tmp_path):
    path = tmp_path / "layerzero.lock"
    lock = lz.tables.write_lockfile(table, path)
    assert [r.choices for r in lock.rows] == [(r.choices[0],) for r in table.rows]
    assert {p.kernel for p in lock.pins} == {r.kernel for r in table.rows}
    assert load_lockfile(path) == lock and json.loads(path.read_text())["schema"] == SCHEMA
    table.save(tmp_path / "table.json")
    assert lz.tables.write_lockfile(tmp_path / "table.json", path) == lock
    assert lz.tables.check_lockfile(path) == ()


def test_nothing_of_the_machine_is_in_it_but_a_name(lock, table):
    text = json.dumps(lock.to_json())
    assert table.stamp.device.signature not in text and table.stamp.policy not in text
    assert lock.made_on == table.stamp.device.name


def test_a_pin_says_package_version_and_build(lock):
    pins = {p.kernel: p for p in lock.pins}
    torch_pin = pin_of("torch.rms_norm")
    assert torch_pin.package == "torch" and torch_pin.build
    assert torch_pin.version in (torch.__version__, metadata.version("torch"))
    assert all(p.build and p.version for p in pins.values())
    certified = replace(lock, pins=tuple(replace(p, certificate="c-1") for p in lock.pins))
    assert Lockfile.from_json(certified.to_json()) == certified


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda d: d.update(schema="layerzero.lock/7"),
     "wanted schema layerzero.lock/1, got 'layerzero.lock/7'"),
    (lambda d: d.pop("made_on"), "missing: made_on"),
    (lambda d: d.update(kernels={}), "an entry for each kernel"),
    (lambda d: next(iter(d["kernels"].values())).update(build=3), r"build: wanted text, got 3"),
    (lambda d: next(iter(d["kernels"].values())).pop("version"), "missing: version"),
    (lambda d: d["rows"][0].pop("sizes"), r"rows\[0\]: missing: sizes"),
    (lambda d: d.update(made_on="elsewhere"), "hash: wanted"),
])
def test_a_file_that_does_not_fit_is_refused_with_the_place(lock, spoil, message):
    data = copy.deepcopy(lock.to_json())
    spoil(data)
    with pytest.raises(DataError, match=message):
        Lockfile.from_json(data)


# checking

def test_another_version_or_build_is_a_violation(lock):
    changed = replace(lock, pins=tuple(replace(p, version="0.0", build="source#0")
                                       for p in lock.pins))
    violations = lz.tables.check_lockfile(changed)
    assert ({v.kernel for v in violations} == {p.kernel for p in lock.pins}
            and len(violations) == 2 * len(lock.pins))
    assert all(v.reason.code is Code.PLAN_DRIFT for v in violations)
    assert (any("version 0.0" in str(v) for v in violations)
            and any("build source#0" in str(v) for v in violations))


def test_a_kernel_that_is_not_here_or_not_installed_is_a_violation(world):
    table = lz.tables.solve([norm(4)], device="cpu")
    lock = Lockfile.of(table, worlds.current())
    gone = replace(lock, pins=(replace(lock.pins[0], kernel="gone.kernel"),), rows=(replace(
        lock.rows[0], choices=(Choice("gone.kernel"),)),))
    assert [v.kernel for v in lz.tables.check_lockfile(gone)] == ["gone.kernel"]
    register(Fake("fake.absent", package="no_such_package_anywhere"))
    row = replace(lock.rows[0], choices=(Choice("fake.absent"),))
    absent = replace(lock, pins=(pin_of("fake.absent"),), rows=(row,))
    assert [v.reason.code for v in lz.tables.check_lockfile(absent)] == [Code.NOT_INSTALLED]


def test_a_kernel_that_may_not_serve_the_range_is_a_violation(world):
    wide = Fake("fake.wide")
    register(wide)
    lock = Lockfile.of(lz.tables.solve([norm(1), norm(100)], device="cpu"), worlds.current())
    assert lz.tables.check_lockfile(lock) == ()
    lz.unregister("fake.wide")
    register(Fake("fake.wide", requires=(at_most("rows", 50),)))
    violations = [v for v in lz.tables.check_lockfile(lock) if v.row]
    assert (len(violations) == 1 and "rows <= 50" in str(violations[0])
            and "rows=1-128" in violations[0].row)


def test_what_the_policy_forbids_is_a_violation(lock):
    lz.configure(rules=(lz.PolicyRule.of("deny", lock.rows[0].kernel),))
    assert {v.reason.code for v in lz.tables.check_lockfile(lock)} == {Code.DENIED_BY_POLICY}


@pytest.mark.skipif(torch.xpu.is_available(),
                    reason="this machine has the device that is to be absent")
def test_a_device_that_is_not_here_is_a_violation_not_an_error(lock):
    when = tuple((n, "xpu" if n == "device" else v) for n, v in lock.rows[0].when)
    elsewhere = replace(lock, rows=tuple(replace(r, when=when) for r in lock.rows))
    assert {v.reason.code for v in lz.tables.check_lockfile(elsewhere)} == {Code.PLATFORM_MISMATCH}
    with pytest.raises(DataError, match="xpu"):
        lz.tables.use_lockfile(elsewhere)


def test_a_pinned_certificate_must_be_there(lock):
    pinned = replace(lock, pins=tuple(replace(p, certificate="c-1") for p in lock.pins))
    assert {v.reason.code for v in lz.tables.check_lockfile(pinned)} == {Code.UNCERTIFIED}
    worlds.publish(lambda w: w.replace(certified=frozenset(p.kernel for p in lock.pins)), "proven")
    assert lz.tables.check_lockfile(pinned) == ()


def test_a_certificate_is_pinned_by_what_it_proves(table, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    world, device = worlds.current(), worlds.current().device("cpu")
    assert not any(p.certificate for p in Lockfile.of(table, world).pins)
    for name in {row.kernel for row in table.rows}:
        kernel = world.catalog.by_id[name]
        proof = certificates.Certificate(name, "rms_norm", build_of(kernel),
                                         certificates.contract_of(kernel.op), device.signature,
                                         device.name, 9, 0, ("float32",), "grid-1")
        certificates.write(proof, device)
    lock = Lockfile.of(table, world)
    assert all(p.certificate for p in lock.pins) and lz.tables.check_lockfile(lock) == ()
    other = replace(lock, pins=tuple(replace(p, certificate="another") for p in lock.pins))
    assert {v.reason.code for v in lz.tables.check_lockfile(other)} == {Code.PLAN_DRIFT}


def test_a_lockfile_that_holds_can_be_put_in_force(table):
    lock = Lockfile.of(prefer(table, "reference.rms_norm"), worlds.current())
    lz.tables.use_lockfile(lock)
    x, w = torch.randn(30, 64), torch.randn(64)
    assert lz.which("rms_norm", x, w) == "reference.rms_norm"
    lz.tables.use_table(None)
    broken = replace(lock, pins=tuple(replace(p, build="source#0") for p in lock.pins))
    with pytest.raises(DataError, match="does not hold to it") as refused:
        lz.tables.use_lockfile(broken)
    assert refused.value.codes == (Code.PLAN_DRIFT,) and lz.tables.table_in_force() is None


# comparing

def test_the_same_differs_and_only_in_one():
    a = Lockfile("a", (), (row("k.one", rows=Span(1, 64)), row("k.two", rows=Span(65, 128)),
                           row("k.x", op="linear")))
    b = Lockfile("b", (), (row("k.one", rows=Span(1, 32)), row("k.three", rows=Span(33, 100)),
                           row("k.y", op="moe")))
    comparison = {(d.verdict, d.calls, d.a, d.b) for d in compare(a, b)}
    assert comparison == {
        ("same", "rms_norm float32 rows=1-32", "k.one", "k.one"),
        ("different", "rms_norm float32 rows=33-64", "k.one", "k.three"),
        ("different", "rms_norm float32 rows=65-100", "k.two", "k.three"),
        ("only in A", "rms_norm float32 rows=101-128", "k.two", ""),
        ("only in A", "linear float32", "k.x", ""), ("only in B", "moe float32", "", "k.y")}
    assert all(d.verdict == "same" for d in compare(a, a))


spans = st.builds(lambda ends, m, o: Span(min(ends), max(ends), m, o if not m else ()),
                  st.tuples(st.integers(0, 12), st.integers(0, 12)),
                  st.sampled_from([(), (2,), (3,), (2, 3)]), st.sampled_from([(), (2,), (3,)]))
boxes = st.dictionaries(st.sampled_from(["rows", "hidden"]), spans,
                        min_size=1).map(lambda sizes: row(**sizes))


@given(boxes, boxes)
@settings(max_examples=150, deadline=None)
def test_cutting_ranges_loses_no_call_and_counts_none_twice(a, b):
    both, rest = intersection(a, b), list(subtraction(a, b))
    for rows, hidden in itertools.product(range(-1, 14), repeat=2):
        facts = {"dtype": "float32", "rows": rows, "hidden": hidden}
        in_a, in_b = a.covers(facts), b.covers(facts)
        assert (both is not None and both.covers(facts)) == (in_a and in_b)
        assert [r.covers(facts) for r in rest].count(True) == (in_a and not in_b)


def test_tables_and_lockfiles_are_told_apart(table, lock, tmp_path):
    table.save(tmp_path / "a.json")
    lz.tables.write_lockfile(table, tmp_path / "b.lock")
    assert load_choices(tmp_path / "a.json") == table and load_choices(tmp_path / "b.lock") == lock
    (tmp_path / "c.json").write_text('{"schema": "layerzero.capabilities/1"}')
    with pytest.raises(DataError, match="wanted schema"):
        load_choices(tmp_path / "c.json")


# the command

@pytest.fixture
def run(capsys, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_calls(tmp_path / "calls.jsonl", [norm(1), norm(100)])

    return lambda *words: run_lz(capsys, *words)


def test_solve_lock_check_and_diff(run, tmp_path):
    code, out, _ = run("solve", "--calls", "calls.jsonl", "--device", "cpu", "--python",
                       "choices.py")
    table = Table.load("dispatch_table.json")
    assert (code == 0 and table.id in out
            and "def rms_norm(facts):" in (tmp_path / "choices.py").read_text())
    code, out, _ = run("lock", "--table", "dispatch_table.json")
    assert code == 0 and table.rows[0].kernel in out
    assert run("lock", "--check")[0] == 0
    assert run("diff", "dispatch_table.json", "layerzero.lock")[0] == 0
    lock = load_lockfile("layerzero.lock")
    (tmp_path / "layerzero.lock").write_text(json.dumps(replace(
        lock, pins=tuple(replace(p, version="0.0") for p in lock.pins)).to_json()))
    code, out, _ = run("lock", "--check", "--json")
    assert (code == 1 and not json.loads(out)["ok"]
            and "version 0.0" in json.loads(out)["violations"][0]["text"])
    prefer(table, "reference.rms_norm").save("other.json")
    code, out, _ = run("diff", "dispatch_table.json", "other.json", "--json")
    (only,) = json.loads(out)["differences"]
    assert code == 1 and (only["verdict"], only["b"]) == ("different", "reference.rms_norm")
    code, out, _ = run("diff", "dispatch_table.json", "other.json")
    assert code == 1 and "different" in out and "rows=1-128" in out


def test_solve_and_dry_run_take_calls_an_op_or_a_program(run, tmp_path):
    (tmp_path / "made.py").write_text(
        "import torch, layerzero as lz\n"
        "def block(x):\n    return lz.rms_norm(lz.rms_norm(x))\n"
        "def make():\n    return block, torch.ones(3, 32)\n")
    code, out, _ = run("dry-run", "--program", "made:make", "--json")
    (listed,) = json.loads(out)["calls"]
    assert code == 0 and listed["op"] == "rms_norm" and listed["count"] == 2 and listed["kernel"]
    code, out, _ = run("solve", "--program", "made:make", "--json", "--device", "cpu")
    assert code == 0 and json.loads(out)["rows"][0]["sizes"]["rows"] == [3, 3]
    code, out, _ = run("dry-run", "--calls", "calls.jsonl", "--device", "cpu")
    assert code == 0 and out.count("rms_norm") >= 2
    assert run("solve", "rms_norm", "--device", "cpu", "--dtype", "float32")[0] == 0
    assert len(Table.load("dispatch_table.json").rows) > 5


@pytest.mark.parametrize(("words", "message"), [
    (("solve",), "lz solve takes one of OP, --calls, --model, --program, got none"),
    (("solve", "rms_norm", "--calls", "a"), "got OP and --calls"),
    (("solve", "--calls", "absent.jsonl"), "there is no such file"),
    (("solve", "rms_nrm"), "did you mean 'rms_norm'"),
    (("dry-run", "--program", "nowhere"), "module:function"),
    (("dry-run", "--program", "nowhere_at_all:f"), "No module named"),
    (("dry-run", "--program", "os:getcwd"), r"must give \(model, \*arguments\)"),
    (("lock", "--check", "--file", "absent.lock"), "there is no such file"),
    (("diff", "absent.json", "absent.json"), "is no file, and no node, device or place"),
])
def test_a_wrong_question_is_one_message(run, words, message):
    import re
    code, _, err = run(*words)
    assert code == 2 and re.search(message, err) and "Traceback" not in err
