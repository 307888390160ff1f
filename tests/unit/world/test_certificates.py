"""Certificates: what voids one, what is refused, and that selection asks for them where policy says
so.
"""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from certified import HERE, certificate, torch_rms_norm
from helpers import Fake, python, register

import layerzero as lz
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.spec.event import CertificateRefused
from layerzero.world import snapshot as worlds
from layerzero.world.registry import certificates
from layerzero.world.registry.certificates import contract_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, world):
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path))


def test_round_trip_and_standing():
    kernel = torch_rms_norm()
    assert certificates.statuses([kernel], HERE)[kernel.id].code is lz.Code.UNCERTIFIED
    cert = certificate(kernel)
    assert certificates.read(certificates.write(cert, HERE)) == cert
    assert certificates.statuses([kernel], HERE)[kernel.id] == cert
    assert certificates.certified_ids([kernel], HERE) == {kernel.id}


@pytest.mark.parametrize("field", ["build", "contract", "device"])
def test_a_change_voids_it(field):
    kernel = torch_rms_norm()
    certificates.write(certificate(kernel, **{field: "what it was"}), HERE)
    status = certificates.statuses([kernel], HERE)[kernel.id]
    assert status.code is lz.Code.CERTIFICATE_VOID and "what it was" in status.message


def test_another_driver_is_another_device():
    kernel = torch_rms_norm()
    certificates.write(certificate(kernel), HERE)
    assert not certificates.certified_ids([kernel], replace(HERE, driver_version="999"))


@pytest.mark.parametrize("edit", [
    lambda d: d["certificate"].update(worst=0.0001),
    lambda d: d["certificate"].update(build="other"),
    lambda d: d.update(seal="0" * 64), lambda d: d.pop("seal"),
    lambda d: d["certificate"].update(kernel="a.b")])
def test_a_tampered_file_is_refused_and_told(edit, emitted):
    kernel = torch_rms_norm()
    path = certificates.write(certificate(kernel, worst=0.9), HERE)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    status = certificates.statuses([kernel], HERE)[kernel.id]
    assert status.code is lz.Code.CERTIFICATE_REFUSED
    assert [e.kernel for e in emitted if isinstance(e, CertificateRefused)] == [kernel.id]


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"certificate": 3}', '{"certificate": {}, "seal": ""}', "\x00"])
def test_what_is_no_certificate_is_a_typed_error(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(lz.errors.DataError, match=r"x\.json"):
        certificates.read(path)


def test_one_kernels_certificate_does_not_serve_another():
    a, b = torch_rms_norm(), worlds.current().catalog.by_id["torch.layer_norm"]
    path = certificates.write(certificate(a), HERE)
    path.rename(path.with_name(f"{b.id}.json"))
    assert certificates.statuses([b], HERE)[b.id].code is lz.Code.CERTIFICATE_REFUSED


def test_a_shared_key_lets_a_fleet_share_them(tmp_path, monkeypatch):
    kernel = torch_rms_norm()
    monkeypatch.setenv("LAYERZERO_SEAL_KEY", "ours")
    path = certificates.write(certificate(kernel), HERE)
    assert certificates.read(path).kernel == kernel.id
    monkeypatch.setenv("LAYERZERO_SEAL_KEY", "theirs")
    with pytest.raises(lz.errors.DataError, match="seal"):
        certificates.read(path)


def test_processes_that_start_together_agree_on_the_key(tmp_path):
    """Each waits until all are there: nobody finds the key of one that came long before."""
    together = tmp_path / "together"
    code = f"""
        import os, time
        from pathlib import Path
        from layerzero.world.registry import certificates
        Path({str(tmp_path)!r}, f"here-{{os.getpid()}}").touch()
        while len(list(Path({str(tmp_path)!r}).glob("here-*"))) < 4:
            time.sleep(0.001)
        print(certificates._store().key(create=True).hex())
    """
    with ThreadPoolExecutor(4) as threads:
        keys = {*threads.map(lambda _: python(code, LAYERZERO_CACHE_DIR=str(together)), range(4))}
    assert len(keys) == 1 and len(bytes.fromhex(*keys)) == 32
    assert (tmp_path / "together" / "certificates" / "seal.key").stat().st_mode & 0o077 == 0


def test_policy_demands_them():
    trusted, other = Fake("fake.trusted", prior=1e6), Fake("fake.other", prior=1e7)
    register(trusted, other)
    x = torch.randn(4, 64)
    assert lz.which("rms_norm", x) == "fake.other"
    lz.configure(require_certificates=True)
    # nothing is proven: the formula itself serves
    assert lz.which("rms_norm", x) == "reference.rms_norm"
    certificates.write(certificate(worlds.current().catalog.by_id["fake.trusted"]), HERE)
    lz.clear_cache()
    plan = lz.explain("rms_norm", x)
    assert (plan.kernel == "fake.trusted"
            and plan.why_not("fake.other")[0].code is lz.Code.UNCERTIFIED)
    with pytest.raises(lz.errors.NamedKernelRefused, match="certificate"):
        lz.rms_norm(x, backend="fake.other")


def test_readiness_asks_for_them_where_policy_does():
    assert lz.readiness_check(device="cpu")["certificates"].got == "not demanded"
    lz.configure(require_certificates=True)
    report = lz.readiness_check(device="cpu")
    assert (not report and report["certificates"].state == "fail"
            and "lz verify" in report["certificates"].hint)
    assert any("torch.rms_norm" in line for line in report["certificates"].details)
    for kernel in worlds.current().catalog.kernels:
        certificates.write(certificate(kernel), HERE)
    lz.clear_cache()
    assert lz.readiness_check(device="cpu")["certificates"].state == "ok"


def test_the_contract_tells_ops_apart_and_is_stable():
    ops = worlds.current().catalog.ops.values()
    assert len({contract_of(op) for op in ops}) == len(tuple(ops))
    assert contract_of(RMS_NORM) == contract_of(RMS_NORM)
    looser = replace(RMS_NORM, tolerance=lz.Tolerance({"float32": (1.0, 1.0)}))
    assert contract_of(looser) != contract_of(RMS_NORM)


def test_a_folder_that_cannot_be_read_costs_no_call(monkeypatch):
    seen = []
    stop = lz.subscribe(seen.append)

    def failing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(certificates, "os", SimpleNamespace(listdir=failing))
    try:
        kernels = worlds.current().catalog.kernels
        assert certificates.failures(kernels, HERE) == {}
        assert not certificates.certified_ids(kernels, HERE)
    finally:
        stop()
    assert any("Input/output error" in e.problem for e in seen if isinstance(e, CertificateRefused))


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(lz.errors.DataError, match="the certificate cannot be kept"):
        certificates.write(certificate(torch_rms_norm()), HERE)
