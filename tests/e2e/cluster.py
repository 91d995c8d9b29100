"""Starts real clusters for tests, and speaks to them as a client would."""

import asyncio
import base64
import io
import json
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

READY = re.compile(r"^moerelay ready (http://\S+)(?: control (http://\S+))?$")
START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 60.0
#: Nobody is given up for silence, however long a busy machine takes; who is killed is found out at once.
PATIENT_ROUTER = ("--heartbeat-timeout-s", "60", "--connect-timeout-s", "60")
PATIENT_WORKER = ("--handoff-timeout-s", "60")
#: A stream is closed after its last event, and does not stay open as an idle connection does.
STREAM_END_S = 15.0
#: What a test waits for takes milliseconds; and seconds where other processes have the cores.
UNTIL_S = 30.0

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Cluster:
    """A running `moerelay up`."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    #: With --admin-port.
    control_url: str | None = None


@contextmanager
def running_cluster(model: Path, tmp_path: Path, *flags: str) -> Iterator[Cluster]:
    """`moerelay up --model MODEL FLAGS` on a free port; stopped with SIGTERM, which must end it with code 0."""
    log = tmp_path / "up.log"
    command = [sys.executable, "-m", "deploy.cli", "up", "--model", str(model), "--port", "0"]
    command += [*PATIENT_ROUTER, *PATIENT_WORKER, *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        url, control_url = _wait_ready(process, log)
        yield Cluster(url, process, log, control_url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_ready(process: subprocess.Popen[str], log: Path) -> tuple[str, str | None]:
    assert process.stdout is not None
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    if not selector.select(START_TIMEOUT_S):
        raise AssertionError(f"no ready line within {START_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")
    line = process.stdout.readline().strip()
    match = READY.match(line)
    assert match, f"{line!r} is not a ready line:\n{log.read_text()[-4000:]}"
    return match[1], match[2]


def decode_rows(text: str) -> npt.NDArray[np.integer]:
    """Base64 of an .npy file → array; written here once more, so that the codec under test is not its own judge."""
    array: npt.NDArray[np.integer] = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    return array


@dataclass
class Answer:
    """One choice of one answer, streamed or not, in the same form."""

    status: int
    token_ids: list[int] = field(default_factory=list)
    row_parts: list[npt.NDArray[np.integer]] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    usage: JsonObject | None = None
    error: JsonObject | None = None
    #: Per event: (tokens so far, rows so far).
    spans: list[tuple[int, int]] = field(default_factory=list)
    ended_with_done: bool = False
    #: When each event of a stream came, on the monotonic clock.
    came_at: list[float] = field(default_factory=list)

    def longest_gap_s(self, since: float) -> float:
        """Between two events of a stream, counting only what of it lies after that time."""
        gaps = (later - max(earlier, since) for earlier, later in pairwise(self.came_at))
        return max(gaps, default=0.0)

    @property
    def rows(self) -> npt.NDArray[np.integer]:
        return np.concatenate(self.row_parts)

    def take(self, choice: JsonObject) -> None:
        """Adds one choice object of a response or of an event."""
        self.token_ids += choice["token_ids"]
        if choice["routed_experts"] is not None:
            self.row_parts.append(decode_rows(choice["routed_experts"]))
        if choice["logprobs"] is not None:
            self.logprobs += choice["logprobs"]["content"]
        if choice["finish_reason"] is not None:
            assert self.finish_reason is None, "a second finish reason"
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice["stop_reason"]
        self.spans.append((len(self.token_ids), sum(map(len, self.row_parts))))


class Client:
    """POST /inference/v1/generate, both ways, with every stream checked for a proper end."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def generate(self, token_ids: list[int], *, stream: bool = False, **fields: Any) -> Answer:
        """The only choice of a request; `fields` named like sampling parameters go there, others to the top level."""
        answers = await self.generate_n(token_ids, stream=stream, **fields)
        return answers[0]

    async def generate_n(self, token_ids: list[int], *, stream: bool = False, **fields: Any) -> list[Answer]:
        body = request_body(token_ids, stream=stream, **fields)
        async with self.session.post(f"{self.url}/inference/v1/generate", json=body) as response:
            if response.status != 200:
                return [Answer(response.status, error=(await response.json())["error"])]
            if stream:
                return await self._read_stream(response, fields.get("n", 1))
            payload = await response.json()
        answers = [Answer(200, usage=payload["usage"]) for _ in payload["choices"]]
        for choice in payload["choices"]:
            answers[choice["index"]].take(choice)
        return answers

    async def _read_stream(self, response: aiohttp.ClientResponse, num_choices: int) -> list[Answer]:
        answers = [Answer(200) for _ in range(num_choices)]
        done, last_event = False, time.monotonic()
        async for event in sse_events(response):
            assert not done, "an event after [DONE]"
            last_event = time.monotonic()
            for answer in answers:
                answer.came_at.append(last_event)
            if event == "[DONE]":
                done = True
            elif "error" in (payload := json.loads(event)):
                answers[0].error = payload["error"]
            else:
                for choice in payload["choices"]:
                    answers[choice["index"]].take(choice)
                for answer in answers:
                    answer.usage = payload.get("usage") or answer.usage
        assert time.monotonic() - last_event < STREAM_END_S, "the stream stayed open after its last event"
        for answer in answers:
            answer.ended_with_done = done
        failed = answers[0].error is not None
        assert done != failed, "a stream ends with [DONE] or with an error event"
        assert failed or all(a.finish_reason for a in answers), "[DONE] without a finish reason"
        return answers

    async def json(self, path: str) -> JsonObject:
        async with self.session.get(self.url + path) as response:
            payload: JsonObject = await response.json()
            return payload

    async def metric(self, name: str, role: str | None = None) -> float:
        """Sum of a metric's samples over all workers (of one role)."""
        async with self.session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        pattern = re.compile(rf"^{name}(?:{{(.*)}})? (\S+)$", re.M)
        found = [float(m[2]) for m in pattern.finditer(text) if role is None or f'role="{role}"' in (m[1] or "")]
        assert found, f"no metric {name} of role {role} in\n{text}"
        return sum(found)


SAMPLING_FIELDS = frozenset(
    {
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop_token_ids"),
        *("ignore_eos", "logprobs", "logit_bias", "stop", "routed_experts_prompt_start", "return_routed_experts"),
    }
)


def request_body(token_ids: list[int], *, stream: bool = False, **fields: Any) -> JsonObject:
    sampling = {"temperature": 0.0} | {k: v for k, v in fields.items() if k in SAMPLING_FIELDS}
    rest = {k: v for k, v in fields.items() if k not in SAMPLING_FIELDS}
    return {"token_ids": token_ids, "sampling_params": sampling, "stream": stream, **rest}


async def sse_events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The `data:` payload of every event, split by blank lines and not by aiohttp's bounded line reader."""
    buffer = b""
    async for piece in response.content.iter_any():
        buffer += piece
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            assert event.startswith(b"data: "), event[:80]
            yield event.removeprefix(b"data: ").decode()
    assert not buffer, f"an unfinished event: {buffer[:80]!r}"


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = UNTIL_S) -> None:
    """Polls a condition that offers nothing to wait on (metrics, logs, readiness); TimeoutError if it stays false."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
