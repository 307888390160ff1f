"""A call written down and made again is the same kind of call."""

from __future__ import annotations

import json

import pytest
import torch

import layerzero as lz
from layerzero.dispatch import facts
from layerzero.files.calls import read_calls, write_calls
from layerzero.operate import calls
from layerzero.perf.record import kind_of
from layerzero.spec.call import Call, TensorSpec
from layerzero.world import snapshot as worlds

OPS = worlds.current().catalog.ops


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if op.read is None])
def test_round_trip_keeps_the_kind_of_every_case(name):
    op = OPS[name]
    for case in op.cases[:12]:
        values = {p.name: v for p in op.params
                  for v in [op.inputs(**case, dtype=torch.float32, device="cpu",
                                      seed=0).get(p.name, p.default)]}
        try:
            before = facts.read(op, values)
        except lz.errors.InvalidCall:
            continue
        call = calls.describe(op, values)
        again = Call.from_json(json.loads(json.dumps(call.to_json())))
        assert again == call
        remade = calls.make_values(op, again)
        after = facts.read(op, remade)
        assert kind_of(op, after) == kind_of(op, before)
        for p in op.params:
            if isinstance(values[p.name], torch.Tensor):
                assert (remade[p.name].shape == values[p.name].shape
                        and remade[p.name].dtype == values[p.name].dtype)
                if not remade[p.name].is_contiguous():
                    assert remade[p.name].stride() == values[p.name].stride()


@pytest.mark.parametrize("large, period", [(1000, 997), (32, 29), (16, 13)])
def test_made_twice_is_equal_and_another_seed_differs(large, period, monkeypatch):
    monkeypatch.setattr(calls, "LARGE", large)
    monkeypatch.setattr(calls, "PERIOD", period)
    op = OPS["rms_norm"]
    call = Call("rms_norm",
                {"x": TensorSpec((4, 8), "float32"), "weight": TensorSpec((8,), "float32")})
    a, b, c = (calls.make_values(op, call, seed=s)["x"] for s in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c) and a.std() > 0.1
    assert len(torch.unique(a, dim=0)) == 4    # repeated numbers make no repeated rows


def test_expanded_tensor_keeps_its_stride():
    k = torch.randn(1, 2, 1, 5, 8).expand(1, 2, 3, 5, 8)
    spec = calls._describe_tensor(k)
    tensor = calls._make_tensor(spec, "cpu", torch.Generator())
    assert tensor.stride() == k.stride() and torch.equal(tensor[:, :, 0], tensor[:, :, 2])


def test_many_whole_numbers_are_kept_as_their_range():
    ids = torch.arange(70_000) % 500
    spec = calls._describe_tensor(ids)
    assert spec.values is None and spec.below == 500
    tensor = calls._make_tensor(spec, "cpu", torch.Generator().manual_seed(0))
    assert tensor.max() < 500 and tensor.min() >= 0 and tensor.dtype == torch.int64


def test_file(tmp_path):
    some = (Call("rms_norm", {"input": TensorSpec((4, 8), "float32")}, count=7, name="x"),
            Call("attention", case={"batch": 1}, dtype="bfloat16", grad=True))
    write_calls(tmp_path / "calls.jsonl", some)
    assert read_calls(tmp_path / "calls.jsonl") == some


@pytest.mark.parametrize("line, message", [
    ("{", "calls.jsonl:1"),
    ('{"op": 3}', "op"),
    ('{"op": "a", "count": 0}', "count"),
    ('{"op": "a", "colour": 1}', "colour"),
    ('{"op": "a", "arguments": {"x": {"shape": [2], "dtype": "f", "values": [1]}}}',
     "wanted 2 values"),
    ('{"op": "a", "arguments": {"x": {"shape": [-2], "dtype": "f"}}}', "shape"),
    ('{"op": "a", "arguments": {"x": [1]}}',
     r"arguments\.x: wanted an object or .* null, got \[1\]"),
])
def test_a_broken_file_says_where(tmp_path, line, message):
    path = tmp_path / "calls.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(lz.errors.DataError, match=message):
        read_calls(path)


def test_objects_cannot_be_written_down():
    op = OPS["tokenize"]
    with pytest.raises(lz.errors.DataError, match="cannot be written down"):
        calls.describe(op, {p.name: object() if p.kind == "object" else p.default
                            for p in op.params})


def test_a_filter_that_is_on_is_another_kind_of_call_and_a_seed_is_not():
    def family(**by) -> str:
        op = lz.op("sample")
        inputs = {**{p.name: p.default for p in op.params}, "logits": torch.zeros(2, 300), **by}
        return kind_of(op, facts.read(op, inputs)).family

    plain = family()
    assert family(temperature=0.7) == plain == family(offset=3)
    assert family(seed=1) == family(seed=12345, offset=99) != plain
    filters = [family(top_p=0.9), family(top_p=0.0), family(min_p=0.1), family(temperature=0.0),
               family(top_k=50)]
    assert len({plain, *filters}) == 6
    assert family(top_p=0.5) == family(top_p=0.9)
