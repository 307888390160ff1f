"""The call path. One dispatcher per op; `public` is what users call.

hit     generated code (hotpath.py) or its native twin finds the entry and calls it; nothing here runs
miss    read the facts, plan, bind, remember, run
slow    anything unusual: nested or 3-D inputs, autocast, subclasses, tracing
recover the kernel threw: say whose fault it was, and let the next one of the same plan serve
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

from ..machine import faults, loading, locks, memory, watchdog
from ..machine.faults import InputsChanged, PlanExhausted
from ..select.key import KeyProgram, fixed_by_key
from ..select.verdicts import compile_verdicts
from ..spec import codegen
from ..spec.errors import InvalidCall, LayerZeroError
from ..spec.event import Adapted, Evicted, PlanMissed, Selected
from ..spec.kernel import Direct, Kernel
from ..spec.op import Op
from ..spec.plan import Plan, Step
from ..world import clock, context, events, health, incidents
from ..world import snapshot as worlds
from ..world.context import Override
from ..world.incidents import (
    ProbeBusy,
    compile_failed,
    count_success,
    extend_keys,
    loaded,
    mark_unloadable,
    no_kernel_error,
)
from ..world.snapshot import World
from . import casting, hotpath, native, protection, recovery, tracing, unregistered
from . import facts as reading
from .background import compiling, jit, learning
from .background.exploring import Exploring
from .binding import Binding, bind
from .cache import Entry, Ledger, OpCache
from .native import replays

_MAX_BINDINGS = 1024

dispatchers: dict[str, Dispatcher] = {}
_probes: dict[str, locks.Lock] = {}        # held while a half-open kernel is tried


class Dispatcher:
    """All that belongs to one op: its public function, its generated code, its cache in this world."""

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
        self.now: tuple[World, OpCache] | None = None          # both at once: an entry belongs in its own world's cache
        self.ledger = Ledger()
        self._bindings: dict[Any, Binding] = {}
        self.globals = hotpath.namespace(context.current.get, context.override_for_call, faults.FAULTS)
        self.globals.update(TABLE={}, MISS=self.miss, SLOW=self.slow, RECOVER=self.recover)
        exec(codegen.compile(hotpath.stub(op), f"{op.name} stub"), self.globals)
        self.twin: FunctionType = self.globals["call"]
        self.twin.__name__ = self.twin.__qualname__ = op.name
        self.twin.__doc__ = op.reference.__doc__
        self.twin.__module__ = "layerzero"
        self.native = native.dispatcher(op, self.native_miss, self.native_recover)
        self.public: Callable[..., Any] = self.twin if self.native is None else self.native.call

    # a new world: new cache, and new code where the key changed

    def install(self, world: World, anew: bool = False) -> None:
        """Take over a world. `anew`: forget what is remembered even if nothing of this op has changed."""
        version = world.version(self.op.name)
        if not anew and self.world is not None and self.world.version(self.op.name) == version:
            self.world, self.cache = self.now = world, self.cache      # another op's business: what is remembered holds
            return
        program = world.program(self.op)
        cache = OpCache(world.policy.setting("cache_size"), self._evicted)
        # An op without tensors goes the slow way, which is quick beside such work.
        if self.op.read is None and (self.program is None or program.id != self.program.id):
            scope = dict(self.globals)
            text = hotpath.source(program, torch.version.cuda is not None)
            exec(codegen.compile(text, f"{self.op.name} call"), scope)
            key_of = scope["key_of"].__code__
            self.key_of = FunctionType(key_of, self.globals)
            self.facts_of = FunctionType(scope["facts_of"].__code__, self.globals)
            self.twin.__code__ = scope["call"].__code__
        self.program = program
        self.reader = program, self.facts_of    # both at once, as above
        self.globals["TABLE"] = cache.table
        if self.native is not None:
            self.native.install(program, version, world.policy.setting("cache_size"))
        self.world, self.cache = self.now = world, cache       # last: what an interrupt cut short is done again

    def _evicted(self, entries: int) -> None:
        events.emit(Evicted(op=self.op.name, entries=entries))

    def _ready(self) -> World:
        now = time.monotonic()
        if clock.due(now):
            worlds.apply_deadlines(now)
        if self.world is None:
            worlds.call_with_current(lambda world: self.install(world) if self.world is None else None)
        assert self.world is not None
        return self.world

    def _here(self) -> tuple[World, OpCache]:
        self._ready()
        assert self.now is not None
        return self.now

    # miss

    def miss(self, key: Any, values: tuple[Any, ...], backend: str | None, policy: Any) -> Any:
        override = context.override_for_call(backend, policy)
        if not extend_keys(override):
            return self.slow(values, backend, policy)
        try:
            entry = self.obtain(key, values, override)
        except InvalidCall as e:
            return self.served_adapted(values, e, override, backend, policy)
        entry.tick()
        return self.serve(entry, values)

    def obtain(self, key: Any, values: tuple[Any, ...], override: Override | None) -> Entry:
        world, cache = self._here()
        if key is None or key[0] != world.program(self.op).id:
            key = self.key_of(*values)          # the key was made by code of an older world
            key = key and (key[0], override, *key[2:])
        if key is None:
            facts = self.facts(values, world)
            key = ("facts", override, *facts.values())
            return cache.obtain(key, lambda: self.entry(world, facts, override, values))
        return cache.obtain(key, lambda: self.entry(world, self.facts(values, world), override, values))

    def native_miss(self, *args: Any, **kwargs: Any) -> Any:
        """The native table does not know this call: serve it, and tell the table if it is an ordinary one."""
        values, (backend, policy) = self.bound(args, kwargs), (kwargs.get(name) for name in hotpath.EXTRAS)
        self._ready()
        override = context.override_for_call(backend, policy)
        learned = extend_keys(override)
        world, cache = self._here()
        key = self.key_of(*values) if learned else None
        if key is None:
            return self.slow(values, backend, policy)
        key = (key[0], override, *key[2:])
        try:
            entry = cache.table.get(key) or self.obtain(key, values, override)
        except InvalidCall as e:
            return self.served_adapted(values, e, override, backend, policy)
        entry.tick()
        out = self.serve(entry, values)
        # Refused if the world has changed meanwhile. What is still looked at stays with Python.
        if self.native is not None and not isinstance(entry.run, protection.Guard):
            anywhere = self.serves_captures(world, entry, override)
            self.native.put(entry, world.version(self.op.name), values, anywhere, override)
        return out

    def serves_captures(self, world: World, entry: Entry, override: Override | None) -> bool:
        """Would the same be called while a CUDA graph is captured? Not asked of one that has others serve at times."""
        facts, step = entry.plan.facts, entry.plan.steps[0]
        kernel = world.catalog.by_id.get(step.kernel)      # None: the entry is of a newer world
        if facts["device"] != "cuda" or kernel is None or kernel.jit or kernel.health in world.health:
            return False
        if isinstance(entry.run, Exploring):
            return False
        steps = world.plan(self.op, {**facts, "graph": True}, override).steps
        return bool(steps) and (steps[0].kernel, steps[0].transforms) == (step.kernel, step.transforms)

    def native_recover(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any], fault: BaseException,
                       changed: int) -> Any:
        """`changed`: a bit for each parameter whose tensor was written into."""
        if changed and not isinstance(fault, (InputsChanged, PlanExhausted, *faults.PASSED_ON)):
            fault = InputsChanged([name for i, name in enumerate(self.names) if changed >> i & 1], fault)
        return self.recover(entry, self.bound(args, kwargs), fault)

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        values: tuple[Any, ...] = self.globals["values_of"](*args, **kwargs)
        return values

    # facts, contract, plan, entry

    def facts(self, values: tuple[Any, ...], world: World | None = None) -> dict[str, Any]:
        """The facts of a call that keeps the contract, as `world` wants them; InvalidCall for one that does not."""
        program = (world or self._ready()).program(self.op)
        owner, facts_of = self.reader
        facts: dict[str, Any] | None = facts_of(*values) if program is owner else None
        if facts is None:                       # not an ordinary call: read it with care, and say what is wrong
            facts = reading.read(self.op, dict(zip(self.names, values)), program.needed)
        if not self.keeps_contract(facts):
            broken = [r for rule in self.op.requires if (r := rule.check(facts)) is not None]
            raise InvalidCall.of(self.op.name, *broken)
        if self.op.extra_check is not None:
            self.op.extra_check(dict(zip(self.names, values)), facts)
        return facts

    def entry(self, world: World, facts: Mapping[str, Any], override: Override | None,
              values: tuple[Any, ...] | None = None) -> Entry:
        """Select, load and bind. A library that fails to load leaves the world, and the choice is made again.

        `values`: of the call it is made for, so that a better kernel can be compiled for calls like it.
        """
        began = time.perf_counter()
        while True:
            plan = world.plan(self.op, facts, override)
            if not plan.steps:
                raise no_kernel_error(world, self.op, facts, override)
            step = plan.steps[0]
            kernel = world.catalog.by_id[step.kernel]
            try:
                # Of what compiles there is one binding, whatever the key holds: another would be compiled for.
                fixed = {} if kernel.jit else fixed_by_key(world.program(self.op), facts)
                binding = self.binding(kernel, step, facts, fixed)
                break
            except loading.LoadFailed as e:
                world = mark_unloadable(kernel, e.reason)
        watched = world.health.get(kernel.health)
        run = binding.run if watched is None else self.watched(kernel, binding, watched, bool(plan.locked))
        recordings = None
        if kernel.replayable and watched is None and not step.transforms and self.native is not None:
            recordings = self.native.recordings()
            run = replays.recorded(run, recordings)
        if kernel.jit:
            run = self.warming(world, kernel, run, plan, override)
        if values is not None:
            compiling.request_better(self, world, plan, override, values)
        limit = world.surroundings(facts["device"], override).policy.setting("call_timeout")
        if limit is not None and not facts["grad"] and not facts["graph"]:
            run, recordings = watchdog.with_timeout(run, limit), None
        bare = run
        run = learning.exploring(self, world, plan, self.guarded(kernel, plan, run, world, override), override)
        if isinstance(run, Exploring):
            bare, recordings = run, None       # what is replayed would not be explored
        if (step.workspace or plan.refused_workspace) and memory.record_need(
                self.op.name, facts["device"], step.workspace, plan.refused_workspace):
            worlds.call_with_current(clock.schedule)  # from now on the clock looks at what is free
        micros = (time.perf_counter() - began) * 1e6
        if plan.missed is not None:
            events.emit(PlanMissed(self.op.name, kernel.id, plan.missed))
        why = world.plan(self.op, facts, override, thorough=True) if events.wants_reasons() else plan
        events.emit(Selected(self.op.name, kernel.id, len(world.kernels(self.op.name)), micros, tuple(map(
            str, step.transforms)), step.score.source, step.score.transform_us, why.rejected))
        made = Entry(plan, binding if bare is binding.run else Binding(bare, None), run, recordings)
        protection.place(run, made, "run")
        return self.ledger.open(made)

    def guarded(self, kernel: Kernel, plan: Plan, run: Callable[..., Any], world: World | None = None,
                override: Override | None = None, clean: int = 1) -> Callable[..., Any]:
        """`run`, of which the first calls (`clean` of them) are looked at, or all of them where policy says so."""
        facts = plan.facts
        always = world is not None and world.surroundings(facts["device"], override).policy.setting("protect_inputs")
        # What a subclass makes of a kernel is not the kernel's doing, and our own were held to all this before.
        if facts["tensor_kind"] != "plain" or (protection.is_ours(kernel) and not always):
            return run
        most = 0 if facts["graph"] else protection.ALL if always else protection.SAMPLED
        return protection.Guard(self.op, kernel, run, most, None if always else clean)

    def binding(self, kernel: Kernel, step: Step, facts: Mapping[str, Any], fixed: Mapping[str, Any]) -> Binding:
        """Made once for all calls that want the same of it."""
        run, variant = loaded(kernel), facts[self.op.variant] if self.op.variant else ""
        asked = run.facts if isinstance(run, Direct) else ()
        fixed = {name: value for name, value in fixed.items() if name in self.op.by_name or name in asked}
        key = (kernel, tuple([(t.kind, t.target) for t in step.transforms]), variant, tuple(fixed.items()))
        found = self._bindings.get(key)
        if found is None:
            if len(self._bindings) > _MAX_BINDINGS:
                self._bindings.clear()
            found = bind(self.op, kernel, run, step.transforms, variant, fixed)
            if worlds.current().catalog.by_id.get(kernel.id) is kernel:        # not unregistered meanwhile
                self._bindings[key] = found
        return found

    def watched(self, kernel: Kernel, binding: Binding, state: health.Health, named: bool) -> Callable[..., Any]:
        """A kernel whose breaker is half open: the first success closes it.

        It is tried by one call at a time, whatever its shapes; calls that name it have no other choice.
        """
        probing = state.state == "half_open" and not named

        def run(*values: Any) -> Any:
            token = _probes.setdefault(kernel.health, locks.Lock()) if probing else None
            if token is not None and not token.acquire(blocking=False):
                raise ProbeBusy(f"{kernel.id} is being probed")
            try:
                out = binding.run(*values)
            finally:
                if token is not None:
                    token.release()
            count_success(kernel)
            return out

        return run

    def warming(self, world: World, kernel: Kernel, run: Callable[..., Any], plan: Plan,
                override: Override | None) -> Callable[..., Any]:
        """One that compiles on first use: only in forms it was warmed up for, unless a name or a policy allows more."""
        facts, mode = plan.facts, world.surroundings(plan.facts["device"], override).policy.setting("jit")
        if mode == "in_request" or plan.locked or kernel.id in world.warmed:
            return jit.timed(kernel, run, facts["grad"], lambda fault: compile_failed(kernel, fault, facts))
        cold: list[Entry] = []

        def instead(values: tuple[Any, ...]) -> tuple[str, Any]:
            try:
                if not cold:
                    cold.append(self.entry(jit.without(world, (kernel.id,)), facts, override))
                served_by = cold[0].plan.steps[0].kernel
                self.ledger.fell_back(served_by)
                return served_by, self.serve(cold[0], values)
            except LayerZeroError as e:
                raise PlanExhausted(e) from e

        def unready(values: tuple[Any, ...]) -> None:
            if mode == "background" and not facts["graph"] and compiling.is_worth_it(kernel, plan.steps[0]):
                compiling.request(self, kernel, plan.steps[0], facts, values)

        return jit.guarded(kernel, run, facts, world.warmed, instead, unready)

    # run

    def serve(self, entry: Entry, values: tuple[Any, ...]) -> Any:
        try:
            return entry.run(*values)
        except faults.FAULTS as fault:
            return self.recover(entry, values, fault)

    def recover(self, entry: Entry, values: tuple[Any, ...], fault: BaseException) -> Any:
        """The kernel of `entry` threw `fault`. Whose fault is it, and who serves instead?"""
        return recovery.recover(self, entry, values, fault)

    def calls_of(self, kernel: str) -> int:
        """How often it was called in this process."""
        if self.native is not None:
            self.native.collect()
        return self.ledger.calls(kernel)

    # unusual calls

    def slow(self, values: tuple[Any, ...], backend: str | None, policy: Any) -> Any:
        self._ready()
        override = context.override_for_call(backend, policy)
        learned = extend_keys(override)
        named = dict(zip(self.names, values))
        tensors = reading.check_types(self.op, named)
        reading.check_storage(self.op, tensors, may_be_nested=self.op.nested)
        first = next(iter(tensors.values()), None)
        lowered = casting.autocast(self.op, named, first)
        if lowered is not None and first is not None:
            with torch.autocast(first.device.type, enabled=False):
                return self.slow(tuple(lowered[n] for n in self.names), backend, policy)
        if self.op.canonical is not None:
            redirect = self.op.canonical(named)
            if redirect is not None:
                target = dispatchers[redirect.op]
                filled = tuple(redirect.values.get(p.name, p.default) for p in target.op.params)
                return redirect.restore(target.slow(filled, backend, policy))
        if tracing.is_traced(list(tensors.values())):
            return self.traced(values, override)
        try:
            key = self.key_of(*values) if learned else None
            if key is not None:                 # the override of this call takes the place of its context's
                entry = self.obtain((key[0], override, *key[2:]), values, override)
            else:
                entry = self._by_facts(values, override, all_of_them=not learned)
        except InvalidCall as e:
            return self.served_adapted(values, e, override, backend, policy)
        entry.tick()
        return self.serve(entry, values)

    def _by_facts(self, values: tuple[Any, ...], override: Override | None, all_of_them: bool = False) -> Entry:
        world, cache = self._here()
        facts = self.facts(values, world)
        if all_of_them:
            facts = reading.read(self.op, dict(zip(self.names, values)))
        key = ("facts", override, *facts.values())
        return cache.table.get(key) or cache.obtain(key, lambda: self.entry(world, facts, override, values))

    def served_adapted(self, values: tuple[Any, ...], error: InvalidCall, override: Override | None,
               backend: str | None = None, policy: Any = None) -> Any:
        """The same call with its dtypes made to fit, which an event says; the error, where that is not allowed."""
        found = casting.adapted(self.op, dict(zip(self.names, values)), error, override)
        if found is None:
            raise error
        events.emit(Adapted(op=self.op.name, transforms=tuple(map(str, found.casts))))
        return self.slow(tuple(found.values[n] for n in self.names), backend, policy)

    def traced(self, values: tuple[Any, ...], override: Override | None) -> Any:
        """Under torch.compile or export: choose for symbolic sizes, and run what was chosen so that it is inlined."""
        recorder = tracing.recorder.get()
        if recorder is not None:
            return recorder(self.op, dict(zip(self.names, values)), self.facts(values), override)
        world, facts = self._ready(), self.facts(values)
        choice = tracing.choose(world, self.op, facts, override)
        if choice is None:
            raise no_kernel_error(world, self.op, tracing.seen_facts(facts), override)
        step, kernel = choice
        return self.binding(kernel, step, facts, {}).run(*values)

    # what happened

    def hits(self) -> dict[str, int]:
        """How often each kernel was chosen for a call, in this process."""
        if self.native is not None:
            self.native.collect()
        return self.ledger.totals()


def function(op: Op) -> Callable[..., Any]:
    """The public function of an op; made once."""
    found = dispatchers.get(op.name)
    if found is None or found.op is not op:
        found = dispatchers[op.name] = Dispatcher(op)
        if worlds.exists():
            worlds.call_with_current(lambda world: found.install(world) if op.name in world.catalog.ops else None)
    return found.public


def _follow(world: World) -> None:
    unregistered.forget(dispatchers, _probes, world.catalog)
    for name, op in world.catalog.ops.items():
        if name in dispatchers and dispatchers[name].op is op and dispatchers[name].world is not None:
            dispatchers[name].install(world)
    clock.schedule(world)


worlds.add_listener(_follow)


def _after_fork() -> None:
    """In the child: threads that held a lock, made an entry or probed a kernel are gone."""
    incidents.after_fork()
    memory.after_fork()
    _probes.clear()
    for dispatcher in dispatchers.values():
        dispatcher.cache.after_fork()
    if worlds.exists():
        worlds.call_with_current(_follow_if_behind)


def _follow_if_behind(world: World) -> None:
    """The fork may have come between two dispatchers taking over a new world."""
    if any(d.world is not None and d.world is not world for d in dispatchers.values()):
        _follow(world)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
