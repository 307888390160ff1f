"""What people call a kernel, and what a wrong name is told."""

from __future__ import annotations

import pytest

import layerzero as lz
from layerzero.selection.policy import PolicyRule
from layerzero.spec.errors import ConfigError
from layerzero.spec.names import (
    ALIASES,
    find_kernel,
    find_kernels,
    kernel_patterns,
    names_kernel,
    suggest,
    unknown_kernel,
)
from layerzero.world import snapshot as worlds

KERNELS = {"torch.sdpa": "attention", "torch.sdpa_math": "attention", "torch.linear": "linear",
           "ipex.linear": "linear", "flash_attn.v2": "attention",
           "flash_attn.v2_varlen": "varlen_attention", "liger.rms_norm": "rms_norm"}


@pytest.mark.parametrize(("name", "patterns"), [
    ("torch.sdpa_math", ("torch.sdpa_math",)), ("torch.*", ("torch.*",)), ("torch", ("torch.*",)),
    ("flash_attn", ("flash_attn.*",)), ("flash-attn", ("flash_attn.*",)),
    ("FlashAttention", ("flash_attn.*",)), ("flash_attention_2", ("flash_attn.v2*",)),
    ("flash-attn.v2", ("flash_attn.v2",)), (" Torch.SDPA ", ("torch.sdpa",)),
    ("sdpa", ("torch.sdpa", "torch.sdpa_bias")), ("xformers", ("xformers.*",)),
    ("liger-kernel", ("liger.*",)), ("liger_kernel", ("liger.*",)), ("eager", ("reference.*",)),
    ("flex_attention", ("torch.flex",)), ("flashinfer-python", ("flashinfer.*",)),
    ("my-plugin", ("my_plugin.*",)), ("torch.sdpa_[a-m]*", ("torch.sdpa_[a-m]*",)), ("", ("",))])
def test_a_name_stands_for_patterns_of_ids(name, patterns):
    assert kernel_patterns(name) == patterns


def test_every_other_name_stands_for_kernels_there_are():
    kernels = worlds.current().catalog.op_of_kernel
    for alias in ALIASES:
        assert find_kernels(alias, kernels), alias


def test_every_library_is_known_by_its_names_on_the_package_index_and_in_python():
    for kernel in worlds.current().catalog.kernels:
        if kernel.package and not kernel.package.startswith("layerzero"):
            assert names_kernel(kernel.backend, kernel.id)
            distribution = kernel.distribution or kernel.package
            assert names_kernel(distribution, kernel.id), (distribution, kernel.id)
            assert names_kernel(kernel.package.partition(".")[0], kernel.id), kernel.package


@pytest.mark.parametrize(("name", "op", "message"), [
    ("flash_atn", "*", "no kernel is called 'flash_atn'; did you mean 'flash_attn'?"),
    ("flash_atn.*", "*", "no kernel is called 'flash_atn'; did you mean 'flash_attn'?"),
    ("sdpa_math", "attention",
     "no kernel of lz.attention is called 'sdpa_math'; did you mean 'torch.sdpa_math'?"),
    ("linear", "linear", "did you mean 'torch.linear' or 'ipex.linear'?"),
    ("torch.sdpa_mth", "attention", "did you mean 'torch.sdpa_math'?"),
    ("torchsdpa_math", "*", "did you mean 'torch.sdpa_math'?"),
    ("liger", "attention", "is called 'liger', only of lz.rms_norm; there are kernels of "
                           "flash_attn, torch: lz list attention shows them"),
    ("zzz", "*", "no kernel is called 'zzz'; there are kernels of flash_attn, ipex, liger, torch")])
def test_a_wrong_name_is_told_what_is_near(name, op, message):
    assert message in unknown_kernel(name, KERNELS, op)
    with pytest.raises(ConfigError, match=r"^--kernel: no kernel"):
        find_kernels(name, KERNELS, op, "--kernel")


def test_where_one_kernel_is_wanted_several_are_an_error():
    assert find_kernel("flash-attn", KERNELS, "attention") == "flash_attn.v2"
    with pytest.raises(ConfigError, match=r"'flash-attn' stands for 2 kernels; give one of them: "
                                          r"flash_attn.v2, flash_attn.v2_varlen"):
        find_kernel("flash-attn", KERNELS)


def test_other_words_are_suggested_alike():
    assert suggest("strict_mod", ["strict_mode", "jit"]) == "; did you mean 'strict_mode'?"
    assert suggest("q", ["strict_mode", "jit"]) == "; known are jit, strict_mode"


def test_every_face_takes_the_same_names():
    rule = PolicyRule.of("deny", ["flash-attn", "sdpa"])
    assert rule.kernels == ("flash_attn.*", "torch.sdpa", "torch.sdpa_bias")
    assert rule == PolicyRule.of("deny", rule.kernels)
    lz.lock("attention", "scaled_dot_product_attention")
    try:
        assert lz.get_locks()["attention"]["kernel"] == "torch.sdpa, torch.sdpa_bias"
    finally:
        lz.unlock("attention")
    with pytest.raises(ConfigError, match=r"lz.lock: .*'flash_attn.v22'; did you mean "
                                          r"'flash_attn.v2'"):
        lz.lock("attention", "flash_attn.v22")
    with pytest.raises(ConfigError, match=r"lz.prefer: .*did you mean 'xformers'"):
        lz.prefer("xformer")
