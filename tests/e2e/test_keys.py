"""Real processes with keys, as on several machines: exact answers, strangers outside, keys that change under load."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.engine.solo import SoloRunner
from common.pb import worker_pb2, worker_pb2_grpc
from deploy.cli import main
from router.auth import listed_keys
from tests.e2e.cluster import PATIENT_ROUTER, Client, JsonObject, until
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.services import Service, launched_service
from tests.e2e.test_faults import MODEL_FLAGS
from tests.e2e.test_routing_rows import prompt_of

pytestmark = pytest.mark.cluster

FIELDS: JsonObject = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}


#: Put into the file by hand, and so good whatever is rotated.
OF_LOAD = "load"


@dataclass(frozen=True)
class Secured:
    """The services, and the folder in which their keys lie; they read those of it."""

    keys: Path
    prefill: Service
    decode: Service
    router: Service

    def rotate(self) -> None:
        assert main(["keys", "rotate", str(self.keys)]) == 0

    def num_read(self) -> list[int]:
        """How often each process has read its own key file again, and the router that of its clients."""
        files = ((self.prefill, ".json"), (self.decode, ".json"), (self.router, ".json"), (self.router, ".txt"))
        logs = [(service.log.read_text().splitlines(), suffix) for service, suffix in files]
        return [sum("key_file_read_again" in line and suffix in line for line in log) for log, suffix in logs]

    def client(self, session: aiohttp.ClientSession) -> Client:
        return Client(session, self.router.url)


@pytest.fixture
def secured(tiny_model: Path, tmp_path: Path) -> Iterator[Secured]:
    keys = tmp_path / "keys"
    assert main(["keys", "init", str(keys)]) == 0
    with (keys / "api-keys.txt").open("a") as file:
        file.write(f"{OF_LOAD}\n")
    with ExitStack() as stack:

        def start(module: str, name: str, *flags: str) -> Service:
            own = ("--cluster-key-file", str(keys / f"{name}.json"), "--log-format", "json", *flags)
            return stack.enter_context(launched_service(module, tmp_path, *own)).wait_ready()

        model = ("--model", str(tiny_model), *MODEL_FLAGS)
        prefill, decode = start("prefill_worker", "prefill", *model), start("decode_worker", "decode", *model)
        workers = ("--prefill", prefill.address, "--decode", decode.address, "--heartbeat-interval-s", "0.1")
        router = start("router", "router", *workers, *PATIENT_ROUTER, "--api-key-file", str(keys / "api-keys.txt"))
        yield Secured(keys, prefill, decode, router)


def session_of(key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=60))


async def until_ready(client: Client, session: aiohttp.ClientSession) -> None:
    async def is_ready() -> bool:
        async with session.get(f"{client.url}/ready") as response:
            return response.status == 200

    await until(is_ready, 60)


async def test_keys_keep_strangers_out_and_change_under_load(secured: Secured, solo: SoloRunner) -> None:
    async with session_of(OF_LOAD) as session:
        client = secured.client(session)
        await until_ready(client, session)
        for seed in range(4):
            answer = await client.generate(prompt_of(40, seed), stream=seed % 2 == 0, **FIELDS)
            assert_equals_solo(answer, solo, prompt_of(40, seed), **FIELDS)
        await assert_strangers_stay_outside(secured)
        assert await client.metric("moerelay_handoff_bytes_total", "decode") > 0

        stop = asyncio.Event()
        load = asyncio.create_task(ask_until(stop, client, solo))
        for _ in range(3):  # after the second, nothing of the first generation opens anything
            before = secured.num_read()
            secured.rotate()
            await until(read_by_all(secured, before), 60)
        stop.set()
        assert await load > 0
    newest = next(key for key in listed_keys(secured.keys / "api-keys.txt", "--api-key-file") if key != OF_LOAD)
    async with session_of(newest) as session:
        client = secured.client(session)
        answer = await client.generate(prompt_of(40, 99), **FIELDS)
        assert_equals_solo(answer, solo, prompt_of(40, 99), **FIELDS)


def read_by_all(secured: Secured, before: list[int]) -> Callable[[], Awaitable[bool]]:
    async def all_have() -> bool:
        return all(now > then for now, then in zip(secured.num_read(), before, strict=True))

    return all_have


async def ask_until(stop: asyncio.Event, client: Client, solo: SoloRunner) -> int:
    """How many answers there were, all of them right."""
    num_right = 0
    while not stop.is_set():
        prompt = prompt_of(40, 1000 + num_right)
        assert_equals_solo(await client.generate(prompt, stream=True, **FIELDS), solo, prompt, **FIELDS)
        num_right += 1
    return num_right


async def assert_strangers_stay_outside(secured: Secured) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{secured.router.url}/cluster") as response:
        assert response.status == 401
    for worker in (secured.prefill, secured.decode):
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Pause(worker_pb2.PauseRequest(mode=worker_pb2.PAUSE_MODE_ABORT), timeout=10)
        # A health check of the same user gets through.
        async with grpc.aio.insecure_channel(json.loads(ready_file_of(worker).read_text())["local_address"]) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def ready_file_of(service: Service) -> Path:
    return service.log.with_suffix(".ready")


@pytest.mark.parametrize(
    ("module", "flags", "flag"),
    [
        ("router", ("--host", "0.0.0.0"), "--api-key-file"),
        ("router", ("--prefill", "p0.example:7001"), "--cluster-key-file"),
        ("prefill_worker", ("--host", "0.0.0.0", "--model"), "--cluster-key-file"),
        ("decode_worker", ("--handoff-endpoint", "tcp://0.0.0.0:0", "--model"), "--cluster-key-file"),
    ],
)
def test_what_would_be_open_does_not_start(module: str, flags: tuple[str, ...], flag: str, tiny_model: Path) -> None:
    command = [sys.executable, "-m", module, *flags, *([str(tiny_model)] if flags[-1] == "--model" else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].startswith(f"{module}: error: ")
    assert f"need{'' if 'example' in str(flags) else 's'} {flag}" in ended.stderr
    assert "--insecure" in ended.stderr


async def test_every_process_tells_when_its_certificate_ends(secured: Secured) -> None:
    headers = {"Authorization": f"Bearer {OF_LOAD}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await until_ready(secured.client(session), session)  # a worker that was never heard shows no metrics
        async with session.get(f"{secured.router.url}/metrics") as answer:
            text = await answer.text()
    found = re.findall(r"^moerelay_certificate_seconds_left\{(.*)\} (\S+)$", text, re.M)
    assert ["worker=" in labels for labels, _ in found] == [False, True, True]
    assert all('certificate="cluster"' in labels for labels, _ in found)
    for _, seconds in found:
        assert 3640 * 86_400 < float(seconds) <= 3650 * 86_400
