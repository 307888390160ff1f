"""explain, which, select, validate, list, doctor, config and stats: they say what really happens.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from helpers import ATTENTION, RMS_NORM, Fake, nvidia, path_of, qkv, register, rows

import layerzero as lz
from layerzero.spec.errors import (
    ConfigError,
    InvalidCall,
    KernelExecutionError,
    NamedKernelRefused,
    NoKernelFoundError,
)
from layerzero.spec.plan import Plan
from layerzero.spec.reason import Code, Reason
from layerzero.spec.rules import at_most
from layerzero.world import snapshot as worlds

JAGGED = "jagged"


def jagged():
    return torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)],
                                      layout=torch.jagged).transpose(1, 2)


def served(before, after):
    """(op, kernel) -> how often it was called in between."""
    counts = {(op, kernel): n for op, kernels in after.items() for kernel, n in kernels.items()}
    gone = {key: n - before.get(key[0], {}).get(key[1], 0) for key, n in counts.items()}
    return {key: n for key, n in gone.items() if n}


# what is explained is what runs

ASKED = [
    {}, {"is_causal": True}, {"return_lse": True}, {"window_left": 3}, {"softcap": 5.0},
    {"dropout_p": 0.5}, {"scale": 0.25},
    {"attn_mask": torch.ones(8, 8) > 0}, {"attn_mask": torch.randn(8, 8)},
    {"alibi_slopes": torch.tensor([0.5, 0.25])},
    {"layout": "bshd"}, {"backend": "torch.sdpa_math"}, {"backend": "reference"},
    {"policy": {"deterministic": True}}, {"policy": {"disabled": True}},
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kwargs", ASKED)
def test_explain_names_the_kernel_that_then_runs(world, path, kwargs, grad, op="attention"):
    tensors = [t.requires_grad_(grad) for t in qkv(8)]
    run = path_of(op, path)
    plan = lz.explain(op, *tensors, **kwargs)
    for _ in range(3):
        before = lz.stats().calls
        run(*tensors, **kwargs)
        assert served(before, lz.stats().calls) == {(op, plan.kernel): 1}
    assert lz.which(op, *tensors, **kwargs) == lz.select(op, *tensors,
                                                         **kwargs).kernel == plan.kernel
    assert lz.validate(op, plan.kernel, *tensors, **kwargs) == ()


@pytest.mark.parametrize("form", ["2-D", "3-D", "5-D", "auto", JAGGED, "decode", "empty", "double",
                                  "half", "meta"])
def test_explain_follows_unusual_calls(world, form):
    q, k, v = qkv(8)
    kwargs = {}
    call = {"2-D": (q[0, 0], k[0, 0], v[0, 0]), "3-D": (q[0], k[0], v[0]),
            "5-D": (q[None], k[None], v[None]), "double": (q.double(), k.double(), v.double()),
            "half": (q.half(), k.half(), v.half()), "empty": (q[:0], k[:0], v[:0]),
            "decode": qkv(1, 64, heads=4, kv_heads=1),
            "meta": (q.to("meta"), k.to("meta"), v.to("meta")),
            JAGGED: (jagged(),) * 3, "auto": qkv(8, 9)}[form]
    if form == "auto":
        kwargs["layout"] = "auto"
    plan = lz.explain("attention", *call, **kwargs)
    assert plan.op == ("varlen_attention" if form == JAGGED else "attention")
    before = lz.stats().calls
    lz.attention(*call, **kwargs)
    assert served(before, lz.stats().calls) == {(plan.op, plan.kernel): 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explain_follows_autocast(world, dtype):
    call = qkv(8, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = lz.explain("attention", *call)
        before = lz.stats().calls
        out = lz.attention(*call)
        assert served(before, lz.stats().calls) == {("attention", plan.kernel): 1}
    assert plan.facts["dtype"] == str(out.dtype)[6:]


def test_explain_follows_adaptation(world):
    q, k, v = qkv(8)
    with pytest.raises(InvalidCall):
        lz.explain("attention", q, k.half(), v)
    lz.configure(allow_adaptation=True)
    plan = lz.explain("attention", q, k.half(), v)
    before = lz.stats().calls
    lz.attention(q, k.half(), v)
    assert served(before, lz.stats().calls) == {("attention", plan.kernel): 1}


def test_explain_follows_contexts_and_locks(world, path):
    run, call = path_of("attention", path), qkv(8)

    def check(kernel=None):
        plan = lz.explain("attention", *call)
        before = lz.stats().calls
        run(*call)
        run(*call)
        assert served(before, lz.stats().calls) == {("attention", plan.kernel): 2}
        assert kernel is None or plan.kernel == kernel
        return plan

    check()
    with lz.prefer("torch.sdpa_math"):
        assert check("torch.sdpa_math").locked == ""
    with lz.disabled():
        check("torch.sdpa")
    lz.lock("attention", "reference.attention")
    assert check("reference.attention").locked == "lz.lock()"
    with lz.prefer("torch.sdpa_math"):
        check("reference.attention")
    lz.unlock()
    lz.configure(rules=(lz.PolicyRule.of("deny", "torch.sdpa*", "attention"),))
    assert not check().kernel.startswith("torch.sdpa")


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "add_rms_norm", "varlen_attention"])
def test_explain_is_right_about_every_op(world, op):
    contract = lz.op(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lz.errors.CausalAlignmentWarning)
        for case in contract.cases:
            call = contract.inputs(**case)
            plan = lz.explain(op, **call)
            before = lz.stats().calls
            getattr(lz, op)(**call)
            assert served(before, lz.stats().calls) == {(op, plan.kernel): 1}, case


def test_explain_runs_nothing_and_loads_nothing(world, emitted):
    fake = Fake("fake.watched")
    register(fake)
    before = lz.stats().calls
    del emitted[:]
    for ask in (lz.explain, lz.which, lz.select):
        ask("rms_norm", rows())
    assert lz.validate("rms_norm", "fake.watched", rows()) == ()
    assert fake.calls == fake.loads == 0 and lz.stats().calls == before and emitted == []
    assert lz.explain("rms_norm", rows()).kernel == "fake.watched"


def test_a_kernel_that_fails_is_told(world):
    fake = Fake("fake.failing", fault=RuntimeError("no luck"))
    register(fake)
    served_by = lz.explain("rms_norm", rows()).steps[1].kernel
    before = lz.stats().calls
    lz.rms_norm(rows())
    plan = lz.explain("rms_norm", rows())
    notes = {s.kernel: s.note for s in plan.steps}
    assert "no luck" in notes["fake.failing"] and "served 1 call as a fallback" in notes[served_by]
    assert lz.stats().events["fallback"] == 1
    assert served(before, lz.stats().calls)
    for _ in range(2):
        lz.rms_norm(rows())
    plan = lz.explain("rms_norm", rows())
    assert plan.kernel == served_by
    reason = plan.why_not("fake.failing")[0]
    assert reason.code is Code.CIRCUIT_OPEN and "no luck" in reason.message
    assert reason in lz.validate("rms_norm", "fake.failing", rows())
    assert any(c.name == "health of fake.failing" and not c.ok and "no luck" in c.hint
               for c in lz.doctor().checks)


# the plan

def test_every_kernel_is_in_the_plan_once_and_thoroughly():
    plan = lz.explain("attention", *qkv(8), is_causal=True, window_left=2, softcap=3.0)
    mentioned = [s.kernel for s in plan.steps] + [r.kernel for r in plan.rejected]
    assert sorted(mentioned) == sorted(k.id for k in worlds.current().kernels("attention"))
    assert {Code.SOFTCAP_UNSUPPORTED,
            Code.WINDOW_UNSUPPORTED} <= {r.code for r in plan.why_not("torch.sdpa")}
    assert plan.why_not(plan.kernel) == () and plan.why_not("no.such") == ()
    totals = [s.score.total_us for s in plan.steps]
    assert totals == sorted(totals)


@pytest.mark.parametrize("kwargs", ASKED)
def test_a_plan_survives_json(kwargs):
    plan = lz.explain("attention", *qkv(8), **kwargs)
    text = json.dumps(plan.to_json())
    again = Plan.from_json(json.loads(text))
    assert again == plan and json.dumps(again.to_json()) == text and str(again) == str(plan)
    assert again.kernel == plan.kernel and bool(again) and again.from_cache == plan.from_cache


def test_a_plan_reads_well():
    text = str(lz.explain("attention", *qkv(8), backend="torch.sdpa_math"))
    first, second, *rest = text.splitlines()
    assert first == "lz.attention -> torch.sdpa_math  (named by backend=)"
    assert second.split()[:2] == ["->", "torch.sdpa_math"] and "us (prior)" in second
    assert any(line.split()[:2] == ["x", "flash_attn.v2"] and "PLATFORM_MISMATCH" in line
               for line in rest)


def test_from_cache_says_whether_the_choice_was_remembered(world, path):
    run, call = path_of("attention", path), qkv(8)
    assert not lz.explain("attention", *call).from_cache
    run(*call)
    assert lz.explain("attention", *call).from_cache
    assert not lz.explain("attention", *call, is_causal=True).from_cache
    with lz.prefer("torch.sdpa_math"):
        assert not lz.explain("attention", *call).from_cache
        run(*call)
        assert lz.explain("attention", *call).from_cache
    lz.clear_cache()
    assert not lz.explain("attention", *call).from_cache


# other devices

def plan_on(sm, dtype=torch.bfloat16, dim=64, **kwargs):
    return lz.explain("attention", *(t.to(dtype) for t in qkv(128, dim=dim)), on=nvidia(sm),
                      **kwargs)


def codes(plan, kernel):
    return {r.code for r in plan.why_not(kernel)}


def test_a_hopper_that_is_not_here():
    plan = plan_on(90)
    assert (plan.facts["sm"] == 90 and plan.facts["gpu_generation"] == "hopper"
            and plan.facts["device"] == "cuda")
    assert (plan.kernel.startswith("torch.sdpa")
            and codes(plan, "torch.sdpa_flash") == {Code.PLATFORM_MISMATCH})
    assert {"torch.sdpa_flash_cuda", "torch.sdpa",
            "reference.attention"} <= {s.kernel for s in plan.steps}
    assert not plan.from_cache
    assert lz.which("attention", *qkv(8, dtype=torch.bfloat16), on=nvidia(90)) is not None


def test_generations_that_are_not_here_differ():
    assert Code.SM_TOO_OLD in codes(plan_on(75, torch.float16), "torch.sdpa_flash_cuda")
    assert codes(plan_on(80), "torch.sdpa_flash_cuda") == set()
    assert Code.GPU_GENERATION_UNSUPPORTED in codes(plan_on(100), "flash_attn.v3")
    assert Code.GPU_GENERATION_UNSUPPORTED not in codes(plan_on(90), "flash_attn.v3")
    assert Code.GPU_GENERATION_UNSUPPORTED not in codes(plan_on(100), "flash_attn.v4")
    assert Code.HEAD_DIM_TOO_LARGE in codes(plan_on(90, dim=264), "torch.sdpa_flash_cuda")
    assert Code.HEAD_DIM_ALIGNMENT in codes(plan_on(90, dim=84), "torch.sdpa_flash_cuda")
    assert Code.DTYPE_UNSUPPORTED in codes(plan_on(90, torch.float32), "torch.sdpa_flash_cuda")


@pytest.mark.parametrize("sm", [75, 80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_something_serves_on_every_device(sm, dtype):
    plan = plan_on(sm, dtype)
    assert plan.steps and Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_asking_about_another_device_changes_nothing_here(world):
    call = qkv(8)
    before = worlds.current()
    here = lz.explain("attention", *call)
    plan_on(90)
    assert worlds.current() is before and lz.explain("attention", *call) == here
    lz.attention(*call)


def test_a_named_kernel_can_be_refused_for_another_device():
    with pytest.raises(NamedKernelRefused,
                       match=r"torch.sdpa_flash: PLATFORM_MISMATCH: runs on cpu, the tensors are on cuda"):
        lz.select("attention", *qkv(8), on=nvidia(90), backend="torch.sdpa_flash")
    reasons = lz.validate("attention", "torch.sdpa_flash", *qkv(8), on=nvidia(90))
    assert [r.code for r in reasons] == [Code.PLATFORM_MISMATCH]


# named kernels

@pytest.mark.parametrize("ask", [lz.attention, lambda *a, **k: lz.select("attention", *a, **k),
                                 lambda *a, **k: lz.which("attention", *a, **k)])
def test_a_named_kernel_that_cannot_serve_says_why(ask):
    with pytest.raises(NamedKernelRefused) as caught:
        ask(*qkv(8), window_left=2, softcap=3.0, backend="torch.sdpa")
    text = str(caught.value)
    assert text.startswith(
        "lz.attention: torch.sdpa was asked for by backend= and cannot serve this call:")
    assert "WINDOW_UNSUPPORTED" in text and "SOFTCAP_UNSUPPORTED" in text
    assert {Code.WINDOW_UNSUPPORTED, Code.SOFTCAP_UNSUPPORTED} <= set(caught.value.codes)
    assert isinstance(caught.value, NoKernelFoundError) and isinstance(caught.value, RuntimeError)


def test_a_backend_that_is_not_installed_or_not_known_says_so(world):
    with pytest.raises(NamedKernelRefused,
                       match=r"flash_attn\.v2: .*(NOT_INSTALLED|PLATFORM_MISMATCH)"):
        lz.attention(*qkv(8), backend="flash_attn")
    with pytest.raises(NamedKernelRefused,
                       match=r"no kernel of lz.attention is called 'nobody'; there are .*torch"):
        lz.attention(*qkv(8), backend="nobody")
    with pytest.raises(NamedKernelRefused, match=r"no kernel of lz.rms_norm is called"):
        lz.rms_norm(rows(), backend="torch.sdpa")
    lz.lock("attention", "torch.sdpa", when={"softcap": "> 0"})
    with pytest.raises(NamedKernelRefused, match=r"torch.sdpa was asked for by lz.lock\(\)"):
        lz.attention(*qkv(8), softcap=1.0)
    lz.attention(*qkv(8))


def test_a_named_kernel_that_breaks_is_not_replaced(world):
    fake = Fake("fake.named", fault=RuntimeError("cracked"))
    register(fake)
    with pytest.raises(
            KernelExecutionError,
            match=r"named by backend=, so nothing else was tried.*\n.*fake.named.*cracked"):
        lz.rms_norm(rows(), backend="fake.named")


# questions that make no sense

def test_unknown_ops_and_kernels_are_named():
    with pytest.raises(ConfigError, match="there is no op 'atention'; did you mean 'attention'"):
        lz.explain("atention", *qkv(8))
    with pytest.raises(ConfigError, match="is not an lz operation"):
        lz.explain(torch.rms_norm, rows())
    with pytest.raises(ConfigError,
                       match=r"no kernel of lz.attention is called 'torch.sdpaa'; did you mean "
                             r"'torch.sdpa'"):
        lz.validate("attention", "torch.sdpaa", *qkv(8))
    with pytest.raises(ConfigError, match=r"torch.sdpa.*attention.*rms_norm"):
        lz.validate("rms_norm", "torch.sdpa", rows())
    with pytest.raises(ConfigError, match="there is no op"):
        lz.list_kernels("nothing")


@pytest.mark.parametrize(("args", "code"), [
    ((1, 2, 3), Code.WRONG_TYPE), ((None,) * 3, Code.WRONG_TYPE),
    ((torch.ones(2),) * 3, Code.WRONG_NDIM),
    ((torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 9), torch.ones(1, 1, 2, 8)), Code.DIM_MISMATCH),
    ((torch.ones(1, 1, 2, 8, dtype=torch.int32),) * 3, Code.DTYPE_UNSUPPORTED)])
def test_a_callers_mistake_is_a_reason_too(args, code):
    reasons = lz.validate("attention", "torch.sdpa", *args)
    assert code in [r.code for r in reasons] and all(isinstance(r, Reason) for r in reasons)
    for ask in (lz.explain, lz.which, lz.select):
        with pytest.raises(InvalidCall) as caught:
            ask("attention", *args)
        assert code in caught.value.codes
    with pytest.raises(InvalidCall) as caught:
        lz.attention(*args)
    assert caught.value.reasons == reasons


def test_wrong_arguments_are_python_errors():
    for ask in (lz.explain, lz.which, lz.select):
        with pytest.raises(TypeError,
                           match=r"attention\(\) missing 2 required positional arguments: 'key' and 'value'"):
            ask("attention", torch.ones(1, 1, 2, 8))
        with pytest.raises(TypeError,
                           match=r"attention\(\) got an unexpected keyword argument 'causal'"):
            ask("attention", *qkv(8), causal=True)


def test_nothing_can_serve_names_everything(world):
    lz.configure(rules=(lz.PolicyRule.of("deny", "*", "rms_norm"),))
    for ask in (lz.select, lz.which):
        with pytest.raises(NoKernelFoundError, match=r"no kernel can serve this call") as caught:
            ask("rms_norm", rows())
        for kernel in worlds.current().kernels("rms_norm"):
            assert kernel.id in str(caught.value)
    plan = lz.explain("rms_norm", rows())
    assert not plan and plan.kernel is None and plan.steps == ()
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(NoKernelFoundError):
        lz.rms_norm(rows())


# lists

def test_the_list_has_every_kernel_and_how_it_stands(world):
    listed = lz.list_kernels(device="cpu")
    assert [row.id for row in listed] == [k.id for name in worlds.current().catalog.ops
                                          for k in worlds.current().kernels(name)]
    by_id = {row.id: row for row in listed}
    assert by_id["torch.sdpa"].status == "ready" and by_id["torch.sdpa"].reasons == ()
    assert by_id["flash_attn.v2"].status == by_id["flash_attn.v2"].reasons[
        0].code.value.lower().replace("_", " ")
    assert (by_id["torch.sdpa_flash"].requires
            and "device" in " ".join(by_id["torch.sdpa_flash"].requires))
    assert [row.id for row in lz.list_kernels("rms_norm")] == [k.id
                                                               for k in worlds.current().kernels(
                                                                   "rms_norm")]
    assert json.loads(json.dumps([row.to_json() for row in listed]))[0]["id"] == listed[0].id
    register(Fake("fake.jit", jit=True), Fake("fake.untested", untested=True),
             Fake("fake.gpu", package="no_such_package"))
    by_id = {row.id: row for row in lz.list_kernels("rms_norm", device="cpu")}
    assert by_id["fake.jit"].status == "ready, compiles on first use"
    assert (by_id["fake.untested"].status == "untested on hardware"
            and by_id["fake.gpu"].status == "not installed")


def test_what_is_listed_as_ready_is_what_can_be_named(world):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ("rms_norm", "layer_norm", "add_rms_norm"):
            call = lz.op(op).inputs()
            for row in lz.list_kernels(op, device="cpu"):
                if row.status == "ready":
                    getattr(lz, op)(**call, backend=row.id)
                elif row.reasons:
                    with pytest.raises(NamedKernelRefused):
                        getattr(lz, op)(**call, backend=row.id)


# doctor, config, stats

def test_the_doctor(world):
    diagnosis = lz.doctor()
    assert {"configuration", "native fast path"} <= {c.name for c in diagnosis.checks}
    assert diagnosis.devices and diagnosis.versions["torch"] == torch.__version__
    data = json.loads(json.dumps(diagnosis.to_json()))
    assert data["ok"] == diagnosis.ok == all(c.ok
                                             for c in diagnosis.checks) and len(
                                                 data["checks"]) == len(diagnosis.checks)
    text = str(diagnosis)
    assert all(c.name in text and c.detail in text for c in diagnosis.checks)
    for kernel in worlds.current().catalog.kernels:
        if kernel.package:
            assert f"library {kernel.package}" in text

    def broken():
        raise ImportError("libfoo.so: undefined symbol: _ZN3fooE")

    lz.register(lz.Kernel("mine.broken", RMS_NORM, broken, prior=1e6, less_work="a test"))
    lz.rms_norm(rows())
    check = next(c for c in lz.doctor().checks if c.name == "loading mine.broken")
    assert not check.ok and "undefined symbol" in check.detail and "torch" in check.hint
    assert not lz.doctor().ok and "!! " in str(lz.doctor())


def test_the_configuration_says_where_each_setting_comes_from(world):
    plain = lz.get_config()
    elsewhere = {name for name, source in plain["source"].items() if source != "default"}
    # of the tests' environment
    assert elsewhere == {"shipped_measurements"} and plain["rules"] == []
    lz.configure(strict_mode=True,
                 rules=(lz.PolicyRule.of("deny", "torch.sdpa", "attention", {"seq_k": "> 9"}),))
    with lz.prefer("torch.sdpa_math", deterministic=True):
        inside = lz.get_config()
    after = lz.get_config()
    assert inside["settings"]["strict_mode"] and inside["settings"]["deterministic"]
    assert (inside["source"]["strict_mode"], inside["source"]["deterministic"]) == ("programmatic",
                                                                                    "context")
    assert (after["source"]["strict_mode"], after["source"]["deterministic"]) == ("programmatic",
                                                                                  "default")
    assert ([r["layer"] for r in inside["rules"]] == ["context", "programmatic"]
            and len(after["rules"]) == 1)
    text = "deny torch.sdpa for attention when seq_k given and seq_k >= 9 and seq_k other than 9"
    assert after["rules"][0]["text"] == text
    assert len({c["policy_hash"] for c in (plain, inside, after)}) == 3
    assert json.loads(json.dumps(inside))["settings"] == inside["settings"]
    assert lz.explain("attention", *qkv(8)).policy == after["policy_hash"]


def test_the_statistics_count_calls_and_events(world):
    lz.clear_cache()
    before = lz.stats()
    for _ in range(4):
        lz.rms_norm(rows())
    lz.attention(*qkv(8))
    after = lz.stats()
    assert sum(served(before.calls, after.calls).values()) == 5
    assert after.events["selected"] - before.events.get("selected", 0) == 2
    assert json.loads(json.dumps(after.to_json())) == after.to_json()


def test_by_name_and_by_function_are_the_same(world):
    call = qkv(8)
    for op in ("attention", lz.attention, path_of("attention", "python")):
        assert lz.which(op, *call) == lz.which("attention", *call)
    assert lz.explain(lz.rms_norm, rows()) == lz.explain("rms_norm", x=rows())


def test_a_rule_of_the_policy_is_given_as_the_reason(world):
    lz.configure(rules=(lz.PolicyRule.of("deny", "torch.sdpa_flash", "attention",
                                         origin="a test"),))
    plan = lz.explain("attention", *qkv(8))
    assert [(r.code, r.got)
            for r in plan.why_not("torch.sdpa_flash")] == [(Code.DENIED_BY_POLICY, "a test")]
    assert lz.validate("attention", "torch.sdpa_flash", *qkv(8)) == plan.why_not("torch.sdpa_flash")


def test_rules_added_by_a_kernel_show_in_explain(world):
    register(Fake("fake.small", ATTENTION, requires=(at_most("seq_k", 8),),
                  variants=("bhsd", "bshd")))
    assert lz.which("attention", *qkv(8)) == "fake.small"
    reason = lz.validate("attention", "fake.small", *qkv(8, 9))[0]
    assert (reason.fact, reason.want, reason.got) == ("seq_k", "<= 8", 9)
