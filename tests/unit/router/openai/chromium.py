"""A headless Chromium, driven over its debugging protocol."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

#: Debian's name, then those of other systems.
NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next((path for path in map(shutil.which, NAMES) if path), None)

START_TIMEOUT_S = 30.0
CHANGE_TIMEOUT_S = 20.0
_LISTENING = "DevTools listening on "


class Page:
    """One open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def load(self, url: str) -> None:
        """Goes there; returns when the page has loaded."""
        await self._command("Page.enable")
        await self._command("Page.navigate", url=url)
        while (await self._socket.receive_json()).get("method") != "Page.loadEventFired":
            pass  # other events

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = await self._command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def _command(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await self._socket.receive_json()).get("id") != number:
            pass  # events of the page
        assert "result" in message, message
        return message["result"]

    async def until(self, condition: str) -> None:
        """Waits, without polling over the socket, until the expression is true; looks at each frame of 10 ms."""
        loop = f"(async () => {{ while (!({condition})) await new Promise(go => setTimeout(go, 10)); }})()"
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            await self.evaluate(loop)


@asynccontextmanager
async def open_page(url: str, profile: Path) -> AsyncIterator[Page]:
    """Starts the browser with an empty profile and opens a page, which has loaded when it is given."""
    assert EXECUTABLE
    process = await asyncio.create_subprocess_exec(
        *(EXECUTABLE, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        address = await asyncio.wait_for(_debugging_address(process), START_TIMEOUT_S)
        async with aiohttp.ClientSession() as http:
            async with http.put(f"http://{address}/json/new") as response:
                target = await response.json()
            async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                await page.load(url)
                yield page
    finally:
        process.terminate()
        await process.communicate()


async def _debugging_address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr
    async for line in process.stderr:
        if line.decode().startswith(_LISTENING):
            return line.decode().removeprefix(f"{_LISTENING}ws://").partition("/")[0]
    raise AssertionError(f"the browser ended with exit code {await process.wait()}")
