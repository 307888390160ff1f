"""The tables that come with the package: their format, what they apply to, and how they reach a
choice.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers import nvidia, qkv

import layerzero as lz
from layerzero.machine import hardware
from layerzero.machine.loading import satisfies
from layerzero.perf import shipped
from layerzero.perf.record import Measurement, Rates, kind_of
from layerzero.spec.errors import DataError
from layerzero.world import measurements
from layerzero.world import snapshot as worlds

FILES = sorted(shipped.FOLDER.glob("*.json"))
OPS = worlds.current().catalog.ops
BASELINES = {k.id for k in worlds.current().catalog.kernels if k.baseline}


def here(**changes):
    """What a table of the machine at hand would say of its device."""
    device = hardware.probe("cpu")
    return {"type": "cpu", "name": device.name, "threads": torch.get_num_threads(),
            "isa": list(device.isa), **changes}


def call_times(**us):
    kind = kind_of(OPS["attention"], lz.explain("attention", *qkv()).facts)
    return [Measurement(name.replace("__", "."), "attention", kind.bucket, "here", n,
                        family=kind.family, sizes=kind.sizes_text, flops=10.0, bytes=20.0)
            for name, n in us.items()]


def write_table(path, device=None, versions=None, **us):
    text = shipped.text_of(device or here(), versions or {"torch": ">=2.8"}, "2026-01-01", "a test",
                           Rates(1e5, 1e4),
                           call_times(**us), BASELINES)
    path.write_text(text)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch, world):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    lz.configure(shipped_measurements=True)
    return tmp_path


def reload_tables():
    """The world as it would be in a new process: nothing of the tables is remembered."""
    worlds.publish(lambda w: replace(w, epoch=w.epoch + 1, changed=w.epoch + 1, memo={}), "test")


# the format

@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_comes_with_the_package_is_valid_and_writes_itself_again(path):
    table = shipped.read(path, OPS)
    assert table.kinds > 20 and table.rates.bytes_per_us > 0
    unknown = {m.kernel for m in table.rows} - set(worlds.current().catalog.by_id)
    assert not unknown, "a kernel was renamed or removed: measure the table again"
    again = shipped.text_of(table.device, table.versions, table.date, table.command, table.rates,
                            table.rows, BASELINES)
    assert again == path.read_text()


def test_all_of_them_are_small():
    assert sum(path.stat().st_size for path in FILES) <= 300_000


def test_a_table_holds_torchs_own_the_fastest_and_those_near_it(tmp_path):
    path = write_table(tmp_path / "t.json", torch__sdpa=90.0, torch__sdpa_flash=10.0,
                       torch__sdpa_math=50.0,
                       reference__attention=9.5)
    assert {m.kernel: m.median_us for m in shipped.read(path, OPS).rows} == {
        "torch.sdpa": 90.0, "torch.sdpa_flash": 10.0}


@pytest.mark.parametrize("change", [
    {"schema": "layerzero.shipped/9"}, {"rows": [["rms_norm"]]}, {"rows": 3}, {"rates": [1]},
    {"rates": ["a", "b"]}, {"device": {}}, {"device": 4}, {"versions": {"torch": 2}},
    {"kernels": []}, {"more": 1},
    {"rows": [["rms_norm", "fast", "float32", "rows=1", 1.0, 1.0, {"0": 1.0}]]},
    {"rows": [["rms_norm", "eager", "float32", "rows=1", 1.0, 1.0, {"0": -1.0}]]}])
def test_a_file_that_is_not_as_it_should_be_is_refused_by_name(tmp_path, change):
    path = write_table(tmp_path / "t.json", torch__sdpa=9.0, native__attention_decode_mha=8.0)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=r"t\.json"):
        shipped.read(path, OPS)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"t\.json"):
        shipped.read(path, OPS)


# what it applies to

def test_device_threads_and_versions_must_be_those_it_was_measured_with(tmp_path):
    path = write_table(tmp_path / "t.json", versions={"torch": ">=2.8,<2.12", "driver": ">=570"},
                       torch__sdpa=9.0,
                       native__attention_decode_mha=8.0,
                       device={"type": "cuda", "name": "NVIDIA X"})
    table, gpu = shipped.read(path, OPS), replace(nvidia(90), name="NVIDIA X",
                                                  torch_version="2.11.0+cu130",
                                                  driver_version="580.65.06")
    assert (table.is_for(gpu) and not table.is_for(replace(gpu, name="NVIDIA Y"))
            and not table.is_for(
         hardware.probe("cpu")))
    assert table.refusal(gpu, 16, satisfies) == ""
    assert "torch >=2.8,<2.12, here is 2.13.0" in table.refusal(
        replace(gpu, torch_version="2.13.0"), 1, satisfies)
    assert "driver >=570" in table.refusal(replace(gpu, driver_version="550.1"), 1, satisfies)
    assert "unknown" in table.refusal(replace(gpu, driver_version=""), 1, satisfies)


def test_a_cpu_needs_the_same_threads_and_what_the_kernels_were_compiled_for(tmp_path):
    path = write_table(tmp_path / "t.json", torch__sdpa=9.0, native__attention_decode_mha=8.0,
                       device=here(threads=7))
    table, cpu = shipped.read(path, OPS), hardware.probe("cpu")
    assert table.is_for(cpu) and table.refusal(cpu, 7, satisfies) == ""
    assert "7 threads" in table.refusal(cpu, 3, satisfies)
    assert cpu.isa and not table.is_for(replace(cpu, isa=()))


# how it decides

def test_it_decides_until_something_was_measured_here(folder):
    lz.configure(perfdb="off")
    write_table(folder / "t.json", torch__sdpa=5.0, torch__sdpa_flash=4.0)
    reload_tables()
    plan = lz.explain("attention", *qkv())
    assert plan.kernel == "torch.sdpa_flash"
    assert (plan.steps[0].score.origin.startswith("shipped: ")
            and "2026-01-01" in plan.steps[0].score.origin)
    place = worlds.current().place("cpu")
    measurements.record([m._replace(place=place, median_us=9.0 if m.kernel.endswith("flash")
                                    else m.median_us)
                         for m in call_times(torch__sdpa=5.0, torch__sdpa_flash=4.0)])
    plan = lz.explain("attention", *qkv())
    assert plan.kernel == "torch.sdpa" and plan.steps[0].score.source == "measured"


def test_a_setting_switches_it_off(folder):
    write_table(folder / "t.json", torch__sdpa=5.0, torch__sdpa_flash=4.0)
    lz.configure(shipped_measurements=False)
    reload_tables()
    assert lz.which("attention", *qkv()) != "torch.sdpa_flash"


def test_a_library_of_another_version_is_left_out(folder):
    write_table(folder / "t.json", versions={"torch": ">=2.8", "layerzero": ">=99"},
                torch__sdpa=5.0,
                native__attention_decode_mha=3.0, torch__sdpa_flash=4.0)
    reload_tables()
    known = {m.kernel for m in worlds.current().shipped("cpu").view}
    # native comes from the distribution layerzero
    assert known == {"torch.sdpa", "torch.sdpa_flash"}


def test_a_damaged_file_costs_itself_and_is_told(folder, emitted):
    (folder / "bad.json").write_text("{")
    write_table(folder / "t.json", torch__sdpa=5.0, torch__sdpa_flash=4.0)
    reload_tables()
    assert lz.which("attention", *qkv()) == "torch.sdpa_flash"
    assert {e.store for e in emitted if e.name == "store_trouble"} == {"bad.json"}


def test_the_doctor_says_which_one_applies(folder):
    def told():
        reload_tables()
        return next(c for c in lz.doctor().checks if c.name == "shipped measurements (cpu)").detail

    assert told().startswith("none for ")
    write_table(folder / "t.json", torch__sdpa=5.0, torch__sdpa_flash=4.0)
    assert "1 kinds of call" in told() and "2026-01-01" in told()
    write_table(folder / "t.json", torch__sdpa=5.0, torch__sdpa_flash=4.0,
                versions={"torch": ">=99"})
    assert "do not count here" in told() and "torch >=99" in told()
