"""lz.auto(): every model of transformers and diffusers is patched as it is loaded.

    lz.auto()                                  # or LAYERZERO_AUTO=1, which `import layerzero` reads
    model = AutoModelForCausalLM.from_pretrained(name)
    print(lz.auto())                           # the models, and what was done to each
    lz.auto(False)                             # those loaded from now on stay as they are

What loads a model (`from_pretrained`, `from_config`, `from_single_file`) is wrapped in the class
that all models of a library derive from. Neither library is imported for it: a finder at the head
of `sys.meta_path` waits for the modules of these classes. A model that is loaded as a part of
another, or of a pipeline, is patched with the whole.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from ..machine import faults
from ..spec.errors import ConfigError
from ..spec.event import Fallback
from ..world import events
from .patching import patch, unpatch

VARIABLE = "LAYERZERO_AUTO"
# Module -> the class in it whose class methods load models, and these methods.
LOADERS = {
    "transformers.modeling_utils": ("PreTrainedModel", ("from_pretrained", "_from_config")),
    "diffusers.configuration_utils": ("ConfigMixin", ("from_config",)),
    "diffusers.models.modeling_utils": ("ModelMixin", ("from_pretrained",)),
    "diffusers.loaders.single_file_model": ("FromOriginalModelMixin", ("from_single_file",)),
    "diffusers.loaders.single_file": ("FromSingleFileMixin", ("from_single_file",)),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline", ("from_pretrained", "from_pipe")),
}
_CONFIGURED = "_attn_implementation_internal"  # in a configuration: None until a model is made
STAYS_EAGER = "attn_implementation='eager' was named where it was loaded, and stays"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that was loaded while lz.auto was on: the report of its patch, or why it has none."""

    name: str                                  # its class
    report: Any = None                         # as lz.patch returns it
    note: str = ""                             # what lz.patch was told to leave, or the error of it
    _model: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)

    @property
    def model(self) -> Any:
        """The model, or None once nobody else holds it."""
        return self._model()

    def __str__(self) -> str:
        done = f"{self.name}: left as it was" if self.report is None else str(self.report)
        return "\n".join(filter(None, (done, self.note)))


_lock = threading.RLock()
_wrapped: list[tuple[type, str, Any, Any]] = []        # class, method, what it was, what it is
_listed: list[LoadedModel] = []
_loading = threading.local()                           # .depth: how many loads are under way


class Auto:
    """Patches models as they are loaded, and reports them; as a context manager it ends that."""

    def __init__(self, before: bool) -> None:
        self._before = before

    @property
    def on(self) -> bool:
        return _finder in sys.meta_path

    @property
    def models(self) -> tuple[LoadedModel, ...]:
        """The models that still exist, in the order in which they were loaded."""
        return tuple(loaded for loaded in _listed if loaded.model is not None)

    def unpatch(self) -> int:
        """Make every listed model what it was and forget it; returns how many were patched."""
        count = 0
        for loaded in self.models:
            if loaded.report is not None and (model := loaded.model) is not None:
                unpatch(model)
                count += 1
            with _lock:
                _listed.remove(loaded)
        return count

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *exception: object) -> None:
        _switch(self._before)

    def __str__(self) -> str:
        models = self.models
        count = f"{len(models)} model{'' if len(models) == 1 else 's'} loaded so far"
        return "\n".join([f"lz.auto is {'on' if self.on else 'off'}, {count}", *map(str, models)])

    __repr__ = __str__


def auto(on: bool = True) -> Auto:
    """Patch every model of transformers and diffusers as it is loaded; `on=False` ends that.

    Models that are patched stay so and stay listed: `.models` has their reports, `.unpatch()` makes
    them what they were. An attention other than "sdpa" that is named where a model is loaded stays.
    As a context manager it ends with the block.
    """
    before = _finder in sys.meta_path
    _switch(bool(on))
    return Auto(before)


def from_environment() -> None:
    """Turn it on where LAYERZERO_AUTO says so."""
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        auto()
    elif text not in ("", "0", "false", "no", "off"):
        raise ConfigError(f"{VARIABLE}={text}: wanted 1 or 0; correct or unset it")


def _switch(on: bool) -> None:
    with _lock:
        if on and _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
            for name in LOADERS:
                if name in sys.modules:
                    _wrap_loaders(sys.modules[name])
        elif not on and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
            for owner, name, stock, wrapper in _wrapped:
                if vars(owner).get(name) is wrapper:      # else someone wrapped it, in vain
                    setattr(owner, name, stock)
            _wrapped.clear()


# Waiting for the libraries.

class _Finder(MetaPathFinder):
    """Finds the modules of LOADERS by the other finders, and wraps their classes."""

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in LOADERS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((s for s in specs if s is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapping(spec.loader)
        return spec


class _Wrapping(Loader):
    """Another loader, which the module has as its own again once it is executed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        with _lock:
            if _finder in sys.meta_path:
                _wrap_loaders(module)


_finder = _Finder()


# Patching what is loaded.

def _wrap_loaders(module: ModuleType) -> None:
    name, methods = LOADERS[module.__name__]
    owner = getattr(module, name, None)
    for method in methods:
        stock = vars(owner).get(method) if isinstance(owner, type) else None
        if isinstance(owner, type) and isinstance(stock, classmethod):     # as the releases have it
            wrapper = classmethod(_patching(stock.__func__))
            _wrapped.append((owner, method, stock, wrapper))
            setattr(owner, method, wrapper)


def _patching(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loading(cls: Any, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(_loading, "depth", 0)
        if depth or _finder not in sys.meta_path or _is_building():
            return load(cls, *args, **kwargs)
        attention = _named_attention(args, kwargs)     # before the library fills it in
        _loading.depth = depth + 1
        try:
            loaded = load(cls, *args, **kwargs)
        finally:
            _loading.depth = depth
        _patch(loaded[0] if isinstance(loaded, tuple) else loaded, attention)
        return loaded

    return loading


def _named_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the attention that the caller names, in an argument or in the configuration."""
    configs = (value for value in (*args, kwargs.get("config")) if hasattr(value, _CONFIGURED))
    return kwargs.get("attn_implementation") or getattr(next(configs, None), _CONFIGURED, None)


def _is_building() -> bool:
    """Tells whether a model of these libraries is being made, which this one becomes a part of."""
    owners = tuple(owner for owner, *_ in _wrapped)
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), owners):
            return True
        frame = frame.f_back
    return False


def _patch(model: Any, attention: Any) -> None:
    """Patches a model, or leaves it as it is: loading one must not fail because of it."""
    if not isinstance(model, nn.Module) and not hasattr(model, "components"):
        return                                 # a scheduler
    named = attention.values() if isinstance(attention, dict) else (attention,)
    eager = "eager" in named                   # lz.patch itself leaves others that are chosen
    name, reference = type(model).__name__, weakref.ref(model)
    try:
        report = patch(model, **({"skip": ("attention",)} if eager else {}))
        loaded = LoadedModel(name, report, STAYS_EAGER if eager else "", reference)
    except faults.FAULTS as error:
        kind = faults.classify(error)
        if kind == "sticky":
            raise
        events.emit(Fallback("auto", "layerzero", name, faults.reason_of(error, kind)))
        loaded = LoadedModel(name, None, f"{type(error).__name__}: {error}", reference)
    with _lock:
        _listed[:] = [*(old for old in _listed if old.model not in (None, model)), loaded]
