"""Who gets into an encrypted handoff socket, and where prefill workers refuse to go without."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq
from structlog.testing import capture_logs
from zmq.utils import z85

from common.errors import HandoffRefusedError, WorkerLostError
from common.handoff.channel import PeerGone, Received
from common.handoff.curve import OVERHEAD_BYTES, split_key, with_key
from common.handoff.frames import MAX_FRAME_BYTES
from common.handoff.zmq_channel import ZmqConnector, ZmqListener


def new_keys() -> tuple[str, str]:
    """Public and secret."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public).hex(), z85.decode(secret).hex()


PUBLIC, SECRET = new_keys()
STRANGER = new_keys()


@asynccontextmanager
async def listening(*admitted: str) -> AsyncIterator[ZmqListener]:
    async with ZmqListener("tcp://127.0.0.1:0", admitted=lambda: admitted) as listener:
        yield listener


async def arrives(listener: ZmqListener, connector: ZmqConnector, endpoint: str | None = None) -> bool:
    """Whether a message comes through and is answered; if not, the link says so by itself."""
    link = connector.connect(endpoint or listener.endpoint)
    await link.send([b"hello", b"world"])
    hearing, losing = asyncio.ensure_future(listener.receive()), asyncio.ensure_future(link.receive())
    async with asyncio.timeout(20):
        await asyncio.wait([hearing, losing], return_when=asyncio.FIRST_COMPLETED)
    if not hearing.done():
        hearing.cancel()
        with pytest.raises(WorkerLostError):
            await losing
        return False
    event = hearing.result()
    assert isinstance(event, Received)
    assert [bytes(frame) for frame in event.frames] == [b"hello", b"world"]
    await listener.send(event.peer, [b"answer"])
    assert [bytes(frame) for frame in await losing] == [b"answer"]
    return True


async def test_a_key_that_is_on_the_list_opens() -> None:
    async with listening(STRANGER[0], PUBLIC) as listener, ZmqConnector(secret_key=lambda: SECRET) as connector:
        assert await arrives(listener, connector)
        assert listener.num_refused == 0


async def test_a_key_that_is_not_on_the_list_does_not() -> None:
    async with listening(PUBLIC) as listener, ZmqConnector(secret_key=lambda: STRANGER[1]) as connector:
        with capture_logs() as logs:
            assert not await arrives(listener, connector)
            assert not await arrives(listener, connector)
        assert listener.num_refused == 2
        refusals = [entry for entry in logs if entry["event"] == "handoff_client_refused"]
        assert [(entry["key"], entry["refused"]) for entry in refusals] == [(STRANGER[0], 1)], "not at each attempt"
        assert SECRET not in str(logs)
        link = connector.connect(listener.endpoint)
        with pytest.raises(WorkerLostError, match="does not admit this worker's key; give both the files of one fold"):
            await link.receive()


async def test_lists_and_keys_change_while_sockets_live() -> None:
    admitted, shown = [PUBLIC], [SECRET]
    listener = ZmqListener("tcp://127.0.0.1:0", admitted=lambda: admitted)
    async with listener, ZmqConnector(secret_key=lambda: shown[0]) as connector:
        assert await arrives(listener, connector)
        link = connector.connect(listener.endpoint)
        await link.send([b"before"])
        await listener.receive()
        shown[0] = STRANGER[1]
        assert not await arrives(listener, connector)
        admitted[:] = [STRANGER[0]]
        assert await arrives(listener, connector)
        await link.send([b"a connection that exists goes on"])
        event = await listener.receive()
        assert isinstance(event, Received)


async def test_who_speaks_plainly_is_refused() -> None:
    async with listening(PUBLIC) as listener, ZmqConnector() as connector:
        assert not await arrives(listener, connector, listener.endpoint.partition("?")[0])
        assert await arrives_after_all(listener)


async def arrives_after_all(listener: ZmqListener) -> bool:
    async with ZmqConnector(secret_key=lambda: SECRET) as connector:
        return await arrives(listener, connector)


async def test_another_server_at_the_same_address_is_not_trusted() -> None:
    """Whoever takes a dead decode worker's port gets no KV."""
    async with listening(PUBLIC) as listener, ZmqConnector(secret_key=lambda: SECRET) as connector:
        address, _ = split_key(listener.endpoint)
        assert not await arrives(listener, connector, with_key(address, new_keys()[0]))


async def test_frames_may_be_as_large_as_without() -> None:
    async with listening(PUBLIC) as listener, ZmqConnector(secret_key=lambda: SECRET) as connector:
        link = connector.connect(listener.endpoint)
        await link.send([bytes(MAX_FRAME_BYTES)])
        event = await asyncio.wait_for(listener.receive(), 20)
        assert isinstance(event, Received)
        assert [len(frame) for frame in event.frames] == [MAX_FRAME_BYTES]
        await link.send([bytes(MAX_FRAME_BYTES + OVERHEAD_BYTES)])
        assert await asyncio.wait_for(listener.receive(), 20) == PeerGone(event.peer)


async def test_each_listener_has_a_key_of_its_own() -> None:
    async with listening(PUBLIC) as one, listening(PUBLIC) as other:
        assert split_key(one.endpoint)[1] != split_key(other.endpoint)[1]


async def test_sockets_of_ipc_need_no_keys() -> None:
    async with (
        ZmqListener("ipc://*", admitted=lambda: [PUBLIC]) as listener,
        ZmqConnector(secret_key=lambda: SECRET) as connector,
    ):
        assert split_key(listener.endpoint)[1] is None
        assert await arrives(listener, connector)


@pytest.mark.parametrize("secret_key", [None, lambda: SECRET])
async def test_nothing_goes_plainly_to_another_machine(secret_key: Callable[[], str] | None) -> None:
    async with ZmqConnector(secret_key=secret_key) as connector:
        said = (
            r"at tcp://203\.0\.113\.1:7003 is on another machine and encrypts nothing; start it with --cluster-key-file"
        )
        with pytest.raises(HandoffRefusedError, match=said):
            connector.connect("tcp://203.0.113.1:7003")
        assert connector.num_open == 0
    async with ZmqConnector(insecure=True) as connector:
        connector.connect("tcp://203.0.113.1:7003").close()


async def test_who_has_no_key_says_which_file_is_missing() -> None:
    async with listening(PUBLIC) as listener, ZmqConnector() as connector:
        with pytest.raises(
            HandoffRefusedError, match="admits only workers with keys; start this one with --cluster-key"
        ):
            connector.connect(listener.endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:1?curve=",
        "tcp://127.0.0.1:1?curve=12",
        f"tcp://127.0.0.1:1?curve={'g' * 64}",
        f"tcp://127.0.0.1:1?curve={PUBLIC}0",
        f"ipc:///run/decode?curve={PUBLIC}",
    ],
    ids=["nothing", "too short", "no hexadecimal", "too long", "not on ipc"],
)
async def test_what_is_no_key_in_an_endpoint(endpoint: str) -> None:
    async with ZmqConnector(secret_key=lambda: SECRET) as connector:
        with pytest.raises(HandoffRefusedError, match="it has no public key of 64 hexadecimal digits"):
            connector.connect(endpoint)


async def test_closing_ends_the_authenticator_too() -> None:
    before = {task.get_coro() for task in asyncio.all_tasks()}
    async with listening(PUBLIC) as listener:
        assert await arrives_after_all(listener)
    await asyncio.sleep(0)
    assert {task.get_coro() for task in asyncio.all_tasks()} == before
