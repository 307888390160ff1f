"""Pipelines and models of diffusers, served by lz calls.

    report = patch_diffusers(pipe)  # attention, norms, feed-forward and linear layers of its models
    print(report)                              # what was replaced, what was left, and why
    unpatch_diffusers(pipe)

Only this model changes: its attention processors are replaced by copies, its norms and other layers
change their class. No global of diffusers is set, so other models in the process are unaffected.
(`model.set_attention_backend(...)` of diffusers sets its global default as well.)

A processor with a backend gets the backend "layerzero", which `register_diffusers` adds to
diffusers. A processor that calls torch's scaled_dot_product_attention gets a subclass in which that
name means lz.attention; all else is its own code, of whatever version is installed.

An attention backend that the user chose stays: lz takes the place of torch's own attention only.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..spec.display import Displayed
from ..spec.errors import ConfigError
from .diffusers_backend import NO_CONTEXT_PARALLEL, attention_dispatch, backend_name
from .diffusers_backend import register_diffusers as register_diffusers
from .rewiring import SDPA, mentions, public, replaced_sdpa, rewired, sdpa_aliases
from .transformers.patch import Changes, apply, unpatch
from .transformers.recognise import Recogniser
from .transformers.replacements import hooked_everywhere, is_bare, recipe_of, stock_of

PARTS = ("attention", "norm", "mlp", "linear")
_STOCK = "_layerzero_diffusers"                # of a patched class: the original class
_ORIGINAL = "_layerzero_original"              # of a copied processor: the original
_TEXT_ENCODER = {"attention": ("attention", "rope"), "norm": ("layer_norm", "rms_norm"),
                 "mlp": ("mlp", "moe"), "linear": ("linear", "lm_head")}       # kinds of lz.patch
_MLP_ACTIVATIONS = {"GEGLU": "geglu", "SwiGLU": "swiglu"}


@dataclass(frozen=True, repr=False)
class DiffusersReport(Displayed):
    """The modules that patch_diffusers replaced, by component of a pipeline ("" for one model)."""

    replaced: Mapping[tuple[str, str, str], int]       # (component, class, op) -> how many
    left: Mapping[tuple[str, str, str], int]           # (component, class, why) -> how many

    def count(self, op: str) -> int:
        """Return how many modules now call this op."""
        return sum(n for (_, _, name), n in self.replaced.items() if name == op)

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        return {"replaced": [{"component": c, "class": k, "op": o, "count": n} for (c, k, o), n in
                             self.replaced.items()],
                "left": [{"component": c, "class": k, "why": w, "count": n}
                         for (c, k, w), n in self.left.items()]}

    def _headline(self) -> str:
        return f"{sum(self.replaced.values())} replaced, {sum(self.left.values())} left"

    def __str__(self) -> str:
        def line(component: str, name: str, then: str, n: int) -> str:
            return f"  {n:4d} x {f'{component}: ' if component else ''}{name} {then}"

        done = [line(c, k, f"-> lz.{op}", n) for (c, k, op), n in self.replaced.items()]
        rest = [line(c, k, f"({why})", n) for (c, k, why), n in self.left.items()]
        return "\n".join(["replaced:", *(done or ["  nothing"]),
                          *(["left:", *rest] if rest else [])])


def patch_diffusers(target: Any, parts: Iterable[str] = PARTS) -> DiffusersReport:
    """Patch the attention, norms, feed-forward and linear layers of a pipeline or model;
    idempotent."""
    return _patch(target, parts)[0]


def _patch(target: Any, parts: Iterable[str]) -> tuple[DiffusersReport, ExitStack]:
    """Patches all of it, or nothing if an error comes; closing the stack undoes it."""
    parts = _checked_parts(parts)
    register_diffusers()
    components = _components(target, "patch_diffusers")
    for name, model in components.items():
        _refuse_context_parallel(name, model)
    replaced: Counter[tuple[str, str, str]] = Counter()
    left: Counter[tuple[str, str, str]] = Counter()
    with ExitStack() as undo:
        for name, model in components.items():
            if _is_transformers(model):
                skipped = [kind for part in PARTS if part not in parts
                           for kind in _TEXT_ENCODER[part]]
                report, changes = apply(model, skip=skipped)
                undo.callback(changes.undo)
                for row in report.rows:
                    (replaced if row.patched else left)[name, row.kind, row.op
                                                        or row.why] += row.count
                continue
            copies: dict[int, Any] = {}        # a processor may be shared by several modules
            for module in list(model.modules()):
                if "attention" in parts and _has_processor(module):
                    kind, why = _replace_processor(module, copies, undo)
                    (left if why else replaced)[name, kind, why or "attention"] += 1
                _replace_class(module, name, parts, replaced, left, undo)
            if "linear" in parts:
                _replace_linear(model, name, replaced, left, undo)
        return DiffusersReport(dict(replaced), dict(left)), undo.pop_all()


def unpatch_diffusers(target: Any) -> None:
    """Undo patch_diffusers: the same processors and classes as before; later replacements by others
    stay."""
    for model in _components(target, "unpatch_diffusers").values():
        unpatch(model)
        for module in list(model.modules()):
            _restore_processor(module)
            stock = getattr(type(module), _STOCK, None)
            if stock is not None:
                module.__class__ = stock


@contextmanager
def patched_diffusers(target: Any, parts: Iterable[str] = PARTS) -> Iterator[DiffusersReport]:
    """Patch for the duration of a `with` block; what was patched before it stays so after it."""
    report, undo = _patch(target, parts)
    with undo:
        yield report


def attn_processor(like: Any = None) -> Any:
    """Return a copy of the processor `like`, by default AttnProcessor2_0, that calls lz.attention.
    """
    attention_dispatch()
    if like is None:
        from diffusers.models.attention_processor import AttnProcessor2_0
        like = AttnProcessor2_0()
    processor, why = _served_copy(like)
    if why:
        raise ConfigError(
            f"wanted a processor that calls {SDPA} or has a backend, got {type(like).__name__}: "
            f"{why}")
    return processor


# processors

def _has_processor(module: nn.Module) -> bool:
    return callable(getattr(module, "processor", None))


def _replace_processor(module: nn.Module, copies: dict[int, Any],
                       undo: ExitStack) -> tuple[str, str]:
    """Replace the processor; returns its class name, and why it was left ("" if replaced)."""
    processor: Any = module.processor
    kind = type(processor).__name__
    if _ORIGINAL in getattr(processor, "__dict__", {}) or hasattr(type(processor), _STOCK):
        return kind, ""
    served: Any = copies.get(id(processor))
    if served is None:
        why = _chosen_backend(processor) if hasattr(processor, "_attention_backend") else ""
        if not why:
            served, why = _served_copy(processor)
        if why:
            return kind, why
        # not by setattr: a module would become part of the state
        vars(served)[_ORIGINAL] = processor
        copies[id(processor)] = served
    module.processor = served
    undo.callback(_restore_processor, module)
    return kind, ""


def _restore_processor(module: nn.Module) -> None:
    """Gives a module its own processor again, with the backend that was set since, if any."""
    processor: Any = getattr(module, "processor", None)
    if processor is None:
        return
    original = getattr(processor, "__dict__", {}).get(_ORIGINAL)
    if original is not None:
        backend = getattr(processor, "_attention_backend", None)
        if hasattr(original, "_attention_backend") and backend != backend_name():
            original._attention_backend = backend
        module.processor = original
    elif hasattr(type(processor), _STOCK):     # diffusers makes new ones of the class it finds
        processor.__class__ = getattr(type(processor), _STOCK)


def _chosen_backend(processor: Any = None) -> str:
    """Returns why the attention of a processor, or of a module without any, stays with its backend;
    "" where that is torch's own attention, or lz already."""
    dispatch = attention_dispatch()
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    backend = getattr(processor, "_attention_backend", None)
    backend = registry.get_active_backend()[0] if backend is None else names(backend)
    if backend is backend_name():
        return ""
    if (backend is not names.NATIVE
        or registry._backends.get(backend) is not dispatch._native_attention):
        return (f"its attention backend {backend.value!r} was chosen and stays; "
                "lz takes the place of torch's own, 'native'")
    return replaced_sdpa()


def _served_copy(processor: Any) -> tuple[Any, str]:
    """Return a copy that calls lz.attention, or None and the reason."""
    served = copy.copy(processor)
    if hasattr(processor, "_attention_backend"):
        served._attention_backend = backend_name()
        return served, ""
    stock: Any = type(processor)
    if _calls_sdpa(stock) and (why := replaced_sdpa()):
        return None, why
    cls = served_class(stock)
    if cls is None:
        return None, "computes attention by itself"
    served.__class__ = cls
    return served, ""


def _refuse_context_parallel(name: str, model: nn.Module) -> None:
    for path, module in model.named_modules():
        if getattr(getattr(module, "processor", None), "_parallel_config", None) is not None:
            raise ConfigError(
                f"{name or type(model).__name__}.{path}: wanted a model on one device; "
                f"{NO_CONTEXT_PARALLEL}. Nothing was patched")


# classes of modules

def _replace_class(module: nn.Module, component: str, parts: frozenset[str],
                   replaced: Counter[tuple[str, str, str]],
                   left: Counter[tuple[str, str, str]], undo: ExitStack) -> None:
    kind: Any = type(module)
    stock: Any = getattr(kind, _STOCK, kind)
    if "attention" in parts and _calls_sdpa(stock) and (why := replaced_sdpa()):
        left[component, stock.__name__, why] += 1
        return
    part, op = _part_and_op(stock)
    if part not in parts:
        return
    why = _unfit(module, stock) or (_chosen_backend() if part == "attention" else "")
    if why and kind is stock:
        left[component, stock.__name__, why] += 1
        return
    if kind is stock:
        module.__class__ = served_class(stock)
        undo.callback(_restore_class, module, type(module), stock)
    replaced[component, stock.__name__, op] += 1


def _restore_class(module: nn.Module, served: type, stock: type) -> None:
    if type(module) is served:                   # another one that came since stays
        module.__class__ = stock


def _replace_linear(model: nn.Module, component: str, replaced: Counter[tuple[str, str, str]],
                    left: Counter[tuple[str, str, str]], undo: ExitStack) -> None:
    """Replace the linear layers outside patched feed-forward layers, which compute theirs."""
    recognise, changes = Recogniser(), Changes()
    undo.callback(changes.undo)
    inside = {id(part) for module in model.modules()
              if getattr(type(module), _STOCK, None) is not None
              and hasattr(module, "net") for part in module.modules()}
    for module in model.modules():
        if stock_of(module) is not nn.Linear or id(module) in inside:
            continue
        verdict = recipe_of(module) or recognise(module)
        if isinstance(verdict, str):
            left[component, "Linear", verdict] += 1
        elif verdict is not None:
            if type(module) is nn.Linear:
                changes.follow(module, verdict)
            replaced[component, "Linear", "linear"] += 1


def _part_and_op(stock: type) -> tuple[str, str]:
    """Return the part and the op of a class of modules; empty for one that stays as it is."""
    if stock in _forwards():
        op = _forwards()[stock][0]
        return ("mlp" if op == "mlp" else "norm"), op
    if issubclass(stock, nn.Module) and any(map(_aliases, _methods(stock).values())):
        return "attention", "attention"
    return "", ""


def _unfit(module: nn.Module, stock: type) -> str:
    if "forward" in vars(module):
        return "its forward was replaced by a hook"
    if any(len(s) != 1 for s in (getattr(module, "normalized_shape", (1,)),
                                 getattr(module, "dim", (1,)))
           if isinstance(s, tuple)):
        return "normalises over several dimensions"
    if _forwards().get(stock, ("",))[0] == "mlp" and not _mlp_arguments(module):
        return "not a feed-forward layer of plain linear layers with GELU, GEGLU or SwiGLU"
    return ""


@functools.cache
def served_class(stock: Any) -> Any:
    """Return the subclass of `stock` that makes lz calls; None if no call of it can be replaced."""
    if stock in _forwards():
        members: dict[str, Any] = {"forward": _forwards()[stock][1]}
    else:
        members = {name: rewired(fn, aliases) for name, fn in _methods(stock).items()
                   if (aliases := _aliases(fn))}
        if not members:
            return None
    # The name stays: diffusers reads the names of processors. Unpickling patches again.
    return type(stock.__name__, (stock,), {
        **members, _STOCK: stock, "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__reduce_ex__": lambda self, protocol: (_blank, (stock,), vars(self))})


def _blank(stock: type) -> Any:
    cls: Any = served_class(stock) or stock
    return cls.__new__(cls)


def _calls_sdpa(cls: type) -> bool:
    return any(mentions(fn.__code__, SDPA) for fn in _methods(cls).values())


def _methods(cls: type) -> dict[str, types.FunctionType]:
    return {name: fn for base in reversed(cls.__mro__) for name, fn in vars(base).items()
            if isinstance(fn, types.FunctionType) and name != "__init__"}


def _aliases(fn: types.FunctionType) -> dict[str, Any]:
    """Map the globals through which a function computes attention to their replacements."""
    dispatch = attention_dispatch().dispatch_attention_fn
    aliases = sdpa_aliases(fn)
    if (not aliases and "backend" not in [name for const in fn.__code__.co_consts
                                          if isinstance(const, tuple)
                                        for name in const]):
        aliases = {name: functools.partial(dispatch, backend=backend_name())
                   for name, value in fn.__globals__.items()
                   if value is dispatch and mentions(fn.__code__, name)}
    return aliases


@functools.cache
def _forwards() -> dict[type, tuple[str, Callable[..., Any]]]:
    """Return class -> (op, forward that calls the op)."""
    from diffusers.models.attention import FeedForward
    from diffusers.models.normalization import FP32LayerNorm, RMSNorm

    layer_norm, rms_norm, group_norm, mlp = (
        public(name) for name in ("layer_norm", "rms_norm", "group_norm", "mlp"))

    def left_to_torch(self: Any, x: Tensor) -> bool:
        """Returns whether torch decides the result's dtype: autocast, or another weight dtype."""
        return ((self.weight is not None and self.weight.dtype != x.dtype)
                or (x.dtype != torch.float32 and _autocast()))

    def layer_norm_forward(self: Any, input: Tensor) -> Any:
        if left_to_torch(self, input):
            return nn.LayerNorm.forward(self, input)
        return layer_norm(input, self.weight, self.bias, self.eps)

    def wide_layer_norm_forward(self: Any, inputs: Tensor) -> Any:
        return layer_norm(inputs, self.weight, self.bias, self.eps)

    def group_norm_forward(self: Any, input: Tensor) -> Any:
        if left_to_torch(self, input):
            return nn.GroupNorm.forward(self, input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def torch_rms_norm_forward(self: Any, x: Tensor) -> Any:
        if left_to_torch(self, x):
            return nn.RMSNorm.forward(self, x)
        return rms_norm(x, self.weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)

    def rms_norm_forward(self: Any, hidden_states: Tensor) -> Any:
        if self.bias is not None or left_to_torch(self, hidden_states):
            return RMSNorm.forward(self, hidden_states)
        return rms_norm(hidden_states, self.weight, self.eps)

    def feed_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        arguments = None if args or kwargs or self.training else _mlp_arguments(self)
        if not arguments:
            return FeedForward.forward(self, hidden_states, *args, **kwargs)
        return mlp(hidden_states, **arguments)

    return {nn.LayerNorm: ("layer_norm", layer_norm_forward),
            FP32LayerNorm: ("layer_norm", wide_layer_norm_forward),
            nn.GroupNorm: ("group_norm", group_norm_forward),
            nn.RMSNorm: ("rms_norm", torch_rms_norm_forward),
            RMSNorm: ("rms_norm", rms_norm_forward), FeedForward: ("mlp", feed_forward)}


_autocast = torch._C._is_any_autocast_enabled


def _mlp_arguments(layer: Any) -> dict[str, Any] | None:
    """Return weights and activation for lz.mlp at every call: a LoRA or hook may be new."""
    if len(layer.net) not in (3, 4) or hooked_everywhere():
        return None
    first, down = layer.net[0], layer.net[2]
    up: Any = getattr(first, "proj", None)
    if not (is_bare(first, type(first)) and _plain_linear(up) and _plain_linear(down)):
        return None
    kind = type(first).__name__
    if kind == "GELU":
        activation = "gelu_tanh" if first.approximate == "tanh" else "gelu"
        return {"weight_in": up.weight, "weight_down": down.weight, "activation": activation,
                "bias_in": up.bias,
                "bias_down": down.bias}
    if kind not in _MLP_ACTIVATIONS:
        return None
    inner = down.in_features                   # diffusers puts the rows of the gate last
    return {"weight_in": up.weight[inner:], "weight_up": up.weight[:inner],
            "weight_down": down.weight, "activation": _MLP_ACTIVATIONS[kind], "bias_in": None
            if up.bias is None else up.bias[inner:], "bias_up": None if up.bias is None
            else up.bias[:inner], "bias_down": down.bias}


def _plain_linear(module: Any) -> bool:
    # a quantized weight is a subclass
    return is_bare(module, nn.Linear) and type(module.weight) is nn.Parameter


# arguments

def _checked_parts(parts: Iterable[str]) -> frozenset[str]:
    names = frozenset((parts,) if isinstance(parts, str) else parts)
    if not names <= set(PARTS):
        raise ConfigError(
            f"patch_diffusers: parts must be among {', '.join(PARTS)}, got "
            f"{', '.join(sorted(names))}")
    return names


def _components(target: Any, caller: str) -> dict[str, nn.Module]:
    """Return the models of a pipeline by name; a single model has the name ""."""
    attention_dispatch()
    if isinstance(target, nn.Module):
        return {"": target}
    parts = getattr(target, "components", None)
    if not isinstance(parts, Mapping):
        raise ConfigError(
            f"{caller}: wanted a pipeline or a model of diffusers, got {type(target).__name__}; "
            "pass the pipeline, or the torch module in it")
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def _is_transformers(model: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "transformers" for base in type(model).__mro__)
