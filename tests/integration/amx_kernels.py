"""lz.linear on AMX tiles by a library that configures them once for each thread, as ggml does, and
does not expect that another one releases them, as oneDNN does after each product of torch's."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

import layerzero as lz
from layerzero.spec import rules as r
from layerzero.spec.kernel import Kernel

SIZE = 16, 32                                  # of x and of the weight: one tile
SOURCE = """
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
struct __attribute__((packed)) config {
  uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16];
};
static __thread int configured;
int permit(void) { return syscall(SYS_arch_prctl, 0x1023, 18); }    // ARCH_REQ_XCOMP_PERM, tile data
void product(const uint16_t *x, const uint16_t *w, float *out) {    // w: 16 pairs of inputs x 16
  if (!configured) {
    struct config c = {.palette = 1};
    for (int i = 0; i < 3; i++) c.bytes[i] = 64, c.rows[i] = 16;
    _tile_loadconfig(&c), configured = 1;
  }
  _tile_zero(0); _tile_loadd(1, x, 64); _tile_loadd(2, w, 64);
  _tile_dpbf16ps(0, 1, 2); _tile_stored(0, out, 64);
}
"""


def load():
    folder = Path(tempfile.mkdtemp(prefix="amx"))
    (folder / "amx.c").write_text(SOURCE)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-mamx-tile", "-mamx-bf16", "-o",
                    str(folder / "amx.so"), str(folder / "amx.c")], check=True)
    library = ctypes.CDLL(str(folder / "amx.so"))
    if library.permit():
        raise ImportError("the kernel of this system grants no AMX tiles")

    def run(x, weight):
        pairs = weight.t().reshape(16, 2, 16).transpose(1, 2).contiguous()
        out = torch.empty(16, 16)
        library.product(*(ctypes.c_void_p(t.data_ptr()) for t in (x, pairs, out)))
        return out.to(x.dtype)

    return run


KERNELS = (Kernel("amx_tiles.linear", lz.op("linear"), load, requires=(
    r.device("cpu"), r.dtypes("bfloat16"), r.contiguous("x"), r.contiguous("weight"),
    r.equals("rows", 16), r.equals("in_features", 32), r.equals("out_features", 16),
    r.absent("bias.dtype"), r.absent("activation"))),)
