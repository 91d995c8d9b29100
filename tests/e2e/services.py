"""Starts single services for tests that kill, stop or mismatch them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Service:
    """One child process that serves on `address`."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@contextmanager
def running_service(module: str, tmp_path: Path, *flags: str) -> Iterator[Service]:
    """`python -m MODULE --port 0 FLAGS`, known by its ready file; ended when the block is left."""
    ready, log = tmp_path / f"{module}.ready", tmp_path / f"{module}.log"
    command = [sys.executable, "-m", module, "--port", "0", "--ready-file", str(ready), *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        yield Service(process, _wait_address(process, ready, log), log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_address(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        assert process.poll() is None, f"exit code {process.returncode}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not ready within {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}"
        time.sleep(0.05)  # a poll: a file offers nothing to wait on
    address: str = json.loads(ready.read_text())["address"]
    return address
