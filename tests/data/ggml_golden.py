"""What ggml itself computes: its shared libraries by ctypes, and the small file of its results.

Run as a program, in a process of its own, with the folder of libggml-base*.so and libggml-cpu*.so
(such as pywhispercpp.libs of the pywhispercpp wheel) and one of
    write FILE    the blocks of `inputs` in every format, and a digest of their values
    compute       {"format", "x", "width"} as JSON on stdin, x float32 in base64 -> blocks, values
                  and the products of the rows with the last of them

ggml_golden.json comes from the x86-64 library. Its ggml-base is compiled without fused
multiply-add, as C is written; the one for aarch64 fuses, and so rounds some sums of the K-quants
otherwise.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import platform
import sys
from array import array
from pathlib import Path

# name: (ggml_type, values and bytes of a block)
TYPES = {"q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24),
         "q8_0": (8, 32, 34), "q8_1": (9, 32, 36), "q2_k": (10, 256, 84), "q3_k": (11, 256, 110),
         "q4_k": (12, 256, 144), "q5_k": (13, 256, 176), "q6_k": (14, 256, 210),
         "q8_k": (15, 256, 292), "iq4_nl": (20, 32, 18), "iq4_xs": (23, 256, 136)}
WIDTH = 512
GOLDEN = Path(__file__).with_name("ggml_golden.json")


def inputs() -> array[float]:
    """Eight rows: four of a bell shape, heavy tails, steps that tie, all positive, mostly zeros."""
    state, drawn = 2024, []
    for _ in range(8 * WIDTH * 4):             # as in Numerical Recipes
        state = (state * 1664525 + 1013904223) % 2 ** 32
        drawn.append((state >> 8) / 2 ** 24 - 0.5)
    x = array("f", (sum(drawn[4 * i:4 * i + 4]) for i in range(8 * WIDTH)))
    for i in range(WIDTH):
        x[4 * WIDTH + i] = x[4 * WIDTH + i] ** 5 * 100.0
        x[5 * WIDTH + i] = round(x[5 * WIDTH + i] * 8.0) / 4.0
        x[6 * WIDTH + i] = abs(x[6 * WIDTH + i]) + 0.5
        x[7 * WIDTH + i] = x[7 * WIDTH + i] if 300 < i < 320 else -0.0 if i % 3 else 0.0
    return x


class Traits(ctypes.Structure):
    _fields_ = (("type_name", ctypes.c_char_p), ("blck_size", ctypes.c_int64),
                ("blck_size_interleave", ctypes.c_int64), ("type_size", ctypes.c_size_t),
                ("is_quantized", ctypes.c_bool), ("to_float", ctypes.c_void_p),
                ("from_float_ref", ctypes.c_void_p))


class CpuTraits(ctypes.Structure):
    _fields_ = (("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p),
                ("vec_dot_type", ctypes.c_int), ("nrows", ctypes.c_int64))


ROW = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
DOT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
                       ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Library:
    """ggml's functions, of the libraries in a folder."""

    def __init__(self, folder: Path) -> None:
        base, cpu = (sorted(folder.glob(f"libggml-{name}*.so*"))[0] for name in ("base", "cpu"))
        for helper in folder.glob("libgomp*.so*"):
            ctypes.CDLL(str(helper), ctypes.RTLD_GLOBAL)
        self.base = ctypes.CDLL(str(base), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(cpu))
        self.cpu.ggml_cpu_init()
        self.base.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
        self.cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTraits)
        self.base.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.base.ggml_quantize_chunk.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_int64, ctypes.c_void_p)

    def quantize(self, name: str, x: array[float], width: int) -> bytes:
        number, block, size = TYPES[name]
        blocks = ctypes.create_string_buffer(len(x) // block * size)
        if name in ("q8_1", "q8_k"):           # of activations only: no chunks of them
            ROW((f"quantize_row_{name[:3]}{name[3:].upper()}_ref", self.base))(
                x.buffer_info()[0], ctypes.addressof(blocks), len(x))
        else:
            self.base.ggml_quantize_chunk(number, x.buffer_info()[0], blocks, 0, len(x) // width,
                                          width, None)
        return blocks.raw

    def values(self, name: str, blocks: bytes) -> bytes:
        number, block, size = TYPES[name]
        count = len(blocks) // size * block
        out = ctypes.create_string_buffer(4 * count)
        if name == "q8_k":
            ROW(("dequantize_row_q8_K", self.base))(blocks, out, count)
        elif name != "q8_1":                   # it has none
            ROW(self.base.ggml_get_type_traits(number)[0].to_float)(blocks, out, count)
        return out.raw

    def products(self, name: str, blocks: bytes, x: array[float], width: int) -> list[float]:
        """The products of every row of blocks with the last row of x, rounded as ggml does here."""
        number, block, size = TYPES[name]
        traits = self.cpu.ggml_get_type_traits_cpu(number)[0]
        if not traits.vec_dot:
            return []
        other = self.cpu.ggml_get_type_traits_cpu(traits.vec_dot_type)[0]
        rounded, result = ctypes.create_string_buffer(8 * width), ctypes.c_float()
        ROW(other.from_float)(x.buffer_info()[0] + 4 * (len(x) - width),
                              ctypes.addressof(rounded), width)
        row, products = width // block * size, []
        for start in range(0, len(blocks), row):
            DOT(traits.vec_dot)(width, ctypes.addressof(result), 0, blocks[start:start + row], 0,
                                ctypes.addressof(rounded), 0, 1)
            products.append(result.value)
        return products


def main() -> None:
    library, task = Library(Path(sys.argv[1])), sys.argv[2]
    if task == "compute":
        request = json.load(sys.stdin)
        x = array("f", base64.b64decode(request["x"]))
        blocks = library.quantize(request["format"], x, request["width"])
        json.dump({"blocks": base64.b64encode(blocks).decode(),
                   "values": base64.b64encode(library.values(request["format"], blocks)).decode(),
                   "products": library.products(request["format"], blocks, x, request["width"])},
                  sys.stdout)
        return
    formats = {}
    for name in TYPES:
        blocks = library.quantize(name, inputs(), WIDTH)
        formats[name] = {"blocks": base64.b64encode(blocks).decode(),
                         "values": hashlib.sha256(library.values(name, blocks)).hexdigest()}
    version = ctypes.CFUNCTYPE(ctypes.c_char_p)(("ggml_version", library.base))()
    Path(sys.argv[3]).write_text(json.dumps({
        "library": f"ggml {version.decode()}, {platform.machine()}", "formats": formats}, indent=1)
        + "\n")


if __name__ == "__main__":
    main()
