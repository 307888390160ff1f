"""Broken kernels of the operations around attention: each wrong in one way, in some calls only, and
found.
"""

from __future__ import annotations

import pytest
import torch
from broken_kernels import FAULTS, Fault, fault
from torch.nn import functional as F

from layerzero.spec.rules import absent, at_least, at_most
from layerzero.verify.certification.certify import certify
from layerzero.verify.diagnosis.diagnose import CLASSES

_BEFORE = len(FAULTS)


# Mixtures of experts.

@fault("moe", "scale")
def weights_never_normalised(right, **v):
    return right(**{**v, "normalize": False})


@fault("moe", "convention", "sizes", "unknown")
def an_expert_that_nobody_chose_is_a_neighbour(right, **v):
    """Off by one in the prefix sums, but only where an expert in the middle is empty."""
    ids, count = v["topk_ids"], v["w_gate_up"].shape[0]
    if ids is not None and count > 2:
        free = [e for e in range(1, count - 1) if not bool((ids == e).any())]
        if free:
            v["w_down"] = v["w_down"].clone()
            v["w_down"][free[0] + 1] = v["w_down"][free[0]]
    return right(**v)


@fault("moe_gate", "convention", "unknown")
def correction_bias_in_the_weights_too(right, **v):
    bias = v["e_score_correction_bias"]
    ids, weights = right(**v)
    return (ids, weights) if bias is None else (ids, weights + 0.01 * bias.float()[ids.long()])


@fault("grouped_gemm", "sizes", "mask", "last rows", "unknown")
def the_last_group_takes_what_is_left(right, **v):
    out, sizes = right(**v), v["group_sizes"]
    if sizes is not None and out.shape[0] > int(sizes.sum()):
        out[int(sizes.sum()):] = v["x"][int(sizes.sum()):] @ v["weights"][-1]
    return out


# Sampling.

@fault("sample", "convention", "distribution")
def penalties_once_for_each_time(right, **v):
    """A presence penalty that counts occurrences."""
    return right(**{**v, "frequency_penalty": v["frequency_penalty"] + v["presence_penalty"],
                    "presence_penalty": 0.0})


@fault("sample", "convention", "scale", "unknown")
def log_probabilities_before_temperature(right, **v):
    rows = v["temperature_rows"] is not None
    if not v["return_logprobs"] or v["from_probs"] or rows or v["temperature"] in (0.0, 1.0):
        return right(**v)
    tokens, _ = right(**v)
    plain = v["logits"].float().log_softmax(-1)
    return tokens, plain.gather(1, tokens.clamp_min(0).long()[:, None])[:, 0].to(torch.float32)


@fault("speculative_verify", "distribution")
def accepts_one_too_many(right, **v):
    """The test is u < p / q; this one forgets that p may exceed q only up to one, and takes u < 2 p
    / q."""
    if v["draft_probs"] is None:
        return right(**v)
    return right(**{**v, "draft_probs": v["draft_probs"] * 0.5})


# Quantized.

@fault("quantized_linear", "convention", "scale", "unknown")
def zeros_are_forgotten_in_the_last_group(right, **v):
    zeros = v["zeros"]
    if zeros is not None and zeros.dim() == 2 and zeros.shape[1] > 1:
        v["zeros"] = zeros.clone()
        v["zeros"][:, -1] = 0
    return right(**v)


@fault("quantize", "convention", "precision", "sizes", "unknown")
def halves_rounded_away_from_zero(right, **v):
    if (v["scales"] is None and v["format"] == "int8" and v["symmetric"]
        and v["granularity"] in (None, "channel")):
        codes, scales, *rest = right(**v)
        exact = v["x"].float() / scales.float()
        if exact.shape == codes.shape:
            away = (exact.abs() + 0.5).floor() * exact.sign()
            return (away.clamp(-127, 127).to(codes.dtype), scales, *rest)
    return right(**v)


@fault("paged_attention", "convention", "scale")
def scale_of_the_keys_for_the_values(right, **v):
    if v["value_scale"] is not None:
        v["value_scale"] = v["key_scale"]
    return right(**v)


@fault("mla_paged_attention", "sizes", "head map", "unknown")
def the_turned_part_of_the_first_head_for_all(right, **v):
    return right(**{**v, "q_pe": v["q_pe"][:, :1].expand_as(v["q_pe"]).contiguous()})


# Losses, norms, tables, text.

@fault("cross_entropy", "convention", "unknown")
def smooths_towards_the_others_only(right, **v):
    if v["label_smoothing"] == 0.0:
        return right(**v)
    classes = v["logits"].shape[-1]
    return (
        right(**{**v, "label_smoothing": min(v["label_smoothing"] * classes / max(classes - 1, 1),
                                             1.0)}))


@fault("cross_entropy", "gradient")
def no_gradient_where_smoothed(right, **v):
    if v["label_smoothing"] and torch.is_grad_enabled():
        hard = right(**{**v, "label_smoothing": 0.0})
        return hard + (right(**v) - hard).detach()
    return right(**v)


@fault("linear_cross_entropy", "convention", "mask")
def ignores_minus_one_hundred_only(right, **v):
    return right(**{**v, "targets": v["targets"].clamp_min(0), "ignore_index": -100}) if (
        v["ignore_index"] != -100) else right(**v)


@fault("group_norm", "precision")
def variance_as_the_mean_of_squares_less_the_square(right, x, groups, weight=None, bias=None,
                                                    eps=1e-5):
    if x.dtype != torch.float32 or torch.is_grad_enabled() or not x.numel():
        return right(x, groups, weight, bias, eps)
    parts = x.reshape(x.shape[0], groups, -1)
    mean, square = parts.mean(-1, keepdim=True), parts.square().mean(-1, keepdim=True)
    out = ((parts - mean) * torch.rsqrt((square - mean.square()).clamp_min(0) + eps)).reshape(
        x.shape)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    out = out if weight is None else out * weight.float().view(shape)
    return (out if bias is None else out + bias.float().view(shape)).to(x.dtype)


@fault("embedding", "gradient")
def gradient_reaches_the_padding_row(right, ids, weight, padding_idx=None, scale=1.0):
    return (F.embedding(ids, weight) * scale if padding_idx is not None and torch.is_grad_enabled()
            else right(
         ids, weight, padding_idx, scale))


@fault("embedding", "convention", "scale", "unknown")
def scaled_in_the_dtype_of_the_table(right, ids, weight, padding_idx=None, scale=1.0):
    if scale == 1.0:
        return right(ids, weight, padding_idx, scale)
    rounded = float(torch.tensor(scale, dtype=torch.bfloat16))
    return right(ids, weight, padding_idx, rounded)


@fault("detokenize", "convention", "unknown")
def keeps_the_special_tokens_of_a_batch(right, **v):
    batch = isinstance(v["ids"], list) and v["ids"] and not isinstance(v["ids"][0], int)
    return right(**{**v, "skip_special_tokens": v["skip_special_tokens"] and not batch})


@fault("alibi", "alignment")
def distances_from_the_first_query(right, **v):
    return right(**{**v, "causal_align": "top_left"})


@fault("mlp", "convention", "unknown")
def bias_of_the_gate_for_both(right, **v):
    bias = v["bias_in"]
    if (bias is not None and v["weight_up"] is None
        and bias.shape[0] == 2 * v["weight_down"].shape[1]):
        gate, _ = bias.chunk(2)
        v["bias_in"] = torch.cat((gate, gate))
    return right(**v)


# Of a kernel for few calls: no case of the contract that it takes has the argument that it ignores.

@fault("attention", "scale", "convention", requires=(
    at_most("seq_q", 1), at_least("group", 2), absent("attn_mask.dtype"), at_least("seq_k", 200),
    at_most("seq_k", 260)))
def a_kernel_for_decoding_that_knows_no_softcap(right, **v):
    return right(**{**v, "softcap": 0.0})


@fault("sample", "convention", "distribution",
       requires=(at_least("top_k", 1), absent("top_k_rows.dtype")))
def one_temperature_for_all_rows_of_top_k(right, **v):
    return right(**{**v, "temperature_rows": None})


MORE = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # the others have tests of their own


@pytest.mark.parametrize("broken", MORE, ids=lambda f: f.name)
def test_it_is_found_and_named(broken: Fault) -> None:
    verdict = certify(broken.kernel(), stop_early=True)
    assert verdict.status == "failed" and verdict.certificate is None
    assert verdict.diagnosis is not None and verdict.diagnosis.kind in CLASSES
    assert verdict.diagnosis.kind in broken.kinds, str(verdict.diagnosis)


def test_they_cover_the_ops_around_attention() -> None:
    assert len(MORE) >= 18 and len({f.op.name for f in MORE}) >= 14
    assert {kind for f in MORE for kind in f.kinds} <= CLASSES.keys()
