"""Group norm of any shape and memory format, and the offset of RMS norm."""

from __future__ import annotations

import pytest
import torch
from helpers import path_of

import layerzero as lz
from layerzero.verify.kernel.contract import check_case
from layerzero.world import snapshot as worlds

KERNELS = ("torch.group_norm", "reference.group_norm")


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(2, 12), (2, 12, 7), (2, 12, 3, 5), (2, 12, 2, 3, 5),
                                   (0, 12, 7)])
@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_any_number_of_dimensions(shape, kernel):
    x, weight, bias = rand(*shape), rand(12, seed=1), rand(12, seed=2)
    want = torch.nn.functional.group_norm(x, 4, weight, bias, 1e-3)
    got = lz.group_norm(x, 4, weight, bias, 1e-3, backend=kernel)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "memory"), [((2, 8, 4, 6), torch.channels_last),
                                               ((2, 8, 3, 4, 6), torch.channels_last_3d)])
def test_channels_last_is_accepted(shape, memory):
    x = rand(*shape)
    last = x.contiguous(memory_format=memory)
    assert not last.is_contiguous()
    torch.testing.assert_close(lz.group_norm(last, 2), lz.group_norm(x, 2), rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_drown_the_variance_whatever_the_memory_format():
    """torch's own way through channels-last images on the CPU is off by 0.05 here."""
    x = rand(2, 8, 16, 16) + 300
    want = torch.nn.functional.group_norm(x.double(), 2)
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(lz.group_norm(image, 2).double(), want, rtol=1e-3, atol=1e-3)
    steps = {step.kernel: step for step in lz.explain("group_norm", image, 2).steps}
    assert lz.which("group_norm", image, 2) in ("torch.group_norm",
                                                "native.group_norm_channels_last")
    assert [t.kind for t in steps["torch.group_norm"].transforms] == ["contiguous"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(kernel):
    x, weight, bias = (rand(*s, dtype=torch.float64).requires_grad_()
                       for s in ((2, 4, 3, 2), (4,), (4,)))
    assert torch.autograd.gradcheck(lambda *t: lz.group_norm(t[0], 2, *t[1:], backend=kernel),
                                    (x, weight, bias))


def test_gradients_in_float32_are_torchs():
    def gradients(run):
        tensors = [t.requires_grad_() for t in (rand(2, 12, 5), rand(12, seed=1), rand(12, seed=2))]
        (run(*tensors) * rand(2, 12, 5, seed=3)).sum().backward()
        return [t.grad for t in tensors]

    ours = gradients(lambda x, w, b: lz.group_norm(x, 3, w, b))
    torch.testing.assert_close(ours,
                               gradients(lambda x, w, b: torch.nn.functional.group_norm(x, 3, w,
                                                                                        b)))


def test_a_bias_without_a_weight_can_be_trained():
    """torch's own backward fails there."""
    x, bias = rand(2, 4, 3, 3), rand(4).requires_grad_()
    assert lz.which("group_norm", x, 2, None, bias) == "reference.group_norm"
    lz.group_norm(x, 2, None, bias).sum().backward()
    assert bias.grad.tolist() == [18.0] * 4                    # 2 samples of 9 pixels


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"groups": 5}, "VALUE_OUT_OF_RANGE", "groups must be a divisor of the 12 channels, got 5"),
    ({"groups": 0}, "VALUE_OUT_OF_RANGE", "groups must be >= 1"),
    ({"groups": -3}, "VALUE_OUT_OF_RANGE", "groups"),
    ({"groups": 3.0}, "WRONG_TYPE", "groups must be int"),
    ({"x": torch.ones(12)}, "WRONG_NDIM", "x must have"),
    ({"weight": torch.ones(11)}, "DIM_MISMATCH", "weight"),
    ({"bias": torch.ones(12, 1)}, "WRONG_NDIM", "bias"),
    ({"x": torch.ones(2, 12, 0, 3)}, "EMPTY_INPUT", "height must be >= 1"),
    ({"eps": -1.0}, "VALUE_OUT_OF_RANGE", "eps must be >= 0"),
    ({"x": torch.ones(2, 12, 3, 3).int()}, "DTYPE_UNSUPPORTED", "dtype must be"),
    ({"weight": torch.ones(12).long()}, "DTYPE_UNSUPPORTED", "weight must be None or float16"),
])
def test_a_wrong_call_names_the_argument(path, changes, code, words):
    call = path_of("group_norm", path)
    call(torch.ones(2, 12, 3, 3), 3)
    with pytest.raises(lz.errors.InvalidCall, match=words) as raised:
        call(**{"x": torch.ones(2, 12, 3, 3), "groups": 3, **changes})
    assert code in raised.value.codes


# RMS norm: Gemma's offset, and the norm of queries and keys.

@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kernel", ["torch.rms_norm", "reference.rms_norm"])
def test_offset_keeps_the_contract(kernel, dtype):
    declared = worlds.current().catalog.by_id[kernel]
    for case in ({"offset": 1.0}, {"offset": -0.5, "weight_dtype": "float32"},
                 {"offset": 1.0, "rows": (0,)},
                 {"offset": 1.0, "stride": "sparse", "hidden": 17}):
        result = check_case(declared, case, dtype)
        assert result.passed, str(result)


def test_offset_is_gemmas():
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    norm = gemma.GemmaRMSNorm(64, eps=1e-6).to(torch.bfloat16)
    # in bfloat16 most of these vanish in 1 + weight
    torch.nn.init.normal_(norm.weight, std=0.01)
    x = rand(3, 64, dtype=torch.bfloat16)
    assert torch.equal(lz.rms_norm(x, norm.weight, 1e-6, offset=1.0), norm(x))


def test_offset_without_a_weight_is_refused():
    with pytest.raises(lz.errors.InvalidCall, match="weight must be given"):
        lz.rms_norm(rand(2, 8), offset=1.0)


def test_gradients_with_an_offset():
    x, weight = (rand(*s, dtype=torch.float64).requires_grad_() for s in ((3, 8), (8,)))
    for kernel in ("torch.rms_norm", "reference.rms_norm"):
        assert torch.autograd.gradcheck(lambda a, b, k=kernel: lz.rms_norm(a, b, offset=1.0,
                                                                           backend=k), (x, weight))


def test_qk_norm_is_rms_norm_over_each_head():
    """Qwen3 and Gemma3 normalise each head's query and key before they are rotated."""
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    norm = qwen.Qwen3RMSNorm(16)
    torch.nn.init.normal_(norm.weight)
    # (batch, heads, seq, head_dim), as attention takes it
    q = rand(2, 9, 4, 16).transpose(1, 2)
    torch.testing.assert_close(lz.rms_norm(q, norm.weight), norm(q))
