"""lz.accelerate(model): everything that lz can do for the speed of a model, in one call, undone by
one call.

    report = lz.accelerate(model)
    print(report)  # what was done, what was left and why, what it gains here
    model.generate(**inputs)                   # as before
    report.undo()                              # or lz.unaccelerate(model)
    lz.accelerate(model, weights="int4")       # and linear layers with codes for weights

First lz.patch. Then, for a decoder that is recognised (decoders/recognition.py), whether it is the
model or the language model inside it, a decode step of its own: kernels chosen once, weights that
belong to one product joined, a cache that grows in place, on CUDA the whole step in a graph. The
result is compared with the model as it was: where it is another, everything is undone, and what is
slower is not used. An error leaves the model as it was, and the report says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...machine import faults
from ...models.weights.codes import WeightOnly
from ...spec.codec import Record
from ...spec.display import Displayed
from ...spec.errors import ConfigError
from ...spec.event import Fallback
from ...world import events
from .decoders.families import NotRecognised
from .decoders.recognition import decoders_in, recognise
from .decoding.reduction import ACCELERATION, ON_DEVICE, REDUCE, Reduce
from .patch import Changes
from .patch import apply as apply_patch
from .quantized import QuantizedLayers, quantize_layers
from .replacements import recipe_of
from .report import PatchReport
from .trial import Gain, Trial
from .weight_error import QuantizedWeights, Text, text_ids

STOCK_DRAW = (
    "sampling: logits processors and the draw stay transformers' own, so a seed gives the same "
    "tokens (lz.patch(model, only='sampling') draws by lz.sample)")


@dataclass(repr=False)
class Acceleration(
        Displayed, Record,
        json="model done left error gains kernels served declined generated weights"):
    """Reports what was done to a model; as a context manager it is undone at the end."""

    model: str                                 # its class
    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)              # what was not done, and why
    gains: dict[str, Gain] = field(default_factory=dict)       # prefill, decode
    error: float | None = None                 # of the decode step, relative to the model as it was
    patched: PatchReport | None = None
    weights: QuantizedWeights | None = None    # where weights= asked for it
    _model: Any = field(default=None, repr=False)
    # an Accelerated; its module needs transformers, which the name lz.accelerate does not
    _step: Any = field(default=None, repr=False)
    _generation: Any = field(default=None, repr=False)         # a Generation, where there is one
    _changes: Changes = field(default_factory=Changes, repr=False)     # by lz.patch
    _speculation: Any = field(default=None, repr=False)        # a Speculation, likewise
    _assistant: Acceleration | None = field(default=None, repr=False)  # made for it
    _layers: QuantizedLayers | None = field(default=None, repr=False)

    @property
    def kernels(self) -> dict[str, str]:
        """Returns the kernels of the decode step, by what they compute."""
        return {} if self._step is None else self._step.kernels

    @property
    def served(self) -> dict[str, int]:
        """Tokens by the decode step so far, in a graph ("captured") and not; and prompts that were
        computed once for several beams or sequences."""
        return {} if self._step is None else dict(self._step.served)

    @property
    def declined(self) -> dict[str, int]:
        """Tokens that the model's own code computed instead, by reason."""
        return {} if self._step is None else dict(self._step.declined)

    @property
    def prompted(self) -> dict[str, int]:
        """Prompts by the layers of the decode step ("step"), or by the model's own code, by
        reason; without those for which there was no question."""
        return {} if self._step is None else dict(self._step.prompted)

    @property
    def speculated(self) -> str:
        """Returns what speculation did so far, in words; "" where there is none."""
        return "" if self._speculation is None else str(self._speculation.stats)

    @property
    def generated(self) -> dict[str, int]:
        """Calls of generate(): looped "on the device", or by transformers' loop, by reason."""
        return {} if self._step is None else dict(self._step.generated)

    def undo(self) -> None:
        """Make the model what it was, and its assistant. Calling it again changes nothing."""
        if self._speculation is not None:
            self._speculation.undo()
        if self._assistant is not None:
            self._assistant.undo()
        self._speculation = self._assistant = None
        self._drop_step()
        if self._layers is not None:
            self._layers.undo()
        self._layers = None
        self._drop_patch()
        for name in (ACCELERATION, REDUCE):
            vars(self._model).pop(name, None)

    def _drop_step(self) -> None:
        if self._step is not None:
            from .decoding.accelerated import detach
            detach(self._step)
            if vars(self._model).get("generate") is self._generation is not None:
                del vars(self._model)["generate"]
            self._step.undo()
            self._step = None

    def _drop_patch(self) -> None:
        self._changes.undo()
        self._changes = Changes()

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is not accelerated."""

    def __str__(self) -> str:
        lines = [f"{self.model}: " + ("nothing was changed" if not self.done
                                      else "; ".join(self.done))]
        lines += [f"  {self.weights}"] * (self.weights is not None)
        lines += [f"  {name}: {gain}" for name, gain in self.gains.items()]
        if self.weights is not None and "decode" in self.gains:
            decode = self.gains["decode"]
            lines.append(f"  tokens a second: {1e6 / decode.stock_us:.1f} -> "
                         f"{1e6 / decode.ours_us:.1f}")
        lines += [f"  left: {text}" for text in self.left]
        if self._step is not None:
            lines += [f"  {what}: {kernel}" for what, kernel in self.kernels.items()]
            lines += [f"  {n} tokens by the model's own code: {why}"
                      for why, n in self.declined.items()]
            lines += [f"  {n} generate() by transformers' own loop: {why}"
                      for why, n in self.generated.items() if why != ON_DEVICE]
        if self._speculation is not None:
            lines.append(f"  speculation: {self.speculated}")
            lines += [f"  {n} texts without speculation: {why}"
                      for why, n in self._speculation.declined.items()]
        return "\n".join(lines)


def accelerate(model: nn.Module, *, patch: bool = True, capture: bool | None = None,
               measure: bool = True, seconds: float = 3.0, weights: WeightOnly | str | None = None,
               text: Text | None = None, assistant: nn.Module | str | None = None) -> Acceleration:
    """Let `model` run as fast as lz can make it, and say what was done and what it gains on this
    machine.

    patch: also lz.patch(model), for prompts and for what the decode step does not serve. capture:
    the decode step in a CUDA graph; by default where the model is on CUDA. measure: time it against
    the model as it was, for about `seconds` each for a prompt and a token, and keep only what is
    not slower. weights: hold the weights of linear layers in this format of lz.quantized_linear
    ("int4", "int8", "fp8", "mxfp4", "nf4", "q4_k", "q8_0", ..., or an lz.quant.WeightOnly). The
    report says how far the predictions are from the model's as it was, on `text`: a string, token
    ids, or by default a text of ours. assistant: a smaller model of the same vocabulary, which is
    accelerated as well, or "prompt_lookup": generate() then lets it propose tokens and verifies
    several at once, where it is greedy and for one text; the tokens are the same.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lz.accelerate wants a torch.nn.Module, got {type(model).__name__}")
    wanted = None if weights is None else WeightOnly.of(weights)
    ids = None if text is None else text_ids(text, model)
    before = vars(model).get(ACCELERATION)
    if before is not None:
        if wanted is not None and (before._layers is None or before._layers.config != wanted):
            raise ConfigError("lz.accelerate wants a model that is not accelerated to quantize its "
                              "weights, got one that is: lz.unaccelerate(model) first")
        return before  # type: ignore[no-any-return]
    report = Acceleration(type(model).__name__, _model=model)
    try:
        with _eval_mode(model):
            _accelerate(report, patch, capture, seconds if measure else None, wanted, ids)
    # an interrupt is passed on, like whatever must not be caught
    except BaseException as error:
        report.undo()
        if not isinstance(error, faults.FAULTS) or isinstance(error, faults.PASSED_ON) or \
                faults.classify(error) == "sticky":
            raise
        events.emit(Fallback("accelerate", "layerzero", type(model).__name__,
                             faults.reason_of(error, faults.classify(error))))
        return Acceleration(type(model).__name__,
                            left=[f"everything: {type(error).__name__}: {error}"], _model=model)
    if report._layers is not None:
        report.done.append(f"{len(report._layers)} linear layers with codes for weights")
    if report._changes:
        report.done.append(f"{len(report._changes)} modules by lz.patch")
    if report._step is not None:
        layers, decoder = len(report._step.layers), report._step.model
        graph = report.served.get("captured", 0) > 0 and report._step.parts.weights.is_cuda
        whose = "its" if decoder is model else "the"
        inside = "" if decoder is model else f" of its {type(decoder).__name__}"
        report.done.append(f"a decode step for {whose} {layers} layer{'s' * (layers > 1)}{inside}"
                           + (", in a CUDA graph" if graph else ""))
        # from here on the tokens are the user's
        report._step.served.clear(), report._step.prompted.clear()
        _attach_generation(report)
    if assistant is not None:
        _speculate(report, assistant, capture)
    if report.done:
        vars(model).update({ACCELERATION: report, REDUCE: Reduce(model)})
    return report


def _attach_generation(report: Acceleration) -> None:
    """Let generate() loop over its tokens on the device (generation/loop.py)."""
    model, step = report._model, report._step
    if not callable(getattr(model, "generate", None)):
        return
    if step.model is not model:
        report.left.append("generate() without its host: the model around the decoder feeds it")
    elif step.parts.head is not None and "generate" not in vars(model):
        from .generation.loop import Generation
        report._generation = vars(model)["generate"] = Generation(model, step)
        seeds = (" (a seed gives other samples than in transformers)" if step.parts.weights.is_cuda
                 else "")
        report.done[-1] += f", and generate() that chooses its tokens on the device{seeds}"
    if recipe_of(model) is None and not (report._generation and step.parts.weights.is_cuda):
        report.left.append(STOCK_DRAW)


def _accelerate(report: Acceleration, patch: bool, capture: bool | None, seconds: float | None,
                weights: WeightOnly | None, ids: Tensor | None) -> None:
    model = report._model
    decoder, *others = decoders_in(model)
    trial = Trial(model, decoder, report, weights is not None)
    report.left += [f"no decode step for its {type(m).__name__}: a model gets one, for its largest "
                    "decoder" for m in others]
    if patch:
        # a patched MLP reads the weights of its layers, which then are codes
        report.patched, report._changes = apply_patch(
            model, skip=() if weights is None else ("linear", "mlp"))
    parts = None
    try:
        parts = recognise(decoder)
        if trial.stock is None:
            raise NotRecognised(
                "it cannot be tried out: what the model takes as input is not known")
        if weights is not None:
            report._layers = quantize_layers(model, weights, parts)
        from .decoding.accelerated import Accelerated, attach
        from .decoding.encoder_decoder import AcceleratedEncoderDecoder
        step_type = Accelerated if parts.layers[0].cross is None else AcceleratedEncoderDecoder
        graph = parts.weights.is_cuda if capture is None else capture
        feature = parts.uncapturable_feature
        if graph and feature:
            report.left.append(f"no graph of its decode step: it has {feature}")
        # joined weights are weights like any other
        with torch.inference_mode(False), torch.no_grad():
            report._step = step_type(decoder, parts, graph and not feature, model)
    except NotRecognised as why:
        report.left.append(f"no decode step: {why}")
    if weights is not None and report._layers is None:
        report._layers = quantize_layers(model, weights, parts)
    if report._step is not None:
        attach(report._step)
        trial.fit()
        trial.prove()
    if report._layers is not None:
        trial.weigh(report._layers, ids)
    if seconds is not None and (report._changes or report._step is not None or report._layers):
        trial.time(seconds)


def _speculate(report: Acceleration, assistant: nn.Module | str, capture: bool | None) -> None:
    """Let generate() verify what the assistant proposes, or say why not."""
    from .generation.speculation import (
        DRAFTED,
        LOOKED_UP,
        PROMPT_LOOKUP,
        Draft,
        Lookup,
        Speculation,
    )
    model = report._model
    if isinstance(assistant, str) and assistant != PROMPT_LOOKUP:
        report.undo()
        raise ConfigError(f"assistant= wants a model or {PROMPT_LOOKUP!r}, got {assistant!r}")
    try:
        if report._step is None or report._step.model is not model:
            raise NotRecognised("the model itself has no decode step")
        draft: Draft | Lookup
        if isinstance(assistant, nn.Module):
            sizes = [getattr(getattr(m, "config", None), "vocab_size", None)
                     for m in (model, assistant)]
            if sizes[0] != sizes[1]:
                raise NotRecognised(f"its vocabulary has {sizes[0]} tokens and the assistant's "
                                    f"{sizes[1]}")
            if ACCELERATION not in vars(assistant):
                report._assistant = accelerate(assistant, capture=capture, measure=False)
            step = vars(assistant).get(ACCELERATION, Acceleration(""))._step
            draft = Draft(assistant, step, DRAFTED)
        else:
            draft = Lookup(LOOKED_UP)
        report._speculation = vars(model)["generate"] = Speculation(model, report._step, draft)
        report.done.append("speculation by " + (
            assistant if isinstance(assistant, str) else type(assistant).__name__))
    except NotRecognised as why:
        report.left.append(f"no speculation: {why}")


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode, so that a trial neither draws for dropout nor changes the statistics of a batch
    norm; modes and the state of torch's generator are what they were afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def unaccelerate(model: nn.Module) -> bool:
    """Undo lz.accelerate(model); False where there is nothing to undo."""
    report = vars(model).get(ACCELERATION)
    if report is not None:
        report.undo()
    return report is not None
