"""`lz serve-metrics`: serve /metrics, /ready and /live of this machine until a signal."""

from __future__ import annotations

import ipaddress
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ....integrations.serve import Server
from ... import show
from ...options import Source
from .ready import check


def serve_metrics(source: Source, host: str, port: int, every: float, table: Path | None,
                  lock: Path | None, capabilities: Path | None, device: str | None,
                  as_json: bool) -> int:
    # An Event would not do: a signal handler that sets it while this thread begins to wait for it
    # waits for this thread.
    signals: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        signals.append(number)

    say = (lambda line: None) if as_json else show.text
    previous = {number: signal.signal(number, on_signal)
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Server(host, port, lambda: check(source, table, lock, capabilities, device),
                    every) as server:
            if as_json:
                show.as_json({"url": server.url, "paths": ["/metrics", "/ready", "/live"],
                              "loopback": _is_loopback(host)})
                sys.stdout.flush()
            say(f"serving {server.url}/metrics, /ready and /live")
            if not _is_loopback(host):
                say(f"{host} is not loopback: everyone who reaches this port can read them")
            while not signals:
                time.sleep(0.2)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    say("stopped")
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
