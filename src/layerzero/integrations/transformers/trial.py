"""The trial of an accelerated model: is it right, and is it faster than the model as it was?"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...dispatch.background import compiling
from ...machine import faults
from ...spec.codec import Record
from ...tuning.harness import Race, Ratio, stopwatch
from .quantized import QuantizedLayers
from .weight_error import QuantizedWeights, default_ids, prediction_error

if TYPE_CHECKING:
    from .accelerate import Acceleration

# The largest relative error of the results, by dtype; or, where it is more, SPREAD_FACTOR times the
# difference between the model's own results token by token and all at once, which is large where
# rounded scores choose among many experts.
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
SPREAD_FACTOR = 4
# the error that activations rounded to eight bits may have: a tie may go to either code
ROUNDED = 0.05
# the latter where one call takes longer than all should
MIN_ROUNDS, MIN_SLOW_ROUNDS = 5, 2
# tokens of the trial: prompt timed, prompt before decoding, decoded
PREFILL, CONTEXT, TOKENS = 128, 64, 3
ENCODED = 16                                   # states of an encoder in the trial
# tokens that are timed to see how slow the model is; seconds that a prompt may take
PROBE, PATIENCE = 4, 10.0
COMPILE_SECONDS = 60                           # for the kernels of prompts with codes for weights


@dataclass(frozen=True)
class Gain(Record):
    """Microseconds of the stock and of the accelerated model, timed in turns."""

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


class _OwnForward:
    """Calls a decoder's own forward, whether or not it has a decode step."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.get_input_embeddings = decoder, decoder.get_input_embeddings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._decoder).forward(self._decoder, *args, **kwargs)


class Trial:
    """The model as it was, with the same weights, to compare with; and the decoder in either, which
    is the model itself or a part that gets its tokens embedded."""

    def __init__(self, model: Any, decoder: Any, report: Acceleration, apart: bool = False) -> None:
        """Compares with the stock model. `apart`: it keeps the weights that codes will replace."""
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
            return decoder(ids.repeat(books, 1), encoder_hidden_states=self._encoder_output(),
                           **options)
        return decoder(inputs_embeds=decoder.get_input_embeddings()(ids), **options)

    @torch.no_grad()
    def fit(self) -> None:
        """Shorten the prompts for a model that is very slow: bfloat16 on a CPU without arithmetic
        for it takes a second for each token of a small one."""
        ids = self.tokens(PROBE)
        start = time.perf_counter()
        self._call(self.stock_decoder, ids, use_cache=False)
        each = (time.perf_counter() - start) / PROBE
        most = max(PROBE, int(PATIENCE / each)) if each * self.prefill > PATIENCE else self.prefill
        if most < self.prefill:
            self.prefill, self.context = most, min(most, self.context)
            self.report.left.append(
                f"compared on prompts of {most} tokens: the model as it was takes {each:.1f} s for "
                "each")

    def _encoder_output(self) -> Tensor:
        like = next(self.decoder.parameters())
        gen = torch.Generator("cpu").manual_seed(1)
        width = self.decoder.config.hidden_size
        return torch.randn((1, ENCODED, width), generator=gen, device="cpu").to(like)

    def tokens(self, count: int) -> Tensor:
        gen = torch.Generator("cpu").manual_seed(0)
        device = next(self.decoder.parameters()).device
        assert self.vocab is not None
        return torch.randint(0, self.vocab, (1, count), generator=gen, device="cpu").to(device)

    @torch.no_grad()
    def prove(self) -> None:
        """Compare the decode step with the model, and undo it where they differ."""
        ids, results = self.tokens(self.context + TOKENS), []
        # what weights were rounded to is not the step's: with codes it is compared with their model
        own = self.stock_decoder if self.report._layers is None else _OwnForward(self.decoder)
        for decoder in (own, self.decoder):
            cache = self._call(decoder, ids[:, :self.context], use_cache=True).past_key_values
            cached = {"past_key_values": cache, "use_cache": True}
            out = [self._call(decoder, ids[:, i:i + 1], **cached)[0].float()
                   for i in range(self.context, self.context + TOKENS)]
            results.append(torch.cat(out))
        stock, accelerated = results
        whole = self._call(own, ids, use_cache=False)[0]
        at_once = whole[0, self.context:, None].float()
        self.report.error, spread = (float((other - stock).norm() / stock.norm().clamp_min(1e-30))
                                     for other in (accelerated, at_once))
        step = self.report._step
        assert step is not None
        rounded = self.report._layers is not None and self.report._layers.rounds_activations
        limit = max(CLOSE.get(next(self.decoder.parameters()).dtype, 1e-3), SPREAD_FACTOR * spread,
                    ROUNDED * rounded)
        # NaN too; who is to blame is not known, so the patch goes as well
        if not self.report.error <= limit:
            self.report.undo()
            self.report.left.append(f"everything: its results are off by {self.report.error:.1e}, "
                                    f"more than {limit:.0e}")
        elif not step.served:
            self._give_up("it served no token: " + "; ".join(step.declined))

    def weigh(self, layers: QuantizedLayers, ids: Tensor | None) -> None:
        """Measure the error of the predictions with quantized weights."""
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
        self.report.weights = QuantizedWeights.of(layers.config, layers, error)

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
        device = next(self.model.parameters()).device.type
        prompts = getattr(report._step, "prompts", None)
        if (report._changes or report._layers or prompts) and not unknown:
            prefill = self._prefill(seconds, device)
            if prefill.verdict == "slower" and prompts is not None:
                report._step.prompts = None
                report.left.append("prompts by the layers of the decode step: they took longer")
                prefill = self._prefill(seconds, device)
            report.gains["prefill"] = prefill
            # quantized weights were asked for: what they cost is not the patch's
            if prefill.verdict == "slower" and report._layers is None and report._changes:
                report._drop_patch()
                report.left.append("lz.patch was undone: a prompt took longer with it")
        if report._step is not None:
            ways = {"stock": self._decoding(self.stock_decoder),
                    "ours": self._decoding(self.decoder)}
            report.gains["decode"] = self._gain(ways, seconds, device)
            # quantized weights were asked for, and the step is the faster way to read them
            if report.gains["decode"].verdict == "slower" and report._layers is None:
                self._give_up("a token took longer with it")

    def _prefill(self, seconds: float, device: str) -> Gain:
        return self._gain({"stock": self._prompt(self.stock), "ours": self._prompt(self.model)},
                          seconds, device)

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
        """Decode one token, then crop it from the cache again, which a cache longer than its window
        could not do."""
        windows = ([layer.window for layer in self.report._step.parts.layers if layer.window]
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
        race, start = Race(stopwatch(device)), time.perf_counter()
        for name, way in ways.items():
            race.enter(name, way)
        entered = time.perf_counter()
        end = entered + seconds
        race.run(MIN_ROUNDS if entered - start < PATIENCE else MIN_SLOW_ROUNDS)
        while time.perf_counter() < end:
            race.run()
        timings = race.timings
        return Gain(timings.median("stock"), timings.median("ours"), timings.gain("stock", "ours"))
