"""A router over fake workers, and how its answers are read."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
from aiohttp import web

from common.config import RouterSettings
from common.pb import types_pb2
from common.routing.codec import base642numpy
from router.app import create_app
from router.keys import FLEET
from router.listener import create_runner
from router.response_schemas import (
    GenerateResponse,
    GenerateStreamResponse,
)
from router.worker import Worker
from tests.fakes.fake_workers import FakeWorker, Script, expected_tokens, serving

GENERATE = "/inference/v1/generate"

#: However long a busy machine stands still, no worker is taken for lost that answers in the end.
PATIENT: dict[str, Any] = {"heartbeat_timeout_s": 60, "connect_timeout_s": 60}
#: Of a heartbeat that a test asks for; a worker that has left refuses it at once.
HEARTBEAT_S = 30


@dataclass
class Cluster:
    """One router with its workers; `http` speaks to it."""

    app: web.Application
    url: str
    http: aiohttp.ClientSession
    prefill: list[FakeWorker]
    decode: list[FakeWorker]

    async def post(self, body: Any, path: str = GENERATE, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(path, json=body, **kwargs) as response:
            return response.status, strict_json(await response.text())

    async def generate(self, token_ids: list[int], **sampling: Any) -> dict[str, Any]:
        """A whole answer, checked against its schema."""
        status, answer = await self.post({"token_ids": token_ids, "sampling_params": sampling})
        assert status == 200, answer
        GenerateResponse.model_validate(answer)
        return answer

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.http.get(path) as response:
            return response.status, strict_json(await response.text())

    async def stream(self, body: dict[str, Any], **kwargs: Any) -> list[bytes]:
        """Every event's data, in order; the stream must have been opened."""
        async with self.http.post(GENERATE, json=body | {"stream": True}, **kwargs) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return split_events(await response.read())

    async def canary(self) -> None:
        """The service still gives the right answer."""
        answer = await self.generate([5, 6, 7], temperature=0, max_tokens=4)
        assert answer["choices"][0]["token_ids"] == expected_tokens([5, 6, 7], 4)

    async def until_settled(self) -> None:
        """Waits for the next heartbeat of every worker."""
        for worker in self.app[FLEET].workers:
            await worker.heartbeat(HEARTBEAT_S)


def strict_json(text: str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def split_events(raw: bytes) -> list[bytes]:
    assert raw.endswith(b"\n\n")
    events = raw[:-2].split(b"\n\n")
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [event.removeprefix(b"data: ") for event in events]


def parse_events(events: list[bytes]) -> list[dict[str, Any]]:
    """The events of a complete stream, checked against their schema."""
    assert events[-1] == b"[DONE]"
    parsed = [strict_json(event.decode()) for event in events[:-1]]
    for event in parsed:
        GenerateStreamResponse.model_validate(event)
    return parsed


def choice_events(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def joined_rows(choices: list[dict[str, Any]]) -> npt.NDArray[np.generic] | None:
    """The non-null arrays of a choice, joined in order."""
    arrays = [base642numpy(c["routed_experts"]) for c in choices if c["routed_experts"] is not None]
    return np.concatenate(arrays) if arrays else None


def joined_tokens(choices: list[dict[str, Any]]) -> list[int]:
    return [token for choice in choices for token in choice["token_ids"]]


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """The URL of `app`, on a free port and with the router's listener."""
    runner = create_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(app: web.Application) -> AsyncIterator[aiohttp.ClientSession]:
    """What speaks to `app`."""
    async with listening(app) as url, aiohttp.ClientSession(url) as http:
        yield http


@asynccontextmanager
async def router_over(settings: RouterSettings) -> AsyncIterator[tuple[web.Application, str]]:
    """A router on a free port; heartbeats have been answered (or not) once."""
    app = create_app(settings)
    async with listening(app) as url:
        for _ in range(2):  # the second round sees every worker's first answer
            await asyncio.gather(*(worker.heartbeat(HEARTBEAT_S) for worker in app[FLEET].workers))
            app[FLEET].review()
        yield app, url


@asynccontextmanager
async def running(
    script: Script | None = None, *, prefill: int = 1, decode: int = 1, both: bool = False, **settings: Any
) -> AsyncIterator[Cluster]:
    """A router with that many fake workers, all following one script."""
    script = script or Script()
    role = types_pb2.ROLE_BOTH if both else types_pb2.ROLE_DECODE
    prefills = [FakeWorker(f"prefill-{i}", types_pb2.ROLE_PREFILL, script) for i in range(0 if both else prefill)]
    decodes = [FakeWorker(f"decode-{i}", role, script) for i in range(decode)]
    async with over(prefills, decodes, **settings) as cluster:
        yield cluster


@asynccontextmanager
async def over(prefills: list[FakeWorker], decodes: list[FakeWorker], **settings: Any) -> AsyncIterator[Cluster]:
    """A router with exactly these workers."""
    async with AsyncExitStack() as stack:
        for worker in prefills + decodes:
            await stack.enter_async_context(serving(worker))
        workers = {"prefill": [w.address for w in prefills], "decode": [w.address for w in decodes]}
        configured = RouterSettings(**workers | {"heartbeat_interval_s": 0.05} | PATIENT | settings)
        app, url = await stack.enter_async_context(router_over(configured))
        http = await stack.enter_async_context(aiohttp.ClientSession(url, read_bufsize=2**16))
        yield Cluster(app, url, http, prefills, decodes)


async def opened(worker: Worker) -> None:
    """Waits until requests follow the worker's feed."""
    async with asyncio.timeout(30):
        while not worker.feed.is_open:
            await worker.heartbeat(HEARTBEAT_S)


async def all_opened(cluster: Cluster) -> None:
    for worker in cluster.app[FLEET].workers:
        if worker.side == "decode":
            await opened(worker)
