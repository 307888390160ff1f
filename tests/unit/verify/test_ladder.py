"""Levels 2 to 5 of the ladder: what is right passes for any decoder, what is planted wrong is found
and named.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import layerzero as lz
from layerzero.models.decoder import STAGES, Decoder
from layerzero.models.decoder_config import CONFIGS, DecoderConfig, cast, make_weights, parse_config
from layerzero.ops.formulas.common import attend
from layerzero.ops.formulas.rope import gather_angles, rotate
from layerzero.spec.errors import ConfigError
from layerzero.verify.model.culprit import find
from layerzero.verify.model.ladder import (
    LadderModel,
    climb,
    forward_routes,
    layer_routes,
    random_model,
    stage_routes,
)
from layerzero.verify.model.plain import PlainTorch, rope_angles
from layerzero.verify.model.route import LadderRow
from layerzero.verify.model.served import LzCaller, patterns_of, rope_tables_of

pytestmark = pytest.mark.usefixtures("world")
OTHER = DecoderConfig(48, 6, 3, layers=3, head_dim=10, inner=100, norm="layer",
                      activation="gelu_tanh", bias=True, positions="rope", rope_style="interleaved",
                      window=7, tied=True, vocab=131)


def climb_level(level, config="gqa", dtype="float32", named="", **more):
    name, shape = (config, CONFIGS[config]) if isinstance(config, str) else ("other", config)
    [rung] = climb(level, configs=[(name, shape)], dtypes=[dtype], named=named, **more)
    return rung


def plant(op, run, id="planted.one"):
    """A wrong kernel that is chosen before all others."""
    lz.register(lz.Kernel(id, lz.op(op), lambda: run, prior=1e6, less_work="a test"))
    return id


# What is right.

@pytest.mark.parametrize("level", (2, 3, 4, 5))
@pytest.mark.parametrize("config", ("tiny", "gqa", "no_rope", OTHER), ids=str)
def test_right_kernels_pass(level, config):
    rung = climb_level(level, config, steps=2)
    assert rung.passed, rung
    assert rung.rows and rung.kernels and rung.culprit is None
    assert (f"level {level}, " in str(rung) and json.loads(json.dumps(rung.to_json()))["status"]
            == "passed")


@pytest.mark.parametrize("config", ("deep", "wide", "medium"))
def test_the_other_configurations_pass(config):
    assert climb_level(2, config).passed and climb_level(4, config).passed


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("level", (2, 4, 5))
def test_sixteen_bits_pass_by_twice_the_eager_error(level, dtype):
    rung = climb_level(level, "gqa", dtype, steps=2)
    assert rung.passed, rung
    assert all(row.eager is not None for row in rung.rows if not row.what.startswith("top-1"))


def test_level_2_compares_every_buffer_every_gradient_and_every_decoded_token():
    rung = climb_level(2)
    whole = {row.what for row in rung.tables["forward and backward, separate"]}
    assert {f"0.{stage}" for stage in STAGES} <= whole
    assert {f"grad {n}" for n in ("x", "0.ln1", "0.qkv", "0.out", "0.ln2", "0.in",
                                  "0.down")} <= whole
    for kept in ("grown", "contiguous", "paged"):
        rows = rung.tables[f"prefill + decode, {kept}"]
        assert [r.what for r in rows][:3] == [f"tokens {n}, 0.output"
                                              for n in ("0-11", "12-15", "16-16")]
        assert rows[-1].what == "tokens 23-23, 0.output"
    assert {"attention", "paged_attention", "mlp", "add_rms_norm",
            "rope"} <= {op for op, _ in rung.kernels}


def test_level_3_has_one_table_for_each_layer_with_every_stage():
    rung = climb_level(3, "deep")
    assert list(rung.tables) == [f"layer {i}" for i in range(6)]
    assert [row.what.partition(".")[2] for row in rung.tables["layer 4"]] == [*STAGES, "mlp_out"]


def test_level_4_says_the_likeliest_token_of_every_position():
    rung = climb_level(4)
    [first, second] = [row for row in rung.rows if row.what == "top-1"]
    assert first.text == second.text == "48 of 48 positions equal"
    each = [row for row in rung.tables["forward"] if row.what.startswith("top-1 at")]
    assert len(each) == 48 and each[-1].what == "top-1 at 1, 23" and "wanted" in each[-1].text
    assert (rung.rows[0].what == "logits" and rung.rows[0].error < 1e-4
            and rung.rows[0].allowed == 1e-3)


def test_level_5_follows_the_table_of_drift():
    rung = climb_level(5, "tiny", steps=5)
    assert len(rung.tables) == 4               # two optimizers, separate and fused calls
    by_name = {row.what: row for row in rung.tables["5 steps of AdamW, separate"]}
    assert (by_name["layer.0.wq after 1"].allowed == 1e-5
            and by_name["layer.0.wq after 5"].allowed == 1e-3)
    assert by_name["loss after 1"].allowed == 1e-5 and by_name["loss after 5"].allowed == 1e-2
    assert {"layer.1.w_gate after 5", "embed after 5", "head after 1",
            "grad layer.0.wv"} <= by_name.keys()


def test_beyond_twenty_steps_curves_are_compared():
    rung = climb_level(5, DecoderConfig(16, 2, vocab=32), steps=25)
    assert rung.passed, rung
    assert ({"loss curve", "trend"} <= {row.what for row in rung.rows}
            and "nearest to its limit" in str(rung))
    assert not any(row.what.endswith("after 25") for row in rung.rows)


def test_the_plain_layer_is_the_one_that_torch_s_own_functions_make():
    """The other side of the ladder: SDPA and F.rms_norm give the same as the formulas written out.
    """
    c = DecoderConfig(32, 4, 2, layers=1)
    w = cast(make_weights(c), torch.float64)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    angles = tuple(t.double() for t in rope_angles(c))
    got = Decoder(c, w, PlainTorch(), angles).layer(0, x, torch.arange(9)[None])
    h = F.rms_norm(x, (32,), w["0.ln1"], c.eps)
    q, k, v = F.linear(h, w["0.qkv"]).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
    cos, sin = (torch.cat((t[:9], t[:9]), -1) for t in angles)
    q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = x + F.linear(mixed.transpose(1, 2).flatten(2), w["0.out"])
    gate, up = F.linear(F.rms_norm(y, (32,), w["0.ln2"], c.eps), w["0.in"]).chunk(2, -1)
    torch.testing.assert_close(got, y + F.linear(F.silu(gate) * up, w["0.down"]))


# What was asked for.

def test_a_named_library_serves_every_call_it_can():
    rung = climb_level(2, named="reference")
    assert rung.passed and rung.served == sum(rung.kernels.values()) > 50
    assert {kernel.partition(".")[0] for _, kernel in rung.kernels} == {"reference"}


def test_a_named_kernel_serves_its_own_operation_only():
    rung = climb_level(4, named="reference.attention")
    assert rung.passed and rung.served == rung.kernels["attention", "reference.attention"] > 0
    assert all((op == "attention") == (kernel == "reference.attention")
               for op, kernel in rung.kernels)


def test_where_a_named_kernel_serves_only_some_calls_the_others_are_told():
    rung = climb_level(4, named="torch.sdpa_math")     # not with the diagonal of a KV cache
    assert rung.passed and rung.kernels["attention", "torch.sdpa_math"] == rung.served == 2 * 2
    assert ("causal_align" in rung.refused["attention"]
            and "could not serve some of lz.attention" in str(rung))


def test_a_kernel_that_could_not_serve_is_not_called_passed():
    # only with return_lse, which no decoder asks for
    rung = climb_level(4, named="torch.sdpa_flash_lse")
    assert rung.status == "not served" and rung.served == 0
    assert "return_lse" in rung.refused["attention"] and "served no call" in rung.problem


def test_a_named_kernel_that_breaks_fails_the_rung():
    def run(x, weight=None, eps=1e-6):
        raise RuntimeError("no luck")

    rung = climb_level(4, named=plant("rms_norm", run))
    assert rung.status == "failed" and "no luck" in rung.problem and "planted.one" in rung.problem


def test_a_fallback_is_not_taken_for_the_kernel():
    def run(x, weight=None, eps=1e-6):
        raise RuntimeError("no luck")

    plant("rms_norm", run)
    do = LzCaller()
    do("rms_norm", x=torch.ones(2, 4), weight=torch.ones(4), eps=1e-6)
    assert do.kernel != "planted.one" and do.counts["rms_norm", do.kernel] == 1


def test_a_name_without_a_kernel_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"torch\.sdpa_math"):
        patterns_of("torch.sdpa_maths")
    # a kernel, but of no operation of a decoder
    assert patterns_of("torch.moe_sorted") == {}


# What is wrong.

def interleaved(q, k, cos, sin, position_ids=None, *, style, layout="bhsd"):
    cos, sin = (gather_angles(t, position_ids, layout, q.dtype) for t in (cos, sin))
    return rotate(q, cos, sin, "interleaved"), rotate(k, cos, sin, "interleaved")


def attention(**wrong):
    def run(query, key, value, is_causal=False, scale=None, *, causal_align=None, window_left=-1,
            layout="bhsd"):
        how = {"is_causal": is_causal, "causal_align": causal_align, "window_left": window_left,
               "scale": scale}
        how.update(wrong)
        q, k, v = ((t.transpose(1, 2) for t in (query, key, value)) if layout == "bshd"
                   else (query, key, value))
        if how.pop("grouped", False):
            k, v = (t.repeat(1, q.shape[1] // k.shape[1], 1, 1) for t in (k, v))
        out, _ = attend(q, k, v, None, 0.0, how["is_causal"], how["scale"], how["causal_align"],
                        how["window_left"], -1,
                        None, 0.0)
        return out.transpose(1, 2) if layout == "bshd" else out

    return run


def narrow_norm(x, weight=None, eps=1e-6):
    n = x.bfloat16()
    return (n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def unwritten(x, weight, bias=None):
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    out[..., :-1] = (x @ weight.t())[..., :-1]
    return out


def sum_without_residual(x, residual, weight=None, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps), x.clone()


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        # as if r did not depend on x
        return grad * weight * r, (grad * x * r).flatten(0, -2).sum(0), None


def norm_with_wrong_backward(x, weight=None, eps=1e-6):
    return _WrongBackward.apply(x, weight, eps)


PLANTED = {
    "the other rope": (4, "rope", interleaved, "0.q", "convention"),
    "causality ignored": (2, "attention", attention(is_causal=False), "0.attn_out", "mask"),
    "the other diagonal": (2, "attention", attention(causal_align="top_left"),
                           "tokens 12-15, 0.attn_out", "alignment"),
    "no scale": (3, "attention", attention(scale=1.0), "0.attn_out", "scale"),
    "heads grouped otherwise": (4, "attention", attention(grouped=True), "0.attn_out", "head map"),
    "a narrow norm": (3, "rms_norm", narrow_norm, "0.ln1_out", "precision"),
    "a column unwritten": (4, "linear", unwritten, "0.qkv", "uninitialised output"),
    "the residual left out": (2, "add_rms_norm", sum_without_residual, "0.resid", "convention"),
    "a wrong backward": (2, "rms_norm", norm_with_wrong_backward, "grad x", "gradient"),
}


@pytest.mark.parametrize("named", ("", "planted.one"))
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_kernel_is_found_and_named(what, named):
    level, op, run, stage, kind = PLANTED[what]
    plant(op, run)
    rung = climb_level(level, named=named)
    culprit = rung.culprit
    assert rung.status == "failed" and culprit is not None
    assert (culprit.kernel, culprit.op, culprit.stage, culprit.kind) == ("planted.one", op, stage,
                                                                         kind), rung
    assert culprit.worst and culprit.error > culprit.allowed and not culprit.keeps_contract
    assert [s.kernel for s in culprit.swaps if s.fixed] == ["planted.one"]
    assert len(culprit.swaps) >= 4             # every kernel of the run was left out in turn
    text = str(rung)
    assert "planted.one" in text and stage in text and kind in text
    assert json.loads(json.dumps(rung.to_json()))["culprit"]["kernel"] == "planted.one"


def test_the_window_is_judged_where_a_model_has_one():
    plant("attention", attention(window_left=-1))
    culprit = climb_level(4, replace(CONFIGS["tiny"], window=5)).culprit
    assert (culprit.kernel, culprit.kind) == ("planted.one", "window")


def test_training_finds_a_wrong_backward_by_swapping():
    plant("rms_norm", norm_with_wrong_backward)
    culprit = climb_level(5, "tiny", steps=1).culprit
    assert (culprit.kernel, culprit.kind) == ("planted.one", "gradient")


def test_too_coarse_in_sixteen_bits():
    def coarse(x, weight, bias=None):
        return (x @ weight.t()).to(torch.float8_e4m3fn).to(x.dtype)

    plant("linear", coarse)
    rung = climb_level(3, "tiny", "bfloat16")
    assert (rung.culprit.kernel, rung.culprit.stage, rung.culprit.kind) == ("planted.one", "0.qkv",
                                                                            "precision"), rung


def test_two_wrong_kernels_and_no_single_swap_mends():
    plant("rms_norm", narrow_norm, "planted.norm")
    plant("linear", unwritten, "planted.linear")
    culprit = climb_level(4, "tiny").culprit
    assert (culprit.kernel, culprit.stage) == ("planted.norm", "0.ln1_out")
    assert not any(s.fixed for s in culprit.swaps)
    # Memory that nobody wrote may hold an earlier, right result of the same size: then it shows at
    # a later linear.
    assert {s.kernel: s.text for s in culprit.swaps}["planted.norm"].startswith(
        "still diverges at 0.")


# The case study: kernels and layers agree with their own convention, the model was trained for the
# other.

def trained_for(style, described_as):
    c = replace(CONFIGS["gqa"], rope_style=style)
    model = random_model("case study", c)
    trace: dict = {}
    wide = cast(model.weights, torch.float64)
    with torch.no_grad():
        Decoder(c, wide, PlainTorch(), tuple(t.double() for t in rope_angles(c)),
                trace=trace)(model.tokens)
    truth = {stage: note.value for stage, note in trace.items()}
    c = replace(c, rope_style=described_as)
    return LadderModel("case study", c, model.weights, model.tokens, truth, "the trained model")


@pytest.mark.parametrize(("style", "other"),
                         [("rotate_half", "interleaved"), ("interleaved", "rotate_half")])
def test_the_rope_case_study(style, other):
    # by its own convention it is right
    assert climb_level(2, replace(CONFIGS["gqa"], rope_style=other)).passed
    model = trained_for(style, other)
    [rung] = climb(4, model=model)
    assert rung.status == "failed"
    [top] = [row for row in rung.rows if row.what == "top-1"]
    # the first token turns by nothing
    assert top.error > 5 and all(position > 0 for _, position in top.worst)
    culprit = rung.culprit
    assert (culprit.op, culprit.stage, culprit.kind,
            culprit.keeps_contract) == ("rope", "0.q", "convention", True)
    assert all(index[1] > 0 for index in culprit.worst)
    assert "the other convention of pairs" in culprit.why and "keeps the contract" in str(culprit)
    assert not any(s.fixed for s in culprit.swaps)            # no kernel is to blame
    [right] = climb(4, model=trained_for(style, style))
    assert right.passed


def test_level_3_sees_the_case_study_in_every_layer():
    model = trained_for("rotate_half", "interleaved")
    routes = stage_routes(model, "float32", model.truth)
    for route in routes:
        bad = [row.what for row in route.rows(route.run(LzCaller())) if not row.ok]
        assert bad[0].endswith(".q") and route.name.endswith(bad[0][0])


# The parts.

def test_the_first_diverging_stage_is_found_in_a_deep_model():
    """A kernel that is wrong from the third layer on only: by its weight."""
    model = random_model("deep", CONFIGS["deep"])
    marked = model.weights["3.out"]

    def run(x, weight, bias=None):
        return F.linear(x, weight * 1.5 if torch.equal(weight, marked) else weight)

    plant("linear", run)
    truth = trained_for_plain(model)
    [route, _] = forward_routes(model, "float32", truth)
    culprit = find(route)
    assert (culprit.stage, culprit.kernel) == ("3.proj_out", "planted.one")


def trained_for_plain(model):
    trace: dict = {}
    with torch.no_grad():
        Decoder(model.config, cast(model.weights, torch.float64), PlainTorch(),
                tuple(t.double() for t in rope_angles(model.config)), trace=trace)(model.tokens)
    return {stage: note.value for stage, note in trace.items()}


def test_nothing_is_hidden_by_nan():
    def run(x, weight=None, eps=1e-6):
        out = F.rms_norm(x, x.shape[-1:], weight, eps).clone()
        out[..., 0, 0] = torch.nan
        return out

    plant("rms_norm", run)
    rung = climb_level(3, "tiny")
    assert rung.status == "failed" and rung.culprit.kind == "uninitialised output"


def test_a_route_knows_the_tables_limits():
    [separate, *_] = layer_routes(CONFIGS["tiny"], "float32")
    assert separate.limit("0.output") == 1e-4 and separate.limit("grad 0.qkv") == 1e-5


@pytest.mark.parametrize(("text", "words"), [
    ("small", "tiny, gqa"), ("hidden=64", "heads is missing"),
    ("hidden=64,heads=3,kv_heads=2", "multiple of kv_heads"),
    ("tiny,layers=two", "layers wants int"), ("tiny,colour=red", "name=value"),
    ("hidden=30,heads=2", "even head_dim"), ("tiny,norm=batch", "rms, layer"),
    ("tiny,layers=0", "layers >= 1"),
])
def test_a_wrong_config_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_config(text)


def test_configs_are_parsed():
    assert parse_config("gqa") == ("gqa", CONFIGS["gqa"])
    _, c = parse_config("hidden=96,heads=6,kv_heads=3,norm=layer,bias=true,rope_base=5e5")
    assert (c.head_dim, c.inner, c.bias, c.rope_base) == (16, 192, True, 5e5)
    _, c = parse_config("gqa,hidden=256,heads=4")
    assert (c.hidden, c.heads, c.kv_heads, c.head_dim, c.inner) == (256, 4, 4, 64, 512)


@pytest.mark.parametrize(("level", "effort"), [(1, "quick"), (6, "quick"), (2, "some")])
def test_a_level_or_an_effort_that_is_not_there(level, effort):
    with pytest.raises(ConfigError):
        next(climb(level, effort=effort))


def test_the_configurations_are_those_of_the_table():
    table = {"tiny": (64, 2, 2, 2), "gqa": (128, 8, 2, 2), "deep": (64, 2, 2, 6),
             "wide": (128, 8, 8, 2),
             "no_rope": (64, 2, 2, 2), "medium": (256, 4, 4, 4)}
    assert {n: (c.hidden, c.heads, c.kv_heads, c.layers) for n, c in CONFIGS.items()} == table
    assert CONFIGS["no_rope"].positions == "learned" and rope_tables_of(CONFIGS["no_rope"]) is None


# As a command.

def run_command(capsys, *args, **options):
    from layerzero.cli.commands.prove.ladder import ladder
    code = ladder(*args, **options)
    return code, capsys.readouterr().out


@pytest.mark.parametrize(("level", "words"), [
    (2, "comparisons with plain torch in float64"), (3, "0.attn_out"),
    (4, "48 of 48 positions equal"), (5, "layer.1.wq after 2")])
def test_the_command_prints_its_tables(capsys, level, words):
    code, out = run_command(capsys, level, configs=["tiny"], dtypes=["float32"], steps=2)
    assert code == 0 and words in out and out.endswith("1 passed\n") and "served by: " in out


def test_the_command_says_the_last_step_of_the_table_and_the_curve(capsys):
    _, out = run_command(capsys, 5, configs=["hidden=16,heads=2,vocab=32"], dtypes=["float32"],
                         steps=22)
    assert "layer.0.wq after 20" in out and "loss curve" in out


def test_the_command_fails_with_the_culprit(capsys):
    plant("rope", interleaved)
    code, out = run_command(capsys, 3, configs=["tiny"], dtypes=["float32"])
    assert code == 1 and "culprit: lz.rope by planted.one" in out and "!!  0.q" in out
    code, out = run_command(capsys, 3, configs=["tiny"], dtypes=["float32"], as_json=True)
    assert code == 1 and json.loads(out)["rungs"][0]["culprit"]["kind"] == "convention"


def test_the_command_fails_where_what_was_named_served_nothing(capsys):
    code, out = run_command(capsys, 2, configs=["tiny"], dtypes=["float32"],
                            kernel="torch.rope_complex")
    assert code == 1 and "rope style must be interleaved" in out and "1 not served" in out


@pytest.mark.parametrize("options", [
    {"backend": "torch", "kernel": "torch.rope"}, {"dtypes": ["int8"]}, {"configs": ["giant"]},
    {"against": "everyone"}, {"kernel": "torch.ropes"}, {"effort": "some"}])
def test_a_wrong_command_is_refused(options):
    from layerzero.cli.commands.prove.ladder import ladder
    with pytest.raises(ConfigError):
        ladder(4, **{"model": "none", **options})


def test_where_only_the_sum_of_all_is_off_nobody_is_accused():
    [route, _] = forward_routes(random_model("tiny", CONFIGS["tiny"]), "float32",
                                trained_for_plain(random_model("tiny", CONFIGS["tiny"])))
    route.extra = lambda trace: [LadderRow("something made of all", 2.0, 1.0)]
    culprit = find(route)
    assert (culprit.kernel, culprit.kind, culprit.stage) == ("", "unknown", "something made of all")
    assert "add up" in culprit.why and not any(s.fixed for s in culprit.swaps)
