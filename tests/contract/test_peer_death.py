"""A peer process that is killed, or stands still, is noticed by the other end of its connection."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import psutil
import pytest

from common.errors import WorkerLostError
from common.handoff.channel import PeerGone, Received
from common.handoff.zmq_channel import ZmqConnector, ZmqListener
from tests.contract.rig import AT_ONCE_S

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
        async with asyncio.timeout(90):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@pytest.mark.usefixtures("patient_sockets")
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
                await asyncio.wait_for(link.receive(), AT_ONCE_S)


@pytest.mark.usefixtures("patient_sockets")
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_a_killed_prefill_worker_is_noticed_at_once(scheme: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        endpoint = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{directory}/decode"
        async with ZmqListener(endpoint) as listener, process(LINK, listener.endpoint) as child:
            event = await listener.receive()
            assert isinstance(event, Received)
            child.kill()
            assert await asyncio.wait_for(listener.receive(), AT_ONCE_S) == PeerGone(event.peer)


async def test_a_decode_worker_that_stands_still_is_noticed_by_its_heartbeat() -> None:
    async with process(LISTENER, "tcp://127.0.0.1:0") as child, ZmqConnector() as connector:
        assert child.stdout is not None
        link = connector.connect((await child.stdout.readline()).decode().strip())
        await link.send([b"hello"])
        assert await link.receive() == [b"hello"]
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(link.receive(), 60)


#: Imports once and becomes a link again and again: tells the pid of each, a line for a line.
LINKS = """
import asyncio, os, sys
from common.handoff.zmq_channel import ZmqConnector

async def main():
    async with ZmqConnector() as connector:
        await connector.connect(sys.argv[1]).send([b"hello"])
        await asyncio.Event().wait()

for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        asyncio.run(main())
    print(pid, flush=True)
"""


@pytest.mark.usefixtures("patient_sockets")
async def test_peers_that_die_and_come_back_leave_no_sockets_behind() -> None:
    """sglang#31144, #31306, #29570: a prefill worker that is killed and restarts twenty times costs decode nothing."""

    def num_sockets() -> int:
        return sum(1 for each in psutil.Process().net_connections("tcp") if each.laddr.port == port)

    async with ZmqListener("tcp://127.0.0.1:0") as listener, links(listener.endpoint) as start:
        port = int(listener.endpoint.rpartition(":")[2])
        before = num_sockets()
        for _ in range(20):
            pid = await start()
            event = await asyncio.wait_for(listener.receive(), AT_ONCE_S)
            assert isinstance(event, Received)
            assert num_sockets() > before
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.wait_for(listener.receive(), AT_ONCE_S) == PeerGone(event.peer)
        async with asyncio.timeout(AT_ONCE_S):
            while num_sockets() > before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # a poll: the kernel offers nothing to wait on


@asynccontextmanager
async def links(endpoint: str) -> AsyncIterator[Callable[[], Coroutine[None, None, int]]]:
    """Starts a process that greets the endpoint, and gives its pid."""
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LINKS, endpoint), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )

    async def start() -> int:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(b"next\n")
        return int(await parent.stdout.readline())

    try:
        yield start
    finally:
        parent.kill()
        await parent.communicate()
