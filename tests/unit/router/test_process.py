"""The router as a process: help, ready file, drain, exit codes."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from common.pb import types_pb2
from tests.e2e.cluster import PATIENT_ROUTER
from tests.fakes.fake_workers import FakeWorker, Script, expected_tokens, serving
from tests.ipv6 import needs_ipv6
from tests.unit.router.cluster import GENERATE, split_events, strict_json

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}, "stream": True}


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m router` with these flags; killed if the test leaves it running."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def wait_ready(folder: Path, session: aiohttp.ClientSession) -> str:
    """The router's URL, once it serves."""
    ready = folder / "ready.json"
    async with asyncio.timeout(60):
        while True:
            if ready.exists():
                break
            await asyncio.sleep(0.02)
    url = f"http://{json.loads(ready.read_text())['address']}"
    await wait_status(session, f"{url}/ready", 200)
    return url


async def wait_status(session: aiohttp.ClientSession, url: str, status: int) -> None:
    async with asyncio.timeout(60):
        while True:
            async with session.get(url) as response:
                if response.status == status:
                    return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving_router(
    folder: Path, script: Script, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, aiohttp.ClientSession, FakeWorker]]:
    """A router process over one fake worker of role both; as long as `flags` do not say else, it drains at once."""
    worker = FakeWorker("decode-0", types_pb2.ROLE_BOTH, script)
    async with serving(worker), aiohttp.ClientSession() as session:
        arguments = ["--port", "0", "--decode", worker.address, "--ready-file", str(folder / "ready.json")]
        async with process(*arguments, *PATIENT_ROUTER, "--pre-stop-s", "0", *flags) as child:
            yield child, await wait_ready(folder, session), session, worker


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "router", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--decode" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "common.config" in imported
    assert not {"torch", "transformers", "numpy", "grpc", "aiohttp", "tokenizers"} & imported


@pytest.mark.parametrize("flags", [["--nonsense", "1"], ["--port", "-1"], ["--model", "/nonexistent/model"]])
async def test_wrong_settings_exit_with_2(flags: list[str]) -> None:
    async with process(*flags) as child:
        _, err = await child.communicate()
    assert child.returncode == 2
    assert flags[0].encode() in err
    assert b"Traceback" not in err


async def test_taken_port_exits_with_2(tmp_path: Path) -> None:
    async with (
        serving_router(tmp_path, Script()) as (_, url, _, _),
        process("--port", url.rpartition(":")[2]) as second,
    ):
        _, err = await second.communicate()
    assert second.returncode == 2
    assert b"cannot listen on 127.0.0.1" in err


@needs_ipv6
async def test_an_ipv6_address_is_written_as_urls_write_it(tmp_path: Path) -> None:
    async with serving_router(tmp_path, Script(), "--host", "::1") as (_, url, session, _):
        assert url.startswith("http://[::1]:")
        assert (await session.get(f"{url}/live")).status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_drain_lets_live_requests_finish(tmp_path: Path, number: signal.Signals) -> None:
    script = Script(hold_after=1)
    async with serving_router(tmp_path, script) as (child, url, session, _):
        assert json.loads((tmp_path / "ready.json").read_text())["pid"] == child.pid
        async with session.post(url + GENERATE, json=BODY) as response:
            first = await response.content.readuntil(b"\n\n")
            child.send_signal(number)
            await wait_status(session, f"{url}/ready", 503)
            assert (await session.get(f"{url}/health")).status == 200
            refused = await session.post(url + GENERATE, json=BODY)
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            script.release.set()
            events = split_events(first + await response.read())
        assert events[-1] == b"[DONE]"
        tokens = [t for e in events[:-1] for c in strict_json(e.decode())["choices"] for t in c["token_ids"]]
        assert tokens == expected_tokens([5, 6, 7], 4)
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_before_it_drains_it_only_says_so_and_serves_who_comes(tmp_path: Path) -> None:
    """data-fair#473, llm-d#927: load balancers hear of the end before the port closes."""
    script = Script(hold_after=1)
    async with serving_router(tmp_path, script, "--pre-stop-s", "3") as (child, url, session, _):
        async with session.post(url + GENERATE, json=BODY) as early:
            await early.content.readuntil(b"\n\n")
            child.terminate()
            await wait_status(session, f"{url}/ready", 503)
            assert (await session.get(f"{url}/live")).status == 200
            async with session.post(url + GENERATE, json=BODY) as late:
                assert late.status == 200
                await late.content.readuntil(b"\n\n")
                short = BODY | {"sampling_params": {"max_tokens": 1}}
                async with asyncio.timeout(60):
                    while (await session.post(url + GENERATE, json=short)).status != 503:  # noqa: ASYNC110 - another process
                        await asyncio.sleep(0.05)
                script.release.set()
                for response in (early, late):
                    assert (await response.read()).endswith(b"[DONE]\n\n")
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_second_signal_cuts_the_time_before_it_drains_short(tmp_path: Path) -> None:
    async with serving_router(tmp_path, Script(), "--pre-stop-s", "60") as (child, url, session, _):
        child.terminate()
        await wait_status(session, f"{url}/ready", 503)
        child.terminate()
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_requests_that_outlast_the_drain_end_in_an_error(tmp_path: Path) -> None:
    async with serving_router(tmp_path, Script(hold_after=1), "--drain-timeout-s", "0.2") as (child, url, session, _):
        async with session.post(url + GENERATE, json=BODY) as response:
            first = await response.content.readuntil(b"\n\n")
            child.terminate()
            events = split_events(first + await response.read())
        assert strict_json(events[-1].decode())["error"]["type"] == "ServiceUnavailableError"
        assert await asyncio.wait_for(child.wait(), 60) == 0


async def test_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with serving_router(tmp_path, Script(hold_after=1)) as (child, url, session, worker):
        async with session.post(url + GENERATE, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            child.terminate()
            await wait_status(session, f"{url}/ready", 503)
            child.terminate()
            await asyncio.wait_for(child.wait(), 60)
        await worker.wait_until(lambda: not worker.live)
