"""A, AAAA and SRV records, and files, as addresses of workers."""

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import dns.rcode
import pytest

from common.errors import UnavailableError
from router.discovery.host_records import AddressInfo, HostRecords
from router.discovery.listed_in_file import ListedInFile
from router.discovery.resolver import resolver_of
from router.discovery.srv_records import SrvRecords
from tests.fakes.name_server import NameServer

STREAM = socket.SOCK_STREAM


def found(*hosts: str) -> list[AddressInfo]:
    """What `getaddrinfo` returns for these addresses and port 7001."""
    v4 = [(socket.AF_INET, STREAM, 6, "", (host, 7001)) for host in hosts if ":" not in host]
    v6 = [(socket.AF_INET6, STREAM, 6, "", (host, 7001, 0, 0)) for host in hosts if ":" in host]
    return [*v6, *v4]


async def resolved(*hosts: str) -> Sequence[str]:
    asked: list[tuple[str, int]] = []

    def look_up(host: str, port: int) -> Sequence[AddressInfo]:
        asked.append((host, port))
        return found(*hosts)

    addresses = await HostRecords("prefill", 7001, look_up).resolve()
    assert asked == [("prefill", 7001)]
    return addresses


async def test_one_worker_per_address_in_a_fixed_order() -> None:
    assert await resolved("10.0.0.9", "10.0.0.2") == ["10.0.0.2:7001", "10.0.0.9:7001"]
    assert await resolved("fd00::2", "fd00::1") == ["[fd00::1]:7001", "[fd00::2]:7001"]


async def test_addresses_of_both_kinds_are_the_same_workers_twice() -> None:
    assert await resolved("fd00::1", "10.0.0.2") == ["10.0.0.2:7001"]


async def test_the_machine_itself_is_asked() -> None:
    assert await HostRecords("localhost", 7001).resolve() == ["127.0.0.1:7001"]
    assert await HostRecords("[::1]", 7001).resolve() == ["[::1]:7001"]


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_that_does_not_exist_is_an_answer(code: int) -> None:
    def look_up(host: str, port: int) -> Sequence[AddressInfo]:
        raise socket.gaierror(code, "Name or service not known")

    assert await HostRecords("gone", 7001, look_up).resolve() == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "prefill cannot be looked up: Temporary failure"),
        (OSError(24, "Too many open files"), "prefill cannot be looked up: Too many open files"),
        (UnicodeError("label too long"), "prefill is no host name: label too long"),
    ],
)
async def test_a_lookup_that_fails_is_no_answer(error: Exception, said: str) -> None:
    def look_up(host: str, port: int) -> Sequence[AddressInfo]:
        raise error

    with pytest.raises(UnavailableError, match=said):
        await HostRecords("prefill", 7001, look_up).resolve()


async def test_srv_records_have_ports() -> None:
    async with NameServer.serving() as (server, resolver):
        server.records["_grpc._tcp.decode.example"] = ["0 5 7002 d1.example.", "9 0 7003 d0.example."]
        records = SrvRecords("_grpc._tcp.decode.example", resolver)
        assert await records.resolve() == ["d0.example:7003", "d1.example:7002"]
        server.records["_grpc._tcp.decode.example"] = ["0 0 7002 d1.example."]
        assert await records.resolve() == ["d1.example:7002"]


@pytest.mark.parametrize("records", [None, [], ["0 0 0 ."]])
async def test_answers_without_srv_records(records: list[str] | None) -> None:
    """There is no such name, it has none, or it says that there is no such service."""
    async with NameServer.serving() as (server, resolver):
        if records is not None:
            server.records["decode.example"] = records
        assert await SrvRecords("decode.example", resolver).resolve() == []


async def test_a_name_server_that_fails_is_no_answer() -> None:
    async with NameServer.serving() as (server, resolver):
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(UnavailableError, match=r"decode\.example cannot be looked up: .*SERVFAIL"):
            await SrvRecords("decode.example", resolver).resolve()


async def test_files(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    listed = ListedInFile(path)
    with pytest.raises(UnavailableError, match="workers cannot be read: No such file"):
        await listed.resolve()
    path.write_text("# decode\nd1.example:7002\n\n  [fd00::1]:7002 \nd1.example:7002\n")
    assert await listed.resolve() == ["d1.example:7002", "[fd00::1]:7002"]
    path.write_text("")
    assert await listed.resolve() == []
    path.write_text("d1.example:7002\nd2.example\n")
    with pytest.raises(UnavailableError, match=r"line 2: 'd2\.example' is not HOST:PORT"):
        await listed.resolve()
    path.write_bytes(b"\xff")
    with pytest.raises(UnavailableError, match="is not text"):
        await listed.resolve()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnavailableError, match="workers cannot be read: it is no regular file"):
        await listed.resolve()


async def test_a_file_on_a_mount_that_hangs_is_waited_for_by_one_thread(tmp_path: Path) -> None:
    answer, asked, num_calls = Event(), Event(), 0

    def read(path: Path) -> bytes:
        nonlocal num_calls
        num_calls += 1
        asked.set()
        answer.wait()
        return b"d1.example:7002"

    listed = ListedInFile(tmp_path / "workers", read, timeout_s=0.01)
    for _ in range(5):
        with pytest.raises(UnavailableError, match=r"no answer for 0\.01 s; does its mount hang\?"):
            await listed.resolve()
    assert await asyncio.to_thread(asked.wait, 30)
    assert num_calls == 1
    answer.set()
    assert await ListedInFile(tmp_path / "workers", read).resolve() == ["d1.example:7002"]


def test_which_source_is_looked_up_how() -> None:
    assert resolver_of("p0.example:7001") is None
    assert isinstance(resolver_of("dns://prefill:7001"), HostRecords)
    assert isinstance(resolver_of("srv://_grpc._tcp.decode"), SrvRecords)
    assert isinstance(resolver_of("file:///run/workers"), ListedInFile)
