"""AMD, Intel and Gaudi without their hardware: which kernels would serve there, that none is chosen
unasked, and what is written where they are certified.
"""

from __future__ import annotations

import json
import types

import pytest
from helpers import policy

from layerzero.backends import aiter, flash_attn, habana, rocm_torch, triton, xpu
from layerzero.cli.commands.prove.kernels import verify_kernels
from layerzero.dispatch.facts import read
from layerzero.machine.hardware import amd_device
from layerzero.selection.engine import SelectionContext, make_roster, select
from layerzero.selection.score import rates_of
from layerzero.spec.device import Device
from layerzero.spec.errors import ConfigError
from layerzero.spec.kernel import accepted_params
from layerzero.spec.reason import Code
from layerzero.verify.kernel.contract import case_values
from layerzero.world.registry.catalog import builtin_ops

MI300 = Device("cuda", 0, "AMD Instinct MI300X", "amd", arch="gfx942", gpu_generation="cdna3",
               supports_bf16=True)
RDNA3 = Device("cuda", 0, "AMD Radeon PRO W7900", "amd", arch="gfx1100", gpu_generation="rdna3",
               supports_bf16=True)
ARC = Device("xpu", 0, "Intel Arc B580", "intel", gpu_generation="unknown", supports_bf16=True)
GAUDI = Device("hpu", 0, "Gaudi3", "habana", gpu_generation="unknown", supports_bf16=True)
H200 = Device("cuda", 0, "NVIDIA H200", "nvidia", sm=90, gpu_generation="hopper")
PORTABLE = tuple(k for k in triton.KERNELS if k.id.endswith("_portable"))
CK = tuple(k for k in flash_attn.KERNELS if "_ck" in k.id)
ALL = {k.id: k for k in (*aiter.KERNELS, *habana.KERNELS, *rocm_torch.KERNELS, *xpu.KERNELS,
                         *PORTABLE, *CK)}
DECODE = "triton.attention_decode_portable"
SQUARE = {"hq": 4, "hkv": 4, "sq": 16, "sk": 16, "d": 64}


def serving(op: str, device: Device, case: dict, dtype: str = "bfloat16",
            allowed: bool = True) -> list[str]:
    """The kernels of these libraries that would serve, as if all were installed on the device."""
    declared = builtin_ops()[op]
    facts = {**read(declared, case_values(declared, case, dtype)), **device.facts()}
    context = SelectionContext(policy(allow_untested=allowed, jit="in_request"), device.facts(),
                               device.signature, rates_of(device.type))
    kernels = tuple(k for k in ALL.values() if k.op.name == op)
    plan = select(declared, make_roster(kernels, context), facts, context, thorough=True)
    return [step.kernel for step in plan.steps]


@pytest.mark.parametrize(("op", "device", "case", "wanted"), [
    ("attention", MI300, SQUARE, {"aiter.attention", "flash_attn.v2_ck", "torch.sdpa_flash_rocm",
                                  "torch.sdpa_efficient_rocm", DECODE}),
    ("attention", RDNA3, {**SQUARE, "sq": 1}, {DECODE}),
    # what ignores or lacks a softcap does not serve it
    ("attention", MI300, {**SQUARE, "softcap": 5.0}, {DECODE}),
    ("attention", ARC, SQUARE, {"xpu.sdpa_onednn"}),
    ("attention", GAUDI, SQUARE, {"habana.fused_sdpa"}),
    ("attention", H200, SQUARE, set()),
    ("rms_norm", MI300, {}, {"aiter.rms_norm", "triton.rms_norm_portable"}),
    ("rms_norm", ARC, {}, {"xpu.ipex_rms_norm", "triton.rms_norm_portable"}),
    ("rms_norm", GAUDI, {}, {"habana.rms_norm"}),
    ("rope", ARC, {}, {"triton.rope_portable"}),
    ("rope", H200, {}, set()),
])
def test_each_device_has_its_kernels_and_none_serves_unasked(op, device, case, wanted):
    assert set(serving(op, device, case)) == wanted
    assert serving(op, device, case, allowed=False) == []


def test_every_one_is_declared_untested_and_for_its_vendor_only():
    assert len(ALL) == 10 + len(PORTABLE) + len(CK) and len(PORTABLE) == 9 and len(CK) == 2
    for kernel in ALL.values():
        assert kernel.untested
        facts = {**dict.fromkeys(kernel.op.fact_names), **H200.facts()}
        codes = {rule.check(facts).code for rule in kernel.requires
                 if getattr(rule, "fact", "") in ("device", "vendor")
                 and rule.check(facts) is not None}
        assert codes & {Code.PLATFORM_MISMATCH, Code.VENDOR_MISMATCH}, kernel.id


def test_an_amd_gpu_says_how_much_shared_memory_a_block_has():
    properties = types.SimpleNamespace(
        name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-",
        multi_processor_count=304, total_memory=192 << 30, shared_memory_per_block=65536)
    assert amd_device(properties, 0, {}).shared_per_block == 65536
    # the decode kernel's tiles for 64 rows of head_dim 256 do not fit there
    case = {"b": 1, "hq": 16, "hkv": 4, "sq": 16, "sk": 32, "d": 256, "causal": True,
            "align": "bottom_right"}
    small = Device("cuda", 0, "AMD", "amd", arch="gfx942", gpu_generation="cdna3",
                   shared_per_block=65536)
    assert "triton.attention_decode_portable" not in serving("attention", small, case)


@pytest.mark.parametrize("kernel", [k for k in ALL.values() if not k.package], ids=lambda k: k.id)
def test_the_entry_of_torch_exists_and_takes_what_the_op_has(kernel):
    """On every build of torch; without the device it cannot be run."""
    taken = accepted_params(kernel.id, kernel.op, kernel.load())
    assert {"query", "key", "value", "is_causal", "scale"} <= set(taken)


def test_a_person_with_the_hardware_writes_a_report(tmp_path, capsys):
    """Here nothing of the library can be asked, and the report says why for each kernel."""
    assert verify_kernels(device="cpu", backend="habana", report=tmp_path / "report.json") == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"] == {"skipped": 2} and report["hardware"]["type"] == "cpu"
    assert all("habana-torch-plugin" in k["refusal"] for k in report["kernels"])
    with pytest.raises(ConfigError, match="no xpu device"):
        verify_kernels(device="xpu", untested=False)
