"""Prompts, traces, times and the summary of the load test, and one short run of all of it."""

import argparse
import base64
import io
import itertools
import json
import random
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from common.errors import ConfigError
from deploy.load.histogram import Histogram
from deploy.load.prompts import LengthRange, RandomAsks
from deploy.load.stream import Arrival
from deploy.load.tally import Tally
from deploy.load.trace import BLOCK_TOKENS, asks, read_trace

ROOT = Path(__file__).parents[4]
LOCUST = [sys.executable, "-m", "locust", "-f", "deploy/locustfile.py", "--headless"]


# --- prompts


@pytest.mark.parametrize(("text", "expected"), [("7", (7, 7)), ("3:9", (3, 9))])
def test_lengths(text: str, expected: tuple[int, int]) -> None:
    found = LengthRange.parse(text)
    assert (found.low, found.high) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "9:3", "1:", ":4:5", "-2"])
def test_what_is_no_length(text: str) -> None:
    if text == "1:":
        assert LengthRange.parse(text) == LengthRange(1, 1)
        return
    with pytest.raises(argparse.ArgumentTypeError):
        LengthRange.parse(text)


def test_random_prompts_keep_to_their_ranges() -> None:
    source = RandomAsks(LengthRange(3, 6), LengthRange(1, 2), 50)
    drawn = [source.draw(random.Random(seed)) for seed in range(200)]
    assert {len(ask.token_ids) for ask in drawn} == {3, 4, 5, 6}
    assert {ask.max_tokens for ask in drawn} == {1, 2}
    assert max(max(ask.token_ids) for ask in drawn) < 50
    assert source.draw(random.Random(1)) == source.draw(random.Random(1))


# --- traces


def write_trace(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts_of_a_trace_share_what_their_hash_ids_share(tmp_path: Path) -> None:
    lines = read_trace(
        write_trace(
            tmp_path / "trace",
            {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 4000, "input_length": 1500, "output_length": 6, "hash_ids": [0, 1, 3]},
            {"timestamp": 2000, "input_length": 512, "output_length": 7, "hash_ids": [4]},
        )
    )
    first, second, third = asks(lines, 1000, 10_000, speed=2.0)
    assert [traced.at_s for traced in (first, second, third)] == [0.0, 0.5, 1.5]
    assert [len(traced.ask.token_ids) for traced in (first, second, third)] == [1030, 512, 1500]
    assert [traced.ask.max_tokens for traced in (first, second, third)] == [5, 7, 6]
    shared = 2 * BLOCK_TOKENS
    assert first.ask.token_ids[:shared] == third.ask.token_ids[:shared]
    assert first.ask.token_ids[shared:] != third.ask.token_ids[shared:1030]
    assert second.ask.token_ids[:BLOCK_TOKENS] != first.ask.token_ids[:BLOCK_TOKENS]
    assert not any(traced.is_cut for traced in (first, second, third))


def test_a_shorter_last_block_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    lines = read_trace(
        write_trace(
            tmp_path / "trace",
            {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [9]},
            {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [9, 10]},
        )
    )
    short, long = asks(lines, 1000, 10_000)
    assert short.ask.token_ids == long.ask.token_ids[:5]


def test_what_exceeds_the_context_is_cut(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 300, "hash_ids": [1, 2]}
    path = write_trace(tmp_path / "trace", line, line | {"output_length": 900})
    first, second = asks(read_trace(path), 1000, 800)
    assert (len(first.ask.token_ids), first.ask.max_tokens, first.is_cut) == (500, 300, True)
    assert (len(second.ask.token_ids), second.ask.max_tokens, second.is_cut) == (1, 799, True)
    assert len(read_trace(path, 1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request in it"),
        ("{}\n", "line 1: .*timestamp"),
        ("nonsense\n", "line 1: JSON"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "600 tokens have 2 blocks"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "at least one token"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "trace")
    with pytest.raises(ConfigError, match=r"--trace .*/none: No such file"):
        read_trace(tmp_path / "none")


# --- times


def test_percentiles_are_right_within_one_percent() -> None:
    histogram, rng = Histogram(), random.Random(0)
    values = sorted(rng.lognormvariate(-3, 1.5) for _ in range(5000))
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 90, 99, 100):
        exact = values[max(0, round(percent / 100 * len(values)) - 1)]
        assert exact <= histogram.percentile(percent) * 1.000001
        assert histogram.percentile(percent) <= exact * 1.011
    assert Histogram().percentile(50) == 0.0


def test_tallies_of_several_processes_add_up() -> None:
    one, other = Tally(), Tally()
    for tally, number in ((one, 3), (other, 5)):
        for _ in range(number):
            tally.arrived(Arrival(1, 0.5, True))
            tally.arrived(Arrival(4, 0.4, False))
            tally.finished(10, 1.0)
    other.failed("why")
    assert (one.exit_code, other.exit_code, Tally().exit_code) == (0, 1, 1)
    one.merge(json.loads(json.dumps(other.told())))
    assert (one.num_finished, one.num_tokens, one.num_prompt_tokens, one.num_failed) == (8, 40, 80, 1)
    assert one.itl.total == 32
    assert one.itl.percentile(50) == pytest.approx(0.1, rel=0.011)
    *_, rates, failure, last = one.summary(2.0)
    assert rates == "8 requests in 2.0 s: 4.00 requests/s, 40.0 prompt and 20.0 generated tokens/s"
    assert failure == "failed, 1 times: why"
    assert last == "load: 9 requests, 1 failures"


def test_nothing_but_the_locustfile_needs_gevent() -> None:
    modules = ["histogram", "contract", "stream", "prompts", "trace", "tally", "target", "request"]
    imports = "; ".join(f"import deploy.load.{name}" for name in modules)
    code = f"{imports}; import sys; sys.exit('gevent' in sys.modules or 'locust' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def npy(array: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


#: Of a prompt of three tokens and one token.
ROWS = base64.b64encode(npy(np.zeros((3, 1, 1), np.uint8)))


class HalfBroken(BaseHTTPRequestHandler):
    """Serves one model; every other answer to a request is one of `BROKEN`."""

    BROKEN = (b'"routed_experts": ""', b'"routed_experts": "\xff"', b'"routed_experts": null, "usage": [1]')
    asked = itertools.count()

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"max_model_len": 64, "root": null}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        turn, number = divmod(next(self.asked), 2)
        rows = self.BROKEN[turn % len(self.BROKEN)] if number else b'"routed_experts": "%s"' % ROWS
        choice = b'{"token_ids": [9], "finish_reason": "length", %s}' % rows
        usage = b'{"choices": [], "usage": {"completion_tokens": 1}}'
        self._answer(b'data: {"choices": [%s]}\n\ndata: %s\n\ndata: [DONE]\n\n' % (choice, usage))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.skipif(find_spec("locust") is None, reason="needs the extra `load`")
def test_every_answer_that_is_broken_is_a_failure(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}
    trace = write_trace(tmp_path / "trace", *[line] * 12)
    with ThreadingHTTPServer(("127.0.0.1", 0), HalfBroken) as server:
        threading.Thread(target=server.serve_forever).start()
        host = f"http://127.0.0.1:{server.server_port}"
        process = subprocess.run(
            [*LOCUST, "-u", "1", "--trace", str(trace), "--only-summary", "--host", host],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        server.shutdown()
    assert process.returncode == 1
    assert "\nload: 12 requests, 6 failures\n" in process.stdout
    assert "Traceback" not in process.stderr


@pytest.mark.skipif(find_spec("locust") is None, reason="needs the extra `load`")
def test_a_cluster_that_is_not_there_is_said_in_one_line() -> None:
    process = subprocess.run(
        [*LOCUST, "-u", "1", "-t", "5s", "--host", "http://127.0.0.1:9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert process.returncode == 2
    [line] = [line for line in process.stderr.splitlines() if "load:" in line]
    assert re.search(r"load: nothing that serves answers at http://127.0.0.1:9: .*refused", line)
    assert "Traceback" not in process.stderr
