"""Prints the shared memory that Triton's compiler lays out for kernels of linear attention, without
a GPU: a line of JSON for each specialization, beside what is declared and what a device has.

Compiling stops where shared memory is allocated, before the minute that LLVM and ptxas would take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.compiler import ASTSource

from layerzero.backends.triton import DEFAULTS
from layerzero.backends.triton import linear_attention as kernels
from layerzero.spec.rules.expr import parse

ROOMS = (99 << 10, 163 << 10, 227 << 10)       # of a block on sm_86 and 120, sm_80, sm_90
TYPES = {"float32": "*fp32", "bfloat16": "*bf16"}
ITEMSIZE = {"float32": 4, "bfloat16": 2}
FLOAT32 = ("a_ptr", "dt_ptr", "first_ptr", "last_ptr")
DECLARED = {kernel.id: parse(kernel.shared_memory) for kernel in DEFAULTS}


class Allocated(Exception):
    """The bytes that a block takes."""


def allocate(module: Any, version: int) -> int:
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager, *extra(passes.ttgpuir.add_allocate_warp_groups))
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, version)
    manager.run(module, "allocate")
    return int(module.get_int_attr("ttg.shared"))


def extra(function: Any) -> tuple[bool, ...]:
    """Returns a flag that newer releases take, off."""
    return (False,) if ", arg1: bool" in (function.__doc__ or "") else ()


def shared(function: Any, dtype: str, constants: Mapping[str, Any], stages: int = 3) -> int:
    """Returns the bytes of shared memory of one specialization on sm_90."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FLOAT32 else TYPES[dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("dt_min", "dt_max", "scale") else "i32"

    def add_stages(self: Any, made: dict[str, Any], options: Any, *more: Any) -> None:
        add(self, made, options, *more)

        def stop(module: Any, metadata: Any) -> None:
            raise Allocated(allocate(
                module, nvidia_compiler.get_ptx_version_from_options(options, 90)))

        made["llir"] = stop

    backend = nvidia_compiler.CUDABackend
    add, backend.add_stages = backend.add_stages, add_stages
    try:
        triton.compile(ASTSource(function, signature, values, attributes),
                       target=GPUTarget("cuda", 90, 32),
                       options={"num_warps": 4, "num_stages": stages})
    except Allocated as e:
        return int(e.args[0])
    finally:
        backend.add_stages = add
    raise AssertionError("the compiler has passed the stage of allocation")


def report(name: str, needed: int, room: int, **facts: int) -> None:
    print(json.dumps({"kernel": name, "needed": needed, "room": room, **facts,
                      "declared": int(DECLARED[name](facts))}), flush=True)


def scan() -> None:
    flags = dict.fromkeys(("SKIP", "GATE", "BIAS", "SOFTPLUS", "LIMITS", "FIRST"), True)
    for dtype, dim, state in (("float32", 64, 128), ("bfloat16", 64, 128), ("float32", 16, 16)):
        needed: dict[int, int] = {}            # by the number of stages
        for room in ROOMS:
            stages = kernels.scan_stages(dim, state, ITEMSIZE[dtype], room)
            needed[stages] = needed.get(stages) or shared(
                kernels.scan_kernel, dtype, {
                    "DIM": dim, "STATE": state, "BLOCK": dim, "WIDE": state,
                    "CHUNK": kernels.CHUNK, **flags}, stages)
            report("triton.mamba_chunk_scan", needed[stages], room, head_dim=dim, state_dim=state,
                   stages=stages)


def others() -> None:
    """The largest sizes that the rules of the others allow."""
    delta = {"NORM": True, "EPS": 1e-6, "FIRST": True}
    chunks = {"DIM": 128, "VALUES": 128, "WIDE": 128, "BLOCK": 64, "CHUNK": kernels.CHUNK}
    tokens = {"DIM": 256, "VALUES": 256, "WIDE": 256, "BLOCK": 32}
    update = {"DIM": 256, "STATE": 256, "BLOCK": 32, "WIDE": 256, "SKIP": True, "GATE": True,
              "BIAS": True, "SOFTPLUS": True}
    for name, function, constants in (
            ("gated_delta_rule", kernels.delta_chunk_kernel, {**chunks, **delta}),
            ("gated_delta_rule_tokens", kernels.delta_token_kernel, {**tokens, **delta}),
            ("selective_state_update", kernels.update_kernel, update)):
        report(f"triton.{name}", shared(function, "float32", constants), ROOMS[-1])


if __name__ == "__main__":
    scan()
    others()
