"""The cache key: two calls with one key cannot differ in any verdict, and a growing KV cache keeps
its key.
"""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

import pytest
import synthetic
import torch
from helpers import events_of, path_of, qkv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import EDGES, MAKERS, neighbour, register_synthetic, synthetic_sweeps, tensor

import layerzero as lz
from layerzero.dispatch import dispatcher as dispatch
from layerzero.dispatch import facts as reading
from layerzero.operate.inspection import dispatcher_of
from layerzero.selection.key import compile_key
from layerzero.spec.errors import InvalidCall
from layerzero.spec.event import Selected
from layerzero.spec.grid import bucket, bucket_bottom, bucket_label, bucket_top
from layerzero.spec.rules import at_least, at_most
from layerzero.world import snapshot as worlds

steady = settings(deadline=None, max_examples=40, derandomize=True,
                  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(params=sorted(MAKERS))
def op(request, world):
    if request.param == "synthetic":
        register_synthetic()
    return request.param


def key(op, *args, **kwargs):
    dispatcher = dispatcher_of(op)
    dispatcher.ensure_world()
    return dispatcher.key_of(*dispatcher.order_arguments(args, kwargs))


@lru_cache(maxsize=1)
def rules_here(epoch, op):
    """In the world of this epoch, which is the current one: the facts of the CPU, and
    every rule of the op and of its kernels that could run here."""
    world = worlds.current()
    device = world.device("cpu").facts()
    ours = [k for k in world.kernels(op) if not any(
        r.check(device) for r in k.requires if all(leaf.fact == "device" for leaf in r.leaves()))]
    rules = [*world.catalog.ops[op].requires, *(r for k in ours for r in k.requires)]
    return device, tuple(dict.fromkeys(rules))


def verdicts(op, call):
    """What every rule that could ever be asked says of the call; or the caller's mistake."""
    dispatcher = dispatcher_of(op)
    named = dict(zip(dispatcher.names, dispatcher.order_arguments(*call)))
    try:
        facts = reading.read(dispatcher.op, named)
    except InvalidCall as e:
        return e.codes
    device, rules = rules_here(worlds.current().epoch, op)
    asked = {**device, **facts}
    allowed = [rule.check(asked) is None for rule in rules]
    return (*allowed, facts["grad"], facts["dtype"], facts["tensor_kind"])


def described(call):
    args, kwargs = call
    def shown(t):
        tensor = isinstance(t, torch.Tensor)
        return (f"{tuple(t.shape)} {t.stride()} {t.dtype} grad={t.requires_grad}" if tensor
                else repr(t))

    names = [*(f"#{i}" for i in range(len(args))), *kwargs]
    return "; ".join(f"{name}={shown(value)}"
                     for name, value in zip(names, (*args, *kwargs.values())))


# soundness

def test_no_two_of_many_calls_share_a_key_and_differ_in_a_verdict(op):
    rng = random.Random(7)
    known: dict = {}
    shared = 0
    swept = ((call, call) for call in synthetic_sweeps()) if op == "synthetic" else ()
    drawn = ((call, neighbour(rng, call)) for call in (MAKERS[op](rng) for _ in range(1000)))
    for pair in itertools.chain(swept, drawn):
        for each in pair:
            call_key = key(op, *each[0], **each[1])
            if call_key is None:
                continue
            allowed = verdicts(op, each)
            first = known.setdefault(call_key, (allowed, each))
            shared += first[1] is not each
            assert first[0] == allowed, f"{described(first[1])}\nand {described(each)}\nshare a key"
    assert shared > 60, "the calls were too different to prove anything"


@steady
@given(rng=st.randoms(use_true_random=False))
def test_a_neighbour_with_the_same_key_has_the_same_verdicts(op, rng):
    call = MAKERS[op](rng)
    near = neighbour(rng, call)
    mine = key(op, *call[0], **call[1])
    if mine is not None and mine == key(op, *near[0], **near[1]):
        assert verdicts(op, call) == verdicts(op, near)


@pytest.fixture(scope="module")
def sweeps():
    """Calls of the awkward op, each with all its facts."""
    dispatcher, rng = dispatch.Dispatcher(synthetic.OP), random.Random(9)
    calls = [*synthetic_sweeps(), *(MAKERS["synthetic"](rng) for _ in range(100))]
    named = [(call, dispatcher.order_arguments(*call)) for call in calls]
    return [(call, values, reading.read(synthetic.OP, dict(zip(dispatcher.names, values))))
            for call, values in named]


@pytest.mark.parametrize("rule", synthetic.RULES, ids=str)
def test_each_rule_alone_is_told_apart(world, sweeps, rule):
    """With only this rule in force nothing but its own tests can split the key."""
    lz.register(synthetic.OP)
    lz.register(synthetic.kernel("synthetic.one", requires=(rule,)))
    dispatcher = dispatcher_of("synthetic")
    dispatcher.ensure_world()
    known: dict = {}
    allowed = set()
    for call, values, facts in sweeps:
        key = dispatcher.key_of(*values)
        if key is not None:
            verdict = rule.check(facts) is None
            allowed.add(verdict)
            first = known.setdefault(key, (verdict, call))
            assert first[0] == verdict, (
                f"{described(first[1])}\nand {described(call)}\nshare a key under {rule}")
    constant = next(rule.leaves()).fact in ("deterministic", "x.device")
    assert constant or allowed == {True, False}, "the calls never made this rule change its mind"


@steady
@given(rng=st.randoms(use_true_random=False),
       limits=st.lists(st.integers(0, 5000), min_size=1, max_size=80, unique=True))
def test_any_number_of_thresholds(world, rng, limits):
    """More tests than one machine word has bits."""
    lz.register(synthetic.OP)
    rules = [at_most("seq", n) for n in limits[::2]] + [at_least("seq", n) for n in limits[1::2]]
    lz.register(synthetic.kernel("synthetic.many", requires=tuple(rules)))
    try:
        known: dict = {}
        for n in {n for limit in limits for n in (limit - 1, limit, limit + 1) if n >= 0}:
            call = (tensor(rng, (n, 2), style="plain"), tensor(rng, (n, 3), style="plain"))
            allowed = [rule.check({"seq": n}) is None for rule in rules]
            assert known.setdefault(key("synthetic", *call), allowed) == allowed
    finally:
        lz.unregister("synthetic")


def test_the_generated_reader_says_what_the_careful_one_says(op):
    """The facts of an ordinary call come from generated code; they must be those of facts.read,
    mistakes included."""
    dispatcher, rng = dispatcher_of(op), random.Random(8)
    dispatcher.ensure_world()
    ordinary = 0
    for _ in range(400):
        call = MAKERS[op](rng)
        values = dispatcher.order_arguments(*call)
        quick = dispatcher.facts_of(*values)
        assert (quick is None) == (dispatcher.key_of(*values) is None)
        if quick is not None:
            ordinary += 1
            careful = reading.read(dispatcher.op, dict(zip(dispatcher.names, values)),
                                   dispatcher.program.needed)
            assert quick == careful, described(call)
    assert ordinary > 200


# what the key keeps of sizes

def test_a_kv_cache_that_grows_inside_a_bucket_keeps_its_key():
    q = torch.randn(1, 4, 1, 64)
    keys: dict = {}
    for n in range(1, 1025):
        k = tensor(None, (1, 4, n, 64), style="plain")
        keys.setdefault(key("attention", q, k, k, causal_align="bottom_right", is_causal=True),
                        []).append(n)
    assert len(keys) == len({bucket(n) for n in range(1, 1025)}) == 28
    for lengths in keys.values():
        assert lengths == list(range(bucket_bottom(lengths[0]), lengths[-1] + 1))


def test_a_decode_loop_selects_once_per_bucket(world, emitted, path):
    run = path_of("attention", path)
    q = torch.randn(1, 2, 1, 16)
    for n in range(33, 129):
        k = torch.randn(1, 2, n, 16)
        run(q, k, k, is_causal=True, causal_align="bottom_right")
    assert len(events_of(Selected, emitted)) == 4, "33-48, 49-64, 65-96, 97-128"


def test_sizes_that_validity_needs_are_kept_exactly():
    keys = {key("attention", *qkv(dim=d)) for d in (8, 9, 64, 65, 66)}
    assert len(keys) == 5
    assert key("attention", *qkv(heads=4, kv_heads=2)) != key("attention",
                                                              *qkv(heads=4, kv_heads=1))


def test_exact_parameters_are_in_the_key_even_if_no_rule_reads_them(world):
    lz.register(synthetic.OP)
    x, y = torch.zeros(3, 8), torch.zeros(3, 5)
    assert key("synthetic", x, y, groups=2) != key("synthetic", x, y, groups=4)


def test_rules_on_bucketed_sizes_split_buckets_only_where_they_test(world):
    lz.register(synthetic.OP)
    lz.register(synthetic.kernel("synthetic.split", requires=(at_most("seq", 700),)))

    def of_length(n):
        return key("synthetic", tensor(None, (n, 2), style="plain"),
                   tensor(None, (n, 3), style="plain"))

    assert bucket(699) == bucket(701)
    assert of_length(513) == of_length(700) != of_length(701) == of_length(768) != of_length(769)


# policy

def test_a_policy_rule_with_a_number_splits_the_key(world):
    def of_length(n):
        return key("attention", *qkv(2, n))

    assert of_length(600) == of_length(700) == of_length(701)
    lz.configure(rules=(lz.PolicyRule.of("deny", "torch.sdpa", "attention", {"seq_k": "> 700"}),))
    assert of_length(600) == of_length(699) != of_length(701) == of_length(768)
    assert lz.which("attention", *qkv(2, 700)) == "torch.sdpa" != lz.which("attention",
                                                                           *qkv(2, 701))


def test_a_context_override_with_a_number_splits_the_key(world, path):
    run = path_of("attention", path)
    short, long = qkv(2, 700), qkv(2, 701)
    assert key("attention", *short) == key("attention", *long)
    outside = key("attention", *short)
    with lz.prefer("torch.sdpa_math", op="attention", when={"seq_k": "> 700"}):
        assert key("attention", *short) != key("attention", *long)
        assert key("attention", *short) != outside
        before = lz.stats().calls["attention"].get("torch.sdpa_math", 0)
        for call in (short, long, short, long):
            run(*call)
        assert lz.stats().calls["attention"]["torch.sdpa_math"] == before + 2


@pytest.mark.parametrize(("when", "inside", "outside"), [
    ({"scale": None}, None, 0.5), ({"scale": "!= none"}, 0.5, None),
    ({"scale": "0.2..0.6"}, 0.5, 0.61), ({"scale": [0.5, None]}, None, 0.25),
    ({"scale": 1}, 1.0, 1.5)])
def test_policy_conditions_on_an_optional_number(world, when, inside, outside):
    q, k, v = qkv()
    if None not in (inside, outside):          # whether it is given is always in the key
        assert key("attention", q, k, v, scale=inside) == key("attention", q, k, v, scale=outside)
    lz.configure(rules=(lz.PolicyRule.of("lock", "torch.sdpa_math", "attention", when),))
    assert key("attention", q, k, v, scale=inside) != key("attention", q, k, v, scale=outside)
    assert lz.which("attention", q, k, v, scale=inside) == "torch.sdpa_math"
    assert lz.which("attention", q, k, v, scale=outside) != "torch.sdpa_math"


def test_overrides_that_say_the_same_share_entries():
    q, k, v = qkv()
    with lz.prefer("torch.sdpa_math"):
        first = key("attention", q, k, v)
    with lz.prefer("torch.sdpa_math"):
        assert key("attention", q, k, v) == first
    with lz.prefer("torch.sdpa"):
        assert key("attention", q, k, v) != first
    assert key("attention", q, k, v) != first


# what else splits it

def test_modes_split_the_key():
    q, k, v = qkv()
    plain = key("attention", q, k, v)
    trained = [t.clone().requires_grad_() for t in (q, k, v)]
    assert key("attention", *trained) != plain
    assert key("attention", q, trained[1], v) == key("attention",
                                                     *trained), "no rule asks which of them"
    with torch.no_grad():
        assert key("attention", *trained) == plain == key("attention", q, k, v)
    # the public function imports the compiler first
    torch._C._set_deterministic_algorithms(True)
    try:
        assert key("attention", q, k, v) != plain
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert key("attention", q, k, v) == plain


def test_what_tensors_are_splits_the_key():
    q, k, v = qkv()
    plain = key("attention", q, k, v)
    assert key("attention", *(t.double() for t in (q, k, v))) != plain
    assert key("attention", *(t.to("meta") for t in (q, k, v))) not in (plain, None)
    swapped = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)]
    assert key("attention", *swapped) != plain
    assert key("attention", swapped[0], k, v) != key("attention", q, swapped[1], v)
    assert key("attention", *(t[..., :] for t in (q, k, v))) == plain
    assert key("attention", torch.nn.Parameter(q, requires_grad=False), k, v) == plain
    masks = [torch.ones(shape, dtype=torch.bool)
             for shape in ((8,), (8, 8), (1, 1, 8, 8), (1, 2, 8, 8), (1, 2, 1, 8))]
    keys = {plain, *(key("attention", q, k, v, m) for m in masks),
            key("attention", q, k, v, masks[1].float()),
            key("attention", q, k, v, masks[1].float().requires_grad_())}
    assert len(keys) == 8 and None not in keys


@pytest.mark.parametrize("strange", [
    lambda q: q.to_sparse(), lambda q: q[0, 0, 0, 0], lambda q: q[0], lambda q: q[None],
    lambda q: q.double(), lambda q: q.to("meta"), lambda q: q[..., :8],
    lambda q: torch.nested.nested_tensor([q[0, 0]]), lambda q: "q",
    lambda q: None])
def test_a_tensor_that_does_not_fit_has_no_key(strange):
    q, k, v = qkv()
    assert key("attention", q, k, v) is not None
    assert key("attention", strange(q), k, v) is None


@pytest.mark.parametrize("strange", [lambda x: x.to_sparse(), lambda x: x.to_mkldnn(),
                                     lambda x: x.tolist()])
def test_a_tensor_without_strides_has_no_key(strange):
    assert key("rms_norm", strange(torch.ones(2, 3))) is None


@pytest.mark.parametrize("wrong", [
    {"is_causal": 1}, {"window_left": True}, {"dropout_p": False}, {"softcap": True},
    {"scale": True}, {"scale": "1"}, {"causal_align": []}, {"layout": None}, {"layout": "sdbh"},
    {"window_left": 1.0}, {"return_lse": None}, {"enable_gqa": 0}, {"window_right": None},
    {"dropout_p": None}])
def test_a_value_of_the_wrong_type_has_no_key(wrong):
    assert key("attention", *qkv(), **wrong) is None


# the compiler of keys

def test_the_program_is_the_same_whatever_the_order_of_the_rules():
    leaves = [leaf for rule in synthetic.RULES for leaf in rule.leaves()]
    program = compile_key(synthetic.OP, leaves)
    assert program == compile_key(synthetic.OP, reversed(leaves)) == compile_key(synthetic.OP,
                                                                                 leaves * 2)
    assert program.id == compile_key(synthetic.OP, reversed(leaves)).id != compile_key(
        synthetic.OP, leaves[1:]).id


def test_the_slow_path_reads_what_the_rules_need():
    for name in MAKERS:
        if name != "synthetic":
            op = lz.op(name)
            leaves = [leaf for k in worlds.current().kernels(name) for rule in k.requires
                      for leaf in rule.leaves()]
            wanted = {leaf.fact for leaf in leaves if "." in leaf.fact
                      and not leaf.fact.endswith(".broadcast")}
            assert wanted <= compile_key(op, leaves).needed


# the grid

def test_buckets_are_intervals_without_gaps():
    previous = -1
    for n in range(100_001):
        low, high = bucket_bottom(n), bucket_top(n)
        assert low <= n <= high
        if n <= 16:
            assert low == high == bucket(n) == n
        if n == low:
            assert low == previous + 1, "a bucket begins where the one before it ended"
            assert bucket(low) == bucket(high) and bucket_bottom(high) == low
            if n:
                assert bucket(n) > bucket(n - 1)
        else:
            assert (bucket(n) == bucket(low)
                    and (bucket_bottom(n), bucket_top(n)) == (low, bucket_top(low)))
        previous = high if n == high else previous
    assert bucket(-1) == bucket(-100) == -1


@pytest.mark.parametrize(("n", "label"), [(0, "0"), (7, "7"), (16, "16"), (17, "17-24"),
                                          (24, "17-24"), (25, "25-32"), (33, "33-48"),
                                          (64, "49-64"), (65, "65-96"), (4097, "4097-6144")])
def test_the_label_names_the_bucket(n, label):
    assert bucket_label(n) == label


@given(st.integers(17, 2**62))
def test_two_buckets_per_octave_however_large(n):
    low, high = bucket_bottom(n), bucket_top(n)
    assert bucket(low) == bucket(n) == bucket(high) != bucket(high + 1)
    assert bucket(low - 1) != bucket(n)
    assert high / low <= 1.5 and EDGES


def test_the_generated_code_reads_the_same_grid():
    from layerzero.dispatch.generated_globals import BUCKETS
    assert [bucket(n) for n in range(len(BUCKETS))] == BUCKETS
