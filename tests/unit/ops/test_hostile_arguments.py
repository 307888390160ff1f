"""One caller never costs another: what the contract cannot read is refused before any kernel runs.

Generated over the catalog, so a new op is attacked too: every scalar parameter gets numbers that
overflow, every tensor parameter gets layouts, subclasses and dtypes that no kernel knows. Whatever
comes of it, no breaker moves and the next good call is served by the same kernel as before.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from helpers import path_of

import layerzero as lz
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.errors import InvalidCall, LayerZeroError, SpecError
from layerzero.spec.op import INT32, Op
from layerzero.spec.reason import Code
from layerzero.world import snapshot as worlds

OPS = [op for op in worlds.current().catalog.ops.values() if op.read is None]
pytestmark = pytest.mark.filterwarnings("ignore")


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Raising(torch.Tensor):
    """A subclass that no torch function takes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ArithmeticError(f"{func} is not for me")


class Wrapping(torch.Tensor):
    """A subclass without storage of its own, whose every operation fails."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype,
                                                   device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise LookupError(f"{func} is not for me")


def jagged(t: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([t, t], layout=torch.jagged)


def quantized(t: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


STRANGE_TENSORS = {
    "sparse coo": lambda t: t.to_sparse(),
    "sparse csr": lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(), "jagged": jagged,
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "plain subclass": lambda t: t.as_subclass(Plain),
    "raising subclass": lambda t: t.as_subclass(Raising),
    "wrapper subclass": Wrapping, "meta": lambda t: t.to("meta"),
    "complex": lambda t: t.to(torch.complex64), "quantized": quantized,
    "bool": lambda t: t.to(torch.bool), "int16": lambda t: t.to(torch.int16),
    "scalar": lambda t: torch.zeros((), dtype=t.dtype), "list": lambda t: t.tolist(),
    "None": lambda t: None, "numpy": lambda t: t.float().numpy(), "number": lambda t: 3,
    "text": lambda t: "t",
    "uninitialized": lambda t: torch.nn.parameter.UninitializedParameter()}
UNREADABLE = ("sparse coo", "sparse csr", "mkldnn", "nested", "uninitialized")
NUMBERS = {
    "2**70": 2**70, "-2**70": -2**70, "2**63": 2**63, "-2**63 - 1": -2**63 - 1, "10**400": 10**400,
    "10**5000": 10**5000, "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "True": True,
    "numpy int": np.int64(1), "numpy float": np.float32(1.0), "text": "1", "complex": 1j,
    "tensor": torch.ones(1), "list": [1]}


def good_call(op: Op) -> dict[str, object]:
    """The first case of the op, with every optional tensor that some case has."""
    return op.inputs(**op.cases[0], dtype=torch.float32)


def attempt(function, inputs: dict[str, object]) -> BaseException | None:
    """The error of a call, which must be one of ours, or what a hostile subclass itself raised
    while it was read."""
    try:
        function(**inputs)
    except (LayerZeroError, ArithmeticError, LookupError) as error:
        assert isinstance(error, LayerZeroError) or "is not for me" in str(error), repr(error)
        return error
    return None


def check_nobody_paid(op: Op, function, inputs: dict[str, object], before: str) -> None:
    assert not worlds.current().health, f"{op.name}: a breaker has moved"
    function(**inputs)
    assert lz.which(op.name, **inputs) == before


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_scalars_that_no_kernel_can_read(op, path):
    function, inputs = path_of(op, path), good_call(op)
    # remembered: a bad call must not ride on a good one's key
    function(**inputs)
    before = lz.which(op.name, **inputs)
    for p in op.params:
        if p.kind not in ("int", "float"):
            continue
        for name, value in NUMBERS.items():
            for _ in range(4):                 # more often than any breaker's threshold
                error = attempt(function, {**inputs, p.name: value})
            if type(value) is int and p.kind == "int" and op.limits[p.name][1] >= value > 0:
                continue                       # a seed may be as large as torch's own
            assert isinstance(error, InvalidCall) and p.name in str(error), (p.name, name, error)
    check_nobody_paid(op, function, inputs, before)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_switches_and_words_of_another_type(op, path):
    function, inputs = path_of(op, path), good_call(op)
    before = lz.which(op.name, **inputs)
    for p in op.params:
        if p.kind not in ("bool", "str"):
            continue
        for value in (2**70, 1, 0.5, b"x", "no such word", [True], torch.tensor(True),
                      np.bool_(True), object()):
            error = attempt(function, {**inputs, p.name: value})
            assert isinstance(error, InvalidCall), (p.name, value, error)
    check_nobody_paid(op, function, inputs, before)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_tensors_that_no_kernel_can_read(op, path):
    function, inputs = path_of(op, path), good_call(op)
    function(**inputs)
    before = lz.which(op.name, **inputs)
    for p in op.params:
        if p.kind != "tensor":
            continue
        base = inputs.get(p.name)
        base = torch.ones(2, 3) if base is None else base
        for name, make in STRANGE_TENSORS.items():
            try:
                strange = make(base)
            except (RuntimeError, NotImplementedError, TypeError):
                continue                       # this torch has no such form of it
            for _ in range(4):
                error = attempt(function, {**inputs, p.name: strange})
            if name in UNREADABLE or name in ("list", "numpy", "number", "text"):
                assert isinstance(error, InvalidCall), (p.name, name, error)
            if name == "None" and not p.optional:
                assert isinstance(error, InvalidCall), (p.name, error)
    check_nobody_paid(op, function, inputs, before)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_both_paths_keep_every_number_in_its_range(op):
    """The generated Python and the native table refuse the same numbers as the careful reader."""
    dispatcher, inputs = dispatcher_of(op.name), good_call(op)
    dispatcher.public(**inputs)
    for name, (low, high) in op.limits.items():
        is_float = op.by_name[name].kind == "float"
        for value in (math.nan, math.inf, -math.inf,
                      2**64) if is_float else (int(low) - 1, int(high) + 1, 2**64):
            call = {**inputs, name: value}
            assert dispatcher.key_of(*dispatcher.order_arguments((), call)) is None, (name, value)
            if dispatcher.native is not None:
                assert dispatcher.native.compiled.key(**call) is None, (name, value)


def test_what_a_range_says():
    x = torch.ones(2, 8)
    with pytest.raises(InvalidCall,
                       match="a finite float, or an int of 64 bits, got an int of 1329 bits") as caught:
        lz.rms_norm(x, eps=10**400)
    assert caught.value.codes == (Code.VALUE_OUT_OF_RANGE,)
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(InvalidCall,
                       match="window_left must be between -2147483648 and 2147483647, got "
                             "2147483648"):
        lz.attention(q, q, q, window_left=2**31)
    with pytest.raises(InvalidCall, match="x must be a strided tensor, got sparse_coo"):
        lz.rms_norm(x.to_sparse())
    assert (lz.op("attention").limits["window_left"] == INT32
            and lz.op("sample").limits["seed"] == (-2**63, 2**64 - 1))


@pytest.mark.parametrize("ranges, match", [
    ({"nothing": INT32}, "no int or float parameter"), ({"eps": (1.0, 2.0)}, "its default"),
    ({"eps": (2.0, 1.0)}, "must lie within"), ({"eps": (0.0, math.inf)}, "must lie within")])
def test_a_range_that_cannot_be_is_refused_when_the_op_is_declared(ranges, match):
    from dataclasses import replace
    with pytest.raises(SpecError, match=match):
        replace(lz.op("rms_norm"), ranges=ranges)


def test_the_largest_window_is_the_whole_sequence(path):
    attention = path_of("attention", path)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 9, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = attention(q, k, v, window_left=INT32[1], window_right=INT32[1],
                        causal_align="bottom_right")
    torch.testing.assert_close(got, attention(q, k, v))


class HostileInt(int):
    """Equal to nothing and no index: remembered in a key, it would be asked by the calls of others.
    """

    def __eq__(self, other):
        raise ZeroDivisionError("eq")

    def __index__(self):
        raise ZeroDivisionError("index")

    __hash__ = int.__hash__


class HostileFloat(float):
    def __float__(self):
        raise ZeroDivisionError("float")

    def __hash__(self):
        raise ZeroDivisionError("hash")


class HostileText(str):
    def __eq__(self, other):
        raise ZeroDivisionError("eq")

    def __hash__(self):
        raise ZeroDivisionError("hash")


class HostileObject:
    """Raises whatever it is asked."""

    def __getattr__(self, name):
        raise ZeroDivisionError(name)

    def __eq__(self, other):
        raise ZeroDivisionError("eq")

    def __hash__(self):
        raise ZeroDivisionError("hash")

    def __repr__(self):
        raise ZeroDivisionError("repr")

    def __bool__(self):
        raise ZeroDivisionError("bool")

    def __len__(self):
        raise ZeroDivisionError("len")

    def __iter__(self):
        raise ZeroDivisionError("iter")


def nested(depth):
    nest = []
    for _ in range(depth):
        nest = [nest]
    return nest


DEEP = nested(5000)                            # takes milliseconds to make
HOSTILE = {
    "int": lambda: HostileInt(1), "float": lambda: HostileFloat(1.0),
    "text": lambda: HostileText("x"), "object": HostileObject, "deep": lambda: DEEP,
    "huge": lambda: list(range(10**5)), "long": lambda: "x" * 10**5, "surrogate": lambda: "\ud800",
    "zero byte": lambda: "\0", "bytes": lambda: b"x" * 10**5, "range": lambda: range(10**9),
    "ellipsis": lambda: ..., "type": lambda: int, "numpy text": lambda: np.str_("x"),
    "digits": lambda: 10**5000}


@pytest.mark.parametrize("op", list(worlds.current().catalog.ops.values()), ids=lambda op: op.name)
def test_objects_that_raise_when_they_are_asked(op, path):
    """Also of the operations that read objects; and often: what is remembered of one must not hurt
    the next."""
    function = path_of(op, path) if op.tensors else dispatcher_of(op.name).public
    inputs = good_call(op)
    function(**inputs)
    for p in op.params:
        for name, make in HOSTILE.items():
            if p.kind == "generator" and name == "object":
                continue
            for _ in range(2):
                try:
                    function(**{**inputs, p.name: make()})
                except LayerZeroError as e:
                    assert len(str(e)) < 3000, (p.name, name, str(e)[:200])
    assert not worlds.current().health
    function(**inputs)


@pytest.mark.parametrize("backend", [
    HostileObject(), 10**5000, "\ud800", HostileText("torch"), nested(5000), "*" * 10**5, ""],
    ids=lambda value: type(value).__name__)
def test_a_backend_of_any_kind(backend):
    with pytest.raises(LayerZeroError) as caught:
        lz.rms_norm(torch.ones(2, 8), backend=backend)
        raise lz.errors.ConfigError("a text that compares as it likes is read as the text it is")
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("name", ["attention", "varlen_attention", "gated_delta_rule"])
def test_a_scale_of_zero_is_a_number_like_any_other(name):
    op = lz.op(name)
    with lz.recording() as recorder:              # which describes the kind of call
        getattr(lz, name)(**{**good_call(op), "scale": 0.0})
    assert [call.arguments["scale"] for call in recorder.calls] == [0.0]


@pytest.mark.parametrize("starts, name", [([13, 9, 0], "cu_seqlens_q"), ([0, 9, 14], "cu_seqlens_k")])
@pytest.mark.parametrize("backend", ["torch.per_sequence", "reference.varlen_attention"])
def test_starts_of_sequences_that_fall_or_end_too_late_are_refused(starts, name, backend):
    """On x86 torch's attention of no rows ends the process."""
    q, k, v = torch.randn(3, 13, 2, 16)
    starts_of = {"cu_seqlens_q": [0, 4, 13], "cu_seqlens_k": [0, 4, 13], name: starts}
    with pytest.raises(InvalidCall, match=name):
        lz.varlen_attention(q, k, v, **{n: torch.tensor(s, dtype=torch.int32)
                                        for n, s in starts_of.items()},
                            max_seqlen_q=9, max_seqlen_k=9, return_lse=True, backend=backend)
