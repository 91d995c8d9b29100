"""What only sockets can get wrong: endpoints, frames that are too large, peers that are mute, and closing in time."""

import asyncio
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog
import zmq

from common.errors import ConfigError, WorkerLostError
from common.handoff.channel import PeerGone, Received
from common.handoff.frames import MAX_FRAME_BYTES
from common.handoff.zmq_channel import ZmqConnector, ZmqListener
from common.handoff.zmq_socket import MonitoredSocket
from tests.ipv6 import needs_ipv6


@contextmanager
def mute_server() -> Iterator[str]:
    """A tcp endpoint that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


async def test_closing_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    with mute_server() as endpoint:
        connector = ZmqConnector()
        link = connector.connect(endpoint)
        for _ in range(100):
            await link.send([bytes(2**16)])
        await asyncio.wait_for(connector.close(), 60)


async def test_closing_a_listener_does_not_wait_for_a_link_that_reads_nothing() -> None:
    listener, connector = ZmqListener("tcp://127.0.0.1:0"), ZmqConnector()
    link = connector.connect(listener.endpoint)
    await link.send([b"hello"])
    event = await listener.receive()
    assert isinstance(event, Received)
    for _ in range(100):
        await listener.send(event.peer, [bytes(2**18)])
    await asyncio.wait_for(listener.close(), 60)
    await connector.close()


async def test_sockets_do_not_pile_up() -> None:
    async with ZmqConnector() as connector:
        for _ in range(20):
            async with ZmqListener("tcp://127.0.0.1:0") as listener:
                link = connector.connect(listener.endpoint)
                await link.send([b"hello"])
                await listener.receive()
            with pytest.raises(WorkerLostError):
                await link.receive()
            link.close()
            assert connector.num_open == 0


async def test_a_frame_beyond_the_limit_ends_the_connection() -> None:
    async with ZmqListener("tcp://127.0.0.1:0") as listener, ZmqConnector() as connector:
        link = connector.connect(listener.endpoint)
        await link.send([b"hello"])
        event = await listener.receive()
        await link.send([bytes(MAX_FRAME_BYTES + 1)])
        assert await asyncio.wait_for(listener.receive(), 10) == PeerGone(event.peer)
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(link.receive(), 10)


async def test_who_waits_for_room_hears_of_it_from_whoever_receives() -> None:
    """The descriptor tells of a change once, and a receive may be what takes it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for each in (ours, theirs):
        each.set(zmq.SNDHWM, 2)
        each.set(zmq.RCVHWM, 2)
    theirs.bind("inproc://room")
    ours.connect("inproc://room")
    socket = MonitoredSocket(ours)
    while socket.send_now([b"x"]):
        pass
    waiting = asyncio.create_task(socket.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    while theirs.poll(0):
        theirs.recv()
    # Nothing runs on the event loop between the change and the receive that finds it.
    assert select.select([ours.fileno()], [], [], 10)[0]
    assert socket.receive_now() is None
    await asyncio.wait_for(waiting, 10)
    assert socket.send_now([b"x"])
    socket.close()
    theirs.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        ("nonsense", "use tcp"),
        ("tcp://127.0.0.1:99999", "use tcp"),
        ("ipc:///no/such/directory/socket", "cannot be bound"),
        ("tcp://203.0.113.1:0", "cannot be bound"),
        ("tcp://0.0.0.0:0", "--advertise-address"),
    ],
)
async def test_an_endpoint_that_cannot_serve_is_a_configuration_error(endpoint: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ZmqListener(endpoint)


async def test_an_endpoint_in_use_is_a_configuration_error() -> None:
    async with ZmqListener("tcp://127.0.0.1:0") as listener:
        with pytest.raises(ConfigError, match="Address already in use"):
            ZmqListener(listener.endpoint)


async def test_localhost_is_an_address_too() -> None:
    async with ZmqListener("tcp://localhost:0") as listener, ZmqConnector() as connector:
        assert listener.endpoint.startswith("tcp://localhost:")
        link = connector.connect(listener.endpoint)
        await link.send([b"hello"])
        assert isinstance(await listener.receive(), Received)


@pytest.mark.parametrize(("advertised", "expected"), [("decode-0", "tcp://decode-0:"), ("fd00::1", "tcp://[fd00::1]:")])
async def test_a_wildcard_is_advertised_by_name_with_a_warning(advertised: str, expected: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with ZmqListener("tcp://0.0.0.0:0", advertise_host=advertised) as listener:
            assert listener.endpoint.startswith(expected)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["handoff_not_encrypted"]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", pytest.param("tcp://[::1]:0", marks=needs_ipv6), "ipc://*"])
async def test_loopback_and_ipc_need_no_warning(endpoint: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with ZmqListener(endpoint) as listener, ZmqConnector() as connector:
            link = connector.connect(listener.endpoint)
            await link.send([b"hello"])
            assert isinstance(await listener.receive(), Received)
    assert not [line for line in logs if line["log_level"] == "warning"]
