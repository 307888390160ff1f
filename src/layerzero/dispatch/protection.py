"""Guards against foreign kernels that return a wrong result or change their inputs and then fail.

The first call of every entry whose kernel is not part of this library is checked: its result must
be what the op describes, and if it fails, its inputs must be unchanged, by torch's version counters
and by a checksum, since a write through a pointer counts no version. After that only the versions
are compared (the native path reads them in a nanosecond or two). After a fault, checksums are taken
again for a while.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..files import codegen
from ..machine import faults
from ..machine.faults import InputsChanged, WrongResult
from ..spec.kernel import Kernel
from ..spec.op import Op

# bytes of each input that a checksum reads, taken from all over it
SAMPLE_BYTES = 1 << 20
ALL_BYTES = 1 << 62
BLOCK_BYTES = 1 << 12                # bytes of one piece of a sample
CLEAN_CALLS = 20                     # calls that are guarded after a fault
OURS = "layerzero.backends."
OUR_PACKAGES = ("", "torch", "triton")         # of our own kernels
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_ours(kernel: Kernel) -> bool:
    """Is it a kernel of this library, made of torch's operators or of our own code? Those check
    before they write, and the contract tests check their results and inputs."""
    module = getattr(kernel.load, "__module__", "") or ""
    return (module.startswith(OURS)
            and (kernel.package in OUR_PACKAGES or kernel.package.startswith(OURS)))


# the state of the inputs

class InputState:
    """The versions of a call's inputs, and with `max_bytes` > 0 checksums of that many bytes."""

    def __init__(self, values: Sequence[Any], max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.versions = [_version(v) for v in values]
        self.checksums = [checksum(v, max_bytes) if max_bytes and isinstance(v, Tensor) else None
                          for v in values]

    def changed(self, values: Sequence[Any]) -> list[int]:
        """Return the indices of the values that have changed."""
        return [i for i, value in enumerate(values) if isinstance(value, Tensor) and (
            self.versions[i] != _version(value)
            or (self.checksums[i] is not None
                and not _same(self.checksums[i], checksum(value, self.max_bytes))))]


def _version(value: Any) -> int | None:
    """Return None for what counts no writes."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def checksum(t: Tensor, max_bytes: int) -> Any:
    """Return a number that depends on every bit of (a sample of) a tensor and on its position; None
    if unreadable. On a device it is a tensor, computed there without waiting."""
    if (t.device.type == "meta" or t.layout is not torch.strided or not t.numel()
        or t.element_size() not in _BITS):
        return None
    try:
        bits = _sample(t.detach().view(_BITS[t.element_size()]), max_bytes).contiguous()
        if bits.is_cpu:
            return zlib.crc32((ctypes.c_char * bits.nbytes).from_address(bits.data_ptr()))
        flat = bits.reshape(-1).to(torch.int64)
        position = torch.arange(1, 2 * flat.numel(), 2, device=flat.device)
        return (flat * (position * 0x9E3779B1)).sum()
    except faults.FAULTS as e:                 # no memory for the sample, or the device is lost
        if faults.classify(e) == "sticky":
            raise
        return None


def _same(a: Any, b: Any) -> bool:
    return b is None or bool(a == b)


def _sample(t: Tensor, max_bytes: int) -> Tensor:
    """Return a small tensor itself; of a large one blocks from all over it, including both ends."""
    for axis, stride in enumerate(t.stride()):
        if stride == 0:                        # the axis repeats the same memory
            t = t.narrow(axis, 0, 1)
    if t.numel() * t.element_size() <= max_bytes:
        return t
    if not t.is_contiguous():
        axis = max(range(t.dim()), key=lambda i: t.shape[i])
        step = min(-(-t.numel() * t.element_size() // max_bytes), t.shape[axis])
        thin = t[(slice(None),) * axis + (slice((t.shape[axis] - 1) % step, None, step),)]
        return (thin if thin.numel() * t.element_size() <= max_bytes or step == 1
                else _sample(thin, max_bytes))
    flat, block = t.view(-1), max(BLOCK_BYTES // t.element_size(), 1)
    blocks = flat[flat.numel() % block:].view(-1, block)
    step = -(-len(blocks) * BLOCK_BYTES // max_bytes)
    return torch.cat((flat[:block], blocks[(len(blocks) - 1) % step::step].reshape(-1)))


# the result

def wrong_result(op: Op, values: Mapping[str, Any], out: Any) -> WrongResult | None:
    """Return how a result differs from what the op describes; None if not, or if it cannot say."""
    expected = None if not op.tensors else _expected_result(op, values)
    if out is None:
        return WrongResult("a result" if expected is None
                           else ", ".join(map(_describe, as_tuple(expected))), "None")
    if expected is None:
        return None
    expected_parts, parts = as_tuple(expected), as_tuple(out)
    if (isinstance(expected, Tensor) is not isinstance(out, Tensor)
        or len(expected_parts) != len(parts)):
        return WrongResult(", ".join(map(_describe, expected_parts)),
                           f"{type(out).__name__} of {', '.join(map(_describe, parts))}")
    device = next((v.device for v in values.values() if isinstance(v, Tensor)), None)
    device = (values[op.main_tensor].device if isinstance(values.get(op.main_tensor), Tensor)
              else device)
    for i, (want, tensor) in enumerate(zip(expected_parts, parts)):
        label = f"result {i} of " if len(expected_parts) > 1 else ""
        if not isinstance(want, Tensor):
            continue
        if not isinstance(tensor, Tensor):
            return WrongResult(label + _describe(want), f"{label}{_describe(tensor)}")
        fits = (tensor.shape == want.shape and tensor.dtype is want.dtype
                and tensor.layout is torch.strided)
        if not fits or (device is not None and tensor.device != device):
            return WrongResult(f"{label}{_describe(want)} on {device}",
                               f"{label}{_describe(tensor)} on {tensor.device}")
        for name, value in values.items():
            if isinstance(value, Tensor) and name not in op.in_place and _overlap(value, tensor):
                return WrongResult(f"{label}{_describe(want)} in memory of its own",
                                   f"{label}memory of the input {name}")
    return None


def _expected_result(op: Op, values: Mapping[str, Any]) -> Any:
    try:
        return op.meta(**{n: v.detach().to("meta") if isinstance(v, Tensor) else v
                          for n, v in values.items()})
    except faults.FAULTS:                      # the op's meta function does not foresee this call
        return None


def as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or not a.numel() or not b.numel() or a.layout is not torch.strided:
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    return a0 < b1 and b0 < a1


def _extent(t: Tensor) -> tuple[int, int]:
    """Return the extent of the whole storage: a slice of an input keeps all of it alive."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# the guard

class Guard:
    """A kernel whose calls are checked, until `clean_calls` of them were good."""

    def __init__(self, op: Op, kernel: Kernel, run: Callable[..., Any], max_bytes: int,
                 clean_calls: int | None = 1) -> None:
        self.op, self.kernel, self.run = op, kernel, run
        self.names = tuple(p.name for p in op.params)
        self.max_bytes = max_bytes
        self.calls_left = clean_calls          # None: every call is checked
        self.unguarded = run if is_ours(kernel) else watch_versions(op, run)
        self.owners: list[tuple[Any, str]] = []

    def unguard_later(self, owner: Any, name: str) -> None:
        """Set `owner.name` to the unguarded kernel after the last clean call."""
        self.owners.append((owner, name))

    def __call__(self, *values: Any) -> Any:
        if torch._C._get_tracing_state() is not None or _get_current_dispatch_mode() is not None:
            return self.run(*values)           # our own reading must not be recorded
        before = InputState(values, self.max_bytes)
        try:
            out = self.run(*values)
        except faults.FAULTS as fault:
            if not _is_final(fault):      # a lost device could not be read either
                raise_if_changed([self.names[i] for i in before.changed(values)], fault)
            raise
        # the reference defines the result
        if self.kernel.backend != "reference" or out is None:
            wrong = wrong_result(self.op, dict(zip(self.names, values)), out)
            if wrong is not None:
                raise_if_changed([self.names[i] for i in before.changed(values)], wrong)
                raise wrong
        self._count()
        return out

    def _count(self) -> None:
        if self.calls_left is None:
            return
        self.calls_left -= 1                   # threads may both count: it need not be exact
        if self.calls_left <= 0:
            for owner, name in self.owners:
                if getattr(owner, name) is self:
                    setattr(owner, name, self.unguarded)


def raise_if_changed(changed: Sequence[str], fault: BaseException) -> None:
    if changed and not _is_final(fault):
        raise InputsChanged(changed, fault) from fault


def _is_final(fault: BaseException) -> bool:
    """Is no other kernel tried after this fault anyway?"""
    return (isinstance(fault, (faults.PlanExhausted, faults.Hung, *faults.PASSED_ON))
            or faults.classify(fault) in ("sticky", "lost", "capture"))


def watch_versions(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` so that a fault tells if it came after a write into an input."""
    make = _watchers.get(op)
    if make is None:
        make = _watchers[op] = _generate_watcher(op)
    watched: Callable[..., Any] = make(run)
    return watched


_watchers: WeakKeyDictionary[Op, Callable[..., Any]] = WeakKeyDictionary()


def _generate_watcher(op: Op) -> Callable[..., Any]:
    """Generate the wrapper for an op's parameters: a loop costs more than reading versions."""
    names = ", ".join(p.name for p in op.params)
    tensors = [p.name for p in op.params if p.kind == "tensor"]

    def check(after: Sequence[Any], before: Sequence[int | None], fault: BaseException) -> None:
        raise_if_changed([n for n, v, version in zip(tensors, after, before)
                          if version != _version(v)], fault)

    scope: dict[str, Any] = {"FAULTS": faults.FAULTS, "CHECK": check}
    body = [*(f"_v{i} = None if {n} is None or {n}.is_inference() else {n}._version"
              for i, n in enumerate(tensors)),
            "try:", f"    return RUN({names})", "except FAULTS as _fault:",
            f"    CHECK(({''.join(n + ', ' for n in tensors)}), "
            f"({''.join(f'_v{i}, ' for i in range(len(tensors)))}), _fault)", "    raise"]
    lines = ["def make(RUN):", f"    def watched({names}):", *("        " + line for line in body),
             "    return watched"]
    # made above from declared names only
    exec(codegen.compile("\n".join(lines), f"{op.name} watched"), scope)
    make: Callable[..., Any] = scope["make"]
    return make


def without_guard(run: Callable[..., Any]) -> Callable[..., Any]:
    return run.run if isinstance(run, Guard) else run


def unguard_later(run: Callable[..., Any], owner: Any, name: str) -> None:
    """Has `run`, if a guard, set `owner.name` to the unguarded kernel after its last clean call."""
    if isinstance(run, Guard):
        run.unguard_later(owner, name)
