"""The dispatcher of one op: what happens when the choice for a call is not remembered yet.

A hit never comes here: `public` is the function that hotpath.py generates (or its copy in C++,
native/), which looks the entry up and runs it. This file is in the order in which a first call runs
through it:

miss     obtain the entry for the key: read the facts, select a kernel, bind it, remember it; then
         run it
slow     anything unusual: nested or 3-D inputs, autocast, subclasses, tracing
recover  the kernel threw: recovery.py says whose fault it was and has the next kernel of the
         same plan serve
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

from ..files import codegen
from ..machine import faults, loading, locks, memory
from ..machine.faults import InputsChanged, PlanExhausted
from ..selection.key import KeyProgram, fixed_by_key
from ..selection.verdicts import compile_verdicts
from ..spec.errors import InvalidCall
from ..spec.event import Adapted, Evicted, PlanMissed, Selected
from ..spec.kernel import Direct, Kernel
from ..spec.op import Op
from ..spec.plan import Plan, Step
from ..world import clock, context, events, incidents
from ..world import snapshot as worlds
from ..world.context import Override
from ..world.incidents import extend_keys, loaded, mark_unloadable, no_kernel_error
from ..world.snapshot import World
from . import casting, hotpath, native, protection, recovery, tracing, unregistered, wrapping
from .background import compiling, learning
from .background.exploring import Exploring
from .binding import Binding, bind
from .cache import Entry, Ledger, OpCache
from .facts import check_storage, check_types, unwrap_numbers
from .facts import read as read_facts
from .generated_globals import generated_globals

_MAX_BINDINGS = 1024

dispatchers: dict[str, Dispatcher] = {}
_making = locks.Lock()


def public_function(op: Op) -> Callable[..., Any]:
    """Return the public function of an op, `lz.<name>`; it is made once."""
    dispatcher = dispatchers.get(op.name)
    if dispatcher is None or dispatcher.op is not op:
        own = Dispatcher(op)
        with _making:
            first = dispatchers.get(op.name)
            if first is not None and first.op is op:
                return first.public            # another thread made it meanwhile
            dispatcher = dispatchers[op.name] = own
        if worlds.exists():
            worlds.call_with_current(lambda world: own.install(world)
                                     if op.name in world.catalog.ops else None)
    return dispatcher.public


def dispatcher_named(name: str) -> Dispatcher:
    """Return the dispatcher of an op, which may never have been called."""
    if name not in dispatchers:
        public_function(worlds.current().catalog.ops[name])
    return dispatchers[name]


class Dispatcher:
    """All that belongs to one op: public function, generated code, cache in the current world."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.names = tuple(p.name for p in op.params)
        self.cache = OpCache(1)
        self.program: KeyProgram | None = None
        self.key_of: Callable[..., Any] = lambda *values: None
        self.facts_of: Callable[..., Any] = lambda *values: None
        self.reader: tuple[KeyProgram | None, Callable[..., Any]] = None, self.facts_of
        self.keeps_contract = compile_verdicts([op.requires])
        self.world: World | None = None
        # in one value: an entry belongs in its own world's cache
        self.installed: tuple[World, OpCache] | None = None
        self.ledger = Ledger()
        self._bindings: dict[Any, Binding] = {}
        self.globals = generated_globals(context.current.get, context.override_for_call,
                                         faults.FAULTS)
        self.globals.update(TABLE={}, MISS=self.miss, SLOW=self.slow, RECOVER=self.recover)
        exec(codegen.compile(hotpath.generate_stub(op), f"{op.name} stub"), self.globals)
        self.python_call: FunctionType = self.globals["call"]
        self.python_call.__name__ = self.python_call.__qualname__ = op.name
        self.python_call.__doc__ = op.reference.__doc__
        self.python_call.__module__ = "layerzero"
        self.native = native.make_dispatcher(op, self.native_miss, self.native_recover)
        self.public: Callable[..., Any] = (self.python_call if self.native is None
                                           else self.native.call)

    # A first call: obtain an entry for its key, and run it.

    def miss(self, key: Any, values: tuple[Any, ...], backend: str | None, policy: Any) -> Any:
        """Serve a call whose key is not in the table, and remember its choice."""
        override = context.override_for_call(backend, policy)
        if not extend_keys(override):
            return self.slow(values, backend, policy)
        try:
            entry = self.obtain(key, values, override)
        except InvalidCall as e:
            return self.serve_adapted(values, e, override, backend, policy)
        entry.tick()
        return self.serve(entry, values)

    def native_miss(self, *args: Any, **kwargs: Any) -> Any:
        """Does as `miss` for a call not in the native table; puts an ordinary one there."""
        values, (backend, policy) = self.order_arguments(args, kwargs), (kwargs.get(name)
                                                                         for name in hotpath.EXTRAS)
        self.ensure_world()
        override = context.override_for_call(backend, policy)
        override_in_key = extend_keys(override)
        world, cache = self._world_and_cache()
        key = self.key_of(*values) if override_in_key else None
        if key is None:
            return self.slow(values, backend, policy)
        key = (key[0], override, *key[2:])
        try:
            entry = cache.table.get(key) or self.obtain(key, values, override)
        except InvalidCall as e:
            return self.serve_adapted(values, e, override, backend, policy)
        entry.tick()
        out = self.serve(entry, values)
        # Refused if the world has changed meanwhile. A guarded kernel stays with Python.
        if self.native is not None and not isinstance(entry.run, protection.Guard):
            same_in_capture = self._serves_captures(world, entry, override)
            self.native.put(entry, world.version(self.op.name), values, same_in_capture, override)
        return out

    def obtain(self, key: Any, values: tuple[Any, ...], override: Override | None) -> Entry:
        """Return the entry for `key`: one thread makes it, others that miss it wait."""
        world, cache = self._world_and_cache()
        if key is None or key[0] != world.program(self.op).id:
            key = self.key_of(*values)          # the key was made by code of an older world
            key = key and (key[0], override, *key[2:])
        if key is None:
            facts = self.facts(values, world)
            key = ("facts", override, *facts.values())
            return cache.obtain(key, lambda: self.make_entry(world, facts, override, values))
        return cache.obtain(key, lambda: self.make_entry(world, self.facts(values, world), override,
                                                         values))

    def facts(self, values: tuple[Any, ...], world: World | None = None) -> dict[str, Any]:
        """Return the facts of a call that `world` needs; InvalidCall if it breaks the contract."""
        program = (world or self.ensure_world()).program(self.op)
        owner, facts_of = self.reader
        facts: dict[str, Any] | None = facts_of(*values) if program is owner else None
        # not an ordinary call: this reader names every mistake
        if facts is None:
            facts = read_facts(self.op, dict(zip(self.names, values)), program.needed)
        if not self.keeps_contract(facts):
            raise InvalidCall.of(self.op.name, *self.op.reasons(self.op.requires, facts))
        if self.op.extra_check is not None:
            self.op.extra_check(dict(zip(self.names, values)), facts)
        return facts

    def make_entry(self, world: World, facts: Mapping[str, Any], override: Override | None,
                   values: tuple[Any, ...] | None = None) -> Entry:
        """Select a kernel, load and bind it, and wrap it in what watches its calls.

        `values` are those of the call it is made for, so that a better kernel can be compiled for
        calls like it.
        """
        start = time.perf_counter()
        world, plan, kernel, binding = self._select(world, facts, override)
        step = plan.steps[0]
        if values is not None:
            compiling.request_better(self, world, plan, override, values)
        guarded, unguarded, recordings = wrapping.wrap(self, world, plan, kernel, binding, override)
        run = learning.explore(self, world, plan, guarded, override)
        if isinstance(run, Exploring):
            unguarded, recordings = run, None  # a replayed call would not be explored
        if (step.workspace or plan.refused_workspace) and memory.record_need(
                self.op.name, facts["device"], step.workspace, plan.refused_workspace):
            # from now on the clock looks at what is free
            worlds.call_with_current(clock.schedule)
        micros = (time.perf_counter() - start) * 1e6
        if plan.missed is not None:
            events.emit(PlanMissed(self.op.name, kernel.id, plan.missed))
        explained = (world.plan(self.op, facts, override, thorough=True) if events.wants_reasons()
                     else plan)
        events.emit(Selected(self.op.name, kernel.id, len(world.kernels(self.op.name)), micros,
                             tuple(map(
            str, step.transforms)), step.score.source, step.score.transform_us, explained.rejected))
        reads_memory = isinstance(run, Exploring) or any(
            leaf.fact == "tensor_kind" for rule in kernel.requires for leaf in rule.leaves())
        entry = Entry(plan, binding if unguarded is binding.run else Binding(unguarded, None), run,
                      recordings, reads_memory,
                      has_addresses=reads_memory or facts.get("device") in ("cpu", "cuda"))
        protection.unguard_later(run, entry, "run")
        return self.ledger.add(entry)

    def _select(self, world: World, facts: Mapping[str, Any],
                override: Override | None) -> tuple[World, Plan, Kernel, Binding]:
        """Plan, and bind the first step; again, if its library fails to load."""
        while True:
            plan = world.plan(self.op, facts, override)
            if not plan.steps:
                raise no_kernel_error(world, self.op, facts, override)
            step = plan.steps[0]
            kernel = world.catalog.by_id[step.kernel]
            try:
                # A kernel that compiles has one binding for all keys: each would be compiled for.
                fixed = {} if kernel.jit else fixed_by_key(world.program(self.op), facts)
                return world, plan, kernel, self.bind(kernel, step, facts, fixed)
            except loading.LoadFailed as e:
                world = mark_unloadable(kernel, e.reason)

    def bind(self, kernel: Kernel, step: Step, facts: Mapping[str, Any],
             fixed: Mapping[str, Any]) -> Binding:
        """Load the kernel and bind the step to the op's parameters, once for equal bindings."""
        run, variant = loaded(kernel), facts[self.op.variant] if self.op.variant else ""
        sizes_read = run.facts if isinstance(run, Direct) else ()
        fixed = {name: value for name, value in fixed.items() if name in self.op.by_name
                 or name in sizes_read}
        key = (kernel, tuple([(t.kind, t.target) for t in step.transforms]), variant,
               tuple(fixed.items()))
        binding = self._bindings.get(key)
        if binding is None:
            if len(self._bindings) > _MAX_BINDINGS:
                self._bindings.clear()
            binding = bind(self.op, kernel, run, step.transforms, variant, fixed)
            # not unregistered meanwhile
            if worlds.current().catalog.by_id.get(kernel.id) is kernel:
                self._bindings[key] = binding
        return binding

    def serve(self, entry: Entry, values: tuple[Any, ...]) -> Any:
        """Run the kernel of an entry; if it throws, the next one of the plan."""
        try:
            return entry.run(*values)
        except faults.FAULTS as fault:
            return self.recover(entry, values, fault)

    def recover(self, entry: Entry, values: tuple[Any, ...], fault: BaseException) -> Any:
        return recovery.recover(self, entry, values, fault)

    def with_backend(self, kernel: str) -> Callable[..., Any]:
        """Return the public function with `backend=kernel`, of values in the op's order."""
        params, public = self.op.params, self.public
        split = next((i for i, p in enumerate(params) if p.keyword_only), len(params))
        names = tuple(p.name for p in params[split:])

        def call(*values: Any) -> Any:
            return public(*values[:split], **dict(zip(names, values[split:])), backend=kernel)

        return call

    # Unusual calls.

    def slow(self, values: tuple[Any, ...], backend: str | None, policy: Any) -> Any:
        """Serve any call, with every check: what is unusual about it is removed or named."""
        self.ensure_world()
        override = context.override_for_call(backend, policy)
        override_in_key = extend_keys(override)
        values = unwrap_numbers(self.op, values)
        named = dict(zip(self.names, values))
        tensors = check_types(self.op, named, may_be_foreign=True)
        check_storage(self.op, tensors, may_be_nested=self.op.nested)
        if self.op.canonical is not None:       # before a cast, of which a CausalBias makes nothing
            redirect = self.op.canonical(named)
            if redirect is not None:
                target = dispatcher_named(redirect.op)
                filled = tuple(redirect.values.get(p.name, p.default) for p in target.op.params)
                return redirect.restore(target.slow(filled, backend, policy))
        first = next(iter(tensors.values()), None)
        cast = casting.autocast(self.op, named, first)
        if cast is not None and first is not None:
            with torch.autocast(first.device.type, enabled=False):
                return self.slow(tuple(cast[n] for n in self.names), backend, policy)
        if tracing.is_traced(list(tensors.values())):
            return self.serve_traced(values, override)
        try:
            key = self.key_of(*values) if override_in_key else None
            # the override of this call takes the place of its context's
            if key is not None:
                entry = self.obtain((key[0], override, *key[2:]), values, override)
            else:
                entry = self._obtain_by_facts(values, override, every_fact=not override_in_key)
        except InvalidCall as e:
            return self.serve_adapted(values, e, override, backend, policy)
        entry.tick()
        return self.serve(entry, values)

    def _obtain_by_facts(self, values: tuple[Any, ...], override: Override | None,
                         every_fact: bool = False) -> Entry:
        world, cache = self._world_and_cache()
        facts = self.facts(values, world)
        if every_fact:
            facts = read_facts(self.op, dict(zip(self.names, values)))
        key = ("facts", override, *facts.values())
        return (cache.table.get(key)
                or cache.obtain(key, lambda: self.make_entry(world, facts, override, values)))

    def serve_adapted(self, values: tuple[Any, ...], error: InvalidCall, override: Override | None,
                      backend: str | None = None, policy: Any = None) -> Any:
        """Serve the call rewritten, or cast to fit, if policy allows; else raise `error`."""
        named = dict(zip(self.names, values))
        if self.op.canonical is not None and self.op.canonical(named) is not None:
            return self.slow(values, backend, policy)
        adaptation = casting.adapt(self.op, named, error, override)
        if adaptation is None:
            raise error
        events.emit(Adapted(op=self.op.name, transforms=tuple(map(str, adaptation.casts))))
        return self.slow(tuple(adaptation.values[n] for n in self.names), backend, policy)

    def serve_traced(self, values: tuple[Any, ...], override: Override | None) -> Any:
        """Serves a call under torch.compile or export: chooses for symbolic sizes, inlines it."""
        recorder = tracing.recorder.get()
        if recorder is not None:
            return recorder(self.op, dict(zip(self.names, values)), self.facts(values), override)
        world, facts = self.ensure_world(), self.facts(values)
        choice = tracing.choose(world, self.op, facts, override)
        if choice is None:
            raise no_kernel_error(world, self.op, tracing.hinted_facts(facts), override)
        step, kernel = choice
        return self.bind(kernel, step, facts, {}).run(*values)

    # The native path.

    def _serves_captures(self, world: World, entry: Entry, override: Override | None) -> bool:
        """Would the same kernel serve during a graph capture? Not if entries change who serves."""
        facts, step = entry.plan.facts, entry.plan.steps[0]
        kernel = world.catalog.by_id.get(step.kernel)      # None: the entry is of a newer world
        if (facts["device"] != "cuda" or kernel is None or kernel.jit
            or kernel.health in world.health):
            return False
        if isinstance(entry.run, Exploring):
            return False
        steps = world.plan(self.op, {**facts, "graph": True}, override).steps
        return (bool(steps)
                and (steps[0].kernel, steps[0].transforms) == (step.kernel, step.transforms))

    def native_recover(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                       fault: BaseException, changed: int) -> Any:
        """Does as `recover`; `changed` has a bit per parameter whose tensor was written into."""
        if changed and not isinstance(fault, (InputsChanged, PlanExhausted, *faults.PASSED_ON)):
            fault = InputsChanged([name for i, name in enumerate(self.names) if changed >> i & 1],
                                  fault)
        return self.recover(entry, self.order_arguments(args, kwargs), fault)

    def order_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in the order of the op's parameters, defaults filled in."""
        return unwrap_numbers(self.op, self.globals["values_of"](*args, **kwargs))

    # Worlds: a new one brings a new cache, and new code where the key has changed.

    def install(self, world: World, force: bool = False) -> None:
        """Take over a world. With `force`, empty the cache even if the op is unchanged."""
        version = world.version(self.op.name)
        if not force and self.world is not None and self.world.version(self.op.name) == version:
            # another op changed: the cache holds
            self.world, self.cache = self.installed = world, self.cache
            return
        program = world.program(self.op, previous=self.world)
        cache = OpCache(world.policy.setting("cache_size"), self._emit_evicted)
        # An op without tensors takes the slow path, which costs little beside its work.
        if self.op.read is None and (self.program is None or program.id != self.program.id):
            scope = dict(self.globals)
            text = hotpath.generate(program, torch.version.cuda is not None)
            exec(codegen.compile(text, f"{self.op.name} call"), scope)
            self.key_of = FunctionType(scope["key_of"].__code__, self.globals)
            self.facts_of = FunctionType(scope["facts_of"].__code__, self.globals)
            self.python_call.__code__ = scope["call"].__code__
        try:
            self.program = program
            self.reader = program, self.facts_of    # in one value, as `installed`
            self.globals["TABLE"] = cache.table
            if self.native is not None:
                self.native.install(program, version, world.policy.setting("cache_size"))
            # last: what an interrupt cut short is done again
            self.world, self.cache = self.installed = world, cache
            if self.globals["TABLE"] is not cache.table:
                self.world = None              # a finalizer installed another one meanwhile
        except BaseException:                  # an interrupt: the next call takes over what is
            self.world = None                  # published, which may not be this world
            raise

    def _emit_evicted(self, entries: int) -> None:
        events.emit(Evicted(op=self.op.name, entries=entries))

    def ensure_world(self) -> World:
        """Return this dispatcher's world, installing one if it has none, after what is due."""
        now = time.monotonic()
        if clock.due(now):
            worlds.apply_deadlines(now)
        while (world := self.world) is None:
            worlds.call_with_current(lambda world: self.install(world) if self.world is None
                                     else None)
        return world

    def _world_and_cache(self) -> tuple[World, OpCache]:
        self.ensure_world()
        assert self.installed is not None
        return self.installed

    # Counts.

    def calls_of(self, kernel: str) -> int:
        """Returns how often a kernel was called in this process."""
        if self.native is not None:
            self.native.collect()
        return self.ledger.calls(kernel)

    def hits(self) -> dict[str, int]:
        """Returns how often each kernel was chosen for a call, in this process."""
        if self.native is not None:
            self.native.collect()
        return self.ledger.totals()


def _install(world: World) -> None:
    unregistered.forget(dispatchers, wrapping.probes, world.catalog)
    for name, op in world.catalog.ops.items():
        if (name in dispatchers and dispatchers[name].op is op
            and dispatchers[name].world is not None):
            dispatchers[name].install(world)
    clock.schedule(world)


worlds.add_listener(_install)


def _after_fork() -> None:
    """Runs in a forked child: threads that held a lock or made an entry are gone."""
    incidents.after_fork()
    memory.after_fork()
    wrapping.probes.clear()
    for dispatcher in list(dispatchers.values()):
        dispatcher.cache.after_fork()
    if worlds.exists():
        worlds.call_with_current(_install_if_behind)


def _install_if_behind(world: World) -> None:
    """Installs the world in dispatchers that lack it: a fork may come while they take it over."""
    if any(d.world is not None and d.world is not world for d in list(dispatchers.values())):
        _install(world)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
