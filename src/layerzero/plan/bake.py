"""Kernels bound ahead of time: for one call (`bind`), or for all calls of a model
(`compile_model`).

`bind` returns the kernel for one kind of call as a plain function of its tensors: no lookup, no
check. `compile_model` (lz.compile) lets Dynamo find the lz calls of a model and replaces each with
a bound kernel. Dynamo's guards notice a call of another kind; its kernel is then selected anew,
with the event plan_missed.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

from ..dispatch import casting, tracing
from ..dispatch import facts as reading
from ..dispatch.binding import Binding
from ..dispatch.binding import bind as bind_step
from ..dispatch.dispatcher import Dispatcher, dispatchers
from ..files import codegen
from ..machine import loading
from ..operate.inspection import dispatcher_of
from ..spec.codec import Record
from ..spec.errors import ConfigError
from ..spec.event import PlanMissed
from ..spec.kernel import Const, Direct, Kernel, LastSize
from ..spec.op import Op
from ..spec.plan import Step
from ..spec.reason import Code, Reason
from ..world import context, events
from ..world import snapshot as worlds
from ..world.incidents import extend_keys, loaded, mark_unloadable, no_kernel_error
from ..world.tables import describe_call
from .call_facts import assumed_alignment
from .dryrun import shapes
from .solver import cell_of
from .table import Choice, Row

# one kernel

class BoundKernel(Protocol):
    """A plain function of tensors, and the calls it is right for."""

    kernel: str
    row: Row
    covers: Callable[..., bool]
    checked: Callable[..., Any]

    def __call__(self, *tensors: Tensor) -> Any: ...


class ChosenKernels:
    """Kernels that were chosen in `world`, and hold while its policy and health do."""

    world: worlds.World

    def stale(self) -> bool:
        """Has policy or the health of a kernel changed since the kernels were chosen?"""
        now = worlds.current()
        if now is self.world:
            return False
        changed = (now.policy, now.health) != (self.world.policy, self.world.health)
        self.world = now if not changed else self.world
        return changed


def bind(op: str | Callable[..., Any], /, *args: Any, backend: str | None = None,
         **kwargs: Any) -> BoundKernel:
    """Return the kernel for calls like this one, as a function of the tensors given here, in their
    order.

    All other arguments are fixed. The function checks nothing: it is right for the calls that its
    `row` describes. `covers(*tensors)` tells whether a call is one of them; `checked(*tensors)`
    asks that each time and lets the op itself serve other calls, with the event plan_missed. The
    function follows neither policy nor breakers.
    """
    call = _read_call(op, args, kwargs, backend)
    dispatcher, facts = call.dispatcher, call.facts
    while True:
        world = worlds.current()
        step = call.first_step(world)
        kernel = world.catalog.by_id[step.kernel]
        try:
            run = specialize(dispatcher.op, kernel, step, facts, call.named)
            break
        except loading.LoadFailed as e:
            mark_unloadable(kernel, e.reason)
    row = cell_of(world, dispatcher.op, facts,
                  Choice(kernel.id, tuple((t.kind, t.target) for t in step.transforms)))
    return _with_row(run, dispatcher, call.named, call.tensors, row)


def chosen_kernel(op: str | Callable[..., Any], /, *args: Any, backend: str | None = None,
                  **kwargs: Any) -> str:
    """Return the id of the kernel that `bind` would choose, in a fraction of its time: the calls
    that it is right for are not worked out, nor why others are not chosen."""
    return _read_call(op, args, kwargs, backend).first_step(worlds.current()).kernel


@dataclass(frozen=True)
class _Call:
    """A call to bind: what was given, and its facts."""

    dispatcher: Dispatcher
    named: Mapping[str, Any]
    tensors: tuple[str, ...]                   # their names
    facts: Mapping[str, Any]
    override: Any

    def first_step(self, world: worlds.World) -> Step:
        plan = world.plan(self.dispatcher.op, self.facts, self.override)
        if not plan.steps:
            raise no_kernel_error(world, self.dispatcher.op, self.facts, self.override)
        return plan.steps[0]


def _read_call(op: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
               backend: str | None) -> _Call:
    """Check a call as given to `bind`; ConfigError for one that is changed before serving."""
    dispatcher = dispatcher_of(op)
    dispatcher.ensure_world()
    override = context.override_for_call(backend, None)
    extend_keys(override)
    values = dispatcher.order_arguments(args, kwargs)
    named = dict(zip(dispatcher.names, values))
    tensors = reading.check_types(dispatcher.op, named, may_be_foreign=True)
    if not tensors:
        raise ConfigError(
            f"lz.tables.bind: lz.{dispatcher.op.name} was given no tensor; give the call as you "
            "would make it"
        )
    if casting.autocast(dispatcher.op, named, next(iter(tensors.values()))) is not None:
        raise ConfigError(
            f"lz.tables.bind: lz.{dispatcher.op.name} under autocast: cast the tensors, then bind "
                          "outside of it")
    if dispatcher.op.canonical is not None and dispatcher.op.canonical(dict(named)) is not None:
        raise ConfigError(
            f"lz.tables.bind: this call of lz.{dispatcher.op.name} is rewritten before it is "
            "served (its rank or layout='auto'); give it in the op's own form: "
            + _own_form(dispatcher.op))
    return _Call(dispatcher, named, tuple(tensors), dispatcher.facts(values), override)


def _with_row(run: Any, dispatcher: Dispatcher, named: Mapping[str, Any], names: tuple[str, ...],
              row: Row) -> BoundKernel:
    """Attach kernel, row, covers and checked to the function: an object would cost a call more."""
    def facts(tensors: Sequence[Tensor]) -> dict[str, Any]:
        if len(tensors) != len(names):
            raise ConfigError(
                f"lz.tables.bind: lz.{dispatcher.op.name} was bound with {', '.join(names)}; "
                f"got {len(tensors)} tensors")
        values = {**named, **dict(zip(names, tensors))}
        return dispatcher.facts(tuple(values[n] for n in dispatcher.names))

    def covers(*tensors: Tensor) -> bool:
        """Is this a call that the kernel was bound for?"""
        return row.covers(facts(tensors))

    def checked(*tensors: Tensor) -> Any:
        """Returns the bound kernel if bound for this call; else the op itself, and an event."""
        call = facts(tensors)
        if row.covers(call):
            return run(*tensors)
        reason = Reason(Code.PLAN_BUCKET_MISS, str(row), describe_call(dispatcher.op, call))
        events.emit(PlanMissed(dispatcher.op.name, row.kernel, reason))
        return dispatcher.public(**{**named, **dict(zip(names, tensors))})

    run.kernel, run.row, run.covers, run.checked = row.kernel, row, covers, checked
    return run  # type: ignore[no-any-return]


def specialize(op: Op, kernel: Kernel, step: Step, facts: Mapping[str, Any],
               named: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function of the tensors in `named` that calls the kernel, the rest fixed."""
    tensors = [p.name for p in op.params if p.kind == "tensor" and named[p.name] is not None]
    fixed = {n: v for n, v in named.items() if n not in tensors}
    binding = bind_step(op, kernel, loaded(kernel), step.transforms, facts[op.variant] if op.variant
                        else "", fixed)
    run = ((binding.call and _with_defaults(binding.call, tensors, fixed))
           or _generate(op, binding, tensors, fixed))
    run.__doc__ = f"lz.{op.name} by {kernel.id}, bound."
    return run


def _with_defaults(call: Direct, tensors: list[str],
                   fixed: Mapping[str, Any]) -> FunctionType | None:
    """Return a copy of the kernel's Python function with the fixed arguments as defaults; None if
    it takes others. Unlike a wrapper, the copy adds no frame to a call."""
    fn, arguments = call.fn, (*call.args, *call.kwargs.values())
    if not isinstance(fn, FunctionType) or call.item is not None or call.first is not None or any(
            isinstance(argument, LastSize) for argument in arguments):
        return None
    if list(call.args[:len(tensors)]) != tensors:
        return None
    if fn.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None

    def value(argument: Any) -> Any:
        return argument.value if isinstance(argument, Const) else fixed[argument]

    if any(argument in tensors for argument in (*call.args[len(tensors):], *call.kwargs.values())):
        return None
    names, own = fn.__code__.co_varnames[:fn.__code__.co_argcount], list(fn.__defaults__ or ())
    defaults = dict(zip(names[len(names) - len(own):], own))
    defaults.update(zip(names[len(tensors):], map(value, call.args[len(tensors):])))
    keywords = {**(fn.__kwdefaults__ or {}),
                **{k: value(v) for k, v in call.kwargs.items() if k not in names}}
    defaults.update({k: value(v) for k, v in call.kwargs.items() if k in names})
    if any(n not in defaults for n in names[len(tensors):]):
        return None
    copy = FunctionType(fn.__code__, fn.__globals__, fn.__name__,
                        tuple(defaults[n] for n in names[len(tensors):]),
                        fn.__closure__)
    copy.__kwdefaults__ = keywords or None
    return copy


def _generate(op: Op, binding: Binding, tensors: list[str],
              fixed: Mapping[str, Any]) -> FunctionType:
    """Generate a function of the tensors that calls the kernel: one frame more."""
    scope: dict[str, Any] = {}

    def constant(value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"CONST{len(scope)}"
        scope[name] = value
        return name

    def argument(value: Any) -> str:
        if isinstance(value, Const):
            return constant(value.value)
        if isinstance(value, LastSize):
            return f"{value.param}.shape[-1:]"
        return str(value) if value in tensors else constant(fixed[value])

    # the inputs are changed first: that is a Python function of its own
    if binding.call is None:
        scope["FN"] = binding.run
        text = f"FN({', '.join(map(argument, (p.name for p in op.params)))})"
    else:
        call = binding.call
        scope["FN"] = call.fn
        parts = [*map(argument, call.args), *(f"{k}={argument(v)}" for k, v in call.kwargs.items())]
        text = f"FN({', '.join(parts)})" + ("" if call.item is None else f"[{call.item}]")
        text += "" if call.first is None else f"[:{call.first}]"
    # made of declared names only
    source = f"def {op.name}({', '.join(tensors)}):\n    return {text}"
    exec(codegen.compile(source, f"{op.name} bound"), scope)
    run: FunctionType = scope[op.name]
    run.__module__ = "layerzero"
    return run


def _own_form(op: Op) -> str:
    patterns = next(iter(op.patterns.values()))
    return ", ".join(f"{n} ({' '.join(tokens)})" for n, tokens in patterns.items()
                     if not op.by_name[n].optional)


# a model

@dataclass(frozen=True)
class Site(Record):
    """One lz call of a model, and what became of it."""

    op: str
    calls: str                                 # dtype and sizes
    kernel: str                                # "": not baked, looked up at each call
    why_not: str = ""


@dataclass
class Baked:
    """A model whose lz calls are bound to their kernels. Call it as you would call the model."""

    model: Callable[..., Any]
    sites: list[Site] = field(default_factory=list)
    # chosen anew, because a call came that was not baked for
    missed: list[Site] = field(default_factory=list)
    _run: Callable[..., Any] | None = None
    _first: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        if not self._first:
            return self._run(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        finally:
            self._first = False

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the backend that Dynamo hands a graph to while lz calls are still whole."""
        autocast = any(n.op == "call_function"
                       and getattr(n.target, "__name__", "") == "_enter_autocast"
                       for n in graph.graph.nodes)
        for node in list(graph.graph.nodes):
            name = _op_name(node)
            if name is None:
                continue
            site = _bake(graph.graph, node, dispatchers[name], autocast)
            self.sites.append(site)
            if not self._first:
                self.missed.append(site)
                events.emit(PlanMissed(site.op, site.kernel,
                                       Reason(Code.PLAN_BUCKET_MISS, "", site.calls)))
        graph.graph.lint()  # type: ignore[no-untyped-call]
        graph.recompile()
        return graph.forward


def compile_model(model: Callable[..., Any], *example: Any, fullgraph: bool = False,
                  dynamic: bool | None = None, **named: Any) -> Baked:
    """Bake the choices of a model: each lz call becomes a direct call of its kernel, without a
    lookup.

    With example arguments the model runs once now, and what it does is baked; else its first call
    does that.
    """
    baked = Baked(model)
    baked._run = torch.compile(model, backend=baked._backend, fullgraph=fullgraph, dynamic=dynamic)
    if example or named:
        baked(*example, **named)
    return baked


def _op_name(node: torch.fx.Node) -> str | None:
    target: Any = node.target
    if node.op != "call_function" or getattr(target, "namespace", "") != "layerzero":
        return None
    name = target._schema.name.partition("::")[2]
    return name if name in dispatchers else None


def _bake(graph: torch.fx.Graph, node: torch.fx.Node, dispatcher: Dispatcher,
          autocast: bool) -> Site:
    """Replace the node with the bound kernel, or leave it where that cannot be done."""
    op, target = dispatcher.op, node.target
    arguments = list(target._schema.arguments)  # type: ignore[union-attr]
    bound = {a.name: node.kwargs.get(a.name, a.default_value) for a in arguments}
    bound.update(zip((a.name for a in arguments), node.args))
    backend = bound.pop("backend", None)
    values = {n: v.meta.get("example_value") if isinstance(v, torch.fx.Node) else v
              for n, v in bound.items()}
    override = context.override_for_call(backend, None)
    extend_keys(override)
    sizes = shapes(op, values)
    if autocast:
        return Site(op.name, sizes, "", "the graph switches autocast on")
    if any(isinstance(v, torch.fx.Node) and not isinstance(values[n], Tensor)
           for n, v in bound.items()):
        return Site(op.name, sizes, "", "a parameter that is no tensor is computed by the graph")
    if op.canonical is not None and op.canonical(dict(values)) is not None:
        return Site(op.name, sizes, "", "the call is rewritten before it is served")
    facts = dispatcher.facts(tuple(values[n] for n in dispatcher.names))
    facts.update(assumed_alignment(values, facts))
    chosen = tracing.choose(worlds.current(), op, facts, override, opaque=True)
    if chosen is None:
        return Site(op.name, sizes, "",
                    "no kernel that is known to hold for all sizes of this graph")
    step, kernel = chosen
    try:
        with graph.inserting_before(node):
            direct = _kernel_node(graph, op, kernel, step, facts, values, bound)
    except loading.LoadFailed as e:
        mark_unloadable(kernel, e.reason)
        return Site(op.name, sizes, "", e.reason.message)
    direct.meta.update(node.meta)
    results = node.meta.get("example_value")
    # a list of one, of which the one is taken
    if isinstance(results, (list, tuple)) and len(results) == 1:
        for user in list(node.users):
            user.replace_all_uses_with(direct)
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(direct)
    graph.erase_node(node)
    return Site(op.name, sizes, kernel.id)


def _kernel_node(graph: torch.fx.Graph, op: Op, kernel: Kernel, step: Step,
                 facts: Mapping[str, Any],
                 values: Mapping[str, Any], nodes: Mapping[str, Any]) -> torch.fx.Node:
    """Add the kernel to the graph: its own function if the graph can hold its arguments."""
    tensors = [p.name for p in op.params if p.kind == "tensor" and nodes[p.name] is not None]
    fixed = {n: v for n, v in values.items() if n not in tensors}
    call = bind_step(op, kernel, loaded(kernel), step.transforms, facts[op.variant] if op.variant
                     else "", fixed).call
    arguments = () if call is None else (*call.args, *call.kwargs.values())
    # a size is computed, which a node of the graph is not
    sized = any(isinstance(a, LastSize) for a in arguments)
    constants = [] if sized else [a.value if isinstance(a, Const) else fixed[a] for a in arguments
                                  if isinstance(a, Const) or a not in tensors]
    if call is None or sized or not hasattr(call.fn, "__name__") or not all(
            v is None or type(v) in (bool, int, float, str, torch.dtype) for v in constants):
        return graph.call_function(specialize(op, kernel, step, facts, values),
                                   tuple(nodes[n] for n in tensors))

    def argument(a: Any) -> Any:
        return a.value if isinstance(a, Const) else nodes[a]

    keywords = {k: argument(v) for k, v in call.kwargs.items()}
    result = graph.call_function(call.fn, tuple(map(argument, call.args)), keywords)
    if call.item is None and call.first is None:
        return result
    return graph.call_function(operator.getitem,
                               (result, slice(call.first) if call.item is None else call.item))
