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

_ID = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")

# The implementations behind torch's scaled_dot_product_attention, as torch.nn.attention.SDPBackend names them.
SDPA_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")
SDPA = "SDPA"                                  # a kernel that calls scaled_dot_product_attention, which obeys by itself


@dataclass(frozen=True)
class Direct:
    """A call with no Python frame between the dispatcher and the library.

    `args` and `kwargs` name the op's parameters, or hold a constant (`Const`, `ByFact`) or the `LastSize` of a tensor.
    Of a tuple result, `item` picks one element and `first` keeps the first few. `otherwise` serves the calls in which
    a parameter that only it takes is not at its default.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None = None
    first: int | None = None
    otherwise: Callable[..., Any] | None = None

    @property
    def params(self) -> tuple[str, ...]:
        """The op's parameters that it reads, each as often as it does."""
        values = (*self.args, *self.kwargs.values())
        return tuple(v.param if isinstance(v, LastSize) else v for v in values if not isinstance(v, (Const, ByFact)))

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that some constant depends on."""
        return tuple(v.fact for v in (*self.args, *self.kwargs.values()) if isinstance(v, ByFact))

    def settled(self, known: Mapping[str, Any]) -> Direct:
        """The same call for calls of which so much is known: its constants chosen."""
        def chosen(value: Any) -> Any:
            return value.chosen(known) if isinstance(value, ByFact) else value

        return replace(self, args=tuple(map(chosen, self.args)), kwargs={k: chosen(v) for k, v in self.kwargs.items()})


@dataclass(frozen=True)
class Const:
    value: Any


@dataclass(frozen=True)
class ByFact:
    """One constant where a fact is known to have this value, else another, which must be right for every call."""

    fact: str
    value: Any
    then: Any
    otherwise: Any

    def chosen(self, known: Mapping[str, Any]) -> Const:
        return Const(self.then if self.fact in known and known[self.fact] == self.value else self.otherwise)


@dataclass(frozen=True)
class LastSize:
    """x.shape[-1:] of a tensor parameter: what torch's norms call normalized_shape."""

    param: str


def direct(fn: Callable[..., Any], *args: Any, item: int | None = None, first: int | None = None,
           otherwise: Callable[..., Any] | None = None, **kwargs: Any) -> Direct:
    return Direct(fn, args, kwargs, item, first, otherwise)


@dataclass(frozen=True, eq=False)
class Kernel:
    """`load` imports the library and returns what to call; it runs on first selection, never at import.

    What it returns takes the op's parameters by name, or a subset: a parameter it does not take must
    be at its default, which its rules have to say.
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
    prior: float = 1.0                         # guessed speed relative to the eager formula, until measured
    overhead_us: float = 0.0                   # guessed fixed cost of one call
    workspace: str = "0"                       # bytes beyond inputs and outputs
    shared_memory: str = "0"                   # bytes that a block of a GPU must have at least; 0: any has enough
    variants: tuple[str, ...] = ()             # values of the op's variant parameter it takes natively
    deterministic: bool = True
    deterministic_backward: bool = True
    differentiable: bool = True
    graph_safe: bool = True
    traceable: bool = True                     # made of torch ops only, so torch.compile can look inside
    baseline: bool = False                     # what torch itself would run: the default, and all under lz.disabled()
    less_work: str = ""                        # why it does less than the baseline by construction, in words
    less_work_when: tuple[Condition, ...] = () # where that is so; everywhere, if empty
    jit: bool = False                          # compiles on first use: never chosen unwarmed
    plans_each_size: bool = False              # the first call of every new size takes tens of milliseconds
    sdpa_backend: str = ""                     # one of SDPA_BACKENDS, or SDPA; "": serves while none is switched off
    replayable: bool = False                   # tells spec/replay.py all that it launches
    untested: bool = False                     # written from source, not run on the hardware it is for
    note: str = ""
    built: Callable[[], bool | Reason] | None = None     # is what it is compiled to there, or why can it not be made?

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise RegistrationError(f"kernel id {self.id!r} must look like 'backend.name' (a-z, 0-9, _)")
        for rule in (*self.requires, *self.less_work_when):
            self.op.check_rule(rule, f"kernel {self.id!r}")
        self.op.check_expression(self.workspace, f"kernel {self.id!r}: workspace")
        self.op.check_expression(self.shared_memory, f"kernel {self.id!r}: shared_memory")
        if self.prior <= 0:
            raise RegistrationError(f"kernel {self.id!r}: prior must be > 0, got {self.prior}")
        if self.sdpa_backend not in ("", SDPA, *SDPA_BACKENDS):
            raise RegistrationError(f"kernel {self.id!r}: sdpa_backend must be one of {', '.join(SDPA_BACKENDS)}, "
                                    f"{SDPA}, or empty, got {self.sdpa_backend!r}")

    @property
    def backend(self) -> str:
        return self.id.partition(".")[0]

    @property
    def health(self) -> str:
        """What a fault of this kernel counts against: its library, or for torch the kernel alone."""
        return self.backend if self.package else self.id

    def does_less(self, facts: Facts) -> bool:
        """Is this a call for which the kernel claims to do less work than the baseline?"""
        return bool(self.less_work) and all(rule.check(facts) is None for rule in self.less_work_when)

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
        """The same kernel under other limits, as a capabilities descriptor may state them."""
        return replace(self, requires=requires, **changes)


Kernel.json_layout = Layout(tuple(f.name for f in fields(Kernel) if f.name not in ("op", "load", "built")))


def accepted_params(kernel_id: str, op: Op, run: Callable[..., Any] | Direct) -> tuple[str, ...]:
    """Which of the op's parameters `run` takes; refuses one that wants something the op does not have."""
    if isinstance(run, Direct):
        named = [*run.params, *(accepted_params(kernel_id, op, run.otherwise) if run.otherwise is not None else ())]
    else:
        try:
            signature = inspect.signature(run)
        except (TypeError, ValueError) as e:
            raise RegistrationError(
                f"kernel {kernel_id!r}: cannot read the signature of {run!r}; wrap it in direct(...)") from e
        named = []
        for p in signature.parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise RegistrationError(
                    f"kernel {kernel_id!r}: takes *args or **kwargs; name the parameters of lz.{op.name}")
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
