"""A reference may leave queries undefined that a causal mask leaves no key, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from layerzero.verify.trace.answers.lookup import answer
from layerzero.verify.trace.answers.references import References
from layerzero.verify.trace.answers.unseen import NOTE, queries_without_keys
from layerzero.verify.trace.definition import Definition
from layerzero.verify.trace.inputs import generate
from layerzero.verify.trace.mutation.mutate import mutate
from layerzero.verify.trace.run import verify

# the maximum is kept finite, the division is not
ATTEND = '''
def attend(s, v, lq, lk):
    s = s.masked_fill(torch.arange(lk) > torch.arange(lq)[:, None] + lk - lq, float("-inf"))
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(torch.isinf(m), 0.0, m))
    z = p.sum(-1, keepdim=True)
    return torch.einsum("hqk,khd->qhd", p / z, v), (m + z.log())[..., 0].T / 0.6931471805599453
'''
LOOP = '''
    lse = torch.full(q.shape[:2], float("-inf"))
    for i in range(len(qo_indptr) - 1):
        a, b, c, d = (int(t) for t in (*qo_indptr[i:i + 2], *kv_indptr[i:i + 2]))
        if a == b or c == d:
            continue
'''
RAGGED = ('''import torch
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    out = torch.zeros_like(q)''' + LOOP + '''
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[c:d].float()) * sm_scale
        o, lse[a:b] = attend(s, v[c:d].float(), b - a, d - c)
        out[a:b] = o.to(q.dtype)
    return out, lse
''' + ATTEND)
PAGED = ('''import torch
def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    out = torch.zeros_like(q)''' + LOOP + '''
        n = (d - c - 1) * k_cache.shape[1] + int(kv_last_page_len[i])
        pages = kv_indices[c:d].long()
        k, v = (t[pages].float().flatten(0, 1)[:n] for t in (k_cache, v_cache))
        o, lse[a:b] = attend(torch.einsum("qhd,khd->hqk", q[a:b].float(), k) * sm_scale, v, b - a, n)
        out[a:b] = o.to(q.dtype)
    return out, lse
''' + ATTEND)
LATENT = ('''import torch
def run(q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, sm_scale):
    q, out = q_nope, torch.zeros_like(q_nope)''' + LOOP + '''
        tokens = kv_indices[c:d].long()
        v, r = ckv_cache[tokens, 0].float(), kpe_cache[tokens, 0].float()
        s = (torch.einsum("qhd,kd->hqk", q[a:b].float(), v)
             + torch.einsum("qhd,kd->hqk", q_pe[a:b].float(), r)) * sm_scale
        o, lse[a:b] = attend(s, v[:, None].expand(-1, q.shape[1], -1), b - a, d - c)
        out[a:b] = o.to(q.dtype)
    return out, lse
''' + ATTEND)


def definition(op_type: str, axes: str, inputs: str, reference: str, total: str) -> dict:
    tensors = {name: {"dtype": dtype, "shape": shape.split(",") if shape else None}
               for name, dtype, shape in (
                   (part.partition(":")[0], *part.partition(":")[2].partition("/")[::2])
                   for part in inputs.split())}
    sizes = dict(axis.partition("=")[::2] for axis in axes.split())
    return {"name": f"{op_type}_prefill_causal", "op_type": op_type, "inputs": tensors,
            "axes": {a: {"type": "const", "value": int(v)} if v else {"type": "var"}
                     for a, v in sizes.items()},
            "outputs": {"output": {"dtype": "bfloat16", "shape": ["t", "h", "d"]},
                        "lse": {"dtype": "float32", "shape": ["t", "h"]}},
            "constraints": ["t == qo_indptr[-1].item()", f"{total} == kv_indptr[-1].item()"],
            "reference": reference}


INDPTR = "qo_indptr:int32/n kv_indptr:int32/n"
DEFINITIONS = {d["op_type"]: d for d in (
    definition("gqa_ragged", "t u n h=2 d=16", "q:bfloat16/t,h,d k:bfloat16/u,h,d v:bfloat16/u,h,d "
               f"{INDPTR} sm_scale:float32", RAGGED, "u"),
    definition("gqa_paged", "t n m b p page_size=4 h=2 d=16",
               "q:bfloat16/t,h,d k_cache:bfloat16/p,page_size,h,d v_cache:bfloat16/p,page_size,h,d "
               f"{INDPTR} kv_indices:int32/m kv_last_page_len:int32/b sm_scale:float32", PAGED, "m"),
    definition("mla_paged", "t n m p page_size=1 h=2 d=32 r=16",
               "q_nope:bfloat16/t,h,d q_pe:bfloat16/t,h,r ckv_cache:bfloat16/p,page_size,d "
               f"kpe_cache:bfloat16/p,page_size,r {INDPTR} kv_indices:int32/m sm_scale:float32",
               LATENT, "m"))}
kinds = pytest.mark.parametrize("kind", DEFINITIONS)


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Iterator[References]:
    with References([tmp_path_factory.getbasetemp()], timeout_s=60) as opened:
        yield opened


@pytest.fixture
def load(tmp_path):
    def loaded(kind: str, *edits: tuple[str, str], **changes) -> Definition:
        data = {**DEFINITIONS[kind], **changes}
        for old, new in edits:
            assert old in data["reference"]
            data["reference"] = data["reference"].replace(old, new)
        path = tmp_path / "definition.json"
        path.write_text(json.dumps(data))
        return Definition.load(path)
    return loaded


@kinds
def test_queries_without_keys_may_be_undefined(kind: str, load, references: References) -> None:
    report = verify(load(kind), references)
    assert report.passed and NOTE in report.detail, str(report)


@kinds
@pytest.mark.parametrize("edit", [
    ("p / z", "p / (z + (torch.arange(lq)[:, None] == lq - 1) * float('nan'))"),    # it has keys
    ("out[a:b] = o", "out[a:b + 1] = float('nan'); out[a:b] = o"),     # of the next sequence
    ("continue", "out[a:b] = float('nan'); continue"),                 # of one without keys
    ("continue", "lse[a:b] = float('nan'); continue")])
def test_nothing_else_may_be_undefined(kind: str, edit, load, references: References) -> None:
    report = verify(load(kind, edit), references)
    assert report.status == "failed", str(report)
    assert any("are NaN and finite here" in v.detail for c in report.comparisons for v in c.verdicts)


@kinds
@pytest.mark.parametrize("text", [
    "Queries without any visible keys give zeros.", "A fully masked row is 0 and its lse -inf.",
    "The output is zero where a query sees no keys."])
def test_a_text_that_says_what_they_give_is_kept(kind: str, text: str, load,
                                                 references: References) -> None:
    assert verify(load(kind, description=text), references).status == "failed"
    zeros = (("p / z", "p / z.clamp(min=1e-30)"),)
    report = verify(load(kind, *zeros, description=text), references)
    assert report.passed and NOTE not in report.detail, str(report)


@kinds
def test_a_reference_that_says_what_they_give_is_kept(kind: str, load,
                                                      references: References) -> None:
    right = ("p / z", "torch.nan_to_num(p / z)")
    assert NOTE not in verify(load(kind, right), references).detail
    wrong = ("p / z", "torch.nan_to_num(p) / z")
    assert verify(load(kind, wrong), references).status == "failed"


@kinds
def test_which_queries_they_are(kind: str) -> None:
    made = Definition.from_json(DEFINITIONS[kind])
    inputs, reply = generate(made), answer(made)
    rows = queries_without_keys(reply, inputs)
    assert rows is not None
    queries = inputs["qo_indptr"].diff().tolist()
    keys = inputs["kv_indptr"].diff().tolist()
    if kind == "gqa_paged":
        keys = [4 * (n - 1) + int(last) if n else 0
                for n, last in zip(keys, inputs["kv_last_page_len"])]
    want = [i < q - k for q, k in zip(queries, keys) for i in range(q)]
    has_keys = [k > 0 for q, k in zip(queries, keys) for _ in range(q)]
    assert torch.equal(rows, torch.tensor(want) & torch.tensor(has_keys)) and 0 in keys
    assert queries_without_keys(reply, generate(made, "medium")) is None


def test_mutants_are_held_to_what_the_unchanged_reference_gives(load, references) -> None:
    report = mutate(load("gqa_ragged"), references, limit=12)
    assert not report.skipped and report.counts["killed"] >= 6, report
