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
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import chain, repeat
from operator import contains, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ....machine import faults
from ....operate import graphs
from ....spec.errors import NoKernelFoundError
from ....spec.event import Fallback
from ....world import events
from ...rewiring import replaced_sdpa
from .. import NAME
from ..decoders.families import NotRecognised
from ..decoders.recognition import DecoderParts
from ..implementations import DECODED
from . import shared_prompt
from .cuda.captured import CapturedSteps, Uncapturable
from .decode_step import DecodeStep, JoinedLayer, join_layers
from .growing_cache import make_growing
from .kv_states import is_updating, kv_for, updating_token
from .prompt import PromptStep
from .reduction import REDUCE, Reduce

# What a call may also hold and what it must then be. Anything else is left to the model.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "use_cache": (None, True), "return_dict": (None, True), "output_attentions": (None, False),
    "output_hidden_states": (None, False), "output_router_logits": (None, False), "labels": (None,)}
MOVED = "weights that were moved or cast"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_autocast = torch._C._is_any_autocast_enabled


class ModelWatch:
    """Watches that a model stays as it is: modules, weights, where they lie, no hooks."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        inner = [m for m in modules if m is not model]
        self._hooks = [getattr(m, name) for m in inner for name in _HOOKS]
        self._attributes = [vars(m) for m in inner]
        self._containers = [container for m in modules
                            for container in (m._modules, m._parameters) if container]
        self._initial_members = self._members()
        self._weights = list(model.parameters())
        self._addresses = list(map(Tensor.data_ptr, self._weights))

    def _members(self) -> list[Any]:
        return list(chain.from_iterable(container.values() for container in self._containers))

    def _has_hooks(self) -> bool:
        """Returns whether there are hooks. Those of transformers itself, which stay once outputs
        were recorded, do nothing while none are."""
        others = [h for hooks in self._hooks for h in hooks.values()
                  if getattr(h, "__module__", "") != "transformers.utils.output_capturing"]
        recorder = getattr(sys.modules.get("transformers.utils.output_capturing"),
                           "_active_collector", None)
        return bool(others) or recorder is None or recorder.get() is not None

    def disturbed(self) -> str:
        """Returns what is no longer as it was, or ""."""
        if (any(self._hooks) and self._has_hooks()) or nn_module._has_any_global_hook():
            return "a hook on one of its modules"
        if any(map(contains, self._attributes, repeat("forward"))):
            return "a module with a forward of its own"
        members, initial = self._members(), self._initial_members
        if len(members) != len(initial) or not all(map(is_, members, initial)):
            return "a module or weight in the place of another"
        if list(map(Tensor.data_ptr, self._weights)) != self._addresses:
            return MOVED
        return ""


class Accelerated:
    """Takes the place of `model.forward`; `whole` is the model that it is a part of, or itself."""

    is_decode_step = True                      # for Reduce, which does not import this module

    def __init__(self, model: Any, parts: DecoderParts, capture: bool, whole: nn.Module) -> None:
        disturbed = (ModelWatch(model).disturbed()
                     or ("a forward of its own" if "forward" in vars(model) else ""))
        if disturbed:
            raise NotRecognised(f"the model has {disturbed}")
        self.model, self.parts = model, parts
        self.layers: tuple[JoinedLayer, ...] = join_layers(whole, parts)
        self.served: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.generated: Counter[str] = Counter()   # generate(), by how its tokens were looped
        self.broken = ""                       # the fault that ended it
        self._steps: dict[int, DecodeStep] = {}
        self._captured = CapturedSteps(parts) if capture else None
        self.prompts = self._prompt_step() if parts.weights.is_cuda else None
        self.prompted: Counter[str] = Counter()    # prompts, by who computed them
        self._watch = ModelWatch(model)
        self._result = (parts.result or (BaseModelOutputWithPast if parts.head is None
                                         else CausalLMOutputWithPast))
        self._windows = [layer.window for layer in parts.layers]
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        functools.update_wrapper(self, type(model).forward.__get__(model))

    def _prompt_step(self) -> PromptStep | None:
        """Returns the step for prompts; None where something of them is not known."""
        try:
            return PromptStep(self.parts, self.layers)
        except NotRecognised:
            return None

    def step(self, batch: int) -> DecodeStep:
        step = self._steps.get(batch)
        if step is None or step.stale():
            step = self._steps[batch] = self._new_step(batch)
            if self._captured is not None:
                self._captured.forget(batch)
        return step

    def _new_step(self, batch: int) -> DecodeStep:
        if self._captured is not None:
            # on a device its kernels are raced in graphs
            once = graphs.collected_once() if self.parts.weights.is_cuda else nullcontext()
            try:
                with once:
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
        self._captured = self.prompts = None
        for layer in self.layers:
            layer.undo()
        self.layers = ()
        self.broken = self.broken or "the acceleration was undone"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self._names, args)), **kwargs}
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        token, dims = (embeds, 3) if ids is None else (ids, 2)
        if (torch.compiler.is_compiling() or token is None or token.dim() != dims
                or (token.shape[1] != 1 and self.prompts is None)
                # an argument given twice: the model says so
                or len(arguments) < len(args) + len(kwargs)):
            return type(self.model).forward(self.model, *args, **kwargs)
        single = token.shape[1] == 1
        try:
            return self._one_token(**arguments) if single else self._prompt(**arguments)
        except NotRecognised as reason:
            (self.declined if single else self.prompted)[str(reason)] += 1
        except faults.FAULTS as error:
            self.fault(error, not single)
        return type(self.model).forward(self.model, *args, **kwargs)

    def fault(self, error: BaseException, prompt: bool = False) -> None:
        """Leave the token or the prompt to the model, and all others where the step itself is at
        fault; raise what is the caller's or the device's."""
        kind = faults.classify(error)
        if isinstance(error, faults.PASSED_ON) or kind == "sticky":
            raise error
        reason, why = faults.reason_of(error, kind), "out of memory"
        if kind != "memory":
            why = f"a fault of the step: {reason.message}"
            self.broken, self.prompts = self.broken if prompt else why, None
        events.emit(Fallback("prompt" if prompt else "decode step", "layerzero",
                             type(self.model).__name__, reason))
        (self.prompted if prompt else self.declined)[why] += 1

    def grow(self, cache: Any) -> str:
        """Let the cache append in place. What stands in the way, or nothing."""
        length = cache.get_seq_length()
        if shared_prompt.serves(cache.layers):
            return ""
        shared_prompt.unshare(cache)
        return make_growing(cache, self._windows) or (
            "a cache whose layers hold different numbers of tokens"
            if any(layer.get_seq_length() != length for layer in cache.layers) else "")

    def _one_token(self, input_ids: Tensor | None = None, attention_mask: Any = None,
                   position_ids: Any = None, past_key_values: Any = None,
                   inputs_embeds: Tensor | None = None, logits_to_keep: Any = 0,
                   **others: Any) -> Any:
        if is_updating(past_key_values):
            return updating_token(self, input_ids, attention_mask, position_ids, past_key_values,
                                  inputs_embeds, logits_to_keep, **others)
        self._check(past_key_values, logits_to_keep, others)
        token = self._token(input_ids, inputs_embeds)
        batch = token.shape[0]
        refused = self.grow(past_key_values)
        if refused:
            raise NotRecognised(refused)
        length = past_key_values.get_seq_length()
        if shared_prompt.rows_of(past_key_values.layers[0]) != batch:
            raise NotRecognised("a cache for another batch")
        masks = self._masks(attention_mask, batch, length)
        all_seen = all(mask is None for mask in masks)
        if not all_seen and shared_prompt.serves(past_key_values.layers):
            shared_prompt.unshare(past_key_values)
            self.grow(past_key_values)
        position_ids = self._position(position_ids)
        if self.parts.counted and position_ids is None and not all_seen:
            raise NotRecognised("positions that follow from the mask")
        step = self.step(batch)
        out = None
        shift = _shift(position_ids, length) if self._captured is not None and all_seen else None
        movable = self.parts.positions is None
        if self._captured is not None and shift is not None and (movable or not shift):
            try:
                out = self._captured(step, token, past_key_values, length, shift)
            except NotRecognised as why:
                self.declined[f"served without a graph: {why}"] += 1
                if isinstance(why, Uncapturable):
                    self._captured = None
        self.served["step" if out is None else "captured"] += 1
        if out is None:
            out = self._uncaptured(step, token, position_ids, past_key_values.layers, length, masks)
        if self.parts.head is None:
            return self._result(last_hidden_state=out, past_key_values=past_key_values)
        return self._result(logits=out, past_key_values=past_key_values)

    def _prompt(self, input_ids: Tensor | None = None, attention_mask: Any = None,
                position_ids: Any = None, past_key_values: Any = None,
                inputs_embeds: Tensor | None = None, logits_to_keep: Any = 0, **others: Any) -> Any:
        """Many tokens into an empty cache, all of which are seen by those after them."""
        config, prompts = self.parts.base.config, self.prompts
        cache = DynamicCache(config=config) if past_key_values is None else past_key_values
        self._check(cache, logits_to_keep, others)
        token = self._token(input_ids, inputs_embeds)
        batch, many = token.shape[:2]
        if cache.get_seq_length() or prompts is None or not many:
            raise NotRecognised("tokens after others, which are many")
        mask, plain = attention_mask, []       # what has to be true, asked in one wait
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != (batch, many):
                raise NotRecognised("a mask that is made already")
            plain.append((mask == 1).all())
        places = torch.arange(many, device=token.device)[None]
        if position_ids is not None:
            if position_ids.dim() != 2 or position_ids.shape[1] != many:
                raise NotRecognised("position_ids of another shape")
            if mask is None or self.parts.counted:             # texts may follow one another
                plain.append((position_ids == places).all())
            else:
                places = position_ids
        if plain and not bool(plain[0] if len(plain) == 1 else plain[0] & plain[1]):
            raise NotRecognised("padding, or several texts")
        x = token if token.is_floating_point() else self.parts.embedded(token)
        out = prompts.prompt(x, places, cache, logits_to_keep)
        self.prompted["step"] += 1
        named = {"last_hidden_state" if self.parts.head is None else "logits": out}
        return self._result(**named, past_key_values=cache)

    def _uncaptured(self, step: DecodeStep, token: Tensor, position_ids: Tensor | None,
                    layers: list[Any], length: int, masks: list[Tensor | None]) -> Tensor:
        if position_ids is None:
            position_ids = torch.full((1, 1), length, device=token.device)
        x = token if token.is_floating_point() else self.parts.embedded(token)
        kv = kv_for(step, self.parts, layers, masks, position_ids, length)
        try:
            out = step(self.parts.first_input(x, position_ids), kv.angles, kv)
            return out.to(self.parts.weights.dtype)
        # passed on, an interrupt too: half a token must not stay in the cache
        except BaseException:
            kv.undo()
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

    def _token(self, ids: Tensor | None, embeds: Tensor | None) -> Tensor:
        if ids is not None and embeds is not None:
            raise NotRecognised("both input_ids and inputs_embeds")
        if embeds is None:
            assert ids is not None
            return ids
        if embeds.dtype != self.parts.weights.dtype or embeds.device != self.parts.weights.device:
            raise NotRecognised(
                f"inputs_embeds that are {str(embeds.dtype)[6:]} on {embeds.device}")
        return embeds

    def _position(self, position_ids: Any) -> Tensor | None:
        """Returns the position of the new token, (batch, 1); (axes, batch, 1) for axial rope."""
        if position_ids is None:
            return None
        if self.parts.by_axes and position_ids.dim() == 3 and len(position_ids) in (1, 3, 4):
            position_ids = position_ids[-3:]   # the first of four is for masks
        elif position_ids.dim() != 2:
            raise NotRecognised(f"position_ids of {position_ids.dim()} dimensions")
        if position_ids.shape[-1] != 1:
            raise NotRecognised("position_ids for more than the new token")
        return position_ids  # type: ignore[no-any-return]

    def _masks(self, mask: Any, batch: int, length: int) -> list[Tensor | None]:
        """Returns which keys each layer sees, (batch, 1, 1, keys); nothing where it sees all."""
        if isinstance(mask, Mapping):          # made outside, for each kind of layer
            kinds = getattr(self.parts.base.config, "layer_types", None) or ()
            if len(kinds) != len(self._windows) or not set(kinds) <= mask.keys():
                raise NotRecognised("masks for other kinds of layers")
            of_kind = dict(zip(kinds, self._windows))
            masks = {kind: _keys_mask(mask[kind], batch, length + 1, window)
                     for kind, window in of_kind.items()}
            return [masks[kind] for kind in kinds]
        if mask is None:
            return [None] * len(self._windows)
        if not isinstance(mask, Tensor) or (mask.dim() != 2 and any(self._windows)):
            raise NotRecognised("a mask that is made already")
        if mask.dim() != 2:
            return [_keys_mask(mask, batch, length + 1, None)] * len(self._windows)
        if mask.shape != (batch, length + 1):
            raise NotRecognised("a mask for another length")
        return [None if bool(mask.all()) else mask.bool()[:, None, None, :]] * len(self._windows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model is not accelerated: it has the forward of its class."""
        copied = copy.deepcopy(self.model, memo)
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> Any:
        return getattr, (self.model, "forward")


def attach(step: Accelerated) -> None:
    """Lets a decoder run the step, and be copied and pickled without it."""
    vars(step.model).update({"forward": step, REDUCE: Reduce(step.model)})


def detach(step: Accelerated) -> None:
    if vars(step.model).get("forward") is step:        # someone may have put his own there since
        del vars(step.model)["forward"]
    vars(step.model).pop(REDUCE, None)


def _keys_mask(mask: Any, batch: int, total: int, window: int | None) -> Tensor | None:
    """Returns a mask as transformers makes it for one token, for a layer with this window."""
    if mask is None:
        return None
    seen = total if window is None else min(total, window)
    if (not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1:3] != (1, 1)
            or len(mask) not in (1, batch)):
        raise NotRecognised("a mask that is made already, and not for one token and all heads")
    if mask.is_floating_point():
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min)).all()):
            raise NotRecognised("a mask that adds to the scores")
        mask = shown
    before = mask.shape[-1] - seen
    if mask.dtype != torch.bool or before < 0 or (
            before and (window is None or bool(mask[..., :before].any()))):
        raise NotRecognised("a mask for another length")
    mask = mask[..., before:]
    return None if bool(mask.all()) else mask.expand(batch, 1, 1, seen)


def _shift(position_ids: Tensor | None, length: int) -> int | None:
    """Returns how far the new token is from the place after `length`; None if rows differ."""
    if position_ids is None:
        return 0
    shifts = {int(p) - length for p in position_ids.flatten().tolist()}
    return shifts.pop() if len(shifts) == 1 else None
