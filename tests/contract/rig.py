"""A prefill and a decode worker without engines, joined by a transport: what the handoff tests stand on."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.engine.request import RequestId
from common.errors import HandoffError
from common.handoff.channel import Link, Listener, PeerGone, PeerId, Received
from common.handoff.frames import Frame, FromPrefill, decode_from_decode, decode_from_prefill, encode
from common.handoff.lease import LeaseRef
from common.handoff.messages import (
    DecodeMessage,
    Generation,
    HandoffIdentity,
    Hello,
    PrefillMessage,
    Ready,
    Renew,
    TransferId,
)
from common.handoff.receiver import HandoffReceiver
from common.handoff.sender import HandoffSender
from common.id_mask import pack_ids
from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore, slots_of
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingLayout
from common.sampling import SampledToken, TokenLogprob
from tests.contract.transports import Transport

BLOCK_SIZE = 4
NUM_BLOCKS = 40
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=BLOCK_SIZE, dtype=torch.bfloat16)
ROUTING = RoutingLayout(num_layers=2, top_k=2, num_experts=300)
#: 2 layers × (K and V) × 2 heads × 4 numbers × 2 bytes, and 2 layers × 2 ids × 2 bytes.
TOKEN_BYTES, ROW_BYTES = 64, 8

#: The deadline of tests in which nothing is meant to expire.
LONG_S = 20.0
#: Of what is meant to expire, when nothing has to happen before.
SHORT_S = 0.3
#: Of what is meant to expire after something else: long enough for a loaded machine to do that, short enough to wait.
MEDIUM_S = 2.0
#: What is noticed "at once" needs no timeout: those of `patient_sockets` are a minute.
AT_ONCE_S = 20.0

#: Of two choices.
FIRST_TOKENS = (
    SampledToken(
        17,
        TokenLogprob(17, -0.1234567761182785, 1),
        (TokenLogprob(17, -0.1234567761182785, 1), TokenLogprob(3, -2.5, 2)),
        mask=pack_ids((3, 17)),
        weight_version="v1",
    ),
    SampledToken(4),
)


def identity(instance_id: str, **changes: object) -> HandoffIdentity:
    fields: dict[str, Any] = {
        "instance_id": instance_id,
        "fingerprint": "f00d",
        "weight_version": "7",
        "numerics": "avx512 torch-2.13",
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "num_layers": 2,
        "num_kv_planes": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "routing_dtype": "uint16",
        "top_k": 2,
        "num_experts": 300,
        "routing_enabled": True,
        "max_model_len": 128,
    }
    return HandoffIdentity(**{**fields, **changes})


def make_store(seed: int, *, layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS) -> KVStore:
    """Random bits in every slot (NaN patterns included), and a routing row in every slot."""
    return fill_store(KVStore(layout, ROUTING, num_blocks, torch.device("cpu")), seed)


def fill_store(store: KVStore, seed: int) -> KVStore:
    """As `make_store`, in place."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 256, store.kv_LCSGD.numel() * store.layout.dtype.itemsize, np.uint8)
    store.kv_LCSGD.copy_(torch.from_numpy(bits).view(store.layout.dtype).view(store.kv_LCSGD.shape))
    rows = generator.integers(0, store.routing.num_experts, store.rows_SLK.shape)
    store.write_rows(np.arange(len(rows)), rows.astype(store.routing.dtype))
    return store


def slot_bits(store: KVStore) -> npt.NDArray[np.uint8]:
    """The bytes of every slot, KV and row, uint8 [S, bytes]: comparable although some are NaN."""
    num_slots = store.kv_LCSGD.shape[2]
    kv = store.kv_LCSGD.permute(2, 0, 1, 3, 4).contiguous().view(torch.uint8).numpy().reshape(num_slots, -1)
    rows = np.ascontiguousarray(store.rows_SLK).view(np.uint8).reshape(num_slots, -1)
    return np.concatenate([kv, rows], axis=1)


@dataclass
class RecordingHandler:
    """Keeps what the receiver reports, and lets a test wait for the end of a request."""

    advanced: dict[RequestId, list[int]] = field(default_factory=dict)
    logprobs: dict[RequestId, list[PromptLogprobs]] = field(default_factory=dict)
    outcomes: dict[RequestId, tuple[SampledToken, ...] | HandoffError] = field(default_factory=dict)
    #: Prompt tokens that the prefill worker says it had.
    num_cached: dict[RequestId, int] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_advanced(self, request_id: RequestId, computed: int) -> None:
        self.advanced.setdefault(request_id, []).append(computed)
        self._changed.set()

    def on_prompt_logprobs(self, request_id: RequestId, entries: PromptLogprobs) -> None:
        assert request_id not in self.outcomes, f"{request_id} has ended"
        self.logprobs.setdefault(request_id, []).append(entries)

    def on_complete(self, request_id: RequestId, first_tokens: Sequence[SampledToken], num_cached: int) -> None:
        self.num_cached[request_id] = num_cached
        self._end(request_id, tuple(first_tokens))

    def on_failed(self, request_id: RequestId, error: HandoffError) -> None:
        self._end(request_id, error)

    def _end(self, request_id: RequestId, outcome: tuple[SampledToken, ...] | HandoffError) -> None:
        assert request_id not in self.outcomes, f"{request_id} ended twice"
        self.outcomes[request_id] = outcome
        self._changed.set()

    async def outcome(self, request_id: RequestId) -> tuple[SampledToken, ...] | HandoffError:
        while request_id not in self.outcomes:
            await self._change()
        return self.outcomes[request_id]

    async def advance(self, request_id: RequestId, computed: int) -> None:
        while computed not in self.advanced.get(request_id, []):
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class GatedListener:
    """A listener that gives nothing away while its gate is shut: a receiver that is busy elsewhere."""

    def __init__(self, inner: Listener, gate: asyncio.Event) -> None:
        self._inner = inner
        self._gate = gate

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    async def receive(self) -> Received | PeerGone:
        event = await self._inner.receive()
        await self._gate.wait()
        return event

    async def send(self, peer: PeerId, frames: Sequence[Frame]) -> None:
        await self._inner.send(peer, frames)

    async def close(self) -> None:
        await self._inner.close()


class Decode:
    """A decode worker's receiving end, and blocks to lease."""

    def __init__(
        self, listener: Listener, receiver: HandoffReceiver, store: KVStore, handler: RecordingHandler
    ) -> None:
        self.listener = listener
        self.receiver = receiver
        self.store = store
        self.handler = handler
        self._numbers = itertools.count()

    def grant(
        self,
        blocks: Sequence[int],
        num_tokens: int,
        *,
        num_cached: int = 0,
        routing: bool = True,
        num_top: int | None = None,
    ) -> tuple[RequestId, LeaseRef]:
        request_id = RequestId(f"request-{next(self._numbers)}")
        lease = self.receiver.grant(
            request_id, [BlockId(block) for block in blocks], num_tokens, num_cached, routing=routing, num_top=num_top
        )
        return request_id, lease

    def assert_idle(self) -> None:
        assert self.receiver.num_active == 0
        assert self.receiver.check_invariants() == []


def _asked(me: HandoffIdentity | Callable[[], HandoffIdentity]) -> Callable[[], HandoffIdentity]:
    return (lambda: me) if isinstance(me, HandoffIdentity) else me


@asynccontextmanager
async def decode_worker(
    transport: Transport,
    *,
    endpoint: str | None = None,
    store: KVStore | None = None,
    me: HandoffIdentity | Callable[[], HandoffIdentity] | None = None,
    timeout_s: float = LONG_S,
    credit_bytes: int = 2**23,
    known_versions: Collection[str] = ("", "v1"),
    gate: asyncio.Event | None = None,
) -> AsyncIterator[Decode]:
    listener = transport.listen(endpoint)
    if gate is not None:
        listener = GatedListener(listener, gate)
    store = store or make_store(seed=1)
    handler = RecordingHandler()
    receiver = HandoffReceiver(
        listener,
        store,
        _asked(me or identity("decode-instance")),
        timeout_s=timeout_s,
        credit_bytes=credit_bytes,
        known_versions=lambda: known_versions,
        handler=handler,
    )
    try:
        async with receiver:
            yield Decode(listener, receiver, store, handler)
    finally:
        await listener.close()


@asynccontextmanager
async def prefill_worker(
    transport: Transport,
    *,
    store: KVStore | None = None,
    me: HandoffIdentity | Callable[[], HandoffIdentity] | None = None,
    timeout_s: float = LONG_S,
) -> AsyncIterator[HandoffSender]:
    connector = transport.connector()
    sender = HandoffSender(
        connector, store or make_store(seed=2), _asked(me or identity("prefill-instance")), timeout_s=timeout_s
    )
    try:
        async with sender:
            yield sender
    finally:
        await connector.close()


async def hand_off(
    sender: HandoffSender,
    lease: LeaseRef,
    blocks: Sequence[int],
    ends: Sequence[int],
    *,
    routing: bool = True,
) -> None:
    """One whole transfer, in ranges that end at `ends`."""
    async with sender.transfer(lease, routing=routing) as transfer:
        for end in ends:
            await transfer.send_range([BlockId(b) for b in blocks], transfer.position, end)
        await transfer.finish(FIRST_TOKENS, 1)


def slots(blocks: Sequence[int], start: int, end: int) -> list[int]:
    return [int(slot) for slot in slots_of([BlockId(b) for b in blocks], start, end, BLOCK_SIZE)]


class ScriptedDecode:
    """The decode side of the protocol, played by the test message by message."""

    def __init__(self, listener: Listener, me: HandoffIdentity) -> None:
        self._listener = listener
        self._me = me
        self._transfer_ids = itertools.count(1)

    def lease(self, *, timeout_s: float = LONG_S, num_cached: int = 0, instance_id: str | None = None) -> LeaseRef:
        return LeaseRef(
            transfer_id=TransferId(next(self._transfer_ids)),
            generation=Generation(4711),
            endpoint=self._listener.endpoint,
            num_cached_tokens=num_cached,
            timeout_s=timeout_s,
            instance_id=instance_id or self._me.instance_id,
        )

    async def receive(self) -> tuple[PeerId, FromPrefill]:
        """The next message that is no renewal."""
        while True:
            event = await self._listener.receive()
            assert isinstance(event, Received)
            message = decode_from_prefill(event.frames)
            if not isinstance(message, Renew):
                return event.peer, message

    async def send(self, peer: PeerId, message: DecodeMessage) -> None:
        await self._listener.send(peer, encode(message))

    async def send_raw(self, peer: PeerId, *frames: Frame) -> None:
        await self._listener.send(peer, frames)

    async def greet(self, *, credit_bytes: int = 2**20, credit_chunks: int = 32) -> PeerId:
        """Answers a Hello."""
        peer, message = await self.receive()
        assert isinstance(message, Hello)
        await self.send(peer, Ready(identity=self._me, credit_bytes=credit_bytes, credit_chunks=credit_chunks))
        return peer


@asynccontextmanager
async def scripted_decode(transport: Transport, *, me: HandoffIdentity | None = None) -> AsyncIterator[ScriptedDecode]:
    listener = transport.listen()
    try:
        async with asyncio.timeout(LONG_S):
            yield ScriptedDecode(listener, me or identity("decode-instance"))
    finally:
        await listener.close()


class ScriptedPrefill:
    """The prefill side of the protocol, played by the test message by message."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def send(self, message: PrefillMessage, *payloads: Frame) -> None:
        await self._link.send(encode(message, *payloads))

    async def send_raw(self, *frames: Frame) -> None:
        await self._link.send(frames)

    async def receive(self) -> DecodeMessage:
        return decode_from_decode(await self._link.receive())

    async def greet(self, me: HandoffIdentity | None = None) -> DecodeMessage:
        await self.send(Hello(identity=me or identity("prefill-instance")))
        return await self.receive()


@asynccontextmanager
async def scripted_prefill(transport: Transport, endpoint: str) -> AsyncIterator[ScriptedPrefill]:
    connector = transport.connector()
    try:
        async with asyncio.timeout(LONG_S):
            yield ScriptedPrefill(connector.connect(endpoint))
    finally:
        await connector.close()
