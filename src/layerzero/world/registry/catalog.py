"""The catalog of ops and kernels: our own files, plugins by entry point, and what a program
registers.

A plugin that does not fit is refused by name and mismatch; the rest of the library goes on. The
releases of LayerZero that it requires are checked before it is imported, and its import is tried in
another process first (plugin_probe.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ...backends import CATALOG as BACKENDS
from ...machine.loading import is_version_range, satisfies
from ...ops import CATALOG as OPS
from ...selection.policy import Layer, PolicyRule
from ...spec.errors import RegistrationError
from ...spec.event import BackendUnavailable, Event
from ...spec.kernel import Kernel
from ...spec.names import OpOfKernel, nearest
from ...spec.op import Op
from ...spec.reason import Code, Reason
from . import plugin_probe

# foreign code may raise anything
PLUGIN_ERRORS: tuple[type[BaseException], ...] = (Exception, SystemExit)
ENTRY_POINTS = ("layerzero.ops", "layerzero.backends")
POLICIES = "layerzero.policies"


@dataclass(frozen=True)
class Catalog:
    ops: Mapping[str, Op]
    kernels: tuple[Kernel, ...]
    origins: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _by_op(self) -> Mapping[str, tuple[Kernel, ...]]:
        table: dict[str, list[Kernel]] = {name: [] for name in self.ops}
        for kernel in self.kernels:
            table[kernel.op.name].append(kernel)
        return MappingProxyType({name: tuple(kernels) for name, kernels in table.items()})

    @cached_property
    def by_id(self) -> Mapping[str, Kernel]:
        return MappingProxyType({k.id: k for k in self.kernels})

    @cached_property
    def op_of_kernel(self) -> OpOfKernel:
        return MappingProxyType({k.id: k.op.name for k in self.kernels})

    def kernels_of(self, op: str) -> tuple[Kernel, ...]:
        return self._by_op.get(op, ())

    def with_item(self, item: Op | Kernel, origin: str) -> Catalog:
        if isinstance(item, Op):
            if item.name in self.ops and self.ops[item.name] is not item:
                raise RegistrationError(f"op {item.name!r} from {origin} is already registered by "
                                        f"{self.origins.get(item.name, 'layerzero')}")
            return Catalog({**self.ops, item.name: item}, self.kernels,
                           {**self.origins, item.name: origin})
        known = self.ops.get(item.op.name)
        if known is None:
            raise RegistrationError(
                f"kernel {item.id!r} from {origin} is for the op {item.op.name!r}, which is not "
                f"registered; known ops: {', '.join(sorted(self.ops))}")
        if known is not item.op:
            raise RegistrationError(
                f"kernel {item.id!r} from {origin} was declared for another op called "
                f"{item.op.name!r}; declare it with the registered one: lz.op({item.op.name!r})")
        for option, versions in (("version", item.version), ("torch", item.torch)):
            if not is_version_range(versions):
                raise RegistrationError(
                    f"kernel {item.id!r} from {origin}: {option}={versions!r} is not a "
                    "version range; write it like '>=2.5,<3'")
        if item.id in self.by_id:
            raise RegistrationError(f"kernel {item.id!r} from {origin} is already registered by "
                                    f"{self.origins.get(item.id, 'layerzero')}; unregister it "
                                    "first")
        return Catalog(self.ops, (*self.kernels, item), {**self.origins, item.id: origin})

    def without(self, name: str) -> Catalog:
        """Returns the catalog without `name`: an op, a kernel, a backend, or a whole plugin."""
        ops = {name} & self.ops.keys()
        removed = {k.id for k in self.kernels if name in (k.id, k.op.name)}
        if not removed and not ops:
            from_plugin = {n for n, origin in self.origins.items()
                           if origin.partition(" ")[0] == name}
            ops = from_plugin & self.ops.keys()
            removed = {k.id for k in self.kernels if k.backend == name or k.id in from_plugin
                       or k.op.name in ops}
        if not removed and not ops:
            near = nearest(name, {*self.ops, *self.by_id, *(k.backend for k in self.kernels)})
            raise RegistrationError(f"nothing is registered as {name!r}; "
                                    + (f"did you mean {near!r}?" if near else "lz list shows all"))
        return Catalog({n: o for n, o in self.ops.items() if n not in ops},
                       tuple(k for k in self.kernels if k.id not in removed),
                       {n: o for n, o in self.origins.items() if n not in removed | ops})


def builtin_op(name: str) -> Op:
    op: Op = importlib.import_module(f"layerzero.ops.{name}").OP
    return op


def builtin_ops() -> dict[str, Op]:
    return {name: builtin_op(name) for name in OPS}


def discover(again: bool = False) -> tuple[Catalog, list[Event]]:
    """Returns our own ops and kernels and those of plugins, and an event for each plugin that was
    refused. `again` tries those anew that were refused before."""
    kernels = [k for name in BACKENDS
               for k in importlib.import_module(f"layerzero.backends.{name}").KERNELS]
    catalog = Catalog(builtin_ops(), tuple(kernels))
    problems: list[Event] = []
    for group in ENTRY_POINTS:
        for entry, origin in _plugins(group, problems):
            try:
                plugin_probe.check(entry, origin, _items, again)
                extended = catalog
                for item in _items(entry.load(), origin):
                    extended = extended.with_item(item, origin)
                catalog = extended             # all of it or nothing
            except PLUGIN_ERRORS as e:
                problems.append(_plugin_refused(entry, origin, e))
    return catalog, problems


def plugin_policy(catalog: Catalog, again: bool = False) -> tuple[Layer | None, list[Event]]:
    """Returns plugins' policies as the lowest layer, and an event for each one refused."""
    settings: dict[str, Any] = {}
    rules: list[PolicyRule] = []
    problems: list[Event] = []
    ops = {op.name: op.fact_names for op in catalog.ops.values()}
    for entry, origin in _plugins(POLICIES, problems):
        try:
            plugin_probe.check(entry, origin, _policy_layer, again)
            layer = _policy_layer(entry.load(), origin)
            for rule in layer.rules:
                rule.check(ops)
            conflicts = [n for n, value in layer.settings.items()
                         if settings.get(n, value) != value]
            if conflicts:
                name = conflicts[0]
                raise RegistrationError(
                    f"plugin {origin} sets {name} to {layer.settings[name]!r}, another one "
                    f"set it to {settings[name]!r}; decide it in the policy file and drop one")
            settings |= layer.settings
            rules += layer.rules
        except PLUGIN_ERRORS as e:
            problems.append(_plugin_refused(entry, origin, e))
    return Layer("default", settings, tuple(rules)) if settings or rules else None, problems


def _plugins(group: str, problems: list[Event]) -> Iterator[tuple[Any, str]]:
    """Yields the entry points of a group with their origin, for this release of LayerZero."""
    installed = getattr(importlib.import_module("layerzero"), "__version__", "")
    for entry in importlib.metadata.entry_points(group=group):
        origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
        required = _required_release(entry.dist)
        if not installed or satisfies(installed, required):
            yield entry, origin
        else:
            problems.append(BackendUnavailable(kernel=entry.name, reason=Reason(
                Code.VERSION_CONFLICT, f"layerzero {required}",
                f"{installed} (plugin {entry.name} of {origin})")))


def _required_release(distribution: Any) -> str:
    """Returns the versions of LayerZero that a package depends on; "" for any."""
    # slow to import, and not needed without plugins
    from packaging.requirements import InvalidRequirement, Requirement
    for text in (distribution.requires or ()) if distribution else ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if (requirement.name.lower() == "layerzero"
            and (requirement.marker is None or requirement.marker.evaluate())):
            return str(requirement.specifier)
    return ""


def _plugin_refused(entry: Any, origin: str, error: BaseException) -> Event:
    return BackendUnavailable(kernel=entry.name, reason=Reason(
        Code.IMPORT_FAILED, f"plugin {entry.name} of {origin}",
        str(error) if isinstance(error, plugin_probe.PluginHarmful)
        else f"{type(error).__name__}: {error}"))


def _policy_layer(plugin: object, origin: str) -> Layer:
    """Makes a layer of a mapping with rules and settings, or of a module with one as POLICY."""
    policy = getattr(plugin, "POLICY", plugin)
    if not isinstance(policy, Mapping) or not policy.keys() <= {"rules", "settings"}:
        raise RegistrationError(
            f"plugin {origin} offers {str(policy)[:80]} as its policy; wanted is a mapping POLICY "
            "with rules, settings or both")
    if not all(isinstance(rule, PolicyRule) for rule in policy.get("rules", ())):
        raise RegistrationError(
            f"plugin {origin}: the rules of a policy are made with lz.PolicyRule.of(...)")
    return Layer("default", policy.get("settings", {}),
                 tuple(replace(r, origin=origin) for r in policy.get("rules", ())))


def _items(plugin: object, origin: str) -> Iterable[Op | Kernel]:
    """Returns what a plugin offers: an Op, a Kernel, a list, or a module's OP or KERNELS."""
    if isinstance(plugin, (Op, Kernel)):
        return (plugin,)
    items = plugin if isinstance(plugin, (tuple, list)) else (
        *((plugin.OP,) if hasattr(plugin, "OP") else ()), *getattr(plugin, "KERNELS", ()))
    for item in items:
        if not isinstance(item, (Op, Kernel)):
            raise RegistrationError(
                f"plugin {origin} offers a {type(item).__name__}; wanted are Op and Kernel")
    if not items:
        raise RegistrationError(
            f"plugin {origin} offers {type(plugin).__name__} without OP or KERNELS")
    return items
