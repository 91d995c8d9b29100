"""Peers that are silent, broken or of another kind: every wait ends in time, with an error that says what is wrong."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.engine.request import RequestId
from common.errors import (
    HandoffCorruptError,
    HandoffError,
    HandoffRefusedError,
    HandoffTimeoutError,
    MoerelayError,
    OverloadedError,
)
from common.handoff.frames import MAX_HEADER_BYTES, ChunkFrames
from common.handoff.lease import LeaseRef
from common.handoff.messages import (
    MAX_REASON_CHARS,
    Abort,
    Chunk,
    Close,
    Credit,
    Done,
    FailureKind,
    HandoffIdentity,
    Hello,
    Ready,
    Refuse,
    Reject,
    Renew,
    TransferId,
)
from common.handoff.outgoing import MAX_TRANSFERS
from common.handoff.payload import OFFLOAD_BYTES, read_payload
from common.kv.copies import SlotArray
from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore
from common.model.native.interface import Memory
from tests.contract.rig import (
    FIRST_TOKENS,
    MEDIUM_S,
    ROUTING,
    SHORT_S,
    Decode,
    ScriptedPrefill,
    decode_worker,
    fill_store,
    hand_off,
    identity,
    make_store,
    prefill_worker,
    scripted_decode,
    scripted_prefill,
    slot_bits,
)
from tests.contract.transports import Transport

pytestmark = pytest.mark.usefixtures("patient_sockets")

#: One different value for every field that both sides must agree on.
DIFFERENCES: dict[str, Any] = {
    "protocol_version": 6,
    "fingerprint": "beef",
    "weight_version": "8",
    "numerics": "avx2 torch-2.13",
    "dtype": "float32",
    "block_size": 8,
    "num_layers": 3,
    "num_kv_planes": 1,
    "num_kv_heads": 4,
    "head_dim": 8,
    "routing_dtype": "uint8",
    "top_k": 4,
    "num_experts": 257,
    "routing_enabled": False,
    "max_model_len": 64,
}


def test_the_list_of_differences_is_complete() -> None:
    assert DIFFERENCES.keys() == set(HandoffIdentity.__struct_fields__) - {"instance_id"}


@pytest.mark.parametrize("field", DIFFERENCES)
async def test_unequal_workers_are_refused_in_words(transport: Transport, field: str) -> None:
    other = identity("prefill-instance", **{field: DIFFERENCES[field]})
    async with decode_worker(transport) as decode, prefill_worker(transport, me=other) as sender:
        _, lease = decode.grant([3], 4)
        with pytest.raises(HandoffRefusedError) as refused:
            await hand_off(sender, lease, [1], [4])
    for word in (field, repr(DIFFERENCES[field]), repr(getattr(identity("x"), field))):
        assert word in refused.value.message


async def test_the_prefill_worker_checks_the_answer_too(transport: Transport) -> None:
    me = identity("decode-instance", weight_version="8")
    async with scripted_decode(transport, me=me) as decode, prefill_worker(transport) as sender:
        sending = asyncio.ensure_future(hand_off(sender, decode.lease(), [1], [4]))
        await decode.greet()
        with pytest.raises(HandoffRefusedError, match="weight_version"):
            await sending


async def test_a_lease_of_a_process_that_was_replaced_is_refused(transport: Transport) -> None:
    async with decode_worker(transport, me=identity("new-instance")) as decode, prefill_worker(transport) as sender:
        _, lease = decode.grant([3], 4)
        stale = replace(lease, instance_id="old-instance")
        with pytest.raises(HandoffRefusedError, match=r"old-instance.*new-instance"):
            await hand_off(sender, stale, [1], [4])
        await hand_off(sender, lease, [1], [4])
        assert sender.num_connections == 1


async def test_a_silent_peer_fails_the_handshake_in_time(transport: Transport) -> None:
    async with scripted_decode(transport) as decode, prefill_worker(transport, timeout_s=SHORT_S) as sender:
        with pytest.raises(HandoffTimeoutError, match="handshake"):
            await hand_off(sender, decode.lease(), [1], [4])
        assert (sender.num_active, sender.num_connections) == (0, 0)


@pytest.mark.parametrize(("sender_s", "lease_s"), [(MEDIUM_S, 60.0), (60.0, SHORT_S)])
async def test_missing_credit_is_a_timeout(transport: Transport, sender_s: float, lease_s: float) -> None:
    async with scripted_decode(transport) as decode, prefill_worker(transport, timeout_s=sender_s) as sender:
        lease = decode.lease(timeout_s=lease_s)
        sending = asyncio.ensure_future(hand_off(sender, lease, [1], [1, 2, 3]))
        await decode.greet(credit_chunks=2)
        with pytest.raises(HandoffTimeoutError, match="credit"):
            await sending
        _, first = await decode.receive()
        _, second = await decode.receive()
        _, abort = await decode.receive()
        assert isinstance(first, ChunkFrames)
        assert isinstance(second, ChunkFrames)
        assert isinstance(abort, Abort)
        assert "credit" in abort.reason


async def test_a_missing_acknowledgement_is_a_timeout(transport: Transport) -> None:
    async with scripted_decode(transport) as decode, prefill_worker(transport) as sender:
        sending = asyncio.ensure_future(hand_off(sender, decode.lease(timeout_s=SHORT_S), [1], [4]))
        await decode.greet()
        with pytest.raises(HandoffTimeoutError, match="acknowledge"):
            await sending
        assert sender.num_active == 0


async def test_a_transfer_without_credit_does_not_hold_up_another(transport: Transport) -> None:
    async with scripted_decode(transport) as decode, prefill_worker(transport) as sender:
        stalled_lease, free_lease = decode.lease(), decode.lease()
        stalled = asyncio.ensure_future(hand_off(sender, stalled_lease, [1], [1, 2]))
        peer = await decode.greet(credit_chunks=1)
        await decode.receive()
        free = asyncio.ensure_future(hand_off(sender, free_lease, [1], [1, 2]))
        for _ in range(2):
            _, frames = await decode.receive()
            assert isinstance(frames, ChunkFrames)
            chunk = frames.header
            assert chunk.transfer_id == free_lease.transfer_id
            returned = chunk.kv_bytes + chunk.rows_bytes
            await decode.send(
                peer,
                Credit(transfer_id=chunk.transfer_id, generation=chunk.generation, num_bytes=returned, num_chunks=1),
            )
        _, close = await decode.receive()
        assert isinstance(close, Close)
        await decode.send(peer, Done(transfer_id=close.transfer_id, generation=close.generation))
        await free
        assert not stalled.done()
        stalled.cancel()
        await asyncio.wait([stalled])


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.REFUSED, HandoffRefusedError),
        (FailureKind.CORRUPT, HandoffCorruptError),
        (FailureKind.TIMEOUT, HandoffTimeoutError),
        (FailureKind.ABORTED, HandoffError),
    ],
)
async def test_a_rejection_keeps_its_kind(transport: Transport, kind: FailureKind, error: type[MoerelayError]) -> None:
    async with scripted_decode(transport) as decode, prefill_worker(transport) as sender:
        lease = decode.lease()
        sending = asyncio.ensure_future(hand_off(sender, lease, [1], [4]))
        peer = await decode.greet()
        await decode.receive()
        reject = Reject(transfer_id=lease.transfer_id, generation=lease.generation, kind=kind, reason="because")
        await decode.send(peer, reject)
        with pytest.raises(error, match="because") as raised:
            await sending
        assert type(raised.value) is error


@pytest.mark.parametrize("answer", ["too much credit", "done too early", "no message", "ready again", "refuse"])
async def test_answers_that_make_no_sense_fail_the_transfer(transport: Transport, answer: str) -> None:
    async with scripted_decode(transport) as decode, prefill_worker(transport) as sender:
        lease = decode.lease()

        async def wait_for_answer() -> None:
            async with sender.transfer(lease, routing=True) as transfer:
                for end in range(1, 3):
                    await transfer.send_range([BlockId(1)], end - 1, end)

        sending = asyncio.ensure_future(wait_for_answer())
        peer = await decode.greet(credit_chunks=1)
        await decode.receive()
        address: dict[str, Any] = {"transfer_id": lease.transfer_id, "generation": lease.generation}
        if answer == "too much credit":
            await decode.send(peer, Credit(num_bytes=2**30, num_chunks=1, **address))
        elif answer == "done too early":
            await decode.send(peer, Done(**address))
        elif answer == "ready again":
            await decode.send(peer, Ready(identity=identity("decode-instance"), credit_bytes=1, credit_chunks=1))
        elif answer == "refuse":
            await decode.send(peer, Refuse(reason="I do not like you"))
        else:
            await decode.send_raw(peer, b"\xc1")
        with pytest.raises(HandoffRefusedError if answer == "refuse" else HandoffCorruptError):
            await sending
        assert sender.num_active == 0


# What a prefill worker can do wrong, seen from the decode worker.


def chunk_of(lease: LeaseRef, store: KVStore, first: int, last: int, /, **changes: Any) -> tuple[Chunk, Any, Any, Any]:
    payload = read_payload(store, [BlockId(1), BlockId(2)], first, last, routing=True)
    header = Chunk(
        transfer_id=lease.transfer_id,
        generation=lease.generation,
        seq=0,
        start=first,
        end=last,
        kv_bytes=payload.kv.nbytes,
        rows_bytes=payload.rows.nbytes,
        scores_bytes=payload.scores.nbytes,
        kv_checksum=payload.kv_checksum,
        rows_checksum=payload.rows_checksum,
        scores_checksum=payload.scores_checksum,
    )
    return msgspec.structs.replace(header, **changes), payload.kv, payload.rows, payload.scores


def close_of(lease: LeaseRef, *, num_chunks: int) -> Close:
    return Close(
        transfer_id=lease.transfer_id,
        generation=lease.generation,
        num_chunks=num_chunks,
        num_computed=1,
        first_tokens=FIRST_TOKENS,
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kv_checksum": 1}, "checksum of the KV"),
        ({"rows_checksum": 1}, "checksum of the routing rows"),
        ({"scores_checksum": 1}, "checksum of the prompt logprobs"),
        ({"seq": 1}, "chunk 0 belongs"),
        ({"start": 1, "end": 5}, "must start at 0 and end by 8"),
        ({"start": 0, "end": 9}, "must start at 0 and end by 8"),
        ({"end": 3}, "belong"),
    ],
)
async def test_a_wrong_chunk_is_rejected_and_writes_nothing(
    transport: Transport, changes: dict[str, int], complaint: str
) -> None:
    target = make_store(seed=30)
    before = slot_bits(target).copy()
    async with decode_worker(transport, store=target) as decode:
        request_id, lease = decode.grant([3, 4], 8)
        async with scripted_prefill(transport, lease.endpoint) as prefill:
            await prefill.greet()
            await prefill.send(*chunk_of(lease, make_store(seed=31), 0, 4, **changes))
            reject = await prefill.receive()
            assert isinstance(reject, Reject)
            assert reject.kind is FailureKind.CORRUPT
            assert complaint in reject.reason
            assert isinstance(await decode.handler.outcome(request_id), HandoffCorruptError)
        decode.assert_idle()
    np.testing.assert_array_equal(slot_bits(target), before)


async def test_frames_of_another_generation_are_discarded_and_the_lease_lives_on(transport: Transport) -> None:
    source, target = make_store(seed=32), make_store(seed=33)
    before = slot_bits(target).copy()
    async with decode_worker(transport, store=target) as decode:
        request_id, lease = decode.grant([3, 4], 4)
        async with scripted_prefill(transport, lease.endpoint) as prefill:
            await prefill.greet()
            stale = lease.generation ^ 1
            await prefill.send(*chunk_of(lease, source, 0, 4, generation=stale))
            reject = await prefill.receive()
            assert isinstance(reject, Reject)
            assert (reject.kind, reject.generation) == (FailureKind.REFUSED, stale)
            np.testing.assert_array_equal(slot_bits(target), before)
            assert decode.receiver.num_discarded == 1
            await prefill.send(*chunk_of(lease, source, 0, 4))
            assert isinstance(await prefill.receive(), Credit)
            await prefill.send(close_of(lease, num_chunks=1))
            assert await prefill.receive() == Done(transfer_id=lease.transfer_id, generation=lease.generation)
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS


async def test_a_lease_belongs_to_the_connection_that_used_it_first(transport: Transport) -> None:
    source = make_store(seed=34)
    async with decode_worker(transport) as decode:
        _, lease = decode.grant([3, 4], 4)
        async with (
            scripted_prefill(transport, lease.endpoint) as owner,
            scripted_prefill(transport, lease.endpoint) as thief,
        ):
            await owner.greet()
            await thief.greet()
            await owner.send(*chunk_of(lease, source, 0, 2))
            assert isinstance(await owner.receive(), Credit)
            await thief.send(*chunk_of(lease, source, 2, 4, seq=1))
            assert isinstance(await thief.receive(), Reject)
            await owner.send(*chunk_of(lease, source, 2, 4, seq=1))
            assert isinstance(await owner.receive(), Credit)


@pytest.mark.parametrize("missing", [0, 1])
async def test_closing_too_early_is_rejected(transport: Transport, missing: int) -> None:
    async with decode_worker(transport) as decode:
        request_id, lease = decode.grant([3, 4], 4)
        async with scripted_prefill(transport, lease.endpoint) as prefill:
            await prefill.greet()
            await prefill.send(*chunk_of(lease, make_store(seed=35), 0, 4 - missing))
            assert isinstance(await prefill.receive(), Credit)
            await prefill.send(close_of(lease, num_chunks=2 - missing))
            reject = await prefill.receive()
            assert isinstance(reject, Reject)
            assert reject.kind is FailureKind.CORRUPT
        assert isinstance(await decode.handler.outcome(request_id), HandoffCorruptError)


async def test_a_sender_that_falls_silent_expires(transport: Transport) -> None:
    source = make_store(seed=36)
    async with (
        decode_worker(transport, timeout_s=MEDIUM_S) as decode,
        scripted_prefill(transport, decode.listener.endpoint) as prefill,
    ):
        await prefill.greet()
        request_id, lease = decode.grant([3, 4], 8)
        await prefill.send(*chunk_of(lease, source, 0, 4))
        assert isinstance(await prefill.receive(), Credit)
        assert isinstance(await decode.handler.outcome(request_id), HandoffTimeoutError)
        reject = await prefill.receive()
        assert isinstance(reject, Reject)
        assert reject.kind is FailureKind.TIMEOUT
        # What it sends afterwards is ignored.
        await prefill.send(close_of(lease, num_chunks=1))
        assert isinstance(await prefill.receive(), Reject)
        decode.assert_idle()


async def test_a_decode_worker_that_stood_still_hears_its_peers_before_it_gives_them_up(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What came during the pause is to be read between two checks.
    monkeypatch.setattr("common.handoff.receiver.EXPIRY_CHECKS_PER_TIMEOUT", 2)
    async with (
        decode_worker(transport, timeout_s=MEDIUM_S) as decode,
        scripted_prefill(transport, decode.listener.endpoint) as prefill,
    ):
        await prefill.greet()
        leases = [decode.grant([3 + number], 4)[1] for number in range(20)]
        nobody = replace(leases[0], transfer_id=TransferId(4711))
        # The connection takes all of them at once, and the other end reads none before the pause is over.
        for lease in (*leases, nobody):
            await prefill.send(Renew(transfer_id=lease.transfer_id, generation=lease.generation))
        time.sleep(1.2 * MEDIUM_S)  # noqa: ASYNC251  # the fault itself: nothing on this event loop may run meanwhile
        answer = await prefill.receive()
        assert isinstance(answer, Reject)
        assert answer.transfer_id == nobody.transfer_id, "the last message was read"
        assert decode.receiver.num_active == len(leases)


async def test_the_handshake_comes_first(transport: Transport) -> None:
    async with decode_worker(transport) as decode:
        _, lease = decode.grant([3, 4], 8)
        async with scripted_prefill(transport, lease.endpoint) as prefill:
            await prefill.send(Renew(transfer_id=lease.transfer_id, generation=lease.generation))
            answer = await prefill.receive()
            assert isinstance(answer, Refuse)
            assert "Hello" in answer.reason
            assert isinstance(await prefill.greet(), Ready)


async def test_a_newer_worker_is_refused_in_words_even_if_its_hello_has_more_fields(transport: Transport) -> None:
    hello = msgspec.to_builtins(Hello(identity=identity("prefill-instance", protocol_version=6)))
    hello["compression"] = {"zstd": [1, 2, 3]}
    hello["identity"]["sinks"] = 4
    async with (
        decode_worker(transport) as decode,
        scripted_prefill(transport, decode.listener.endpoint) as prefill,
    ):
        await prefill.send_raw(msgspec.msgpack.encode(hello))
        answer = await prefill.receive()
        assert isinstance(answer, Refuse)
        assert answer.reason == "the workers differ in protocol_version: 5 here, 6 on the other side"


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\x80", b"", b""], [b"junk", b"more junk"], [b"\x91" * 5_000]])
async def test_junk_ends_the_connection_and_its_handoffs(transport: Transport, frames: list[bytes]) -> None:
    async with decode_worker(transport) as decode:
        request_id, lease = decode.grant([3, 4], 8)
        async with scripted_prefill(transport, lease.endpoint) as prefill:
            await prefill.greet()
            await prefill.send(Renew(transfer_id=lease.transfer_id, generation=lease.generation))
            await prefill.send_raw(*frames)
            assert isinstance(await prefill.receive(), Refuse)
            assert isinstance(await decode.handler.outcome(request_id), HandoffCorruptError)
            assert decode.receiver.num_malformed == 1
        decode.assert_idle()


@pytest.mark.parametrize("greeted", [False, True])
async def test_a_huge_text_of_a_peer_is_answered_in_few_words(transport: Transport, greeted: bool) -> None:
    """A refusal that quoted all of it would exceed the header's limit and could not be sent."""
    huge = "x" * (MAX_HEADER_BYTES - 100)
    unknown = msgspec.msgpack.encode({"type": huge})
    stranger = msgspec.msgpack.encode(Hello(identity=identity("p", fingerprint="\x01" * (MAX_HEADER_BYTES // 2))))
    async with decode_worker(transport) as decode:
        for message in (unknown, stranger):
            async with scripted_prefill(transport, decode.listener.endpoint) as prefill:
                if greeted:
                    await prefill.greet()
                await prefill.send_raw(message)
                answer = await prefill.receive()
                assert isinstance(answer, Refuse)
                assert len(answer.reason) <= MAX_REASON_CHARS
        async with scripted_prefill(transport, decode.listener.endpoint) as prefill:
            assert isinstance(await prefill.greet(), Ready)
        decode.assert_idle()


async def test_more_handoffs_than_the_queues_are_made_for_are_refused(transport: Transport) -> None:
    async with decode_worker(transport, store=make_store(seed=37, num_blocks=MAX_TRANSFERS + 2)) as decode:
        for block in range(1, MAX_TRANSFERS + 1):
            decode.grant([block], 1)
        with pytest.raises(OverloadedError):
            decode.grant([MAX_TRANSFERS + 1], 1)


# Ends of a lease that come while a chunk is being written.

WIDE = KVLayout(num_layers=2, num_kv_heads=64, head_dim=2080, block_size=4, dtype=torch.bfloat16)
NUM_WIDE_BLOCKS = 6


class SlowStore(KVStore):
    """Its KV writes wait for `gate`, in whatever thread they run."""

    def __init__(self) -> None:
        super().__init__(WIDE, ROUTING, NUM_WIDE_BLOCKS, torch.device("cpu"))
        self.gate = threading.Event()
        self.writing = threading.Event()

    def write_kv_bytes(self, slots: SlotArray, source: Memory) -> None:
        self.writing.set()
        assert self.gate.wait(20)
        super().write_kv_bytes(slots, source)


async def started_write(decode: Decode, prefill: ScriptedPrefill, store: SlowStore) -> tuple[RequestId, LeaseRef]:
    """Sends a chunk into a new lease, and returns while it is being written."""
    source = fill_store(SlowStore(), 40)
    await prefill.greet()
    request_id, lease = decode.grant([3, 4], 8)
    await prefill.send(*chunk_of(lease, source, 0, 4))
    assert await asyncio.to_thread(store.writing.wait, 20)
    return request_id, lease


def wide_chunk_is_written_by_the_thread() -> bool:
    return 4 * WIDE.token_bytes > OFFLOAD_BYTES


async def test_revoking_waits_for_the_write_under_way(transport: Transport) -> None:
    assert wide_chunk_is_written_by_the_thread()
    store = SlowStore()
    async with (
        decode_worker(transport, store=store) as decode,
        scripted_prefill(transport, decode.listener.endpoint) as prefill,
    ):
        _, lease = await started_write(decode, prefill, store)
        revoking = asyncio.ensure_future(decode.receiver.revoke(lease.transfer_id))
        done, _ = await asyncio.wait([revoking], timeout=0.05)
        assert not done
        assert decode.receiver.num_active == 1
        assert decode.receiver.check_invariants() == []
        store.gate.set()
        await revoking
        decode.assert_idle()
        assert not decode.handler.outcomes
        assert not decode.handler.advanced
        assert isinstance(await prefill.receive(), Reject)


async def test_a_lease_that_expires_during_a_write_is_reported_after_it(transport: Transport) -> None:
    store = SlowStore()
    async with (
        decode_worker(transport, store=store, timeout_s=MEDIUM_S) as decode,
        scripted_prefill(transport, decode.listener.endpoint) as prefill,
    ):
        request_id, _ = await started_write(decode, prefill, store)
        other_id, _ = decode.grant([5], 4)
        assert isinstance(await decode.handler.outcome(other_id), HandoffTimeoutError)
        assert request_id not in decode.handler.outcomes
        assert decode.receiver.num_active == 1
        store.gate.set()
        assert isinstance(await decode.handler.outcome(request_id), HandoffTimeoutError)
        decode.assert_idle()


async def test_closing_the_receiver_waits_for_the_write_under_way(transport: Transport) -> None:
    store = SlowStore()
    context = decode_worker(transport, store=store)
    decode = await context.__aenter__()
    async with scripted_prefill(transport, decode.listener.endpoint) as prefill:
        request_id, _ = await started_write(decode, prefill, store)
        closing = asyncio.ensure_future(context.__aexit__(None, None, None))
        done, _ = await asyncio.wait([closing], timeout=0.05)
        assert not done
        store.gate.set()
        await closing
    outcome = decode.handler.outcomes[request_id]
    assert isinstance(outcome, HandoffError)
    assert "shutting down" in outcome.message
    decode.assert_idle()
