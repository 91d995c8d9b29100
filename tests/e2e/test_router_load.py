"""What many, or large, requests do to a router process: others keep their pace, and memory stays bounded."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil
import pytest

from tests.e2e.cluster import until
from tests.e2e.cpu_wait import cpu_wait_s
from tests.fakes.paced_worker import LARGE, PACE_S, ROW_BYTES

GENERATE = "/inference/v1/generate"
NUM_STREAMS = 8
#: Most of them must keep the pace; a single one may be disturbed by the machine.
NUM_ROUNDS = 5
#: What /health may take meanwhile.
HEALTH_S = 0.1
#: How often processes are asked how long they waited for a cpu, at most: asking takes a millisecond.
SAMPLE_S = 0.01


@asynccontextmanager
async def router(folder: Path, *flags: str) -> AsyncIterator[tuple[aiohttp.ClientSession, psutil.Process]]:
    """A router process over one paced worker."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.paced_worker"), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    address = (await worker.stdout.readline()).decode().strip()
    ready = folder / "ready.json"
    base = ["--port", "0", "--decode", address, "--ready-file", str(ready), "--log-level", "warning"]
    base += ["--heartbeat-timeout-s", "60", "--connect-timeout-s", "60"]  # on a busy machine everybody is slow
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "router", *base, *flags)
    try:
        await until(lambda: _exists(ready), 60)
        url = f"http://{json.loads(ready.read_text())['address']}"
        async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
            await until(lambda: _is_ready(http), 60)
            yield http, psutil.Process(process.pid)
    finally:
        for each in (process, worker):
            with contextlib.suppress(ProcessLookupError):
                each.terminate()
            await each.wait()


async def _exists(path: Path) -> bool:
    return path.exists()  # noqa: ASYNC240


async def _is_ready(http: aiohttp.ClientSession) -> bool:
    async with http.get("/ready") as response:
        return response.status == 200


class Pace:
    """Streams that run until they are stopped, and the longest gap between tokens of one of them since `begin`.

    Less what the processes waited for a cpu in the meantime: a machine that is busy with other things disturbs the
    pace of everything.
    """

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._last: list[Moment | None] = [None] * NUM_STREAMS
        self.begin()

    def begin(self) -> None:
        self._begun = self._now = Moment.now()
        self.longest_gap_s = 0.0

    @property
    def all_read(self) -> bool:
        return None not in self._last

    async def read(self, index: int) -> None:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 10_000}, "stream": True}
        async with self._http.post(GENERATE, json=body) as response:
            assert response.status == 200
            async for _ in response.content.iter_any():
                now, last = self._moment(), self._last[index]
                # A gap that began before counts with what of it came after.
                if last:
                    self.longest_gap_s = max(self.longest_gap_s, now.since(max(last, self._begun)))
                self._last[index] = now

    def _moment(self) -> "Moment":
        """Tokens of all streams come at about the same time."""
        if time.perf_counter() - self._now.at_s > SAMPLE_S:
            self._now = Moment.now()
        return self._now


@dataclass(frozen=True, order=True)
class Moment:
    at_s: float
    waited_s: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.perf_counter(), cpu_wait_s())

    def since(self, earlier: Self) -> float:
        """Seconds in between in which nobody waited for a cpu."""
        return max(0.0, self.at_s - earlier.at_s - max(0.0, self.waited_s - earlier.waited_s))


@asynccontextmanager
async def streaming(http: aiohttp.ClientSession) -> AsyncIterator[Pace]:
    pace = Pace(http)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pace.read(index)) for index in range(NUM_STREAMS)]
        await until(lambda: _all_read(pace), 30)
        yield pace
        for task in tasks:
            task.cancel()


async def _all_read(pace: Pace) -> bool:
    return pace.all_read


async def large_answer(http: aiohttp.ClientSession, options: dict[str, Any]) -> int:
    """Bytes of an answer with 50 MB of rows, read as they come."""
    body = {"token_ids": [7] * LARGE, "sampling_params": {"max_tokens": 1}} | options
    data = await asyncio.to_thread(lambda: json.dumps(body).encode())
    num_bytes = 0
    async with http.post(GENERATE, data=data) as response:
        assert response.status == 200, await response.text()
        async for part in response.content.iter_any():
            num_bytes += len(part)
    return num_bytes


async def slowest_health(http: aiohttp.ClientSession) -> float:
    """Asks again and again until it is cancelled, which gives the longest time that an answer took."""
    slowest = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            begun = Moment.now()
            async with http.get("/health") as response:
                assert response.status == 200
                await response.read()
            slowest = max(slowest, Moment.now().since(begun))
            await asyncio.sleep(5 * SAMPLE_S)
    return slowest


@pytest.mark.cluster
@pytest.mark.parametrize(
    "options",
    [{"stream": False}, {"stream": True, "stream_options": {"routed_experts": "final"}}],
    ids=["whole", "last event"],
)
async def test_fifty_megabytes_of_rows_stop_nobody(tmp_path: Path, options: dict[str, Any]) -> None:
    """sglang#24851, vllm#28284, verifiers/prime-rl#2614: encoding a long history held up all other streams."""
    rounds: list[Round] = []
    async with router(tmp_path) as (http, _), streaming(http) as pace:
        while sum(each.is_good for each in rounds) <= NUM_ROUNDS // 2:
            assert sum(not each.is_good for each in rounds) <= NUM_ROUNDS // 2, rounds
            usual_gap_s, _ = await disturbance(http, pace, asyncio.sleep(10 * PACE_S))
            answer = asyncio.create_task(large_answer(http, options))
            rounds.append(Round(usual_gap_s, *await disturbance(http, pace, asyncio.wait([answer]))))
            assert await answer > LARGE * ROW_BYTES * 4 // 3


@dataclass(frozen=True)
class Round:
    """The longest gap of a stream alone, and that beside 50 MB, with the slowest answer of /health."""

    usual_gap_s: float
    gap_s: float
    health_s: float

    @property
    def is_good(self) -> bool:
        return self.gap_s < 2 * max(self.usual_gap_s, PACE_S) and self.health_s < HEALTH_S


async def disturbance(http: aiohttp.ClientSession, pace: Pace, work: Awaitable[object]) -> tuple[float, float]:
    """The longest gap and the slowest /health while that goes on, and two tokens longer."""
    pace.begin()
    health = asyncio.create_task(slowest_health(http))
    await work
    await asyncio.sleep(2 * PACE_S)  # a gap ends with the token after it
    health.cancel()
    return pace.longest_gap_s, await health


#: Together in one request: few, so that what is in use for a moment only is little.
PROMPTS_PER_REQUEST = 10
#: Ids of a prompt, whose full blocks are nine: `prefix` placement, the default, remembers five prefixes of it.
PROMPT_LEN = 145
#: What placement may remember here, far less than 10^3 prompts have.
MAX_PREFIXES = 1000
#: By the number of prompts: buffers, caches and fragmentation that the first tenth has not yet brought. 3 and 4 MB were
#: seen. Without the bound placement's memory alone takes 8 to 9 MB of 9,000 prompts.
MAX_GROWTH_BYTES = {10_000: 4 * 2**20, 100_000: 8 * 2**20}


def unique_prompt(number: int) -> list[int]:
    """24 bits of the number, then 142 ids more: no two of them share a block."""
    head = [number % 250, number // 250 % 250, number // 62_500]
    return [*head, *((number + i) % 250 for i in range(PROMPT_LEN - len(head)))]


@pytest.mark.cluster
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_prompts", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_unique_prompts_leave_nothing_behind(
    tmp_path: Path, num_prompts: int, record_property: Callable[[str, object], None]
) -> None:
    """production-stack#687: a prefix trie in the router grew with every prompt.

    Placement remembers prefixes, too, but no more of them than --max-prefixes, and nothing else is kept of a prompt.
    """
    async with router(tmp_path, "--max-prefixes", str(MAX_PREFIXES)) as (http, process):

        async def send(first: int, end: int) -> None:
            for number in range(first, end, PROMPTS_PER_REQUEST):
                prompts = [unique_prompt(number + i) for i in range(PROMPTS_PER_REQUEST)]
                async with http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}) as response:
                    assert response.status == 200, await response.text()
                    assert len((await response.json())["choices"]) == PROMPTS_PER_REQUEST

        await send(0, num_prompts // 10)
        before = process.memory_info().rss
        await send(num_prompts // 10, num_prompts)
        growth = process.memory_info().rss - before
        record_property("rss_growth_bytes", growth)
        assert growth < MAX_GROWTH_BYTES[num_prompts]
