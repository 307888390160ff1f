"""What a kernel makes of its inputs and what it returns, looked at where nobody waits for it.

Of a kernel that is not part of this library, the first call of every remembered choice is looked at: its result must
be what the op describes, and where it fails its inputs must be what they were, by torch's version counters and by a
checksum, since a write through a pointer counts no version. Then the choice runs bare but for the versions (the native
path reads them in a nanosecond or two). After a fault, checksums are taken again for a while.
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

from ..machine import faults
from ..machine.faults import InputsChanged, WrongResult
from ..spec import codegen
from ..spec.kernel import Kernel
from ..spec.op import Op

SAMPLED = 1 << 20              # bytes of each input that a checksum reads; of more, this much spread over all of it
ALL = 1 << 62
BLOCK = 1 << 12                # bytes that are read in one piece where a tensor is sampled
CLEAN = 20                     # calls after a fault that are looked at
OURS = "layerzero.backends."
OUR_PACKAGES = ("", "torch", "triton")      # in which our own kernels are written
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_ours(kernel: Kernel) -> bool:
    """Is it a kernel of this library, made of torch's operators or of our own code? Those check before they write, and
    the contract's tests hold their results and inputs to what is looked at here."""
    module = getattr(kernel.load, "__module__", "") or ""
    return module.startswith(OURS) and (kernel.package in OUR_PACKAGES or kernel.package.startswith(OURS))


# what the inputs were

class Snapshot:
    """The state of a call's inputs: versions, and with `most` > 0 checksums of that many bytes of each."""

    def __init__(self, values: Sequence[Any], most: int) -> None:
        self.most = most
        self.versions = [_version(v) for v in values]
        self.checksums = [checksum(v, most) if most and isinstance(v, Tensor) else None for v in values]

    def changed(self, values: Sequence[Any]) -> list[int]:
        """The places of the values that are not what they were."""
        return [i for i, value in enumerate(values) if isinstance(value, Tensor) and (
            self.versions[i] != _version(value)
            or (self.checksums[i] is not None and not _same(self.checksums[i], checksum(value, self.most))))]


def _version(value: Any) -> int | None:
    """None: nothing counts the writes into it."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def checksum(t: Tensor, most: int) -> Any:
    """A number that depends on every bit of (a sample of) a tensor and on its place; on a device, one that is computed
    there without waiting. None: it cannot be read."""
    if t.device.type == "meta" or t.layout is not torch.strided or not t.numel() or t.element_size() not in _BITS:
        return None
    try:
        bits = _sampled(t.detach().view(_BITS[t.element_size()]), most).contiguous()
        if bits.is_cpu:
            return zlib.crc32((ctypes.c_char * bits.nbytes).from_address(bits.data_ptr()))
        flat = bits.reshape(-1).to(torch.int64)
        place = torch.arange(1, 2 * flat.numel(), 2, device=flat.device)
        return (flat * (place * 0x9E3779B1)).sum()
    except faults.FAULTS as e:                 # no memory for the sample, or a device that is lost
        if faults.classify(e) == "sticky":
            raise
        return None


def _same(a: Any, b: Any) -> bool:
    return b is None or bool(a == b)


def _sampled(t: Tensor, most: int) -> Tensor:
    """The tensor where it is small; else blocks spread over all of it, its ends among them."""
    for axis, stride in enumerate(t.stride()):
        if stride == 0:                        # the same memory again and again
            t = t.narrow(axis, 0, 1)
    if t.numel() * t.element_size() <= most:
        return t
    if not t.is_contiguous():
        axis = max(range(t.dim()), key=lambda i: t.shape[i])
        step = min(-(-t.numel() * t.element_size() // most), t.shape[axis])
        thin = t[(slice(None),) * axis + (slice((t.shape[axis] - 1) % step, None, step),)]
        return thin if thin.numel() * t.element_size() <= most or step == 1 else _sampled(thin, most)
    flat, block = t.view(-1), max(BLOCK // t.element_size(), 1)
    blocks = flat[flat.numel() % block:].view(-1, block)
    step = -(-len(blocks) * BLOCK // most)
    return torch.cat((flat[:block], blocks[(len(blocks) - 1) % step::step].reshape(-1)))


# what came out

def wrong_result(op: Op, values: Mapping[str, Any], out: Any) -> WrongResult | None:
    """How a result differs from what the op says a call like this gives; None: it does not, or the op cannot say."""
    told = None if op.read is not None else _described(op, values)
    if out is None:
        return WrongResult("a result" if told is None else ", ".join(map(_text, results_of(told))), "None")
    if told is None:
        return None
    wants, got = results_of(told), results_of(out)
    if isinstance(told, Tensor) is not isinstance(out, Tensor) or len(wants) != len(got):
        return WrongResult(", ".join(map(_text, wants)), f"{type(out).__name__} of {', '.join(map(_text, got))}")
    home = next((v.device for v in values.values() if isinstance(v, Tensor)), None)
    home = values[op.main_tensor].device if isinstance(values.get(op.main_tensor), Tensor) else home
    for i, (want, tensor) in enumerate(zip(wants, got)):
        which = f"result {i} of " if len(wants) > 1 else ""
        if not isinstance(want, Tensor):
            continue
        if not isinstance(tensor, Tensor):
            return WrongResult(which + _text(want), f"{which}{_text(tensor)}")
        fits = tensor.shape == want.shape and tensor.dtype is want.dtype and tensor.layout is torch.strided
        if not fits or (home is not None and tensor.device != home):
            return WrongResult(f"{which}{_text(want)} on {home}", f"{which}{_text(tensor)} on {tensor.device}")
        for name, value in values.items():
            if isinstance(value, Tensor) and name not in op.in_place and _overlap(value, tensor):
                return WrongResult(f"{which}{_text(want)} in memory of its own", f"{which}memory of the input {name}")
    return None


def _described(op: Op, values: Mapping[str, Any]) -> Any:
    try:
        return op.meta(**{n: v.detach().to("meta") if isinstance(v, Tensor) else v for n, v in values.items()})
    except faults.FAULTS:                      # a description that does not foresee this call says nothing of it
        return None


def results_of(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _overlap(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or not a.numel() or not b.numel() or a.layout is not torch.strided:
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    return a0 < b1 and b0 < a1


def _extent(t: Tensor) -> tuple[int, int]:
    """The storage, not only what the tensor shows of it: a slice of an input keeps all of it alive."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


# a kernel that is looked at

class Guard:
    """A kernel whose calls are looked at. After `clean` good ones, what it guards stands in its places."""

    def __init__(self, op: Op, kernel: Kernel, run: Callable[..., Any], most: int, clean: int | None = 1) -> None:
        self.op, self.kernel, self.run = op, kernel, run
        self.names = tuple(p.name for p in op.params)
        self.most = most
        self.left = clean                      # None: every call is looked at
        self.bare = run if is_ours(kernel) else versions_watched(op, run)
        self.places: list[tuple[Any, str]] = []

    def stands_in(self, owner: Any, name: str) -> None:
        """Let `owner.name` be what is guarded once that is proven."""
        self.places.append((owner, name))

    def __call__(self, *values: Any) -> Any:
        if torch._C._get_tracing_state() is not None or _get_current_dispatch_mode() is not None:
            return self.run(*values)           # whoever records what is done here is not to find our own reading
        before = Snapshot(values, self.most)
        try:
            out = self.run(*values)
        except faults.FAULTS as fault:
            if not _ends_the_call(fault):      # nor could a lost device be read
                raise_for([self.names[i] for i in before.changed(values)], fault)
            raise
        if self.kernel.backend != "reference" or out is None:      # the reference is what the others must be like
            wrong = wrong_result(self.op, dict(zip(self.names, values)), out)
            if wrong is not None:
                raise_for([self.names[i] for i in before.changed(values)], wrong)
                raise wrong
        self._count()
        return out

    def _count(self) -> None:
        if self.left is None:
            return
        self.left -= 1                         # threads may both count: it need not be exact
        if self.left <= 0:
            for owner, name in self.places:
                if getattr(owner, name) is self:
                    setattr(owner, name, self.bare)


def raise_for(changed: Sequence[str], fault: BaseException) -> None:
    if changed and not _ends_the_call(fault):
        raise InputsChanged(changed, fault) from fault


def _ends_the_call(fault: BaseException) -> bool:
    """Is no other kernel tried after it anyway?"""
    return isinstance(fault, (faults.PlanExhausted, faults.Hung, *faults.PASSED_ON)) or faults.classify(fault) in (
        "sticky", "lost", "capture")


def versions_watched(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, of which a fault tells whether it has written into its inputs first, as far as torch counts writes."""
    make = _watchers.get(op)
    if make is None:
        make = _watchers[op] = _watcher(op)
    watched: Callable[..., Any] = make(run)
    return watched


_watchers: WeakKeyDictionary[Op, Callable[..., Any]] = WeakKeyDictionary()


def _watcher(op: Op) -> Callable[..., Any]:
    """Written out for the parameters of an op: a loop would cost more than the reading."""
    names = ", ".join(p.name for p in op.params)
    tensors = [p.name for p in op.params if p.kind == "tensor"]

    def told(after: Sequence[Any], before: Sequence[int | None], fault: BaseException) -> None:
        raise_for([n for n, v, version in zip(tensors, after, before) if version != _version(v)], fault)

    scope: dict[str, Any] = {"FAULTS": faults.FAULTS, "TOLD": told}
    body = [*(f"_v{i} = None if {n} is None or {n}.is_inference() else {n}._version" for i, n in enumerate(tensors)),
            "try:", f"    return RUN({names})", "except FAULTS as _fault:",
            f"    TOLD(({''.join(n + ', ' for n in tensors)}), "
            f"({''.join(f'_v{i}, ' for i in range(len(tensors)))}), _fault)", "    raise"]
    lines = ["def make(RUN):", f"    def watched({names}):", *("        " + line for line in body),
             "    return watched"]
    exec(codegen.compile("\n".join(lines), f"{op.name} watched"), scope)  # made above from declared names only
    make: Callable[..., Any] = scope["make"]
    return make


def bare(run: Callable[..., Any]) -> Callable[..., Any]:
    return run.run if isinstance(run, Guard) else run


def place(run: Callable[..., Any], owner: Any, name: str) -> None:
    """Where `run` is a guard: what it guards takes its place in `owner` later."""
    if isinstance(run, Guard):
        run.stands_in(owner, name)
