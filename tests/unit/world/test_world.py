"""One immutable world: what publishing does, what registering refuses, and that no choice outlives
its world.
"""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from helpers import ATTENTION, RMS_NORM, Fake, normalized, path_of, register, rows

import layerzero as lz
from layerzero.operate.inspection import dispatcher_of
from layerzero.plan.table import Span
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.event import Selected, WorldPublished
from layerzero.spec.op import Op, Tolerance
from layerzero.spec.rules import at_least, at_most, contiguous, unit_stride
from layerzero.world import capabilities
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("world")


# publishing

def test_a_world_is_frozen():
    world = worlds.current()
    for f in fields(world):
        with pytest.raises(FrozenInstanceError):
            setattr(world, f.name, None)
    with pytest.raises(TypeError):
        world.catalog.by_id["x"] = None
    with pytest.raises(TypeError):
        world.policy.settings["strict_mode"] = True


def test_a_change_makes_a_new_world_and_leaves_the_old_one_as_it_was():
    old = worlds.current()
    lz.configure(strict_mode=True)
    register(Fake())
    new = worlds.current()
    assert new.epoch == old.epoch + 2
    assert not old.policy.setting("strict_mode") and new.policy.setting("strict_mode")
    assert "fake.one" not in old.catalog.by_id and "fake.one" in new.catalog.by_id
    # it still answers
    assert old.plan(RMS_NORM, dict(lz.explain("rms_norm", rows()).facts)).kernel != "fake.one"


def test_to_return_the_same_world_is_to_publish_nothing(emitted):
    before = worlds.current()
    assert worlds.publish(lambda w: w, "nothing") is before is worlds.current()
    assert emitted == []


def test_a_change_that_fails_changes_nothing(emitted):
    before = worlds.current()
    with pytest.raises(lz.errors.ConfigError):
        lz.configure(strict_mode=True, cache_size=-1)
    with pytest.raises(lz.errors.RegistrationError):
        lz.register("a kernel")
    assert worlds.current() is before and emitted == []


def test_two_threads_that_change_different_things_lose_nothing():
    names = [f"fake.k{i}" for i in range(24)]
    gate = threading.Barrier(len(names), timeout=60)
    epoch = worlds.current().epoch

    def work(name):
        kernel = Fake(name).kernel
        gate.wait()
        lz.register(kernel)

    workers = [threading.Thread(target=work, args=(n,)) for n in names]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert set(names) <= set(worlds.current().catalog.by_id)
    assert worlds.current().epoch == epoch + len(names)


def test_whoever_publishes_sees_it_in_the_next_call(path):
    call, x = path_of(RMS_NORM, path), rows()
    for i in range(20):
        fake = Fake(f"fake.k{i}", prior=1e6 * (i + 1))
        register(fake)
        call(x)
        assert fake.calls == 1


def test_a_choice_made_in_a_world_that_is_gone_is_not_kept(path):
    """The kernel's own load changes the policy: its choice belongs to the world before."""
    fake = Fake()

    def load():
        lz.configure(rules=(lz.PolicyRule.of("deny", "fake.one"),))
        return fake._load()

    lz.register(lz.Kernel("fake.one", RMS_NORM, load, prior=1e6, less_work="a test"))
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(3):
        torch.testing.assert_close(call(x), normalized(x))
    assert fake.calls == 1
    assert lz.explain("rms_norm", x).why_not("fake.one")


def test_a_first_call_during_a_change_does_not_stay_behind(monkeypatch):
    """An op that was never used takes over the world in force; one that is published just then
    comes after it."""
    dispatcher = dispatcher_of("layer_norm")
    install, publisher = dispatcher.install, threading.Thread(target=lz.clear_cache)

    def interrupted(world):
        if not publisher.ident:
            publisher.start()
            publisher.join(0.2)                            # it has to wait until this one is done
        install(world)

    monkeypatch.setattr(dispatcher, "install", interrupted)
    dispatcher.world = None                                     # as if it had never been used
    lz.layer_norm(rows(5, 40))
    publisher.join(60)
    lz.layer_norm(rows(5, 40))
    assert dispatcher.world is worlds.current()


def test_rules_that_come_and_go_while_calls_are_made_never_show_as_errors(path):
    """A kernel's rules decide which facts are read; a call in flight must not lack one."""
    call, stop, errors = path_of(ATTENTION, path), threading.Event(), []
    q = torch.randn(1, 2, 4, 8)
    odd = torch.randn(1, 2, 4, 16)[..., ::2]
    rules = (contiguous("query"), unit_stride("value"), at_least("seq_q", 3))

    def change():
        while not stop.is_set():
            lz.register(Fake("fake.rules", ATTENTION, requires=rules).kernel)
            lz.unregister("fake.rules")

    def work():
        while not stop.is_set():
            try:
                for x in (q, odd):
                    torch.testing.assert_close(call(x, x, x), ATTENTION.reference(x, x, x),
                                               rtol=1e-4, atol=1e-5)
            except BaseException as e:
                errors.append(e)
                return

    workers = [threading.Thread(target=change), *(threading.Thread(target=work) for _ in range(4))]
    for w in workers:
        w.start()
    stop.wait(1.0)
    stop.set()
    for w in workers:
        w.join(60)
    assert errors == []


# key programs: what a key holds is compiled again only if something it depends on has changed

@contextmanager
def _denied_by_policy():
    rule = lz.PolicyRule.of("deny", "fake.one", "rms_norm", {"rows": "<= 700"})
    lz.configure(rules=(rule,))
    yield
    worlds.publish(lambda w: w.replace(policy=w.policy.without("programmatic")), "a test")


@contextmanager
def _beaten_by_a_kernel():
    register(Fake("fake.two", prior=2e6, requires=(at_most("rows", 700),)))
    yield
    lz.unregister("fake.two")


@contextmanager
def _limited_by_capabilities():
    before = capabilities.export(worlds.current().catalog)
    row = Fake(requires=(at_least("rows", 701),)).kernel.to_json()
    capabilities.use({**before, "kernels": [row]})
    yield
    capabilities.use(before)


@contextmanager
def _tabled():
    call = Call("rms_norm", {"x": TensorSpec((700, 16), "float32")})
    table = lz.tables.solve([call], device="cpu", fill=False)
    sizes = {**dict(table.rows[0].sizes), "rows": Span(1, 700)}
    choices = sorted(table.rows[0].choices, key=lambda choice: choice.kernel == "fake.one")
    row = replace(table.rows[0], sizes=tuple(sizes.items()), choices=tuple(choices))
    table = replace(table, rows=(row,))
    lz.tables.use_table(table)
    yield
    lz.tables.use_table(None)


@contextmanager
def _overridden():
    with lz.prefer("fake.other", op="rms_norm", when={"rows": "<= 700"}):
        yield
    lz.clear_cache()                            # or the keys go on telling 700 and 701 apart


@pytest.mark.parametrize("change", [
    _denied_by_policy, _beaten_by_a_kernel, _limited_by_capabilities, _tabled,
    _overridden])
def test_a_key_tells_apart_what_the_rules_in_force_do(path, change):
    register(fake := Fake(), Fake("fake.other", prior=9e5))
    call, dispatcher = path_of(RMS_NORM, path), dispatcher_of("rms_norm")
    short, long = rows(700), rows(701)         # of one bucket

    def served(x: torch.Tensor) -> bool:
        before = fake.calls
        torch.testing.assert_close(call(x), normalized(x))
        return fake.calls > before

    for _ in range(2):                          # the second time there is a program to use again
        assert (served(short), served(long)) == (True, True)
        outside = dispatcher.program
        with change():
            assert (served(short), served(long)) == (False, True)
            assert (served(short), served(long)) == (False, True)
            inside = dispatcher.program
            assert inside == replace(worlds.current(), memo={}).program(RMS_NORM) != outside
            lz.clear_cache()
            assert (served(long), served(short)) == (True, False)
        assert (served(short), served(long)) == (True, True)
        assert dispatcher.program == outside


def test_a_program_is_used_again_while_nothing_it_depends_on_changes(path):
    register(Fake())
    call, x, dispatcher = path_of(RMS_NORM, path), rows(), dispatcher_of("rms_norm")
    call(x)
    program = dispatcher.program
    for change in (
            lambda: lz.configure(strict_mode=True),
            lambda: lz.configure(rules=(lz.PolicyRule.of("deny", "torch.sdpa", "attention",
                                                         {"seq_k": "> 700"}),)),
            lambda: register(Fake("fake.attention", ATTENTION, requires=(at_most("seq_k", 700),))),
            lambda: lz.unregister("fake.attention"),
            lz.clear_cache):
        change()
        torch.testing.assert_close(call(x), normalized(x))
        assert dispatcher.program is program
        assert program == replace(worlds.current(), memo={}).program(RMS_NORM)


def test_a_program_of_another_op_with_the_same_name_is_not_used():
    worlds.publish(lambda w: w.replace(), "a test")
    old = worlds.current()
    other = replace(RMS_NORM, exact=(*RMS_NORM.exact, "rows"))
    program = old.program(RMS_NORM)
    assert old.replace(policy=old.policy).program(RMS_NORM, old) is program
    new = old.replace(catalog=replace(old.catalog, ops={**old.catalog.ops, "rms_norm": other}))
    assert new.program(other, old).op is other
    assert {f.fact for f in new.program(other).fields if f.exact} == {
        f.fact for f in program.fields if f.exact} | {"rows"}


def test_a_world_is_freed_when_another_is_in_force(path):
    call, x, old = path_of(RMS_NORM, path), rows(), []
    for n in range(4):
        lz.configure(cache_size=100 + n)
        call(x)
        old.append(weakref.ref(worlds.current()))
    gc.collect()
    assert [r() is not None for r in old] == [False, False, False, True]


# registering

@pytest.mark.parametrize(("make", "words"), [
    (lambda: lz.Kernel("nodot", RMS_NORM, lambda: None), "must look like 'backend.name'"),
    (lambda: lz.Kernel("fake.k", RMS_NORM, lambda: None, prior=0), "prior must be > 0"),
    (lambda: lz.Kernel("fake.k", RMS_NORM, lambda: None, requires=(at_most("hiden", 4),)),
     "did you mean 'hidden'"),
    (lambda: lz.register(lz.Kernel("torch.rms_norm", RMS_NORM, lambda: None)),
     "already registered by"),
    (lambda: lz.register(lz.Kernel("fake.k", _op("rms_norm"), lambda: None)), "another op called"),
    (lambda: lz.register(lz.Kernel("fake.k", _op("unheard_of"), lambda: None)),
     "not registered; known ops"),
    (lambda: lz.register(replace(RMS_NORM)), "already registered"),
    (lambda: lz.register(_op("rms_norm")), "already registered|give the new one another name"),
    (lambda: lz.register(3), "takes an Op or a Kernel, got int"),
    (lambda: lz.unregister("fake.nobody"), "nothing is registered as 'fake.nobody'"),
])
def test_what_does_not_fit_is_refused_by_name(make, words):
    before = worlds.current()
    with pytest.raises((lz.errors.RegistrationError, lz.errors.SpecError), match=words):
        make()
    assert worlds.current() is before


@pytest.mark.parametrize("run", [
    lambda x, foreign: x, lambda *args: args[0], lambda **named: named["x"]],
                         ids=["foreign", "*args", "**named"])
def test_a_kernel_that_wants_what_the_op_does_not_have_never_runs(run):
    lz.register(lz.Kernel("fake.k", RMS_NORM, lambda: run, prior=1e6, less_work="a test"))
    x = rows()
    torch.testing.assert_close(lz.rms_norm(x), normalized(x))
    (reason,) = lz.explain("rms_norm", x).why_not("fake.k")
    assert "RegistrationError" in reason.message


def _reference(x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
    """x + bias."""
    return x + bias


def _op(name: str) -> Op:
    return Op(name=name, family="other", reference=_reference, meta=_reference,
              inputs=lambda: {"x": rows()}, cases=({},),
              tolerance=Tolerance({"float32": (0.0, 0.0)}), shapes={"x": "*rows hidden"},
              returns=("*rows hidden",))


def test_an_op_of_the_callers_own(path):
    op = _op("shifted")
    fn = lz.register(op)
    assert fn is lz.shifted
    with pytest.raises(lz.errors.NoKernelFoundError, match="no kernel can serve"):
        fn(rows())
    lz.register(lz.Kernel("mine.shifted", op, lambda: _reference))
    call = path_of("shifted", path)
    for _ in range(3):
        torch.testing.assert_close(call(rows(), bias=2.0), rows() + 2.0)
    assert lz.which("shifted", rows()) == "mine.shifted"
    lz.unregister("shifted")
    assert ("shifted" not in worlds.current().catalog.ops
            and "mine.shifted" not in worlds.current().catalog.by_id)
    with pytest.raises(AttributeError, match="shifted"):
        _ = lz.shifted


def test_an_op_may_come_back_as_another():
    lz.register(first := _op("again"))
    lz.register(lz.Kernel("mine.again", first, lambda: _reference))
    assert torch.equal(lz.again(rows()), rows())
    lz.unregister("again")
    lz.register(second := _op("again"))
    lz.register(lz.Kernel("mine.again", second, lambda: lambda x, bias=0.0: x * 2))
    assert torch.equal(lz.again(rows()), rows() * 2)
    assert dispatcher_of("again").op is second


def test_a_kernel_may_come_back_as_another(path):
    call, x = path_of(RMS_NORM, path), rows()
    for factor in (2, 3):
        lz.register(lz.Kernel("mine.k", RMS_NORM, lambda factor=factor: lambda x: x * factor,
                              prior=1e6,
                              less_work="a test"))
        assert torch.equal(call(x), x * factor)
        lz.unregister("mine.k")
    torch.testing.assert_close(call(x), normalized(x))


def test_the_world_knows_its_kernels_by_op_and_by_name():
    register(Fake("fake.norm"), Fake("fake.attention", ATTENTION))
    world = worlds.current()
    assert "fake.norm" in {k.id for k in world.kernels("rms_norm")}
    assert "fake.norm" not in {k.id for k in world.kernels("attention")}
    assert world.kernels("unheard_of") == ()
    assert {k.id for k in lz.list_kernels("rms_norm")} == {k.id for k in world.kernels("rms_norm")}
    assert {k.op for k in lz.list_kernels()} == set(world.catalog.ops)


def test_a_question_publishes_nothing(emitted):
    x = rows()
    lz.rms_norm(x)
    emitted.clear()
    lz.explain("rms_norm", x), lz.which("rms_norm", x), lz.validate("rms_norm", "torch.rms_norm", x)
    lz.list_kernels(), lz.stats(), lz.get_config(), lz.get_locks(), lz.doctor()
    assert [e for e in emitted if isinstance(e, (WorldPublished, Selected))] == []


def test_questions_about_nothing_name_what_there_is():
    with pytest.raises(lz.errors.ConfigError, match="did you mean 'attention'"):
        lz.explain("atention", rows())
    with pytest.raises(lz.errors.ConfigError, match="not an lz operation"):
        lz.explain(torch.nn.functional.rms_norm, rows())
    with pytest.raises(lz.errors.ConfigError, match=r"did you mean 'torch\.rms_norm'"):
        lz.validate("rms_norm", "torch.rmsnorm", rows())
