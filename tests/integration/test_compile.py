"""torch.compile and torch.export: no graph break, no opaque wall, no more recompiles than torch's
own op.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch.nn.functional as F

import layerzero as lz

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def frames(fn, calls) -> int:
    """How often Dynamo compiled `fn` over these calls; each result is compared with eager."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for args in calls:
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=1e-4, atol=1e-5)
    return counter.frame_count


def aten_ops(fn, *args) -> list[str]:
    """The names of the ops that reach the compiler's back end."""
    seen: list[str] = []

    def backend(graph, example_inputs):
        from torch._dynamo.backends.common import aot_autograd

        def compiler(inner, _):
            seen.extend(str(n.target) for n in inner.graph.nodes if n.op == "call_function")
            return inner.forward
        return aot_autograd(fw_compiler=compiler)(graph, example_inputs)

    torch.compile(fn, fullgraph=True, backend=backend)(*args)
    return seen


def test_a_growing_prefill_recompiles_no_more_than_sdpa():
    calls = [(torch.randn(2, 4, s, 64),) * 3 for s in (64, 65, 80, 100, 128, 200, 300)]
    ours = frames(lambda q, k, v: lz.attention(q, k, v, is_causal=True), calls)
    torch._dynamo.reset()
    theirs = frames(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), calls)
    assert ours <= theirs


def test_a_growing_kv_cache_recompiles_no_more_than_sdpa():
    q = torch.randn(1, 4, 1, 64)
    calls = [(q, *(torch.randn(1, 4, s, 64) for _ in "kv"))
             for s in (64, 65, 80, 100, 128, 200, 300, 2000)]
    ours = frames(lambda q, k, v: lz.attention(q, k, v, is_causal=True,
                                               causal_align="bottom_right"), calls)
    torch._dynamo.reset()
    theirs = frames(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), calls)
    assert ours <= theirs


def test_a_growing_grouped_decode_recompiles_no_more_than_sdpa():
    q = torch.randn(1, 8, 1, 64)
    calls = [(q, *(torch.randn(1, 2, s, 64) for _ in "kv")) for s in (64, 65, 80, 100, 1000)]
    ours = frames(lambda q, k, v: lz.attention(q, k, v), calls)
    torch._dynamo.reset()
    theirs = frames(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), calls)
    assert ours <= theirs


def test_a_torch_kernel_is_inlined():
    q = torch.randn(1, 4, 32, 64)
    ops = aten_ops(lambda q: lz.attention(q * 2, q, q, is_causal=True) + 1, q)
    assert not any("layerzero" in name for name in ops)
    assert any("scaled_dot_product_flash_attention_for_cpu" in name for name in ops)
    x, w = torch.randn(4, 64), torch.randn(64)
    ops = aten_ops(lambda x, w: lz.rms_norm(x * 2, w) + 1, x, w)
    assert not any("layerzero" in name for name in ops)
    assert any("rsqrt" in name or "rms_norm" in name for name in ops)


def test_inductor_agrees_with_eager():
    def block(x, w, q, k, v):
        h, total = lz.add_rms_norm(x, x * 0.5, w)
        return lz.attention(q, k, v, is_causal=True).relu(), lz.layer_norm(h, w) + total

    x, w = torch.randn(6, 64), torch.randn(64)
    q, k, v = torch.randn(1, 4, 40, 64), torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64)
    compiled = torch.compile(block, fullgraph=True)
    for got, want in zip(compiled(x, w, q, k, v), block(x, w, q, k, v)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("call", [
    lambda q: lz.attention(q, q, q, return_lse=True),
    lambda q: lz.attention(q, q, q, layout="bshd"),
    lambda q: lz.attention(q, q, q, window_left=8, is_causal=True),
    lambda q: lz.attention(q, q, q, softcap=10.0),
    lambda q: lz.attention(q, q, q, torch.ones(40, 40, dtype=torch.bool)),
    lambda q: lz.attention(q[0], q[0], q[0]),
    lambda q: lz.attention(q, q, q, backend="torch.sdpa_math")],
    ids=["lse", "bshd", "window", "softcap", "mask", "3d", "named"])
def test_every_form_of_call_traces_fullgraph(call):
    q = torch.randn(1, 40, 40, 64)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), call(q), rtol=1e-4, atol=1e-5)


def test_a_named_kernel_is_honoured_under_compile():
    q = torch.randn(1, 4, 32, 64)
    ops = aten_ops(lambda q: lz.attention(q, q, q, backend="torch.sdpa_math"), q)
    assert not any("flash" in name for name in ops)
    with pytest.raises(Exception, match="cannot serve"):
        torch.compile(lambda q: lz.attention(q, q, q, softcap=1.0, backend="torch.sdpa_flash"),
                      fullgraph=True,
                      backend="aot_eager")(q)


def test_a_preference_around_the_compilation_is_honoured():
    q = torch.randn(1, 4, 32, 64)
    with lz.prefer("torch.sdpa_math"):
        ops = aten_ops(lambda q: lz.attention(q, q, q), q)
    assert not any("flash" in name for name in ops)


def test_gradients_flow_through_the_compiled_graph():
    def loss(q, k, v, w):
        return lz.rms_norm(lz.attention(q, k, v, is_causal=True), w).square().sum()

    leaves = [torch.randn(1, 4, 24, 32, requires_grad=True)
              for _ in "qkv"] + [torch.randn(32, requires_grad=True)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves),
                              leaves)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_wrong_call_says_so_while_tracing():
    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 3, 8, 64)
    with pytest.raises(Exception, match="HEADS_NOT_DIVISIBLE"):
        torch.compile(lambda q, k: lz.attention(q, k, k), fullgraph=True, backend="aot_eager")(q, k)


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return lz.attention(q, k, v, is_causal=True)


def test_export_with_a_dynamic_length():
    seq = torch.export.Dim("seq", min=2, max=4096)
    example = tuple(torch.randn(2, 4, 16, 32) for _ in "qkv")
    program = torch.export.export(Attend(), example, dynamic_shapes=({2: seq},) * 3)
    for s in (5, 64, 300):
        args = tuple(torch.randn(2, 4, s, 32) for _ in "qkv")
        torch.testing.assert_close(program.module()(*args), Attend()(*args), rtol=1e-4, atol=1e-5)
    # the exported range is not exceeded in silence
    with pytest.raises((RuntimeError, AssertionError), match="4096"):
        program.module()(*(torch.randn(2, 4, 5000, 32) for _ in "qkv"))


def test_export_survives_saving(tmp_path):
    example = tuple(torch.randn(1, 2, 16, 32) for _ in "qkv")
    program = torch.export.export(Attend(), example)
    torch.export.save(program, tmp_path / "attend.pt2")
    again = torch.export.load(tmp_path / "attend.pt2")
    torch.testing.assert_close(again.module()(*example), Attend()(*example), rtol=1e-4, atol=1e-5)


def test_torch_ops_are_registered_with_schemas():
    for name in ("attention", "varlen_attention", "rms_norm", "add_rms_norm", "layer_norm"):
        schema = getattr(torch.ops.layerzero, name).default._schema
        assert [a.name for a in schema.arguments][:-1] == [p.name for p in lz.op(name).params]


@pytest.mark.parametrize("name", ["attention", "rms_norm", "add_rms_norm", "layer_norm"])
def test_the_torch_op_gives_the_same_result_and_fake_shapes(name):
    from torch._subclasses.fake_tensor import FakeTensorMode
    op = lz.op(name)
    values = op.inputs(seed=3)
    direct = getattr(lz, name)(**values)
    through = getattr(torch.ops.layerzero, name)(**values)
    want = direct if isinstance(direct, tuple) else (direct,)
    got = tuple(through) if isinstance(through, (tuple, list)) else (through,)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    with FakeTensorMode() as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                for k, v in values.items()}
        out = getattr(torch.ops.layerzero, name)(**fake)
    out = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    assert [(o.shape, o.dtype) for o in out] == [(w.shape, w.dtype) for w in want]


def test_eager_calls_do_not_go_through_the_custom_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 8, 16)
    with Watch() as watch:
        lz.attention(q, q, q)
    assert watch.names and not any("layerzero" in n for n in watch.names)


def test_sdpa_kernel_around_and_inside_of_a_compiled_function():
    """As with torch's own op the choice is made while tracing, with the switches as they are then.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 16, 16)

    def inside(q):
        with sdpa_kernel(SDPBackend.MATH):
            return lz.attention(q, q, q)

    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert any(flash in name for name in aten_ops(lambda q: lz.attention(q, q, q), q))
    torch._dynamo.reset()
    assert not any(flash in name for name in aten_ops(inside, q))
    torch._dynamo.reset()
    with sdpa_kernel(SDPBackend.MATH):
        assert not any(flash in name for name in aten_ops(lambda q: lz.attention(q, q, q), q))
    torch.testing.assert_close(torch.compile(inside, backend="aot_eager")(q), lz.attention(q, q, q))
