"""Shared memory: what a kernel needs is declared; one that a device has no room for is refused
before its launch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import ATTENTION, RMS_NORM, Fake, call_facts, nvidia

import layerzero as lz
from layerzero.backends.cuda import KERNELS as CUDA
from layerzero.backends.cuda.attention import decode
from layerzero.backends.cuda.compiler import Machine
from layerzero.backends.cuda.linear import gemv, planes
from layerzero.backends.triton import KERNELS as TRITON
from layerzero.machine import hardware
from layerzero.spec.errors import SpecError
from layerzero.spec.reason import Code
from layerzero.spec.rules.expr import parse
from layerzero.world import snapshot as worlds

ROOMS = tuple(kib << 10 for kib in (48, 64, 99, 163, 227))     # Turing to Blackwell
OURS = {k.id: k for k in (*CUDA, *TRITON)}


def needed(kernel: str, **facts: int) -> int:
    return int(parse(OURS[kernel].shared_memory)(facts))


@pytest.mark.parametrize("kernel", OURS.values(), ids=OURS)
def test_every_kernel_of_ours_declares_it(kernel):
    # which adds up nothing among threads
    assert kernel.shared_memory != "0" or kernel.id in ("triton.mlp", "triton.mlp_portable")


def test_a_kernel_that_the_device_has_no_room_for_is_refused_with_the_numbers(world):
    wide = Fake("fake.wide", ATTENTION, shared_memory="1024 * head_dim")
    lz.register(wide.kernel)
    q = torch.zeros(1, 2, 3, 128)
    small = replace(nvidia(80), shared_per_block=100 << 10)
    (reason,) = lz.explain("attention", q, q, q, on=small).why_not("fake.wide")
    assert (reason.code, reason.want, reason.got) == (Code.CUDA_BLOCK_LIMIT_EXCEEDED,
                                                      f"<= {100 << 10}", 128 << 10)
    assert "shared memory of a block in bytes must be <= 102400, got 131072" in reason.message
    enough = replace(small, shared_per_block=227 << 10)
    for device in (enough, nvidia(80)):                    # not known: the launch will tell
        assert lz.explain("attention", q, q, q, on=device).kernel == "fake.wide"
    short = torch.zeros(1, 2, 3, 64)
    assert lz.explain("attention", short, short, short, on=small).kernel == "fake.wide"


def test_the_largest_call_of_a_bucket_must_fit_too_and_what_was_not_given_counts_as_nothing(world):
    grows = Fake("fake.grows", RMS_NORM, shared_memory="rows")
    lz.register(grows.kernel)
    device = replace(nvidia(80), shared_per_block=40)
    # its bucket ends at 48
    assert lz.explain("rms_norm", torch.zeros(33, 8), on=device).why_not("fake.grows")
    assert lz.explain("rms_norm", torch.zeros(32, 8), on=device).kernel == "fake.grows"
    paged = OURS["triton.paged_attention_decode"]
    names = parse(paged.shared_memory).names
    assert "max_seqlen_q" in names
    assert needed(paged.id, group=4, max_seqlen_q=0, head_dim=128, head_dim_v=128) < 48 << 10


def test_it_is_arithmetic_over_facts_of_the_op():
    with pytest.raises(SpecError, match="shared_memory = '4 \\* hedas' reads 'hedas'"):
        Fake("fake.typo", ATTENTION, shared_memory="4 * hedas")


def test_what_a_block_may_share_is_read_and_is_no_part_of_the_signature():
    class Props:
        name, major, minor, multi_processor_count, total_memory = "a GPU", 9, 0, 132, 1 << 37
        shared_memory_per_block_optin = 232448

    device = hardware.nvidia_device(Props(), 0, {})
    assert device.shared_per_block == 232448 == device.facts()["shared_per_block"]
    assert device.signature == replace(device, shared_per_block=0).signature
    assert worlds.current().device("cpu").shared_per_block == 0


def test_what_cuda_decode_declares_is_what_it_needs_at_least():
    """With so much room its configuration fits, with less it does not."""
    for dim, group, tokens, homes, keys, paged in product(
            (64, 128, 256), (1, 4, 7, 16), (1, 2, 4, 8), (1, 8, 500), (1, 300, 40_000),
            (False, True)):
        rows = group * tokens
        if rows > (32 if dim <= 128 else 16):
            continue
        need = needed("cuda.attention_decode", head_dim=dim, group=group, seq_q=tokens)
        assert need == needed("cuda.paged_attention_decode", head_dim=dim, group=group,
                              max_seqlen_q=tokens)
        for room in (*ROOMS, need):
            config = decode.config(rows, homes, keys, dim, paged, Machine(132, room))
            takes = decode.shared_bytes(rows, dim, config.warps, config.stages)
            assert (takes <= room if need <= room else takes > room), (dim, rows, homes, keys,
                                                                       paged, room)


def test_where_there_is_as_much_as_cuda_gemv_declares_it_fits():
    tight = 0
    for format, rows, k, n, group, size, zeros in product(
            gemv.FORMATS, (1, 3, 4, 9, 16), (128, 2048, 4096, 11008, 28672, 32768), (1, 256, 14336),
            (0, 32, 128, 256), (2, 4), (False, True)):
        if group >= k:
            continue
        shape = gemv.Shape(1 << (rows - 1).bit_length(), n, k, format, group, size, zeros)
        need = needed("cuda.quantized_linear", rows=rows, in_features=k)
        for room in ROOMS:
            if need > room:
                continue
            machine = Machine(132, room)
            config = gemv.with_slots(shape, gemv.config(shape, machine), machine)
            assert shape.shared(config) <= room, (shape, room)
            tight = max(tight, shape.shared(config) / need)
            if planes.is_supported(rows, k, format, group):
                other = planes.Shape(n, k, group, zeros)
                assert planes.with_slots(other, planes.config(other, machine),
                                         machine).shared <= need
    assert (tight > 0.5 and needed("cuda.quantized_linear", rows=16, in_features=1 << 15)
            <= 227 << 10)


def test_a_head_dimension_that_fits_no_tile_evenly_is_known_to_need_the_next_power_of_two():
    """160 was taken for 160, and asked an H200 for 272,384 bytes where it has 232,448."""
    for dim in (129, 160, 192, 256):
        assert needed("triton.attention_decode", group=4, seq_q=1, head_dim=dim,
                      head_dim_v=dim) == 76_800
    assert needed("triton.attention_decode", group=8, seq_q=8, head_dim=256,
                  head_dim_v=256) > 163 << 10
    device = replace(nvidia(89), shared_per_block=99 << 10)
    q, k = torch.zeros(1, 16, 4, 256, dtype=torch.float16), torch.zeros(1, 2, 64, 256,
                                                                        dtype=torch.float16)
    facts = {**call_facts(ATTENTION, q, k, k), **device.facts(), "device": "cuda"}
    assert needed("triton.attention_decode",
                  **{n: facts[n] for n in ("group", "seq_q", "head_dim", "head_dim_v")}) > \
        device.shared_per_block
