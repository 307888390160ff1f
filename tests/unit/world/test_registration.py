"""Operations and kernels from outside the package: one file each, the same rights as our own."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch
from helpers import ATTENTION, RMS_NORM, events_of, path_of, qkv, rows

import layerzero as lz
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.errors import (
    ConfigError,
    InvalidCall,
    NamedKernelRefused,
    NoKernelFoundError,
    RegistrationError,
    SpecError,
)
from layerzero.spec.event import BackendUnavailable, WorldPublished
from layerzero.spec.reason import Code
from layerzero.spec.rules import at_most, dtypes, off
from layerzero.world import snapshot as worlds

EXAMPLE = Path(__file__).parents[3] / "examples" / "plugin"
# torch keeps a name and its schema for good
fresh = (f"scale_shift_{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def example():
    """The modules of the example plugin, imported as files and not installed."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from lz_plugin_example import kernels, scale_shift
    finally:
        sys.path.remove(str(EXAMPLE))
    return scale_shift.OP, kernels.KERNELS


@pytest.fixture
def scale_shift(world, example):
    """The example's operation under a name of its own, registered, with its kernel."""
    op = dataclasses.replace(example[0], name=next(fresh))
    lz.register(op)
    kernel = dataclasses.replace(example[1][0], op=op)
    lz.register(kernel)
    return op


def kernel(id, run, op=RMS_NORM, **declared):
    return lz.Kernel(id, op, lambda: run, **{"prior": 1e6, "less_work": "a test", **declared})


# an op from outside

def test_an_op_from_outside_has_everything_that_our_own_have(scale_shift, path):
    op = scale_shift
    call = op.inputs()
    run = path_of(op, path)
    assert getattr(lz, op.name) is dispatcher_of(op.name).public and op.name in dir(lz)
    assert lz.op(op.name) is op
    for case in op.cases:
        values = op.inputs(**case)
        for _ in range(2):
            torch.testing.assert_close(run(**values), op.reference(**values))
    plan = lz.explain(op.name, **call)
    assert plan.kernel == "example.addcmul" and plan.from_cache
    assert (plan.facts["hidden"] == 8 and plan.facts["rows"] == 3
            and plan.facts["shift.dtype"] == "float32")
    assert lz.which(getattr(lz, op.name), **call) == "example.addcmul"
    assert lz.stats().calls[op.name]["example.addcmul"] == 2 * len(op.cases)
    assert [row.id for row in lz.list_kernels(op.name)] == ["example.addcmul"]
    assert run.__name__ == op.name and "over the last dimension" in run.__doc__


def test_the_key_of_an_op_from_outside(scale_shift):
    dispatcher = dispatcher_of(scale_shift.name)
    dispatcher.ensure_world()
    call = scale_shift.inputs()

    def key(**changes):
        return dispatcher.key_of(*dispatcher.order_arguments((), {**call, **changes}))

    assert key() == key(x=torch.zeros(3, 8)) != key(x=torch.zeros(4, 8))
    assert key(shift=None) != key() != key(x=call["x"].clone().requires_grad_())
    assert key(scale=torch.zeros(9)) is None and key(gain=True) is None
    assert key(gain=2.0) == key(), "no rule reads it"


def test_an_op_from_outside_checks_its_calls(scale_shift):
    call = scale_shift.inputs()
    run = getattr(lz, scale_shift.name)
    run(**call)
    for changes, code in (({"scale": torch.ones(9)}, Code.DIM_MISMATCH),
                          ({"x": 3}, Code.WRONG_TYPE),
                          ({"gain": "much"}, Code.WRONG_TYPE),
                          ({"scale": torch.ones(8).half()}, Code.MIXED_DTYPES)):
        with pytest.raises(InvalidCall, match=f"lz.{scale_shift.name}") as caught:
            run(**{**call, **changes})
        assert caught.value.codes == (code,)


def test_an_op_from_outside_is_a_torch_op(scale_shift):
    call = scale_shift.inputs()
    op = getattr(torch.ops.layerzero, scale_shift.name)
    torch.testing.assert_close(op(**call, gain=2.0), scale_shift.reference(**call, gain=2.0))
    torch.testing.assert_close(op(call["x"], call["scale"]), call["x"] * call["scale"])
    leaf = call["x"].clone().requires_grad_()
    op(leaf, call["scale"]).sum().backward()
    torch.testing.assert_close(leaf.grad, call["scale"].expand(3, 8))
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(call[n]) for n in ("x", "scale")))
        assert fake.shape == (3, 8)


def test_an_op_without_a_kernel_says_so(world, example):
    op = dataclasses.replace(example[0], name=next(fresh))
    run = lz.register(op)
    with pytest.raises(NoKernelFoundError, match=f"lz.{op.name}: no kernel can serve this call"):
        run(**op.inputs())


def test_an_op_that_goes_is_gone(scale_shift):
    name, call = scale_shift.name, scale_shift.inputs()
    getattr(lz, name)(**call)
    lz.unregister(name)
    with pytest.raises(AttributeError, match=name):
        getattr(lz, name)
    with pytest.raises(ConfigError, match=f"there is no op '{name}'"):
        lz.explain(name, **call)
    assert "example.addcmul" not in [row.id for row in lz.list_kernels()] and name not in dir(lz)
    lz.register(scale_shift)
    with pytest.raises(NoKernelFoundError):
        getattr(lz, name)(**call)


def test_an_op_that_returns_several_tensors(world):
    source = lz.op("add_rms_norm")
    op = dataclasses.replace(source, name=f"pair_{next(fresh)}")
    lz.register(op)
    lz.register(lz.Kernel("pair.reference", op, lambda: source.reference))
    call = source.inputs()
    out = getattr(lz, op.name)(**call)
    assert isinstance(out, tuple) and len(out) == 2
    listed = getattr(torch.ops.layerzero, op.name)(**call)
    for a, b, c in zip(out, listed, source.reference(**call)):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("names", [("B", "T"), ("K", "P"), ("grad", "entry"), ("fault", "spread"),
                                   ("dtype", "home"), ("out", "was"), ("d_n", "t1"),
                                   ("call", "key_of"), ("s_x", "k_scale")])
def test_parameters_may_be_called_anything(world, names):
    """Also what the generated code might call its own."""
    scope = {}
    exec(
        f"def reference({names[0]}: Tensor, {names[1]}: float = 2.0) -> Tensor:\n    return "
        f"{names[0]} * {names[1]}",
        {"Tensor": torch.Tensor}, scope)
    op = lz.Op(name=f"named_{next(fresh)}", family="pointwise", reference=scope["reference"],
               meta=scope["reference"], inputs=lambda: {}, cases=({},),
               tolerance=lz.Tolerance({"float32": (0, 0)}), shapes={names[0]: "n m"},
               returns=("n m",))
    run = lz.register(op)
    lz.register(lz.Kernel("named.plain", op, lambda: scope["reference"],
                          requires=(at_most("n", 100), at_most(names[1], 3.0))))
    x = torch.randn(2, 3)
    for fn in (run, dispatcher_of(op.name).python_call):
        for _ in range(3):
            assert (torch.equal(fn(x), x * 2)
                    and torch.equal(fn(**{names[0]: x, names[1]: 1.5}), x * 1.5))
        with pytest.raises(NoKernelFoundError):
            fn(x, 3.5)


# a kernel from outside

def test_a_kernel_from_outside_serves(world, emitted, path):
    calls = []

    def doubled(x, weight=None, eps=1e-6):
        calls.append(eps)
        return x * 2

    lz.register(kernel("mine.doubled", doubled,
                       requires=(dtypes("float32"), at_most("hidden", 32))))
    run = path_of("rms_norm", path)
    assert torch.equal(run(rows()), rows() * 2) and torch.equal(run(rows(), eps=0.5), rows() * 2)
    assert calls == [1e-6, 0.5]
    torch.testing.assert_close(run(rows(3, 33)), RMS_NORM.reference(rows(3, 33)))
    assert lz.validate("rms_norm", "mine.doubled", rows(3, 33))[0].code is Code.SHAPE_UNSUPPORTED
    assert lz.validate("rms_norm", "mine.doubled", rows()) == ()
    assert [e for e in events_of(WorldPublished, emitted) if e.cause == "register:mine.doubled"]
    lz.unregister("mine.doubled")
    torch.testing.assert_close(run(rows()), RMS_NORM.reference(rows()))
    assert len(calls) == 2


def test_remembered_choices_are_made_anew_when_a_kernel_comes(world, path):
    run, dispatcher = path_of("rms_norm", path), dispatcher_of("rms_norm")
    for _ in range(3):
        run(rows())
    lz.register(kernel("mine.zero", lambda x: torch.zeros_like(x)))
    assert dispatcher.native is None or dispatcher.native.compiled.lookup(rows()) is None
    assert (run(rows()) == 0).all() and (run(rows()) == 0).all()


def test_a_rule_of_a_kernel_from_outside_splits_the_key(world):
    dispatcher = dispatcher_of("rms_norm")
    dispatcher.ensure_world()

    def keys():
        return [dispatcher.key_of(*dispatcher.order_arguments((torch.zeros(n, 8),), {}))
                for n in (33, 40, 41, 48)]

    assert len(set(keys())) == 1
    lz.register(kernel("mine.few", lambda x: x, requires=(at_most("rows", 40),)))
    a, b, c, d = keys()
    assert a == b != c == d


def test_a_direct_call_picks_arguments_constants_and_results(world, path):
    seen = []

    def library(scale, x, *, shift, mode):
        seen.append((scale, shift, mode))
        return x * scale, x + shift, mode

    run = path_of("rms_norm", path)
    for item, want in ((0, lambda x: x * 3), (1, lambda x: x + 0.5)):
        lz.register(lz.Kernel("mine.direct", RMS_NORM, lambda item=item: lz.kernels.direct(
            library, lz.kernels.Const(3), "x", shift="eps", mode=lz.kernels.Const("fast"),
            item=item),
            prior=1e6, less_work="a test"))
        for _ in range(2):
            assert torch.equal(run(rows(), eps=0.5), want(rows()))
        lz.unregister("mine.direct")
    assert set(seen) == {(3, 0.5, "fast")}


def test_kernels_that_take_fewer_parameters_or_only_keywords(world, path):
    lz.register(kernel("mine.fewer", lambda eps, x: x + eps, requires=(off("grad"),)))
    run = path_of("rms_norm", path)
    assert torch.equal(run(rows(), eps=1.0), rows() + 1.0)
    lz.unregister("mine.fewer")

    def named(*, weight, x, other="own default"):
        assert other == "own default" and weight is None
        return x * 5

    lz.register(kernel("mine.named", named))
    for _ in range(2):
        assert torch.equal(run(rows()), rows() * 5)


# refused

@pytest.mark.parametrize("name", ["", "plain", "Upper.case", "a.b-c", "a b.c", ".x", "x.", "a..b"])
def test_a_bad_id_is_refused(name):
    with pytest.raises(RegistrationError, match=r"backend\.name"):
        kernel(name, lambda x: x)


def test_a_duplicate_is_refused(world):
    lz.register(kernel("mine.once", lambda x: x))
    before = worlds.current()
    with pytest.raises(RegistrationError,
                       match=r"'mine.once'.*already registered by lz.register\(\)"):
        lz.register(kernel("mine.once", lambda x: x))
    with pytest.raises(RegistrationError, match=r"'torch.sdpa'.*already registered by layerzero"):
        lz.register(kernel("torch.sdpa", lambda x: x))
    with pytest.raises(RegistrationError, match=r"op 'attention'.*already registered"):
        lz.register(dataclasses.replace(ATTENTION))
    assert worlds.current() is before, "nothing was published"


def test_a_kernel_of_an_unknown_op_is_refused(world, example):
    before = worlds.current()
    with pytest.raises(RegistrationError,
                       match=r"'example.addcmul'.*'scale_shift'.*not registered.*attention"):
        lz.register(example[1][0])
    with pytest.raises(RegistrationError,
                       match=r"another op called 'rms_norm'.*lz.op\('rms_norm'\)"):
        lz.register(kernel("mine.other", lambda x: x, op=dataclasses.replace(RMS_NORM)))
    assert worlds.current() is before


@pytest.mark.parametrize(("fact", "near"), [
    ("hidde", "hidden"), ("wieght.dtype", "weight.dtype"), ("x.strides", "x.stride_last"),
    ("divice", "device")])
def test_an_unknown_fact_is_refused_and_the_nearest_named(fact, near):
    with pytest.raises(SpecError, match=rf"'mine.typo'.*{fact}.*did you mean '{near}'"):
        kernel("mine.typo", lambda x: x, requires=(at_most(fact, 3),))


def test_an_unknown_fact_deep_inside_a_rule_is_refused():
    from layerzero.spec.rules import any_of, when
    with pytest.raises(SpecError, match="no_such_thing"):
        rule = any_of(off("grad"), when(off("grad"), at_most("no_such_thing", 1)))
        kernel("mine.deep", lambda x: x, requires=(rule,))


@pytest.mark.parametrize(("run", "message"), [
    (lambda x, axis: x, "wants a parameter 'axis'; lz.rms_norm has x, weight, eps"),
    (lambda *args: args[0], r"takes \*args or \*\*kwargs"),
    (lambda x, **rest: x, r"takes \*args or \*\*kwargs"),
    (lz.kernels.direct(torch.rms_norm, "x", "axis"),
     "wants 'axis'; lz.rms_norm has x, weight, eps")])
def test_a_wrong_signature_is_named_and_costs_only_that_kernel(world, emitted, run, message):
    lz.register(kernel("mine.wrong", run))
    torch.testing.assert_close(lz.rms_norm(rows()), RMS_NORM.reference(rows()))
    refusals = events_of(BackendUnavailable, emitted)
    assert [e.kernel for e in refusals] == ["mine.wrong"]
    with pytest.raises(NamedKernelRefused, match=message):
        lz.rms_norm(rows(), backend="mine.wrong")
    assert any(c.name == "loading mine.wrong" and not c.ok for c in lz.doctor().checks)


@pytest.mark.parametrize(("declared", "message"), [
    ({"prior": 0.0}, "prior must be > 0"), ({"prior": -1.0}, "prior must be > 0"),
    ({"workspace": "hidden *"}, "does not parse"),
    ({"workspace": "hiden * 2"}, "hiden"), ({"workspace": "hidden.real"}, "Attribute")])
def test_a_declaration_that_contradicts_itself_is_refused(declared, message):
    with pytest.raises((RegistrationError, SpecError), match=message):
        kernel("mine.bad", lambda x: x, **declared)


@pytest.mark.parametrize("thing", [None, "attention", torch.rms_norm, 3, ATTENTION.reference])
def test_other_things_are_refused(world, thing):
    with pytest.raises(RegistrationError, match=type(thing).__name__):
        lz.register(thing)


def test_what_is_not_there_cannot_go(world):
    with pytest.raises(RegistrationError, match=r"nothing is registered as 'mine.ghost'"):
        lz.unregister("mine.ghost")


def test_an_op_whose_name_torch_knows_otherwise_is_refused_whole(world, example):
    op = dataclasses.replace(example[0], name=next(fresh))
    lz.register(op)
    lz.unregister(op.name)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x

    other = dataclasses.replace(op, reference=reference, meta=reference,
                                shapes={"x": "*rows hidden"}, same_dtype=(),
                                differentiable=("x",))
    with pytest.raises(RegistrationError, match=f"{op.name}.*another name"):
        lz.register(other)
    assert op.name not in worlds.current().catalog.ops


@pytest.mark.parametrize(("changes", "message"), [
    ({"cases": ()}, "no cases"),
    ({"family": "norm", "shapes": {"x": "*rows width", "scale": "width", "shift": "width"},
                                   "exact": (), "flops": "1", "bytes": "1"}, "must declare hidden"),
    ({"derived": {"half": "hidden / 2"}}, "hidden / 2"), ({"flops": "rows * hiden"}, "hiden")])
def test_an_op_that_lacks_something_is_refused(example, changes, message):
    with pytest.raises(SpecError, match=message):
        dataclasses.replace(example[0], **changes)


def test_star_arguments_in_a_contract_are_refused(example):
    def reference(*tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0]

    with pytest.raises(SpecError, match=r"\*args and \*\*kwargs hide"):
        dataclasses.replace(example[0], reference=reference)


# one file each

def test_the_example_is_a_file_per_thing(example):
    for name in ("scale_shift.py", "kernels.py"):
        spec = importlib.util.spec_from_file_location("probe", EXAMPLE / "lz_plugin_example" / name)
        assert spec is not None and (EXAMPLE / "lz_plugin_example" / name).stat().st_size < 3000
    assert isinstance(example[0], lz.Op) and all(isinstance(k, lz.Kernel) for k in example[1])


def test_attention_takes_kernels_from_outside_too(world, path):
    def mean(query, key, value, attn_mask=None):
        return value.mean(2, keepdim=True).expand(*query.shape[:3], value.shape[3])

    lz.register(kernel("mine.mean", mean, op=ATTENTION, variants=("bhsd",),
                       requires=(off("is_causal"), off("return_lse"))))
    q, k, v = qkv()
    run = path_of("attention", path)
    for _ in range(2):
        torch.testing.assert_close(run(q, k, v), v.mean(2, keepdim=True).expand_as(v))
        swapped = run(*(t.transpose(1, 2) for t in (q, k, v)), layout="bshd")
        torch.testing.assert_close(swapped.transpose(1, 2), v.mean(2, keepdim=True).expand_as(v))
    torch.testing.assert_close(run(q, k, v, is_causal=True),
                               ATTENTION.reference(q, k, v, is_causal=True), rtol=1e-4,
                               atol=1e-5)
