"""What a module computes: read from its parts, proven by its numbers.

The parts (how many weights of which shape, which layers inside) say what a module may be; then it
and lz compute the same random input, in float64, and only what agrees is replaced. So no list of
classes is needed, a class of a known name that computes something else is left alone, and an
unknown one that computes a known thing is served.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...ops.formulas.moe import GATED, PLAIN
from ..rewiring import SDPA, mentions, replaced_sdpa, sdpa_aliases
from .linear_attention import FUNCTIONS, agrees, called_functions
from .replacements import ROTATIONS, Recipe, forward_for, is_bare, recipe_of, rotary, stock_of

# of the largest result; gelu and its tanh form differ by ten times that
CLOSE = 1e-5
# weights that are tried in float32, and in their own dtype
MANY, TOO_MANY = 1 << 26, 1 << 28
# stands for the weight of a module without any
NOWHERE = torch.empty(0, dtype=torch.float32, device="cpu")
# what to do; why nothing is done; nothing that lz knows
Verdict = Recipe | str | None


class Recogniser:
    """Looks at the modules of one model; of modules alike, one is tried."""

    def __init__(self) -> None:
        self.seen: dict[Any, Verdict] = {}
        self.keep: list[Any] = []              # what `seen` knows by id must not be freed meanwhile

    def __call__(self, module: nn.Module) -> Verdict:
        if "parametrizations" in module._modules:
            return "its weights are parametrized"
        look = _kind_of_candidate(module)
        if look is None:
            return None
        refused = (_why_no_forward(module) or ("" if look in _REWIRED
                                         else _unfit(module)))
        if refused:
            return refused
        key = look, self._likeness(module)
        if key not in self.seen:
            try:
                self.seen[key] = look(self, module)
            except torch.OutOfMemoryError:
                self.seen[key] = "there is no memory to try it out"
        return self.seen[key]

    def _likeness(self, module: nn.Module) -> tuple[Any, ...]:
        """Equal for modules that differ in the values of their weights only."""
        plain = []
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules", "training", "layer_idx"):
                continue
            if not isinstance(value, (bool, int, float, str, type(None))):
                if isinstance(value, (dict, set)) and not value:
                    continue
                self.keep.append(value)
                value = id(value)
            plain.append((name, value))
        tensors = [(n, None if t is None else (t.shape, t.dtype, t.device))
                   for n, t in module._parameters.items()]
        return (type(module), *plain, *tensors,
                *((n, self._likeness(m)) for n, m in module._modules.items() if m is not None))

    # one kind each

    def norm(self, module: nn.Module) -> Verdict:
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
            return f"it normalizes over {len(module.normalized_shape)} dimensions, lz over the last"
        params = {n: p for n, p in module._parameters.items() if p is not None}
        numbers = [n for n, v in vars(module).items() if type(v) is float and 0 < v < 0.1]
        name = type(module).__name__
        if not numbers:
            return "no attribute of it is its epsilon" if "norm" in name.lower() else None
        width = (len(next(iter(params.values()))) if params
                 else vars(module).get("normalized_shape", (16,))[0])
        tried = [Recipe("rms_norm", "rms_norm", tuple(params), eps=eps, offset=offset)
                 for eps in numbers for offset in (0.0, 1.0) if len(params) < 2
                 and (params or not offset)]
        tried += [Recipe("layer_norm", "layer_norm", names, eps=eps)
                  for eps in numbers for names in permutations(params)]

        with trying(module) as trial:
            x = random(trial.like, 2, 3, width)
            small = x * 1e-3                   # so small that the epsilon counts
            for recipe in tried:
                if trial.agrees(recipe, x) and trial.agrees(recipe, small):
                    return recipe
        return (f"a {name} computes neither an RMS norm nor a layer norm" if "norm" in name.lower()
                else None)

    def linear(self, module: nn.Module) -> Verdict:
        weight = next(p for p in module._parameters.values() if p is not None and p.dim() == 2)
        if (set(module._parameters) - {"weight", "bias"}
            or weight is not module._parameters.get("weight")):
            return f"the weights of a {type(module).__name__} are not called weight and bias"
        names = tuple(module._parameters)
        recipes = [Recipe("linear", "linear", names, transposed=(transposed,))
                   for transposed in (False, True)]
        if stock_of(module).forward is nn.Linear.forward:  # type: ignore[attr-defined]
            return recipes[0]
        with trying(module) as trial:
            for recipe, inputs in zip(recipes, reversed(weight.shape)):
                if trial.agrees(recipe, random(trial.like, 2, 3, inputs)):
                    return recipe
        return f"a {type(module).__name__} computes more or other than x W^T + b"

    def mlp(self, module: nn.Module) -> Verdict:
        layers = {n: m for n, m in module._modules.items() if m is not None
                  and list(m.parameters())}
        verdicts = {n: self(m) for n, m in layers.items()}
        layouts = {v.transposed[0] for v in verdicts.values() if isinstance(v, Recipe)
                  and v.kind == "linear"}
        if (any(not isinstance(v, Recipe) or v.kind != "linear" for v in verdicts.values())
            or len(layouts) != 1):
            return None
        done = [n for n, m in layers.items() if recipe_of(m) is not None]
        if done:
            return f"{done[0]} is patched already; unpatch first to have them as one"
        hooked = [n for n, m in layers.items() if not is_bare(m, type(m))]
        if hooked:
            return f"{hooked[0]} has hooks, which would not be called"
        transposed = layouts.pop()
        shape = {n: tuple(reversed(m.weight.shape)) if transposed else tuple(m.weight.shape)  # type: ignore[arg-type]
                 for n, m in layers.items()}
        with trying(module) as trial:
            for names in permutations(layers):
                (wide, hidden), (_, inner) = shape[names[0]], shape[names[-1]]
                if len(names) == 3:
                    forms = GATED if shape[names[1]] == (inner, hidden) and wide == inner else ()
                else:
                    forms = PLAIN if wide == inner else GATED if wide == 2 * inner else ()
                x = trial.spread(f"{names[0]}.weight", hidden, transposed) if forms else trial.like
                for form in forms:
                    recipe = Recipe("mlp", "mlp", names, tuple(type(layers[n]) for n in names),
                                    form=form, transposed=(transposed,) * len(names),
                                    dropout=_may_drop(module))
                    if trial.agrees(recipe, x):
                        return recipe
        name = type(module).__name__
        act = next((type(m).__name__ for n, m in module._modules.items() if n not in layers
                    and not isinstance(m, (nn.Dropout, nn.Identity))), "")
        return None if "attention" in name.lower() else (
            f"a {name}{f' with {act}' if act else ''} computes no MLP that lz has")

    def moe(self, module: nn.Module) -> Verdict:
        names = tuple(module._parameters)
        first, second = (module._parameters[n] for n in names)
        assert first is not None and second is not None
        experts, wide, hidden = first.shape
        if tuple(second.shape) != (experts, hidden, wide // 2) or wide % 2:
            return ("its weights are not laid out as (experts, 2 * inner, hidden) and (experts, "
                    "hidden, inner)")

        # torch's grouped product knows no float64
        with trying(module, torch.float32) as trial:
            slots = min(2, experts)
            ids = random(trial.like, 5, experts).topk(slots).indices
            x, weights = trial.spread(names[0], hidden, False)[0], random(trial.like, 3, slots,
                                                                          seed=2).abs()
            for form in GATED:
                recipe = Recipe("moe", "moe", names, form=form, dropout=_may_drop(module))
                if trial.agrees(recipe, x, ids[:3], weights):
                    return recipe
        return f"a {type(module).__name__} computes no mixture of experts that lz has"

    def attention(self, module: nn.Module) -> Verdict:
        return replaced_sdpa() or Recipe("attention", "attention")

    def rope(self, module: nn.Module) -> Verdict:
        forward = stock_of(module).forward  # type: ignore[attr-defined]
        names = rotary_names(forward)
        for form in ROTATIONS:
            if all(rotates(forward.__globals__[n], form) for n in names):
                return Recipe("rope", "rope", names, form=form)
        return f"{' and '.join(names)} turns heads in another way than lz.rope"

    def linear_attention(self, module: nn.Module) -> Verdict:
        forward: Any = stock_of(module).forward  # type: ignore[attr-defined]
        scope = inspect.unwrap(forward).__globals__
        called = called_functions(forward)
        names = tuple(name for name in called if agrees(name, scope[name]))
        if not names:
            return f"its {' and '.join(called)} computes something else than lz, or not on the CPU"
        ops = dict.fromkeys(FUNCTIONS[name][0] for name in names)
        return Recipe("linear_attention", ", ".join(ops), names)


# what stays the module's own forward, but for functions that it calls
_REWIRED = (Recogniser.rope, Recogniser.attention, Recogniser.linear_attention)
Look = Callable[[Recogniser, nn.Module], Verdict]


def _kind_of_candidate(module: nn.Module) -> Look | None:
    """Returns what the module may be, by its parts alone."""
    sizes = [tuple(p.shape) for p in module._parameters.values() if p is not None]
    dims = [len(s) for s in sizes]
    if isinstance(module, (nn.Embedding, nn.modules.batchnorm._NormBase, nn.GroupNorm,
                           nn.modules.conv._ConvNd)):
        return None
    if isinstance(module, nn.LayerNorm):
        return Recogniser.norm
    if not module._modules and not module._buffers:
        if dims == [2] or (dims == [2, 1] and sizes[1][0] in sizes[0]):
            return Recogniser.linear
        if dims in ([1], [1, 1]) and len(set(sizes)) == 1:
            return Recogniser.norm
        if not dims and any("eps" in name and type(v) is float for name, v in vars(module).items()):
            return Recogniser.norm
    if (dims == [3, 3] and not module._buffers
        and not any(list(m.parameters()) for m in module.children())):
        return Recogniser.moe
    forward = getattr(stock_of(module), "forward", None)
    if called_functions(forward):
        return Recogniser.linear_attention
    if isinstance(forward, FunctionType) and (sdpa_aliases(forward) or (
            replaced_sdpa() and mentions(forward.__code__, SDPA))):
        return Recogniser.attention
    if isinstance(forward, FunctionType) and rotary_names(forward):
        return Recogniser.rope
    if not dims and not module._buffers:
        layers = [m for m in module.children() if list(m.parameters())]
        if (len(layers) in (2, 3) and all(_kind_of_candidate(m) is Recogniser.linear
                                          for m in layers)):
            return Recogniser.mlp
    return None


def rotary_names(forward: FunctionType) -> tuple[str, ...]:
    """Returns the functions among a forward's globals that rotate by cos and sin."""
    names = []
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if (callable(function) and not inspect.isclass(function)
            and ("rot" in name or "rope" in name)):
            try:
                params = list(inspect.signature(getattr(function, "forward", function)).parameters)
            except (TypeError, ValueError):
                continue
            if params[:4] == ["q", "k", "cos", "sin"]:
                names.append(name)
    return tuple(names)


def _why_no_forward(module: nn.Module) -> str:
    """Returns why this module cannot get another forward, whatever it computes; "" if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    if "forward" in vars(module):
        return ("it has a forward of its own, set by accelerate or another library; patch before "
                "that")
    if not isinstance(stock_of(module).forward, FunctionType):  # type: ignore[attr-defined]
        return "its forward is no Python function"
    return ""


def _unfit(module: nn.Module) -> str:
    """Returns why its computation cannot be replaced as a whole; "" if it can."""
    for t in (p for m in (module, *module.children()) for p in m._parameters.values()
              if p is not None):
        if type(t) not in (nn.Parameter, Tensor):
            return f"a weight is a {type(t).__name__}, not a plain tensor"
        if t.device.type == "meta":
            return "its weights are on the meta device; patch once they are loaded"
        if not t.is_floating_point() or t.element_size() < 2:
            return f"a weight is {str(t.dtype).removeprefix('torch.')}"
    writes = _writes(module)
    return f"its forward also writes {writes}" if writes else ""


def _code(module: nn.Module) -> CodeType:
    """Returns the code of its forward, below its decorators."""
    forward: Any = stock_of(module).forward  # type: ignore[attr-defined]
    below = inspect.unwrap(forward)
    return below.__code__ if isinstance(below, FunctionType) else forward.__code__


def _writes(module: nn.Module) -> str:
    """Returns the attribute or global that a forward stores to, as no replacement would."""
    stores = (i.argval for i in dis.get_instructions(_code(module))
              if i.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR"))
    return str(next(stores, ""))


def _may_drop(module: nn.Module) -> bool:
    """Returns whether the result may be random in training."""
    return (any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.children())
            or bool({"dropout", "training"} & set(_code(module).co_names)))


# Trying it out.

def random(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Returns the same numbers each time, on any device, and leaves torch's generators alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(device=like.device, dtype=like.dtype)


class ModuleTrial:
    """A module on random inputs, and recipes beside it, as exactly as memory allows."""

    def __init__(self, module: nn.Module, widest: torch.dtype) -> None:
        own = next(module.parameters(), NOWHERE)
        size = sum(p.numel() for p in module.parameters())
        if size > MANY or own.device.type == "mps":
            widest = torch.float32 if size <= TOO_MANY else own.dtype
        self.module, self.like = module, torch.empty(0, dtype=widest, device=own.device)
        self.close = max(CLOSE, 4 * torch.finfo(widest).eps)
        self.weights = {f"module.{name}": w for name, w in _weights(module, self.like)}
        # the stock result of inputs
        self.known: dict[tuple[int, ...], tuple[tuple[Tensor, ...], Any]] = {}

    def agrees(self, recipe: Recipe, *inputs: Tensor) -> bool:
        inputs = tuple(g.requires_grad_() if g.is_floating_point() else g for g in inputs)
        key = tuple(map(id, inputs))
        if key not in self.known:
            self.known[key] = inputs, self._result(stock_of(self.module).forward, inputs)  # type: ignore[attr-defined]
        stock = self.known[key][1]
        return (stock is not None
                and same(stock, self._result(forward_for(_unserved, recipe), inputs), self.close))

    def _result(self, run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        try:
            return functional_call(_WithoutHooks(self.module, run), self.weights, inputs)
        except torch.OutOfMemoryError:
            raise
        # whatever unknown code says to an input that it does not expect: then it is something else
        except Exception:
            return None

    def spread(self, weight: str, width: int, transposed: bool) -> Tensor:
        """Returns an input whose product with this weight is wide enough to tell activations."""
        matrix = self.weights[f"module.{weight}"].detach()
        matrix = matrix[0] if matrix.dim() == 3 else matrix
        x = random(self.like, 2, 3, width)
        size = float((x @ (matrix if transposed else matrix.t())).float().std())
        return x * (2.0 / size if size > 0 else 1.0)


@contextmanager
def trying(module: nn.Module, widest: torch.dtype = torch.float64) -> Iterator[ModuleTrial]:
    """Runs the block in eval mode, without autocast, with gradients; then restores all."""
    modes = [(m, m.training) for m in module.modules()]
    device = next(module.parameters(), NOWHERE).device
    try:
        for m, _ in modes:
            m.training = False
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type,
                                                                              enabled=False):
            yield ModuleTrial(module, widest)
    finally:
        for m, mode in modes:
            m.training = mode


def _unserved(*args: Any) -> Any:
    raise NotImplementedError("the stock forward would have to serve this")


class _WithoutHooks(nn.Module):
    """Calls a forward alone: hooks are not for trials."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self, *args: Any) -> Any:
        return self.run(self.module, *args)


def _weights(module: nn.Module, like: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the module's matrices, and random vectors: a fresh model's tell nothing."""
    for seed, (name, p) in enumerate(module.named_parameters(), 1):
        low, high = ((float(v) for v in p.detach().aminmax()) if p.dim() > 1 and p.numel()
                     else (0.0, 0.0))
        if low < high and math.isfinite(low) and math.isfinite(high):
            flat = p.detach().to(like.dtype)
            flat = flat.clone() if flat.is_inference() else flat
        else:
            flat = random(like, *p.shape, seed=seed) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 2.0)
        yield name, flat.detach().requires_grad_()


def rotates(function: Callable[..., Any], form: str) -> bool:
    """Does it rotate queries and keys by cos and sin in this one of ROTATIONS?"""
    like = NOWHERE
    q, k, table = random(like, 1, 3, 4, 16), random(like, 1, 1, 4, 16,
                                                    seed=1), random(like, 2, 1, 4, 8, seed=2)
    table = (table.repeat_interleave(2, -1) if form == "interleaved"
             else torch.cat((table, table), -1))
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            return same(function(q, k, *table), rotary(_unserved, form)(q, k, *table), CLOSE)
    except Exception:  # as above
        return False


def same(want: Any, out: Any, close: float) -> bool:
    """Tensors, or tuples of them, equal up to rounding, both with a gradient or neither."""
    if isinstance(want, (tuple, list)) or isinstance(out, (tuple, list)):
        return type(want) is type(out) and len(want) == len(out) and all(
            same(a, b, close) for a, b in zip(want, out))
    if not isinstance(want, Tensor) or not isinstance(out, Tensor) or want.shape != out.shape:
        return False
    if want.requires_grad != out.requires_grad or not bool(want.isfinite().all()):
        return False
    want, out = want.detach(), out.detach()
    size = float(want.abs().max())
    return size > 0 and float((want - out).abs().max()) <= close * size
