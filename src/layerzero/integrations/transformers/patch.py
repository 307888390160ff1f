"""lz.patch(model): the model's own code, with lz computing what it recognises; lz.unpatch(model) undoes it.

    report = lz.patch(model)
    print(report)                              # what is served, what was left, and why
    print(report.explain(**inputs))            # by which kernels

Only this model changes: the classes of its modules (see replacements) and, for attention, the configuration its
modules read, of which it gets a copy of its own. Any nn.Module can be patched; transformers need not be installed.
"""

from __future__ import annotations

import copy
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ...models.packing import forget_packed
from ...operate.inspection import stats, which
from ...select.policy import suggest
from ...spec.errors import ConfigError, NoKernelFoundError
from . import NAME, register
from .recognise import NOWHERE, Recogniser
from .replacements import KINDS, OWNED, SAMPLING, Recipe, is_uncapped, patched_class, recipe_of, restore, stock_of
from .report import PatchReport, Row

_UNCAPPED = ("without the softcap that the model asks for: transformers' sdpa leaves it out, so results stay the same; "
             "attn_implementation='layerzero' has it")
_STOCK_DRAW = ("lz.sample has the same probabilities, and would give other tokens for the same seed; "
               "lz.patch(model, only='sampling') has it all the same")


@dataclass
class _Owned:
    """The configuration that a module had, and the copy that it has got."""

    stock: Any
    ours: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()                             # a copy from a file names an attention that this process may not know
        vars(self).update(state)


def patch(model: nn.Module, *, only: Iterable[str] | None = None, skip: Iterable[str] = ()) -> PatchReport:
    """Let lz compute every module of `model` that it recognises, and say what was left and why.

    only, skip: kinds of modules, of attention, rms_norm, layer_norm, linear, lm_head, mlp, moe, rope.
    What is recognised and would gain nothing here is left, unless `only` names it. Sampling in generate() is left too,
    because a seed would give other tokens than before: only="sampling" has lz.sample draw them.
    """
    return _patch(model, _kinds(only, skip), only is not None)[0]


def unpatch(model: nn.Module) -> int:
    """Make the model what it was before lz.patch; returns how many modules were changed back."""
    _check(model)
    return _unpatch(model.modules())


@contextmanager
def patched(model: nn.Module, *, only: Iterable[str] | None = None, skip: Iterable[str] = ()) -> Iterator[PatchReport]:
    """lz.patch for a block; what was patched before it stays so after it."""
    report, changed = _patch(model, _kinds(only, skip), only is not None)
    try:
        yield report
    finally:
        _unpatch(changed)


def _patch(model: nn.Module, kinds: frozenset[str], named: bool) -> tuple[PatchReport, list[nn.Module]]:
    _check(model)
    rows: Counter[Row] = Counter()
    changed = _patch_modules(model, kinds, named, rows)
    if "attention" in kinds:
        changed += _patch_attention(model, rows)
    changed += _patch_sampling(model, SAMPLING in kinds, rows)
    notes = [] if changed or not any(row.op for row in rows) else ["nothing was changed: it is patched already"]
    if any(row.kind == "rms_norm" for row in rows):
        notes.append("a residual sum and the norm after it stay two steps: the sum is in the code of the layer")
    table = tuple(replace(row, count=n) for row, n in rows.items())
    table = tuple(sorted(table, key=lambda row: not row.patched))
    return PatchReport(type(model).__name__, table, len({id(m) for m in changed}), tuple(notes), weakref.ref(model),
                       stats().calls), changed


def _patch_modules(model: nn.Module, kinds: frozenset[str], named: bool, rows: Counter[Row]) -> list[nn.Module]:
    recognise, changed = Recogniser(), []
    heads = {id(m.get_output_embeddings()) for m in _transformers_models(model)}
    inside: set[int] = set()                   # what belongs to a module that was looked at as a whole
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        recipe, where = recipe_of(module), re.sub(r"\b\d+\b", "*", path) or "(model)"
        if recipe is not None and recipe.kind == SAMPLING:
            continue
        if recipe is not None:
            rows[Row(where, recipe.kind, recipe.op, 0, "patched before")] += 1
        else:
            verdict = recognise(module)
            if isinstance(verdict, str):
                rows[Row(where, stock_of(module).__name__, "", 0, verdict)] += 1
            elif verdict is None:
                if any(p is not None for p in module._parameters.values()):
                    rows[Row(where, stock_of(module).__name__, "", 0, "nothing that lz computes here")] += 1
            else:
                recipe = replace(verdict, kind="lm_head") if id(module) in heads else verdict
                if recipe.kind not in kinds:
                    continue
                if recipe.kind == "rope" and not named and (vain := _vain_rope(module)):
                    rows[Row(where, recipe.kind, "", 0, vain)] += 1
                    continue
                module.__class__ = patched_class(type(module), recipe)
                changed.append(module)
                rows[Row(where, recipe.kind, recipe.op, 0)] += 1
        if recipe is not None and recipe.kind == "mlp":
            inside |= {id(m) for m in module.modules()}
        if "parametrizations" in module._modules:
            inside |= {id(m) for m in module.parametrizations.modules()}  # type: ignore[union-attr]
    return changed


def _vain_rope(module: nn.Module) -> str:
    """Models compute rope by a few torch operations; a kernel made of torch operations gains nothing over that."""
    own = next((p for p in module.parameters() if p.is_floating_point() and p.element_size() > 1), NOWHERE)
    if own.device.type == "meta":
        return "its weights are on the meta device; patch once they are loaded"
    q = torch.empty(1, 1, 1, 64, dtype=own.dtype, device=own.device)
    table = q[0, ..., :32]
    try:
        with torch.no_grad():
            kernel = which("rope", q, q, table, table, style="rotate_half")
    except NoKernelFoundError as e:
        return f"no kernel may serve it: {e.reasons[0].message if e.reasons else e}"
    is_formula = kernel.startswith(("torch.", "reference."))
    return f"only {kernel} would serve it here, which gains nothing" if is_formula else ""


def _patch_sampling(model: nn.Module, wanted: bool, rows: Counter[Row]) -> list[nn.Module]:
    changed = []
    for whole in _transformers_models(model):
        if not whole.can_generate():
            continue
        why = "patched before" if recipe_of(whole) is not None else "" if wanted else _STOCK_DRAW
        if not why:
            whole.__class__ = patched_class(type(whole), Recipe(SAMPLING, "sample"))
            changed.append(whole)
        rows[Row("generate()", SAMPLING, "" if why is _STOCK_DRAW else "sample", 0, why)] += 1
    return changed


# Attention: by the interface of transformers, for this model alone.

def _patch_attention(model: nn.Module, rows: Counter[Row]) -> list[nn.Module]:
    paths = {path: m for path, m in model.named_modules() if _asks_the_interface(m)}
    if not paths:
        return []
    register()
    changed = []
    able = [m for m in _transformers_models(model) if m._can_set_attn_implementation()]
    if able and any(m.config._attn_implementation != NAME for m in paths.values()):
        memo: dict[int, Any] = {}              # one copy of each configuration, for all that share it
        for module in model.modules():
            if _is_configuration(vars(module).get("config")) and OWNED not in vars(module):
                stock: Any = module.config
                ours = copy.deepcopy(stock, memo)
                vars(module).update({"config": ours, OWNED: _Owned(stock, ours)})
                changed.append(module)
        for whole in able:
            whole.set_attn_implementation(NAME)
    for path, module in paths.items():
        where = re.sub(r"\b\d+\b", "*", path) or "(model)"
        if module.config._attn_implementation == NAME:
            why = _UNCAPPED if is_uncapped(module) else "" if changed else "patched before"
            rows[Row(where, "attention", "attention", 0, why)] += 1
        else:
            rows[Row(where, stock_of(module).__name__, "", 0, "its masks are made outside: patch the whole model")] += 1
    return changed


def _asks_the_interface(module: nn.Module) -> bool:
    forward = getattr(stock_of(module), "forward", None)
    return (isinstance(forward, FunctionType) and "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names
            and _is_configuration(getattr(module, "config", None)))


def _is_configuration(found: Any) -> bool:
    return "transformers" in sys.modules and isinstance(found, sys.modules["transformers"].PreTrainedConfig)


def _transformers_models(model: nn.Module) -> Iterator[Any]:
    """The outermost models of transformers in it."""
    if "transformers" not in sys.modules:
        return
    kind = sys.modules["transformers"].PreTrainedModel
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, kind) and id(module) not in inner:
            inner |= {id(m) for m in module.modules()}
            yield module


def _unpatch(modules: Iterable[nn.Module]) -> int:
    changed, weights, hidden = set(), [], []
    for module in modules:
        recipe = recipe_of(module)
        if recipe is not None:
            restore(module)
            changed.add(id(module))
            weights += list(module.parameters()) if recipe.kind != SAMPLING else []
        elif hasattr(type(module), "_layerzero_recipe"):
            hidden.append(type(module).__name__)
        owned = vars(module).pop(OWNED, None)
        if owned is not None:
            changed.add(id(module))
            if vars(module).get("config") is owned.ours:
                _carry_over(owned)
                vars(module)["config"] = owned.stock
    if weights:
        forget_packed(*weights)                # copies that kernels keep, now that none will ask for them
    if hidden:
        raise ConfigError(f"unpatch: {len(hidden)} modules got another class after lz.patch, such as {hidden[0]} "
                          "(parametrized or sharded?), and stay as they are; undo that first, then unpatch again")
    return len(changed)


def _carry_over(owned: _Owned) -> None:
    """What was set in the configuration while the model was patched stays set."""
    for name, value in vars(owned.ours).items():
        if not name.endswith("_implementation_internal") and not _is_configuration(value):
            if name not in vars(owned.stock) or vars(owned.stock)[name] != value:
                setattr(owned.stock, name, value)


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        inner = " (its .model is one)" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise ConfigError(f"lz.patch wants a torch.nn.Module, got {type(model).__name__}{inner}")


def _kinds(only: Iterable[str] | None, skip: Iterable[str]) -> frozenset[str]:
    chosen = KINDS if only is None else (only,) if isinstance(only, str) else tuple(only)
    skipped = (skip,) if isinstance(skip, str) else tuple(skip)
    for name in (*chosen, *skipped):
        if name not in (known := (*KINDS, SAMPLING)):
            raise ConfigError(f"lz.patch: there is no kind {name!r}{suggest(name, known)}; known: {', '.join(known)}")
    return frozenset(chosen) - frozenset(skipped)
