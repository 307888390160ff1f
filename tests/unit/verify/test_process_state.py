"""What a kernel has changed of the process is named, and what torch sets itself is excused."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest
import torch

from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.process_state import (
    COMPILING,
    ENVIRONMENT,
    SET_BY_TORCH,
    process_state,
    put_back,
)
from layerzero.world import snapshot as worlds

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in (*SET_BY_TORCH, "PLANTED", "PLANTED_TOO"):
        monkeypatch.setenv(name, "")           # so that it is as before after the test
        monkeypatch.delenv(name)


def changes(act) -> list[str]:
    before = process_state("cpu")
    act()
    return list(map(str, put_back(before, "cpu")))


def test_a_variable_that_is_set_changed_or_removed_is_named():
    os.environ["PLANTED_TOO"] = "1"
    assert changes(lambda: os.environ.__setitem__("PLANTED", "1")) == ["the environment (PLANTED)"]
    assert changes(lambda: os.environ.__setitem__("PLANTED_TOO", "2")) == [
        "the environment (PLANTED_TOO)"]
    assert changes(lambda: os.environ.__delitem__("PLANTED_TOO")) == [
        "the environment (PLANTED_TOO)"]
    assert "PLANTED" not in os.environ and os.environ["PLANTED_TOO"] == "1"


def test_many_variables_and_long_ones_are_cut_short(monkeypatch):
    names = [f"PLANTED_{i}" for i in range(5)] + ["A" * 100]

    def act():
        for name in names:
            os.environ[name] = "1"

    assert changes(act) == [
        f"the environment ({'A' * 40}..., PLANTED_0, PLANTED_1 and 3 more)"]
    assert not set(names) & os.environ.keys()


@pytest.mark.parametrize("name", sorted(SET_BY_TORCH))
def test_what_torch_sets_is_excused_where_it_was_unset(name):
    assert changes(lambda: os.environ.__setitem__(name, "/tmp/x")) == []
    assert os.environ[name] == "/tmp/x"        # torch may have remembered it
    assert changes(lambda: os.environ.__setitem__(name, "/tmp/y")) == [f"the environment ({name})"]
    assert os.environ[name] == "/tmp/x"
    assert changes(lambda: os.environ.__delitem__(name)) == [f"the environment ({name})"]


def test_another_variable_beside_it_is_accused_alone():
    def act():
        os.environ.update({CACHE: "/tmp/x", "PLANTED": "1"})

    assert changes(act) == ["the environment (PLANTED)"]
    assert os.environ[CACHE] == "/tmp/x" and "PLANTED" not in os.environ


def test_the_first_call_of_a_custom_operator_is_excused():
    """It imports torch._dynamo, and that says where Inductor keeps its files."""
    program = '''
import torch
from layerzero.verify.kernel.process_state import ENVIRONMENT, process_state, put_back

@torch.library.custom_op("planted::one_more", mutates_args={})
def one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1

before = process_state("cpu")
one_more(torch.ones(3))
print([str(part) for part in put_back(before, "cpu") if part == ENVIRONMENT])
'''
    env = {name: value for name, value in os.environ.items() if name not in SET_BY_TORCH}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env,
                          timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


def test_the_flag_of_several_is_named():
    def act():
        torch.backends.cuda.enable_math_sdp(False)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction ^= True
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)

    handler, limit = signal.getsignal(signal.SIGALRM), sys.getrecursionlimit()
    try:
        assert changes(act) == [
            "a TF32 or reduced-precision flag (float16 reductions)",
            "which of torch's attentions are enabled (math)",
            "the interpreter (recursion limit, SIGALRM)"]
    finally:
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction ^= True
        signal.signal(signal.SIGALRM, handler)
        sys.setrecursionlimit(limit)


def test_a_setting_of_one_thing_has_no_parts():
    try:
        assert changes(lambda: torch.set_default_dtype(torch.float64)) == ["the default dtype"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_equals_the_name_of_its_setting():
    before = process_state("cpu")
    os.environ["PLANTED"] = "1"
    changed = put_back(before, "cpu")
    assert ENVIRONMENT in changed and changed[0] in COMPILING and {*changed} == {ENVIRONMENT}


@pytest.mark.parametrize(("name", "status"), [("PLANTED", "failed"), (CACHE, "passed")])
def test_the_complaint_about_a_kernel_names_the_variable(name, status):
    right = worlds.current().catalog.by_id["torch.layer_norm"]

    def load():
        def run(x, weight=None, bias=None, eps=1e-5):
            os.environ[name] = "1"
            return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

        return run

    result = check_case(Kernel("planted.layer_norm", right.op, load, right.requires), {}, "float32")
    assert result.status == status, str(result)
    assert (f"the environment ({name}) changed" in str(result)) == (status == "failed")
    assert ("global state" in result.kinds) == (status == "failed")


def test_drawn_numbers_of_python_are_named_and_put_back():
    random.seed(5)
    random.gauss(0, 1)                         # it keeps a second number for the next call
    before = random.getstate()
    assert changes(random.random) == ["the state of Python's random numbers"]
    assert random.getstate() == before
    assert changes(lambda: random.gauss(0, 1)) == ["the state of Python's random numbers"]
    assert random.getstate() == before
    assert changes(lambda: None) == []


def test_drawn_numbers_of_torch_are_named():
    assert changes(lambda: torch.rand(1)) == ["the state of torch's random numbers"]


def test_an_open_file_and_another_signal_handler_are_named():
    numbers = []
    assert changes(lambda: numbers.append(os.open(os.devnull, os.O_RDONLY))) == (
        ["the number of open files"] if sys.platform == "linux" else [])
    os.close(numbers.pop())
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert changes(lambda: signal.signal(signal.SIGTERM, lambda *_: None)) == [
            "the interpreter (SIGTERM)"]
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted on Linux alone")
@pytest.mark.parametrize(("calls", "status"), [(2, "passed"), (100, "failed")])
def test_files_that_a_neighbour_opens_in_two_calls_are_not_the_kernels(calls, status):
    right = worlds.current().catalog.by_id["torch.layer_norm"]
    opened: list[int] = []

    def load():
        def run(x, weight=None, bias=None, eps=1e-5):
            if len(opened) < calls:            # as a server's thread may at just that time
                opened.append(os.open(os.devnull, os.O_RDONLY))
            return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

        return run

    kernel = Kernel("planted.layer_norm", right.op, load, right.requires)
    try:
        result = check_case(kernel, {}, "float32")
    finally:
        for number in opened:
            os.close(number)
    assert result.status == status, str(result)
    assert ("the number of open files" in str(result)) == (status == "failed")
