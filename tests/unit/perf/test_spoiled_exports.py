"""Files of measurements that were spoiled on their way: exports, and the tables of the package."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
from stored import measurement

import layerzero as lz
from layerzero.perf import exchange, shipped
from layerzero.perf.record import Rates
from layerzero.perf.store import SqliteStore
from layerzero.spec.errors import DataError
from layerzero.world import perf_loading
from layerzero.world import snapshot as worlds


@pytest.mark.parametrize("seed", range(4))
def test_a_spoiled_export_is_refused_as_data_and_changes_nothing(tmp_path, seed):
    draw, file = random.Random(seed), tmp_path / "x.jsonl"
    with SqliteStore(tmp_path / "a.sqlite") as a, SqliteStore(tmp_path / "b.sqlite") as b:
        a.put([measurement(i) for i in range(9)], {"machine": "here"})
        a.write((), {}, {"here": (Rates(1.0, 2.0), 5.0)})
        a.export(file)
        data = file.read_bytes()
        for _ in range(80):
            at = draw.randrange(len(data))
            value = draw.choice(
                (
                    b"\xff",
                    b"\0",
                    b"9" * 400,
                    b"-",
                    b'"\\ud800"',
                    b"null",
                    b"[" * 3000,
                    b"1e999",
                    b"{}",
                    b"\n",
                )
            )
            file.write_bytes(
                draw.choice(
                    (data[:at] + value + data[at + 1 :], data[:at], data[:at] + value + data[at:])
                )
            )
            try:
                b.import_(file)
            except DataError:
                assert list(b.rows()) == [] and b.environments() == {} and b.timed_rates() == {}
            else:  # another number, another name: still a measurement
                assert all(m.checked() == m for m in b.rows())
                b.prune()
                b._connection.execute("DELETE FROM rates")


@pytest.mark.parametrize(
    "value", ["9" * 400, "9" * 5000, "1e999", "NaN", "-1", "true", '"1"', "null", "[]"]
)
@pytest.mark.parametrize("field", ["samples", "median_us", "at"])
def test_numbers_that_no_measurement_has(tmp_path, field, value):
    file = tmp_path / "x.jsonl"
    with SqliteStore(tmp_path / "a.sqlite") as a:
        a.put([measurement(1)])
        a.export(file)
        before = list(a.rows())
        lines = file.read_text().splitlines()
        row = json.loads(lines[-1])["measurement"]
        text = json.dumps({"measurement": {**row, field: "HERE"}}).replace('"HERE"', value)
        file.write_text("\n".join([*lines[:-1], text]))
        with pytest.raises(DataError):
            a.import_(file)
        assert list(a.rows()) == before


def test_an_export_replaces_only_an_export(tmp_path):
    with SqliteStore(tmp_path / "a.sqlite") as store:
        store.put([measurement(1)])
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "folder").mkdir()
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "link").symlink_to("notes.txt")
        for name in ("notes.txt", "folder", "fifo", "link", "a.sqlite"):
            with pytest.raises(DataError, match=r"wanted no file, or one of lz perf export"):
                store.export(tmp_path / name)
        assert (tmp_path / "notes.txt").read_text() == "mine" and len(
            list(tmp_path.iterdir())
        ) == 5 + 2
        for _ in range(2):
            assert store.export(tmp_path / "out.jsonl") == 1
        with pytest.raises(DataError, match="not a regular file"):  # and a FIFO is not waited for
            store.import_(tmp_path / "fifo")
    (tmp_path / "long.jsonl").write_text('{"schema": "' + "x" * exchange.LIMITS.line + '"}')
    with pytest.raises(DataError, match="at most"):
        exchange.read_lines(tmp_path / "long.jsonl")


TABLE = next(iter(sorted(shipped.FOLDER.glob("*.json"))))
ODD = (
    None,
    True,
    -1,
    1.5,
    10**400,
    "x",
    "",
    [],
    {},
    [None],
    {"x": None},
    "1e999",
    float("nan"),
    [[]],
)


def test_a_spoiled_table_of_the_package_costs_itself(tmp_path, monkeypatch, emitted):
    """Every field replaced by every odd value, in the head, the device and a row: DataError, or a
    table that works."""
    data = json.loads(TABLE.read_text())
    data["rows"] = data["rows"][:3]
    ops, device = worlds.current().catalog.ops, lz.doctor().devices[0]
    spots = [(data, key) for key in data] + [
        (data["device"], key) for key in (*data["device"], "isa", "threads")
    ]
    spots += [(data["versions"], key) for key in data["versions"]] + [
        (data["rows"][0], i) for i in range(7)
    ]
    spots += [(data["rates"], 0), (data["kernels"], 0)]
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    refused = 0
    for (owner, key), odd in itertools.product(spots, ODD):
        old = owner[key] if isinstance(owner, list) or key in owner else None
        owner[key] = odd
        (tmp_path / "table.json").write_text(json.dumps(data))
        try:
            shipped.read(tmp_path / "table.json", ops)
        except DataError:
            refused += 1
        emitted.clear()
        perf_loading.shipped_table(worlds.current().catalog, device)
        if old is None:
            del owner[key]
        else:
            owner[key] = old
    assert refused > 100
