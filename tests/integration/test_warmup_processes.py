"""Warm-up with the real torch.compile: no request compiles, and of processes that start together
one does.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from helpers import python

from layerzero.backends.torch_compiled import compiler
from layerzero.dispatch.background.compiling import CACHES

pytestmark = [
    pytest.mark.skipif(compiler() is not True,
                       reason="torch.compile needs a C++ compiler; there is none here"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")]

KERNEL = "torch.compiled_rms_norm"

# One process imports everything and the workers are forked from it, as those of a server are: four
# at once, and a fifth when they are done. Each warms up the same call, then answers requests.
SERVER = """
    import json, os, sys, time, traceback
    import torch, layerzero as lz
    from torch._dynamo.utils import counters
    from layerzero.operate.warmup import warmup
    from layerzero.spec.call import Call, TensorSpec

    KERNEL = "torch.compiled_rms_norm"
    CALL = Call("rms_norm", {"x": TensorSpec((40, 128), "float32"), "weight": TensorSpec((128,), "float32")})
    lz.configure(rules=(lz.PolicyRule.of("boost", KERNEL, factor=1e6),))
    fallbacks = []
    lz.subscribe(lambda e: fallbacks.append(e) if e.name == "fallback" else None)

    def request(*args):
        torch.testing.assert_close(lz.rms_norm(*args), lz.op("rms_norm").reference(*args))

    def warmed_up_requests():
        weight = torch.nn.Parameter(torch.randn(128))
        with torch.no_grad():
            for n in (40, 33, 37, 48, 34):                     # sizes of the bucket
                request(torch.randn(n, 128), weight)
        with torch.inference_mode():
            request(torch.randn(44, 128), weight)
        request(torch.randn(40, 128), weight.detach())

    def other_requests():                                      # of other forms and another kind
        x, weight = torch.randn(40, 128), torch.randn(128)
        for args in ((x.view(2, 20, 128), weight), (x, weight, 1e-3), (torch.randn(40, 256)[:, :128], weight),
                     (torch.randn(128, 40).t(), weight), (torch.randn(400, 128), weight), (x,)):
            request(*args)

    def work():
        explained = str(lz.explain("rms_norm", torch.randn(40, 128), torch.randn(128)))
        report = warmup([CALL])
        caches, compiles, calls = dict(counters["inductor"]), counters["stats"]["unique_graphs"], lz.stats().calls
        warmed_up_requests()
        served = lz.stats().calls["rms_norm"][KERNEL] - calls["rms_norm"][KERNEL]
        stepped_down = len(fallbacks)
        other_requests()
        return {"ok": report.ok, "kernel": report.outcomes[0].kernel, "explained": explained, "served": served,
                "compiled": caches.get("fxgraph_cache_miss", 0), "found": caches.get("fxgraph_cache_hit", 0),
                "graphs": compiles, "graphs later": counters["stats"]["unique_graphs"] - compiles,
                "stepped down": stepped_down, "other forms": len(fallbacks) - stepped_down}

    def worker(start):
        back, forth = os.pipe()
        if os.fork():
            os.close(forth)
            return back
        code = 1
        try:
            time.sleep(max(start - time.time(), 0))            # all at once
            os.write(forth, json.dumps(work()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def gathered(pipes):
        return [json.loads(os.fdopen(pipe).read() or sys.exit("a worker ended early")) for pipe in pipes]

    torch.compile(torch.neg)(torch.ones(2))                    # what torch imports to compile, it imports here
    counters.clear()
    start = time.time() + 0.2
    together = gathered([worker(start) for _ in range(4)])
    print(json.dumps({"together": together, "later": gathered([worker(0)])}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for variable in CACHES:                # a developer's own, or what another test has set
            patch.delenv(variable, raising=False)
        text = python(SERVER, LAYERZERO_CACHE_DIR=str(folder), TORCHINDUCTOR_COMPILE_THREADS="1",
                      timeout=240.0)
    metrics: dict[str, list[dict[str, Any]]] = json.loads(text)
    assert list((folder / "inductor").iterdir()), "the compiled code is in our cache folder"
    return metrics


def test_one_of_the_processes_that_start_together_compiles_and_the_others_find_it(server):
    result = sorted((w["compiled"], w["found"]) for w in server["together"])
    assert result == [(0, 1), (0, 1), (0, 1), (1, 0)]


def test_a_process_that_starts_later_compiles_nothing(server):
    assert [(w["compiled"], w["found"]) for w in server["later"]] == [(0, 1)]


def test_no_request_compiles_after_the_warm_up(server):
    for worker in (*server["together"], *server["later"]):
        assert "JIT_NOT_WARMED" in worker["explained"]         # before
        assert worker["ok"] and worker["kernel"] == KERNEL
        assert worker["graphs"] >= 1 and worker["graphs later"] == 0


def test_what_was_warmed_up_is_served_by_it_and_other_forms_by_another(server):
    for worker in (*server["together"], *server["later"]):
        assert worker["served"] == 7 and worker["stepped down"] == 0
        assert worker["other forms"] >= 3
