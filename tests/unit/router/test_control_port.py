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


@pytest.mark.parametrize("path", sorted(CONTROL_PATHS))
async def test_on_the_public_port_only_admin_keys_open_control_routes(
    path: str, admin_keys: Path, tmp_path: Path
) -> None:
    (tmp_path / "public").write_text("user\n")
    settings = {"admin_on_public_port": True, "admin_key_file": admin_keys, "api_key_file": tmp_path / "public"}
    async with running(**settings) as cluster:
        for key in ("user", "wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            for method in ("GET", "POST"):
                async with cluster.http.request(method, path, headers=headers) as response:
                    assert response.status in (401, 405)
        async with cluster.http.get("/cluster", headers={"Authorization": "Bearer user"}) as response:
            assert response.status == 200


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
