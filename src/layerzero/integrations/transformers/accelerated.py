"""The forward of an accelerated model: one token by the decode step, everything else by the model's
own code.

Which calls are served is decided call by call, and every other one is counted with the reason. The
model is watched: a hook, another module in the place of one, weights that were moved or cast, and
the step no longer serves.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from itertools import chain, repeat
from operator import contains, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ...machine import faults
from ...spec.errors import NoKernelFoundError
from ...spec.event import Fallback
from ...world import events
from ..rewiring import replaced_sdpa
from . import ACCELERATION, NAME
from .captured import CapturedSteps, Uncapturable
from .decode_step import DecodeStep, JoinedLayer, join_layers
from .decoders import DecoderParts
from .families import NotRecognised
from .growing_cache import growing
from .host_memory import HostMemory
from .implementations import DECODED

# What a call may also hold and what it must then be. Anything else is left to the model.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "use_cache": (None, True), "return_dict": (None, True), "output_attentions": (None, False),
    "output_hidden_states": (None, False), "labels": (None,), "inputs_embeds": (None,)}
# attributes of an accelerated model
REDUCE = "__reduce_ex__"
MOVED = "weights that were moved or cast"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_autocast = torch._C._is_any_autocast_enabled


class ModelWatch:
    """What must stay as it is: the modules, their weights and where these lie, and that nobody
    hooks into them.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        inner = [m for m in modules if m is not model]
        self._hooks = [getattr(m, name) for m in inner for name in _HOOKS]
        self._attributes = [vars(m) for m in inner]
        self._held = [held for m in modules for held in (m._modules, m._parameters) if held]
        self._known = self._all_held()
        self._weights = list(model.parameters())
        self._places = list(map(Tensor.data_ptr, self._weights))

    def _all_held(self) -> list[Any]:
        return list(chain.from_iterable(held.values() for held in self._held))

    def _hooked(self) -> bool:
        """Hooks of transformers itself, which stay once outputs were recorded, do nothing while
        none are.
        """
        others = [h for held in self._hooks for h in held.values()
                  if getattr(h, "__module__", "") != "transformers.utils.output_capturing"]
        recorder = getattr(sys.modules.get("transformers.utils.output_capturing"),
                           "_active_collector", None)
        return bool(others) or recorder is None or recorder.get() is not None

    def disturbed(self) -> str:
        """What is no longer as it was, or nothing."""
        if (any(self._hooks) and self._hooked()) or nn_module._has_any_global_hook():
            return "a hook on one of its modules"
        if any(map(contains, self._attributes, repeat("forward"))):
            return "a module with a forward of its own"
        held = self._all_held()
        if len(held) != len(self._known) or not all(map(is_, held, self._known)):
            return "a module or weight in the place of another"
        if list(map(Tensor.data_ptr, self._weights)) != self._places:
            return MOVED
        return ""


class Accelerated:
    """Takes the place of `model.forward`."""

    def __init__(self, model: Any, parts: DecoderParts, capture: bool) -> None:
        disturbed = (ModelWatch(model).disturbed()
                     or ("a forward of its own" if "forward" in vars(model) else ""))
        if disturbed:
            raise NotRecognised(f"the model has {disturbed}")
        self.model, self.parts = model, parts
        self.layers: tuple[JoinedLayer, ...] = join_layers(model, parts)
        self.served: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.broken = ""                       # the fault that ended it
        self._steps: dict[int, DecodeStep] = {}
        self._captured = CapturedSteps(parts) if capture else None
        self._watch = ModelWatch(model)
        self._result = (parts.result or (BaseModelOutputWithPast if parts.head is None
                                         else CausalLMOutputWithPast))
        self._windows = [layer.window for layer in parts.layers]
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        functools.update_wrapper(self, type(model).forward.__get__(model))

    def step(self, batch: int) -> DecodeStep:
        found = self._steps.get(batch)
        if found is None or found.stale():
            found = self._steps[batch] = self._made(batch)
            if self._captured is not None:
                self._captured.forget(batch)
        return found

    def _made(self, batch: int) -> DecodeStep:
        if self._captured is not None:
            try:
                return DecodeStep(self.parts, self.layers, batch, True)
            except NoKernelFoundError as e:              # of those that may be in a graph
                self.declined[f"served without a graph: {e}"] += 1
                self._captured = None
        return DecodeStep(self.parts, self.layers, batch)

    @property
    def kernels(self) -> dict[str, str]:
        return {what: kernel for step in self._steps.values()
                for what, kernel in step.bind.kernels.items()}

    def undo(self) -> None:
        self._steps.clear()
        self._captured = None
        for layer in self.layers:
            layer.undo()
        self.layers = ()
        self.broken = self.broken or "the acceleration was undone"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args)), **kwargs}
        ids = given.get("input_ids")
        if (torch.compiler.is_compiling() or ids is None or ids.dim() != 2 or ids.shape[1] != 1
                # an argument given twice: the model says so
                or len(given) < len(args) + len(kwargs)):
            return type(self.model).forward(self.model, *args, **kwargs)
        try:
            return self._one_token(**given)
        except NotRecognised as reason:
            self.declined[str(reason)] += 1
        except faults.FAULTS as error:
            kind = faults.classify(error)
            if isinstance(error, faults.PASSED_ON) or kind == "sticky":
                raise
            if kind != "memory":
                self.broken = f"a fault of the step: {faults.reason_of(error, kind).message}"
            events.emit(Fallback("decode step", "layerzero", type(self.model).__name__,
                                 faults.reason_of(error, kind)))
            self.declined[self.broken or "out of memory"] += 1
        return type(self.model).forward(self.model, *args, **kwargs)

    def _one_token(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None,
                   past_key_values: Any = None, logits_to_keep: Any = 0, **others: Any) -> Any:
        self._check(past_key_values, logits_to_keep, others)
        batch = input_ids.shape[0]
        refused = growing(past_key_values, self._windows)
        if refused:
            raise NotRecognised(refused)
        length = past_key_values.get_seq_length()
        if any(layer.get_seq_length() != length for layer in past_key_values.layers):
            raise NotRecognised("a cache whose layers hold different numbers of tokens")
        if past_key_values.layers[0].keys.shape[0] != batch:
            raise NotRecognised("a cache for another batch")
        mask = self._mask(attention_mask, batch, length)
        if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != 1):
            raise NotRecognised("position_ids for more than the new token")
        if self.parts.counted and position_ids is None and mask is not None:
            raise NotRecognised("positions that follow from the mask")
        step = self.step(batch)
        out = None
        if self._captured is not None and mask is None and _at(position_ids, length):
            try:
                out = self._captured(step, input_ids, past_key_values, length)
            except NotRecognised as why:
                self.declined[f"served without a graph: {why}"] += 1
                if isinstance(why, Uncapturable):
                    self._captured = None
        self.served["step" if out is None else "captured"] += 1
        if out is None:
            out = self._uncaptured(step, input_ids, position_ids, past_key_values.layers, length,
                                   mask)
        if self.parts.head is None:
            return self._result(last_hidden_state=out, past_key_values=past_key_values)
        return self._result(logits=out, past_key_values=past_key_values)

    def _uncaptured(self, step: DecodeStep, ids: Tensor, position_ids: Tensor | None,
                    layers: list[Any], length: int,
                    mask: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.full((1, 1), length, device=ids.device)
        memory = HostMemory(step, layers, mask, self.parts.angles_at(position_ids))
        try:
            return step(self.parts.embedded(ids, position_ids), memory.angles, memory)
        # passed on, an interrupt too: half a token must not stay in the cache
        except BaseException:
            memory.undo()
            raise

    def _check(self, cache: Any, keep: Any, others: Mapping[str, Any]) -> None:
        """Is this a call that the step does just as the model would?"""
        if self.broken:
            raise NotRecognised(self.broken)
        if torch.is_grad_enabled():
            raise NotRecognised("gradients are on")
        if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
            raise NotRecognised("no cache" if cache is None
                                else f"a cache that is {type(cache).__name__}")
        if type(keep) is not int:
            raise NotRecognised("logits_to_keep is a tensor")
        for name, value in others.items():
            if name not in HARMLESS:
                if value is not None:
                    raise NotRecognised(f"the argument {name}")
            elif not any(value is v for v in HARMLESS[name]):
                raise NotRecognised(f"{name} is given")
        config = self.parts.base.config
        if config._attn_implementation not in (NAME, *DECODED):
            raise NotRecognised(
                f"attn_implementation={config._attn_implementation!r}, which was chosen since")
        if others.get("use_cache") is None and not getattr(config, "use_cache", True):
            raise NotRecognised("use_cache is off in the configuration")
        if (config.output_attentions or config.output_hidden_states or not config.return_dict
                or getattr(config, "output_router_logits", False)):
            raise NotRecognised("more than the logits is asked for by the configuration")
        if self.model.training or _autocast():
            raise NotRecognised("training mode" if self.model.training else "autocast")
        disturbed = self._watch.disturbed() or replaced_sdpa()
        # for good: what the step holds of the old ones is given up
        if disturbed == MOVED:
            self.broken = disturbed
            self.undo()
        if disturbed:
            raise NotRecognised(disturbed)

    def _mask(self, mask: Any, batch: int, length: int) -> Tensor | None:
        """Nothing where every key is seen."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise NotRecognised("a mask that is made already")
        if mask.shape != (batch, length + 1):
            raise NotRecognised("a mask for another length")
        return None if bool(mask.all()) else mask.bool()[:, None, None, :]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is not accelerated: it has the forward of its class."""
        copied = copy.deepcopy(self.model, memo)
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> Any:
        return getattr, (self.model, "forward")


class Reduce:
    """The `__reduce_ex__` of an accelerated model: what is copied or pickled is the model without
    its acceleration.

    It is an attribute of the one model; copy.deepcopy, pickle and torch.save ask the object before
    its class.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, protocol: Any) -> Any:
        model = self._model()
        kind: Any = type(model)                # not the model, which would ask this object again
        make, args, state, *rest = kind.__reduce_ex__(model, protocol)
        if isinstance(state, dict):
            state = {name: value for name, value in state.items()
                     if name not in (ACCELERATION, REDUCE) and not isinstance(value, Accelerated)}
        return make, args, state, *rest


def attach(model: nn.Module, step: Accelerated) -> None:
    """Lets a model run the step, and be copied and pickled without it."""
    vars(model).update({"forward": step, REDUCE: Reduce(model)})


def detach(model: nn.Module, step: Accelerated) -> None:
    if vars(model).get("forward") is step:     # someone may have put his own there since
        del vars(model)["forward"]
    vars(model).pop(REDUCE, None)


def _at(position_ids: Tensor | None, length: int) -> bool:
    return position_ids is None or bool((position_ids == length).all())
