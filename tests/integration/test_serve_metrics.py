"""/metrics, /ready and /live: over real sockets, with clients that behave and clients that do not.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from helpers import world

import layerzero as lz
from layerzero.integrations import serve
from layerzero.operate.readiness import Readiness, ReadinessCheck

__all__ = ["world"]
pytestmark = pytest.mark.usefixtures("world")
READY = Readiness((ReadinessCheck("kernels", "ok", "some", "some"),))
NOT_READY = Readiness((ReadinessCheck("database", "fail", "a file",
                                      "/home/me/perf.sqlite is damaged", "move it"),))


@pytest.fixture(scope="module")
def server():
    """One for the file: it checks itself once, which takes longer than most of the tests."""
    with lz.serve_metrics(every=3600.0) as metrics:
        wait_for(lambda: get(metrics, "/ready")[0] == 200)
        yield metrics


@pytest.fixture
def serving():
    """A server that asks this function."""
    opened = []

    def start(check, every=0.02):
        opened.append(serve.Server(serve.LOOPBACK, 0, check, every))
        return opened[-1]

    yield start
    for metrics in opened:
        metrics.close()


def wait_for(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def get(server, path, method="GET", **headers):
    try:
        with urlopen(Request(server.url + path, method=method, headers=headers),
                     timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except HTTPError as e:
        return e.code, e.headers, e.read()


def raw(server, sent: bytes, timeout=60) -> bytes:
    with socket.create_connection((server.host, server.port), timeout=timeout) as connection:
        connection.sendall(sent)
        answer = b""
        while True:
            try:
                part = connection.recv(65536)
            except ConnectionResetError:       # closed with bytes of ours unread
                return answer
            if not part:
                return answer
            answer += part


# what it answers

def test_ready_has_the_report(server):
    status, headers, body = get(server, "/ready")
    data = json.loads(body)
    assert status == 200 and data["ready"] and data["age_seconds"] >= 0
    assert (headers["Content-Type"].startswith("application/json")
            and headers["Cache-Control"] == "no-store")
    assert {c["name"] for c in data["checks"]} >= {"kernels", "policy", "database"}


def test_metrics_are_those_of_this_process(server):
    x = torch.randn(3, 31)
    lz.rms_norm(x)
    lz.rms_norm(x)
    status, headers, body = get(server, "/metrics")
    if status == 501:
        assert b"layerzero[telemetry]" in body
        return
    text = body.decode()
    assert status == 200 and "version=" in headers["Content-Type"]
    assert f'layerzero_calls_total{{kernel="{lz.which("rms_norm", x)}",op="rms_norm"}}' in text
    assert "layerzero_ready 1.0" in text
    kind = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")[1][
        "Content-Type"]
    assert "openmetrics" in kind


def test_it_lives(server):
    assert get(server, "/live")[::2] == (200, b'{"live": true}\n')


def test_the_answer_follows_what_is_true(serving):
    now = [READY]
    server = serving(lambda: now[0])
    wait_for(lambda: get(server, "/ready")[0] == 200)
    now[0] = NOT_READY
    wait_for(lambda: get(server, "/ready")[0] == 503)
    assert json.loads(get(server, "/ready")[2])["checks"][0]["hint"] == "move it"
    assert get(server, "/live")[0] == 200                           # not ready is not dead
    now[0] = READY
    wait_for(lambda: get(server, "/ready")[0] == 200)


def test_a_probe_never_waits_for_a_check(serving, monkeypatch):
    go = threading.Event()

    def hangs():
        go.wait(60)
        return READY

    server = serving(hangs)
    try:
        status, _, body = get(server, "/ready")
        assert status == 503 and "not done yet" in json.loads(body)["problem"]
        assert get(server, "/metrics")[0] in (200, 501) and get(server, "/live")[0] == 200
    finally:
        go.set()


def test_a_check_that_hangs_after_it_worked_is_not_ready(serving, monkeypatch):
    monkeypatch.setattr(serve, "STALE", 0.1)
    go, first = threading.Event(), [True]

    def hangs():
        if first.pop() if first else False:
            return READY
        go.wait(60)
        return READY

    server = serving(hangs)
    try:
        wait_for(lambda: "hangs" in json.loads(get(server, "/ready")[2]).get("problem", ""))
        assert get(server, "/ready")[0] == 503
    finally:
        go.set()


def test_a_check_that_dies_is_not_ready_and_is_tried_again(serving):
    now: list = [KeyError("something nobody thought of at /home/me/x")]

    def check():
        if isinstance(now[0], BaseException):
            raise now[0]
        return now[0]

    lz.configure(redact="paths")
    server = serving(check)
    wait_for(lambda: b"the check itself failed" in get(server, "/ready")[2])
    assert get(server, "/ready")[0] == 503 and b"/home" not in get(server, "/ready")[2]
    now[0] = SystemExit("of a library")
    wait_for(lambda: b"SystemExit" in get(server, "/ready")[2])
    now[0] = READY
    wait_for(lambda: get(server, "/ready")[0] == 200)


def test_paths_are_hidden_where_policy_says_so(serving):
    server = serving(lambda: NOT_READY)
    wait_for(lambda: b"/home/me/perf.sqlite" in get(server, "/ready")[2])
    lz.configure(redact=["paths"])
    wait_for(lambda: b"/home" not in get(server, "/ready")[2])
    assert b"<path> is damaged" in get(server, "/ready")[2]


# what it refuses

@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT",
                                    "get", "X" * 500])
def test_only_get_and_head(server, method):
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.putrequest(method, "/ready", skip_accept_encoding=True)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 405 and answer.headers["Allow"] == "GET, HEAD"
    connection.close()


def test_head_is_get_without_a_body(server):
    status, headers, body = get(server, "/ready", "HEAD")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 100


@pytest.mark.parametrize("path", ["/", "/etc/passwd", "/../../etc/passwd", "/ready/", "/READY",
                                  "/%72eady", "/metrics/../ready", "/<script>", "/[", "/ready%00"])
def test_there_are_three_paths_and_no_files(server, path):
    status, headers, body = get(server, path)
    assert status == 404 and b"passwd" not in body and b"script" not in body
    assert headers["Content-Type"].startswith("text/plain")


def test_a_query_is_ignored(server):
    assert get(server, "/ready?now=1")[0] == 200


def test_it_says_nothing_of_its_versions(server):
    assert get(server, "/live")[1]["Server"] == "layerzero"


@pytest.mark.parametrize("sent", [
    b"GET /ready HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /ready HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"GET /ready HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])
def test_a_request_has_no_body(server, sent):
    assert raw(server, sent).startswith(b"HTTP/1.0 413")


@pytest.mark.parametrize("sent", [
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", b"GET /ready HTTP/1.1\r\n" + b"A: b\r\n"
    * 50_000 + b"\r\n", b"GET /ready HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"\x00\xff\xfe garbage\r\n\r\n", b"\r\n\r\n",
    b"GET\r\n\r\n", b"GET /ready HTTP/99.9\r\n\r\n", b"GET /ready HTTP/1.1\r\n\x00bad\r\n\r\n",
    b"\x16\x03\x01\x02\x00", b"GET /ready HTTP/1.1\r\nHost", b""])
def test_what_is_no_request_hurts_nobody(server, sent, capfd):
    """A body of the answer, if any, is short and repeats nothing; the server goes on and prints
    nothing."""
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except OSError:
            answer = b""
    assert b"aaaa" not in answer and b"garbage" not in answer
    assert get(server, "/live")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_clients_that_send_a_byte_now_and_then_do_not_keep_it(server, monkeypatch):
    """All places are taken by clients that never finish; after a while they are free again."""
    monkeypatch.setattr(serve, "CONNECTION_SECONDS", 0.5)
    slow = [socket.create_connection((server.host, server.port), timeout=60)
            for _ in range(serve.MAX_CONNECTIONS + 8)]
    try:
        for connection in slow:
            connection.sendall(b"GET /re")

        def answered():
            for connection in slow:
                with suppress(OSError):
                    connection.sendall(b"a")
            try:
                return raw(server, b"GET /live HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
            except OSError:
                return False

        wait_for(answered)
    finally:
        for connection in slow:
            connection.close()


def test_a_probe_is_not_kept_out_by_clients_that_do_not_finish(server, monkeypatch):
    monkeypatch.setattr(serve, "UNHURRIED_SECONDS", 0.0)
    slow = [socket.create_connection((server.host, server.port), timeout=60)
            for _ in range(2 * serve.MAX_CONNECTIONS)]
    try:
        for connection in slow:
            with suppress(OSError):
                connection.sendall(b"GET /re")
        wait_for(lambda: len(server._http._open) == serve.MAX_CONNECTIONS)
        assert raw(server, b"GET /live HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
    finally:
        for connection in slow:
            connection.close()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, ZeroDivisionError])
def test_a_collector_that_raises_is_an_answer(server, error, monkeypatch):
    def raises():
        raise error("at \x1b[31m")

    monkeypatch.setattr(serve.prometheus.inspection, "stats", raises)
    status, _, body = get(server, "/metrics")
    assert status in (500, 501) and b"\x1b" not in body
    assert get(server, "/ready")[0] == 200


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", ";=,;", "\xff" * 99])
def test_what_a_client_accepts_may_be_nonsense(server, accept):
    assert get(server, "/metrics", Accept=accept)[0] in (200, 501)


def test_many_ask_at_once(server):
    results: list = []

    def ask():
        for path in ("/ready", "/live", "/metrics"):
            try:
                results.append(get(server, path)[0])
            except OSError:
                results.append("closed")

    clients = [threading.Thread(target=ask) for _ in range(20)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(60)
    assert len(results) == 60 and set(results) <= {200, 501}


# its life

def test_it_is_on_loopback_unless_told(server):
    assert server.host == "127.0.0.1" and server.url == f"http://127.0.0.1:{server.port}"


def test_closing_frees_the_port_and_stops_the_threads():
    before = threading.active_count()
    server = lz.serve_metrics(every=0.05)
    port = server.port
    with pytest.raises(lz.errors.ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        lz.serve_metrics(port)
    server.close()
    server.close()                                                  # twice does no harm
    wait_for(lambda: threading.active_count() <= before)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    lz.serve_metrics(port).close()


@pytest.mark.parametrize("wrong", [{"port": 70000}, {"port": -1}, {"every": 0},
                                   {"every": float("nan")}, {"host": "no such host"},
                                   {"every": float("inf")}, {"host": ""}, {"host": "\x00"},
                                   {"host": 5}, {"port": "9400"}, {"port": 1.5},
                                   {"calls": ["x"]}, {"calls": "no_such_file"}])
def test_what_cannot_be_is_said_at_once(wrong):
    with pytest.raises(lz.errors.LayerZeroError):
        lz.serve_metrics(**wrong)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_hold_the_port(server):
    code = os.fork()
    if code == 0:
        fine = False
        try:
            fine = server._closed and server._http.socket.fileno() == -1
        finally:
            os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(code, 0)[1]) == 0
    assert get(server, "/live")[0] == 200


@pytest.mark.parametrize(("number", "when"), [(signal.SIGTERM, "ready"), (signal.SIGINT, "live")])
def test_the_command_serves_until_it_is_told_to_stop(number, when, tmp_path):
    """Also while its first check still runs."""
    env = {**os.environ, "LAYERZERO_CACHE_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-m", "layerzero", "serve-metrics", "--port", "0",
                                "--device", "cpu",
                                "--every", "60"], env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        url = line.split()[1].removesuffix("/metrics,")
        assert line.startswith("serving http://127.0.0.1:")

        def answers():
            try:
                with urlopen(f"{url}/{when}", timeout=60) as answer:
                    return answer.status == 200
            except HTTPError:
                return False

        wait_for(answers, 120)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and out == "stopped\n" and "Traceback" not in err
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "perf.sqlite").exists()
