"""Who decides: a call, a block, the program, the environment, the file, in that order; and until
when.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time

import pytest
import torch
from helpers import (
    ATTENTION,
    RMS_NORM,
    Fake,
    events_of,
    normalized,
    path_of,
    python,
    qkv,
    register,
    rows,
    wait_for,
)

import layerzero as lz
from layerzero.spec.event import PolicyRejected
from layerzero.spec.reason import Code
from layerzero.spec.rules import at_most, contiguous
from layerzero.world import snapshot as worlds

pytestmark = pytest.mark.usefixtures("world")
REFERENCE, TORCH = "reference.rms_norm", "torch.rms_norm"


def settings(name):
    return lz.get_config()["settings"][name], lz.get_config()["source"][name]


def served():
    return lz.which("rms_norm", rows())


# precedence

def test_from_the_default_up_to_the_call(tmp_path):
    """Everything in one process that starts with a file and an environment."""
    file = tmp_path / "policy.yaml"
    file.write_text("settings: {cache_size: 11, breaker_threshold: 11, breaker_cooldown: 11}\n"
                    "rules:\n  - lock: reference.rms_norm\n    op: rms_norm\n")
    output = python("""
        import layerzero as lz
        from helpers import rows, Fake, register
        def row():
            config = lz.get_config()
            names = ("breaker_threshold", "cache_size", "breaker_cooldown", "cache_ttl")
            print(*(f"{config['settings'][n]}:{config['source'][n]}" for n in names), lz.which("rms_norm", rows()))
        row()
        lz.configure(cache_size=33); row()
        with lz.prefer(cache_size=44, breaker_cooldown=44): row()
        lz.lock("rms_norm", "torch.rms_norm"); row()
        register(fake := Fake())
        lz.rms_norm(rows(), backend="fake.one"); print(fake.calls)
        """, LAYERZERO_POLICY=str(file), LAYERZERO_CACHE_SIZE="22", LAYERZERO_BREAKER_COOLDOWN="22")
    assert output.splitlines() == [
        f"11:file 22:environment 22.0:environment None:default {REFERENCE}",
        f"11:file 33:programmatic 22.0:environment None:default {REFERENCE}",
        f"11:file 44:context 44.0:context None:default {REFERENCE}",
        f"11:file 33:programmatic 22.0:environment None:default {TORCH}",
        "1"]


def test_a_bad_environment_is_named_whole_and_nothing_of_it_applies():
    output = python("""
        import layerzero as lz
        from helpers import rows
        try:
            lz.rms_norm(rows())
        except lz.errors.ConfigError as e:
            print(e)
        print(lz.doctor().ok)
        """, LAYERZERO_STRICT_MOD="1", LAYERZERO_CACHE_SIZE="many")
    assert ("did you mean 'LAYERZERO_STRICT_MODE'" in output
            and "cache_size must be a whole number" in output)
    assert output.splitlines()[-1] == "False"


def test_a_call_is_above_a_block_is_above_the_program():
    fake = Fake(requires=())
    register(fake)
    lz.lock("rms_norm", TORCH)
    x = rows()
    lz.rms_norm(x)
    assert fake.calls == 0
    lz.rms_norm(x, backend="fake.one")
    assert fake.calls == 1
    lz.configure(memory_headroom=1)
    with lz.prefer(memory_headroom=2):
        assert settings("memory_headroom") == (2, "context")
        with lz.prefer(memory_headroom=3):
            assert settings("memory_headroom") == (3, "context")
        assert settings("memory_headroom") == (2, "context")
    assert settings("memory_headroom") == (1, "programmatic")


def test_a_policy_for_one_call():
    strict = {"strict_mode": True}
    gaps = rows().repeat_interleave(2, -1)[..., ::2]
    fake = Fake(requires=(contiguous("x"),))
    register(fake)
    lz.rms_norm(gaps, policy=strict)
    assert fake.calls == 0
    lz.rms_norm(gaps)
    assert fake.calls == 1
    with pytest.raises(lz.errors.ConfigError, match="did you mean 'strict_mode'"):
        lz.rms_norm(rows(), policy={"strict_mod": True})
    with pytest.raises(lz.errors.ConfigError, match="policy= must be a mapping"):
        lz.rms_norm(rows(), policy="strict")


# locks

def test_lock_unlock_and_the_locks_in_force(path):
    call, x = path_of(RMS_NORM, path), rows()
    fake = Fake()
    register(fake)
    lz.lock("rms_norm", REFERENCE)
    torch.testing.assert_close(call(x), normalized(x))
    assert fake.calls == 0 and served() == REFERENCE
    (op, lock), = lz.get_locks().items()
    assert op == "rms_norm"
    assert lock == {"kernel": REFERENCE, "origin": "lz.lock()", "layer": "programmatic", "when": []}
    assert lz.explain("rms_norm", x).locked == "lz.lock()"
    lz.lock("attention", "reference.attention")
    lz.unlock("rms_norm")
    assert set(lz.get_locks()) == {"attention"}
    call(x)
    assert fake.calls == 1
    lz.unlock()
    assert lz.get_locks() == {}
    lz.unlock()                                            # nothing to take back is no mistake


def test_a_new_lock_takes_the_place_of_the_old_one():
    lz.lock("rms_norm", REFERENCE)
    lz.lock("rms_norm", TORCH)
    assert served() == TORCH and len(lz.get_locks()) == 1


def test_a_lock_under_a_condition(path):
    call, fake = path_of(ATTENTION, path), Fake("fake.one", ATTENTION)
    register(fake)
    lz.lock("attention", "reference.attention", when={"seq_k": "> 2500"})
    assert [str(t) for t in lz.get_locks()["attention"]["when"]]
    for n in (2400, 2500, 2501, 2600, 2499):               # all in one bucket
        call(*qkv(seq_q=1, seq_k=n, dim=4, heads=1))
    assert fake.calls == 3


def test_a_lock_to_what_cannot_serve_raises_and_is_not_bent():
    register(Fake(requires=(at_most("hidden", 4),)))
    lz.lock("rms_norm", "fake.one")
    with pytest.raises(lz.errors.NamedKernelRefused, match="hidden must be <= 4"):
        lz.rms_norm(rows())
    assert lz.rms_norm(rows(3, 4)).shape == (3, 4)


@pytest.mark.parametrize(("act", "words"), [
    (lambda: lz.lock("rms_nrm", TORCH), "did you mean 'rms_norm'"),
    (lambda: lz.lock("rms_norm", "torch.rmsnorm"), "did you mean 'torch.rms_norm'"),
    (lambda: lz.lock("rms_norm", TORCH, when={"hiden": 4}), "did you mean 'hidden'"),
    (lambda: lz.lock("rms_norm", TORCH, seconds=0), "seconds= must be > 0"),
    (lambda: lz.prefer("tronch"), "did you mean|there are"),
    (lambda: lz.prefer(strict_mod=True).__enter__(), "did you mean 'strict_mode'"),
    (lambda: lz.configure(cache_sise=3), "did you mean 'cache_size'"),
    (lambda: lz.configure(cache_size="large"), "must be a whole number >= 1, got 'large'"),
    (lambda: lz.configure(strict_mode=True, seconds=-1), "seconds= must be > 0"),
    (lambda: lz.configure(rules=(lz.PolicyRule.of("deny", "torch.*", "atention"),)),
     "did you mean 'attention'"),
    (lambda: lz.PolicyRule.of("forbid", "torch.*"), "unknown action"),
    (lambda: lz.load_config("/nonexistent/policy.yaml"), "wanted a policy file; cannot read it"),
])
def test_a_wrong_word_gives_the_nearest_and_changes_nothing(act, words):
    before = worlds.current()
    with pytest.raises(lz.errors.ConfigError, match=words):
        act()
    assert worlds.current() is before


# preferences

def test_prefer_puts_first_what_can_serve_and_nothing_that_cannot(path):
    call, x = path_of(RMS_NORM, path), rows()
    narrow = Fake("fake.narrow", prior=0.001, requires=(at_most("hidden", 8),))
    register(narrow)
    with lz.prefer("fake.narrow"):
        call(x)
        call(rows(3, 8))
    call(rows(3, 8))
    assert narrow.calls == 1
    with lz.prefer("fake"):                                # a whole library by its name
        call(rows(3, 8))
    assert narrow.calls == 2


def test_the_first_named_is_preferred_most_and_the_inner_block_adds_to_the_outer():
    register(*(Fake(f"fake.{n}", prior=1e-4) for n in "abc"))

    def order():
        return [s.kernel for s in lz.explain("rms_norm", rows()).steps]

    with lz.prefer("fake.b", "fake.a"):
        assert order()[:2] == ["fake.b", "fake.a"]
        with lz.prefer("fake.c"):
            assert set(order()[:2]) == {"fake.b", "fake.c"} and order()[2] == "fake.a"
        assert order()[:2] == ["fake.b", "fake.a"]
    assert order()[0] not in ("fake.a", "fake.b", "fake.c")


def test_a_block_ends_also_by_an_error():
    with pytest.raises(RuntimeError, match="out"), lz.prefer(REFERENCE):
        assert served() == REFERENCE
        raise RuntimeError("out")
    assert served() != REFERENCE


def test_prefer_for_some_ops_and_under_a_condition(path):
    call, fake = path_of(RMS_NORM, path), Fake(prior=0.001)
    register(fake, other := Fake("fake.layer", lz.op("layer_norm"), prior=0.001))
    with lz.prefer("fake.*", op="rms_norm", when={"rows": ">= 21"}):
        for n in (17, 20, 21, 24):                         # one bucket
            call(rows(n))
        lz.layer_norm(rows())
    assert fake.calls == 2 and other.calls == 0


def test_a_block_is_for_its_thread(path):
    call, inside, outside = path_of(RMS_NORM, path), Fake("fake.inside", prior=0.001), []
    register(inside)
    stop, started = threading.Event(), threading.Event()

    def elsewhere():
        while not stop.is_set():
            call(rows())
            outside.append(inside.calls)
            started.set()

    worker = threading.Thread(target=elsewhere)
    worker.start()
    assert started.wait(60)
    with lz.prefer("fake.inside"):
        for _ in range(50):
            call(rows())
    stop.set()
    worker.join(60)
    assert inside.calls == 50                              # none of the other thread's


def test_a_block_goes_where_its_context_is_carried():
    with lz.prefer(REFERENCE):
        context = contextvars.copy_context()
    out = []
    worker = threading.Thread(target=lambda: out.append(context.run(served)))
    worker.start()
    worker.join(60)
    assert out == [REFERENCE] and served() != REFERENCE


def test_a_block_is_for_its_task(path):
    call, fake = path_of(RMS_NORM, path), Fake(prior=0.001)
    register(fake)

    async def with_it():
        with lz.prefer("fake.one"):
            for _ in range(10):
                call(rows())
                await asyncio.sleep(0)
            await asyncio.gather(child(), child())

    async def child():                                     # a task begun inside inherits
        call(rows())

    async def without_it():
        for _ in range(20):
            call(rows())
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(without_it(), with_it(), without_it(), with_it())

    asyncio.run(main())
    assert fake.calls == 24


def test_disabled_leaves_torchs_own_default(path):
    call, fake = path_of(RMS_NORM, path), Fake()
    register(fake)
    with lz.disabled():
        torch.testing.assert_close(call(rows()), normalized(rows()))
        plan = lz.explain("rms_norm", rows())
        assert (plan.kernel == TORCH and [r.code for r in plan.why_not("fake.one")]
                == [Code.LZ_DISABLED])
        q, k, v = qkv()
        assert lz.which("attention", q, k, v) == "torch.sdpa"
    assert fake.calls == 0
    call(rows())
    assert fake.calls == 1
    lz.configure(disabled=True)
    call(rows())
    assert fake.calls == 1


# for a time

def test_what_is_configured_for_a_time_ends_by_itself(path):
    call, fake = path_of(RMS_NORM, path), Fake()
    register(fake)
    lz.configure(memory_headroom=10**9)
    lz.configure(disabled=True, memory_headroom=5, seconds=600)
    call(rows())
    assert fake.calls == 0 and settings("memory_headroom")[0] == 5
    worlds.apply_deadlines(time.monotonic() + 600)
    # what held before holds again
    assert not settings("disabled")[0]
    assert settings("memory_headroom") == (10**9, "programmatic")
    call(rows())
    assert fake.calls == 1
    lz.configure(disabled=True, seconds=0.05)
    wait_for(lambda: not settings("disabled")[0])          # by the clock
    call(rows())
    assert fake.calls == 2


def test_a_lock_for_a_time_ends_by_itself(path):
    call, fake = path_of(RMS_NORM, path), Fake()
    register(fake)
    lz.lock("rms_norm", REFERENCE, seconds=600)
    call(rows())
    assert fake.calls == 0
    worlds.apply_deadlines(time.monotonic() + 600)
    assert not lz.get_locks()
    call(rows())
    assert fake.calls == 1
    lz.lock("rms_norm", REFERENCE, seconds=0.05)
    wait_for(lambda: not lz.get_locks())                   # by the clock


def test_a_preference_for_a_time_ends_inside_its_block(path):
    call, fake = path_of(RMS_NORM, path), Fake(prior=0.001)
    register(fake)
    with lz.prefer("fake.one", seconds=600):
        call(rows()), call(rows())
        assert fake.calls == 2

    def served():
        before = fake.calls
        call(rows())
        return fake.calls > before

    with lz.prefer("fake.one", seconds=0.05):
        wait_for(lambda: not served())
        assert not served()


def test_to_take_back_locks_keeps_what_was_said_before_a_time_boxed_change():
    lz.configure(memory_headroom=10**9)
    lz.lock("rms_norm", REFERENCE)
    lz.configure(strict_mode=True, seconds=0.2)
    lz.unlock()
    wait_for(lambda: not settings("strict_mode")[0])
    assert settings("memory_headroom")[0] == 10**9 and lz.get_locks() == {}


# the file

def test_a_file_is_read_again_when_it_changes(tmp_path, path, emitted):
    call, fake, file = path_of(RMS_NORM, path), Fake(), tmp_path / "policy.yaml"
    register(fake)
    file.write_text("settings: {policy_poll: 0.02}\nrules:\n  - deny: fake.one\n")
    lz.load_config(file)
    call(rows())
    assert fake.calls == 0
    assert [r.message for r in lz.explain("rms_norm", rows()).why_not("fake.one")] == [
        "denied by policy.yaml:3"]
    file.write_text("settings: {policy_poll: 0.02, breaker_threshold: 7}\n")
    wait_for(lambda: settings("breaker_threshold") == (7, "file"))           # by the clock
    call(rows())
    assert fake.calls == 1 and events_of(PolicyRejected, emitted) == []


def test_a_broken_file_keeps_the_old_policy_and_says_so_once(tmp_path, path, emitted, caplog):
    call, fake, file = path_of(RMS_NORM, path), Fake(), tmp_path / "policy.yaml"
    register(fake)
    file.write_text("settings: {policy_poll: 0.02}\nrules:\n  - deny: fake.one\n")
    lz.load_config(file)
    bad = tmp_path / "new.yaml"                # whole or not at all: an empty file is a policy too
    bad.write_text(
        "settings: {policy_poll: 0.02, strict_mod: true}\nrules:\n  - denny: fake.one\n")
    bad.replace(file)
    wait_for(lambda: events_of(PolicyRejected, emitted))
    time.sleep(0.1)
    (event,) = events_of(PolicyRejected, emitted)
    assert ("policy.yaml:1" in event.error and "strict_mode" in event.error
            and "policy.yaml:3" in event.error)
    assert "policy_rejected" in caplog.text
    call(rows())
    # not half of it either
    assert fake.calls == 0 and settings("strict_mode") == (False, "default")
    file.unlink()
    wait_for(lambda: len(events_of(PolicyRejected, emitted)) == 2)
    call(rows())
    assert fake.calls == 0
    file.write_text("settings: {policy_poll: 0.02}\n")
    wait_for(lambda: lz.get_config()["rules"] == [])
    call(rows())
    assert fake.calls == 1


def test_reload_looks_now_and_a_file_may_be_let_go(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text("settings: {policy_poll: 0, breaker_threshold: 7}\n")
    lz.load_config(file)
    assert (settings("breaker_threshold") == (7, "file")
            and lz.get_config()["policy_file"] == str(file))
    file.write_text("settings: {policy_poll: 0, breaker_threshold: 77}\n")
    time.sleep(0.05)
    assert settings("breaker_threshold")[0] == 7           # nobody looks
    lz.reload()
    assert settings("breaker_threshold")[0] == 77
    lz.load_config(None)
    assert settings("breaker_threshold")[1] == "default" and lz.get_config()["policy_file"] == ""


def test_a_broken_file_given_by_hand_is_refused_and_changes_nothing(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("settings: {breaker_threshold: 7}\n")
    bad.write_text("settings: {breaker_threshold: 0}\n")
    lz.load_config(good)
    before = worlds.current()
    with pytest.raises(lz.errors.ConfigError,
                       match=r"bad.yaml:1: breaker_threshold must be a whole number >= 1"):
        lz.load_config(bad)
    assert worlds.current() is before and settings("breaker_threshold") == (7, "file")


def test_the_policy_has_a_hash_that_changes_with_what_it_says():
    seen = [lz.get_config()["policy_hash"]]
    lz.configure(strict_mode=True)
    seen.append(lz.get_config()["policy_hash"])
    lz.lock("rms_norm", REFERENCE)
    seen.append(lz.get_config()["policy_hash"])
    lz.unlock()
    assert lz.get_config()["policy_hash"] == seen[1] and len(set(seen)) == 3
    assert lz.explain("rms_norm", rows()).policy == seen[1]


# names that are no kernel's

def test_a_policy_that_names_no_kernel_is_told_when_it_is_read_and_by_the_doctor(tmp_path, caplog):
    file = tmp_path / "policy.yaml"
    file.write_text("rules:\n  - deny: flash-attn\n  - deny: flash_atn.v2\n    op: attention\n"
                    "  - boost: {torch.rms_nrm: 2.0}\n")
    with caplog.at_level(logging.WARNING, "layerzero"):
        lz.load_config(file)
    messages = ["policy.yaml:3: deny: no kernel of lz.attention is called 'flash_atn.v2'; "
                "did you mean 'flash_attn.v2'?",
                "policy.yaml:5: boost: no kernel is called 'torch.rms_nrm'; did you mean "
                "'torch.rms_norm'?"]
    assert [record.getMessage() for record in caplog.records] == [f"policy: {t}" for t in messages]
    checks = [check for check in lz.doctor().checks if check.name == "policy names"]
    assert [check.detail for check in checks] == messages and not any(check.ok for check in checks)
    caplog.clear()
    lz.configure(cache_size=99)                # says nothing again
    assert not caplog.records
    register(Fake("torch.rms_nrm"))            # now there is one
    assert len([check for check in lz.doctor().checks if check.name == "policy names"]) == 1
    lz.load_config(None)


def test_a_call_may_name_a_kernel_as_its_library_is_called_elsewhere():
    assert lz.which("attention", *qkv(8), backend="sdpa") == "torch.sdpa"
    assert lz.which("attention", *qkv(8), backend="eager") == "reference.attention"
    with lz.prefer("math"):
        assert lz.which("attention", *qkv(8)) == "torch.sdpa_math"
    assert lz.validate("attention", "flex-attention", *qkv(8), attn_mask=None) == lz.validate(
        "attention", "torch.flex", *qkv(8))


# the log

def test_a_log_level_that_the_program_set_stays_until_policy_says_another():
    log = logging.getLogger("layerzero")
    before = log.level
    try:
        log.setLevel(logging.INFO)
        lz.configure(cache_size=98)
        assert log.level == logging.INFO
        with lz.prefer("torch"):
            lz.clear_cache()
        assert log.level == logging.INFO
        lz.configure(log_level="error", seconds=3600)
        assert log.level == logging.ERROR
        log.setLevel(logging.DEBUG)            # the program has the last word
        lz.configure(cache_size=97)
        assert log.level == logging.DEBUG
        worlds.publish(lambda w: w.replace(policy=w.policy.without("programmatic")), "test")
        assert log.level == logging.INFO       # as it was before the policy's
    finally:
        log.setLevel(before)
