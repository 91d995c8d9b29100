"""How programs end: exit codes, and what is said on stderr."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, UnavailableError
from common.program import run_program

_REPOSITORY = Path(__file__).parents[2]
_CLI = [sys.executable, "-m", "deploy.cli"]


def _raises(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a\nb"), 2, "x: error: a b\n"),
        (UnavailableError("c"), 1, "x: error: c\n"),
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "/f"), 1, "x: error: /f: Permission denied\n"),
        (ConnectionResetError(104, "Connection reset by peer"), 1, "x: error: Connection reset by peer\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, "x: error: Broken pipe\n"),
        (MemoryError("no 8 bytes"), 1, "x: error: memory is out: no 8 bytes\n"),
    ],
    ids=["startup", "service", "interrupt", "file", "socket", "other-pipe", "memory"],
)
def test_errors(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program("x", lambda: _raises(error)) == code
    assert capsys.readouterr() == ("", line)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_program("x", lambda: 1 // 0)


def _into_a_closed_pipe(argv: list[str], *, stderr_too: bool = False) -> tuple[int, bytes]:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            argv, cwd=_REPOSITORY, stdout=write, stderr=write if stderr_too else subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    return done.returncode, done.stderr or b""


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["version"], ["completion", "bash"], ["doctor", "--port", "0"]],
    ids=["help", "version", "completion", "rich"],
)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_nobody_reads_stdout(argv: list[str], unbuffered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    assert _into_a_closed_pipe([*_CLI, *argv]) == (141, b"")


def test_nobody_reads_the_flags() -> None:
    """argparse itself swallows what a write raises."""
    code, stderr = _into_a_closed_pipe([*_CLI, "make-model", "--help"])
    assert (code in (0, 141), stderr) == (True, b"")


def test_nobody_reads_stderr() -> None:
    assert _into_a_closed_pipe([*_CLI, "no-such-command"], stderr_too=True) == (2, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_stdout_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    # With the variable, print itself would fail, and nobody could say where it wrote to.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*_CLI, "version"], cwd=_REPOSITORY, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"moerelay: error: stdout: No space left on device\n")


def test_started_without_stdout_and_stderr() -> None:
    for argv, code in ((["version"], 0), (["no-such-command"], 2)):
        command = 'exec "$0" "$@" >&- 2>&-'
        assert subprocess.run(["sh", "-c", command, *_CLI, *argv], cwd=_REPOSITORY, check=False).returncode == code


@pytest.mark.parametrize("module", ["router", "decode_worker", "prefill_worker"])
def test_ctrl_c_before_a_service_serves(module: str, tmp_path: Path) -> None:
    """A FIFO for a --config file holds the process where it reads its settings."""
    fifo = tmp_path / "settings.toml"
    os.mkfifo(fifo)
    # What a shell starts in the background ignores SIGINT, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--config", str(fifo)], cwd=_REPOSITORY, stderr=subprocess.PIPE
    )
    signal.signal(signal.SIGINT, before)
    with open(fifo, "wb"):  # returns when the process opens it, too
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
