"""Baked choices: the same results as the op itself, nothing looked up, and what was not baked for
is said.
"""

from __future__ import annotations

import json

import pytest
import torch
from helpers import Fake, events_of, qkv, register
from torch import Tensor, nn

import layerzero as lz
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.spec.errors import ConfigError, DataError, NamedKernelRefused
from layerzero.spec.event import PlanMissed, Selected
from layerzero.spec.reason import Code
from layerzero.spec.rules import at_most
from layerzero.world import snapshot as worlds


class Block(nn.Module):
    """Norm, attention and a residual, a few times over."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.layers, self.heads = layers, heads
        self.norm = nn.Parameter(torch.rand(width))
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            h = lz.rms_norm(x, self.norm)
            q, k, v = self.project(h).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            x = x + lz.attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x


def close(got, want) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# bind

BOUND = {
    "plain": ("attention", lambda: (qkv(8), {})),
    "causal": ("attention", lambda: (qkv(8), {"is_causal": True})),
    "scale": ("attention", lambda: (qkv(8), {"scale": 0.3})),
    "lse": ("attention", lambda: (qkv(8), {"return_lse": True})),
    "window": ("attention", lambda: (qkv(8), {"window_left": 3, "is_causal": True})),
    "mask": ("attention", lambda: ([*qkv(8), torch.ones(8, 8, dtype=torch.bool).tril()], {})),
    "grouped": ("attention", lambda: (qkv(1, 9, heads=4, kv_heads=2), {})),
    "another layout": ("attention", lambda: (qkv(8, layout="bshd"), {"layout": "bshd"})),
    "strided": ("attention",
                lambda: ([t.transpose(2, 3).contiguous().transpose(2, 3) for t in qkv(8)], {})),
    "norm": ("rms_norm", lambda: ([torch.randn(3, 16), torch.randn(16)], {"eps": 1e-3})),
    "bare norm": ("rms_norm", lambda: ([torch.randn(3, 16)], {})),
    "two results": ("add_rms_norm",
                    lambda: ([torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)], {})),
    "linear": ("linear", lambda: ([torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)],
                                  {"activation": "gelu"})),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_bound_kernel_computes_what_the_op_does(name, world):
    op, make = BOUND[name]
    tensors, fixed = make()
    bound = lz.tables.bind(op, *tensors, **fixed)
    assert bound.kernel == lz.which(op, *tensors, **fixed) and bound.covers(*tensors)
    for _ in range(2):
        close(bound(*tensors), getattr(lz, op)(*tensors, **fixed))
        tensors = [torch.rand_like(t) if t.is_floating_point() else t for t in tensors]
    before = lz.stats().calls.get(op, {})
    bound(*tensors)
    assert lz.stats().calls.get(op, {}) == before, "a bound call went through the dispatcher"


def test_a_bound_kernel_runs_nothing_but_the_kernel(world, emitted):
    fake = Fake("fake.one")
    register(fake)
    x = torch.randn(3, 16)
    bound = lz.tables.bind("rms_norm", x, eps=1e-4)
    emitted.clear()
    bound(x)
    assert fake.calls == 1 and fake.got["eps"] == 1e-4 and emitted == []


def test_a_kernel_is_bound_by_name_or_refused(world):
    x = torch.randn(3, 16)
    assert lz.tables.bind(lz.rms_norm, x, backend="reference").kernel == "reference.rms_norm"
    with pytest.raises(NamedKernelRefused):
        lz.tables.bind("attention", *qkv(8), softcap=1.0, backend="torch.sdpa_flash")


def test_what_lies_outside_is_told_and_served_by_the_op(world, emitted):
    short = Fake("fake.short", requires=(at_most("rows", 8),))
    register(short)
    small, large = torch.randn(8, 16), torch.randn(9, 16)
    bound = lz.tables.bind("rms_norm", small)
    assert bound.kernel == "fake.short"
    assert bound.covers(small) and not bound.covers(large) and not bound.covers(small.double())
    close(bound.checked(small), lz.op("rms_norm").reference(small))
    assert short.calls == 1 and not events_of(PlanMissed, emitted)
    close(bound.checked(large), lz.op("rms_norm").reference(large))
    (missed,) = events_of(PlanMissed, emitted)
    assert (short.calls == 1 and missed.reason.code is Code.PLAN_BUCKET_MISS
            and "rows=9" in missed.reason.message)
    with pytest.raises(ConfigError, match="was bound with x; got 2"):
        bound.covers(small, small)


def test_a_library_that_does_not_load_leaves_the_world_and_the_next_is_bound(world):
    def load():
        raise ImportError("not today")

    lz.register(lz.Kernel("fake.broken", lz.op("rms_norm"), load, prior=1e6, less_work="a test"))
    bound = lz.tables.bind("rms_norm", torch.randn(3, 16))
    assert bound.kernel != "fake.broken" and "fake.broken" in worlds.current().unloadable


@pytest.mark.parametrize(("call", "message"), [
    (lambda: lz.tables.bind("attention", *(t[0] for t in qkv(8))), "rewritten before it is served"),
    (lambda: lz.tables.bind("attention", *qkv(5, 7, heads=4, kv_heads=2), layout="auto"),
     "op's own form: query"),
    (lambda: lz.tables.bind("rms_nrm", torch.ones(2, 2)), "did you mean"),
])
def test_what_cannot_be_bound_is_refused(call, message, world):
    with pytest.raises(ConfigError, match=message):
        call()


def test_autocast_cannot_be_bound(world):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="under autocast"):
        lz.tables.bind("attention", *qkv(8))


def test_gradients_flow_through_a_bound_kernel(world):
    x = torch.randn(3, 16, requires_grad=True)
    bound = lz.tables.bind("rms_norm", x)
    bound(x).sum().backward()
    want, = torch.autograd.grad(lz.rms_norm(x).sum(), x)
    close(x.grad, want)


# dry_run

def test_a_dry_run_lists_every_call_and_runs_no_kernel(world, emitted):
    fake = Fake("fake.norm", traceable=False)
    register(fake)
    model, x = Block(), torch.randn(2, 7, 32)
    with torch.no_grad():
        listing = lz.dry_run(model, x)
    assert [(r.call.op, r.call.count, r.kernel) for r in listing.rows] == [
        ("rms_norm", 2, "fake.norm"), ("attention", 2, listing.rows[1].kernel)]
    assert fake.calls == fake.loads == 0 and not events_of(Selected, emitted)
    with torch.no_grad():
        model(x)
    assert {e.op: e.kernel for e in events_of(Selected, emitted)} == {r.call.op: r.kernel
                                                                      for r in listing.rows}
    assert ("2 x lz.rms_norm" in str(listing)
            and json.loads(json.dumps(listing.to_json()))["calls"][0]["count"] == 2)
    assert (listing.calls[1].arguments["is_causal"] is True
            and listing.calls[1].arguments["query"].shape == (2, 2, 7, 16))


def test_gradients_and_named_kernels_are_seen(world):
    model, x = Block(1), torch.randn(2, 7, 32)
    with lz.prefer("reference.rms_norm"):
        assert lz.dry_run(lambda x: lz.rms_norm(x), x).rows[0].kernel == "reference.rms_norm"
    register(Fake("fake.forward", differentiable=False))
    assert lz.dry_run(model, x).rows[0].kernel != "fake.forward"
    assert lz.dry_run(model, x).calls[0].grad
    # which the norm must hand on, though it is not run
    wanting = torch.ones(1, 2, 4, 8, requires_grad=True)
    both = lz.dry_run(lambda q, k: lz.attention(lz.rms_norm(q), k, k), wanting,
                      torch.ones(1, 2, 4, 8))
    assert [c.grad for c in both.calls] == [True, True]
    with torch.no_grad():
        assert lz.dry_run(model, x).rows[0].kernel == "fake.forward"
    named = lz.dry_run(lambda x: lz.rms_norm(x, backend="reference"), x)
    assert named.rows[0].kernel == "reference.rms_norm"


def test_a_dry_run_says_what_the_table_in_force_does(world):
    model = lambda x: lz.rms_norm(x)  # noqa: E731
    table = lz.tables.solve(model, torch.ones(3, 16), device="cpu")
    lz.tables.use_table(table)
    assert lz.dry_run(model, torch.ones(3, 16)).rows[0].note == f"from table {table.id}"
    assert "PLAN_BUCKET_MISS" in lz.dry_run(model, torch.ones(50, 16)).rows[0].note


def test_a_model_without_lz_calls_and_a_large_one(world):
    assert lz.dry_run(nn.Linear(4, 4), torch.ones(2, 4)).rows == ()
    assert str(lz.dry_run(nn.Linear(4, 4), torch.ones(2, 4))) == "no lz call was made"
    with torch.device("meta"):
        huge = torch.empty(1, dtype=torch.float32)
    x = torch.empty(1).expand(1 << 20, 1 << 16)                # 256 GiB if it were real
    assert lz.dry_run(lambda t: lz.rms_norm(t), x).rows[0].kernel and huge.is_meta


def test_a_model_that_looks_at_values_is_refused(world):
    with pytest.raises(DataError, match=r"lz\.recording"):
        lz.dry_run(lambda x: x if x.sum().item() > 0 else lz.rms_norm(x), torch.ones(3, 16))


def test_a_call_nobody_can_serve_is_listed_as_such(world):
    lz.configure(rules=(lz.PolicyRule.of("deny", "*", "rms_norm"),))
    (row,) = lz.dry_run(lambda x: lz.rms_norm(x), torch.ones(3, 16)).rows
    assert (row.kernel == "" and "denied" in row.source
            and "no kernel" in str(lz.dry_run(lambda x: lz.rms_norm(x),
                                                                                         torch.ones(
                                                                                             3,
                                                                                             16))))


# compile

@pytest.fixture
def dynamo():
    import torch._dynamo
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_model_calls_its_kernels_directly(world, emitted, dynamo):
    """Also kernels that torch cannot look into, which inlining would have to pass over."""
    fake = Fake("fake.norm", traceable=False)
    register(fake)
    model, x = Block(), torch.randn(2, 7, 32)
    with torch.no_grad():
        want = model(x)
        baked = lz.compile(model, x, fullgraph=True)
        assert [(s.op, s.kernel) for s in baked.sites] == [("rms_norm", "fake.norm"), (
            "attention", lz.which("attention", *[torch.randn(2, 2, 7, 16)] * 3,
                                  is_causal=True))] * 2
        before, calls = lz.stats().calls, fake.calls
        emitted.clear()
        close(baked(x), want)
    assert (fake.calls == calls + 2 and lz.stats().calls == before and emitted == []
            and not baked.missed)


def test_other_sizes_are_chosen_anew_and_recorded(world, emitted, dynamo):
    short = Fake("fake.short", requires=(at_most("rows", 20),), traceable=False)
    register(short)
    model, x, y = Block(1), torch.randn(2, 7, 32), torch.randn(2, 40, 32)
    with torch.no_grad():
        baked = lz.compile(model, x, dynamic=False)
        assert not events_of(PlanMissed, emitted)
        calls = short.calls
        close(baked(y), model(y))
    missed = events_of(PlanMissed, emitted)
    assert short.calls == calls and {m.op for m in missed} == {"rms_norm", "attention"}
    assert all(m.reason.code is Code.PLAN_BUCKET_MISS for m in missed)
    assert baked.missed[0].kernel != "fake.short" and "2x40x32" in baked.missed[0].calls


def test_sizes_that_may_vary_are_guarded_by_the_kernels_limits(world, dynamo):
    short = Fake("fake.short", requires=(at_most("rows", 20),), traceable=False)
    register(short)
    with torch.no_grad():
        baked = lz.compile(lambda x: lz.rms_norm(x) * 2, torch.randn(7, 16), dynamic=True)
        served = []
        # after that there is a graph for all sizes, which Dynamo may reuse
        for n in (8, 20, 21, 500):
            x, calls = torch.randn(n, 16), short.calls
            close(baked(x), lz.op("rms_norm").reference(x) * 2)
            served.append(short.calls > calls)
    assert served == [True, True, False, False]


def test_training_works(world, dynamo):
    model, x = Block(), torch.randn(2, 7, 32)
    baked = lz.compile(model, x)
    baked(x).square().sum().backward()
    got, model.norm.grad = model.norm.grad, None
    model(x).square().sum().backward()
    close(got, model.norm.grad)


@pytest.mark.parametrize("call", [
    lambda q: lz.attention(q, q, q, return_lse=True)[1],
    lambda q: lz.attention(q, q, q, layout="bshd"),
    lambda q: lz.attention(q[0], q[0], q[0]), lambda q: lz.add_rms_norm(q, q)[1],
    lambda q: lz.attention(q, q, q, backend="torch.sdpa_math"),
    lambda q: lz.attention(q, q, q, scale=1 / q.shape[-1])],
    ids=["lse", "layout", "3d", "two", "named", "computed"])
def test_every_form_of_call_computes_the_same(call, world, dynamo):
    q = torch.randn(1, 4, 4, 16)
    close(lz.compile(call, q)(q), call(q))


def test_what_is_not_baked_says_why_and_is_still_right(world, dynamo):
    q = torch.randn(1, 4, 4, 16)
    flat = lz.compile(lambda q: lz.attention(q[0], q[0], q[0]), q)
    assert flat.sites[0].kernel == "" and "rewritten" in flat.sites[0].why_not

    def mixed(q: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return lz.attention(q, q, q)

    baked = lz.compile(mixed, q)
    assert baked.sites[0].kernel == "" and "autocast" in baked.sites[0].why_not
    assert baked(q).dtype is torch.bfloat16 is mixed(q).dtype


def test_the_first_call_bakes_where_no_example_was_given(world, emitted, dynamo):
    baked = lz.compile(Block(1))
    assert baked.sites == []
    with torch.no_grad():
        baked(torch.randn(2, 7, 32))
    assert len(baked.sites) == 2 and not baked.missed and not events_of(PlanMissed, emitted)
    assert {s.op for s in baked.sites} <= set(dispatchers)
    assert json.loads(json.dumps([s.to_json() for s in baked.sites]))[0]["op"] == "rms_norm"
