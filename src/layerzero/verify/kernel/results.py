"""Checks what a kernel returns before its numbers: shapes and dtypes, whose memory it is, and who
else holds it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.formulas.block_masks import is_block_mask
from .process_state import holders


class Complaint(NamedTuple):
    """What is wrong: a kind, which diagnosis.py interprets, and a text."""

    kind: str
    text: str


def find_wrong_shapes(got: Sequence[Any], declared: Sequence[Tensor]) -> Iterator[Complaint]:
    if len(got) != len(declared):
        yield Complaint("shape", f"returned {len(got)} results, the contract says {len(declared)}")
    for i, (a, b) in enumerate(zip(got, declared)):
        if not isinstance(a, Tensor):
            yield Complaint("shape", f"result {i} is {a!r}, the contract says a tensor")
        elif a.shape != b.shape or a.dtype != b.dtype or a.device.type != b.device.type:
            yield Complaint("dtype" if a.shape == b.shape else "shape",
                            f"result {i} is {tuple(a.shape)} {a.dtype} on {a.device.type}, the "
                            f"contract says {tuple(b.shape)} {b.dtype} on {b.device.type}")


def find_wrong_container(answer: Any) -> Iterator[Complaint]:
    """One result is a tensor, several are a tuple: callers test for either."""
    if isinstance(answer, list) or (isinstance(answer, tuple) and len(answer) == 1):
        yield Complaint("shape", f"returned a {type(answer).__name__} of {len(answer)}, not a "
                                 f"{'tensor' if len(answer) == 1 else 'tuple'}")


def find_aliasing(runs: Sequence[tuple[Any, ...]],
                  values: Mapping[str, Any]) -> Iterator[Complaint]:
    inputs = {storage_address(v): name for name, v in values.items() if isinstance(v, Tensor)
              and v.numel()}
    for i, t in enumerate(runs[0]):
        if not isinstance(t, Tensor) or not t.numel():
            continue
        if storage_address(t) in inputs:
            yield Complaint("aliasing",
                            f"result {i} shares memory with {inputs[storage_address(t)]}")
        if any(isinstance(u, Tensor) and u.numel() and storage_address(u) == storage_address(t)
               for other in runs[1:] for u in other):
            yield Complaint("aliasing", f"result {i} shares memory with the result of another call")
        for j, other in enumerate(runs[0][:i]):
            if (isinstance(other, Tensor) and other.numel()
                    and storage_address(other) == storage_address(t) and _overlap(other, t)):
                yield Complaint("aliasing", f"result {i} shares memory with result {j}")
        if t.numel() > 1 and any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride())):
            yield Complaint("aliasing", f"result {i} has several indices for one element of memory")


def outlives_its_caller(run: Callable[[], Sequence[Any]]) -> bool:
    """Is a result that nobody refers to any more kept, as by its own node of the graph? Python
    collects such a circle some time, and knows nothing of how much memory that is. One without
    elements may be an input."""
    kept = [weakref.ref(r) for r in run() if isinstance(r, Tensor) and r.numel()]
    return any(result() is not None for result in kept)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Do two tensors of one storage have a byte in common? Halves of one buffer have none."""
    used = torch.zeros(a.untyped_storage().nbytes(), dtype=torch.bool)
    for t in (a, b):
        size = t.element_size()
        places = used.as_strided((*t.shape, size), (*(s * size for s in t.stride()), 1),
                                 t.storage_offset() * size)
        if bool(places.any()):
            return True
        places.fill_(True)
    return False


def storage_address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def find_foreign_memory(results: Sequence[Any], values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yields what a caller cannot use as his own: a Parameter, an inference tensor outside that
    mode, a gradient that nobody asked for, memory that the kernel still holds."""
    held = _held_objects(results)              # first: what follows refers to them too
    tensors = [t for t in results if isinstance(t, Tensor)]
    inputs = [v for v in values.values() if isinstance(v, Tensor)]
    addresses = {storage_address(v) for v in inputs}
    kinds = {type(v) for v in inputs} | {Tensor}
    inference = torch.is_inference_mode_enabled() or any(v.is_inference() for v in inputs)
    recording = torch.is_grad_enabled()
    # a mask of a function may have a tensor of its own
    wanted = any(v.requires_grad for v in inputs) or any(map(is_block_mask, values.values()))
    for i, t in enumerate(tensors):
        if type(t) not in kinds or isinstance(t, torch.nn.Parameter):
            yield Complaint("result", f"result {i} is a {type(t).__name__}, not a plain tensor")
        if t.is_inference() and not inference:
            yield Complaint("result", f"result {i} is an inference tensor, which autograd refuses")
        if t.requires_grad and not (recording and wanted):
            yield Complaint("result", f"result {i} requires a gradient where none is recorded")
        if (recording and wanted) or not t.numel():
            continue                           # autograd may keep what it needs
        storage = t.untyped_storage()
        address = storage.data_ptr()
        if address in addresses:
            continue
        owners = {id(o) for r in tensors for o in (r, r._base) if o is not None
                  and (o is t or storage_address(o) == address)}
        count = holders(storage)
        if held[i] or (count is not None and count > len(owners)):
            yield Complaint("result", f"the kernel still holds the memory of result {i}")


def _held_objects(results: Sequence[Any]) -> list[bool]:
    """Tells for each tensor whether someone else refers to it, as the kernel that keeps it does."""
    objects = [*results, torch.empty(0)]       # the last one is ours alone
    counts = [sys.getrefcount(objects[i]) for i in range(len(objects))]
    return [count > counts[-1] + 1 for r, count in zip(results, counts) if isinstance(r, Tensor)]


def are_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    def plain(t: Tensor) -> Tensor:
        if t.dtype.itemsize == 1:
            return t.view(torch.uint8)
        return t.nan_to_num(nan=12345.0) if t.is_floating_point() else t

    return all(torch.equal(plain(x), plain(y)) for x, y in zip(a, b))


def has_holes(out: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
    """Does a result have NaN where the expected one has none, or the integers that fill fresh
    memory?"""
    for x, y in zip(out, truth):
        if x.is_floating_point() and x.dtype.itemsize > 1 and bool((x.isnan() & ~y.isnan()).any()):
            return True
        if not x.is_floating_point() and x.numel() and x.dtype != torch.bool:
            if (bool((x == torch.iinfo(x.dtype).max).any())
                and not bool((y == torch.iinfo(x.dtype).max).any())):
                return True
    return False


def compare_values(got: Sequence[tuple[Any, ...]], want: tuple[Any, ...],
                   values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Compares results that are no tensors: they must equal the reference's in every run, and have
    lists of their own, which a caller may append to."""
    given, *others = (frozenset(_lists_in(v)) for v in (tuple(values.values()), *got))
    if others[0] & given or any(others[0] & lists for lists in others[1:]):
        yield Complaint("aliasing", "a list of the result is that of " + (
            "an argument" if others[0] & given else "another call's"))
    if len(others[0]) < len([*_lists_in(got[0])]):
        yield Complaint("aliasing", "one list stands in two places of the result")
    differing = next((g for g in got if g != want), None)
    if differing is not None:
        i = next((i for i, (g, w) in enumerate(zip(differing, want)) if g != w), 0)
        texts = [repr(results[i]) if len(results) > i else "nothing" for results in (differing,
                                                                                     want)]
        start = next((at for at, (a, b) in enumerate(zip(*texts)) if a != b), 0)
        start = start - 40 if start > 250 else 0       # texts may begin alike
        got_text, want_text = (f"{'...' if start else ''}{text[start:start + 300]}"
                               for text in texts)
        yield Complaint("error", f"{got_text} instead of {want_text}")


def _lists_in(value: Any) -> Iterator[int]:
    """Yields the lists of a value, also within others and within the fields of a result."""
    if isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield id(value)
        for element in value:
            if not isinstance(element, (int, str)):
                yield from _lists_in(element)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _lists_in(getattr(value, field.name))
