"""Which generation of GPU gets which kernel: the real declarations, on devices that need not be
here.
"""

from __future__ import annotations

import pytest
import torch
from helpers import ATTENTION, call_facts, nvidia, policy, qkv

import layerzero as lz
from layerzero.backends import flash_attn, torch_sdpa
from layerzero.selection.engine import SelectionContext, make_roster, select
from layerzero.selection.policy import PolicyRule
from layerzero.selection.score import rates_of
from layerzero.spec.device import Device, Generation, GPUGeneration, generation_of, table_from_json
from layerzero.spec.reason import Code
from layerzero.spec.rules import generations
from layerzero.world.registry import catalog

V2, V3, V4 = "flash_attn.v2", "flash_attn.v3", "flash_attn.v4"
FLASH = [k for k in flash_attn.KERNELS if k.op is ATTENTION]
ALL = catalog.discover()[0].kernels_of("attention")
LENIENT = {"allow_untested": True, "jit": "in_request"}
# Every SM that was sold, and some that were not.
MODELS = {"pascal": (60, 61), "volta": (70, 72), "turing": (75,), "ampere": (80, 86, 87),
          "ada_lovelace": (89,), "hopper": (90,), "blackwell": (100, 103, 110, 120, 121),
          "unknown": (130, 150, 300)}
EVERY_SM = [sm for models in MODELS.values() for sm in models]


def facts(seq=4096, heads=32, dim=128, dtype=torch.bfloat16):
    return call_facts(ATTENTION, *(torch.empty(1, heads, seq, dim, dtype=dtype, device="meta")
                                   for _ in range(3)))


def routed(device, kernels=ALL, rules=(), call_facts=None, **settings):
    """The plan on `device` as if every library were installed there."""
    context = SelectionContext(policy(*rules, **settings), device.facts(), device.signature,
                               rates_of(device.type))
    all_facts = {**(call_facts or facts()), **device.facts()}
    return select(ATTENTION, make_roster(kernels, context), all_facts, context, thorough=True)


def order(plan):
    return [s.kernel for s in plan.steps]


@pytest.mark.parametrize(("name", "sm"),
                         [(name, sm) for name, models in MODELS.items() for sm in models])
def test_an_sm_is_of_its_generation(name, sm):
    device = nvidia(sm)
    assert device.gpu_generation == name
    assert device.generation is GPUGeneration.__members__.get(name.upper())


def test_generations_compare_by_age_and_an_unknown_one_does_not():
    ages = [nvidia(sm).generation for sm in (60, 70, 75, 80, 89, 90, 100)]
    assert None not in ages and ages == sorted(ages) and len(set(ages)) == len(ages)
    assert nvidia(130).generation is None


@pytest.mark.parametrize("sm", EVERY_SM)
def test_version_3_serves_hopper_and_nothing_else(sm):
    plan = routed(nvidia(sm), **LENIENT)
    assert (V3 in order(plan)) == (nvidia(sm).gpu_generation == "hopper")
    if V3 not in order(plan):
        assert Code.GPU_GENERATION_UNSUPPORTED in [r.code for r in plan.why_not(V3)]
        assert nvidia(sm).gpu_generation in str(plan.why_not(V3)[0])


@pytest.mark.parametrize("sm", MODELS["blackwell"])
def test_on_blackwell_version_4_is_preferred_where_it_is_there(sm):
    plan = routed(nvidia(sm), FLASH, **LENIENT)
    assert order(plan) == [V4, V2]
    assert plan.steps[1].note == "untested on hardware"
    plan = routed(nvidia(sm), call_facts=facts(seq=32768), **LENIENT)
    assert order(plan)[:2] == ["torch.sdpa", V4]


@pytest.mark.parametrize(("settings", "kernel", "code"), [
    ({"jit": "in_request"}, V2, Code.UNTESTED_ON_HARDWARE),
    ({"allow_untested": True}, V4, Code.JIT_NOT_WARMED)])
def test_no_version_is_chosen_by_chance(settings, kernel, code):
    plan = routed(nvidia(100), FLASH, **settings)
    assert kernel not in order(plan) and code in [r.code for r in plan.why_not(kernel)]


def test_version_4_serves_where_it_is_named():
    plan = routed(nvidia(100), rules=(PolicyRule.of("lock", V4),))
    assert order(plan) == [V4] and plan.locked


@pytest.mark.parametrize(("sm", "want"), [
    (70, []), (75, []), (80, [V2]), (86, [V2]), (89, [V2]), (90, [V2, V3, V4]), (100, [V2, V4]),
    (120, [V2, V4])])
def test_who_may_serve_where(sm, want):
    assert sorted(order(routed(nvidia(sm), FLASH, **LENIENT))) == want


def test_on_turing_half_precision_is_still_served():
    plan = routed(nvidia(75), call_facts=facts(dtype=torch.float16))
    assert order(plan)[:2] == ["torch.sdpa", "torch.sdpa_efficient"]
    for kernel in ("torch.sdpa_flash_cuda", "torch.sdpa_cudnn", V2):
        assert Code.SM_TOO_OLD in [r.code for r in plan.why_not(kernel)]


@pytest.mark.parametrize("sm", MODELS["unknown"])
def test_on_a_generation_nobody_has_seen_torch_decides(sm):
    plan = routed(nvidia(sm), **LENIENT)
    assert plan.kernel is not None
    assert {"torch.sdpa", "reference.attention"} <= set(order(plan))
    for k in torch_sdpa.KERNELS:
        reasons = [r.code for r in plan.why_not(k.id)]
        if k.id in ("torch.sdpa_flash_cuda", "torch.sdpa_cudnn", "torch.sdpa_efficient"):
            assert Code.SM_TOO_NEW in reasons, k.id
    # Without leave to try the untested, what torch itself would run goes before all that was made
    # for other cards.
    assert routed(nvidia(sm)).kernel == "torch.sdpa"


def test_an_unknown_generation_can_what_the_newest_older_one_can():
    newer = nvidia(300)
    assert (newer.supports_bf16 and newer.supports_fp8
            and newer.tensor_core_generation == generation_of(120).tensor_core)


def test_a_table_can_name_hardware_newer_than_this_release():
    table = (*table_from_json([{"name": "rubin", "sm_first": 130, "sm_last": 139, "tensor_core": 6,
                                "bf16": True}]),)
    row = generation_of(130, table)
    device = Device("cuda", 0, "a newer GPU", "nvidia", sm=130, gpu_generation=row.name,
                    supports_bf16=row.bf16,
                    tensor_core_generation=row.tensor_core)
    ours = lz.Kernel("lib.rubin", ATTENTION, lambda: ATTENTION.reference,
                     requires=(generations("rubin"),),
                     prior=100, less_work="a test")
    assert routed(device, [*ALL, ours]).kernel == "lib.rubin"
    assert "lib.rubin" not in order(routed(nvidia(100), [*ALL, ours]))
    assert isinstance(row, Generation)


@pytest.mark.parametrize("sm", EVERY_SM)
def test_every_generation_has_a_kernel_for_every_dtype(sm):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert routed(nvidia(sm), call_facts=facts(dtype=dtype)).kernel is not None


def test_the_same_is_seen_through_the_public_question(world):
    q, k, v = qkv(seq_q=64, heads=4, dim=64, dtype=torch.bfloat16)
    on_hopper, on_blackwell = (lz.explain("attention", q, k, v, on=nvidia(sm)) for sm in (90, 100))
    assert Code.GPU_GENERATION_UNSUPPORTED not in [r.code for r in on_hopper.why_not(V3)]
    assert Code.GPU_GENERATION_UNSUPPORTED in [r.code for r in on_blackwell.why_not(V3)]
    assert on_hopper.kernel and on_hopper.facts["gpu_generation"] == "hopper"
    # the question left nothing behind
    assert lz.explain("attention", q, k, v).facts["device"] == "cpu"
