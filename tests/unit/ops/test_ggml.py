"""The formats of ggml: every byte that its quantizers write, every value that its dequantizers read,
and its products. tests/data/ggml_golden.json holds what ggml itself gave.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.ops.formulas.ggml import (
    GGML_FORMATS,
    Q8_1,
    block_product,
    dequantize_blocks,
    quantize_blocks,
    random_blocks,
    rounded_activations,
)
from layerzero.spec.reason import Code

SCRIPT = Path(__file__).parents[2] / "data" / "ggml_golden.py"
spec = importlib.util.spec_from_file_location("ggml_golden", SCRIPT)
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)
GOLDEN = json.loads(golden.GOLDEN.read_text())["formats"]
INPUTS = torch.tensor(golden.inputs()).view(-1, golden.WIDTH)


def products(x: torch.Tensor, blocks: torch.Tensor, form: str) -> torch.Tensor:
    return block_product(*rounded_activations(x, form, torch.float64), blocks, form)


def from_base64(text: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


@pytest.mark.parametrize("form", [*GGML_FORMATS, "q8_1"])
def test_the_blocks_are_those_of_ggml(form):
    want = from_base64(GOLDEN[form]["blocks"], torch.uint8)
    got = quantize_blocks(INPUTS, form)
    assert torch.equal(got.flatten(), want)
    if form != "q8_1":
        values = dequantize_blocks(got, form)
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == GOLDEN[form]["values"]
        codes = lz.quantize(INPUTS, form)
        assert torch.equal(codes, got)
        assert torch.equal(lz.dequantize(codes, format=form), values)


def test_the_table_of_formats_is_that_of_ggml():
    for name, fmt in {**GGML_FORMATS, "q8_1": Q8_1}.items():
        assert (fmt.block, fmt.block_bytes) == golden.TYPES[name][1:], name
        assert fmt.row_width(fmt.row_bytes(1024)) == 1024


@pytest.mark.parametrize("form", GGML_FORMATS)
def test_half_types_and_what_is_not_finite(form):
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(quantize_blocks(x, form), quantize_blocks(x.float(), form))
    x[0, 3], x[0, 4], x[0, 5] = torch.inf, -torch.inf, torch.nan
    size = GGML_FORMATS[form].block
    tame = x.clone()
    peak = x[0, 6:size].abs().max().maximum(x[0, :3].abs().max())
    tame[0, 3], tame[0, 4], tame[0, 5] = peak, -peak, 0.0
    assert torch.equal(quantize_blocks(x, form), quantize_blocks(tame, form))
    assert quantize_blocks(x[:0], form).shape == (0, GGML_FORMATS[form].row_bytes(256))
    zeros = dequantize_blocks(quantize_blocks(torch.zeros(1, 256), form), form)
    assert zeros.count_nonzero() == 0


# Relative RMS error of normally distributed values, in rows of 512.
ERRORS = {"q4_0": 0.09, "q4_1": 0.085, "q5_0": 0.045, "q5_1": 0.04, "q8_0": 0.006, "q2_k": 0.32,
          "q3_k": 0.17, "q4_k": 0.08, "q5_k": 0.04, "q6_k": 0.02, "q8_k": 0.009, "iq4_nl": 0.08,
          "iq4_xs": 0.08}


@pytest.mark.parametrize("form", GGML_FORMATS)
def test_a_layer_in_blocks(form):
    gen = torch.Generator().manual_seed(2)
    weight, x = torch.randn(8, 512, generator=gen), torch.randn(3, 512, generator=gen)
    q = lz.quantize(weight, form)
    restored = lz.dequantize(q, format=form)
    assert float((restored - weight).norm() / weight.norm()) < ERRORS[form]
    bias = torch.randn(8, generator=gen)
    plain = lz.quantized_linear(x, q, bias=bias, format=form)
    torch.testing.assert_close(plain, x @ restored.t() + bias)
    rounded = lz.quantized_linear(x, q, bias=bias, format=form, activations="q8")
    gap = float((rounded - plain).norm() / plain.norm())
    assert 0 < gap < 0.02                      # x is rounded to 8 bits


def test_blocks_inside_torch_compile():
    def there_and_back(x):
        q = lz.quantize(x, "q5_1")
        return lz.quantized_linear(x, q, format="q5_1", activations="q8"), lz.dequantize(
            q, format="q5_1"), q

    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(6))
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x), there_and_back(x)):
        torch.testing.assert_close(got, want)


def test_q8_1_keeps_its_sums_in_float16():
    """The minima of q4_1 and q5_1 are multiplied by the sums as ggml stores them."""
    gen = torch.Generator().manual_seed(3)
    q = random_blocks(gen, (4,), 64, "q4_1")
    x = torch.randn(2, 64, generator=gen)
    blocks = quantize_blocks(x, "q8_1").view(2, 2, 36)
    d, s = blocks[..., :4].contiguous().view(torch.float16).double().unbind(-1)
    codes = blocks[..., 4:].view(torch.int8).double()
    weight = q.view(4, 2, 20)
    dw, m = weight[..., :4].contiguous().view(torch.float16).double().unbind(-1)
    nibbles = torch.cat((weight[..., 4:] & 15, weight[..., 4:] >> 4), -1).double()
    want = torch.einsum("rbi,nbi,rb,nb->rn", codes, nibbles, d, dw) + torch.einsum("rb,nb->rn", s,
                                                                                   m)
    torch.testing.assert_close(products(x, q, "q4_1"), want)


@pytest.mark.parametrize("form", ["q4_1", "q6_k"])
@pytest.mark.parametrize("activations", ["none", "q8"])
def test_gradients_pass_through_a_layer_in_blocks(form, activations):
    gen = torch.Generator().manual_seed(5)
    q = random_blocks(gen, (4,), 256, form)
    x = torch.randn(2, 256, generator=gen, requires_grad=True)
    bias = torch.randn(4, generator=gen, requires_grad=True)
    lz.quantized_linear(x, q, bias=bias, format=form, activations=activations).sum().backward()
    torch.testing.assert_close(x.grad, lz.dequantize(q, format=form).sum(0).expand(2, -1))
    torch.testing.assert_close(bias.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize(("change", "code", "name"), [
    ({"scales": torch.ones(4, 1)}, Code.SCALE_LAYOUT_MISMATCH, "scales"),
    ({"weight_q": torch.zeros(4, 145, dtype=torch.uint8)}, Code.DIM_MISMATCH, "weight_q"),
    ({"weight_q": torch.zeros(4, 144, dtype=torch.int8)}, Code.DTYPE_UNSUPPORTED, "weight_q"),
    ({"x": torch.ones(2, 128)}, Code.SHAPE_UNSUPPORTED, "in_features"),
    ({"activations": "int8"}, Code.FEATURE_UNSUPPORTED, "format"),
    ({"group_size": 32}, Code.SCALE_LAYOUT_MISMATCH, "group_size"),
    ({"format": "int8", "weight_q": torch.zeros(4, 256, dtype=torch.int8)}, Code.MISSING_METADATA,
     "scales"),
    ({"format": "int8", "activations": "q8", "scales": torch.ones(4, 1),
      "weight_q": torch.zeros(4, 256, dtype=torch.int8)}, Code.FEATURE_UNSUPPORTED, "format")])
def test_a_layer_in_blocks_says_which_argument_is_wrong(change, code, name):
    values = {"x": torch.ones(2, 256), "weight_q": torch.zeros(4, 144, dtype=torch.uint8),
              "format": "q4_k", **change}
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.quantized_linear(**values)
    assert any(r.code is code and r.fact.partition(".")[0] == name
               for r in error.value.reasons), str(error.value)


@pytest.mark.parametrize(("function", "values", "name"), [
    (lz.quantize, {"x": torch.ones(2, 100), "format": "q4_0"}, "width"),
    (lz.quantize, {"x": torch.ones(2, 128), "format": "q6_k"}, "width"),
    (lz.quantize, {"x": torch.ones(2, 256), "format": "q6_k", "granularity": "channel"},
     "granularity"),
    (lz.quantize, {"x": torch.ones(2, 256), "format": "q6_k", "symmetric": False}, "symmetric"),
    (lz.dequantize, {"q": torch.zeros(2, 19, dtype=torch.uint8), "format": "q4_0"}, "packed"),
    (lz.dequantize, {"q": torch.zeros(2, 18, dtype=torch.uint8), "format": "q4_0", "size": 32},
     "size"),
    (lz.dequantize, {"q": torch.zeros(2, 18, dtype=torch.int8), "format": "int8"}, "scales")])
def test_blocks_that_do_not_fit_are_refused(function, values, name):
    with pytest.raises(lz.errors.InvalidCall) as error:
        function(**values)
    assert any(r.fact.partition(".")[0] == name for r in error.value.reasons), str(error.value)


# The library itself, in a process of its own.

def library_folder() -> Path:
    """The folder of ggml's shared libraries: LZ_TEST_GGML, or that of an installed wheel."""
    folders = [Path(os.environ["LZ_TEST_GGML"])] if "LZ_TEST_GGML" in os.environ else [
        Path(entry) / "pywhispercpp.libs" for entry in sys.path]
    folder = next((f for f in folders if list(f.glob("libggml-base*.so*"))), None)
    if folder is None:
        pytest.skip("no libggml-base*.so: set LZ_TEST_GGML to the folder of one, such as "
                    "pywhispercpp.libs of the pywhispercpp wheel")
    return folder


@pytest.mark.parametrize("form", [*GGML_FORMATS, "q8_1"])
def test_against_the_library(form):
    width, gen = 1024, torch.Generator().manual_seed(4)
    x = torch.randn(16, width, generator=gen) * torch.rand(16, 1, generator=gen).exp()
    asked = {"format": form, "width": width, "x": base64.b64encode(x.numpy().tobytes()).decode()}
    folder = library_folder()
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder), "compute"], check=True,
                          input=json.dumps(asked), capture_output=True, text=True)
    answer = json.loads(done.stdout)
    theirs = from_base64(answer["blocks"], torch.uint8).view(16, -1)
    ours = quantize_blocks(x, form)
    if form.startswith("q8") or platform.machine() in ("x86_64", "AMD64"):
        assert torch.equal(ours, theirs)
    if form == "q8_1":
        return
    values = dequantize_blocks(theirs, form)
    assert torch.equal(values.flatten(), from_base64(answer["values"], torch.float32))
    # where its compiler fused multiplications into sums, other scales may win: as good ones
    error, want = (float((dequantize_blocks(q, form) - x).norm()) for q in (ours, theirs))
    assert abs(error - want) <= 0.02 * want
    if answer["products"]:
        got = products(x[-1], theirs, form)
        want = torch.tensor(answer["products"], dtype=torch.float64)
        # a value may lie between two codes, and be rounded to the other one
        torch.testing.assert_close(got, want, rtol=1e-3, atol=0.02 * float(x[-1].abs().max()))
