"""Number formats: what comes back, how it is stored, what is refused; and linear layers with such
weights.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import nvidia
from torch.nn import functional as F

import layerzero as lz
from layerzero.backends._packing import PACKED
from layerzero.machine.hardware import probe
from layerzero.models.weights.quantization import (
    ACCURACIES,
    EXPECTED,
    choose_format,
    quantized_shard,
)
from layerzero.ops.formulas.quant import E2M1, FORMATS, NF4, pack_nibbles, unpack_nibbles
from layerzero.spec.reason import Code
from layerzero.verify.kernel.contract import call, case_values, refusals, results_of
from layerzero.world import snapshot as worlds

QUANTIZE, LINEAR = lz.op("quantize"), lz.op("quantized_linear")
INTEL = "avx512f" in probe("cpu").isa


def restored(x: torch.Tensor, form: str, **options) -> torch.Tensor:
    q, scales, *rest = lz.quantize(x, form, **options)
    layout = {k: v for k, v in options.items() if k in ("block_size", "block_rows")}
    extra = {"global_scale": rest[0]} if form == "nvfp4" else {"zeros": rest[0]} if rest else {}
    return lz.dequantize(q, scales, format=form, size=x.shape[-1] if x.shape[-1] % 2 else None,
                         **layout, **extra)


def step(x: torch.Tensor, form: str, **options) -> torch.Tensor:
    """The scale of each element."""
    _, scales, *rest = lz.quantize(x, form, **options)
    by = scales.float() * rest[0] if form == "nvfp4" else scales.float()
    block = options.get("block_size") or FORMATS[form].block_size
    return by if by.shape[-1] == 1 else by.repeat_interleave(block, -1)[..., :x.shape[-1]]


# How far a value may move, in units of its scale, and beside that in parts of itself.
BOUNDS = {"int8": (0.5, 0.0), "int4": (0.5, 0.0), "fp8_e4m3": (2.0 ** -10, 2.0 ** -4),
          "fp8_e5m2": (2.0 ** -17, 2.0 ** -3), "nf4": ((1 - 0.6961928) / 2, 0.0),
          # a scale is a power of two: up to a quarter of a block's largest is cut
          "mxfp4": (2.0, 0.0),
          "nvfp4": (1.0 + 6 / 16, 0.0)}        # e4m3 keeps a scale to one part in sixteen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_what_comes_back_is_near(form, dtype):
    x = (torch.randn(33, 257, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    absolute, relative = BOUNDS[form]
    gap = (restored(x, form) - x.float()).abs()
    assert (gap <= (absolute * step(x, form) + relative * x.float().abs()) * (1 + 1e-5)).all()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_with_a_zero_point_the_whole_range_is_used(form, granularity):
    # all on one side of zero
    x = torch.rand(8, 256, generator=torch.Generator().manual_seed(2)) + 5.0
    q, scales, zeros = lz.quantize(x, form, granularity, 0, False)
    assert zeros.dtype == FORMATS[form].storage and zeros.shape == scales.shape
    back = lz.dequantize(q, scales, zeros, format=form)
    block = 1 if granularity != "block" else 128
    by = scales if granularity != "block" else scales.repeat_interleave(block, -1)
    # and the zero is rounded too
    assert ((back - x).abs() <= by * (0.5 + 1e-4) + by * 0.5).all()
    assert torch.equal(lz.dequantize(*lz.quantize(torch.zeros(2, 8), form, symmetric=False),
                                     format=form),
                       torch.zeros(2, 8))


@pytest.mark.parametrize(("form", "values"), [
    ("int8", torch.arange(-127, 128).float()), ("int4", torch.arange(-7, 8).float()),
    ("fp8_e4m3", torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()),
    ("fp8_e5m2", torch.arange(0, 124, dtype=torch.uint8).view(torch.float8_e5m2).float()),
    ("nf4", torch.tensor(NF4)), ("mxfp4", torch.tensor(E2M1)), ("nvfp4", torch.tensor(E2M1))])
@pytest.mark.parametrize("by", [1.0, 2.0 ** 7])
def test_what_a_format_can_hold_it_holds_exactly(form, values, by):
    assert torch.equal(restored(values[None] * by, form), values[None] * by)


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_come_back_as_zeros(form):
    x = torch.randn(4, 64)
    x[1], x[2, :32] = 0.0, 0.0
    back = restored(x, form)
    assert back[1].count_nonzero() == 0 and back[2, :32].count_nonzero() == 0
    assert back.isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
def test_infinities_saturate_and_nan_is_nought(form):
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(5))
    x[0, 3], x[0, 4], x[0, 5] = math.inf, -math.inf, math.nan
    back = restored(x, form)
    # the largest code of its block
    assert back[0, 3] == back[0, :16].nan_to_num().abs().max() > 0
    assert back[0, 4] == -back[0, 3]
    assert back[0, 5].isnan() if form.startswith("fp8") else back[0, 5] == 0
    assert back[1].isfinite().all() and back[0, 6:].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
def test_the_smallest_numbers(form):
    x = torch.randn(3, 64) * 1e-40
    back = restored(x, form)
    assert back.isfinite().all() and (back - x).abs().max() <= 1e-37


def test_a_constant_block():
    for form in FORMATS:
        back = restored(torch.full((1, 64), 0.7), form)
        assert (back - 0.7).abs().max() <= 0.7 * 0.17, form


# Storage.

def test_two_codes_in_a_byte_the_first_in_the_low_bits():
    codes = torch.tensor([[1, 2, 3], [15, 0, 8]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x03], [0x0F, 0x08]]
    assert torch.equal(unpack_nibbles(packed, 3), codes)
    q, _ = lz.quantize(torch.tensor([[-7.0, 0.0, 7.0]]), "int4")
    assert q.tolist() == [[0x81, 0x0F]]        # -7, 0 and 7 are 1, 8 and 15


def test_an_odd_row_needs_its_size():
    x = torch.randn(2, 7)
    q, scales = lz.quantize(x, "int4")
    assert q.shape == (2, 4)
    assert lz.dequantize(q, scales, format="int4", size=7).shape == (2, 7)
    with pytest.raises(lz.errors.InvalidCall, match="size must be 8, or 7") as error:
        lz.dequantize(q, scales, format="int4", size=5)
    assert error.value.reasons[0].fact == "size"


def test_the_table_of_nf4_is_made_of_normal_quantiles():
    """As QLoRA derives it: eight quantiles above zero, seven below, zero itself, scaled to one."""
    above = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
    table = torch.cat((above, below, torch.zeros(1))).sort().values
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), table / table.max(), rtol=0,
                               atol=2e-7)


def test_e2m1_rounds_to_the_nearest_and_halves_to_even():
    x = torch.cat((torch.linspace(-8, 8, 4001),
                   torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    x = torch.cat((x, torch.full((-len(x) % 32,), 4.0))).view(-1, 32)
    x[:, 0] = 4.0                              # so that each scale is 1
    q, scales = lz.quantize(x.clamp(-7.9, 7.9), "mxfp4")
    assert (scales.float() == 1).all()
    codes = unpack_nibbles(q, 32).long()
    table = torch.tensor(E2M1)
    gaps = (x.clamp(-6, 6)[..., None].double() - table.double()).abs()
    best = gaps.amin(-1, keepdim=True)
    near = gaps == best
    assert near.gather(-1, codes[..., None]).all()
    tied = (near[..., :8] | near[..., 8:]).sum(-1) > 1
    assert tied.sum() >= 7 and (codes[tied & (x != 0)] % 2 == 0).all()


def test_mx_scales_are_powers_of_two_by_the_largest_exponent():
    x = torch.zeros(1, 96)
    x[0, 0], x[0, 32], x[0, 64] = 3.99, 4.0, 7.99
    _, scales = lz.quantize(x, "mxfp4")
    assert scales.dtype == torch.float8_e8m0fnu and scales.float().tolist() == [[0.5, 1.0, 1.0]]


def test_nvfp4_has_a_scale_of_the_whole_beside_those_of_blocks():
    x = torch.randn(3, 40)
    q, scales, whole = lz.quantize(x, "nvfp4")
    assert (q.shape, scales.shape, scales.dtype, whole.shape) == ((3, 20), (3, 3),
                                                                  torch.float8_e4m3fn, (1, 1))
    assert math.isclose(float(whole), float(x.abs().max()) / (448 * 6), rel_tol=1e-6)


# What is refused, by name.

def test_scales_of_another_layout_are_refused_on_every_call():
    x = torch.randn(5, 64)
    q, scales = lz.quantize(x, "int8", "block", 16)
    lz.dequantize(q, scales, format="int8", block_size=16)
    for bad in (scales[:, :2], scales[:2], scales.t(), scales[0], scales.repeat(1, 2)):
        with pytest.raises(lz.errors.InvalidCall, match="scales of shape") as error:
            lz.dequantize(q, bad, format="int8", block_size=16)
        assert (error.value.codes == (Code.SCALE_LAYOUT_MISMATCH,)
                and error.value.reasons[0].fact == "scales")
    with pytest.raises(lz.errors.InvalidCall, match=r"scales of shape \(5, 4\)"):
        lz.quantize(x, "int8", "block", 16, scales=scales[:, :2])
    with pytest.raises(lz.errors.InvalidCall, match="zeros"):
        lz.dequantize(q, scales, torch.zeros(5, 2, dtype=torch.int8), format="int8", block_size=16)


@pytest.mark.parametrize(("inputs", "name"), [
    ({"format": "int7"}, "format"), ({"format": "mxfp4", "granularity": "channel"}, "granularity"),
    ({"format": "mxfp4", "block_size": 16}, "block_size"),
    ({"format": "nvfp4", "block_size": 32}, "block_size"),
    ({"format": "int8", "block_size": -1}, "block_size"),
    ({"format": "int8", "block_rows": 0}, "block_rows"),
    ({"format": "fp8_e4m3", "symmetric": False}, "symmetric"),
    ({"format": "int8", "zeros": torch.zeros(4, 1, dtype=torch.int8)}, "zeros"),
    ({"format": "int8", "symmetric": False, "scales": torch.ones(4, 1)}, "zeros"),
    ({"format": "nvfp4", "scales": torch.ones(4, 4).to(torch.float8_e4m3fn)}, "global_scale")])
def test_quantize_says_which_argument_is_wrong(inputs, name):
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.quantize(torch.randn(4, 64), **inputs)
    assert any(r.fact.partition(".")[0] == name for r in error.value.reasons)


def test_an_empty_row_has_no_scale():
    with pytest.raises(lz.errors.InvalidCall, match="width"):
        lz.quantize(torch.empty(3, 0), "int8")
    assert [t.shape for t in lz.quantize(torch.empty(0, 8), "int8")] == [(0, 8), (0, 1)]


def test_codes_of_another_dtype_are_refused():
    with pytest.raises(lz.errors.InvalidCall, match=r"q\.dtype"):
        lz.dequantize(torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1), format="int8")
    with pytest.raises(lz.errors.InvalidCall, match="global_scale"):
        lz.dequantize(torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 1), format="nvfp4")


def test_every_kernel_gives_the_codes_of_the_formula():
    kernels = [k for k in worlds.current().kernels("quantize") if k.backend != "reference"]
    assert kernels
    for kernel in kernels:
        for dtype in QUANTIZE.dtypes:
            for case in QUANTIZE.cases:
                values = case_values(QUANTIZE, case, dtype)
                if refusals(kernel, values):
                    continue
                for got, want in zip(results_of(call(kernel, values)),
                                     results_of(QUANTIZE.reference(**values))):
                    assert got.dtype == want.dtype and got.shape == want.shape, case
                    assert torch.equal(got.reshape(-1).view(torch.uint8),
                                       want.reshape(-1).view(torch.uint8)), case


def test_a_parameter_can_be_quantized_as_it_is():
    weight = torch.nn.Parameter(torch.randn(8, 64))
    codes, scales = lz.quantize(weight, "int8")
    assert not codes.requires_grad and not scales.requires_grad


@pytest.mark.parametrize("form", FORMATS)
def test_inside_torch_compile(form):
    def there_and_back(x):
        q, scales, *rest = lz.quantize(x, form)
        return lz.dequantize(q, scales, format=form, global_scale=rest[0] if rest else None)

    x = torch.randn(4, 64)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), there_and_back(x))


# Choosing.

@pytest.mark.parametrize("form", EXPECTED)
def test_the_expected_error_is_the_measured_one(form):
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(3))
    error, bits = EXPECTED[form]
    assert math.isclose(float((restored(x, form) - x).norm() / x.norm()), error, rel_tol=0.03)
    assert math.isclose(sum(t.nbytes for t in lz.quantize(x, form)) * 8 / x.numel(), bits,
                        rel_tol=0.01)


@pytest.mark.parametrize(("device", "accuracy", "want"), [
    ("cpu", "high", "int8"), ("cpu", "balanced", "int8"), ("cpu", "small", "int4"),
    ("cpu", 1e-4, None), (nvidia(80), 0.1, "nf4"), (nvidia(90), 0.1, "nf4"),
    (nvidia(100), "small", "mxfp4"), (nvidia(70), "balanced", None),
    (nvidia(90), "balanced", "int8")])
def test_a_format_for_a_device(device, accuracy, want):
    choice = choose_format(device, accuracy)
    assert choice.format == want
    if want is not None:
        assert choice.error <= (ACCURACIES[accuracy] if isinstance(accuracy, str) else accuracy)


def test_a_choice_says_why_not_the_others():
    choice = choose_format(nvidia(80), "small", ["fp8_e4m3", "nvfp4", "int8"])
    assert choice.format == "int8" and "FP4" in str(choice)
    assert dict(choice.rejected)["nvfp4"].code is Code.QUANT_FORMAT_UNSUPPORTED
    assert choose_format(nvidia(90), "balanced", ["fp8_e4m3"]).format == "fp8_e4m3"
    assert choose_format(nvidia(80), "balanced", ["fp8_e4m3"]).format is None
    with pytest.raises(lz.errors.ConfigError, match="best"):
        choose_format("cpu", "best")
    with pytest.raises(lz.errors.ConfigError, match="int3"):
        choose_format("cpu", formats=["int3"])


# Linear layers.

def layer(form="int8", n=64, k=128, group=0, dtype=torch.bfloat16, rows=4, **options):
    gen = torch.Generator().manual_seed(4)
    weight = torch.randn(n, k, generator=gen) / math.sqrt(k)
    q, scales, *zeros = lz.quantize(weight, form, "block" if group else "channel", group, **options)
    x = torch.randn(rows, k, generator=gen).to(dtype)
    extra = {"zeros": zeros[0]} if zeros else {}
    exact = x.double() @ lz.dequantize(q, scales, format=form, block_size=group,
                                       **extra).double().t()
    return x, q, scales, extra, exact


@pytest.mark.parametrize(("form", "group", "options"), [
    ("int8", 0, {}), ("int8", 32, {}), ("int8", 0, {"symmetric": False}), ("int4", 32, {}),
    ("int4", 128, {}), ("int4", 64, {"symmetric": False}), ("fp8_e4m3", 0, {}),
    ("fp8_e4m3", 64, {})])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_a_quantized_layer_is_the_layer_of_its_values(form, group, options, rows):
    x, q, scales, extra, exact = layer(form, group=group, rows=rows, **options)
    out = lz.quantized_linear(x, q, scales, format=form, group_size=group, **extra)
    assert out.dtype == x.dtype
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not INTEL, reason="the kernels for few rows need AVX-512")
def test_who_serves_which_layer():
    def which(form, group=0, rows=1, k=128, dtype=torch.bfloat16, **more):
        x, q, scales, extra, _ = layer(form, n=2048, k=k, group=group, rows=rows, dtype=dtype)
        return lz.which("quantized_linear", x, q, scales, format=form, group_size=group, **extra,
                        **more)

    assert which("int8") == "torch.int8_linear"
    assert which("int8", rows=512) == "torch.dequantized_linear"
    assert which("int4", 32) == "torch.int4_linear"
    assert which("int4", 32, rows=512) == "torch.dequantized_linear"
    assert which("int8", activations="int8") == "torch.int8_dynamic_linear"
    # torch's kernel would read past the end
    assert which("int8", k=112) == "torch.dequantized_linear"
    assert which("int8", dtype=torch.float32) == "torch.dequantized_linear"


@pytest.mark.skipif(not INTEL, reason="torch.int4_linear needs AVX-512")
def test_int4_weights_are_packed_once_and_followed():
    PACKED.forget()
    x, q, scales, _, _ = layer("int4", group=32)

    def run(backend):
        return lz.quantized_linear(x, q, scales, format="int4", group_size=32, backend=backend)

    run("torch.int4_linear")
    before = len(PACKED)
    run("torch.int4_linear")
    assert len(PACKED) == before == 2          # the codes and the scales
    scales.mul_(2)
    q.bitwise_xor_(0x11)
    torch.testing.assert_close(run("torch.int4_linear"), run("torch.dequantized_linear"), rtol=2e-2,
                               atol=2e-2)


def test_activations_rounded_to_int8_too():
    x, q, scales, _, exact = layer("int8", dtype=torch.float32)
    out = lz.quantized_linear(x, q, scales, format="int8", activations="int8")
    codes, by = lz.quantize(x, "int8")
    want = (codes.double() @ q.double().t()) * by.double() * scales.double().t()
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    assert 0 < (out.double() - exact).abs().max() < 0.1


def test_a_frozen_layer_passes_gradients_on():
    """As under LoRA: the weight is codes, the input and the bias learn."""
    x, q, scales, _, _ = layer("int4", group=32, dtype=torch.float32)
    bias = torch.randn(64, requires_grad=True)
    x.requires_grad_()
    out = lz.quantized_linear(x, q, scales, bias=bias, format="int4", group_size=32)
    out.square().sum().backward()
    weight = lz.dequantize(q, scales, format="int4", block_size=32)
    torch.testing.assert_close(x.grad, 2 * out.detach() @ weight)
    torch.testing.assert_close(bias.grad, 2 * out.detach().sum(0))


@pytest.mark.parametrize(("change", "code", "name"), [
    ({"scales": torch.ones(64, 3)}, Code.SCALE_LAYOUT_MISMATCH, "scales"),
    ({"scales": torch.ones(48, 4)}, Code.SCALE_LAYOUT_MISMATCH, "scales"),
    ({"zeros": torch.ones(64, 2, dtype=torch.int8)}, Code.DIM_MISMATCH, "zeros"),
    ({"weight_q": torch.ones(64, 64, dtype=torch.int8)}, Code.DIM_MISMATCH, "weight_q"),
    ({"weight_q": torch.ones(64, 128, dtype=torch.uint8)}, Code.DTYPE_UNSUPPORTED, "weight_q"),
    ({"format": "int5"}, Code.VALUE_OUT_OF_RANGE, "format"),
    ({"group_size": -2}, Code.VALUE_OUT_OF_RANGE, "group_size"),
    ({"activations": "int8"}, Code.SCALE_LAYOUT_MISMATCH, "group_size"),
    ({"bias": torch.ones(64)}, Code.MIXED_DTYPES, "bias")])
def test_a_layer_says_which_argument_is_wrong(change, code, name):
    x, q, scales, _, _ = layer("int8", group=32)
    inputs = {"x": x, "weight_q": q, "scales": scales, "format": "int8", "group_size": 32, **change}
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.quantized_linear(**inputs)
    assert any(r.code is code and r.fact.partition(".")[0] == name
               for r in error.value.reasons), str(error.value)


@pytest.mark.parametrize(("form", "group"),
                         [("int8", 0), ("int8", 32), ("int4", 32), ("fp8_e4m3", 32)])
def test_shards_of_a_quantized_layer(form, group):
    x, q, scales, _, exact = layer(form, group=group, dtype=torch.float32)
    world = 2

    def run(x, rank, by):
        wq, s, _ = quantized_shard(q, scales, None, rank, world, format=form, group_size=group,
                                   by=by)
        return lz.quantized_linear(x, wq.contiguous(), s.contiguous(), format=form,
                                   group_size=group)

    columns = torch.cat([run(x, r, "column") for r in range(world)], -1)
    rows = sum(run(part, r, "row") for r, part in enumerate(x.chunk(world, -1)))
    torch.testing.assert_close(columns.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_shard_does_not_cut_through_a_group():
    _, q, scales, _, _ = layer("int4", k=128, group=32)
    with pytest.raises(lz.errors.InvalidCall, match="multiple of"):
        quantized_shard(q, scales, None, 0, 8, format="int4", group_size=32, by="row")


def test_slices_do_not_show():
    """A weight of more than one slice gives what it gives in one piece."""
    x, q, scales, _, exact = layer("fp8_e4m3", n=1100, k=1024, group=128, rows=40,
                                   dtype=torch.float32)
    out = lz.quantized_linear(x, q, scales, format="fp8_e4m3", group_size=128,
                              backend="torch.dequantized_linear")
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out,
                               F.linear(x, lz.dequantize(q, scales, format="fp8_e4m3",
                                                         block_size=128)))


@pytest.mark.parametrize("activations, format", [("int8", "int8"), ("fp8", "fp8_e4m3")])
def test_gradients_pass_through_rounded_activations(activations, format):
    given = LINEAR.inputs(format, rows=(5,), k=64, n=48, activations=activations)
    x, incoming = given.pop("x"), 1e-3 * torch.randn(5, 48)
    plain = LINEAR.reference(x, **given)
    leaf = x.clone().requires_grad_()
    out = LINEAR.reference(leaf, **given)
    out.backward(incoming)
    weight = lz.dequantize(given["weight_q"], given["scales"], format=format)
    assert torch.equal(out, plain)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, incoming @ weight)


def test_a_given_scale_of_zero_and_a_row_of_zeros_give_the_zero_point() -> None:
    x, scales = torch.zeros(2, 8), torch.zeros(2, 1)
    zeros = torch.tensor([[-70], [25]], dtype=torch.int8)
    for kernel in ("torch.quantize", "reference.quantize"):
        codes = lz.quantize(x, "int8", granularity="channel", symmetric=False, scales=scales,
                            zeros=zeros, backend=kernel)[0]
        assert torch.equal(codes, zeros.expand(2, 8)), kernel
