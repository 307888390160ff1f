"""One implementation of one op: a declaration, and the few lines that load it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from .codec import Layout, decode, encode_fields
from .errors import RegistrationError
from .op import Op, import_path, resolve_import_path
from .reason import Reason
from .rules import Condition, Facts
from .rules.expr import parse

_ID = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")

# The implementations of scaled_dot_product_attention, by their torch.nn.attention.SDPBackend.
SDPA_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")
# calls scaled_dot_product_attention, which obeys them
SDPA = "SDPA"


@dataclass(frozen=True)
class Direct:
    """A library function that the dispatcher calls with no Python frame in between.

    Each of `args` and `kwargs` is the name of an op parameter, a constant (`Const`, `ByFact`) or
    the `LastSize` of a tensor; the function may be a `ByFact`. Of a tuple result, `item` picks one
    element and `first` keeps the first few. `otherwise` serves calls that set a parameter which
    only `otherwise` takes.
    """

    fn: Any                                    # a function, or a ByFact of two
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None = None
    first: int | None = None
    otherwise: Callable[..., Any] | None = None

    @property
    def params(self) -> tuple[str, ...]:
        """The op parameters it reads, with repetitions."""
        values = (*self.args, *self.kwargs.values())
        return tuple(v.param if isinstance(v, LastSize) else v for v in values
                     if not isinstance(v, (Const, ByFact)))

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that its function and its constants depend on."""
        return tuple(fact for v in (self.fn, *self.args, *self.kwargs.values())
                     if isinstance(v, ByFact) for fact in v.facts)

    def resolve(self, known: Mapping[str, Any]) -> Direct:
        """Returns the same for calls with the facts in `known`: `ByFact`s become constants."""
        def constant(value: Any) -> Any:
            return value.constant(known) if isinstance(value, ByFact) else value

        return replace(self, fn=self.fn.constant(known).value if isinstance(self.fn, ByFact)
                       else self.fn, args=tuple(map(constant, self.args)),
                       kwargs={k: constant(v) for k, v in self.kwargs.items()})


@dataclass(frozen=True)
class Const:
    value: Any


@dataclass(frozen=True)
class ByFact:
    """The constant `then` where `fact` is known to be `value`, else `otherwise`, which may be of
    another fact."""

    fact: str
    value: Any
    then: Any
    otherwise: Any

    @property
    def facts(self) -> tuple[str, ...]:
        return self.fact, *(self.otherwise.facts if isinstance(self.otherwise, ByFact) else ())

    def constant(self, known: Mapping[str, Any]) -> Const:
        if self.fact in known and known[self.fact] == self.value:
            return Const(self.then)
        return (self.otherwise.constant(known) if isinstance(self.otherwise, ByFact)
                else Const(self.otherwise))


@dataclass(frozen=True)
class LastSize:
    """x.shape[-1:] of a tensor parameter: what torch's norms call normalized_shape."""

    param: str


def direct(fn: Callable[..., Any] | ByFact, *args: Any, item: int | None = None,
           first: int | None = None, otherwise: Callable[..., Any] | None = None,
           **kwargs: Any) -> Direct:
    return Direct(fn, args, kwargs, item, first, otherwise)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One implementation of `op`.

    `load` imports the library and returns the function to call; it runs on first selection, never
    at import. That function takes the op's parameters by name, or some of them: `requires` must
    hold the others at their defaults.
    """

    json_layout: ClassVar[Layout]
    id: str                                    # backend.name
    op: Op
    load: Callable[[], Callable[..., Any] | Direct]
    requires: tuple[Condition, ...] = ()
    package: str = ""                          # importable name; "" for what torch itself brings
    distribution: str = ""                     # name on the package index, where it differs
    version: str = ""                          # of the distribution: ">=2.5,<3"
    torch: str = ""                            # range of torch versions it is known to work with
    # guessed speed relative to the eager formula, until measured
    prior: float = 1.0
    overhead_us: float = 0.0                   # guessed fixed cost of one call
    workspace: str = "0"                       # bytes beyond inputs and outputs
    # bytes that a block of a GPU must have at least; 0: any has enough
    shared_memory: str = "0"
    # values of the op's variant parameter it takes natively
    variants: tuple[str, ...] = ()
    deterministic: bool = True
    deterministic_backward: bool = True
    # types of devices on which it is not, since sums are made in the order in which threads come
    backward_varies_on: tuple[str, ...] = ()
    # a row's result does not depend on its neighbours or on how many there are
    batch_invariant: bool = False
    # nor does a head's or a column's, so that ranks may share them
    tp_invariant: bool = False
    # slow for its sake: serves only where one of these is demanded, or by name
    only_invariant: bool = False
    # where these two hold; everywhere, if empty
    invariant_when: tuple[Condition, ...] = ()
    differentiable: bool = True
    graph_safe: bool = True
    # made of torch ops only, so torch.compile can look inside
    traceable: bool = True
    # what torch runs: the default, and all under lz.disabled()
    baseline: bool = False
    # why it does less than the baseline by construction, in words
    less_work: str = ""
    less_work_when: tuple[Condition, ...] = () # where that is so; everywhere, if empty
    jit: bool = False                          # compiles on first use: never chosen unwarmed
    # the first call of every new size takes tens of milliseconds
    plans_each_size: bool = False
    # one of SDPA_BACKENDS, or SDPA; "": serves while none is switched off
    sdpa_backend: str = ""
    replayable: bool = False                   # reports every launch to spec/replay.py
    # written from source, not run on the hardware it is for
    untested: bool = False
    note: str = ""
    # whether its binary exists, or why it cannot
    built: Callable[[], bool | Reason] | None = None

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise RegistrationError(
                f"kernel id {self.id!r} must look like 'backend.name' (a-z, 0-9, _)")
        for rule in (*self.requires, *self.less_work_when, *self.invariant_when):
            self.op.check_rule(rule, f"kernel {self.id!r}")
        if self.batch_invariant or self.tp_invariant:
            self._check_invariance()
        self.op.check_expression(self.workspace, f"kernel {self.id!r}: workspace")
        self.op.check_expression(self.shared_memory, f"kernel {self.id!r}: shared_memory")
        if self.prior <= 0:
            raise RegistrationError(f"kernel {self.id!r}: prior must be > 0, got {self.prior}")
        if self.sdpa_backend not in ("", SDPA, *SDPA_BACKENDS):
            raise RegistrationError(
                f"kernel {self.id!r}: sdpa_backend must be one of {', '.join(SDPA_BACKENDS)}, "
                f"{SDPA}, or empty, got {self.sdpa_backend!r}")

    def _check_invariance(self) -> None:
        """Raise where the kernel would serve some batches and not others: then a row's result
        would depend on the batch by way of the choice."""
        op = self.op
        if (self.batch_invariant and not op.batch_dims) or (self.tp_invariant
                                                            and not op.shard_dims):
            raise RegistrationError(f"kernel {self.id!r} is declared invariant; lz.{op.name} must "
                                    "name its batch_dims or shard_dims, so that it can be proven")
        dims = {*((op.batch_dims or ()) if self.batch_invariant else ()),
                *((op.shard_dims or ()) if self.tp_invariant else ())}
        read = {leaf.fact for rule in (*self.requires, *self.invariant_when)
                for leaf in rule.leaves()
                if not (leaf.test == "ge" and leaf.value == 1)}       # that it is not empty
        # a ratio of sizes that ranks share alike, as of heads to KV heads, is the same on all
        shared = {f"{a} // {b}" for a in op.shard_dims or () for b in op.shard_dims or ()}
        sized = sorted(fact for fact in read if fact in dims or (
            fact in op.derived and op.derived[fact] not in shared
            and dims & {*parse(op.derived[fact]).names}))
        if sized:
            raise RegistrationError(
                f"kernel {self.id!r} is declared invariant, and its rules read "
                f"{', '.join(sized)}: whether it serves would depend on the batch or on the number "
                "of ranks; drop the rule or the declaration")

    @property
    def backend(self) -> str:
        return self.id.partition(".")[0]

    @property
    def health(self) -> str:
        """The circuit breaker its faults count against: its library's, or its own for torch."""
        return self.backend if self.package else self.id

    @property
    def isolated(self) -> bool:
        """Returns whether it runs in a worker process (world/registry/isolation.py)."""
        return self.id.startswith("worker.")

    def does_less(self, facts: Facts) -> bool:
        """Returns whether the kernel claims to do less work than the baseline for this call."""
        return (bool(self.less_work)
                and all(rule.check(facts) is None for rule in self.less_work_when))

    def backward_repeats(self, device: str) -> bool:
        """Returns whether the backward pass gives the same bits every time on such a device."""
        return self.deterministic_backward and device not in self.backward_varies_on

    def is_invariant(self, to: str, facts: Facts) -> bool:
        """Returns whether results of such calls keep their bits, "batch" or "tp": whatever else is
        in the batch, or on how many ranks heads and columns are. Those of text do, and of an op
        that ranks do not share."""
        dims, declared = ((self.op.batch_dims, self.batch_invariant) if to == "batch"
                          else (self.op.shard_dims, self.tp_invariant))
        return dims == () or not self.op.tensors or (
            declared and all(rule.check(facts) is None for rule in self.invariant_when))

    def reasons(self, facts: Facts) -> Iterator[Reason]:
        return (reason for rule in self.requires if (reason := rule.check(facts)) is not None)

    def to_json(self) -> dict[str, Any]:
        return {**encode_fields(self), "op": self.op.name, "load": import_path(self.load)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], op: Op,
                  resolve: Callable[[str], Any] = resolve_import_path) -> Kernel:
        declared = {key: value for key, value in data.items() if key not in ("op", "load")}
        return decode(cls, declared, "kernel", op=op, load=resolve(data["load"]))

    def constrained(self, requires: tuple[Condition, ...], **changes: Any) -> Kernel:
        """Returns the same kernel with other limits, as stated in a capabilities descriptor."""
        return replace(self, requires=requires, **changes)


# What a proof rests on belongs to the code: no file of limits states it.
_PROVEN = ("batch_invariant", "tp_invariant", "only_invariant", "invariant_when",
           "backward_varies_on")
Kernel.json_layout = Layout(tuple(f.name for f in fields(Kernel)
                                  if f.name not in ("op", "load", "built", *_PROVEN)))


def accepted_params(kernel_id: str, op: Op, run: Callable[..., Any] | Direct) -> tuple[str, ...]:
    """Returns the op parameters that `run` takes; RegistrationError if the op lacks one."""
    if isinstance(run, Direct):
        named = [*run.params, *(accepted_params(kernel_id, op, run.otherwise)
                                if run.otherwise is not None else ())]
    else:
        try:
            signature = inspect.signature(run)
        except (TypeError, ValueError) as e:
            raise RegistrationError(
                f"kernel {kernel_id!r}: cannot read the signature of {run!r}; wrap it in "
                "direct(...)") from e
        named = []
        for p in signature.parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise RegistrationError(
                    f"kernel {kernel_id!r}: takes *args or **kwargs; name the parameters of "
                    f"lz.{op.name}")
            if p.name in op.by_name:
                named.append(p.name)
            elif p.default is p.empty:
                raise RegistrationError(
                    f"kernel {kernel_id!r} wants a parameter {p.name!r}; lz.{op.name} has "
                    f"{', '.join(op.by_name)}")
    unknown = [n for n in named if n not in op.by_name]
    if unknown:
        raise RegistrationError(f"kernel {kernel_id!r} wants {', '.join(map(repr, unknown))}; "
                                f"lz.{op.name} has {', '.join(op.by_name)}")
    return tuple(dict.fromkeys(named))
