"""Keys of a stack are rotated as docs/compose.md says it."""

import asyncio

import pytest

from tests.compose.load import Expected, under_load
from tests.compose.stack import Stack
from tests.compose.watch import status, wait_decoding, wait_ready, wait_status
from tests.e2e.cluster import Client

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]


async def rotate(stack: Stack) -> None:
    await asyncio.to_thread(stack.compose, "run", "--rm", "-T", "keys", "moerelay", "keys", "rotate", "/keys")


async def test_no_request_fails_while_keys_are_rotated(stack: Stack, client: Client, expected: Expected) -> None:
    """Twice. A worker that starts between meets those that run, and the key of two rotations ago opens nothing."""
    await wait_ready(client)
    async with under_load(client) as load:
        await rotate(stack)
        await asyncio.to_thread(stack.up, decode=2)
        addresses = {stack.address(container) for container in stack.containers("decode")}
        assert len(addresses) == 2
        await wait_decoding(client, addresses)
    async with stack.client(stack.api_key()) as newer:
        await wait_status(newer, "/v1/models", 200)
        assert await status(client, "/v1/models") == 200
        async with under_load(newer) as newer_load:
            await rotate(stack)
            await wait_status(client, "/v1/models", 401)
            await wait_decoding(newer, addresses)
        await asyncio.to_thread(stack.up, decode=1)
    for index, answer in [*load.answers, *newer_load.answers]:
        expected.check(index, answer)


def test_the_key_of_prometheus_follows(stack: Stack) -> None:
    stack.compose("run", "--rm", "-T", "keys")
    assert (stack.keys / "metrics-key.txt").read_text() == stack.api_key()
