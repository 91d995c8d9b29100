"""What the examples say without a cluster."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.plain_http import answering

_EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(_EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["stream_rows.py", "sglang_rollout.py", "chat_openai.py"])
def test_help_is_no_url(name: str) -> None:
    if name == "chat_openai.py":
        pytest.importorskip("openai")
    done = run(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {name} [-h] [URL]")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_url_for_openai_may_end_in_v1(suffix: str) -> None:
    pytest.importorskip("openai")
    # A list of models that is empty: what is asked for next does not matter.
    asked: list[str] = []
    with answering(200, "application/json", b'{"object": "list", "data": []}', asked) as url:
        run("chat_openai.py", url + suffix)
    assert asked == ["/v1/models"]
