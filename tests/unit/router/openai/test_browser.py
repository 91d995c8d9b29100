"""examples/browser.html in a real browser, served from another origin than the router that it calls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.fakes.fake_workers import Script
from tests.unit.router.cluster import running
from tests.unit.router.openai.chromium import EXECUTABLE, Page, open_page

EXAMPLES = Path(__file__).parents[4] / "examples"
PROMPT = "a"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXECUTABLE, reason="NO BROWSER TESTED: there is no chromium on this machine"),
]

STATUS = "document.getElementById('status').textContent"
TEXT = "document.getElementById('text').textContent"


@asynccontextmanager
async def served_page() -> AsyncIterator[str]:
    """The origin that serves the examples."""
    app = web.Application()
    app.router.add_static("/", EXAMPLES)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@asynccontextmanager
async def form(router: str, origin: str, profile: Path, key: str = "") -> AsyncIterator[Page]:
    filled = urlencode({"url": router, "key": key, "prompt": PROMPT, "max_tokens": 4})
    async with open_page(f"{origin}/browser.html#{filled}", profile) as page:
        await page.evaluate("document.getElementById('form').requestSubmit()")
        yield page


async def test_tokens_show_as_they_come(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    script = Script(hold_after=2)
    async with (
        served_page() as origin,
        running(script, model=model, cors_origin=[origin], api_key_file=keys) as cluster,
        form(cluster.url, origin, tmp_path / "profile", "secret") as page,
    ):
        await page.until(f"{STATUS}.startsWith('streaming: 2 tokens')")
        begun = await page.evaluate(TEXT)
        script.release.set()
        await page.until(f"{STATUS}.startsWith('done: 4 tokens')")
        ended = await page.evaluate(TEXT)
        [request] = cluster.decode[0].decode_requests
        assert begun
        assert ended.startswith(begun)
        assert len(ended) > len(begun)
        assert f"{len(request.token_ids) + 4 - 1} rows" in await page.evaluate(STATUS)


async def test_stopping_frees_the_workers(model: str, tmp_path: Path) -> None:
    script = Script(hold_after=2)
    async with (
        served_page() as origin,
        running(script, model=model, cors_origin=[origin]) as cluster,
        form(cluster.url, origin, tmp_path / "profile") as page,
    ):
        await page.until(f"{STATUS}.startsWith('streaming: 2 tokens')")
        await page.evaluate("document.getElementById('stop').click()")
        await page.until(f"{STATUS}.startsWith('stopped: 2 tokens')")
        await cluster.decode[0].wait_until(lambda: bool(cluster.decode[0].cancelled))


async def test_a_wrong_key_is_shown(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with (
        served_page() as origin,
        running(model=model, cors_origin=[origin], api_key_file=keys) as cluster,
        form(cluster.url, origin, tmp_path / "profile", "guessed") as page,
    ):
        await page.until(f"{STATUS}.startsWith('failed (the key is not known)')")


async def test_other_origins_learn_nothing(model: str, tmp_path: Path) -> None:
    async with (
        served_page() as origin,
        running(model=model, cors_origin=["https://page.example"]) as cluster,
        form(cluster.url, origin, tmp_path / "profile") as page,
    ):
        await page.until(f"{STATUS}.startsWith('failed (Failed to fetch)')")
        assert await page.evaluate(TEXT) == ""
