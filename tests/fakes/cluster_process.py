"""Stand-ins for the services that `moerelay up` starts: `python -m tests.fakes.cluster_process ROLE flags…`.

They read their flags with the real settings classes, report ready, wait for SIGTERM, and write what happened into the
file that FAKE_JOURNAL names. FAKE_FAULTS, JSON of process name → fault, makes one misbehave:
"refuse" (exit code 2 at start), "crash" (exit code 3 at start), "mute" (never ready), "deaf" (ignores SIGTERM).
"""

import json
import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from common.config import DecodeSettings, PrefillSettings, RouterSettings, WorkerSettings
from common.process import host_port
from common.settings_loader import load_settings


class Journal:
    """Lines that several processes append to one file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._path = Path(os.environ["FAKE_JOURNAL"])

    def add(self, event: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{self._name} {event}\n")


def misbehave_at_start(name: str, fault: str) -> None:
    if fault == "refuse":
        print(f"{name}: error: this model is not supported", file=sys.stderr)
        sys.exit(2)
    if fault == "crash":
        print("Traceback …\nValueError: a bug\n", file=sys.stderr)
        sys.exit(3)
    if fault == "mute":
        signal.sigwait({signal.SIGTERM})
        sys.exit(0)


def report_ready(path: Path | None, address: str, control_address: str | None) -> None:
    assert path is not None
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"address": address, "control_address": control_address, "pid": os.getpid()}))
    partial.replace(path)


class ReadyHandler(BaseHTTPRequestHandler):
    """503 to the first probe, then 200: a router whose workers need a moment."""

    probes = 0

    def do_GET(self) -> None:
        type(self).probes += 1
        self.send_response(200 if self.probes > 1 and self.path == "/ready" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


class IPv6Server(HTTPServer):
    address_family = socket.AF_INET6


def serve_http(host: str, port: int) -> str:
    server = (IPv6Server if ":" in host else HTTPServer)((host, port), ReadyHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return host_port(host, server.server_port)


def read_settings(role: str, argv: list[str]) -> WorkerSettings | RouterSettings:
    if role == "router":
        return load_settings(RouterSettings, argv, prog=role)
    return load_settings(PrefillSettings if role == "prefill" else DecodeSettings, argv, prog=role)


def main(role: str, argv: list[str]) -> None:
    settings = read_settings(role, argv)
    name = "router" if isinstance(settings, RouterSettings) else settings.worker_id
    fault = json.loads(os.environ.get("FAKE_FAULTS", "{}")).get(name, "")
    # Before anybody hears of this process, and may signal it.
    stop = signal.SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, {stop})
    journal = Journal(name)
    journal.add(f"started {os.getpid()}")
    journal.add(settings.model_dump_json())
    print(f"{name} prints on stdout")
    print(f"{name} logs", file=sys.stderr)

    misbehave_at_start(name, fault)
    is_router = isinstance(settings, RouterSettings)
    address = serve_http(settings.host, settings.port) if is_router else f"127.0.0.1:{9000 + len(name)}"
    control = None
    if isinstance(settings, RouterSettings) and settings.admin_port is not None:
        control = serve_http(settings.admin_host, settings.admin_port)
    report_ready(settings.ready_file, address, control)
    signal.sigwait({stop})
    journal.add("stopping")
    if fault == "deaf":
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
