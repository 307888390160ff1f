"""The captured step as one persistent kernel (backends/cuda/step), for the decoders that it can do
and where it is faster than the graph of kernels.

What the kernel needs to know is read from the same declaration that the other steps are made of.
Before it serves, its logits are held against those of the kernels, and both are timed as they will
run. A launch that gave up, which no launch should, is noticed at the next token: the graph of
kernels then does that token again and serves from there on.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from .....backends.cuda import compiler
from .....backends.cuda.step import plan
from .....backends.cuda.step.plan import LayerTensors, PersistentStep, Shape
from .....machine import faults
from .....operate import graphs
from .....spec.event import Fallback
from .....spec.reason import Code, Reason
from .....tuning.harness import Race, stopwatch
from .....world import events
from ...decoders.families import NotRecognised
from ...decoders.recognition import DecoderParts, FeedForward, Norm
from ...quantized import codes_of
from ..decode_step import DecodeStep, JoinedLayer
from ..joined import Weight

KVBuffers = Sequence[tuple[Tensor, Tensor]]    # for keys and values, (batch, tokens, kv_heads, dim)

NAME, WHAT = "one persistent kernel", "the captured step"
MIN_CAPABILITY = (9, 0)        # copies in bulk
ROUNDS = 7
MAX_APART = 0.1                # of the spread of the logits, between two ways in bf16
_lost: weakref.WeakSet[DecodeStep] = weakref.WeakSet()     # those of which a launch gave up


def shape_of(parts: DecoderParts, layers: Sequence[JoinedLayer], batch: int) -> Shape:
    """Returns the decoder as the kernel knows it; NotRecognised says what it does not know."""
    if parts.weights.dtype != torch.bfloat16:
        raise NotRecognised(f"its weights are {str(parts.weights.dtype)[6:]}, not bfloat16")
    if feature := parts.unplain_feature:
        raise NotRecognised(f"it has {feature}")
    if parts.norm is None or parts.codebooks:
        raise NotRecognised("no last norm" if parts.norm is None else "tokens of several codebooks")
    if parts.head is None or parts.head.module.bias is not None:
        raise NotRecognised("it has no head" if parts.head is None else "its head has a bias")
    for present, feature in ((parts.embed_scale is not None, "its embedding is scaled"),
                        (parts.positions is not None, "its positions are learned"),
                        (parts.softcap or parts.logit_scale != 1.0, "its logits are scaled"),
                        (parts.rotation != "rotate_half", f"its rope is {parts.rotation}"),
                        (len(parts.kinds) > 1, "its layers have angles of several kinds")):
        if present:
            raise NotRecognised(feature)
    shapes = {_layer_shape(parts, layer, batch) for layer in layers}
    if len(shapes) > 1:
        raise NotRecognised("its layers differ")
    _rms(parts.norm, parts.weights.shape[1])
    return shapes.pop()


def _layer_shape(parts: DecoderParts, joined: JoinedLayer, batch: int) -> Shape:
    layer = joined.parts
    if not isinstance(layer.mlp, FeedForward):
        raise NotRecognised("its feed-forward part is a mixture of experts")
    assert joined.mlp.gate_up is not None and joined.mlp.down is not None
    for present, feature in (
            (layer.parallel, "its attention and feed-forward part work side by side"),
            (layer.branch_scale != 1.0, "what its layers add is scaled"),
            (layer.attn_post or layer.mlp_post, "it norms what its layers add"),
            (layer.norm is None or layer.mlp_norm is None, "a layer begins without a norm"),
            (layer.by_head, "queries, keys and values of a head lie together"),
            (layer.softcap, "its scores are capped"),
            (layer.angles is None, "a layer is not turned"),
            (layer.scale <= 0, "its scores are not scaled"),
            ((layer.q_norm is None) != (layer.k_norm is None), "only queries or keys are normed"),
            (any(j.bias is not None for j in (joined.out, joined.mlp.gate_up, joined.mlp.down)),
             "products other than that of queries, keys and values have a bias")):
        if present:
            raise NotRecognised(feature)
    hidden = parts.weights.shape[1]
    eps = {_rms(norm, hidden) for norm in (layer.norm, layer.mlp_norm) if norm is not None}
    head_eps = {_rms(norm, layer.head_dim) for norm in (layer.q_norm, layer.k_norm)
                if norm is not None}
    if len(eps) > 1 or len(head_eps) > 1:
        raise NotRecognised("its norms have different eps")
    kinds = {_code_format(weight) for weight in (joined.qkv.weight, joined.out.weight,
                                                 joined.mlp.gate_up.weight, joined.mlp.down.weight)}
    if len(kinds) > 1:
        raise NotRecognised("its weights are in several formats")
    return Shape(hidden, layer.heads, layer.kv_heads, layer.head_dim, parts.half,
                 layer.mlp.down.shape[1], len(parts.head.module.weight) if parts.head else 0,
                 len(parts.layers), batch, joined.qkv.bias is not None, layer.q_norm is not None,
                 layer.mlp.activation, kinds.pop())


def _code_format(weight: Weight) -> str:
    """Returns the format of a weight's codes, or "" for one in bf16."""
    if isinstance(weight, Tensor):
        if weight.dtype != torch.bfloat16:
            raise NotRecognised(f"a weight is {str(weight.dtype)[6:]}")
        rows, name = weight, ""
    else:
        rows, name, scales, group = weight.codes, weight.format, weight.scales, weight.group_size
        kind = {"int4": torch.bfloat16, "fp8_e4m3": torch.float32}.get(name)
        if (kind is None or scales is None or weight.activations != "none"
                or weight.global_scale is not None or scales.dtype != kind
                or not scales.is_contiguous()
                or (group % plan.BLOCK if name == "int4" else scales.shape[1] != 1)):
            raise NotRecognised(f"its weights are quantized to {name}, of which the kernel knows "
                                "int4 in groups of 128 and fp8 by rows")
    if not rows.is_contiguous() or rows.data_ptr() % 16:
        raise NotRecognised("a weight is not laid out row after row")
    return name


def _rms(norm: Norm, size: int) -> float:
    if norm.op != "rms_norm" or norm.offset or norm.gains or len(norm.weights) != 1:
        raise NotRecognised("its norms are not plain RMS norms")
    weight, = norm.weights
    if weight.shape != (size,) or weight.dtype != torch.bfloat16:
        raise NotRecognised(f"a norm has a weight {tuple(weight.shape)} of "
                            f"{str(weight.dtype)[6:]}, not ({size},) of bfloat16")
    return norm.eps


def candidates(step: DecodeStep, parts: DecoderParts, kv_buffers: KVBuffers,
               angles: Sequence[Tensor]) -> list[PersistentStep]:
    """Returns the kernel for these buffers, in each way worth a trial; or NotRecognised."""
    layers = step.joined
    shape = shape_of(parts, layers, step.batch)
    machine = compiler.machine_of(parts.weights.device)
    configs = plan.candidate_configs(shape, machine)
    problems = [plan.problem(shape, cfg, machine) for cfg in configs]
    if all(problems):
        raise NotRecognised(str(problems[0]))
    first, head = layers[0].parts, parts.head
    assert first.norm is not None and head is not None and parts.norm is not None
    if codes_of(head.module) is not None:
        raise NotRecognised("its weights are quantized")
    tensors = [_tensors(joined, angles[0], *buffers) for joined, buffers in zip(layers, kv_buffers)]
    return [PersistentStep(
        shape, cfg, tensors, parts.weights, parts.norm.weights[0], head.module.weight.detach(),
        eps=first.norm.eps, head_eps=parts.norm.eps, scale=first.scale,
        head_norm_eps=0.0 if first.q_norm is None else first.q_norm.eps)
        for cfg, problem in zip(configs, problems) if problem is None]


def _tensors(joined: JoinedLayer, angles: Tensor, keys: Tensor, values: Tensor) -> LayerTensors:
    layer = joined.parts
    gate_up, down = joined.mlp.gate_up, joined.mlp.down
    assert layer.norm is not None and layer.mlp_norm is not None
    assert gate_up is not None and down is not None
    q_norm, k_norm = (None if norm is None else norm.weights[0]
                      for norm in (layer.q_norm, layer.k_norm))
    weights = joined.qkv.weight, joined.out.weight, gate_up.weight, down.weight
    qkv, out, w_gate_up, w_down = (w if isinstance(w, Tensor) else w.codes for w in weights)
    scales = tuple(w.scales for w in weights
                   if not isinstance(w, Tensor) and w.scales is not None)
    return LayerTensors(layer.norm.weights[0], qkv, joined.qkv.bias, q_norm, k_norm, out,
                        layer.mlp_norm.weights[0], w_gate_up, w_down, angles, keys, values,
                        layer.window, scales)


def faster(step: DecodeStep, parts: DecoderParts, kv_buffers: KVBuffers, angles: Sequence[Tensor],
           step_input: Tensor, state: Tensor,
           by_kernels: Callable[[], Tensor]) -> PersistentStep | None:
    """Returns the kernel where it is right and faster than the graph of kernels (`by_kernels`) of
    the same buffers, which no cache has moved into yet; None, and the reason in the report, where
    not."""
    if not step_input.is_cuda:
        return None
    try:
        if torch.cuda.get_device_capability(step_input.device) < MIN_CAPABILITY:
            raise NotRecognised("it copies in bulk, which needs compute capability 9.0")
        if step in _lost:
            raise NotRecognised("a launch of it gave up")
        resident = [candidate for candidate in candidates(step, parts, kv_buffers, angles)
                    if candidate.resident(step_input.device.index or 0)]
        if not resident:
            raise NotRecognised("its blocks cannot all run at the same time")
        chosen = _race(resident, kv_buffers, step_input, state, by_kernels) or resident[0]
    except NotRecognised as why:
        step.bind.kernels[WHAT] = f"a graph of kernels: {why}"
        return None
    except faults.FAULTS as error:                         # it does not compile, or cannot start
        kind = faults.classify(error)
        if isinstance(error, faults.PASSED_ON) or kind == "sticky":
            raise
        step.bind.kernels[WHAT] = f"a graph of kernels: {faults.reason_of(error, kind).message}"
        return None
    step.bind.kernels[WHAT] = NAME
    return chosen


def _race(resident: Sequence[PersistentStep], kv_buffers: KVBuffers, step_input: Tensor,
          state: Tensor, by_kernels: Callable[[], Tensor]) -> PersistentStep | None:
    """Returns the fastest of them; NotRecognised says by how much they are wrong or slower."""
    middle = kv_buffers[0][0].shape[1] // 2
    runs: dict[str, Callable[[], Tensor]] = {"kernels": by_kernels}
    # A generator of its own: the caller's seed is for the tokens that he draws.
    generator = torch.Generator(state.device).manual_seed(0)
    for buffer in chain.from_iterable(kv_buffers):
        buffer.normal_(generator=generator)
    try:
        _place(state, middle)
        wanted = by_kernels().float().flatten()
        for number, candidate in enumerate(resident):
            _place(state, middle)
            logits = candidate(step_input, state).flatten()
            difference = float((logits - wanted).std() / wanted.std().clamp_min(1e-30))
            if not candidate.timed_out() and difference <= MAX_APART:
                runs[str(number)] = partial(candidate, step_input, state)
        if len(runs) == 1:
            raise NotRecognised(f"its logits differ by {difference:.1e} of their spread")
        race, trials = Race(stopwatch("cuda"), faults.FAULTS), []
        for name, run in runs.items():
            _place(state, middle)
            attempt = graphs.attempt(run, overlap=True)
            if attempt.problems:
                raise NotRecognised(f"it cannot be captured: {attempt.problems[0]}")
            trials.append(attempt)               # the graphs live as long as they are timed

            def once(replay: Callable[[], None] = attempt.graph.replay) -> None:
                _place(state, middle)
                replay()

            race.enter(name, once)
        race.run(ROUNDS)
        times = race.timings
        medians = {name: times.median(name) if name in times.rounds else math.inf
                   for name in runs}
        kernels_us = medians.pop("kernels")
        best = min(medians, key=lambda name: medians[name])
        persistent_us = medians[best]
        if not persistent_us < kernels_us:
            raise NotRecognised(f"one persistent kernel takes {persistent_us:.0f} microseconds, "
                                f"not {kernels_us:.0f}")
        return resident[int(best)]
    finally:
        for buffer in chain.from_iterable(kv_buffers):
            buffer.zero_()


def _place(state: Tensor, length: int) -> None:
    """Let the next token be the one after `length` others."""
    state.fill_(length + 1)
    state[:1].fill_(length)


def report_timeout(step: DecodeStep) -> None:
    """Reports a launch that gave up; the graph of kernels serves this step from here on."""
    _lost.add(step)
    events.emit(Fallback("decode step", NAME, "a graph of kernels",
                         Reason(Code.KERNEL_TIMEOUT, f"{plan.LIMIT_S} s")))
