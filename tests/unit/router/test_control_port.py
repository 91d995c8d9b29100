"""The control port: its own listener and keys, over the same workers and live requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from common.config import RouterSettings
from common.errors import ConfigError
from router.app import create_app, create_control_app
from router.control import routes
from router.keys import FLEET, LIVE
from router.listener import listening
from router.surface import CONTROL_PATHS
from tests.unit.router.cluster import Cluster, running


@pytest.fixture
def admin_keys(tmp_path: Path) -> Path:
    path = tmp_path / "admin"
    path.write_text("root\n")
    return path


@asynccontextmanager
async def with_control(**settings: Any) -> AsyncIterator[tuple[Cluster, aiohttp.ClientSession]]:
    async with running(admin_port=0, **settings) as cluster:
        control = create_control_app(cluster.app)
        async with listening(control, "127.0.0.1", 0) as address, aiohttp.ClientSession(f"http://{address}") as http:
            assert control[FLEET] is cluster.app[FLEET]
            assert control[LIVE] is cluster.app[LIVE]
            yield cluster, http


async def test_what_the_control_port_serves() -> None:
    async with with_control() as (_, control):
        statuses = {path: (await control.get(path)).status for path in ("/live", "/metrics", "/openapi.json", "/docs")}
        assert set(statuses.values()) == {200}, statuses
        document = await (await control.get("/openapi.json")).json()
        assert set(document["paths"]) >= CONTROL_PATHS
        assert (await control.post("/inference/v1/generate", json={})).status == 404


async def test_control_routes_are_not_on_the_public_port() -> None:
    async with with_control() as (cluster, _):
        for path in CONTROL_PATHS:
            assert (await cluster.http.get(path)).status == 404
            assert (await cluster.http.post(path)).status == 404


async def test_the_control_port_has_its_own_keys(admin_keys: Path, tmp_path: Path) -> None:
    (tmp_path / "public").write_text("user\n")
    async with with_control(admin_key_file=admin_keys, api_key_file=tmp_path / "public") as (cluster, control):
        for key, public, admin in (("root", 401, 200), ("user", 200, 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await cluster.http.get("/metrics", headers=headers)).status == public
            assert (await control.get("/metrics", headers=headers)).status == admin
        assert (await control.get("/live")).status == 200


async def test_on_the_public_port_only_admin_keys_open_control_routes(admin_keys: Path, tmp_path: Path) -> None:
    (tmp_path / "public").write_text("user\n")
    public = tmp_path / "public"
    async with running(admin_on_public_port=True, admin_key_file=admin_keys, api_key_file=public) as cluster:
        for operation in routes.OPERATIONS:
            for key in ("user", "wrong"):
                headers = {"Authorization": f"Bearer {key}"}
                async with cluster.http.request(operation.method, operation.path, headers=headers) as response:
                    assert response.status == 401, (operation.path, key)
        for key, paused, listed in (("root", 200, 401), ("user", 401, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await cluster.http.get("/is_paused", headers=headers)).status == paused
            assert (await cluster.http.get("/cluster", headers=headers)).status == listed


async def test_admin_keys_alone_leave_the_public_routes_open(admin_keys: Path) -> None:
    async with running(admin_on_public_port=True, admin_key_file=admin_keys) as cluster:
        assert (await cluster.http.get("/cluster")).status == 200
        assert (await cluster.http.get("/is_paused")).status == 401
        async with cluster.http.get("/openapi.json") as response:
            paths = (await response.json())["paths"]
    assert paths["/is_paused"]["get"]["security"]
    assert "security" not in paths["/cluster"]["get"]


async def test_it_controls_the_workers_of_the_public_port() -> None:
    async with with_control() as (cluster, control):
        assert (await control.post("/pause")).status == 200
        assert await (await control.get("/is_paused")).json() == {"is_paused": True}
        status, answer = await cluster.post({"token_ids": [5], "sampling_params": {"max_tokens": 1}})
        assert (status, answer["error"]["type"]) == (503, "PausedError")
        assert (await control.post("/resume")).status == 200
        await cluster.canary()


async def test_web_pages_cannot_control_without_a_key(admin_keys: Path) -> None:
    """A page that the administrator visits can POST to loopback without asking first."""
    page = {"Origin": "https://page.example", "Content-Type": "text/plain"}
    async with with_control() as (cluster, control):
        assert (await control.post("/pause", headers=page)).status == 401
        assert (await control.get("/live", headers=page)).status == 200
        # As the address of an image in a page: no Origin, but browsers say where it comes from.
        assert (await control.get("/flush_cache", headers={"Sec-Fetch-Site": "cross-site"})).status == 401
        assert (await control.get("/flush_cache", headers={"Sec-Fetch-Site": "none"})).status == 200  # typed by hand
        assert (await control.get("/flush_cache")).status == 200
        await cluster.canary()
    async with with_control(admin_key_file=admin_keys) as (_, control):
        key = {"Authorization": "Bearer root"}
        assert (await control.post("/pause", headers=page)).status == 401
        assert (await control.post("/pause", headers=page | key)).status == 200


def test_open_control_routes_are_refused(admin_keys: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.7", "control.example"):
        with pytest.raises(ConfigError, match=r"--admin-host.*--admin-key-file"):
            create_app(RouterSettings(admin_port=0, admin_host=host))
        create_app(RouterSettings(admin_port=0, admin_host=host, admin_key_file=admin_keys))
    for host in ("127.0.0.1", "::1", "localhost"):
        create_app(RouterSettings(admin_port=0, admin_host=host))
    with pytest.raises(ConfigError, match="--admin-on-public-port needs --admin-key-file"):
        create_app(RouterSettings(admin_on_public_port=True))
    create_app(RouterSettings(admin_on_public_port=True, admin_key_file=admin_keys))
