"""lz.patch(model): the model's own code, with lz computing what it recognises; lz.unpatch(model)
undoes it.

    report = lz.patch(model)
    print(report)                              # what is served, what was left, and why
    print(report.explain(**inputs))            # by which kernels

Only this model changes: the classes of its modules (see replacements) and, for attention, the
configuration its modules read, of which it gets a copy of its own. An attention that the user chose
or registered stays (see implementations). Any nn.Module can be patched; transformers need not be
installed. An error leaves the model as it was.
"""

from __future__ import annotations

import copy
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...models.weights.packing import forget_packed
from ...operate.inspection import stats, which
from ...spec.errors import ConfigError, NoKernelFoundError
from ...spec.names import suggest
from . import NAME, register
from .implementations import Implementations, eager_name, interface_forward, is_configuration
from .owned_config import OWNED, is_uncapped
from .quantized import CODES
from .recognise import NOWHERE, Recogniser
from .replacements import KINDS, SAMPLING, Recipe, patched_class, recipe_of, restore, stock_of
from .report import ModuleRow, PatchReport

_UNCAPPED = (
    "without the softcap that the model asks for: transformers' sdpa leaves it out, so results "
    "stay the same; attn_implementation='layerzero' has it")
_STOCK_DRAW = (
    "lz.sample has the same probabilities, and would give other tokens for the same seed; "
    "lz.patch(model, only='sampling') has it all the same")


@dataclass
class _Owned:
    """The configuration that a module had, and the copy that it has got."""

    stock: Any
    copy: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy from a file names an attention that this process may not know
        register()
        vars(self).update(state)


@dataclass
class Changes:
    """Records what lz.patch did: the class that each module had, and new configurations."""

    classes: dict[nn.Module, type] = field(default_factory=dict)
    configs: list[nn.Module] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Changes:
        """Returns all that is patched in a model, by however many calls."""
        modules = list(model.modules())
        return cls({m: stock_of(m) for m in modules if hasattr(type(m), "_layerzero_recipe")},
                   [m for m in modules if OWNED in vars(m)])

    def __len__(self) -> int:
        return len({*self.classes, *self.configs})

    def follow(self, module: nn.Module, recipe: Recipe) -> None:
        self.classes.setdefault(module, type(module))
        module.__class__ = patched_class(stock_of(module), recipe)

    def own_config(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Gives a module its own copy of its configuration; `memo` has one for all sharers."""
        stock: Any = module.config
        owned = copy.deepcopy(stock, memo)
        vars(module).update({"config": owned, OWNED: _Owned(stock, owned)})
        self.configs.append(module)

    def undo(self) -> int:
        """Makes the modules what they were, unless already undone; returns how many changed."""
        undone, weights, hidden = set(), [], []
        for module, before in self.classes.items():
            recipe = recipe_of(module)
            if recipe is not None:
                restore(module, before)
                undone.add(module)
                weights += list(module.parameters()) if recipe.kind != SAMPLING else []
            elif hasattr(type(module), "_layerzero_recipe"):
                hidden.append(type(module).__name__)
        for module in self.configs:
            owned = vars(module).pop(OWNED, None)
            if owned is not None:
                undone.add(module)
                if vars(module).get("config") is owned.copy:
                    _carry_over(owned)
                    vars(module)["config"] = owned.stock
        if weights:
            # copies that kernels keep, now that none will ask for them
            forget_packed(*weights)
        if hidden:
            raise ConfigError(
                f"unpatch: {len(hidden)} modules got another class after lz.patch, such as "
                f"{hidden[0]} (parametrized or sharded?), and stay as they are; undo that first, "
                "then unpatch again")
        return len(undone)


def patch(model: nn.Module, *, only: Iterable[str] | None = None,
          skip: Iterable[str] = ()) -> PatchReport:
    """Let lz compute every module of `model` that it recognises, and say what was left and why.

    only, skip: kinds of modules, of attention, linear_attention, rms_norm, layer_norm, linear,
    lm_head, mlp, moe, rope. What is recognised and would gain nothing here is left, unless `only`
    names it. Sampling in generate() is left too, because a seed would give other tokens than
    before: only="sampling" has lz.sample draw them.
    """
    return apply(model, only=only, skip=skip)[0]


def unpatch(model: nn.Module) -> int:
    """Make the model what it was before lz.patch; returns how many modules were changed back."""
    _check(model)
    return Changes.of(model).undo()


@contextmanager
def patched(model: nn.Module, *, only: Iterable[str] | None = None,
            skip: Iterable[str] = ()) -> Iterator[PatchReport]:
    """lz.patch for a block; what was patched before it stays so after it."""
    report, changes = apply(model, only=only, skip=skip)
    try:
        yield report
    finally:
        changes.undo()


def apply(model: nn.Module, *, only: Iterable[str] | None = None,
          skip: Iterable[str] = ()) -> tuple[PatchReport, Changes]:
    """Patches all or nothing; returns the report and the changes, which can be undone."""
    kinds = _kinds(only, skip)
    _check(model)
    rows: Counter[ModuleRow] = Counter()
    changes = Changes()
    try:
        _patch_modules(model, kinds, only is not None, rows, changes)
        if "attention" in kinds:
            _patch_attention(model, rows, changes)
        _patch_sampling(model, SAMPLING in kinds, rows, changes)
    except BaseException:                      # an interrupt too: half a model is not left patched
        changes.undo()
        raise
    notes = ([] if changes or not any(row.op for row in rows)
             else ["nothing was changed: it is patched already"])
    if any(row.kind == "rms_norm" for row in rows):
        notes.append(
            "a residual sum and the norm after it stay two steps: the sum is in the code of the "
            "layer")
    table = tuple(replace(row, count=n) for row, n in rows.items())
    table = tuple(sorted(table, key=lambda row: not row.patched))
    return PatchReport(type(model).__name__, table, len(changes), tuple(notes), weakref.ref(model),
                       stats().calls), changes


def _patch_modules(
    model: nn.Module, kinds: frozenset[str], named: bool, rows: Counter[ModuleRow], changes: Changes
) -> None:
    recognise = Recogniser()
    heads = {id(m.get_output_embeddings()) for m in _transformers_models(model)}
    # what belongs to a module that was looked at as a whole
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        recipe, where, eager = recipe_of(module), _generic_path(path), ""
        if recipe is not None and recipe.only_eager:
            eager, recipe = recipe.eager, None
        if recipe is not None and recipe.kind == SAMPLING:
            continue
        if recipe is not None:
            rows[ModuleRow(where, recipe.kind, recipe.op, 0, "patched before")] += 1
        else:
            verdict = recognise(module)
            if isinstance(verdict, str):
                rows[ModuleRow(where, stock_of(module).__name__, "", 0, verdict)] += 1
            elif verdict is None:
                if any(p is not None for p in module._parameters.values()):
                    rows[ModuleRow(where, stock_of(module).__name__, "", 0,
                                   "nothing that lz computes here")] += 1
            elif any(CODES in vars(m) for m in module.modules()):
                rows[ModuleRow(where, verdict.kind, "", 0, "computed with codes for weights")] += 1
            else:
                recipe = replace(verdict, kind="lm_head") if id(module) in heads else verdict
                if recipe.kind not in kinds:
                    continue
                if recipe.kind == "rope" and not named and (vain := _why_rope_is_left(module)):
                    rows[ModuleRow(where, recipe.kind, "", 0, vain)] += 1
                    continue
                changes.follow(module, replace(recipe, eager=eager))
                rows[ModuleRow(where, recipe.kind, recipe.op, 0)] += 1
        if recipe is not None and recipe.kind == "mlp":
            inside |= {id(m) for m in module.modules()}
        if recipe is not None and "causal_conv1d" in recipe.op:      # it reads the child's weight
            inside |= {id(m) for m in module.children() if isinstance(m, nn.Conv1d)}
        if "parametrizations" in module._modules:
            inside |= {id(m) for m in module.parametrizations.modules()}  # type: ignore[union-attr]


def _why_rope_is_left(module: nn.Module) -> str:
    """Models compute rope by a few torch operations; a kernel made of torch's gains nothing."""
    own = next((p for p in module.parameters() if p.is_floating_point() and p.element_size() > 1),
               NOWHERE)
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


def _generic_path(path: str) -> str:
    """Returns the path of a module in a report: modules alike have the same."""
    return re.sub(r"\b\d+\b", "*", path) or "(model)"


def _patch_sampling(model: nn.Module, wanted: bool, rows: Counter[ModuleRow],
                    changes: Changes) -> None:
    for whole in _transformers_models(model):
        if not whole.can_generate():
            continue
        why = "patched before" if recipe_of(whole) is not None else "" if wanted else _STOCK_DRAW
        if not why:
            changes.follow(whole, Recipe(SAMPLING, "sample"))
        rows[ModuleRow("generate()", SAMPLING, "" if why is _STOCK_DRAW else "sample", 0, why)] += 1


# Attention: sdpa by transformers' interface, for this model alone; eager where it is called.

def _patch_attention(model: nn.Module, rows: Counter[ModuleRow], changes: Changes) -> None:
    paths = {path: m for path, m in model.named_modules() if interface_forward(m)}
    if not paths:
        return
    register()
    judge = Implementations()
    refused = {m: judge.refused(m) for m in paths.values()}
    before = {m for m in refused if _serves(m)}
    for module, why in refused.items():
        if not why and module.config._attn_implementation == "eager" and module not in before:  # type: ignore[union-attr]
            forward = interface_forward(module)
            assert forward is not None
            changes.follow(module, replace(recipe_of(module) or Recipe("attention", "attention"),
                                           eager=eager_name(forward)))
    _switch_configs(model, refused, changes)
    for path, module in paths.items():
        if _serves(module):
            why = _UNCAPPED if is_uncapped(module) else "patched before" if module in before else ""
            rows[ModuleRow(_generic_path(path), "attention", "attention", 0, why)] += 1
        else:
            why = refused[module] or "its masks are made outside: patch the whole model"
            rows[ModuleRow(_generic_path(path), stock_of(module).__name__, "", 0, why)] += 1


def _serves(module: nn.Module) -> bool:
    """Tells whether lz computes the attention of a module that asks the interface."""
    name, recipe = module.config._attn_implementation, recipe_of(module)  # type: ignore[union-attr]
    return name == NAME or bool(name == "eager" and recipe is not None and recipe.eager)


def _switch_configs(model: nn.Module, refused: dict[nn.Module, str], changes: Changes) -> None:
    """Names lz in every configuration that says sdpa, if all attention that sees it is known."""
    holders: dict[int, list[nn.Module]] = {}
    for whole in _transformers_models(model):
        if whole._can_set_attn_implementation():
            for module in whole.modules():
                if is_configuration(vars(module).get("config")):
                    holders.setdefault(id(module.config), []).append(module)
    switched = []
    for modules in holders.values():
        served = [m for holder in modules for m in holder.modules() if m in refused]
        if any(m.config._attn_implementation == "sdpa" for m in served) and not any(  # type: ignore[union-attr]
                refused[m] for m in served):
            switched.append(modules[0])
    if not switched:
        return
    memo: dict[int, Any] = {}
    for module in model.modules():
        if is_configuration(vars(module).get("config")) and OWNED not in vars(module):
            changes.own_config(module, memo)
    for module in switched:
        _switch(module.config)


def _switch(config: Any) -> None:
    if config._attn_implementation == "sdpa":
        # the property would set all that are below it, too
        config._attn_implementation_internal = NAME
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            _switch(getattr(config, name))


def _transformers_models(model: nn.Module) -> Iterator[Any]:
    """Yields the outermost models of transformers in it."""
    if "transformers" not in sys.modules:
        return
    kind = sys.modules["transformers"].PreTrainedModel
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, kind) and id(module) not in inner:
            inner |= {id(m) for m in module.modules()}
            yield module


def _carry_over(owned: _Owned) -> None:
    """Keeps what was set in the configuration while the model was patched."""
    for name, value in vars(owned.copy).items():
        set_by_patch = name == "_attn_implementation_internal" and value == NAME
        if not set_by_patch and not is_configuration(value):
            if name not in vars(owned.stock) or vars(owned.stock)[name] != value:
                setattr(owned.stock, name, value)


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        inner = (" (its .model is one)" if isinstance(getattr(model, "model", None), nn.Module)
                 else "")
        raise ConfigError(f"lz.patch wants a torch.nn.Module, got {type(model).__name__}{inner}")


def _kinds(only: Iterable[str] | None, skip: Iterable[str]) -> frozenset[str]:
    chosen = KINDS if only is None else (only,) if isinstance(only, str) else tuple(only)
    skipped = (skip,) if isinstance(skip, str) else tuple(skip)
    for name in (*chosen, *skipped):
        if name not in (known := (*KINDS, SAMPLING)):
            raise ConfigError(
                f"lz.patch: there is no kind {name!r}{suggest(name, known)}")
    return frozenset(chosen) - frozenset(skipped)
