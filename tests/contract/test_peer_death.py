"""A peer process that is killed, or stands still, is noticed by the other end of its connection."""

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from common.errors import WorkerLostError
from common.handoff.channel import PeerGone, Received
from common.handoff.zmq_channel import ZmqConnector, ZmqListener

LISTENER = """
import asyncio, sys
from common.handoff.zmq_channel import ZmqListener

async def main():
    async with ZmqListener(sys.argv[1]) as listener:
        print(listener.endpoint, flush=True)
        event = await listener.receive()
        await listener.send(event.peer, [b"hello"])
        await asyncio.Event().wait()

asyncio.run(main())
"""

LINK = """
import asyncio, sys
from common.handoff.zmq_channel import ZmqConnector

async def main():
    async with ZmqConnector() as connector:
        await connector.connect(sys.argv[1]).send([b"hello"])
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def process(script: str, endpoint: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, endpoint, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_a_killed_decode_worker_is_noticed_at_once(scheme: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        endpoint = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{directory}/decode"
        async with process(LISTENER, endpoint) as child, ZmqConnector() as connector:
            assert child.stdout is not None
            link = connector.connect((await child.stdout.readline()).decode().strip())
            await link.send([b"hello"])
            assert await link.receive() == [b"hello"]
            child.kill()
            with pytest.raises(WorkerLostError):
                await asyncio.wait_for(link.receive(), 2)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_a_killed_prefill_worker_is_noticed_at_once(scheme: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        endpoint = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{directory}/decode"
        async with ZmqListener(endpoint) as listener, process(LINK, listener.endpoint) as child:
            event = await listener.receive()
            assert isinstance(event, Received)
            child.kill()
            assert await asyncio.wait_for(listener.receive(), 2) == PeerGone(event.peer)


async def test_a_decode_worker_that_stands_still_is_noticed_by_its_heartbeat() -> None:
    async with process(LISTENER, "tcp://127.0.0.1:0") as child, ZmqConnector() as connector:
        assert child.stdout is not None
        link = connector.connect((await child.stdout.readline()).decode().strip())
        await link.send([b"hello"])
        assert await link.receive() == [b"hello"]
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(link.receive(), 10)


async def test_peers_that_come_and_go_leave_no_sockets_behind() -> None:
    """sglang#31144, #31306, #29570: a prefill worker that restarts twenty times costs a decode worker nothing."""

    def num_sockets() -> int:
        return sum(1 for each in psutil.Process().net_connections("tcp") if each.laddr.port == port)

    async with ZmqListener("tcp://127.0.0.1:0") as listener:
        port = int(listener.endpoint.rpartition(":")[2])
        before = num_sockets()
        for _ in range(20):
            async with ZmqConnector() as connector:
                await connector.connect(listener.endpoint).send([b"hello"])
                event = await listener.receive()
                assert isinstance(event, Received)
            assert await asyncio.wait_for(listener.receive(), 5) == PeerGone(event.peer)
        async with asyncio.timeout(5):
            while num_sockets() > before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # a poll: the kernel offers nothing to wait on
