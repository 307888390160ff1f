"""/metrics, /ready and /live over HTTP, for the process that serves.

    server = lz.serve_metrics(9400)            # a daemon thread; server.close() ends it

A probe never waits for a check: a background thread repeats the readiness check, and /ready answers
with the last report (200 or 503). The standard library's server takes GET and HEAD without a body,
with a limit on the size of a request, the time of a connection and the number of connections; by
default on loopback.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from ..files.calls import Calls, load_calls
from ..files.reading import printable
from ..machine import locks
from ..operate import readiness
from ..plan.lockfile import Lockfile
from ..plan.readiness import WANTED, OrPath, readiness_check
from ..plan.table import Table
from ..spec.errors import ConfigError, LayerZeroError
from ..world import events, redaction
from . import prometheus

LOOPBACK = "127.0.0.1"
EVERY = 5.0                                    # seconds between two checks
STALE = 60.0                                   # seconds after which a check counts as hanging
MAX_CONNECTIONS = 32                           # at once; see _Http.verify_request
UNHURRIED_SECONDS = 0.25                       # after which a client gives its place to another
MAX_HEADER_BYTES = 1 << 14                     # of a whole request
CONNECTION_SECONDS = 10.0                      # for a request and its response
JSON, PLAIN = "application/json; charset=utf-8", "text/plain; charset=utf-8"

Response = tuple[int, str, bytes]              # status, content type, body
Check = Callable[[], readiness.Readiness]


def serve_metrics(port: int = 0, host: str = LOOPBACK, *, calls: Calls = (),
                  device: str | None = None, table: OrPath[Table] = None,
                  lock: OrPath[Lockfile] = None, every: float = EVERY) -> Server:
    """Serve /metrics, /ready and /live of this process from a daemon thread; port 0 takes a free
    one.

    `calls`, `device`, `table` and `lock` are what /ready checks, as for lz.readiness_check.
    """
    workload = load_calls(calls, WANTED)
    return Server(host, port, lambda: readiness_check(workload, device, table=table, lock=lock),
                  every)


class Reports:
    """Keeps the last readiness report, which a background thread renews."""

    def __init__(self, check: Check, every: float) -> None:
        self._check, self._every = check, every
        self._last: tuple[float, bool, dict[str, Any]] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="layerzero-ready", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                report = self._check()
                self._last = time.monotonic(), report.ok, readiness.redacted(report)
            except BaseException as e:         # /ready reports it, and the next check is tried
                error = redaction.text(f"{type(e).__name__}: {e}")
                events.log.warning("the readiness check failed: %s", error)
                self._last = time.monotonic(), False, {"ready": False,
                                                       "problem":
                                                           f"the check itself failed: {error}"}
            self._stop.wait(self._every)

    def latest(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the machine is ready, and the report."""
        last = self._last
        if last is None:
            return False, {"ready": False, "problem": "the first check is not done yet"}
        at, ok, data = last
        age = time.monotonic() - at
        if age > STALE + self._every:
            return False, {**data, "ready": False,
                           "problem": f"the last check is {age:.0f} s old: it hangs"}
        return ok, {**data, "age_seconds": round(age, 3)}

    def close(self) -> None:
        self._stop.set()


class Server:
    """The HTTP server of serve_metrics; close it, or use it in a `with`."""

    def __init__(self, host: str, port: int, check: Check, every: float = EVERY) -> None:
        if not isinstance(host, str) or not host:
            raise ConfigError(f"host must be a name or an address such as {LOOPBACK}, 0.0.0.0 or "
                              f"::1, got {host!r}")
        if type(port) is not int or not 0 <= port < 65536:
            raise ConfigError(f"port must be from 0 to 65535, got {port!r}")
        if isinstance(every, bool) or not isinstance(every, (int, float)) or not (
                0 < every <= threading.TIMEOUT_MAX):
            raise ConfigError(f"every must be seconds > 0, got {every!r}")
        try:
            self._http = _Http((host, port), self)
        except (OSError, TypeError, ValueError) as e:     # the last two: no name that can be
            raise ConfigError(
                f"cannot listen on {printable(host):.100}:{port}: "
                f"{getattr(e, 'strerror', None) or e}; choose another port or host") from e
        try:
            self._metrics, self._uninstall = _metrics_page()
            self.reports = Reports(check, every)
        except BaseException:
            self._http.server_close()
            raise
        self.host, self.port = host, int(self._http.server_address[1])
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._http.serve_forever,
                                        kwargs={"poll_interval": 0.25},
                                        name="layerzero-http", daemon=True)
        self._thread.start()
        _servers.add(self)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def respond(self, path: str, accept: str = "") -> Response:
        if path == "/live":
            return 200, JSON, b'{"live": true}\n'
        if path == "/ready":
            ok, data = self.reports.latest()
            return (200 if ok else 503, JSON, json.dumps(data, indent=1, default=str).encode()
                    + b"\n")
        if path == "/metrics":
            if self._metrics is None:
                return (501, PLAIN,
                        b"prometheus_client is not installed; install layerzero[telemetry]\n")
            try:
                return self._metrics(accept, self.reports.latest()[0])
            except LayerZeroError as e:        # such as a policy that cannot be read
                return 503, PLAIN, redaction.text(f"{e}\n").encode()
            except Exception as e:             # of a collector, which may be anyone's
                error = printable(redaction.text(f"{type(e).__name__}: {e}"))
                events.log.warning("the metrics cannot be collected: %s", error)
                return 500, PLAIN, f"the metrics cannot be collected: {error}\n".encode()
        return 404, PLAIN, b"there is /metrics, /ready and /live\n"

    def close(self) -> None:
        """Stop listening; requests in progress are completed."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        _servers.discard(self)
        self._http.shutdown()
        self._http.server_close()
        self.reports.close()
        self._uninstall()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _metrics_page() -> tuple[Callable[[str, bool], Response] | None, Callable[[], None]]:
    """Return functions that write the metrics and uninstall; None without prometheus_client."""
    try:
        import prometheus_client
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        return None, lambda: None
    registry = prometheus_client.CollectorRegistry()
    uninstall = prometheus.install(registry)
    gauge = prometheus_client.Gauge("layerzero_ready",
                                    "1 where the last readiness check found nothing missing",
                                    registry=registry)

    def page(accept: str, ready: bool) -> Response:
        gauge.set(float(ready))
        try:
            encode, kind = choose_encoder(accept)
        except (TypeError, ValueError):        # a version that is no number
            encode, kind = choose_encoder("")
        return 200, kind, encode(registry)

    return page, uninstall


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], owner: Server) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.owner = owner
        # connection -> when it came; the oldest is the first
        self._open: dict[socket.socket, float] = {}
        self._guard = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may be slow and is not used."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "layerzero", int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:                        # too many open files: it comes again at once
            time.sleep(0.05)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection where there is a place, or where the oldest had time enough: clients
        that do not finish must not keep a probe out."""
        now, oldest = time.monotonic(), None
        with self._guard:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                if now - self._open[oldest] < UNHURRIED_SECONDS:
                    return False
                del self._open[oldest]
            self._open[request] = now
        if oldest is not None:
            with suppress(OSError):            # already closed
                oldest.shutdown(socket.SHUT_RDWR)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close overdue connections, several times a second: a slow client keeps no thread."""
        end = time.monotonic() - CONNECTION_SECONDS
        with self._guard:
            late = [request for request, since in self._open.items() if since < end]
        for request in late:
            with suppress(OSError):            # already closed
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that disconnects; the default prints a traceback to stderr."""
        events.log.debug("a connection to /metrics ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    timeout = 5.0                              # of one read
    server_version = "layerzero"
    protocol_version = "HTTP/1.0"              # one request a connection

    def setup(self) -> None:
        super().setup()
        self.rfile = _Bounded(self.rfile, MAX_HEADER_BYTES)   # type: ignore[assignment]

    def version_string(self) -> str:
        return self.server_version             # no version of Python

    def do_GET(self) -> None:
        self._respond(True)

    def do_HEAD(self) -> None:
        self._respond(False)

    def _respond(self, with_body: bool) -> None:
        if (self.headers.get("Content-Length", "0").strip() != "0"
            or self.headers.get("Transfer-Encoding")):
            self.send_error(413)
            return
        status, kind, body = self.server.owner.respond(self.path.partition("?")[0],
                                                       self.headers.get("Accept", ""))
        self._send(status, kind, body, with_body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send one line, not a page that echoes the request. An unsupported method is 405."""
        code = 405 if code == 501 else int(code)
        self.close_connection = True
        headers = {"Allow": "GET, HEAD"} if code == 405 else {}
        self._send(code, PLAIN, f"{code} {self.responses.get(code, ('error',))[0]}\n".encode(),
                   True, headers)

    def _send(self, status: int, kind: str, body: bytes, with_body: bool,
              headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)),
                            "Cache-Control": "no-store",
                            "X-Content-Type-Options": "nosniff", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        events.log.debug("http: %r", format % args)     # %r: a client may send escape sequences


class _Bounded:
    """A request stream that ends after `limit` bytes."""

    def __init__(self, file: Any, limit: int) -> None:
        self._file, self._left = file, limit

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._file.readline(self._left if limit < 0 else min(limit, self._left))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
    """Close the servers in the child: their threads are gone, and the port is the parent's."""
    for server in locks.members(_servers):
        server._closed = True
        server._http.socket.close()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
