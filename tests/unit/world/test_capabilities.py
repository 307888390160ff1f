"""capabilities.json: written from the declarations, read back as limits, refused with the place of
every fault.
"""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.spec.device import Device
from layerzero.spec.errors import DataError
from layerzero.spec.kernel import Kernel
from layerzero.spec.reason import Code
from layerzero.spec.rules import (
    any_of,
    at_least,
    at_most,
    device,
    dtypes,
    multiple_of,
    off,
    on,
    unit_stride,
    when,
)
from layerzero.world import capabilities
from layerzero.world import snapshot as worlds
from layerzero.world.capabilities import (
    SCHEMA,
    apply,
    capabilities_hash,
    export,
    load,
    use,
    validate,
)
from layerzero.world.registry.catalog import Catalog, builtin_ops

OPS = builtin_ops()
ATTENTION = OPS["attention"]


def _attention() -> Any:
    return ATTENTION.reference


FAST = Kernel("ours.fast", ATTENTION, _attention, prior=50.0, less_work="a test",
              variants=("bhsd",),
              version=">=1,<2", requires=(
    device("cpu"), dtypes("float32", "bfloat16", cast=True), at_most("head_dim", 128),
    multiple_of("head_dim", 8), unit_stride("query"),
    any_of(off("is_causal"), at_least("causal_offset", 0)),
    when(on("grad"), at_most("seq_q", 64))))
SLOW = Kernel("ours.slow", ATTENTION, _attention)
NORM = Kernel("ours.norm", OPS["rms_norm"], _attention)
CATALOG = Catalog(OPS, (FAST, SLOW, NORM))


def descriptor(**changes: Any) -> dict[str, Any]:
    """The catalog's descriptor, with something changed in the row of ours.fast."""
    data = json.loads(json.dumps(export(CATALOG)))
    data["kernels"][0].update(changes)
    return data


def head_dim_limit(data: dict[str, Any], n: int) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    rule = next(r for r in changed["kernels"][0]["requires"] if r.get("fact") == "head_dim"
                and r["test"] == "le")
    rule["value"] = n
    return changed


# schema

def test_an_export_is_plain_sorted_and_valid():
    data = export(CATALOG)
    assert data["schema"] == SCHEMA and isinstance(data["library"], str)
    assert [row["id"] for row in data["kernels"]] == ["ours.fast", "ours.norm", "ours.slow"]
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    validate(data, CATALOG)


def test_the_library_s_own_kernels_export_validate_and_apply_to_themselves():
    catalog = worlds.current().catalog
    data = json.loads(json.dumps(export(catalog), allow_nan=False))
    validate(data)
    assert [a is b for a, b in zip(apply(catalog, data).kernels, catalog.kernels)] == [True] * len(
        catalog.kernels)


def test_every_field_of_a_kernel_is_known_to_the_schema():
    assert set(capabilities._KERNEL) == set(FAST.to_json())


@pytest.mark.parametrize(("schema", "shown"), [
    ("layerzero.capabilities/2", "'layerzero.capabilities/2'"), ("", "''"), (1, "1"),
    (None, "None"), (["x"], "a list")])
def test_another_schema_version_is_refused_and_nothing_else_examined(schema, shown):
    with pytest.raises(DataError, match="nothing of them was applied") as e:
        validate({**descriptor(), "schema": schema, "kernels": "nonsense"}, CATALOG)
    assert e.value.codes == (Code.SCHEMA_UNKNOWN,)
    assert f"schema must be {SCHEMA}, got {shown}" in str(e.value)


def test_a_file_without_a_schema_is_refused():
    with pytest.raises(DataError, match="got none"):
        validate({"kernels": []}, CATALOG)


@pytest.mark.parametrize("field", ["library", "kernels"])
def test_a_missing_field_is_named(field):
    data = descriptor()
    del data[field]
    with pytest.raises(DataError, match=rf"\n  {field} is required"):
        validate(data, CATALOG)


@pytest.mark.parametrize("field", list(FAST.to_json()))
def test_a_missing_field_of_a_kernel_is_named_with_its_place(field):
    data = descriptor()
    del data["kernels"][0][field]
    with pytest.raises(DataError, match=rf"kernels\[0\]\.{field} is required") as e:
        validate(data, CATALOG)
    assert e.value.codes == (Code.MISSING_METADATA,)


def test_an_extra_field_is_named_with_those_there_are():
    for data, place in (({**descriptor(), "kernel": []},
                         "kernel must be left out; the fields are schema, library"),
                        (descriptor(priority=3),
                         "kernels[0].priority must be left out; the fields are id, package")):
        with pytest.raises(DataError) as e:
            validate(data, CATALOG)
        assert place in str(e.value)


@pytest.mark.parametrize(("change", "message"), [
    ({"id": "ours.fats"},
     "id must be a kernel that is registered (did you mean 'ours.fast'?), got 'ours.fats'"),
    ({"id": "ours.slow"}, "kernels[2].id must be given once, got ours.slow again"),
    ({"id": 7}, "id must be text, got 7"),
    ({"op": "atention"},
     "op must be an op that is registered (did you mean 'attention'?), got 'atention'"),
    ({"op": "rms_norm"},
     "op must be 'attention', which belongs to the code of ours.fast, got 'rms_norm'"),
    ({"load": "os:system"}, "load must be"),
    ({"variants": []}, "variants must be ['bhsd'], which belongs to the code"),
    ({"package": "os"}, "package must be ''"), ({"distribution": "x"}, "distribution must be ''"),
    ({"baseline": True}, "baseline must be False"),
    ({"prior": 0}, "prior must be a number > 0, got 0"),
    ({"prior": "fast"}, "prior must be a number, got 'fast'"),
    ({"prior": True}, "prior must be a number, got True"),
    ({"prior": 1e999}, "prior must be a number, got inf"),
    ({"prior": 10 ** 5000}, "prior must be a number, got a very large number"),
    ({"overhead_us": -1}, "overhead_us must be a number >= 0"),
    ({"untested": 1}, "untested must be true or false, got 1"),
    ({"version": "new"}, "version must be a range of versions like '>=2.5,<3', got 'new'"),
    ({"torch": "=>2"}, "torch must be a range of versions"),
    ({"workspace": "4 * hedas"},
     "workspace must be arithmetic over facts of attention (did you mean 'heads'?)"),
    ({"workspace": "__import__('os')"}, "workspace must be arithmetic over facts like"),
    ({"workspace": "\0"}, "workspace must be arithmetic"),
    ({"workspace": "(" * 9999}, "workspace must be arithmetic"),
    ({"requires": {}}, "requires must be a list, got an object"),
    ({"requires": [3]}, "requires[0] must be an object"),
])
def test_a_fault_of_a_kernel_is_told_with_its_place(change, message):
    with pytest.raises(DataError) as e:
        validate(descriptor(**change), CATALOG)
    assert message in str(e.value)
    assert "kernels[" in str(e.value)


RULE = {"fact": "head_dim", "test": "le", "value": 64, "code": "HEAD_DIM_TOO_LARGE"}


@pytest.mark.parametrize(("rule", "message"), [
    ({**RULE, "fact": "head_dmi"},
     ".fact must be a fact of attention (did you mean 'head_dim'?), got 'head_dmi'"),
    ({**RULE, "test": "lte"}, ".test must be one of eq, ne, le,"),
    ({**RULE, "code": "HEAD_DIM_TOO_LARG"},
     ".code must be a reason code (did you mean 'HEAD_DIM_TOO_LARGE'?)"),
    ({**RULE, "value": "64"}, ".value must be a number, got '64'"),
    ({**RULE, "value": True}, ".value must be a number"),
    ({**RULE, "value": [64]}, ".value must be a number, got a list"),
    ({**RULE, "test": "multiple_of", "value": 0}, ".value must be a whole number > 0, got 0"),
    ({**RULE, "test": "multiple_of", "value": 2.5}, ".value must be a whole number > 0"),
    ({**RULE, "test": "in"}, ".value must be a list of plain values, got 64"),
    ({**RULE, "test": "in", "value": []}, ".value must be a list of plain values"),
    ({**RULE, "test": "not_in", "value": [[1]]}, ".value must be a list of plain values"),
    ({**RULE, "test": "absent"}, ".value must be null"),
    ({**RULE, "test": "has", "fact": "isa"}, ".value must be text"),
    ({**RULE, "test": "has"}, ".test must be one for a single value, as head_dim is one, got has"),
    ({**RULE, "test": "eq", "value": {}},
     ".value must be text, a number, true, false or null, got an object"),
    ({**RULE, "fact": "dtype"},
     ".test must be one for a value that is no number, as dtype is none, got le"),
    ({**RULE, "fact": "is_causal"},
     ".test must be one for a value that is no number, as is_causal is none"),
    ({**RULE, "repair": "sort"}, ".repair must be contiguous, cast or empty, got 'sort'"),
    ({**RULE, "repair": "contiguous"}, ".repair must be empty: only a rule on a tensor"),
    ({**RULE, "repair": "cast"}, ".repair must be empty: a cast needs"),
    ({**RULE, "fact": "dtype", "test": "in", "value": ["nn"], "repair": "cast"},
     ".repair must be empty: a cast needs"),
    ({**RULE, "unless": 1}, ".unless must be left out; the fields are fact, test, value, code"),
    ({"fact": "head_dim"}, ".test is required"),
    ({"any_of": []}, ".any_of must be at least one rule"),
    ({"any_of": [RULE, {**RULE, "fact": "x"}]}, ".any_of[1].fact must be a fact of attention"),
    ({"any_of": RULE}, ".any_of must be a list"), ({"when": RULE}, ".then is required"),
    ({"when": RULE, "then": {**RULE, "test": "?"}}, ".then.test must be one of"),
    ({"when": RULE, "then": []}, ".then must be an object, got a list"),
])
def test_a_fault_of_a_rule_is_told_with_its_place(rule, message):
    with pytest.raises(DataError) as e:
        validate(descriptor(requires=[RULE, rule]), CATALOG)
    assert f"kernels[0].requires[1]{message}" in str(e.value)
    assert "kernels[0].requires[0]" not in str(e.value)


def test_a_rule_nested_without_end_is_refused():
    rule: dict[str, Any] = RULE
    for _ in range(60):
        rule = {"any_of": [rule]}
    with pytest.raises(DataError, match="nested at most 16 deep"):
        validate(descriptor(requires=[rule]), CATALOG)


def test_all_faults_are_told_at_once_and_their_number_is_bounded():
    data = descriptor(prior=-1, note=3)
    data["kernels"][1]["version"] = "?"
    with pytest.raises(DataError) as e:
        validate(data, CATALOG)
    assert [r.fact for r in e.value.reasons] == ["kernels[0].note", "kernels[0].prior",
                                                 "kernels[1].version"]
    with pytest.raises(DataError, match=r"\.\.\. and 80 more"):
        validate({**descriptor(), "kernels": [None] * 100}, CATALOG)


# hash

def test_the_hash_is_of_the_content_alone():
    data = descriptor()
    shuffled = {key: data[key] for key in reversed(list(data))}
    spaced = json.loads(json.dumps(data, indent=3))
    assert capabilities_hash(data) == capabilities_hash(shuffled) == capabilities_hash(spaced)
    assert len(capabilities_hash(data)) == 64 and int(capabilities_hash(data), 16)
    assert capabilities_hash(data) == capabilities_hash(export(CATALOG))


def test_the_hash_changes_with_any_limit():
    data = descriptor()
    assert len({capabilities_hash(d)
                for d in (data, head_dim_limit(data, 64), descriptor(prior=2.0))}) == 3


@pytest.mark.parametrize("junk", [{"x": object()}, {"x": float("nan")}, {1: 2, "a": 3},
                                  {"x": {1, 2}}])
def test_what_is_no_json_has_no_hash(junk):
    with pytest.raises(DataError, match="plain JSON data"):
        capabilities_hash(junk)


# apply

def test_limits_come_from_the_descriptor_and_the_rest_stays():
    changed = apply(CATALOG,
                    head_dim_limit(descriptor(note="seen to fail above 64", graph_safe=False,
                                              prior=2), 64))
    fast = changed.by_id["ours.fast"]
    assert ("head_dim <= 64" in map(str, fast.requires)
            and "head_dim <= 128" not in map(str, fast.requires))
    assert len(fast.requires) == len(FAST.requires)
    assert (fast.note, fast.graph_safe, fast.prior) == ("seen to fail above 64", False, 2)
    assert (fast.load, fast.op, fast.variants) == (FAST.load, FAST.op, FAST.variants)
    assert changed.by_id["ours.slow"] is SLOW and changed.ops == CATALOG.ops


def test_what_was_exported_and_applied_exports_alike():
    data = head_dim_limit(descriptor(), 64)
    assert export(apply(CATALOG, data)) == data


def test_kernels_that_are_not_named_keep_their_limits():
    data = descriptor()
    data["kernels"] = data["kernels"][2:]
    assert apply(CATALOG, data).kernels == CATALOG.kernels


def test_nothing_is_applied_of_a_descriptor_with_a_fault():
    before = [k.to_json() for k in CATALOG.kernels]
    with pytest.raises(DataError):
        apply(CATALOG, head_dim_limit(descriptor(note=3), 64))
    assert [k.to_json() for k in CATALOG.kernels] == before


def test_the_bounds_of_quantized_kernels_are_stated_and_belong_to_the_code():
    catalog = worlds.current().catalog
    data = export(catalog)
    quantized = {k.id for k in catalog.kernels if k.op.name in (
        "quantize", "dequantize", "quantized_linear", "paged_attention")}
    assert data["bounds"].keys() == quantized and quantized
    stated = data["bounds"]["torch.dequantized_linear"]
    rtol, atol = catalog.ops["quantized_linear"].tolerance.of("bfloat16")
    assert stated["bfloat16"] == {"rtol": rtol, "atol": atol, "times_eager": 2.0}
    validate(data, catalog)
    validate({name: part for name, part in data.items() if name != "bounds"}, catalog)
    stated["bfloat16"]["rtol"] = 0.5
    with pytest.raises(DataError, match=r"bounds\.torch\.dequantized_linear"):
        validate(data, catalog)


# in force

@pytest.mark.usefixtures("world")
def test_a_lower_limit_in_the_file_changes_the_choice_without_a_change_of_code(tmp_path):
    lz.register(replace(FAST, version=""))
    q = torch.randn(1, 2, 16, 96)
    assert lz.which("attention", q, q, q) == "ours.fast"
    before = export(worlds.current().catalog)
    rows = copy.deepcopy(before)
    rows["kernels"] = [row for row in rows["kernels"] if row["id"] == "ours.fast"]
    path = tmp_path / "capabilities.json"
    path.write_text(json.dumps(head_dim_limit(rows, 64)))
    received = []
    stop = lz.subscribe(received.append)
    name = use(path)
    stop()
    plan = lz.explain("attention", q, q, q)
    assert plan.kernel != "ours.fast"
    assert [(r.code, r.want, r.got)
            for r in plan.why_not("ours.fast")] == [(Code.HEAD_DIM_TOO_LARGE, "<= 64", 96)]
    assert lz.which("attention", *[q[..., :64].contiguous()] * 3) == "ours.fast"
    assert name == capabilities_hash(load(path))
    assert [e.cause for e in received if e.name == "world"] == [f"capabilities:{name[:16]}"]
    use(before)
    assert lz.which("attention", q, q, q) == "ours.fast"


@pytest.mark.usefixtures("world")
def test_no_remembered_choice_survives_a_new_descriptor():
    """The descriptor is part of the world a choice was made in, so its hash need not be part of the
    key."""
    served = []

    def traced_load() -> Any:
        def run(query, key, value):
            served.append(query.shape[-1])
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return run

    lz.register(Kernel("ours.noted", ATTENTION, traced_load, prior=1e6, less_work="a test",
                       requires=(at_most("head_dim", 128),)))
    q = torch.randn(1, 2, 4, 96)
    for _ in range(3):
        lz.attention(q, q, q)
    assert served == [96, 96, 96]
    row = next(r for r in export(worlds.current().catalog)["kernels"] if r["id"] == "ours.noted")
    row["requires"][0]["value"] = 64
    use({"schema": SCHEMA, "library": "", "kernels": [row]})
    lz.attention(q, q, q)
    assert served == [96, 96, 96]
    lz.attention(*[q[..., :64].contiguous()] * 3)
    assert served == [96, 96, 96, 64]


@pytest.mark.usefixtures("world")
def test_a_descriptor_also_counts_when_another_device_is_asked_about():
    gpu = Device("cuda", 0, "a gpu", "nvidia", sm=90, gpu_generation="hopper")
    lz.register(Kernel("ours.gpu", ATTENTION, _attention, prior=1e6, less_work="a test", requires=(
        device("cuda"), at_most("head_dim", 256))))
    q = torch.randn(1, 2, 4, 128)
    assert lz.which("attention", q, q, q, on=gpu) == "ours.gpu"
    row = next(r for r in export(worlds.current().catalog)["kernels"] if r["id"] == "ours.gpu")
    row["requires"][1]["value"] = 64
    use({"schema": SCHEMA, "library": "", "kernels": [row]})
    assert lz.which("attention", q, q, q, on=gpu) != "ours.gpu"


def test_a_file_that_does_not_fit_leaves_the_world_as_it_was(tmp_path):
    path = tmp_path / "capabilities.json"
    path.write_text(json.dumps(descriptor()))              # names kernels that nobody registered
    before = worlds.current()
    with pytest.raises(DataError, match="a kernel that is registered"):
        use(path)
    assert worlds.current() is before


# files

@pytest.mark.parametrize(("content", "message"), [
    (b"", "wanted a capabilities file"), (b"{", "wanted a capabilities file"),
    (b"\xff\xfe{}", "wanted a capabilities file"),
    (b"[]", "capabilities must be an object, got a list"), (b"null", "must be an object, got null"),
    (b'{"schema": NaN}', "NaN is no JSON number"),
    (b'{"schema": -Infinity}', "-Infinity is no JSON number"),
    (b'{"schema": 1, "schema": 2}', "'schema' is given twice"),
    (b"[" * 100_000, "wanted a capabilities file"),
    (b'{"schema": ' + b"1" * 10_000 + b"}", "wanted a capabilities file"),
])
def test_a_file_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "capabilities.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as e:
        load(path, CATALOG)
    assert message in str(e.value)


@pytest.mark.parametrize("path", ["no/such/file", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError):
        load(path, CATALOG)


def test_a_file_round_trip(tmp_path):
    path = tmp_path / "capabilities.json"
    path.write_text(json.dumps(export(CATALOG), indent=1))
    assert load(path, CATALOG) == export(CATALOG)


# junk

junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
              st.sampled_from(
        ["le", "in", "head_dim", "query.dtype", "float16", "cast", "contiguous",
         "HEAD_DIM_TOO_LARGE", "ours.fast"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
        st.one_of(st.text(max_size=5), st.sampled_from(
            ["schema", "kernels", "fact", "test", "value", "code", "repair", "any_of", "when",
             "then"])),
        inner, max_size=4)), max_leaves=12)


def accepts(data: Any) -> bool:
    """Only ever a DataError; and what passes also applies and exports."""
    try:
        validate(data, CATALOG)
    except DataError:
        return False
    catalog = apply(CATALOG, data)
    assert len(catalog.kernels) == len(CATALOG.kernels)
    validate(export(catalog), CATALOG)
    return True


@settings(deadline=None, max_examples=300)
@given(junk)
def test_junk_gives_only_data_errors(data):
    accepts(data)
    with contextlib.suppress(DataError):
        capabilities_hash(data)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(FAST.to_json())), junk)
def test_junk_in_a_field_of_a_kernel_gives_only_data_errors(field, value):
    accepts(descriptor(**{field: value}))


leaf = st.fixed_dictionaries(
    {"fact": st.sampled_from(["head_dim", "dtype", "query.stride_last", "is_causal", "isa",
                              "causal_offset"]),
     "test": st.sampled_from(["eq", "ne", "le", "ge", "multiple_of", "in", "not_in", "present",
                              "absent", "has"]),
     "value": st.one_of(st.none(), st.booleans(), st.integers(-9, 300),
                        st.sampled_from(["float16", "avx2"]),
                        st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["float16", "bhsd"])),
                                 max_size=2)),
     "code": st.sampled_from(["SHAPE_UNSUPPORTED", "NO_SUCH"])},
    optional={"repair": st.sampled_from(["", "cast", "contiguous", "?"])})


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(leaf, st.fixed_dictionaries({"any_of": st.lists(leaf, max_size=2)}),
                          st.fixed_dictionaries({"when": leaf, "then": leaf})), max_size=2))
def test_rules_that_pass_can_be_checked_against_any_call(rules):
    data = descriptor(requires=rules)
    if accepts(data):
        facts = {"head_dim": 64, "dtype": "float16", "query.stride_last": 1, "is_causal": True,
                 "isa": ("avx2",),
                 "causal_offset": 0}
        for reason in apply(CATALOG, data).by_id["ours.fast"].reasons(facts):
            assert reason.code is Code.SHAPE_UNSUPPORTED


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_in_a_file_give_only_data_errors(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "junk.json"
    path.write_bytes(content)
    with pytest.raises(DataError):
        load(path, CATALOG)
