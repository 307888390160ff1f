"""Linear layers with ggml's weights, multiplied as bytes: the packed kernels have the same bits with
and without tiles, on any number of threads and rows. tests/native compares them with plain C++.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.backends.native import build, ggml
from layerzero.models.weights.packing import forget_packed, packed_weights
from layerzero.ops.formulas.ggml import block_product, random_blocks, rounded_activations
from layerzero.spec.errors import ConfigError

pytestmark = pytest.mark.skipif(build.is_built() is not True,
                                reason="the CPU kernels are not built here; run: lz build")

# rows of x, outputs, inputs: one row, tiles with a rest, a last group and panel that are not full,
# and more than one chunk of a panel
SIZES = ((1, 37, 512), (3, 40, 768), (13, 70, 2304))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def case(format: str, rows: int, outputs: int, inputs: int):
    gen = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=gen)
    return x, random_blocks(gen, (outputs,), inputs, format), torch.randn(outputs, generator=gen)


def exact(x, weight, format):
    return block_product(*rounded_activations(x, format, torch.float64), weight, format)


@pytest.mark.parametrize("format", ggml.FORMATS)
def test_packed_kernels_are_exact_and_tiles_change_no_bit(format):
    for size in SIZES:
        x, weight, bias = case(format, *size)
        packed = ggml.pack_weight(weight, format)
        got, *others = (ggml.multiply(x, packed, bias, size[1], format, tiles=tiles)
                        for tiles in (None, False, True))      # alike where there are no tiles
        assert all(torch.equal(result, got) for result in others)
        assert torch.allclose(got.double(), exact(x, weight, format) + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ggml.FORMATS)
def test_threads_and_rows_of_a_batch_change_no_bit(format):
    x, weight, bias = case(format, 13, 70, 2304)
    packed = ggml.pack_weight(weight, format)
    torch.set_num_threads(1)
    want = ggml.multiply(x, packed, bias, 70, format)
    for count in (2, 3, 4):
        torch.set_num_threads(count)
        assert torch.equal(ggml.pack_weight(weight, format), packed)
        assert torch.equal(ggml.multiply(x, packed, bias, 70, format), want)
    single = [ggml.multiply(row[None], packed, bias, 70, format) for row in x]
    assert torch.equal(torch.cat(single), want)


def test_instruction_sets_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(build, "_process_sve_bytes", lambda: 32)
    assert build.disabled_isa({}) == frozenset() and build.sve_bytes({}) == 32
    environ = {"LAYERZERO_DISABLE_ISA": " AMX, sve,"}
    assert build.disabled_isa(environ) == {"amx", "sve"} and build.sve_bytes(environ) == 0
    assert len({build.library_path(e).parent.name for e in ({}, environ)}) == 2
    with pytest.raises(ConfigError, match="amx, sve, separated by ',', got avx512; correct"):
        build.disabled_isa({"LAYERZERO_DISABLE_ISA": "avx512"})
    for length in (16, 0):                     # NEON does the same work
        monkeypatch.setattr(build, "_process_sve_bytes", lambda length=length: length)
        assert build.sve_bytes({}) == 0


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_types_are_widened_and_rounded_once(dtype):
    x, weight, bias = case("q4_k", 5, 40, 512)
    x, bias = x.to(dtype), bias.to(dtype)
    packed = ggml.pack_weight(weight, "q4_k")
    got = ggml.multiply(x, packed, bias, 40, "q4_k")
    assert torch.equal(got, ggml.multiply(x.float(), packed, bias.float(), 40, "q4_k").to(dtype))


def test_rows_may_lie_apart_and_have_any_number_of_axes():
    x, weight, bias = case("q6_k", 6, 16, 512)
    want = lz.quantized_linear(x, weight, bias=bias, format="q6_k", activations="q8",
                               backend="native.ggml_linear")
    wide = torch.zeros(6, 1024)
    wide[:, :512] = x
    for view in (wide[:, :512], x.view(2, 3, 512), wide.view(2, 3, 1024)[..., :512]):
        got = lz.quantized_linear(view, weight, bias=bias, format="q6_k", activations="q8",
                                  backend="native.ggml_linear")
        assert torch.equal(got.reshape(6, 16), want)


def test_values_of_the_largest_and_smallest_magnitude_stay_exact():
    """Codes of 127 against the largest and smallest codes of every format: no product overflows."""
    for format in ggml.FORMATS:
        weight = case(format, 1, 8, 256)[1]
        for byte in (0, 255):
            extreme = weight.clone().view(8, -1, weight.shape[1] * 32 // 256 if format[-1] != "k"
                                          else weight.shape[1])
            start, stop = {"q6_k": (0, 208)}.get(format, (4 if format[-2:] in ("_1", "_k") else 2,
                                                          None))
            extreme[..., start:stop] = byte
            blocks = extreme.reshape(8, -1)
            for sign in (1.0, -1.0):
                x = torch.full((5, 256), sign)
                got = ggml.multiply(x, ggml.pack_weight(blocks, format), None, 8, format)
                want = exact(x, blocks, format)
                assert torch.allclose(got.double(), want, rtol=2e-6, atol=1e-4), (format, byte)


def test_a_weight_is_packed_once_and_again_after_a_write():
    x, weight, _ = case("q4_k", 1, 16, 256)

    def linear():
        return lz.quantized_linear(x, weight, format="q4_k", activations="q8",
                                   backend="native.ggml_linear")

    forget_packed(weight)
    before = packed_weights().weights
    first = linear()
    assert torch.equal(linear(), first) and packed_weights().weights == before + 1
    weight[:, 16:] ^= 255
    assert not torch.equal(linear(), first)
    assert packed_weights().weights == before + 1
    assert forget_packed(weight) == 1


def test_packed_weights_are_shared_by_a_sealed_file(tmp_path, monkeypatch):
    build.module()                             # that of the cache folder before
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))
    x, weight, _ = case("q4_k", 1, 16, 256)
    want = ggml.pack_weight(weight, "q4_k")
    assert torch.equal(ggml.packed_file(weight, "q4_k"), want)
    written, = (tmp_path / "packed").glob("*.bin")
    before = written.stat()
    again = ggml.packed_file(weight.clone(), "q4_k")
    assert torch.equal(again, want) and written.stat().st_mtime_ns == before.st_mtime_ns
    assert torch.equal(ggml.multiply(x, again, None, 16, "q4_k"),
                       ggml.multiply(x, want, None, 16, "q4_k"))
    written.write_bytes(bytes(before.st_size))  # damaged: packed anew, and replaced
    assert torch.equal(ggml.packed_file(weight, "q4_k"), want)
    assert written.read_bytes() == want.numpy().tobytes()
    (tmp_path / "packed").chmod(0o777)         # where others may write nothing is read or written
    assert torch.equal(ggml.packed_file(case("q4_k", 2, 16, 256)[1], "q4_k"),
                       ggml.pack_weight(case("q4_k", 2, 16, 256)[1], "q4_k"))
    (tmp_path / "file").touch()                # no folder can be made below it
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="packed weights cannot be kept in"):
        assert torch.equal(ggml.packed_file(weight, "q4_k"), want)


FETCHES = """
#include "quant/linear.h"
using namespace lz::quant;
void run(const Weight<Avx512, FORMAT> *w, const Activations &a, __m512 *to) {
  multiply<Avx512, FORMAT, 1, Avx512::streams(FORMAT)>(w, 64, a, 0, to);
}
"""


@pytest.mark.parametrize("format", ["Q4_0", "Q4_K"])
def test_compilers_keep_what_is_fetched_ahead(format, tmp_path):
    """GCC takes a function that only has builtin prefetches for one without effect."""
    compiler = "g++" if platform.machine() == "x86_64" else "x86_64-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    source = tmp_path / "fetches.cpp"
    source.write_text(FETCHES.replace("FORMAT", format))
    done = subprocess.run(
        [compiler, "-O3", "-std=c++17", "-march=icelake-server", "-S", "-I",
         str(Path(build.__file__).parent), str(source), "-o", "-"],
        capture_output=True, text=True, check=True)
    # the cache lines of 8 groups' blocks of 288 bytes, and of a super-block
    assert done.stdout.count("prefetcht1") >= {"Q4_0": 8 * 5, "Q4_K": 37}[format]
