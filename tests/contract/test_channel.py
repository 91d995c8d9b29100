"""What every handoff transport promises, whatever the messages mean."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from common.errors import HandoffRefusedError, WorkerLostError
from common.handoff.channel import HIGH_WATER_MARK, Connector, Link, Listener, PeerGone, PeerId, Received
from common.handoff.frames import Frame
from tests.contract.rig import AT_ONCE_S
from tests.contract.transports import Transport

pytestmark = pytest.mark.usefixtures("patient_sockets")

#: A queue that takes nothing for so long is full; below the second after which a heartbeat moves something on.
FULL_S = 0.2


@asynccontextmanager
async def ends(
    transport: Transport, *, high_water_mark: int = HIGH_WATER_MARK
) -> AsyncIterator[tuple[Listener, Connector]]:
    listener = transport.listen(high_water_mark=high_water_mark)
    connector = transport.connector(high_water_mark=high_water_mark)
    try:
        async with asyncio.timeout(30):
            yield listener, connector
    finally:
        await connector.close()
        await listener.close()


async def received(listener: Listener) -> Received:
    event = await listener.receive()
    assert isinstance(event, Received)
    return event


async def greet(listener: Listener, link: Link) -> PeerId:
    await link.send([b"hello"])
    return (await received(listener)).peer


async def fill(link: Link, padding: bytes) -> int:
    """Sends numbered messages until a send would have to wait; returns how many it sent."""
    num_sent = 0
    for num_sent in itertools.count():
        # A queue in front of a connection that is still being made is full too early.
        sending = asyncio.ensure_future(link.send([b"%d" % num_sent, padding]))
        await asyncio.wait([sending], timeout=FULL_S)
        sending.cancel()
        await asyncio.wait([sending])
        if sending.cancelled():
            break
    return num_sent


def contents(frames: Sequence[Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


async def test_messages_arrive_whole_and_in_order_both_ways(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        link = connector.connect(listener.endpoint)
        big = bytes(range(256)) * 2**14
        sent = [[b"header"], [b"header", big, b""], [b"", b"x"]]
        for frames in sent:
            await link.send(frames)
        events = [await received(listener) for _ in sent]
        assert [contents(event.frames) for event in events] == sent
        assert len({event.peer for event in events}) == 1
        for frames in sent:
            await listener.send(events[0].peer, frames)
        assert [contents(await link.receive()) for _ in sent] == sent


async def test_peers_are_told_apart(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        links = [connector.connect(listener.endpoint) for _ in range(3)]
        peers = [await greet(listener, link) for link in links]
        assert len(set(peers)) == 3
        for number, peer in enumerate(peers):
            await listener.send(peer, [b"%d" % number])
        assert [contents(await link.receive()) for link in links] == [[b"0"], [b"1"], [b"2"]]


async def test_a_paused_listener_loses_no_message(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        link = connector.connect(listener.endpoint)
        sent = [[b"%d" % number, b"payload"] for number in range(5_000)]
        for frames in sent:
            await link.send(frames)
        assert [contents((await received(listener)).frames) for _ in sent] == sent


async def test_a_full_queue_blocks_its_own_link_only(transport: Transport) -> None:
    async with ends(transport, high_water_mark=4) as (listener, connector):
        stalled, free = connector.connect(listener.endpoint), connector.connect(listener.endpoint)
        padding = bytes(2**18)
        num_sent = await fill(stalled, padding)
        blocked = asyncio.ensure_future(stalled.send([b"%d" % num_sent, padding]))
        await asyncio.wait_for(free.send([b"free"]), AT_ONCE_S)
        numbers: list[int] = []
        while len(numbers) <= num_sent:
            frames = contents((await received(listener)).frames)
            if frames != [b"free"]:
                numbers.append(int(frames[0]))
        await blocked
        assert numbers == list(range(num_sent + 1))


async def test_connecting_to_nobody_is_noticed_at_once(transport: Transport) -> None:
    async with ends(transport) as (_, connector):
        link = connector.connect(transport.unused_endpoint())
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(link.receive(), AT_ONCE_S)
        assert not link.try_send([b"x"])


async def test_a_closed_listener_is_a_lost_link_after_what_it_sent(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        link = connector.connect(listener.endpoint)
        peer = await greet(listener, link)
        await listener.send(peer, [b"last words"])
        assert contents(await link.receive()) == [b"last words"]
        await listener.close()
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(link.receive(), AT_ONCE_S)
        with pytest.raises(WorkerLostError):
            await link.send([b"x"])


async def test_a_closed_link_is_a_gone_peer(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        leaving, staying = connector.connect(listener.endpoint), connector.connect(listener.endpoint)
        gone, there = await greet(listener, leaving), await greet(listener, staying)
        leaving.close()
        assert await asyncio.wait_for(listener.receive(), AT_ONCE_S) == PeerGone(gone)
        with pytest.raises(WorkerLostError):
            await listener.send(gone, [b"x"])
        await listener.send(there, [b"still here"])
        assert contents(await staying.receive()) == [b"still here"]


async def test_closing_a_link_ends_a_send_that_waits(transport: Transport) -> None:
    async with ends(transport, high_water_mark=1) as (listener, connector):
        link = connector.connect(listener.endpoint)
        await fill(link, bytes(2**18))
        blocked = asyncio.ensure_future(link.send([b"x"]))
        asyncio.get_running_loop().call_soon(link.close)
        with pytest.raises(WorkerLostError):
            await blocked


async def test_closing_a_link_ends_a_receive_that_waits(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        link = connector.connect(listener.endpoint)
        await greet(listener, link)
        waiting = asyncio.ensure_future(link.receive())
        asyncio.get_running_loop().call_soon(link.close)
        with pytest.raises(WorkerLostError):
            await waiting


async def test_a_listener_that_restarts_takes_new_links_at_the_same_endpoint(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        endpoint = listener.endpoint
        old = connector.connect(endpoint)
        await greet(listener, old)
        await listener.close()
        again = transport.listen(endpoint)
        # But for the key, which is another one.
        assert again.endpoint.partition("?")[0] == endpoint.partition("?")[0]
        try:
            with pytest.raises(WorkerLostError):
                await asyncio.wait_for(old.receive(), AT_ONCE_S)
            await greet(again, connector.connect(again.endpoint))
        finally:
            await again.close()


async def test_cancelling_a_receive_loses_nothing(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        link = connector.connect(listener.endpoint)
        peer = await greet(listener, link)
        for number in range(50):
            waiting = asyncio.ensure_future(listener.receive())
            answers = asyncio.ensure_future(link.receive())
            await asyncio.sleep(0)
            await link.send([b"%d" % number])
            await listener.send(peer, [b"%d" % number])
            for task in (waiting, answers):
                task.cancel()
            done = await asyncio.gather(waiting, answers, return_exceptions=True)
            up = done[0] if isinstance(done[0], Received) else await received(listener)
            down = done[1] if isinstance(done[1], tuple | list) else await link.receive()
            assert (contents(up.frames), contents(down)) == ([b"%d" % number], [b"%d" % number])


async def test_closing_twice_is_harmless(transport: Transport) -> None:
    async with ends(transport) as (listener, connector):
        link = connector.connect(listener.endpoint)
        link.close()
        link.close()
        await connector.close()
        await listener.close()


@pytest.mark.parametrize("endpoint", ["", "nonsense", "inproc://x", "tcp://127.0.0.1", "tcp://h:99999", "ipc://"])
async def test_a_foreign_endpoint_is_refused(transport: Transport, endpoint: str) -> None:
    async with ends(transport) as (_, connector):
        with pytest.raises(HandoffRefusedError, match="endpoint"):
            connector.connect(endpoint)
