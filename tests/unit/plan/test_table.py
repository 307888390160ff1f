"""Dispatch tables: what they answer is valid for every call they cover, and what they do not cover
is said.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import random_calls
import torch
from helpers import Fake, allow_only, events_of, path_of, qkv, register, rows, run_python
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.operate import calls as written
from layerzero.operate.inspection import dispatcher_of
from layerzero.plan import lower as lowering
from layerzero.plan.force import check_table
from layerzero.plan.proof import holds, interval, proven
from layerzero.plan.solver import facts_of, facts_of_row, union
from layerzero.plan.table import SCHEMA, Choice, Row, Span, Table
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.errors import ConfigError, DataError, InvalidCall
from layerzero.spec.event import PlanMissed, Selected
from layerzero.spec.op import DEVICE_FACTS
from layerzero.spec.reason import Code
from layerzero.spec.rules import any_of, at_least, at_most, equals, multiple_of, one_of, when
from layerzero.spec.rules.expr import parse
from layerzero.world import snapshot as worlds
from layerzero.world.tables import ActiveTable

MAKERS = random_calls.MAKERS


def norm(rows: int, hidden: int = 64, dtype: str = "float32", **more) -> Call:
    return Call("rms_norm", {"x": TensorSpec((rows, hidden), dtype),
                             "weight": TensorSpec((hidden,), dtype), **more})


def attend(seq_q: int, seq_k: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, batch: int = 1,
           **more) -> Call:
    shapes = {"query": (batch, heads, seq_q, dim), "key": (batch, kv_heads, seq_k, dim),
              "value": (batch, kv_heads, seq_k, dim)}
    return Call("attention", {**{n: TensorSpec(s, "float32") for n, s in shapes.items()}, **more})


def cpu_facts(op: str, args: tuple, kwargs: dict) -> dict:
    dispatcher = dispatcher_of(op)
    return dispatcher.facts(dispatcher.order_arguments(args, kwargs), worlds.current())


@pytest.fixture
def table(world) -> Table:
    return lz.tables.solve(
        [norm(1), norm(100), attend(1, 16), attend(1, 500), attend(8, 8, is_causal=True)],
        device="cpu")


def prefer(table: Table, last: str) -> Table:
    """The same table with another kernel first."""
    def turned(row: Row) -> Row:
        ours = [c for c in row.choices if c.kernel == last]
        return replace(row, choices=(*ours, *(c for c in row.choices if c.kernel != last)))

    return replace(table, rows=tuple(map(turned, table.rows)))


# solving

def test_neighbours_with_one_winner_become_one_range(table):
    first = next(row for row in table.rows if row.op == "rms_norm")
    assert dict(first.sizes)["rows"] == Span(1, 128)           # to the end of the bucket of 100
    assert dict(first.sizes)["hidden"] == Span(64, 64)
    assert first.kernel == lz.which("rms_norm", torch.ones(50, 64), torch.ones(64))
    assert all(row.kernel in [c.id for c in worlds.current().kernels(row.op)] for row in table.rows)


def test_without_filling_only_the_buckets_that_came_are_there(world):
    rows = lz.tables.solve([norm(1), norm(100)], device="cpu", fill=False).rows
    assert [dict(r.sizes)["rows"] for r in rows] == [Span(1, 1), Span(97, 128)]


def test_a_range_ends_where_the_kernel_does(world):
    short = Fake("fake.short", requires=(at_most("rows", 70),))
    register(short)
    table = lz.tables.solve([norm(40), norm(200)], device="cpu")
    of_short = [dict(r.sizes)["rows"] for r in table.rows if r.kernel == "fake.short"]
    assert of_short == [Span(33, 70)]
    beyond = cpu_facts("rms_norm", (torch.ones(71, 64), torch.ones(64)), {})
    assert table.find("rms_norm", beyond).kernel != "fake.short"


def test_multiples_are_kept_where_they_decide_and_dropped_where_not(world):
    even = Fake("fake.even", requires=(multiple_of("rows", 8),))
    register(even)
    table = lz.tables.solve([norm(33), norm(40)], device="cpu")
    sizes = {r.kernel: dict(r.sizes)["rows"] for r in table.rows}
    assert sizes.pop("fake.even") == Span(33, 48, (8,))
    assert set(sizes.values()) == {Span(33, 48, (), (8,))}
    lz.configure(rules=(lz.PolicyRule.of("deny", "fake.even"),))
    assert [dict(r.sizes)["rows"]
            for r in lz.tables.solve([norm(33), norm(40)], device="cpu").rows] == [Span(33, 48)]


def test_a_line_that_the_policy_draws_is_a_line_of_the_table(world):
    best = lz.which("rms_norm", torch.ones(50, 64), torch.ones(64))
    lz.configure(rules=(lz.PolicyRule.of("deny", best, "rms_norm", {"rows": "> 40"}),))
    table = lz.tables.solve([norm(33), norm(64)], device="cpu")
    lines = {(r.kernel == best, dict(r.sizes)["rows"]) for r in table.rows}
    assert lines == {(True, Span(33, 40)), (False, Span(41, 64))}


def test_the_facts_of_a_written_call_are_those_of_the_call(world):
    q, k, v = qkv(seq_q=3, seq_k=40, heads=4, kv_heads=2)
    dispatcher = dispatcher_of("attention")
    values = dispatcher.order_arguments((q, k.transpose(2, 3).contiguous().transpose(2, 3), v),
                                        {"softcap": 3.0})
    real = dispatcher.facts(values, worlds.current())
    call = written.describe(dispatcher.op, dict(zip(dispatcher.names, values)))
    op, read = facts_of(call, worlds.current(), "cpu")
    assert op is dispatcher.op
    told = {n: v for n, v in read.items() if not n.endswith(".alignment")}
    assert told == {n: v for n, v in real.items() if not n.endswith(".alignment")}
    assert all(value is None or 128 % value == 0 for n, value in read.items()
               if n.endswith(".alignment"))
    assert any(n.endswith(".alignment") for n in read)


def test_calls_with_gradients_have_rows_of_their_own(world):
    table = lz.tables.solve([norm(4), replace(norm(4), grad=True)], device="cpu")
    assert [dict(r.when)["grad"] for r in table.rows] == [False, True]
    x = torch.ones(4, 64, requires_grad=True)
    assert table.find("rms_norm", cpu_facts("rms_norm", (x, torch.ones(64)), {})) == table.rows[1]


def test_a_call_that_breaks_its_contract_is_named(world):
    with pytest.raises(DataError, match=r"call 1 \(rms_norm\) cannot be decided.*hidden"):
        lz.tables.solve([norm(4), norm(4, hidden=0)], device="cpu")
    with pytest.raises(ConfigError, match="example arguments go with a model"):
        lz.tables.solve([norm(4)], torch.ones(1))


def test_a_three_dimensional_call_is_solved_as_the_one_it_becomes(world):
    shapes = {n: TensorSpec((4, 8, 16), "float32") for n in ("query", "key", "value")}
    (row,) = lz.tables.solve([Call("attention", shapes)], device="cpu").rows
    assert dict(row.sizes)["heads"] == Span(4, 4) and dict(row.sizes)["batch"] == Span(1, 1)


def test_what_compiles_on_first_use_is_listed_and_compiled_before_it_serves(world):
    jit = Fake("fake.jit", jit=True)
    register(jit)
    lz.configure(jit="in_request")
    table = lz.tables.solve([norm(4)], device="cpu")
    assert [(a.kernel, a.call.op) for a in table.jit] == [("fake.jit", "rms_norm")]
    assert Table.from_json(json.loads(json.dumps(table.to_json()))) == table
    lz.tables.use_table(table, warm=False)
    assert jit.calls == 0 and "fake.jit" not in worlds.current().warmed
    lz.tables.use_table(table)
    assert jit.calls == 1 and {entry[0] for entry in worlds.current().warmed} == {"fake.jit"}
    jit.fault = RuntimeError("no compiler")
    worlds.publish(lambda w: w.replace(warmed=frozenset()), "cold")
    with pytest.raises(DataError, match=r"fake\.jit cannot be compiled"):
        lz.tables.use_table(table)


# in force

def test_calls_in_a_range_take_the_tables_kernel(table, emitted, path):
    lz.tables.use_table(prefer(table, "reference.rms_norm"))
    x, w = torch.randn(30, 64), torch.randn(64)
    call = path_of("rms_norm", path)
    torch.testing.assert_close(call(x, w), lz.op("rms_norm").reference(x, w))
    assert [e.kernel for e in events_of(Selected, emitted)] == ["reference.rms_norm"]
    call(x[:20], w)                                            # another bucket of the same range
    assert [e.kernel for e in events_of(Selected, emitted)] == ["reference.rms_norm"] * 2
    assert not events_of(PlanMissed, emitted)


def test_explain_says_that_it_came_from_the_table(table):
    ours = prefer(table, "reference.rms_norm")
    lz.tables.use_table(ours)
    x, w = torch.randn(30, 64), torch.randn(64)
    plan = lz.explain("rms_norm", x, w)
    assert plan.kernel == "reference.rms_norm" == lz.which("rms_norm", x, w)
    assert plan.table == ours.id and f"from table {ours.id}" in str(plan)
    assert plan.steps[0].note == f"from table {ours.id}"
    # the engine's own judgement is shown beside it
    assert plan.steps[0].score.total_us > 0 and plan.rejected
    assert lz.Plan.from_json(json.loads(json.dumps(plan.to_json()))).table == ours.id


def test_a_call_outside_is_selected_at_run_time_and_recorded(table, emitted, path):
    lz.tables.use_table(table)
    x, w = torch.randn(200, 64), torch.randn(64)
    torch.testing.assert_close(path_of("rms_norm", path)(x, w), lz.op("rms_norm").reference(x, w),
                               rtol=1e-5, atol=1e-6)
    (missed,) = events_of(PlanMissed, emitted)
    assert missed.reason.code is Code.PLAN_BUCKET_MISS and "rows=200" in missed.reason.message
    assert missed.kernel == lz.which("rms_norm", x, w)
    plan = lz.explain("rms_norm", x, w)
    assert (plan.missed.code is Code.PLAN_BUCKET_MISS and "PLAN_BUCKET_MISS" in str(plan)
            and not plan.table)
    assert lz.Plan.from_json(json.loads(json.dumps(plan.to_json()))).missed == plan.missed
    # once for its kind of call, not for each call
    assert lz.stats().events["plan_missed"] == 1


def test_the_key_tells_the_ends_of_a_range_apart(table, emitted, path):
    """A range that ends inside a bucket: the remembered choice of one side is not given to the
    other."""
    cut = tuple(replace(r, sizes=tuple((n, s._replace(high=110) if n == "rows" else s)
                                       for n, s in r.sizes))
                for r in table.rows)
    lz.tables.use_table(prefer(replace(table, rows=cut), "reference.rms_norm"))
    w = torch.randn(64)
    for n, inside in ((100, True), (110, True), (111, False), (128, False), (101, True)):
        assert (lz.explain("rms_norm", torch.randn(n, 64), w).table != "") is inside
        path_of("rms_norm", path)(torch.randn(n, 64), w)
    assert [e.kernel == "reference.rms_norm" for e in events_of(Selected, emitted)] == [True, False]


def test_an_override_is_another_policy_and_asks_the_engine(table, emitted):
    lz.tables.use_table(prefer(table, "reference.rms_norm"))
    x, w = torch.randn(30, 64), torch.randn(64)
    with lz.prefer("torch.rms_norm"):
        assert lz.which("rms_norm", x, w) == "torch.rms_norm"
        lz.rms_norm(x, w)
    assert lz.which("rms_norm", x, w, backend="torch") == "torch.rms_norm"
    assert not events_of(PlanMissed, emitted)


def test_a_kernel_that_fails_is_replaced_by_the_next_of_the_row(world, emitted):
    bad = Fake("fake.bad")
    register(bad)
    table = lz.tables.solve([norm(4)], device="cpu")
    assert table.rows[0].kernel == "fake.bad"
    lz.tables.use_table(table)
    bad.fault = RuntimeError("broken")
    x, w = torch.randn(4, 64), torch.randn(64)
    for _ in range(5):
        torch.testing.assert_close(lz.rms_norm(x, w), lz.op("rms_norm").reference(x, w))
    # its breaker is open: still by the table
    assert lz.which("rms_norm", x, w) == table.rows[0].choices[1].kernel
    assert lz.explain("rms_norm", x, w).table == table.id


def test_a_row_whose_kernels_are_all_out_is_a_miss(world, emitted):
    bad = Fake("fake.bad")
    register(bad)
    table = lz.tables.solve([norm(4)], device="cpu")
    bare = replace(table.rows[0], choices=table.rows[0].choices[:1])
    lz.tables.use_table(with_stamp(replace(table, rows=(bare,)),
                                   builds={"fake.bad": table.stamp.builds["fake.bad"]}))
    bad.fault = RuntimeError("broken")
    for _ in range(3):
        with pytest.raises(lz.errors.KernelExecutionError):
            lz.rms_norm(torch.randn(4, 64), torch.randn(64))
    lz.rms_norm(torch.randn(4, 64), torch.randn(64))
    assert "out of service" in events_of(PlanMissed, emitted)[-1].reason.message


def test_taking_it_away(table):
    lz.tables.use_table(prefer(table, "reference.rms_norm"))
    assert lz.tables.table_in_force().id == prefer(table, "reference.rms_norm").id
    lz.tables.use_table(None)
    assert lz.tables.table_in_force() is None
    assert lz.which("rms_norm", torch.ones(30, 64), torch.ones(64)) == next(
        r.kernel for r in table.rows if r.op == "rms_norm")


# drift

def with_stamp(table: Table, **changes) -> Table:
    return replace(table, stamp=replace(table.stamp, **changes))


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: {"device": replace(s.device, driver_version="999.1")},
     "device.driver_version 999.1"),
    (lambda s: {"device": replace(s.device, name="another CPU")}, "device.name another CPU"),
    (lambda s: {"device": replace(s.device, torch_version="1.0")}, "device.torch_version 1.0"),
    (lambda s: {"place": "elsewhere-64t"}, "threads elsewhere-64t"),
    (lambda s: {"policy": "0123"}, "policy 0123"),
    (lambda s: {"capabilities": "0123"}, "capabilities 0123"),
    (lambda s: {"builds": {**s.builds, "reference.rms_norm": "source#0"}},
     "build of reference.rms_norm source#0"),
    (lambda s: {"builds": {**s.builds, "gone.kernel": "x==1"}}, "build of gone.kernel x==1"),
])
def test_drift_is_refused_and_named(table, change, message):
    with pytest.raises(DataError, match="Run lz solve again") as refused:
        lz.tables.use_table(with_stamp(table, **change(table.stamp)))
    assert message in str(refused.value) and set(refused.value.codes) == {Code.PLAN_DRIFT}
    assert lz.tables.table_in_force() is None


def test_which_of_two_twins_and_how_much_memory_is_no_drift(table):
    device = replace(table.stamp.device, index=3, total_memory=1)
    check_table(with_stamp(table, device=device), worlds.current())


def test_a_device_that_is_not_here_is_refused(table):
    device = replace(table.stamp.device, type="xpu", vendor="intel", isa=(),
                     gpu_generation="unknown")
    with pytest.raises(DataError, match="Run lz solve again"):
        lz.tables.use_table(with_stamp(table, device=device))


@pytest.mark.parametrize("change", [
    lambda: lz.configure(deterministic=True), lambda: register(Fake("fake.new"))],
                         ids=["policy", "kernels"])
def test_drift_while_in_force_turns_it_off_and_says_so(table, emitted, change):
    lz.tables.use_table(prefer(table, "reference.rms_norm"))
    change()
    x, w = torch.randn(30, 64), torch.randn(64)
    lz.rms_norm(x, w)
    assert events_of(PlanMissed, emitted)[-1].reason.code is Code.PLAN_DRIFT
    assert lz.explain("rms_norm", x, w).missed.code is Code.PLAN_DRIFT
    with pytest.raises(DataError, match="is refused"):
        lz.tables.use_table(table)


def test_a_table_of_an_op_that_is_not_here_is_refused(table):
    with pytest.raises(DataError, match="geglu"):
        lz.tables.use_table(replace(table, rows=(replace(table.rows[0], op="geglu"),)))
    with pytest.raises(DataError, match="rms_norm color"):
        lz.tables.use_table(replace(table,
                                    rows=(Row("rms_norm", (("color", 1),), (),
                                              (Choice("torch.rms_norm"),)),)))


# the file

def test_a_table_survives_its_file(table, tmp_path):
    path = tmp_path / "dispatch_table.json"
    again = lz.tables.solve(
        [norm(1), norm(100), attend(1, 16), attend(1, 500), attend(8, 8, is_causal=True)],
        path=path, device="cpu")
    assert Table.load(path) == again == table and Table.load(path).id == table.id
    assert json.loads(path.read_text())["schema"] == SCHEMA
    assert lz.tables.use_table(path) == table
    assert lz.which("rms_norm", torch.ones(30, 64), torch.ones(64)) == table.find(
        "rms_norm", cpu_facts("rms_norm", (torch.ones(30, 64), torch.ones(64)), {})).kernel


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda d: d.update(schema="layerzero.dispatch_table/9"),
     "wanted schema layerzero.dispatch_table/1"),
    (lambda d: d.pop("stamp"), "missing: stamp"),
    (lambda d: d.update(color=1), "unknown: color"),
    (lambda d: d.update(rows={}), "rows: wanted a list"),
    (lambda d: d["rows"][0].pop("op"), r"rows\[0\]: missing: op"),
    (lambda d: d["rows"][1].update(choices=[]),
     r"rows\[1\].choices: wanted a list of at least one kernel"),
    (lambda d: d["rows"][0]["choices"][0].update(kernel=7),
     r"rows\[0\].choices\[0\].kernel: wanted text.*got 7"),
    (lambda d: d["rows"][0]["choices"][0].update(transforms=[["melt", "x"]]),
     r"choices\[0\].transforms\[0\]\[0\]: wanted one of contiguous"),
    (lambda d: d["rows"][0]["choices"][0].update(workspace=-1),
     r"workspace: wanted a whole number >= 0"),
    (lambda d: d["rows"][0]["sizes"].update(rows=[5, 1]),
     r"rows\[0\].sizes.rows.range: wanted a range .* the smaller one first"),
    (lambda d: d["rows"][0]["sizes"].update(rows=[1]),
     r"sizes.rows.range: wanted a range \[from, to\]"),
    (lambda d: d["rows"][0]["sizes"].update(rows=[1, float("inf")]),
     r"sizes.rows.range: wanted a range \[from, to\]"),
    (lambda d: d["rows"][0]["sizes"].update(rows={"range": [1, 2], "multiple_of": [0],
                                                  "not_multiple_of": []}),
     r"multiple_of\[0\]: wanted"),
    (lambda d: d["rows"][0].update(when=[]), r"rows\[0\].when: wanted an object"),
    (lambda d: d["stamp"]["device"].update(cores="many"),
     "stamp.device.cores: wanted a whole number"),
    (lambda d: d["stamp"].update(signature="x"), "stamp.signature: wanted"),
    (lambda d: d["stamp"].update(builds=[]), "stamp.builds: wanted"),
    (lambda d: d.update(jit=[{"kernel": "a.b", "call": {"op": 3}}]),
     r"jit\[0\].call.op: wanted text"),
    (lambda d: d["rows"][0]["sizes"].update(rows=[1, 10 ** 6]),
     "hash: wanted .* changed after it was made"),
])
def test_a_file_that_does_not_fit_is_refused_with_the_place(table, spoil, message):
    data = copy.deepcopy(table.to_json())
    spoil(data)
    with pytest.raises(DataError, match=message):
        Table.from_json(data)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_file_with_anything_missing_or_extra_is_a_data_error(data):
    """Whatever is taken away from a file or put into it: one error that names the place, or the
    same table."""
    whole = small().to_json()
    at = whole
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at[key] = copy.copy(at[key])
            at = at[key]
            continue
        if data.draw(st.booleans()):
            del at[key]
        else:
            at[key] = data.draw(st.sampled_from([None, -1, 1.5, "x", [], {}, [1, 2], {"op": 1},
                                                 True]))
        break
    try:
        assert Table.from_json(whole) == small()
    except DataError as e:
        assert str(e).startswith("table")


@lru_cache(maxsize=1)
def small() -> Table:
    return lz.tables.solve([norm(4), norm(100)], device="cpu", fill=False)


def test_what_is_no_json_is_a_data_error(tmp_path):
    path = tmp_path / "t.json"
    for content in (b"{", b"\xff", b"[]", b"3", b"[" * 100000):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"t\.json"):
            Table.load(path)
    with pytest.raises(DataError, match="cannot read"):
        Table.load(tmp_path / "absent.json")
    with pytest.raises(DataError, match="cannot be written"):
        small().save(tmp_path / "no" / "folder.json")


# lowered

def test_the_lowered_form_stands_alone(table, tmp_path):
    (tmp_path / "choices.py").write_text(lowering.lower(table))
    row = next(i for i, r in enumerate(table.rows) if r.op == "rms_norm")
    facts = {**dict(table.rows[row].when), "rows": 30, "hidden": 64}
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import choices
        facts = {facts!r}
        print(choices.find("rms_norm", facts), choices.find("rms_norm", {{**facts, "rows": 1000}}),
              choices.find("unheard_of", facts), choices.KERNELS[choices.rms_norm(facts)][0], choices.TABLE,
              any(name.split(".")[0] in ("layerzero", "torch") for name in sys.modules))
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True,
                         text=True, timeout=240, check=True).stdout.strip()
    assert out == f"{row} -1 -1 {table.rows[row].kernel} {table.id} False"
    assert "import" not in [line.split()[0] for line in lowering.lower(table).splitlines()
                            if line[:1].isalpha()]


@pytest.mark.parametrize("op", list(MAKERS))
@pytest.mark.filterwarnings("ignore::layerzero.errors.CausalAlignmentWarning")
def test_lowered_table_and_rules_agree_on_random_calls(op, world):
    """Thousands of random shapes: the lowered form says what the table says, and that is a kernel
    whose rules hold."""
    if op == "synthetic":
        random_calls.register_synthetic()
    make, rng = MAKERS[op], random.Random(7)
    solved = [c for c in (described(op, *make(rng)) for _ in range(90)) if c is not None]
    table = lz.tables.solve(solved, device="cpu", fill=op != "synthetic")
    find, world = lowering.compiled_find(table), worlds.current()
    known = [facts_of(c, world, "cpu")[1] for c in solved]
    asked = [*known,
             *(random_neighbour(rng, dispatcher_of(op).op, rng.choice(known)) for _ in range(2500))]
    for args, kwargs in (make(rng) for _ in range(500)):
        try:
            asked.append(cpu_facts(op, args, kwargs))
        except (InvalidCall, TypeError):
            continue
    hits = misses = 0
    for facts in asked:
        row, index = table.find(op, facts), find(op, facts)
        assert row is (None if index < 0 else table.rows[index])
        assert sum(r.covers(facts) for _, r in table.by_op[op]) == (row is not None), "rows overlap"
        if row is None:
            misses += 1
            continue
        hits += 1
        steps = world.plan(dispatcher_of(op).op, facts).steps
        allowed = {s.kernel: tuple((t.kind, t.target) for t in s.transforms) for s in steps}
        for choice in row.choices:
            assert allowed.get(choice.kernel) == choice.transforms, (choice, facts)
    assert hits > 150 and misses > 300


def random_neighbour(rng: random.Random, op: lz.Op, facts: dict) -> dict:
    """A call that differs a little in one or two sizes, as its facts."""
    new = dict(facts)
    names = [n for n in (*op.dims, *(p.name for p in op.params if p.kind == "int"))
             if new[n] is not None]
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2)))):
        new[name] = max(rng.choice((new[name] + rng.randint(-9, 9), new[name] * 2,
                                    rng.choice(random_calls.EDGES))), 0)
    for name, text in op.derived.items():
        new[name] = None if any(new[n] is None for n in parse(text).names) else parse(text)(new)
    return new if all(rule.check(new) is None for rule in op.requires) else facts


def described(op: str, args: tuple, kwargs: dict) -> Call | None:
    dispatcher = dispatcher_of(op)
    try:
        values = dispatcher.order_arguments(args, kwargs)
        dispatcher.facts(values, worlds.current())
    except (InvalidCall, TypeError):
        return None
    named = {n: v.detach() if isinstance(v, torch.Tensor) else v
             for n, v in zip(dispatcher.names, values)}
    if any(isinstance(v, float) and v != v for v in named.values()):
        return None
    outline = {n: TensorSpec(tuple(v.shape), str(v.dtype)[6:], None if v.is_contiguous()
                             else v.stride())
               if isinstance(v, torch.Tensor) else v for n, v in named.items()}
    return Call(op, outline)


@pytest.mark.filterwarnings("ignore::layerzero.errors.CausalAlignmentWarning")
@pytest.mark.parametrize("op", ["attention", "rms_norm", "varlen_attention"])
def test_a_table_says_what_the_engine_chooses(op, world):
    """Calls that share no key: each is a row's own, and its row has the kernels of its plan in
    their order."""
    rng, world = random.Random(3), worlds.current()
    calls = [c for c in (described(op, *MAKERS[op](rng)) for _ in range(80)) if c is not None]
    decided = 0
    for call in calls:
        target, facts = facts_of(call, world, "cpu")
        steps = world.plan(target, facts).steps
        rows = lz.tables.solve([call], device="cpu", fill=False).rows
        assert [[c.kernel for c in row.choices]
                for row in rows] == [[s.kernel for s in steps]] * bool(steps)
        decided += len(rows)
    assert decided > 15


@given(rows=st.integers(0, 5000), hidden=st.sampled_from([1, 63, 64, 65]), half=st.booleans(),
       affine=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_shape_gets_a_valid_kernel_or_a_recorded_miss(rows, hidden, half, affine):
    dtype = torch.float16 if half else torch.float32
    dispatcher, device = dispatcher_of("rms_norm"), worlds.current().device("cpu").facts()
    facts = cpu_facts("rms_norm", (torch.empty(rows, hidden, dtype=dtype, device="meta"),
                                   torch.empty(hidden, dtype=dtype, device="meta") if affine
                                   else None), {})
    facts["device"] = "cpu"
    # not published
    world = replace(worlds.current(), table=ActiveTable(wide(), worlds.current().catalog))
    plan = world.plan(dispatcher.op, facts)
    if plan.table:
        kernel = worlds.current().catalog.by_id[plan.kernel]
        fixed = {t.target for t in plan.steps[0].transforms}
        assert not [r for r in kernel.reasons({**device, **facts})
                    if r.fact.partition(".")[0] not in fixed]
        assert 1 <= rows <= 3072 and hidden == 64 and not half and affine
    else:
        assert plan.missed.code is Code.PLAN_BUCKET_MISS and f"rows={rows}" in plan.missed.message


@lru_cache(maxsize=1)
def wide() -> Table:
    return lz.tables.solve([norm(1), norm(3000)], device="cpu")


def test_a_model_is_solved_by_a_dry_run(world):
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x + lz.rms_norm(x, self.weight)
            return x

    with torch.no_grad():
        (row,) = lz.tables.solve(Block(), torch.randn(5, 64), device="cpu").rows
    assert (row.op, dict(row.sizes)["rows"], dict(row.when)["grad"]) == ("rms_norm", Span(5, 5),
                                                                         False)


# proofs

def test_a_rule_of_a_range_holds_fails_or_depends():
    op = lz.op("attention")
    known = {"seq_k": Span(16, 64, (8,), (3,)), "seq_q": Span(1, 1), "heads": Span(8, 8),
             "kv_heads": Span(2, 2), "dtype": "float32", "batch": Span(1, 4)}
    cases = [(at_most("seq_k", 64), True), (at_most("seq_k", 63), None),
             (at_most("seq_k", 15), False), (at_least("seq_k", 16), True),
             (at_least("seq_k", 17), None), (at_least("seq_k", 65), False),
             (multiple_of("seq_k", 4), True), (multiple_of("seq_k", 16), None),
             (multiple_of("seq_k", 6), False), (equals("seq_k", 99), False),
             (equals("seq_k", 20), None), (equals("seq_q", 1), True),
             (one_of("dtype", "float32", "float16"), True), (equals("group", 4), True),
             (at_most("batch_heads", 32), True), (at_most("batch_heads", 31), None),
             (at_least("causal_offset", 15), True), (equals("head_dim", 3), None),
             (any_of(at_most("seq_k", 20), at_most("seq_k", 64)), True),
             (any_of(at_most("seq_k", 20)), None),
             (when(equals("seq_q", 2), at_most("seq_k", 1)), True),
             (when(equals("seq_q", 1), at_most("seq_k", 1)), False)]
    for rule, want in cases:
        assert holds(rule, op, known) is want, str(rule)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_derived_number_lies_where_it_is_said_to(data):
    import synthetic
    ends = {n: sorted(data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))) for n in
            ("seq", "depth", "width", "pages", "steps", "limit", "groups")}
    known = {n: Span(low, high) for n, (low, high) in ends.items()}
    point = {n: data.draw(st.integers(low, high)) for n, (low, high) in ends.items()}
    for name, text in synthetic.OP.derived.items():
        point[name] = parse(text)(point)
        span = interval(synthetic.OP, name, known)
        assert span is None or span.covers(point[name]), (name, text)


@given(st.tuples(st.integers(0, 30), st.integers(0, 30)),
       st.tuples(st.integers(0, 30), st.integers(0, 30)),
       st.sampled_from([((), ()), ((2,), ()), ((), (2,)), ((2, 3), ()), ((2,), (3,))]),
       st.sampled_from([((), ()), ((2,), ()), ((), (2,)), ((2, 3), ()), ((2,), (3,))]))
def test_a_union_covers_both_and_nothing_else(a, b, ma, mb):
    left, right = Span(min(a), max(a), *ma), Span(min(b), max(b), *mb)
    both = union(left, right)
    if both is not None:
        assert all(both.covers(n) == (left.covers(n) or right.covers(n)) for n in range(-2, 34))


def test_every_row_of_a_models_table_is_proven(world):
    table = lz.tables.solve([attend(s, s, is_causal=True, heads=h, kv_heads=2) for s in (7, 64, 900)
                             for h in (2, 8)]
                            + [attend(1, s) for s in (5, 3000)], device="cpu")
    world = worlds.current()
    device = {n: v for n, v in world.device("cpu").facts().items() if n in DEVICE_FACTS}
    assert len(table.rows) < 40
    for row in table.rows:
        op = world.catalog.ops[row.op]
        for choice in row.choices:
            assert proven(op, world.catalog.by_id[choice.kernel], choice,
                          facts_of_row(op, row, device))


def test_only_named_kernels_are_in_a_table_under_a_lock(world):
    allow_only("torch.rms_norm", "reference.rms_norm", op="rms_norm")
    lz.lock("rms_norm", "reference.rms_norm")
    table = lz.tables.solve([norm(4)], device="cpu")
    assert [c.kernel for c in table.rows[0].choices] == ["reference.rms_norm"]
    lz.tables.use_table(table)
    plan = lz.explain("rms_norm", rows(4, 64), torch.ones(64))
    assert plan.locked == "lz.lock()" and plan.table == table.id


def test_the_benchmark_runs_and_writes_what_it_promises(tmp_path):
    out = tmp_path / "tables.json"
    root = Path(__file__).parents[3]
    words = ["--quick", "--device", "cpu", "--out", str(out)]
    done = run_python(root / "benchmarks" / "tables.py", *words,
                      env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(out.read_text())
    assert set(data["parts"]) == {"lookup", "kernel", "model", "a kernel that does nothing"}
    names = [row["name"] for part in data["parts"].values() for row in part]
    assert (len(set(names)) == len(names) and "lowered: sizes -> row" in names
            and "lz.tables.bind: nothing" in names)
    assert all(row["ns"]["median"] > 0 and (row["over"] is None) == (row["target"] == "")
               for part in data["parts"].values() for row in part)
