"""The gated delta rule: one token by hand, sequences cut anywhere, and the functions of transformers.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import layerzero as lz
from layerzero.spec.reason import Code
from layerzero.verify.kernel.contract import case_values

OP = lz.op("gated_delta_rule")


def arguments(**case):
    return {name: v for name, v in case_values(OP, case, "float32").items() if v is not None}


def test_one_token_by_hand():
    state = torch.tensor([[[[2.0, 0.0], [0.0, 4.0]]]])
    q, k = torch.tensor([[[[1.0, 1.0]]]]), torch.tensor([[[[0.0, 1.0]]]])
    v, g = torch.tensor([[[[6.0, 10.0]]]]), torch.tensor(0.5).log().view(1, 1, 1)
    beta = torch.full((1, 1, 1), 0.5)
    out, final = lz.gated_delta_rule(q, k, v, g, beta, 1.0, state, output_final_state=True)
    # decayed to [[1, 0], [0, 2]]; for k it holds (0, 2), half of the way to v is (3, 6)
    assert torch.allclose(final, torch.tensor([[[[1.0, 0.0], [3.0, 6.0]]]]))
    assert torch.allclose(out, torch.tensor([[[[4.0, 6.0]]]]))


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_a_sequence_may_be_cut_anywhere(cut):
    values = arguments(s=130, state=True, final=True, norm=True, hv=4)
    out, final = lz.gated_delta_rule(**values)
    state, parts = values["initial_state"], []
    for span in (slice(0, cut), slice(cut, None)):
        some = {name: values[name][:, span] for name in ("q", "k", "v", "g", "beta")}
        part, state = lz.gated_delta_rule(**{**values, **some, "initial_state": state})
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ["torch_chunk_gated_delta_rule",
                                      "torch_recurrent_gated_delta_rule"])
def test_what_qwen3_next_computes(function):
    pytest.importorskip("transformers")
    try:
        theirs = getattr(importlib.import_module("transformers.models.qwen3_next"
                                                 ".modeling_qwen3_next"), function)
    except (ImportError, AttributeError) as e:
        pytest.skip(f"this transformers has no {function}: {e}")
    values = arguments(s=70, state=True, final=True, norm=True)
    out, final = lz.gated_delta_rule(**values)
    q, k, v, g, beta = (values[name] for name in ("q", "k", "v", "g", "beta"))
    want, state = theirs(q, k, v, g=g, beta=beta, initial_state=values["initial_state"],
                         output_final_state=True, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("change", "code", "name"), [
    ({"k": torch.ones(2, 7, 2, 8)}, Code.DIM_MISMATCH, "k"),
    ({"v": torch.ones(2, 7, 3, 16), "g": torch.ones(2, 7, 3), "beta": torch.ones(2, 7, 3)},
     Code.HEADS_NOT_DIVISIBLE, "group_rest"),
    ({"g": torch.ones(2, 7, 2, dtype=torch.int32)}, Code.DTYPE_UNSUPPORTED, "g"),
    ({"initial_state": torch.ones(2, 2, 16, 8)}, Code.DIM_MISMATCH, "initial_state")])
def test_what_is_wrong_is_named(change, code, name):
    with pytest.raises(lz.errors.InvalidCall) as error:
        lz.gated_delta_rule(**{**arguments(), **change})
    assert any(r.code is code and r.fact.partition(".")[0] == name
               for r in error.value.reasons), str(error.value)


def test_inside_torch_compile():
    values = arguments(s=9, final=True)
    compiled = torch.compile(lz.gated_delta_rule, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**values), lz.gated_delta_rule(**values)):
        torch.testing.assert_close(got, want)
