"""A kernel whose workspace does not fit is left out, for the largest call that shares its cache
entry.
"""

from __future__ import annotations

import os

import pytest
import torch
from helpers import (
    ATTENTION,
    RMS_NORM,
    Fake,
    call_facts,
    nvidia,
    path_of,
    policy,
    qkv,
    register,
    rows,
)

import layerzero as lz
from layerzero.machine.memory import free_bytes, headroom
from layerzero.selection.engine import SelectionContext, make_roster, select
from layerzero.selection.score import rates_of
from layerzero.spec.event import Fallback, Selected
from layerzero.spec.grid import bucket_bottom, bucket_top
from layerzero.spec.reason import Code

MB, GB = 1 << 20, 1 << 30
HOPPER = nvidia(90)


def meta_facts(seq_q, seq_k, batch=1, heads=8):
    q, k, v = (torch.empty(batch, heads, n, 64, dtype=torch.float16, device="meta")
               for n in (seq_q, seq_k, seq_k))
    return call_facts(ATTENTION, q, k, v)


def plan_with_workspace(workspace, seq_q=1024, seq_k=1024, room=lambda: 1 << 62, **settings):
    """Whether a kernel with that workspace may serve, and its plan."""
    kernel = lz.Kernel("lib.k", ATTENTION, lambda: ATTENTION.reference, workspace=workspace)
    context = SelectionContext(policy(**settings), HOPPER.facts(), HOPPER.signature, rates_of("cuda"),
                               headroom=room)
    facts = {**meta_facts(seq_q, seq_k), **HOPPER.facts()}
    return select(ATTENTION, make_roster([kernel], context), facts, context, thorough=True)


# how much is needed

@pytest.mark.parametrize(("workspace", "want"), [
    ("0", 0), ("4096", 4096), ("2 * itemsize * batch * heads * seq_q * seq_k",
                               2 * 2 * 8 * 1024 * 1024),
    ("3 * max(itemsize, 4) * elements", 3 * 4 * 8 * 1024 * 1024),
    ("seq_q * head_dim // 2", 1024 * 32)])
def test_the_workspace_is_computed_from_the_facts_of_the_call(workspace, want):
    assert plan_with_workspace(workspace).steps[0].workspace == want
    assert plan_with_workspace(workspace).to_json()["steps"][0]["workspace"] == want


@pytest.mark.parametrize("seq_k", [2049, 2500, 3072])
def test_it_is_that_of_the_largest_call_in_the_bucket(seq_k):
    assert bucket_bottom(seq_k) == 2049 and bucket_top(seq_k) == 3072
    assert plan_with_workspace("seq_k * 1000", seq_k=seq_k).steps[0].workspace == 3072 * 1000
    # derived sizes too
    assert plan_with_workspace("elements", seq_q=1, seq_k=seq_k).steps[0].workspace == 8 * 1 * 3072
    # and exact ones as they are
    assert plan_with_workspace("heads * head_dim", seq_k=seq_k).steps[0].workspace == 8 * 64


def test_a_bucket_is_judged_as_one_whichever_of_its_calls_comes_first():
    verdicts = {bool(plan_with_workspace("seq_k * 100000", seq_k=n, room=lambda: 300_000_000))
                for n in range(2049, 3073, 64)}
    assert verdicts == {False}                             # 2049 alone would have fitted
    assert {bool(plan_with_workspace("seq_k * 100000", seq_k=n, room=lambda: 310_000_000))
            for n in (2049, 3072)} == {True}


# how much there is

def test_the_reason_says_what_is_needed_and_what_there_is():
    plan = plan_with_workspace("3000000000", room=lambda: 2 * GB)
    (reason,) = plan.why_not("lib.k")
    assert reason.code is Code.MEMORY_HEADROOM_EXCEEDED
    assert "3000000000" in reason.message and str(2 * GB) in reason.message
    assert plan_with_workspace("3000000000", room=lambda: 3 * 10**9)    # just enough is enough


def test_free_memory_is_asked_for_the_smallest_workspace_and_for_none():
    def never():
        raise AssertionError("asked")

    assert plan_with_workspace("0", room=never)
    with pytest.raises(AssertionError, match="asked"):
        plan_with_workspace("1", room=never)
    assert not plan_with_workspace("4096",
                                   room=lambda: 4095)           # many small ones fill a device too


def test_a_configured_headroom_holds_for_small_workspaces_too():
    assert not plan_with_workspace("4096", room=lambda: 1024, memory_headroom=1024)
    assert plan_with_workspace("1024", room=lambda: 1024, memory_headroom=1024)
    assert plan_with_workspace("0", room=lambda: 0, memory_headroom=0)


def test_headroom_is_the_configured_one_or_a_share_of_what_is_free():
    assert headroom("cpu", policy(memory_headroom=12345)) == 12345
    free = free_bytes("cpu")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free <= total
    half = headroom("cpu", policy(memory_headroom_fraction=0.5))
    assert 0 < half <= total // 2
    assert headroom("cpu", policy(memory_headroom_fraction=0)) == 0


# through the public functions

@pytest.mark.usefixtures("world")
def test_a_kernel_that_would_not_fit_does_not_serve(path):
    greedy = Fake("fake.greedy", workspace="1000000000000000")
    register(greedy)
    x = rows()
    torch.testing.assert_close(path_of(RMS_NORM, path)(x), RMS_NORM.reference(x))
    assert greedy.calls == 0
    assert [r.code for r in lz.explain("rms_norm", x).why_not("fake.greedy")] == [
        Code.MEMORY_HEADROOM_EXCEEDED]
    with pytest.raises(lz.errors.NamedKernelRefused, match="MEMORY_HEADROOM_EXCEEDED"):
        lz.rms_norm(x, backend="fake.greedy")


@pytest.mark.usefixtures("world")
def test_the_headroom_may_change_while_running(path):
    fake = Fake("fake.greedy", workspace="1000 * rows * hidden")
    register(fake)
    call, x = path_of(RMS_NORM, path), rows(3, 16)
    call(x)
    assert fake.calls == 1
    lz.configure(memory_headroom=1000)
    call(x)
    assert fake.calls == 1
    with lz.prefer(memory_headroom=100_000):
        call(x)
    assert fake.calls == 2
    lz.configure(memory_headroom=None)
    call(x)
    assert fake.calls == 3


def test_a_bucket_served_within_the_headroom_stays_within_it(path, emitted):
    fake = Fake("fake.greedy", ATTENTION, workspace="1000 * seq_k")
    register(fake)
    lz.configure(memory_headroom=24_000)
    call, largest = path_of(ATTENTION, path), 0
    for seq_k in range(17, 49):
        before = fake.calls
        call(*qkv(seq_q=2, seq_k=seq_k))
        if fake.calls > before:
            largest = seq_k
    assert largest == 24                                   # the top of the first bucket
    assert len([e for e in emitted if isinstance(e, Selected)]) == 3       # 17-24, 25-32, 33-48


def test_running_out_of_memory_all_the_same_walks_down_the_plan(path, emitted):
    greedy = Fake("fake.greedy", fault=torch.OutOfMemoryError("tried to allocate 8 GiB"))
    modest = Fake("fake.modest", prior=1e5)
    register(greedy, modest)
    call, x = path_of(RMS_NORM, path), rows()
    for _ in range(2):
        torch.testing.assert_close(call(x), RMS_NORM.reference(x))
    # it may fit the next time: nothing is tripped
    assert greedy.calls == modest.calls == 2
    fallbacks = [e for e in emitted if isinstance(e, Fallback)]
    assert len(fallbacks) == 2 and {e.reason.code for e in fallbacks} == {Code.OUT_OF_MEMORY}
