"""Certificates from verdicts, and the command that makes them."""

from __future__ import annotations

import json
import time

import pytest
from helpers import Fake, emitted, register, world

import layerzero as lz
from layerzero.cli.commands.prove.kernels import match_kernels, verify_kernels
from layerzero.machine import hardware
from layerzero.verify.certification.certify import certify, certify_all
from layerzero.world import snapshot as worlds
from layerzero.world.registry import certificates
from layerzero.world.registry.certificates import Certificate

__all__ = ["emitted", "world"]
HERE = hardware.probe("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, world):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))


class Doubles(Fake):
    """Right once, then twice the truth."""

    def _load(self):
        right = super()._load()

        def run(x, weight=None, eps=1e-6, *, offset=0.0):
            return right(x, weight, eps, offset=offset) * 2

        return run


def by_id(kernel: str):
    return worlds.current().catalog.by_id[kernel]


def test_a_certificate_says_what_was_shown():
    verdict = certify(by_id("torch.rms_norm"))
    certificate = verdict.certificate
    assert verdict.status == "passed" and certificate is not None and verdict.diagnosis is None
    assert (certificate.cases == verdict.ran > 100
            and certificate.skipped == len(verdict.results) - verdict.ran)
    assert certificate.dtypes == ("bfloat16", "float16", "float32", "float64")
    assert certificate.gradients > 10
    assert 0 < certificate.worst <= 1 and certificate.worst_over_eager > 0
    assert (certificate.deterministic and certificate.writes_all and certificate.nan_propagates
            and certificate.graph_safe is None)
    assert certificate.void_reason(by_id("torch.rms_norm"), HERE) is None


@pytest.mark.parametrize("each_time", [False, True])
def test_a_kernel_that_compiles_once_gets_every_case_and_one_that_compiles_for_each_a_few(
        monkeypatch, each_time):
    compiled = set()
    for module, name, seconds in (("checks", "COMPILES_S", 0.2), ("certify", "COMPILES_S", 0.2),
                                  ("certify", "JIT_QUICK_S", 0.3)):
        monkeypatch.setattr(f"layerzero.verify.certification.{module}.{name}", seconds)

    def compile_first():
        form = len(compiled) if each_time else 0
        if form not in compiled:
            compiled.add(form)
            time.sleep(0.4)

    kernel = Fake("fake.compiled", before=compile_first, jit=True)
    register(kernel)
    verdict = certify(by_id("fake.compiled"))
    assert verdict.status == "passed"
    assert verdict.ran == 2 if each_time else verdict.ran > 50
    assert ("compiling took" in verdict.coverage.missing[0]) is each_time


def test_what_compiles_is_left_to_the_full_lane_beside_others_on_a_cpu(world) -> None:
    compiled, plain = Fake("fake.compiled", jit=True), Fake("fake.plain")
    by_name = {v.kernel: v for v in certify_all([compiled.kernel, plain.kernel])}
    assert by_name["fake.compiled"].status == "skipped" and not compiled.calls
    assert "JIT_NOT_WARMED" in by_name["fake.compiled"].refusal
    assert by_name["fake.plain"].status == "passed"
    alone, = certify_all([compiled.kernel])
    assert alone.status == "passed" and compiled.calls


def test_the_grid_is_the_same_for_the_same_seed_and_another_for_another():
    one, same, other = (certify(by_id("reference.detokenize"), seeds=s) for s in ((0,), (0,), (3,)))
    grids = [v.certificate.grid for v in (one, same, other) if v.certificate]
    assert len(grids) == 3 and grids[0] == grids[1] != grids[2]


def test_passing_writes_one_failing_takes_it_away():
    good, bad = Fake("fake.good", prior=1e6), Doubles("fake.bad", prior=1e7)
    register(good, bad)
    stale = certify(by_id("fake.good")).certificate
    assert stale is not None
    path = certificates.write(Certificate(**{**stale.__dict__, "kernel": "fake.bad"}), HERE)
    seen = []
    for verdict in certify_all([by_id("fake.good"), by_id("fake.bad")]):
        seen.append((verdict.kernel, verdict.status,
                     (path.parent / f"{verdict.kernel}.json").exists()))
    assert seen == [("fake.good", "passed", True), ("fake.bad", "failed", False)]
    assert certificates.certified_ids([by_id("fake.good"), by_id("fake.bad")],
                                      HERE) == {"fake.good"}


def test_interrupted_it_keeps_what_it_has():
    fakes = [Fake(f"fake.n{i}") for i in range(3)]
    register(*fakes)
    walk = certify_all([f.kernel for f in fakes])
    assert next(walk).failures == ()
    walk.close()
    assert certificates.certified_ids([f.kernel for f in fakes], HERE) == {"fake.n0"}


def test_what_is_not_here_is_skipped_with_its_reason():
    verdict = certify(by_id("flash_attn.v2"))
    assert (verdict.status == "skipped" and verdict.certificate is None
            and "flash" in verdict.refusal)


def test_the_command_certifies_and_selection_sees_it(capsys):
    register(Fake("fake.good", prior=1e6), Doubles("fake.bad", prior=1e7))
    lz.configure(require_certificates=True)
    x = lz.op("rms_norm").inputs()["x"]
    assert lz.which("rms_norm", x) == "reference.rms_norm"
    assert verify_kernels(backend="fake") == 1
    out = capsys.readouterr().out
    assert "ok  1/2 fake.good" in out and "1 passed, 1 failed" in out
    for word in ("likely class:", "what to do:", "worst at", "float32"):
        assert word in out.split("fake.bad")[1]
    assert lz.which("rms_norm", x) == "fake.good"


def test_the_command_as_json(capsys):
    assert verify_kernels(kernel="torch.alib?", op="alibi", as_json=True) in (0, 1)
    data = json.loads(capsys.readouterr().out)
    assert data["level"] == 1 and [k["kernel"] for k in data["kernels"]] == ["torch.alibi"]
    assert data["kernels"][0]["cases"] > 50


@pytest.mark.parametrize(("asked", "word"), [
    ({"backend": "torhc"}, "--backend"), ({"kernel": "torch.nothing"}, "--kernel"),
    ({"op": "attentoin"}, "attention"), ({"backend": "torch", "kernel": "reference.*"},
                                         "no kernel")])
def test_a_name_that_fits_nothing_is_an_error(asked, word):
    with pytest.raises(lz.errors.ConfigError, match=word):
        match_kernels(**asked)


def test_an_unknown_lane_is_an_error():
    with pytest.raises(lz.errors.ConfigError, match="quick, full, stress"):
        verify_kernels("fast")
