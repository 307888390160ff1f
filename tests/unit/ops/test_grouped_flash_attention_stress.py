"""Grouped attention at the sizes where mistakes show: small ones here, the true ones on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from grouped_truth import call, check, serving, truth

import layerzero as lz

GPU = pytest.mark.gpu
HALF = {"rtol": 2e-2, "atol": 2e-2}
LLAMA = {"hq": 32, "hkv": 8, "d": 128, "dtype": torch.bfloat16, "device": "cuda"}


def groups(count: int, rows: int, keys: int) -> list[tuple[int, int, int, int]]:
    return [(i * rows, rows, 0, (i + 1) * keys // count) for i in range(count)]


def some_rows(items: list[tuple[int, int, int, int]]) -> list[int]:
    """The first, the middle and the last query row of some items."""
    picked = items[::max(len(items) // 4, 1)]
    return sorted({q + at for q, n, _, _ in picked for at in (0, n // 2, n - 1)})


class TestGroupedFlashAttentionLargeScales:
    @pytest.mark.parametrize(("keys", "rows", "more"), [
        (4096, 8, {"d": 16}), pytest.param(65536, 32768, LLAMA, marks=GPU),
        pytest.param(131072, 65536, LLAMA, marks=GPU)])
    def test_long_sequences(self, keys, rows, more):
        items = groups(2, rows, keys)
        tolerance = HALF if "dtype" in more else {}
        check(call(items, **more), some_rows(items), large=rows > 1024, **tolerance)

    @pytest.mark.parametrize("count", [1, 8, 16, 64])
    def test_many_groups(self, count):
        items = groups(count, 2, 256)
        check(call(items, d=16), some_rows(items))

    @pytest.mark.parametrize("more", [{"d": 16}, pytest.param(LLAMA, marks=GPU)])
    def test_large_batch_multiple_sequences(self, more):
        """32 sequences in one buffer; two groups, of which the first sees half of each."""
        lengths = [16 + 3 * i for i in range(32)]
        starts = [sum(lengths[:i]) for i in range(32)]
        items = [(2 * i, 2, starts[i], n // 2) for i, n in enumerate(lengths)]
        items += [(64 + 2 * i, 2, starts[i], n) for i, n in enumerate(lengths)]
        check(call(items, **more), some_rows(items), **(HALF if "dtype" in more else {}))


class TestGroupedFlashAttentionMemoryPressure:
    @pytest.mark.parametrize(("keys", "rows", "more"), [
        (512, 16, {"d": 16}), pytest.param(32768, 16384, LLAMA, marks=GPU)])
    def test_backward_pass_large_scale(self, keys, rows, more):
        """Of the last keys, which one row sees, the gradients are known: dv is its gradient."""
        values = call(groups(2, rows, keys), **more)
        leaves = {name: values[name].requires_grad_() for name in ("query", "key", "value")}
        grad = torch.zeros_like(values["query"])
        grad[-1] = 1.0
        out, lse = truth({**values, "scale": None}, [len(grad) - 1])
        last = values["key"][-1].double().repeat_interleave(2 if "dtype" not in more else 4, 0)
        weight = torch.exp((values["query"][-1].double() * last).sum(-1)
                           * values["query"].shape[2] ** -0.5 - lse[0])
        want = weight.unflatten(0, (values["key"].shape[1], -1)).sum(-1)
        for name in serving(values, large=rows > 1024):
            out = lz.grouped_attention(**values, backend=name)
            dq, dk, dv = torch.autograd.grad(out, tuple(leaves.values()), grad)
            mean = dv[-1].double().mean(-1)
            torch.testing.assert_close(mean, want, rtol=2e-2, atol=1e-5)
            assert dq[:-1].count_nonzero() == 0, name
            assert all(t.isfinite().all() for t in (dq, dk, dv)), name

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
    def test_repeated_calls_no_memory_leak(self, device):
        values = call(groups(4, 4, 64), d=16, device=device)
        leaves = {name: values[name].requires_grad_() for name in ("query", "key", "value")}

        def once(name: str) -> None:
            out = lz.grouped_attention(**values, backend=name)
            torch.autograd.grad(out.sum(), tuple(leaves.values()))

        def held() -> int:
            gc.collect()
            if device == "cuda":
                return torch.cuda.memory_allocated()
            return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

        for name in serving(values):
            once(name)                         # loads and plans, once
            before = held()
            for _ in range(10):
                once(name)
            assert held() <= before, name


class TestGroupedFlashAttentionPrecisionStress:
    @pytest.mark.parametrize(("keys", "rows", "more"), [
        (1024, 4, {"d": 16}),
        pytest.param(16384, 8192, {"hq": 32, "hkv": 8, "d": 128, "device": "cuda"}, marks=GPU)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_different_dtypes_large_scale(self, keys, rows, more, dtype):
        items = groups(2, rows, keys)
        check(call(items, dtype=dtype, **more), some_rows(items), large=rows > 1024, **HALF)

    def test_extreme_values_handling(self):
        """Ten times as large: the softmax is nearly one key, and nothing overflows."""
        items = groups(3, 8, 96)
        check(call(items, size=10.0), rtol=2e-3, atol=2e-3)
        half = call(items, size=10.0, dtype=torch.float16)
        for name in serving(half):
            assert lz.grouped_attention(**half, backend=name).isfinite().all(), name


class TestGroupedFlashAttentionEdgeCasesStress:
    @pytest.mark.parametrize(("rows", "more"), [
        (16, {"hq": 2, "hkv": 1, "d": 16}), pytest.param(9900, LLAMA, marks=GPU)])
    def test_highly_imbalanced_groups(self, rows, more):
        """100 tokens against 9,900: one group's work is not the other's."""
        items = [(0, 100, 0, 100), (100, rows, 0, 9900)]
        check(call(items, **more), some_rows(items), large=rows > 1024,
              **(HALF if "dtype" in more else {}))

    def test_all_groups_overlapping(self):
        items = [(3 * i, 3, 0, 128) for i in range(8)]
        check(call(items, d=16, is_causal=False))
        check(call(items, d=16))
