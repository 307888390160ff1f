"""lz.accelerate(model): everything that lz can do for the speed of a model, in one call, undone by
one call.

    report = lz.accelerate(model)
    print(report)  # what was done, what was left and why, what it gains here
    model.generate(**inputs)                   # as before
    report.undo()                              # or lz.unaccelerate(model)
    lz.accelerate(model, weights="int4")       # and linear layers with codes for weights

First lz.patch. Then, for a decoder that is recognised (decoding/decoders.py), whether it is the
model or the language model inside it, a decode step of its own: kernels chosen once, weights that
belong to one product joined, a cache that grows in place, on CUDA the whole step in a graph. The
result is compared with the model as it was: where it is another, everything is undone, and what is
slower is not used. An error leaves the model as it was, and the report says which.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...dispatch.background import compiling
from ...machine import faults
from ...models.weight_codes import WeightOnly
from ...spec.codec import Record
from ...spec.display import Displayed
from ...spec.errors import ConfigError
from ...spec.event import Fallback
from ...tuning.harness import Race, Ratio, stopwatch
from ...world import events
from .decoding.decoders import decoders_in, recognise
from .decoding.families import NotRecognised
from .decoding.reduction import ACCELERATION, ON_DEVICE, REDUCE, Reduce
from .patch import Changes
from .patch import apply as apply_patch
from .quantized import QuantizedLayers, quantize_layers
from .replacements import recipe_of
from .report import PatchReport
from .weight_error import QuantizedWeights, Text, default_ids, given_ids, prediction_error

# How far results may be from those of the model as it was, relative, over all of them; and how much
# farther than its own are from each other when it sees the tokens all at once. Where the best of
# many experts is chosen by numbers that are rounded, that is far.
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
AS_OWN = 4
# where activations are rounded to eight bits: what lies between two codes falls to either side
ROUNDED = 0.05
# the latter where one call takes longer than all should
LEAST_ROUNDS, LEAST_SLOW_ROUNDS = 5, 2
STOCK_DRAW = (
    "sampling: logits processors and the draw stay transformers' own, so a seed gives the same "
    "tokens (lz.patch(model, only='sampling') draws by lz.sample)")
# tokens of the trial: prompt timed, prompt before decoding, decoded
PREFILL, CONTEXT, TOKENS = 128, 64, 3
ENCODED = 16                                   # states of an encoder in the trial
# tokens that tell how slow the model was; seconds for a prompt of it
PROBE, PATIENCE = 4, 10.0
COMPILE_SECONDS = 60                           # for the kernels of prompts with codes for weights


@dataclass(frozen=True)
class Gain(Record):
    """Microseconds of the model as it was and as it is, in turns."""

    stock_us: float
    ours_us: float
    ratio: Ratio

    @property
    def verdict(self) -> str:
        """"faster" and "slower" only where the interval that is printed, and the middle half of the
        rounds, leave out 1; "even" otherwise."""
        ratio, around = self.ratio, (self.ratio.high - self.ratio.low) / 2
        if min(ratio.low, ratio.median - around) > 1.0:
            return "faster"
        return "slower" if max(ratio.high, ratio.median + around) < 1.0 else "even"

    def __str__(self) -> str:
        words = "no difference" if self.verdict == "even" else self.verdict
        return (f"{self.stock_us / 1e3:.2f} ms -> {self.ours_us / 1e3:.2f} ms, {self.ratio} "
                f"({words})")

    def to_json(self) -> dict[str, Any]:
        return {"stock_us": self.stock_us, "ours_us": self.ours_us,
                "ratio": {**self.ratio.to_json(), "verdict": self.verdict}}


@dataclass(repr=False)
class Acceleration(
        Displayed, Record,
        json="model done left error gains kernels served declined generated weights"):
    """What was done to a model. As a context manager it is undone at the end of the block."""

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
        """What the decode step runs: what it is for -> kernel."""
        return {} if self._step is None else self._step.kernels

    @property
    def served(self) -> dict[str, int]:
        """Tokens by the decode step so far, in a graph ("captured") and not."""
        return {} if self._step is None else dict(self._step.served)

    @property
    def declined(self) -> dict[str, int]:
        """Tokens that the model's own code computed instead, by reason."""
        return {} if self._step is None else dict(self._step.declined)

    @property
    def speculated(self) -> str:
        """What speculation did so far, in words; "" where there is none."""
        return "" if self._speculation is None else str(self._speculation.done)

    @property
    def generated(self) -> dict[str, int]:
        """Calls of generate(): looped over tokens "on the device", or by transformers' own loop,
        by reason."""
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
               text: Text | None = None,
               assistant: nn.Module | str | None = None) -> Acceleration:
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
    ids = None if text is None else given_ids(text, model)
    before = vars(model).get(ACCELERATION)
    if before is not None:
        if wanted is not None and (before._layers is None or before._layers.wanted != wanted):
            raise ConfigError("lz.accelerate wants a model that is not accelerated to quantize its "
                              "weights, got one that is: lz.unaccelerate(model) first")
        return before  # type: ignore[no-any-return]
    report = Acceleration(type(model).__name__, _model=model)
    try:
        with _evaluated(model):
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
        report._step.served.clear()            # from here on the tokens are the user's
        _attach_generation(report)
    if assistant is not None:
        _speculate(report, assistant, capture)
    if report.done:
        vars(model).update({ACCELERATION: report, REDUCE: Reduce(model)})
    return report


def _attach_generation(report: Acceleration) -> None:
    """Let generate() loop over its tokens on the device (decoding/generation.py)."""
    model, step = report._model, report._step
    if not callable(getattr(model, "generate", None)):
        return
    if step.model is not model:
        report.left.append("generate() without its host: the model around the decoder feeds it")
    elif step.parts.head is not None and "generate" not in vars(model):
        from .decoding.generation import Generation
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
    trial = _Trial(model, decoder, report, weights is not None)
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
        from .decoding.encoder_decoder import AcceleratedAcross
        made = Accelerated if parts.layers[0].cross is None else AcceleratedAcross
        graph = parts.weights.is_cuda if capture is None else capture
        if graph and parts.ungraphed:
            report.left.append(f"no graph of its decode step: it has {parts.ungraphed}")
        # joined weights are weights like any other
        with torch.inference_mode(False), torch.no_grad():
            report._step = made(decoder, parts, graph and not parts.ungraphed, model)
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
    from .decoding.speculative import DRAFTED, LOOKED_UP, PROMPT_LOOKUP, Draft, Lookup, Speculation
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
def _evaluated(model: nn.Module) -> Iterator[None]:
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


class _OwnForward:
    """A decoder by its own code, whatever step it has got."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.get_input_embeddings = decoder, decoder.get_input_embeddings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._decoder).forward(self._decoder, *args, **kwargs)


class _Trial:
    """The model as it was, with the same weights, to compare with; and the decoder in either, which
    is the model itself or a part that gets its tokens embedded."""

    def __init__(self, model: Any, decoder: Any, report: Acceleration,
                 apart: bool = False) -> None:
        """`apart`: the weights will be put away, and the model as it was keeps them meanwhile."""
        self.model, self.decoder, self.report = model, decoder, report
        self.stock: Any = None
        config = getattr(decoder, "config", None)
        self.vocab = getattr(config, "vocab_size", None)
        # a decoder of an encoder is tried with states that the encoder could have given
        self.across = decoder is not model and "encoder_hidden_states" in inspect.signature(
            type(decoder).forward).parameters
        if (not isinstance(self.vocab, int)
                or (getattr(config, "is_encoder_decoder", False) and not self.across)
                or getattr(decoder, "main_input_name", "input_ids") != "input_ids"):
            # no decoder that takes tokens: nothing is known to try it with
            self.vocab = None
            return
        most = (getattr(config, "max_position_embeddings", None)
                or getattr(config, "max_target_positions", None) or PREFILL)
        most = most if most > 0 else PREFILL   # XLNet says -1: no limit
        self.prefill = min(PREFILL, most)
        self.context = max(1, min(CONTEXT, most - TOKENS))
        shared = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
        if apart:
            shared |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        self.stock = copy.deepcopy(model, shared)
        path = next(path for path, module in model.named_modules() if module is decoder)
        self.stock_decoder = self.stock.get_submodule(path)

    def _call(self, decoder: Any, ids: Tensor, **options: Any) -> Any:
        if self.decoder is self.model:
            return decoder(ids, **options)
        if self.across:
            books = getattr(decoder, "num_codebooks", 1)
            return decoder(ids.repeat(books, 1), encoder_hidden_states=self._encoded(), **options)
        return decoder(inputs_embeds=decoder.get_input_embeddings()(ids), **options)

    @torch.no_grad()
    def fit(self) -> None:
        """Shorter prompts for a model that is very slow as it was: bfloat16 on a CPU that has no
        arithmetic in it takes a second for each token of a small one."""
        ids = self.tokens(PROBE)
        began = time.perf_counter()
        self._call(self.stock_decoder, ids, use_cache=False)
        each = (time.perf_counter() - began) / PROBE
        most = max(PROBE, int(PATIENCE / each)) if each * self.prefill > PATIENCE else self.prefill
        if most < self.prefill:
            self.prefill, self.context = most, min(most, self.context)
            self.report.left.append(
                f"compared on prompts of {most} tokens: the model as it was takes {each:.1f} s for "
                "each")

    def _encoded(self) -> Tensor:
        like = next(self.decoder.parameters())
        gen = torch.Generator("cpu").manual_seed(1)
        width = self.decoder.config.hidden_size
        return torch.randn((1, ENCODED, width), generator=gen, device="cpu").to(like)

    def tokens(self, count: int) -> Tensor:
        gen = torch.Generator("cpu").manual_seed(0)
        place = next(self.decoder.parameters()).device
        assert self.vocab is not None
        return torch.randint(0, self.vocab, (1, count), generator=gen, device="cpu").to(place)

    @torch.no_grad()
    def prove(self) -> None:
        """The decode step gives what the model gives, or it is not used."""
        ids, results = self.tokens(self.context + TOKENS), []
        # what weights were rounded to is not the step's: with codes it is compared with their model
        own = self.stock_decoder if self.report._layers is None else _OwnForward(self.decoder)
        for decoder in (own, self.decoder):
            cache = self._call(decoder, ids[:, :self.context], use_cache=True).past_key_values
            cached = {"past_key_values": cache, "use_cache": True}
            out = [self._call(decoder, ids[:, i:i + 1], **cached)[0].float()
                   for i in range(self.context, self.context + TOKENS)]
            results.append(torch.cat(out))
        stock, ours = results
        whole = self._call(own, ids, use_cache=False)[0]
        at_once = whole[0, self.context:, None].float()
        self.report.error, spread = (float((other - stock).norm() / stock.norm().clamp_min(1e-30))
                                     for other in (ours, at_once))
        step = self.report._step
        assert step is not None
        rounded = self.report._layers is not None and self.report._layers.rounds_activations
        limit = max(CLOSE.get(next(self.decoder.parameters()).dtype, 1e-3), AS_OWN * spread,
                    ROUNDED * rounded)
        # NaN too; who is to blame is not known, so the patch goes as well
        if not self.report.error <= limit:
            self.report.undo()
            self.report.left.append(f"everything: its results are off by {self.report.error:.1e}, "
                                    f"more than {limit:.0e}")
        elif not step.served:
            self._give_up("it served no token: " + "; ".join(step.declined))

    def weigh(self, made: QuantizedLayers, ids: Tensor | None) -> None:
        """Says what the codes did to the predictions."""
        error = None
        if self.stock is not None and self.decoder is self.model:
            name = "the given text"
            if ids is None:
                ids, name = default_ids(self.model, self.prefill, self.tokens)
            ids = ids.to(next(self.decoder.parameters()).device)
            if ids.is_cuda:                    # have its kernels compiled before they are judged
                with torch.no_grad():
                    self.model(ids, use_cache=False)
                compiling.wait(COMPILE_SECONDS)
            error = prediction_error(lambda ids: self.stock(ids, use_cache=False)[0],
                                     lambda ids: self.model(ids, use_cache=False)[0], ids, name)
        elif ids is not None:
            self.report.left.append("the error of the weights was not measured: the model gives no "
                                    "predictions for tokens alone")
        self.report.weights = QuantizedWeights.of(made.wanted, made, error)

    def _give_up(self, why: str) -> None:
        self.report._drop_step()
        self.report.left.append(f"no decode step: {why}")

    @torch.no_grad()
    def time(self, seconds: float) -> None:
        report = self.report
        unknown = self._unknown_input()
        if unknown:
            what = "not measured" if report._step is None else "prompts were not measured"
            report.left.append(f"{what}: {unknown}; time it on your own inputs")
        place = next(self.model.parameters()).device.type
        if (report._changes or report._layers) and not unknown:
            prefill = self._gain({"stock": self._prompt(self.stock),
                                  "ours": self._prompt(self.model)}, seconds, place)
            report.gains["prefill"] = prefill
            # quantized weights were asked for: what they cost is not the patch's
            if prefill.verdict == "slower" and report._layers is None:
                report._drop_patch()
                report.left.append("lz.patch was undone: a prompt took longer with it")
        if report._step is not None:
            ways = {"stock": self._decoding(self.stock_decoder),
                    "ours": self._decoding(self.decoder)}
            report.gains["decode"] = self._gain(ways, seconds, place)
            # quantized weights were asked for, and the step is the faster way to read them
            if report.gains["decode"].verdict == "slower" and report._layers is None:
                self._give_up("a token took longer with it")

    def _unknown_input(self) -> str:
        """Returns why the model as it was cannot be called with tokens alone, or ""."""
        if self.stock is None:
            return "what it takes as input is not known"
        try:
            self._prompt(self.stock)()
        except faults.OUT_OF_MEMORY:
            raise
        except Exception as error:  # whatever the model's own code says: it wants something else
            return f"called with tokens alone it says {type(error).__name__}: {error}"
        return ""

    def _prompt(self, model: Any) -> Callable[[], Any]:
        ids = self.tokens(self.prefill)
        cached = ({"use_cache": True}
                  if "use_cache" in inspect.signature(type(model).forward).parameters else {})
        return lambda: model(ids, **cached)

    def _decoding(self, decoder: Any) -> Callable[[], Any]:
        """One token, and the cache as it was again; which a cache that is longer than its window
        could not be."""
        windows = ([at.window for at in self.report._step.parts.layers if at.window]
                   if self.report._step else [])
        before = max(1, min(self.context, *(w - 2 for w in windows)) if windows else self.context)
        ids = self.tokens(before + 1)
        cache = self._call(decoder, ids[:, :before], use_cache=True).past_key_values
        token = ids[:, before:]

        def way() -> None:
            self._call(decoder, token, past_key_values=cache, use_cache=True)
            cache.crop(-1)

        return way

    @staticmethod
    def _gain(ways: Mapping[str, Callable[[], Any]], seconds: float, device: str) -> Gain:
        race, began = Race(stopwatch(device)), time.perf_counter()
        for name, way in ways.items():
            race.enter(name, way)
        entered = time.perf_counter()
        end = entered + seconds
        race.run(LEAST_ROUNDS if entered - began < PATIENCE else LEAST_SLOW_ROUNDS)
        while time.perf_counter() < end:
            race.run()
        timings = race.timings
        return Gain(timings.median("stock"), timings.median("ours"), timings.gain("stock", "ours"))
