"""A real PostgreSQL, started for the tests of a file where it is installed."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


def programs() -> Path | None:
    """The folder of initdb and postgres: in the path, where Debian puts them, or in a wheel."""
    program = [shutil.which("initdb"),
               *sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), reverse=True)]
    spec = importlib.util.find_spec("pgserver")
    if spec is not None and spec.origin:
        program += map(str, Path(spec.origin).parent.rglob("bin/initdb"))
    folders = [Path(os.path.realpath(path)).parent for path in program if path]
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def a_user() -> str | None:
    """PostgreSQL does not run as root; another user will do."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return None
    import pwd
    return next(name for name in ("postgres", "nobody")
                if name in {p.pw_name for p in pwd.getpwall()})


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def server():
    """host:port of a server that is gone after the tests."""
    folder = programs()
    if folder is None:
        pytest.skip("PostgreSQL is not installed here")
    user, port = a_user(), free_port()
    # not tmp_path: another user must get in
    home = Path(tempfile.mkdtemp(prefix="lz-pg-"))
    if user is not None:
        shutil.chown(home, user)
    try:
        done = subprocess.run([folder / "initdb", "-D", home / "data", "-A", "trust", "-U", "lz",
                               "--no-sync"],
                              user=user, cwd=home, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        with open(home / "log", "w") as log:
            command = [folder / "postgres", "-D", home / "data", "-p", str(port), "-k", home, "-F",
                       "-c", "listen_addresses=127.0.0.1"]
            process = subprocess.Popen(command, user=user, cwd=home, stdout=log, stderr=log)
        try:
            wait_until_it_answers(process, port, home / "log")
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def wait_until_it_answers(process, port, log):
    import sqlalchemy
    end = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        try:
            admin(f"127.0.0.1:{port}", "SELECT 1")
            return
        except sqlalchemy.exc.SQLAlchemyError:
            time.sleep(0.1)


def admin(server, statement, database="postgres"):
    import sqlalchemy as sa

    from layerzero.perf.fleet import _driver
    engine = sa.create_engine(f"postgresql+{_driver()}://lz@{server}/{database}",
                              isolation_level="AUTOCOMMIT",
                              poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        return connection.execute(sa.text(statement))


numbers = itertools.count()


@pytest.fixture
def url(server):
    """A database of the test's own."""
    name = f"test{next(numbers)}"
    admin(server, f"CREATE DATABASE {name}")
    return f"postgresql://lz:secret@{server}/{name}"
