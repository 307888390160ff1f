"""The compiled call path and the generated Python are one thing twice: the same keys, hits, results
and errors.
"""

from __future__ import annotations

import enum
import gc
import itertools
import random
import sys
import traceback

import numpy as np
import pytest
import synthetic
import torch
from helpers import (
    ATTENTION,
    RMS_NORM,
    Fake,
    allow_only,
    outcome,
    qkv,
    register,
    rows,
    same_outcome,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import MAKERS, neighbour, synthetic_sweeps

import layerzero as lz
from layerzero.spec.errors import InvalidArgumentType, KernelExecutionError
from layerzero.world import snapshot as worlds

steady = settings(deadline=None, max_examples=60, derandomize=True,
                  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def keys_of(dispatcher, call):
    args, kwargs = call
    return (dispatcher.key_of(*dispatcher.order_arguments(args, kwargs)),
            dispatcher.native.compiled.key(*args, **kwargs))


def shuffle_arguments(rng, dispatcher, call):
    """The same call with its arguments given otherwise: by position, by name, at their defaults, in
    another order."""
    values = dispatcher.order_arguments(*call)
    params = dispatcher.op.params
    positional = rng.randrange(1 + sum(not p.keyword_only for p in params))
    rest = [(p, v) for p, v in list(zip(params, values))[positional:]
            if p.required or v is not p.default or rng.random() < 0.3]
    rng.shuffle(rest)
    return values[:positional], {rng.choice((str, built))(p.name): v for p, v in rest}


def built(text):
    """The same text as a new object, which is not interned."""
    return "".join(list(text))


# keys

@pytest.mark.parametrize("op", sorted(MAKERS))
def test_the_same_calls_share_keys(both, op):
    dispatcher, rng = both(op), random.Random(3)
    native_of: dict = {}
    python_of: dict = {}
    without = shared = 0
    swept = ((call,) for call in synthetic_sweeps()) if op == "synthetic" else ()
    drawn = (MAKERS[op](rng) for _ in range(1500))
    varied = ((call, neighbour(rng, call),
               shuffle_arguments(rng, dispatcher, call)) for call in drawn)
    for calls in itertools.chain(swept, varied):
        for each in calls:
            python, compiled = keys_of(dispatcher, each)
            assert (python is None) == (compiled is None), each[1]
            if python is None:
                without += 1
                continue
            shared += python in native_of
            assert native_of.setdefault(python,
                                        compiled) == compiled, "one key in Python, two natively"
            assert python_of.setdefault(compiled,
                                        python) == python, "one key natively, two in Python"
    assert shared > 500 and len(native_of) > 100
    assert op != "rms_norm" or without > 10, "a width of 0 was among the calls"


@pytest.mark.parametrize("mode", ["no_grad", "inference", "deterministic", "override"])
def test_the_same_calls_share_keys_in_every_mode(both, mode):
    dispatcher = both("attention")
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode,
                "deterministic": Deterministic,
                "override": lambda: lz.prefer("torch.sdpa_math")}
    rng = random.Random(4)
    calls = [MAKERS["attention"](rng) for _ in range(150)]
    calls += [neighbour(rng, c) for c in calls]
    with contexts[mode]():
        keys = [keys_of(dispatcher, call) for call in calls]
    for python, compiled in keys:
        assert (python is None) == (compiled is None)
        assert [k[0] == python for k in keys] == [k[1] == compiled for k in keys]


class Deterministic:
    """As torch.use_deterministic_algorithms, which imports the compiler first."""

    def __enter__(self):
        torch._C._set_deterministic_algorithms(True)

    def __exit__(self, *_):
        torch._C._set_deterministic_algorithms(False)


def test_modes_that_rules_read_split_both_keys(both):
    dispatcher = both("attention")
    q, k, v = qkv()
    trained = (q.clone().requires_grad_(), k, v)
    calls = [((q, k, v), {}), (trained, {})]
    plain = [keys_of(dispatcher, c) for c in calls]
    assert plain[0][0] != plain[1][0] and plain[0][1] != plain[1][1]
    with torch.no_grad():
        assert keys_of(dispatcher, calls[1]) == plain[0], "no rule asks for the mode itself"
    with Deterministic():
        strict = keys_of(dispatcher, calls[0])
    assert strict[0] != plain[0][0] and strict[1] != plain[0][1]


@steady
@given(rng=st.randoms(use_true_random=False), name=st.sampled_from(sorted(MAKERS)))
def test_a_pair_of_calls_has_one_key_or_two(both, rng, name):
    dispatcher = both(name)
    call = MAKERS[name](rng)
    near = shuffle_arguments(rng, dispatcher, neighbour(rng, call))
    (a, x), (b, y) = keys_of(dispatcher, call), keys_of(dispatcher, near)
    assert (a is None) == (x is None) and (b is None) == (y is None)
    assert (a == b) == (x == y)


def test_sizes_too_large_for_64_bits_go_to_python(both):
    dispatcher = both("synthetic")
    x = torch.empty(1).expand(2**20, 2**40, 1)
    y = torch.empty(1).expand(2**20, 2**40, 2**2)
    assert dispatcher.native.compiled.key(x, y) is not None
    wide = torch.empty(1).expand(2**40, 2**21)
    assert dispatcher.native.compiled.key(x[0], wide.expand(2**40, 2**21)) is not None
    assert dispatcher.native.compiled.key(torch.empty(1).expand(2**40, 1),
                                          torch.empty(1).expand(2**40, 2**22)) is not None
    huge = torch.empty(1).expand(0, 2**40, 1), torch.empty(1).expand(0, 2**40, 2**40)
    assert dispatcher.native.compiled.key(*huge) is None, "seq * depth does not fit"
    assert dispatcher.native.compiled.key(x[0], y[0], steps=2**70) is None
    assert dispatcher.native.compiled.key(x[0], y[0], limit=2**62) is None, "limit * 2 does not fit"


def test_a_program_too_large_for_the_native_path_goes_to_python(both):
    dispatcher = both("attention")
    q, k, v = qkv()
    dispatcher.public(q, k, v)
    assert dispatcher.native.compiled.lookup(q, k, v) is not None
    many = [{"seq_k": n} for n in range(100, 6000)]
    lz.configure(rules=tuple(lz.PolicyRule.of("boost", "torch.sdpa", "attention", w, factor=2.0)
                             for w in many))
    assert dispatcher.native.compiled.key(q, k,
                                          v) is None and dispatcher.native.compiled.size() == 0
    torch.testing.assert_close(dispatcher.public(q, k, v), ATTENTION.reference(q, k, v))
    assert dispatcher.key_of(*dispatcher.order_arguments((q, k, v), {})) in dispatcher.cache.table


def test_many_thresholds_are_all_told_apart(both):
    dispatcher = both("attention")
    numbers = list(range(520, 760, 2))
    lz.configure(rules=(lz.PolicyRule.of("boost", "torch.sdpa", "attention", {"seq_k": numbers},
                                         factor=2.0),))
    q = torch.empty(1, 1, 1, 8)
    calls = [((q, *(torch.empty(1, 1, n, 8),) * 2), {}) for n in range(515, 765)]
    keys = [keys_of(dispatcher, call) for call in calls]
    assert len({python for python, _ in keys}) == len({compiled for _, compiled in keys}) == len(
        numbers) + 1


# hits

@pytest.mark.parametrize("op", ["attention", "varlen_attention", "rms_norm", "layer_norm",
                                "add_rms_norm", "synthetic"])
def test_both_find_the_same_entry_and_give_the_same_result(both, op):
    dispatcher, rng = both(op), random.Random(5)
    contract = dispatcher.op
    for case in contract.cases:
        values = contract.inputs(**case)
        call = shuffle_arguments(rng, dispatcher, ((), values))
        first = outcome(dispatcher.public, call)
        again = outcome(dispatcher.public, call)
        assert first[0] == "returned", first
        assert same_outcome(first, again)
        assert same_outcome(first, outcome(dispatcher.python_call, call))
        key = dispatcher.key_of(*dispatcher.order_arguments(*call))
        entry = dispatcher.native.compiled.lookup(*call[0], **call[1])
        if key is None:
            assert entry is None
            continue
        assert entry is dispatcher.cache.table.get(key)
        assert entry.plan.kernel == lz.which(op, *call[0], **call[1])


def test_an_entry_made_by_python_is_found_natively_after_one_call(both):
    dispatcher = both("rms_norm")
    x = rows()
    dispatcher.python_call(x)
    assert dispatcher.native.compiled.lookup(x) is None
    dispatcher.public(x)
    entry = dispatcher.native.compiled.lookup(x)
    assert (entry is not None
            and entry is dispatcher.cache.table[dispatcher.key_of(*dispatcher.order_arguments((x,),
                                                                                              {}))])


def test_how_arguments_are_given_does_not_matter(both):
    dispatcher = both("attention")
    q, k, v = qkv()
    out = dispatcher.public(q, k, v, None, 0.0, True)
    entry = dispatcher.native.compiled.lookup(q, k, v, is_causal=True)
    assert entry is not None
    for args, kwargs in [((q, k, v), {"is_causal": True}),
                         ((), {"value": v, "key": k, "query": q, "is_causal": True}),
                         ((q, k), {"value": v, "is_causal": True, "layout": built("bhsd"),
                                   "window_left": -1}),
                         ((q, k, v), {built("is_causal"): True, built("dropout_p"): 0.0}),
                         ((q, k, v, None, 0, True), {})]:
        assert dispatcher.native.compiled.lookup(*args, **kwargs) is entry
        assert torch.equal(dispatcher.public(*args, **kwargs), out)


# errors

class Words(str, enum.Enum):
    BHSD = "bhsd"


class Strange(torch.Tensor):
    pass


WRONG = [
    ((), {}), ((1,), {}), ((1, 2), {}), (("q", "k", "v"), {}), ((0, 1, 2), {"query": 0}),
    ((0, 1, 2), {"quary": 0}), ((0, 1, 2, None, 0.0, False, None, True, "top_left"), {}),
    ((0, 1, 2), {"is_causal": 1}), ((0, 1, 2), {"is_causal": None}),
    ((0, 1, 2), {"window_left": True}), ((0, 1, 2), {"window_left": 1.5}),
    ((0, 1, 2), {"window_left": -2}), ((0, 1, 2), {"window_left": np.int64(3)}),
    ((0, 1, 2), {"dropout_p": "0"}), ((0, 1, 2), {"dropout_p": True}),
    ((0, 1, 2), {"dropout_p": 1.5}), ((0, 1, 2), {"dropout_p": float("nan")}),
    ((0, 1, 2), {"softcap": -1}), ((0, 1, 2), {"scale": "1"}), ((0, 1, 2), {"scale": True}),
    ((0, 1, 2), {"layout": "sbhd"}), ((0, 1, 2), {"layout": None}), ((0, 1, 2), {"layout": 3}),
    ((0, 1, 2), {"layout": []}), ((0, 1, 2), {"causal_align": "middle"}),
    ((0, 1, 2), {"causal_align": []}), ((0, 1, None), {}), ((0, 1, 2, [1]), {}),
    ((0, 1, 2, "int"), {}), ((0, 1, 2), {"scale": torch.ones(1)}),
    ((0, "long", 2), {}), ((0, "wide", "wide"), {}), ((0, "half", 2), {}), ((0, "meta", 2), {}),
    ((0, 1, "meta"), {}), ((0, "flat", 2), {}), (("scalar", 1, 2), {}), ((0, 1, 2, "badmask"), {}),
    ((0, 1, 2), {"alibi_slopes": "mask"}), ((0, 1, 2), {"backend": "nobody"}),
    ((0, 1, 2), {"backend": 3}), ((0, 1, 2), {"policy": 3}),
    ((0, 1, 2), {"return_lse": 0}), (("ints", "ints", "ints"), {}), ((0, "three", "three"), {}),
    ((0, "two", "two"), {"enable_gqa": False}),
]


def materialize(value):
    q, k, v = qkv(heads=4)
    makers = {0: q, 1: k, 2: v, "int": torch.ones(8, 8, dtype=torch.int32),
              "mask": torch.ones(8, 8, dtype=torch.bool), "long": torch.randn(1, 4, 9, 16),
              "wide": torch.randn(1, 4, 8, 17), "half": k.half(),
              "meta": k.to("meta"), "flat": k[0, 0, 0],
              "scalar": torch.tensor(1.0), "ints": q.int(),
              "badmask": torch.ones(3, 8, dtype=torch.bool), "three": torch.randn(1, 3, 8, 16),
              "two": torch.randn(1, 2, 8, 16)}
    return (makers[value] if isinstance(value, (int, str)) and not isinstance(value, bool)
            and value in makers else value)


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize(("args", "kwargs"), WRONG)
def test_a_bad_call_raises_the_same_by_both_paths(both, args, kwargs, remembered):
    """Also where a good call that looks much the same is remembered."""
    dispatcher = both("attention")
    if remembered:
        for _ in range(2):
            dispatcher.public(*qkv(heads=4))
            dispatcher.python_call(*qkv(heads=4))
            dispatcher.public(*qkv(heads=4), is_causal=True, window_left=1)
            dispatcher.public(*qkv(heads=4), torch.ones(8, 8, dtype=torch.bool))
    tensors = {"attn_mask", "alibi_slopes", "query"}
    call = (tuple(materialize(a) if i < 4 else a for i, a in enumerate(args)),
            {k: materialize(v) if k in tensors else v for k, v in kwargs.items()})
    compiled, python = outcome(dispatcher.public, call), outcome(dispatcher.python_call, call)
    assert python[0] == "raised" and compiled == python


@pytest.mark.parametrize("name", ["rms_norm", "synthetic"])
def test_random_damage_raises_or_returns_the_same(both, name):
    dispatcher, rng = both(name), random.Random(6)
    junk = [None, 1, 1.5, True, "sw", "text", [], rows(), rows().half(),
            rows(2, 4).requires_grad_(), torch.tensor(2),
            rows()[:0], rows(3, 16).T, rows().as_subclass(Strange), rows().to_sparse(),
            np.float64(0.5), -1]
    lz.configure(breaker_threshold=10**9)
    raised = 0
    for _ in range(600):
        args, kwargs = shuffle_arguments(rng, dispatcher, ((), dispatcher.op.inputs()))
        args = list(args)
        for _ in range(rng.choice((1, 1, 2))):
            spot = rng.choice([*range(len(args)), *kwargs, "new", "fewer"])
            if spot == "new":
                names = [*(p.name for p in dispatcher.op.params), "nonsense"]
                kwargs[rng.choice(names)] = rng.choice(junk)
            elif spot == "fewer":
                args = args[:-1]
            elif isinstance(spot, int):
                args[min(spot, len(args) - 1)] = rng.choice(junk)
            else:
                kwargs[spot] = rng.choice(junk)
        call = tuple(args), kwargs
        compiled, python = outcome(dispatcher.public, call), outcome(dispatcher.python_call, call)
        assert same_outcome(compiled, python), (call, compiled, python)
        raised += compiled[0] == "raised"
    assert 50 < raised < 590


@pytest.mark.parametrize("odd", [
    {"layout": Words.BHSD}, {"scale": np.float64(0.5)}, {"dropout_p": 0},
    {"softcap": np.float64(0.0)}])
def test_values_that_only_look_unusual_are_served(both, odd):
    dispatcher = both("attention")
    q, k, v = qkv()
    want = dispatcher.python_call(q, k, v,
                                  **{n: float(x) if n != "layout" else "bhsd" for n,
                                     x in odd.items()})
    for _ in range(2):
        assert torch.equal(dispatcher.public(q, k, v, **odd), want)


def test_a_subclass_goes_to_python(both):
    dispatcher = both("rms_norm")
    x = rows().as_subclass(Strange)
    for _ in range(2):
        torch.testing.assert_close(dispatcher.public(x).as_subclass(torch.Tensor),
                                   RMS_NORM.reference(rows()))
    assert (dispatcher.native.compiled.lookup(x) is None
            and dispatcher.native.compiled.key(x) is None)


# modes

@pytest.mark.parametrize("mode", ["autocast", "vmap", "grad_transform"])
def test_modes_that_change_what_torch_does_never_hit(both, mode):
    dispatcher = both("attention")
    q, k, v = qkv(batch=2)
    for _ in range(2):
        dispatcher.public(q, k, v)
    entry = dispatcher.native.compiled.lookup(q, k, v)
    assert entry is not None
    seen = []

    def spy(*tensors):
        seen.append(dispatcher.native.compiled.lookup(*tensors))
        return dispatcher.public(*tensors)

    if mode == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert spy(q, k, v).dtype == torch.bfloat16
    elif mode == "vmap":
        out = torch.vmap(spy)(*(t[:, None] for t in (q, k, v)))
        torch.testing.assert_close(out[:, 0], dispatcher.public(q, k, v))
    else:
        grads = torch.func.grad(lambda q: spy(q, k, v).sum())(q)
        leaf = q.clone().requires_grad_()
        dispatcher.public(leaf, k, v).sum().backward()
        torch.testing.assert_close(grads, leaf.grad)
    assert seen == [None]
    assert dispatcher.native.compiled.lookup(q, k, v) is entry


def test_vmap_over_an_op_whose_rules_read_addresses(both):
    dispatcher = both("synthetic")
    x, y = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 5)
    out = torch.vmap(dispatcher.public)(x, y)
    torch.testing.assert_close(out,
                               torch.stack([dispatcher.python_call(a, b) for a, b in zip(x, y)]))


@pytest.mark.parametrize("path_name", ["public", "python_call"])
def test_gradients_flow(both, path_name):
    run = getattr(both("attention"), path_name)
    inputs = [t.double().requires_grad_() for t in qkv(5, 7)]
    assert torch.autograd.gradcheck(lambda *t: run(*t, is_causal=False), inputs)
    with torch.no_grad():
        assert not run(*inputs).requires_grad
    with torch.inference_mode():
        assert run(*inputs).is_inference()


# the table

def test_the_table_is_bounded_and_keeps_what_is_used(both):
    dispatcher = both("rms_norm")
    lz.configure(cache_size=8)
    hot = rows(3, 10)
    dispatcher.public(hot)
    for n in range(100):
        dispatcher.public(rows(2, 20 + n))
        before = dispatcher.native.compiled.lookup(hot)
        dispatcher.public(hot)
        assert n < 4 or before is not None, "the hot entry was dropped"
        assert dispatcher.native.compiled.size() <= 8 and len(dispatcher.cache.table) <= 8


def test_a_huge_bound_costs_nothing_until_it_is_used(both):
    dispatcher = both("rms_norm")
    lz.configure(cache_size=2**40)
    for n in range(1, 300):
        dispatcher.public(rows(1, n))
    assert dispatcher.native.compiled.size() == len(dispatcher.cache.table) == 299
    for n in range(1, 300):
        assert dispatcher.native.compiled.lookup(rows(1, n)) is not None


def test_an_entry_of_another_epoch_is_refused(both):
    dispatcher = both("rms_norm")
    x = rows(2, 33)
    values = dispatcher.order_arguments((x,), {})
    dispatcher.python_call(x)
    entry = dispatcher.cache.table[dispatcher.key_of(*values)]
    epoch = worlds.current().version("rms_norm")
    assert not dispatcher.native.put(entry, epoch - 1, values, False, None)
    assert not dispatcher.native.put(entry, epoch + 1, values, False, None)
    assert dispatcher.native.compiled.lookup(x) is None
    assert dispatcher.native.put(entry, epoch, values, False, None)
    assert not dispatcher.native.put(entry, epoch, values, False, None), "it is there already"
    assert dispatcher.native.compiled.lookup(x) is entry
    lz.clear_cache()
    assert dispatcher.native.compiled.lookup(x) is None and dispatcher.native.compiled.size() == 0


def test_every_call_is_counted_once(both):
    dispatcher = both("rms_norm")
    kernel = lz.which("rms_norm", rows())
    before = lz.stats().calls["rms_norm"].get(kernel, 0)
    made = 0
    for n in range(1, 5):
        x = rows(n, 24)
        for _ in range(10 * n):
            dispatcher.public(x)
        for _ in range(3):
            dispatcher.python_call(x)
        made += 10 * n + 3
        assert lz.stats().calls["rms_norm"][kernel] == before + made
    lz.clear_cache()
    assert lz.stats().calls["rms_norm"][kernel] == before + made
    dispatcher.public(rows())
    assert lz.stats().calls["rms_norm"][kernel] == before + made + 1


def test_calls_are_counted_also_when_entries_are_swept_away(both):
    dispatcher = both("rms_norm")
    lz.configure(cache_size=8)
    kernel = lz.which("rms_norm", rows())
    before = lz.stats().calls["rms_norm"].get(kernel, 0)
    hot = rows(4, 9)
    for n in range(60):
        for _ in range(5):
            dispatcher.public(hot)
        dispatcher.public(rows(2, 20 + n))
    assert lz.stats().calls["rms_norm"][kernel] == before + 60 * 6


def test_entries_of_an_override_are_apart_and_die_with_it(both):
    dispatcher = both("attention")
    q, k, v = qkv()
    dispatcher.public(q, k, v)
    outside = dispatcher.native.compiled.lookup(q, k, v)
    with lz.prefer("torch.sdpa_math"):
        assert dispatcher.native.compiled.lookup(q, k, v) is None
        dispatcher.public(q, k, v)
        inside = dispatcher.native.compiled.lookup(q, k, v)
        assert inside.plan.kernel == "torch.sdpa_math" != outside.plan.kernel
    assert dispatcher.native.compiled.lookup(q, k, v) is outside
    with lz.prefer("torch.sdpa_math"):
        assert dispatcher.native.compiled.lookup(q, k, v) is inside


# memory

def test_hits_leak_no_references(both):
    """A hundred thousand hits leave every count of references as it was."""
    dispatcher = both("synthetic")
    x, y, mask = torch.ones(2, 3), torch.ones(2, 4), torch.ones(3)
    answer = torch.ones(())
    kernel = lz.Kernel("synthetic.answer", synthetic.OP,
                       lambda: lz.kernels.direct(lambda x: answer, "x"), prior=1e9,
                       less_work="a test")
    lz.register(kernel)
    mode, gain = built("wide"), 0.125
    watched = [x, y, mask, answer, mode, gain, dispatcher.op.by_name["eps"].default, kernel,
               dispatcher.public, dispatcher.recover,
               None]

    def calls(n):
        for _ in range(n):
            dispatcher.public(x, y, mask=mask, mode=mode, gain=gain, limit=None)

    calls(10)
    assert dispatcher.native.compiled.lookup(x, y, mask=mask, mode=mode,
                                             gain=gain).plan.kernel == "synthetic.answer"
    gc.collect()
    before = [sys.getrefcount(o) for o in watched]
    calls(100_000)
    gc.collect()
    after = [sys.getrefcount(o) for o in watched]
    assert after[:-1] == before[:-1]
    assert abs(after[-1] - before[-1]) < 1000, "of None"


def test_keys_lookups_and_refusals_leak_no_references(both):
    dispatcher = both("synthetic")
    x, y = torch.ones(2, 3), torch.ones(2, 4)
    dispatcher.public(x, y)
    entry = dispatcher.native.compiled.lookup(x, y)
    watched = [x, y, entry, dispatcher.op.by_name["eps"].default]
    values = dispatcher.order_arguments((x, y), {})
    gc.collect()
    before = [sys.getrefcount(o) for o in watched]
    for _ in range(5000):
        dispatcher.native.compiled.key(x, y)
        dispatcher.native.compiled.lookup(x, y)
        dispatcher.native.compiled.key(x, "y")
        dispatcher.native.put(entry, worlds.current().version("synthetic"), values, False, None)
        dispatcher.native.collect()
    assert [sys.getrefcount(o) for o in watched] == before


def test_failing_kernels_leak_no_references(both):
    def broken(x, weight=None, eps=1e-6):
        raise RuntimeError("boom")

    lz.register(lz.Kernel("fake.broken", RMS_NORM, lambda: broken, prior=1e6, less_work="a test"))
    allow_only("fake.broken", op="rms_norm")
    lz.configure(breaker_threshold=10**9)
    dispatcher, x = both("rms_norm"), rows()
    for _ in range(3):
        outcome(dispatcher.public, ((x,), {}))
    gc.collect()
    before = sys.getrefcount(x)
    for _ in range(200):
        assert outcome(dispatcher.public, ((x,), {}))[1] is KernelExecutionError
    gc.collect()
    assert sys.getrefcount(x) == before


# faults

@pytest.mark.parametrize("path_name", ["public", "python_call"])
def test_an_exception_keeps_its_traceback(both, path_name):
    def deep_inside(x, weight=None, eps=1e-6):
        raise RuntimeError("boom")

    lz.register(lz.Kernel("fake.deep", RMS_NORM, lambda: deep_inside, prior=1e6,
                          less_work="a test"))
    allow_only("fake.deep", op="rms_norm")
    lz.configure(breaker_threshold=10**9)
    run = getattr(both("rms_norm"), path_name)
    for _ in range(3):
        with pytest.raises(KernelExecutionError, match=r"fake.deep") as caught:
            run(rows())
        cause = caught.value.__cause__
        assert str(cause) == "boom"
        assert "deep_inside" in [frame.name for frame in traceback.extract_tb(cause.__traceback__)]


@pytest.mark.parametrize("path_name", ["public", "python_call"])
@pytest.mark.parametrize("thrown", [KeyboardInterrupt(), SystemExit(3), UserWarning("as an error"),
                                    GeneratorExit()])
def test_what_is_not_a_kernels_fault_passes_through(both, path_name, thrown):
    fake = Fake()
    register(fake)
    run = getattr(both("rms_norm"), path_name)
    run(rows())
    run(rows())
    fake.fault = thrown
    with pytest.raises(type(thrown)) as caught:
        run(rows())
    assert caught.value is thrown and worlds.current().health == {}
    fake.fault = None
    run(rows())


@pytest.mark.parametrize("path_name", ["public", "python_call"])
def test_the_next_kernel_serves_when_one_fails_after_hits(both, path_name):
    fake = Fake()
    register(fake)
    run = getattr(both("rms_norm"), path_name)
    for _ in range(3):
        run(rows())
    fake.fault = ValueError("bad day")
    torch.testing.assert_close(run(x=rows(), eps=1e-6), RMS_NORM.reference(rows()))
    assert fake.calls == 4


def test_a_mistake_found_by_the_kernel_is_the_callers(both):
    """A hit that fails is looked at again: what breaks the contract is said as such."""
    dispatcher = both("varlen_attention")
    good = lz.op("varlen_attention").inputs()
    for _ in range(2):
        dispatcher.public(**good)
    bad = {**good, "scale": "large"}
    compiled, python = outcome(dispatcher.public, ((), bad)), outcome(dispatcher.python_call,
                                                                      ((), bad))
    assert compiled == python and compiled[1] is InvalidArgumentType and "scale" in compiled[2]


# the face

def test_the_native_function_looks_like_the_python_one(both):
    import inspect
    for name in ("attention", "rms_norm", "varlen_attention"):
        dispatcher = both(name)
        assert dispatcher.public.__name__ == dispatcher.python_call.__name__ == name
        assert dispatcher.public.__module__ == dispatcher.python_call.__module__ == "layerzero"
        mine, other = map(inspect.signature, (dispatcher.public, dispatcher.python_call))
        assert list(mine.parameters) == list(other.parameters)
        for p, q in zip(mine.parameters.values(), other.parameters.values()):
            assert (p.kind, p.default) == (q.kind, q.default)
        assert dispatcher.public.__doc__.strip().startswith(
            dispatcher.op.reference.__doc__.strip().splitlines()[0])
