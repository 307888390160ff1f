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
GROUPED = '''import torch
def run(routing_logits, routing_bias, hidden_states, gemm1_weights, gemm2_weights,
        local_expert_offset, routed_scaling_factor):
    s = routing_logits.float().sigmoid()
    c = s + routing_bias.float()
    worth = c.view(-1, 4, 4).topk(2).values.sum(-1)
    kept = torch.zeros_like(worth).scatter(1, worth.topk(2).indices, 1.0).repeat_interleave(4, 1)
    ids = c.masked_fill(kept == 0, float("-inf")).topk(3).indices
    w = s.gather(1, ids)
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * routed_scaling_factor
    x, out = hidden_states.float(), torch.zeros(hidden_states.shape)
    for t in range(len(x)):
        for weight, e in zip(w[t], ids[t] - local_expert_offset):
            if 0 <= e < len(gemm1_weights):
                up, gate = (gemm1_weights[e].float() @ x[t]).chunk(2)
                hidden = torch.nn.functional.silu(gate) * up
                out[t] += weight * (gemm2_weights[e].float() @ hidden)
    return out.to(hidden_states.dtype)
'''
BLOCKS = '''import torch
def run(A, B, a_scale, b_scale):
    C = torch.zeros(len(A), len(B), dtype=torch.float32)
    for i in range(A.shape[1] // 128):
        at = slice(128 * i, 128 * i + 128)
        part = A[:, at].float() @ B[:, at].float().T
        C += part * a_scale[:, i, None] * b_scale[:, i].repeat_interleave(128)
    return C.to(torch.bfloat16)
'''
PREFILL = '''import math, torch
def run(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -float("inf"))
    for i in range(len(qo_indptr) - 1):
        a, b, c, d = (int(t) for t in (*qo_indptr[i:i + 2], *kv_indptr[i:i + 2]))
        if a == b or c == d:
            continue
        n = (d - c - 1) * k_cache.shape[1] + int(kv_last_page_len[i])
        k, v = (t[kv_indices[c:d].long()].float().flatten(0, 1)[:n].repeat_interleave(2, 1)
                for t in (k_cache, v_cache))
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), k) * sm_scale
        seen = torch.arange(n) <= torch.arange(b - a)[:, None] + n - (b - a)
        s = s.masked_fill(~seen, -float("inf"))
        lse[a:b] = s.logsumexp(-1).T / math.log(2.0)
        out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1).nan_to_num(0.0), v).to(q.dtype)
    return out, lse
'''
SPARSE = '''import torch
def run(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    c, r = ckv_cache.flatten(0, 1).float(), kpe_cache.flatten(0, 1).float()
    out, lse = torch.zeros_like(q_nope), torch.full(q_nope.shape[:2], float("-inf"))
    for t, row in enumerate(sparse_indices):
        at = row[row != -1].long()
        if len(at) == 0:
            continue
        s = (q_nope[t].float() @ c[at].T + q_pe[t].float() @ r[at].T) * sm_scale
        lse[t] = s.logsumexp(-1) / 0.6931471805599453
        out[t] = (s.softmax(-1) @ c[at]).to(out.dtype)
    return out, lse
'''
STEP = '''import torch
def run(state, x, dt, A, B, C, D, dt_bias, state_batch_indices):
    ratio = x.shape[1] // B.shape[1]
    b, c = (t.float().repeat_interleave(ratio, 1) for t in (B, C))
    step = torch.nn.functional.softplus(dt.float() + dt_bias.float())
    states, out = state.clone(), torch.zeros(x.shape)
    for i in range(len(x)):
        slot = int(state_batch_indices[i])
        if slot < 0:
            continue
        s = states[slot].float() * torch.exp(A.float() * step[i][..., None])
        s = s + (step[i] * x[i].float())[..., None] * b[i][:, None]
        states[slot] = s.to(state.dtype)
        out[i] = (s * c[i][:, None]).sum(-1) + x[i].float() * D.float()
    return out.to(x.dtype), states
'''
NUCLEUS = '''import torch
def run(probs, top_k, top_p):
    out = torch.empty(len(probs), dtype=torch.int64)
    for i, row in enumerate(probs):
        k, p = int(top_k[i]), float(top_p[i])
        ranked, ids = row.sort(descending=True, stable=True)
        if 0 < k < len(row):
            ranked[k:] = 0.0
        ranked = ranked / ranked.sum()
        if p < 1.0:
            ranked[1:][ranked.cumsum(0)[:-1] > p] = 0.0
        out[i] = ids[torch.multinomial(ranked, 1)[0]]
    return out
'''
ROTATED = '''import torch
def run(q, k, cos_sin_cache, positions):
    cos, sin = (t[:, None] for t in cos_sin_cache[positions.long()].chunk(2, -1))
    def rotate(t):
        a, b = t[..., :8].float(), t[..., 8:16].float()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, t[..., 16:].float()), -1)
    return rotate(q).to(q.dtype), rotate(k).to(k.dtype)
'''
SUMMED = '''import torch
def run(hidden_states, residual, weight):
    x = hidden_states.float() + residual.float()
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    return y.to(hidden_states.dtype)
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
              "probs:float32[b,v] uniform_samples:float32[b]", "samples:int32[b]", INVERSE),
    described("grouped", "moe", "DeepSeek routing: 4 groups, 2 of them kept, top 3.",
              "t num_experts=16 num_local_experts=8 h=32 i=16 ii=32 top_k=3 n_group=4 topk_group=2",
              "routing_logits:float32[t,num_experts] routing_bias:bfloat16[num_experts] "
              "hidden_states:bfloat16[t,h] gemm1_weights:bfloat16[num_local_experts,ii,h] "
              "gemm2_weights:bfloat16[num_local_experts,h,i] local_expert_offset:int32 "
              "routed_scaling_factor:float32", "out:bfloat16[t,h]", GROUPED),
    described("blocks", "gemm", "A scale for each block.", "M N=256 K=4096 nb=2 kb=32",
              "A:float8_e4m3fn[M,K] B:float8_e4m3fn[N,K] a_scale:float32[M,kb] "
              "b_scale:float32[nb,kb]", "C:bfloat16[M,N]", BLOCKS),
    described("prefill", "gqa_paged", "Causal. lse is 2-based.",
              "t n m p b page_size=4 h=4 kv_heads=2 d=16",
              "q:bfloat16[t,h,d] k_cache:bfloat16[p,page_size,kv_heads,d] "
              "v_cache:bfloat16[p,page_size,kv_heads,d] qo_indptr:int32[n] kv_indptr:int32[n] "
              "kv_indices:int32[m] kv_last_page_len:int32[b] sm_scale:float32",
              "out:bfloat16[t,h,d] lse:float32[t,h]", PREFILL, "t == qo_indptr[-1].item()",
              "m == kv_indptr[-1].item()"),
    described("sparse", "dsa_paged", "lse is 2-based.", "t p page_size=4 h=2 d=32 r=16 topk=48",
              "q_nope:bfloat16[t,h,d] q_pe:bfloat16[t,h,r] ckv_cache:bfloat16[p,page_size,d] "
              "kpe_cache:bfloat16[p,page_size,r] sparse_indices:int32[t,topk] sm_scale:float32",
              "out:bfloat16[t,h,d] lse:float32[t,h]", SPARSE),
    described("step", "mamba_ssu", "", "b pool h=4 d=8 s=16 g=2",
              "state:bfloat16[pool,h,d,s] x:bfloat16[b,h,d] dt:bfloat16[b,h,d] A:float32[h,d,s] "
              "B:bfloat16[b,g,s] C:bfloat16[b,g,s] D:float32[h,d] dt_bias:float32[h,d] "
              "state_batch_indices:int32[b]", "out:bfloat16[b,h,d] new_state:bfloat16[pool,h,d,s]",
              STEP),
    described("nucleus", "sampling", "Top-k first, then top-p.", "b v=300",
              "probs:float32[b,v] top_k:int32[b] top_p:float32[b]", "samples:int64[b]", NUCLEUS),
    described("rotated", "rope", "NeoX style.", "t max_seq_len h=2 d=24 rd=16",
              "q:bfloat16[t,h,d] k:bfloat16[t,h,d] cos_sin_cache:float32[max_seq_len,rd] "
              "positions:int64[t]", "q_out:bfloat16[t,h,d] k_out:bfloat16[t,h,d]", ROTATED),
    described("summed", "rmsnorm", "Epsilon is 1e-6.", "t h=128",
              "hidden_states:bfloat16[t,h] residual:bfloat16[t,h] weight:bfloat16[h]",
              "out:bfloat16[t,h]", SUMMED))}

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
                ("uniform_samples.double()", "(1 - uniform_samples.double())")),
    "grouped": (('float("-inf")', "0.0"), (".topk(2).values.sum(-1)", ".amax(-1)"),
                ("w = s.gather", "w = c.gather"), (" * routed_scaling_factor", ""),
                (" - local_expert_offset", ""), ("1e-20", "1e-6"), ("worth = c", "worth = s"),
                ("c.masked_fill(kept == 0, float(\"-inf\"))", "(c * kept)"),
                ("up, gate =", "gate, up =")),
    "blocks": (("dtype=torch.float32", "dtype=torch.bfloat16"), ("// 128):", "// 128 - 1):"),
               ("a_scale[:, i, None]", "a_scale[:, 0, None]"), (" * a_scale[:, i, None]", ""),
               ("repeat_interleave(128)", "repeat(128)")),
    "prefill": (("<= torch", "< torch"), (" + n - (b - a)", ""), (" + n - (b - a)", " + n"),
                (" * sm_scale", ""), (" * sm_scale", " / math.sqrt(q.shape[-1])"),
                (" / math.log(2.0)", ""), ("repeat_interleave(2, 1)", "repeat(1, 2, 1)"),
                ("int(kv_last_page_len[i])", "k_cache.shape[1]"), (".softmax(-1)", ".softmax(1)")),
    "sparse": (("row != -1", "row > 0"), ("row[row != -1]", "row[:int((row != -1).sum())]"),
               (" + q_pe[t].float() @ r[at].T", ""), ("row[row != -1]", "row[row != -1][:-1]"),
               ("flatten(0, 1).float(), kpe", "transpose(0, 1).flatten(0, 1).float(), kpe")),
    "step": (("slot < 0", "slot <= 0"), ("continue", "slot = 0"), (" * D.float()", ""),
             ("x[i].float() * D", "step[i] * x[i].float() * D"), (" + dt_bias.float()", ""),
             ("repeat_interleave(ratio, 1)", "repeat(1, ratio, 1)"),
             ("torch.nn.functional.softplus", "torch.relu"), ("for t in (B, C)", "for t in (C, B)"),
             ("states[slot] = s.to(state.dtype)", "pass"), ("torch.exp(A", "torch.exp2(A")),
    "nucleus": (("if p < 1.0", "if p < 0.95"), ("ranked[k:]", "ranked[k + 1:]"),
                ("[1:][ranked.cumsum(0)[:-1] > p]", "[1:][ranked.cumsum(0)[1:] > p]"),
                ("        ranked = ranked / ranked.sum()\n", ""), ("if 0 < k", "if 1 < k"),
                ("row.sort(", "row.bfloat16().float().sort("),
                ("multinomial(ranked", "multinomial(ranked.sqrt()"), ("top_p[i]", "top_p[0]")),
    "rotated": (("a * cos - b * sin", "a * cos + b * sin"), ("cos, sin =", "sin, cos ="),
                ("positions.long()", "positions.long().clamp(max=len(cos_sin_cache) - 2)"),
                ("positions.long()", "positions.long() - 1"), ("rotate(k).to", "k.to"),
                ("t[..., :8].float(), t[..., 8:16]", "t[..., 0:16:2].float(), t[..., 1:16:2]")),
    "summed": (("1e-6", "1e-5"), (" + 1e-6)", ") + 1e-6"), (" + 1e-6", ".clamp(min=1e-6)"),
               (" + residual.float()", ""), ("x.pow(2)", "x.sub(x.mean(-1, keepdim=True)).pow(2)"),
               (".mean(-1, keepdim=True) +", ".sum(-1, keepdim=True) / (x.shape[-1] - 1) +"))}
# what differs by roundings alone, which the report says
ROUNDED = {
    "blocks": ("A[:, at].float() @ B[:, at].float().T", "(A[:, at].bfloat16() @ B[:, at].bfloat16().T)"),
    "prefill": (".softmax(-1)", ".softmax(-1).bfloat16().float()"),
    "delta": ("S, out = states[slots]", "S, out = states[slots].bfloat16().float()")}


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


@pytest.mark.parametrize("name", ROUNDED)
def test_roundings_are_no_mistake_and_are_told(name: str, load, references: References) -> None:
    old, new = ROUNDED[name]
    code = RIGHT[name]["reference"]
    assert old in code
    report = verify(load(RIGHT[name], reference=code.replace(old, new)), references)
    assert report.passed and "rounds in between" in report.detail, str(report)


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
