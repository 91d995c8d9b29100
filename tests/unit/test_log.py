"""Log lines, as a process writes them: where they go, and that no traceback is lost."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, structlog
from common.config import LogSettings
from common.log import configure_logging

configure_logging(LogSettings(log_format="{form}"), process="prefill-0")
try:
    {{}}["missing key"]
except KeyError:
    {log}
"""
STANDARD = "logging.getLogger('a.library').exception('it broke: %s', 'badly')"
STRUCTURED = "structlog.get_logger().exception('it broke: badly')"


def lines_of(form: str, log: str) -> str:
    """What the program writes to stderr; it must write nothing to stdout, and warn about nothing."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(form=form, log=log)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("log", [STANDARD, STRUCTURED])
def test_a_json_line_carries_the_traceback(log: str) -> None:
    line = json.loads(lines_of("json", log))
    assert (line["process"], line["level"], line["event"]) == ("prefill-0", "error", "it broke: badly")
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("KeyError: 'missing key'")
    assert "exc_info" not in line


@pytest.mark.parametrize("log", [STANDARD, STRUCTURED])
def test_text_shows_the_traceback_under_its_line(log: str) -> None:
    first, *_, last = lines_of("text", log).splitlines()
    assert "it broke: badly" in first
    assert last == "KeyError: 'missing key'"


def test_a_line_of_a_library_names_it() -> None:
    assert json.loads(lines_of("json", STANDARD))["logger"] == "a.library"
