"""Browser clients: off unless origins are configured; then on every answer, errors and streams included."""

from pathlib import Path

import pytest

from common.config import RouterSettings
from common.errors import ConfigError
from router.app import create_app
from tests.unit.router.cluster import GENERATE, running

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}
PAGE = "https://page.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
ALLOW = "Access-Control-Allow-Origin"


async def test_off_by_default() -> None:
    async with running() as cluster:
        async with cluster.http.options(GENERATE, headers=PREFLIGHT) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert ALLOW not in response.headers
        async with cluster.http.get("/live", headers={"Origin": PAGE}) as response:
            assert ALLOW not in response.headers


async def test_preflights_need_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    async with running(cors_origin=[PAGE], api_key_file=keys) as cluster:
        async with cluster.http.options(GENERATE, headers=PREFLIGHT) as response:
            assert (response.status, response.headers[ALLOW]) == (204, PAGE)
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            allowed = {name.strip().lower() for name in response.headers["Access-Control-Allow-Headers"].split(",")}
        assert {"authorization", "content-type", "x-request-id"} <= allowed
        async with cluster.http.options(GENERATE, headers=PREFLIGHT | {"Origin": "https://other.example"}) as response:
            assert response.status == 401
            assert ALLOW not in response.headers


async def test_every_kind_of_answer_carries_the_headers() -> None:
    headers = {"Origin": PAGE}
    async with running(cors_origin=[PAGE, "http://localhost:3000"]) as cluster:
        answers = [
            await cluster.http.post(GENERATE, json=BODY, headers=headers),
            await cluster.http.post(GENERATE, json=BODY | {"stream": True}, headers=headers),
            await cluster.http.post(GENERATE, json={}, headers=headers),
            await cluster.http.get("/nowhere", headers=headers),
            await cluster.http.get(GENERATE, headers=headers),
            await cluster.http.get("/live", headers=headers),
        ]
        assert [each.status for each in answers] == [200, 200, 400, 404, 405, 200]
        for each in answers:
            assert (each.headers[ALLOW], each.headers["Vary"]) == (PAGE, "Origin")
            assert "X-Request-Id" in each.headers["Access-Control-Expose-Headers"]
            await each.read()
        async with cluster.http.get("/live", headers={"Origin": "https://other.example"}) as response:
            assert ALLOW not in response.headers
            assert response.headers["Vary"] == "Origin"


async def test_any_origin() -> None:
    async with running(cors_origin=["*"]) as cluster:
        async with cluster.http.get("/live", headers={"Origin": "null"}) as response:
            assert response.headers[ALLOW] == "*"
        async with cluster.http.options(GENERATE, headers=PREFLIGHT) as response:
            assert (response.status, response.headers[ALLOW]) == (204, "*")


@pytest.mark.parametrize(
    "origin", ["page.example", "https://page.example/", "https://page.example/path", "", "https://"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        create_app(RouterSettings(cors_origin=[origin]))
