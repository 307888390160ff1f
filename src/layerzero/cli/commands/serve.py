"""`lz serve-metrics`: serve /metrics, /ready and /live of this machine until a signal."""

from __future__ import annotations

import ipaddress
import signal
import threading
from typing import Annotated, Any

import typer

from ...integrations.serve import EVERY, LOOPBACK, Server
from ...spec.errors import ConfigError
from .. import show
from ..options import CallsFile, DeviceKind, Model, check_calls_file
from .ready import CapabilitiesFile, LockFile, TableFile, check


def serve_metrics(
    host: Annotated[str,
                    typer.Option(
                        help="the address to listen on; 0.0.0.0 lets others in")] = LOOPBACK,
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 9400,
    every: Annotated[float, typer.Option(help="seconds between two readiness checks")] = EVERY,
    calls: CallsFile = None, model: Model = None, table: TableFile = None, lock: LockFile = None,
    capabilities: CapabilitiesFile = None, device: DeviceKind = None,
) -> None:
    """HTTP /metrics for Prometheus, /ready (200 or 503, with the report of lz ready) and /live.
    Ends on SIGTERM.

    It speaks for this machine. A process that serves has its own: lz.serve_metrics(port).
    """
    if calls is not None and model is not None:
        raise ConfigError("give --calls or --model, got both")
    check_calls_file(calls)
    stop = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        stop.set()

    previous = {number: signal.signal(number, on_signal)
                for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Server(host, port, lambda: check(calls, model, table, lock, capabilities, device),
                    every) as server:
            show.text(f"serving {server.url}/metrics, /ready and /live")
            if not _is_loopback(host):
                show.text(f"{host} is not loopback: everyone who reaches this port can read them")
            server.wait(stop)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    show.text("stopped")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
