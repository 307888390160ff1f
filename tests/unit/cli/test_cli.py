"""The `lz` command: what it prints is what the library says, and a mistake is one message, not a
traceback.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import run_lz, run_python

import layerzero as lz
from layerzero.cli import _print_warning
from layerzero.cli.arguments import parse_call
from layerzero.cli.commands.measure.fit import SIZES, Pace, Sizes, fit
from layerzero.cli.commands.measure.styles import STYLES, DecodeLayer
from layerzero.cli.commands.prove import gate
from layerzero.tuning.harness import Ratio, Timings, in_turns

DECODE = ("q=1x8x1x64", "k=1x2x256x64", "v=1x2x256x64")
CPU = ("--device", "cpu")

H100 = {"type": "cuda", "index": 0, "name": "NVIDIA H100 80GB HBM3", "vendor": "nvidia", "sm": 90,
        "gpu_generation": "hopper", "tensor_core_generation": 4, "supports_bf16": True,
        "supports_fp8": True, "cores": 132, "total_memory": 85 * 10 ** 9, "runtime_version": "13.0",
        "torch_version": "2.13.0"}


@pytest.fixture
def run(capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""
    return lambda *words: run_lz(capsys, *words)


def in_new_process(*words, code="from layerzero.cli import main; main()", **environ):
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")
           or k == "LAYERZERO_CACHE_DIR"}
    return run_python("-c", code, *words, env={**env, **environ})


def call(op, *words, dtype="float32"):
    return parse_call(lz.op(op), words, dtype)


# arguments

def test_shapes_and_scalars_become_arguments_without_memory():
    result = call("attention", "query=1x8x1x64", "key=1,2,256,64", "value=1x2x256x64",
                  "is_causal=true", "scale=0.5", "window_left=16", "causal_align=bottom_right",
                  "attn_mask=none", dtype="bfloat16")
    assert {k: tuple(v.shape) for k, v in result.items() if isinstance(v, torch.Tensor)} == {
        "query": (1, 8, 1, 64), "key": (1, 2, 256, 64), "value": (1, 2, 256, 64)}
    assert result["query"].dtype is torch.bfloat16
    assert result["query"].device.type == "meta"
    assert {k: v for k, v in result.items() if not isinstance(v, torch.Tensor)} == {
        "is_causal": True, "scale": 0.5, "window_left": 16, "causal_align": "bottom_right",
        "attn_mask": None}


def test_a_tensor_may_have_its_own_dtype():
    result = call("attention", *DECODE, "attn_mask=1x1x1x256:bool", "alibi_slopes=8:float32",
                  dtype="float16")
    assert (result["attn_mask"].dtype, result["alibi_slopes"].dtype) == (torch.bool, torch.float32)


def test_offsets_are_whole_numbers_by_default():
    result = call("varlen_attention", "q=9x4x64", "key=9x4x64", "value=9x4x64", "cu_seqlens_q=3",
                  "cu_seqlens_k=3",
                  "max_seqlen_q=5", "max_seqlen_k=5")
    assert result["cu_seqlens_q"].dtype is torch.int32
    assert result["query"].dtype is torch.float32


@pytest.mark.parametrize(("words", "part"), [
    (("query",), "parameter=value"),
    (("w=8",), "'w' may be window_left or window_right"),
    (("qery=8x8",), "did you mean 'query'?"),
    (("q=1x8x1x64", "query=1x8x1x64"), "given twice"),
    (("q=1x8x1x64",), "needs key, value; write it like key=8x8x8x8"),
    (("q=1x-8",), "must be a shape such as"),
    (("q=1 x 8",), "must be a shape such as"),
    (("is_causal=maybe",), "must be true or false"),
    (("window_left=1.5",), "must be a whole number"),
    (("scale=big",), "must be a number or none"),
    (("query=none",), "must be a shape such as"),
    (("q=1x8:floaty16",), "did you mean"),
])
def test_a_wrong_word_is_named(words, part):
    with pytest.raises(lz.errors.InvalidCall) as error:
        call("attention", *words)
    assert part in str(error.value)


# answers

@pytest.mark.parametrize("words", [DECODE, (*DECODE, "softcap=20"), (*DECODE, "return_lse=true"),
                                   ("q=1x8x40x64", "k=1x8x40x64", "v=1x8x40x64", "is_causal=true")])
def test_explain_says_what_the_library_says(run, words):
    code, out, err = run("explain", "attention", *words, "--dtype", "float32", *CPU, "--json")
    real = {k: torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else v
            for k, v in call("attention", *words).items()}
    plan = lz.explain("attention", **real)
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert [s["kernel"] for s in data["steps"]] == [s.kernel for s in plan.steps]
    assert {r["kernel"]: [x["code"] for x in r["reasons"]] for r in data["rejected"]} == {
        r.kernel: [x.code.value for x in r.reasons] for r in plan.rejected}


def test_explain_in_words(run):
    code, out, _ = run("explain", "attention", *DECODE, "--dtype", "float32", *CPU)
    plan = lz.explain("attention",
                      **{k: torch.zeros(v.shape) for k, v in call("attention", *DECODE).items()})
    assert code == 0
    assert out.splitlines()[0] == f"lz.attention -> {plan.kernel}"
    assert len(out.splitlines()) == 1 + len(plan.steps) + len(plan.rejected)


def test_which_prints_the_kernel_alone(run):
    code, out, _ = run("which", "attention", *DECODE, "--dtype", "float32", *CPU)
    assert (code, out.strip()) == (0, lz.which("attention", **{
        k: torch.zeros(v.shape) for k, v in call("attention", *DECODE).items()}))
    _, out, _ = run("which", "attention", *DECODE, *CPU, "--backend", "reference", "--json")
    assert json.loads(out) == {"op": "attention", "kernel": "reference.attention"}


def test_a_kernel_that_cannot_serve_is_the_answer_no(run):
    asked = ("attention", *DECODE, *CPU, "--backend", "flash_attn.v2")
    code, out, _ = run("explain", *asked)
    assert code == 1
    assert "lz.attention -> no kernel" in out
    assert out.splitlines()[1].startswith("   x flash_attn.v2 ")     # what was asked about
    code, out, err = run("which", *asked)
    assert (code, out) == (1, "")
    assert err.startswith("no kernel can serve this call")


def test_explain_for_another_machine(run, tmp_path):
    path = tmp_path / "h100.json"
    path.write_text(json.dumps(H100))
    code, out, _ = run("explain", "attention", *DECODE, "--on", str(path), "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["facts"]["device"], data["facts"]["sm"]) == ("cuda", 90)
    reasons = [x for r in data["rejected"] for x in r["reasons"]]
    assert [x for x in reasons
            if x["code"] == "PLATFORM_MISMATCH"], "some kernels are for the CPU only"
    assert all(x["got"] == "cuda" for x in reasons if x["code"] == "PLATFORM_MISMATCH")


def test_the_doctors_device_can_be_asked_elsewhere(run, tmp_path):
    _, out, _ = run("doctor", "--json")
    path = tmp_path / "device.json"
    path.write_text(json.dumps(json.loads(out)["devices"][0]))
    here = run("explain", "attention", *DECODE, *CPU)
    assert run("explain", "attention", *DECODE, "--on", str(path)) == here


def test_list(run):
    code, out, _ = run("list", *CPU, "--json")
    data = json.loads(out)
    assert (code, data["device"]) == (0, "cpu")
    assert [k["id"] for k in data["kernels"]] == [k.id for k in lz.list_kernels(device="cpu")]
    code, out, _ = run("list", "rms_norm", *CPU)
    assert [line.split()[0]
            for line in out.splitlines()[1:]] == [k.id for k in lz.list_kernels("rms_norm", "cpu")]


def test_kernels_shows_one_in_full(run):
    code, out, _ = run("kernels", "flash_attn.v2", *CPU, "--json")
    data = json.loads(out)
    assert (code, data["id"], data["op"], data["package"]) == (
        0, "flash_attn.v2", "attention", "flash_attn.flash_attn_interface")
    assert "PLATFORM_MISMATCH" in [r["code"] for r in data["reasons"]]
    code, out, _ = run("kernels", "flash_attn.v2", *CPU)
    assert code == 0
    assert len([line for line in out.splitlines() if line.startswith("requires")]) == len(
        data["requires"])


def test_config(run):
    code, out, _ = run("config", "--json")
    assert (code, json.loads(out)) == (0, lz.get_config())
    code, out, _ = run("config")
    assert code == 0
    assert all(name in out for name in lz.get_config()["settings"])


def test_config_shows_the_environment():
    done = in_new_process("config", "--json", LAYERZERO_DENY="flash_attn.*",
                          LAYERZERO_STRICT_MODE="1")
    data = json.loads(done.stdout)
    assert (data["settings"]["strict_mode"], data["source"]["strict_mode"]) == (True, "environment")
    assert [(r["action"], r["kernels"], r["origin"]) for r in data["rules"]] == [
        ("deny", ["flash_attn.*"], "LAYERZERO_DENY")]


def test_doctor(run):
    code, out, _ = run("doctor", "--json")
    data = json.loads(out)
    assert code == (0 if data["ok"] else 1)
    assert data["versions"]["torch"] == torch.__version__
    assert {"configuration", "native fast path"} <= {c["name"] for c in data["checks"]}
    code, out, _ = run("doctor")
    assert all(check["name"] in out for check in data["checks"])


def test_version_and_help(run):
    assert run("--version") == run("-V") == (0, f"layerzero {lz.__version__}\n", "")
    assert run("doctor", "-h") == run("doctor", "--help")
    code, out, _ = run("--help")
    assert code == 0
    assert all(word in out for word in ("doctor", "list", "kernels", "which", "explain", "config",
                                        "build", "demo"))


# mistakes

@pytest.mark.parametrize(("words", "part"), [
    (("explain", "atention", "q=8x8"), "did you mean 'attention'?"),
    (("explain", "attention", "q=1x8x1x64", "k=1x3x9x64", "v=1x3x9x64", *CPU),
     "HEADS_NOT_DIVISIBLE"),
    (("explain", "attention", "q=1x8x1x64", "k=1x8x9x32", "v=1x8x9x32", *CPU), "DIM_MISMATCH"),
    (("explain", "attention", *DECODE, "--dtype", "floaty", *CPU), "there is no dtype 'floaty'"),
    (("explain", "attention", *DECODE, "--device", "tpu"), "device kind must be one of"),
    (("explain", "attention", *DECODE, "--on", "/no/such/file.json"), "wanted a device as JSON"),
    (("explain", "attention", *DECODE, "--backend", "torch.sdpa_mth", *CPU),
     "did you mean 'torch.sdpa_math'?"),
    (("list", "atention"), "did you mean 'attention'?"),
    (("list", "--device", "tpu"), "device kind must be one of"),
    (("kernels", "torch.sdpa_mth"), "did you mean 'torch.sdpa_math'?"),
])
def test_a_mistake_is_one_message(run, words, part):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert part in err
    assert "Traceback" not in err


def test_a_device_file_with_a_wrong_field_is_named(run, tmp_path):
    path = tmp_path / "device.json"
    path.write_text(json.dumps({**H100, "smm": 90}))
    code, out, err = run("explain", "attention", *DECODE, "--on", str(path))
    assert (code, out) == (2, "")
    assert "unknown: smm" in err


def test_a_warning_is_one_line_beside_the_answer(run):
    shapes = ("q=1x8x4x64", "k=1x8x9x64", "v=1x8x9x64")
    code, out, err = run("explain", "attention", *shapes, "is_causal=true", *CPU, "--json")
    assert (code, json.loads(out)["op"]) == (0, "attention")
    assert err.startswith("warning: lz.attention: query and key lengths differ")
    assert len(err.splitlines()) == 1


def test_of_a_warning_with_a_stack_the_first_line_is_shown(capsys):
    _print_warning(UserWarning("mkldnn_matmul failed\nframe #0: c10::Error\n"), UserWarning, "x.py",
                   1)
    assert capsys.readouterr().err == "warning: mkldnn_matmul failed\n"


def test_a_broken_environment_is_one_message():
    done = in_new_process("list", LAYERZERO_STRICT="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: LAYERZERO_STRICT=1: unknown variable")
    assert "Traceback" not in done.stderr


def test_a_build_that_fails_is_one_message(tmp_path):
    done = in_new_process("build", LAYERZERO_CACHE_DIR=str(tmp_path), CXX="false")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: the native fast path did not compile; LayerZero works without it")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("library", "command"), [("typer", "--version"), ("rich", "config")])
def test_without_its_libraries_it_says_what_to_install(library, command):
    code = f"import sys; sys.modules[{library!r}] = None\nfrom layerzero.cli import main; main()"
    done = in_new_process(command, code=code)
    assert (done.returncode, done.stdout) == (2, "")
    assert (done.stderr.strip()
            == f"lz needs {library}, which is not installed: pip install 'layerzero[cli]'")


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "layerzero", "--version"], capture_output=True,
                          text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, f"layerzero {lz.__version__}\n")


# the demonstration

def test_demo_runs_checks_and_measures():
    done = in_new_process("demo", "--json", "--seconds", "3", *CPU)
    data = json.loads(done.stdout)
    assert (done.returncode, data["ok"]) == (0, True)
    steps = [step.name for step in Sizes(**data["sizes"]).steps]
    shown = [(r["dtype"], r["step"]) for r in data["rows"]]
    assert sorted(shown + [(left["dtype"], left["step"]) for left in data["left_out"]]) == sorted(
        (d, s) for d in ("float32", "bfloat16") for s in steps), "what is not shown is said"
    assert shown, data["left_out"]
    known = {k.id for k in lz.list_kernels()}
    for row in data["rows"]:
        assert row["equal"]
        assert set(row["ops"]) == {"rms_norm", "attention", "add_rms_norm"}
        for op in row["ops"].values():
            assert op["served_by"] == [op["plan"]["kernel"]], "what ran is what was planned"
            judged = [s["kernel"] for s in op["plan"]["steps"]] + [r["kernel"]
                                                                   for r in op["plan"]["rejected"]]
            assert set(judged) <= known
            assert all(r["reasons"] for r in op["plan"]["rejected"])
        assert set(row["timings"]) == {*row["ops"], "block"}
        for timing in row["timings"].values():
            assert min(timing["microseconds"].values()) > 0


def test_a_demo_without_time_says_what_it_could_not_show():
    done = in_new_process("demo", "--seconds", "0", *CPU)
    assert done.returncode == 0 and "could not be shown within 0 s" in done.stdout
    assert len(re.findall(r"^(?:float32|bfloat16), (?:prefill|decode at) \d+: ", done.stdout,
                          re.MULTILINE)) == 6


QUICK = Pace(1e-12, 1e-12, 1e-12)


def fit_sizes(seconds=45.0, **paces):
    return fit(SIZES["cpu"], {"float32": QUICK, "bfloat16": QUICK, **paces}, seconds)


def test_a_quick_machine_shows_the_largest_sizes_in_every_dtype():
    fit = fit_sizes()
    assert (fit.sizes, fit.left_out) == (SIZES["cpu"][0], ())
    assert fit.rows == tuple((d, step) for d in ("float32", "bfloat16")
                             for step in fit.sizes.steps)


def test_a_dtype_that_takes_a_hundred_times_as_long_is_shown_where_it_fits():
    fit = fit_sizes(bfloat16=Pace(1e-9, 1e-9, 1e-9))
    assert fit.sizes == SIZES["cpu"][0]
    assert [str(left) for left in fit.left_out] == [
        "bfloat16, prefill 512: one pass is expected to take 6.3 s, and 20 do not fit; "
        "torch's products take 1000 times as long as in float32 on this machine"]
    assert [dtype for dtype, _ in fit.rows] == ["float32"] * 3 + ["bfloat16"] * 2


@pytest.mark.parametrize(("pace", "place"), [(1e-11, 0), (1e-10, 1), (2e-9, 2), (1e-7, 3),
                                             (1.0, 3)])
def test_a_slower_machine_shows_smaller_sizes(pace, place):
    fit = fit_sizes(float32=Pace(pace, pace, pace))
    assert fit.sizes == SIZES["cpu"][place] and len(fit.rows) + len(fit.left_out) == 6


def test_where_nothing_fits_one_row_is_tried_all_the_same():
    slow = Pace(1.0, 1.0, 1.0)
    fit = fit_sizes(float32=slow, bfloat16=slow)
    assert [dtype for dtype, _ in fit.rows] == ["float32"] and len(fit.left_out) == 5


def test_a_pass_has_as_many_multiplications_as_the_block_makes():
    from torch.utils.flop_counter import FlopCounterMode

    for step in (sizes := SIZES["cpu"][-1]).steps:
        run = DecodeLayer(sizes, torch.float32, "cpu").bind_step(step, STYLES["model code"])
        with FlopCounterMode(display=False) as counter:
            run()
        # torch does not count the attention of a CPU
        products = counter.get_total_flops() / 2
        assert Pace(1.0, 1.0, 0.0).seconds(sizes, step) == products


def test_the_gain_is_the_median_of_the_rounds():
    timings = Timings({"old": [20.0, 40.0, 60.0, 9.0], "new": [10.0, 10.0, 20.0, 9.0]})
    gain = timings.gain("old", "new")
    assert (gain.median, timings.median("old")) == (2.5, 30.0)
    assert gain.low < gain.median < gain.high


@pytest.mark.parametrize(("low", "high", "word"),
                         [(1.01, 2.0, "faster"), (0.9, 1.1, "even"), (0.5, 0.99, "slower")])
def test_only_a_clear_difference_is_called_one(low, high, word):
    assert Ratio((low + high) / 2, low, high).verdict == word


def test_in_turns_gives_each_way_the_same_number_of_rounds():
    calls = {"a": 0, "b": 0}

    def way(name):
        def go():
            calls[name] += 1

        return go

    timings = in_turns({name: way(name) for name in calls}, 0.01, "cpu")
    assert len(timings.rounds["a"]) == len(timings.rounds["b"]) >= 7
    assert min(calls.values()) > 7


def test_the_gate_finds_the_files_of_a_source_checkout():
    assert ((gate._ROOT / "docs" / "generate.py").is_file()
            and (gate._ROOT / "benchmarks" / "baselines").is_dir())
