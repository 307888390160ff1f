"""Right references in several styles pass, and with one mistake each they do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from layerzero.verify.trace.answers import draws
from layerzero.verify.trace.answers.lookup import answer, answers
from layerzero.verify.trace.answers.references import References
from layerzero.verify.trace.definition import Definition
from layerzero.verify.trace.inputs import drawn, generate
from layerzero.verify.trace.readings import Unmapped
from layerzero.verify.trace.run import verify
from layerzero.verify.trace.statements import BASES, CAUSAL, GATE, Statement, said

PAGES = '''import torch
def run(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale, k_scale, v_scale,
        soft_cap):
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("-inf"))
    size = k_cache.shape[1]
    for i in range(len(q)):
        pages = kv_indices[kv_indptr[i]:kv_indptr[i + 1]].long()
        if len(pages) == 0:
            continue
        n = size * (len(pages) - 1) + int(kv_last_page_len[i])
        k = (k_cache[pages].float() * k_scale).flatten(0, 1)[:n].repeat_interleave(2, 1)
        v = (v_cache[pages].float() * v_scale).flatten(0, 1)[:n].repeat_interleave(2, 1)
        s = torch.einsum("hd,khd->hk", q[i].float(), k) * sm_scale
        s = soft_cap * torch.tanh(s / soft_cap)
        lse[i] = s.logsumexp(-1) / 0.6931471805599453
        out[i] = torch.einsum("hk,khd->hd", s.softmax(-1), v).to(q.dtype)
    return out, lse
'''
SLOPES = '''import torch
def run(q, k, v, cu_seqlens, alibi_slopes):
    out = torch.zeros_like(q)
    for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[a:b].float()) / 4.0
        at = torch.arange(b - a)
        s = s + alibi_slopes[:, None, None] * (at[None] - at[:, None])
        s = s.masked_fill(at[None] > at[:, None], float("-inf"))
        out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1), v[a:b].float()).to(q.dtype)
    return out
'''
DELTA = '''import torch
def run(q, k, v, states, state_indices, A_log, a, dt_bias, b, scale):
    q, k = (t.float() * torch.rsqrt((t.float() ** 2).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    g = torch.exp(-A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias))
    beta, slots, pool = b.float().sigmoid(), state_indices.long(), states.clone()
    S, out = states[slots], []
    for i in range(q.shape[1]):
        S = S * g[:, i, :, None, None]
        error = v[:, i].float() - torch.einsum("bhvk,bhk->bhv", S, k[:, i])
        S = S + torch.einsum("bhv,bhk->bhvk", beta[:, i, :, None] * error, k[:, i])
        out.append(torch.einsum("bhvk,bhk->bhv", S, q[:, i]) * scale)
    pool[slots] = S
    return torch.stack(out, 1).to(v.dtype), pool
'''
PRODUCT = '''import torch
def run(A, B, a_scale, b_scale):
    return (A.float() @ B.float().T * (a_scale * b_scale)).to(torch.bfloat16)
'''
EXPERTS = '''import torch
def run(routing_logits, hidden_states, w_gate_up, w_down):
    s = routing_logits.softmax(-1)
    worth = s.view(-1, 4, 4).amax(-1)
    kept = torch.zeros_like(worth).scatter(1, worth.topk(2).indices, 1.0)
    w, ids = (s * kept.repeat_interleave(4, 1)).topk(3)
    x, out = hidden_states.float(), torch.zeros(hidden_states.shape)
    for t in range(len(x)):
        for weight, e in zip(w[t], ids[t]):
            gate, up = (w_gate_up[e].float() @ x[t]).chunk(2)
            out[t] += weight * (w_down[e].float() @ (torch.nn.functional.gelu(gate) * up))
    return out.to(hidden_states.dtype)
'''
INVERSE = '''import torch
def run(probs, uniform_samples):
    upper = probs.double().cumsum(-1)
    return (upper <= uniform_samples.double()[:, None] * upper[:, -1:]).sum(-1).to(torch.int32)
'''


def described(name: str, op_type: str, text: str, axes: str, inputs: str, outputs: str,
              reference: str, *constraints: str) -> dict:
    """`axes`: "n=4 m"; tensors: "x:bfloat16[n,m] y:float32"."""
    def tensors(line: str) -> dict:
        parts = [part.rstrip("]").partition(":") for part in line.split()]
        pairs = [(tensor, *kind.partition("[")[::2]) for tensor, _, kind in parts]
        return {tensor: {"dtype": dtype, "shape": shape.split(",") if shape else None}
                for tensor, dtype, shape in pairs}

    sizes = dict(axis.partition("=")[::2] for axis in axes.split())
    return {"name": name, "op_type": op_type, "description": text, "constraints": [*constraints],
            "axes": {a: {"type": "const", "value": int(v)} if v else {"type": "var"}
                     for a, v in sizes.items()},
            "inputs": tensors(inputs), "outputs": tensors(outputs), "reference": reference}


RIGHT = {d["name"]: d for d in (
    described("pages", "gqa_paged", "Decode. lse is 2-based.",
              "b n m p page_size=4 h=4 kv_heads=2 d=16",
              "q:bfloat16[b,h,d] k_cache:bfloat16[p,page_size,kv_heads,d] "
              "v_cache:bfloat16[p,page_size,kv_heads,d] "
              "kv_indptr:int32[n] kv_indices:int32[m] kv_last_page_len:int32[b] sm_scale:float32 "
              "k_scale:float32 v_scale:float32 soft_cap:float32",
              "out:bfloat16[b,h,d] lse:float32[b,h]", PAGES, "n == b + 1",
              "m == kv_indptr[-1].item()"),
    described("slopes", "mha_ragged", "Causal attention with ALiBi.", "t n h=4 d=16",
              "q:bfloat16[t,h,d] k:bfloat16[t,h,d] v:bfloat16[t,h,d] cu_seqlens:int32[n] "
              "alibi_slopes:float32[h]", "out:bfloat16[t,h,d]", SLOPES,
              "t == cu_seqlens[-1].item()"),
    described("delta", "gdn", "q and k are L2-normalised. The pool of k-last states is updated.",
              "b t=3 h=2 d=16 pool", "q:bfloat16[b,t,h,d] k:bfloat16[b,t,h,d] v:bfloat16[b,t,h,d] "
              "states:float32[pool,h,d,d] state_indices:int32[b] A_log:float32[h] "
              "a:bfloat16[b,t,h] dt_bias:float32[h] b:bfloat16[b,t,h] scale:float32",
              "out:bfloat16[b,t,h,d] new_states:float32[pool,h,d,d]", DELTA),
    described("product", "gemm", "One scale for each side.", "M N=24 K=32",
              "A:float8_e4m3fn[M,K] B:float8_e4m3fn[N,K] a_scale:float32 b_scale:float32",
              "C:bfloat16[M,N]", PRODUCT),
    described("experts", "moe", "Softmax, 4 groups, 2 of them kept by their best expert, top 3, "
              "not renormalised, GeGLU.", "t e=16 h=32 i=16 ii=32 top_k=3 n_group=4 topk_group=2",
              "routing_logits:float32[t,e] hidden_states:bfloat16[t,h] w_gate_up:bfloat16[e,ii,h] "
              "w_down:bfloat16[e,h,i]", "out:bfloat16[t,h]", EXPERTS),
    described("inverse", "sampling", "Inverse CDF.", "b v=300",
              "probs:float32[b,v] uniform_samples:float32[b]", "samples:int32[b]", INVERSE))}

MISTAKES = {
    "pages": (("* v_scale", "* k_scale"), ("* k_scale", ""), (" * sm_scale", ""),
              ("soft_cap * torch.tanh(s / soft_cap)", "s"), (".long()\n", ".long().sort().values\n"),
              ("soft_cap * torch.tanh(s / soft_cap)", "s.clamp(-soft_cap, soft_cap)"),
              (" / 0.6931471805599453", ""), ("repeat_interleave(2, 1)", "repeat(1, 2, 1)")),
    "slopes": (("s + alibi", "s - alibi"), ("(at[None] - at[:, None])", "0"),
               ("at[None] > at[:, None]", "at[None] >= at[:, None] + 2")),
    "delta": (("* torch.rsqrt((t.float() ** 2).sum(-1, keepdim=True) + 1e-6)", "* 1.0"),
              ("pool[slots] = S", "pass"), ("for t in (q, k))", "for t in (q, k)); k = k * 1.1"),
              ("+ dt_bias", ""), ("S = S * g[:, i, :, None, None]", "S = S * g[:, 0, :, None, None]"),
              ("beta[:, i, :, None] * error", "error"), ("-A_log.exp()", "-(-A_log).exp()")),
    "product": (("a_scale * b_scale", "a_scale * a_scale"), ("a_scale * b_scale", "b_scale")),
    "experts": (("amax(-1)", "topk(2).values.sum(-1)"), ("gelu", "silu"), ("topk(3)", "topk(2)"),
                ("worth.topk(2)", "worth.topk(1)"), ("gate, up =", "up, gate ="),
                ("out[t] += weight *", "out[t] += weight / w[t].sum() *")),
    "inverse": ((".sum(-1)", ".sum(-1).sub(1).clamp(min=0)"),
                ("uniform_samples.double()", "(1 - uniform_samples.double())"))}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Iterator[References]:
    with References([tmp_path_factory.getbasetemp()], timeout_s=60) as opened:
        yield opened


@pytest.fixture
def load(tmp_path):
    def loaded(data: dict, **changes) -> Definition:
        path = tmp_path / "definition.json"
        path.write_text(json.dumps({**data, **changes}))
        return Definition.load(path)
    return loaded


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_reference_passes(name: str, load, references: References) -> None:
    report = verify(load(RIGHT[name]), references)
    assert report.passed, str(report)


@pytest.mark.parametrize(("name", "old", "new"), [
    (name, *edit) for name, edits in MISTAKES.items() for edit in edits])
def test_a_mistake_shows(name: str, old: str, new: str, load, references: References) -> None:
    code = RIGHT[name]["reference"]
    assert old in code
    report = verify(load(RIGHT[name], reference=code.replace(old, new)), references)
    assert report.status in ("failed", "disputed"), str(report)


# texts

def of_text(description: str = "", name: str = "named", tensor: str = "") -> Definition:
    data = {**RIGHT["pages"], "name": name, "description": description}
    lse = {**data["outputs"]["lse"], "description": tensor}
    return Definition.from_json({**data, "outputs": {**data["outputs"], "lse": lse}})


@pytest.mark.parametrize(("rules", "text", "value"), [
    (CAUSAL, "Causal mask is not applied.", False), (CAUSAL, "bidirectional encoder", False),
    (CAUSAL, "non-causal", False), (CAUSAL, "Causal.", True), (BASES, "natural LSE", "e"),
    (BASES, "base two", "2"), (GATE, "[up; gate]", False), (GATE, "the gate comes first", True)])
def test_text_is_read(rules, text: str, value) -> None:
    statement = said(of_text(text), rules)
    assert statement is not None and statement.value == value


def test_a_text_that_compares_values_gives_way_to_a_plain_one() -> None:
    both = "Not a natural LSE: lse is of base 2."
    assert said(of_text(both, tensor="2-based"), BASES, "lse") == Statement(
        "2", "the description of lse says")
    assert said(of_text("base 2", tensor="natural log"), BASES, "lse") == Statement(
        "2", "its description says", ("the description of lse says", "e"))


def test_what_tells_variants_apart_says_nothing() -> None:
    assert said(of_text(name="decode__lse_natural"), BASES) is None
    assert said(of_text(name="decode_lse_natural"), BASES) == Statement("e", "its name says")


def test_a_capacity_of_experts_is_not_answered() -> None:
    data = {**RIGHT["experts"], "description": "Top 3 with a capacity of 2 tokens."}
    with pytest.raises(Unmapped, match="capacity"):
        answers(Definition.from_json(data))


# inputs

def test_pages_are_out_of_order_and_their_last_is_partly_used() -> None:
    definition = Definition.from_json(RIGHT["pages"])
    for seed in range(5):
        inputs = generate(definition, seed=seed)
        bounds = inputs["kv_indptr"].tolist()
        assert bounds[2] - bounds[1] == 0 and bounds[-1] - bounds[-2] >= 35     # the longest
        for i, (a, b) in enumerate(pairwise(bounds)):
            assert b - a < 2 or inputs["kv_indices"][a] > inputs["kv_indices"][b - 1]
            assert inputs["kv_last_page_len"][i] < 4 or i == len(bounds) - 2


def test_sequences_are_counted_by_any_axis() -> None:
    data = described("varlen", "mha_ragged", "Causal.", "t u n m h=2 d=8",
                     "q:bfloat16[t,h,d] k:bfloat16[u,h,d] v:bfloat16[u,h,d] cu_seqlens_q:int32[n] "
                     "cu_seqlens_k:int32[m]", "out:bfloat16[t,h,d]",
                     "def run(q, k, v, cu_seqlens_q, cu_seqlens_k):\n    return q\n",
                     "t == cu_seqlens_q[-1].item()", "u == cu_seqlens_k[-1].item()")
    inputs = generate(Definition.from_json(data))
    assert len(inputs["cu_seqlens_q"]) == len(inputs["cu_seqlens_k"]) == 5
    paged = generate(Definition.from_json(RIGHT["pages"]))
    assert len(paged["q"]) == len(paged["kv_last_page_len"]) == len(paged["kv_indptr"]) - 1 == 4


def test_scalars_differ_and_a_cap_is_within_reach() -> None:
    inputs = generate(Definition.from_json(RIGHT["product"]))
    assert inputs["a_scale"] != inputs["b_scale"]
    definition = Definition.from_json(RIGHT["pages"])
    assert generate(definition)["soft_cap"] == 5.0
    constant = {**RIGHT["pages"], "description": "logits soft cap of 50.0"}
    assert drawn.towards_cap(Definition.from_json(constant)) == drawn.MAX_LOGITS
    assert drawn.towards_cap(Definition.from_json(RIGHT["slopes"])) == 1.0


def test_uniform_numbers_lie_between_the_edges_of_tokens() -> None:
    inputs = generate(Definition.from_json(RIGHT["inverse"]))
    upper = inputs["probs"].double().cumsum(-1) / inputs["probs"].double().sum(-1, keepdim=True)
    gap = (upper - inputs["uniform_samples"].double()[:, None]).abs().amin(-1)
    picked = (upper <= inputs["uniform_samples"].double()[:, None]).sum(-1, keepdim=True)
    assert bool((gap > 0.4 * inputs["probs"].gather(1, picked)[:, 0]).all())


def test_a_filter_is_zero_where_the_reference_speaks_of_that() -> None:
    data = described("both", "sampling", "", "b v=300", "probs:float32[b,v] top_k:int32[b] "
                     "top_p:float32[b]", "samples:int64[b]",
                     "def run(probs, top_k, top_p):\n    return probs.argmax(-1)\n")
    silent = generate(Definition.from_json(data))
    assert bool((silent["top_k"] > 0).all()) and bool((silent["top_p"] > 0).all())
    guarded = generate(Definition.from_json({**data, "reference": (
        "def run(probs, top_k, top_p):\n    assert (top_k >= 0).all()\n    return probs.argmax(-1)\n")}))
    assert bool((guarded["top_k"] == 0).any()) and bool((guarded["top_p"] == 0).any())


def test_of_equal_tokens_any_may_be_kept() -> None:
    data = described("top", "sampling", "", "b v=4", "probs:float32[b,v] top_k:int32[b]",
                     "samples:int64[b]", "def run(probs, top_k):\n    return probs.argmax(-1)\n")
    reply = answer(Definition.from_json(data))
    inputs = {"probs": torch.tensor([[0.4, 0.25, 0.25, 0.1]]), "top_k": torch.tensor([2])}
    for token, possible in ((0, True), (1, True), (2, True), (3, False)):
        assert draws.possible(reply, inputs, torch.tensor([token])).passed == possible


def test_groups_are_chosen_otherwise_by_their_best_and_by_a_sum() -> None:
    logits = generate(Definition.from_json(RIGHT["experts"]))["routing_logits"]
    groups = logits.softmax(-1).view(-1, 4, 4)
    best, summed = groups.amax(-1).topk(2).indices, groups.topk(2).values.sum(-1).topk(2).indices
    assert any({*a} != {*b} for a, b in zip(best.tolist(), summed.tolist()))


def test_filters_decide_between_tokens_that_16_bits_do_not_tell_apart() -> None:
    definition = Definition.from_json(described(
        "top", "sampling", "", "b v=300", "probs:float32[b,v] top_k:int32[b]", "samples:int64[b]",
        "def run(probs, top_k):\n    return probs.argmax(-1)\n"))
    for seed in range(3):
        inputs = generate(definition, seed=seed)
        for row, k in ((0, 1), (3, 2)):
            probs = inputs["probs"][row]
            kept, dropped = probs.topk(k + 1).indices[-2:].tolist()
            assert inputs["top_k"][row] == k and probs[kept] > probs[dropped]
            assert probs.bfloat16()[kept] == probs.bfloat16()[dropped]
            assert (kept > dropped) == (row == 0)


def test_the_first_and_the_last_expert_count() -> None:
    data = {**RIGHT["experts"], "reference": "import torch\n" + RIGHT["experts"]["reference"].replace(
        "softmax(-1)", "sigmoid()")}
    scores = generate(Definition.from_json(data))["routing_logits"].sigmoid()
    chosen = scores.max(-1)
    assert {0, 15} <= {int(e) for e, s in zip(chosen.indices, chosen.values) if s > 0.5}
    assert float(scores[-1].sum()) < 1e-4
