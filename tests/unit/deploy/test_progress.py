"""Progress bars, as a terminal shows them."""

import asyncio
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.deploy.conftest import REPOSITORY, StartCluster

#: Select Graphic Rendition of a colour, as in ESC [ 38;5;197m; other sequences move the cursor.
_COLOURS = (b"\x1b[3", b"\x1b[9", b"\x1b[1;3")


def _at_a_terminal(argv: list[str], **variables: str) -> tuple[bytes, bytes]:
    """stdout, which is a pipe, and what a terminal gets on stderr."""
    terminal, stderr = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **variables}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        if name not in variables:
            environment.pop(name, None)
    process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    os.close(stderr)
    shown = _until_closed(terminal)
    stdout, _ = process.communicate()
    assert process.returncode == 0
    return stdout, shown


def _until_closed(terminal: int) -> bytes:
    shown = b""
    with suppress(OSError):  # what Linux says when the other end is closed
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    return shown


#: A sequence that moves the cursor, erases or colours; or one character.
_STEP = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|(.)", re.DOTALL)


def _screen(shown: bytes, width: int) -> list[str]:
    """The lines that a terminal of so many columns has shown in the end, those that it wraps as one."""
    rows, wrapped, row, column = [""], {0: False}, 0, 0
    for number, kind, character in _STEP.findall(shown.decode()):
        if kind == "A":
            row -= int(number or 1)
        elif kind == "K":
            assert number == "2", "only whole rows are erased"
            rows[row] = ""
        elif character == "\r":
            column = 0
        elif character:
            if character == "\n" or column == width:
                row, column = row + 1, column if character == "\n" else 0
                wrapped[row] = character != "\n"
                if row == len(rows):
                    rows.append("")
            if character != "\n":
                rows[row] = rows[row][:column].ljust(column) + character + rows[row][column + 1 :]
                column += 1
    lines: list[str] = []
    for row, text in enumerate(rows):
        if wrapped[row]:
            lines[-1] += text
        else:
            lines.append(text)
    return lines


_LOGGING_PROGRAM = """
import logging, os, sys, structlog
from common.config import LogSettings
from common.log import configure_logging
from common.progress import progress_bar

configure_logging(LogSettings(log_format="text"), process="w")
log = structlog.get_logger()
log.info("before")
with progress_bar("loading", 2) as advance:
    log.info("structured", text="word " * 40)
    logging.getLogger("a.library").warning("standard %s", "word " * 40)
    sys.stderr.write("forwarded " + "word " * 40 + "end\\n")
    os._exit(0)  # with the bar as it is
"""


@pytest.mark.parametrize("width", [80, 40])
def test_log_lines_stand_above_the_bar_in_one_piece(width: int) -> None:
    _, shown = _at_a_terminal([sys.executable, "-c", _LOGGING_PROGRAM], COLUMNS=str(width))
    *lines, bar = _screen(shown, width)
    assert not any("loading" in line for line in lines)
    before, structured, standard, forwarded = lines
    words = "word " * 40
    assert "before" in before
    assert f"text='{words}'" in structured
    assert f"standard {words}" in standard
    assert forwarded == f"forwarded {words}end"
    assert bar.startswith("loading")
    assert len(bar) <= width


def _make_model(out: Path) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", "make-model", "--family", "mixtral", "--out", str(out)]


def test_a_bar_at_a_terminal_that_vanishes(tmp_path: Path) -> None:
    stdout, shown = _at_a_terminal(_make_model(tmp_path / "m"))
    assert stdout == f"{tmp_path / 'm'}\n".encode()
    assert b"writing" in shown
    assert any(colour in shown for colour in _COLOURS)
    # Erases the line that it stood in.
    assert shown.rstrip().endswith(b"\x1b[2K")


def test_no_colours_where_nobody_wants_them(tmp_path: Path) -> None:
    _, shown = _at_a_terminal(_make_model(tmp_path / "m"), NO_COLOR="1")
    assert b"writing" in shown
    assert not any(colour in shown for colour in _COLOURS)


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}], ids=["plain", "forced-colours"])
def test_nothing_where_nobody_watches(tmp_path: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(
        _make_model(tmp_path / "m"), cwd=REPOSITORY, capture_output=True, env={**os.environ, **variables}, check=True
    )
    assert done.stderr == b""


async def test_up_shows_how_many_processes_serve(start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stderr = pty.openpty()
    reader = asyncio.create_task(asyncio.to_thread(_until_closed, terminal))
    with os.fdopen(stderr, "w") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", file)
        async with start_cluster(prefill=2, decode=1) as cluster:
            await cluster.ready()
    shown = await reader
    assert b"starting" in shown
    assert b"0/4" in shown
    assert cluster.stdout.getvalue().startswith("moerelay ready http://")
