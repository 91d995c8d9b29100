"""deploy/compose.yaml, with containers: it starts, answers what a solo run answers, is scaled, and survives losses.

Tests leave one healthy worker of each kind.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.compose.late_reader import LateReader, answer_of
from tests.compose.load import Expected, prompt, under_load
from tests.compose.stack import Stack
from tests.compose.watch import START_S, decode_workers, status, wait_decoding, wait_ready, wait_status
from tests.e2e.cluster import Answer, Client, until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]

#: Long enough that a stream is under way whatever happens meanwhile; the checkpoint's context is 2048.
LONG = 1900


@asynccontextmanager
async def two_decode_workers(stack: Stack, client: Client) -> AsyncIterator[tuple[str, str]]:
    """Their containers."""
    await wait_ready(client)
    await asyncio.to_thread(stack.up, decode=2)
    first, second = stack.containers("decode")
    addresses = {stack.address(first), stack.address(second)}

    async def known() -> bool:
        return set(await decode_workers(client)) == addresses

    await until(known, START_S)
    try:
        yield first, second
    finally:
        await asyncio.to_thread(stack.up, decode=1)


async def test_all_services_become_healthy_and_answer(stack: Stack, client: Client, expected: Expected) -> None:
    """`up` waits for the workers; whole and streamed answers are those of a solo run."""

    async def healthy() -> bool:
        containers = [c for service in ("router", "prefill", "decode") for c in stack.containers(service)]
        return [stack.inspect(c)["State"]["Health"]["Status"] for c in containers] == ["healthy"] * 3

    await until(healthy, START_S)
    [model] = stack.containers("model", ended_too=True)
    assert stack.inspect(model)["State"]["ExitCode"] == 0
    for stream in (False, True):
        expected.check(0, await client.generate(prompt(0), max_tokens=100, ignore_eos=True, stream=stream))


def test_containers_may_do_little(stack: Stack) -> None:
    """No root, no capabilities, nothing to write but /tmp, no torch in the router, no way out for workers."""
    for service in ("router", "prefill", "decode"):
        [container] = stack.containers(service)
        assert stack.docker("exec", container, "id", "-u").strip() == "10001"
        assert stack.docker("exec", container, "grep", "CapEff", "/proc/1/status").split() == ["CapEff:", "0" * 16]
        for place in ("/", "/opt/moerelay", "/models", "/run/secrets"):
            assert stack.fails("exec", container, "touch", f"{place}/x"), f"{service} can write to {place}"
        stack.docker("exec", container, "touch", "/tmp/x")
    [router], [decode] = stack.containers("router"), stack.containers("decode")
    assert stack.fails("exec", router, "python", "-c", "import torch")
    stack.docker("exec", decode, "python", "-c", "import torch")
    networks = stack.inspect(decode)["NetworkSettings"]["Networks"]
    assert [stack.docker("network", "inspect", "-f", "{{.Internal}}", name).strip() for name in networks] == ["true"]


def test_verify_finds_no_difference(stack: Stack) -> None:
    """In a container of its own, as docs/compose.md says it."""
    target = ("--url", "http://router:8000", "--api-key-file", "/run/secrets/api-keys.txt")
    command = ("moerelay", "verify", *target, "--model", "/models/tiny", "--requests", "60")
    report = stack.compose("run", "--rm", "--no-deps", "-T", "tools", *command)
    assert report.splitlines()[-1] == "verify: 60 requests, 0 differences"


async def test_nobody_gets_in_without_a_key(stack: Stack, client: Client) -> None:
    """Of the cluster for workers, of the API for clients; the authority stays with whoever made the keys."""
    async with aiohttp.ClientSession() as stranger, stranger.get(f"{client.url}/v1/models") as response:
        assert response.status == 401
    [router], [decode] = stack.containers("router"), stack.containers("decode")
    code = (
        "import grpc, sys; from grpc_health.v1 import health_pb2, health_pb2_grpc; "
        "c = grpc.insecure_channel(sys.argv[1]); "
        "health_pb2_grpc.HealthStub(c).Check(health_pb2.HealthCheckRequest(), timeout=5)"
    )
    assert stack.fails("exec", router, "python", "-c", code, stack.address(decode))
    for container in (router, decode):
        assert "authority" not in stack.docker("exec", container, "ls", "/run/secrets")
    assert (stack.keys / "authority.json").stat().st_uid == 0


async def test_decode_workers_come_and_go_under_load(stack: Stack, client: Client, expected: Expected) -> None:
    """--scale decode=3 and back: new replicas are found and used, those that leave finish first, no request fails."""
    await wait_ready(client)
    async with under_load(client) as load:
        await asyncio.to_thread(stack.up, decode=3)
        await wait_decoding(client, {stack.address(c) for c in stack.containers("decode")})
        await asyncio.to_thread(stack.up, decode=1)
        [remaining] = stack.containers("decode")
        await wait_decoding(client, {stack.address(remaining)})
        before = len(load.answers)

        async def goes_on() -> bool:
            return len(load.answers) > before + 20

        await until(goes_on, START_S)
    for index, answer in load.answers:
        expected.check(index, answer)


async def test_a_killed_container_ends_its_own_streams_only(stack: Stack, client: Client, expected: Expected) -> None:
    """docker kill of a decode container amid streams.

    vllm#57089, Bamboo-agent#355, TensorRT-LLM#18289: a stream that is cut gets a clean end, a whole answer is short.
    """
    async with two_decode_workers(stack, client) as (victim, survivor):
        readers = [LateReader() for _ in range(16)]
        ends: dict[int, float] = {}

        async def ask(number: int) -> tuple[int, bytes]:
            # Prompts that no worker has met, so that nothing draws all of them to one.
            answer = await readers[number].read(client, prompt(100 + number), max_tokens=LONG)
            ends[number] = time.monotonic()
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(number)) for number in range(len(readers))]
            whole = group.create_task(client.generate(prompt(8), max_tokens=LONG, ignore_eos=True))
            await asyncio.gather(*(reader.under_way.wait() for reader in readers))
            await asyncio.to_thread(stack.docker, "kill", victim)
            killed = time.monotonic()
            # New requests go to the other one, also while its streams go on.
            new = await client.generate(prompt(9), max_tokens=100, ignore_eos=True)
        expected.check(9, new)
        answers = [answer_of(*task.result()) for task in tasks]
        lost = [number for number, answer in enumerate(answers) if answer.error is not None]
        assert 0 < len(lost) < len(answers), [answer.error for answer in answers]
        for number, answer in enumerate(answers):
            if number in lost:
                assert answer.status == 200, "the stream had not begun"
                assert answer.token_ids
                assert ends[number] - killed < START_S / 3, f"after {ends[number] - killed:.1f} s"
            else:
                expected.check(100 + number, answer, LONG)
        assert_whole_or_refused(whole.result(), expected)
        await comes_back(stack, client, victim, survivor)


def assert_whole_or_refused(answer: Answer, expected: Expected) -> None:
    """What is no stream is either complete or an error status; never a short 200."""
    if answer.error is None:
        expected.check(8, answer, LONG)
    else:
        assert answer.status in (502, 503)


async def comes_back(stack: Stack, client: Client, victim: str, survivor: str) -> None:
    """`up` starts the container again; it is found, wherever it is then, and gets requests."""
    await asyncio.to_thread(stack.up, decode=2)
    assert sorted(stack.containers("decode")) == sorted((victim, survivor))
    async with under_load(client) as load:
        await wait_decoding(client, {stack.address(victim), stack.address(survivor)})
    assert all(answer.error is None for _, answer in load.answers)


async def test_a_crashed_process_is_started_again(stack: Stack, client: Client, expected: Expected) -> None:
    """The restart policy brings back the only decode worker; until then requests are refused."""
    await wait_ready(client)
    [container] = stack.containers("decode")
    os.kill(stack.inspect(container)["State"]["Pid"], signal.SIGKILL)
    await wait_status(client, "/ready", 503)
    await wait_ready(client)
    assert stack.inspect(container)["RestartCount"] == 1
    expected.check(0, await client.generate(prompt(0), max_tokens=100, ignore_eos=True))


async def test_the_router_may_start_first(stack: Stack, client: Client, expected: Expected) -> None:
    """The worst order, workers 20 s late: live at once, 503 with Retry-After meanwhile, ready with one worker of each.

    Osmantic/ODS#247, docker/compose#374, swiss-ai/model-launch#130.
    """
    for verb in (("stop",), ("rm", "-f")):
        await asyncio.to_thread(stack.compose, *verb, "router", "prefill", "decode")
    await asyncio.to_thread(stack.up, "router", dependencies=False)

    async def live() -> bool:
        return await status(client, "/live") == 200

    await until(live, START_S)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        assert await live()
        await assert_refused(client)
        await asyncio.sleep(1)  # the case itself: workers that come late
    await asyncio.to_thread(stack.up, "prefill", dependencies=False)

    async def prefill_found() -> bool:
        workers = (await client.json("/cluster"))["workers"]
        return [(w["role"], w["state"]) for w in workers] == [("prefill", "healthy")]

    await until(prefill_found, START_S)
    await assert_refused(client)
    await asyncio.to_thread(stack.up, "decode", dependencies=False)
    await wait_ready(client)
    expected.check(0, await client.generate(prompt(0), max_tokens=100, ignore_eos=True))


async def assert_refused(client: Client) -> None:
    assert await status(client, "/ready") == 503
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}
    async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["type"]


async def test_a_wrong_port_is_told_in_the_log(stack: Stack) -> None:
    """With the address that does not answer."""
    sources = ("--prefill=dns://prefill:7009", "--decode=dns://decode:7000")
    arguments = ("run", "-d", "--no-deps", "router", "python", "-m", "router", *sources)
    container = (await asyncio.to_thread(stack.compose, *arguments)).split()[-1]
    address = stack.address(stack.containers("prefill")[0]).replace(":7000", ":7009")
    try:

        async def told() -> bool:
            return any(address in line and "never_answered" in line for line in stack.log(container).splitlines())

        await until(told, START_S)
    finally:
        await asyncio.to_thread(stack.docker, "rm", "-f", container)
