"""API keys: which routes need one, how it is sent, what a stranger gets, and files that cannot be used."""

import asyncio
from pathlib import Path

import pytest

from common.config import RouterSettings
from common.errors import ConfigError
from router.app import create_app
from router.auth import KeyRing, listed_keys
from tests.unit.router.cluster import GENERATE, Cluster, running, strict_json

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0}}
OPEN = ["/live", "/ready", "/health", "/version"]
CLOSED = ["/v1/models", "/cluster", "/metrics", "/openapi.json", "/docs", "/nowhere"]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# ours\nsk-first\n\n  sk-second  \n")
    return path


async def test_probes_are_open_and_all_else_needs_a_key(key_file: Path) -> None:
    async with running(api_key_file=key_file) as cluster:
        for path in OPEN:
            assert (await cluster.http.get(path)).status == 200, path
        for path in CLOSED:
            async with cluster.http.get(path) as response:
                answer = strict_json(await response.text())
                assert response.status == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (answer["error"]["type"], answer["error"]["code"]) == ("AuthenticationError", 401)
        assert (await cluster.post(BODY))[0] == 401
        assert not cluster.decode[0].decode_requests


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer sk-first"}, 200),
        ({"Authorization": "bearer sk-second"}, 200),
        ({"X-API-Key": "sk-second"}, 200),
        ({"Authorization": "Basic c2stZmlyc3Q=", "X-API-Key": "sk-first"}, 200),
        ({"Authorization": "Bearer sk-firs"}, 401),
        ({"Authorization": "Bearer sk-first "}, 200),
        ({"Authorization": "Bearer sk-firstx"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "sk-first"}, 401),
        ({"Authorization": "Basic sk-first"}, 401),
        ({"Authorization": "Bearer # ours"}, 401),
        ({"Authorization": "Bearer schlüssel"}, 401),
        ({"X-API-Key": ""}, 401),
    ],
)
async def test_how_keys_are_sent(key_file: Path, headers: dict[str, str], status: int) -> None:
    async with running(api_key_file=key_file) as cluster:
        assert (await cluster.post(BODY, headers=headers))[0] == status


async def test_without_a_file_nobody_needs_a_key() -> None:
    async with running() as cluster:
        assert (await cluster.post(BODY, headers={"Authorization": "Bearer whatever"}))[0] == 200


async def test_keys_never_reach_the_log(key_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with running(api_key_file=key_file) as cluster:
        await cluster.post(BODY, headers={"Authorization": "Bearer sk-first"})
        await cluster.post({}, headers={"Authorization": "Bearer sk-first"})
        await cluster.post(BODY, headers={"Authorization": "Bearer sk-wrong"})
        await raw(cluster, b"GET /live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-first\r\n\x00: y\r\n\r\n")
    out, err = capfd.readouterr()
    assert "sk-" not in out + err


async def raw(cluster: Cluster, request: bytes) -> bytes:
    """Sends bytes and returns what comes back until the router closes, or has said a whole answer."""
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.readuntil(b"}}"), 30)
    finally:
        writer.close()


async def test_strangers_are_refused_before_they_send_a_body(key_file: Path) -> None:
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
    async with running(api_key_file=key_file) as cluster:
        for extra in ("", "Expect: 100-continue\r\n"):
            answer = await raw(cluster, f"{head}{extra}\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 401 "), answer


def test_rings_compare_whole_keys() -> None:
    ring = KeyRing(["a", "bc"])
    assert [ring.accepts(key) for key in ("a", "bc", "", "b", "abc", "A", "\udcff")] == [True, True] + [False] * 5


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", "two words\n", "schlüssel\n", "tab\tkey\n"])
def test_files_that_hold_no_usable_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--api-key-file {path}") as caught:
        create_app(RouterSettings(api_key_file=path))
    assert "words" not in caught.value.message
    assert "schl" not in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "bytes"):
        with pytest.raises(ConfigError, match="cannot be read"):
            listed_keys(path, "--api-key-file")


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def test_keys_are_rotated_without_a_restart(key_file: Path) -> None:
    """Of the API and of the control port."""
    async with running(api_key_file=key_file, admin_key_file=key_file, admin_on_public_port=True) as cluster:

        async def opens(key: str, path: str = "/v1/models") -> bool:
            async with cluster.http.get(path, headers={"X-API-Key": key}) as response:
                assert response.status in (200, 401)
                return response.status == 200

        old = listed_keys(key_file, "--api-key-file")[0]
        assert (await opens(old), await opens("new"), await opens("new", "/is_paused")) == (True, False, False)
        write(key_file, f"new\n{old}\n")
        async with asyncio.timeout(60):
            while not await opens("new") or not await opens("new", "/is_paused"):
                assert await opens(old)
        write(key_file, "new\n")
        async with asyncio.timeout(60):
            while await opens(old):
                assert await opens("new")


async def test_ending_all_requests_is_for_administrators(key_file: Path, tmp_path: Path) -> None:
    write(tmp_path / "admin", "boss\n")
    key, body = {"X-API-Key": listed_keys(key_file, "--api-key-file")[0]}, {"abort_all": True}
    async with running(api_key_file=key_file, admin_key_file=tmp_path / "admin") as cluster:
        status, answer = await cluster.post(body, "/abort_request", headers=key)
        assert (status, answer["error"]["type"]) == (401, "AuthenticationError")
        assert answer["error"]["message"] == "abort_all concerns every client and needs a key of --admin-key-file"
        assert (await cluster.post({"rid": "mine"}, "/abort_request", headers=key))[0] == 404
        boss = {"X-API-Key": "boss"}
        assert await cluster.post(body, "/abort_request", headers=boss) == (200, {"aborted": []})
        assert (await cluster.post({"token_ids": [1]}, headers=boss))[0] == 401, "it opens nothing else"
        assert (await cluster.post(body, "/abort_request"))[0] == 401
    async with running(api_key_file=key_file) as cluster:
        assert (await cluster.post(body, "/abort_request", headers=key))[0] == 401
    async with running() as cluster:
        assert await cluster.post(body, "/abort_request") == (200, {"aborted": []})
