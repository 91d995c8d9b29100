"""Starts single services for tests that kill, stop or mismatch them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 200.0
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


@dataclass(frozen=True)
class Launched:
    """A child process that may not serve yet."""

    process: subprocess.Popen[bytes]
    ready_file: Path
    log: Path

    def wait_ready(self) -> Service:
        """Waits until it serves."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready_file.exists():
            assert self.process.poll() is None, f"exit code {self.process.returncode}:\n{self._last_lines()}"
            assert time.monotonic() < deadline, f"not ready within {START_TIMEOUT_S} s:\n{self._last_lines()}"
            time.sleep(0.05)  # a poll: a file offers nothing to wait on
        return Service(self.process, json.loads(self.ready_file.read_text())["address"], self.log)

    def _last_lines(self) -> str:
        return self.log.read_text()[-4000:]


@contextmanager
def launched_service(module: str, tmp_path: Path, *flags: str) -> Iterator[Launched]:
    """`python -m MODULE --port 0 FLAGS`; ended when the block is left, for which nobody has to be prepared."""
    ready, log = tmp_path / f"{module}.ready", tmp_path / f"{module}.log"
    command = [sys.executable, "-m", module, "--port", "0", "--pre-stop-s", "0", "--ready-file", str(ready), *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        yield Launched(process, ready, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
