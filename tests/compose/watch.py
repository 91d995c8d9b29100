"""What the router says of the stack, and waiting for it."""

import aiohttp
import pytest

from tests.e2e.cluster import Client, JsonObject, until

#: A container may take this long until it serves: three Python processes start on few cores.
START_S = 90.0


async def status(client: Client, path: str) -> int:
    """Of a GET; 0 if nobody answers."""
    try:
        async with client.session.get(client.url + path) as response:
            return response.status
    except (OSError, aiohttp.ClientError):
        return 0


async def wait_status(client: Client, path: str, wanted: int) -> None:
    """Until a GET has it."""

    async def has_it() -> bool:
        return await status(client, path) == wanted

    await until(has_it, START_S)


async def wait_ready(client: Client) -> None:
    await wait_status(client, "/ready", 200)


async def decode_workers(client: Client) -> dict[str, JsonObject]:
    """By address, those that get requests."""
    workers = (await client.json("/cluster"))["workers"]
    return {w["address"]: w for w in workers if w["role"] == "decode" and w["state"] == "healthy" and not w["refused"]}


async def wait_decoding(client: Client, addresses: set[str]) -> None:
    """Until exactly these decode workers get requests, and each has some."""
    seen: list[dict[str, int]] = []

    async def decoding() -> bool:
        running = {address: worker["running"] for address, worker in (await decode_workers(client)).items()}
        if not seen or seen[-1] != running:
            seen.append(running)
        return set(running) == addresses and all(running.values())

    try:
        await until(decoding, START_S)
    except TimeoutError:
        pytest.fail(f"wanted {addresses}; there were {seen[-10:]}")
