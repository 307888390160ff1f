"""The probe against a real NVIDIA GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import NVIDIA_ONLY

from layerzero.machine import hardware
from layerzero.spec.device import GENERATIONS, Device
from layerzero.spec.errors import ConfigError
from layerzero.spec.op import DEVICE_FACTS

pytestmark = NVIDIA_ONLY


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_properties_agree_with_torch():
    d, props = hardware.probe("cuda"), torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability(0)
    assert d.name == torch.cuda.get_device_name(0)
    assert d.sm == 10 * major + minor
    assert (d.vendor, d.cores, d.total_memory) == ("nvidia", props.multi_processor_count,
                                                   props.total_memory)
    assert d.gpu_generation in {row.name for row in GENERATIONS}
    assert d.runtime_version == torch.version.cuda
    assert d.torch_version == torch.__version__


def test_low_precision_agrees_with_the_hardware():
    d = hardware.probe("cuda")
    assert d.supports_bf16 == torch.cuda.is_bf16_supported(including_emulation=False)
    a = torch.randn(32, 32, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def fp8_matmul() -> torch.Tensor:
        return torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    if d.supports_fp8:
        wanted = a.float() @ a.float().t()
        torch.testing.assert_close(fp8_matmul().float(), wanted, rtol=1e-2, atol=1e-1)
    else:
        with pytest.raises(RuntimeError):
            fp8_matmul()


def test_facts_and_json():
    d = hardware.probe("cuda")
    assert d.facts().keys() == DEVICE_FACTS
    assert (d.facts()["device"], d.facts()["cuda_version"]) == ("cuda", torch.version.cuda)
    assert Device.from_json(d.to_json()) == d


def test_driver_and_cudnn_versions():
    d = hardware.probe("cuda")
    assert d.driver_version == hardware._nvml_driver_version() != ""
    numbers = [int(part) for part in d.cudnn_version.split(".")]
    assert numbers[0] * 10000 + numbers[1] * 100 + numbers[2] == torch.backends.cudnn.version()


def test_all_devices_and_an_index_beyond_them():
    count = torch.cuda.device_count()
    assert [d.index for d in hardware.all_devices() if d.type == "cuda"] == list(range(count))
    with pytest.raises(ConfigError, match=f"cuda:{count} does not exist"):
        hardware.probe("cuda", count)


def test_present_leaves_cuda_unstarted_so_that_a_child_can_use_it():
    assert in_new_process("""
import os
from layerzero.machine import hardware
assert "cuda" in hardware.present()
import torch
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""") == "0"


def test_a_forked_child_of_a_started_process_gets_a_typed_error():
    assert in_new_process("""
import os, torch
from layerzero.machine import hardware
from layerzero.spec.errors import ConfigError
torch.ones(2, device="cuda")
pid = os.fork()
if pid == 0:
    try:
        hardware.probe("cuda")
    except ConfigError as e:
        os._exit(0 if "forked subprocess" in str(e) else 2)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""") == "0"


def test_triton_is_read_but_not_imported():
    pytest.importorskip("triton")
    assert in_new_process("""
import sys
from layerzero.machine import hardware
version = hardware.probe("cuda").triton_version
assert "triton" not in sys.modules
import triton
print(version == triton.__version__)
""") == "True"
