"""What containers are asked whether they serve, with real servers."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.config import WorkerSettings
from common.worker.lifecycle import Lifecycle
from common.worker.server import WorkerServer
from deploy.healthcheck import complaint, main


def ready_file(tmp_path: Path, address: str) -> Path:
    path = tmp_path / "ready.json"
    path.write_text(json.dumps({"address": address, "control_address": None, "pid": 1}))
    return path


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
async def test_a_router_serves_if_it_is_ready(
    tmp_path: Path, status: int, healthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.healthcheck.TIMEOUT_S", 60.0)

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"error": "no healthy pair"}, status=status)

    app = web.Application()
    app.router.add_get("/ready", ready)
    async with TestServer(app) as server:
        path = ready_file(tmp_path, f"127.0.0.1:{server.port}")
        said = await asyncio.to_thread(complaint, "http", path)
        code = await asyncio.to_thread(main, ["http", str(path)])
    assert (said is None) is healthy
    assert healthy or (said is not None and "503" in said and "no healthy pair" in said)
    assert code == int(not healthy)


async def test_a_worker_serves_if_its_engine_does(tmp_path: Path) -> None:
    server, stopped = WorkerServer(WorkerSettings(model="m"), Lifecycle()), asyncio.Event()
    complaints: list[str] = []
    server.complaint = lambda: next(iter(complaints), None)

    async def stopping() -> None:
        await stopped.wait()

    running = asyncio.create_task(server.run(["moerelay.v1.Worker"], stopping()))
    path = ready_file(tmp_path, server.address)

    async def until_said(word: str | None) -> None:
        async with asyncio.timeout(60):
            while True:
                said = await asyncio.to_thread(complaint, "grpc", path)
                if said is None if word is None else (said is not None and word in said):
                    return

    await until_said(None)
    complaints.append("the engine has been busy with one step for 9 s")
    await until_said("NOT_SERVING")
    stopped.set()
    await asyncio.gather(running, return_exceptions=True)
    await until_said("does not answer")


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_nobody_answers(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([kind, str(ready_file(tmp_path, "127.0.0.1:1"))]) == 1
    assert "127.0.0.1:1 does not answer" in capsys.readouterr().out


def test_what_has_not_started_does_not_serve(tmp_path: Path) -> None:
    said = complaint("grpc", tmp_path / "ready.json")
    assert said is not None
    assert "does not serve yet" in said


@pytest.mark.parametrize("arguments", [[], ["http"], ["tcp", "ready.json"], ["http", "a", "b"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err
