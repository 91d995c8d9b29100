"""Whole handoffs over every transport: what arrives, what never does, and how each side learns that it broke."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import (
    HandoffCorruptError,
    HandoffError,
    HandoffRefusedError,
    HandoffTimeoutError,
    RoutingMissingError,
    WorkerLostError,
)
from common.handoff.lease import LeaseRef
from common.handoff.messages import HandoffIdentity
from common.handoff.outgoing import CREDIT_CHUNKS
from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore
from common.prompt_logprobs import PromptLogprobs, empty
from tests.contract.rig import (
    BLOCK_SIZE,
    FIRST_TOKENS,
    LONG_S,
    MEDIUM_S,
    NUM_BLOCKS,
    ROUTING,
    ROW_BYTES,
    SHORT_S,
    TOKEN_BYTES,
    decode_worker,
    hand_off,
    identity,
    make_store,
    prefill_worker,
    slot_bits,
    slots,
)
from tests.contract.transports import Transport

pytestmark = pytest.mark.usefixtures("patient_sockets")


def random_ends(generator: np.random.Generator, start: int, end: int) -> list[int]:
    """Where the ranges of one transfer end: any cut of [start, end)."""
    inner = generator.integers(start, end + 1, generator.integers(0, 5))
    return sorted({*inner.tolist(), end})


def disjoint_blocks(generator: np.random.Generator, sizes: list[int]) -> Iterator[list[int]]:
    """Block lists of the given lengths, in random order, that share nothing."""
    order = iter((generator.permutation(NUM_BLOCKS - 1) + 1).tolist())
    for size in sizes:
        yield list(itertools.islice(order, size))


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 33])
async def test_a_handoff_arrives_bit_for_bit_and_touches_nothing_else(transport: Transport, num_tokens: int) -> None:
    generator = np.random.default_rng(num_tokens)
    source, target = make_store(seed=10), make_store(seed=11)
    before = slot_bits(target).copy()
    size = -(-num_tokens // BLOCK_SIZE)
    theirs, ours = disjoint_blocks(generator, [size, size])
    async with decode_worker(transport, store=target) as decode, prefill_worker(transport, store=source) as sender:
        request_id, lease = decode.grant(ours, num_tokens)
        await hand_off(sender, lease, theirs, random_ends(generator, 0, num_tokens))
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        assert decode.handler.advanced[request_id][-1] == num_tokens
        assert decode.receiver.bytes_received == num_tokens * (TOKEN_BYTES + ROW_BYTES)
        assert decode.receiver.rows_received == num_tokens
        decode.assert_idle()
    written = slots(ours, 0, num_tokens)
    expected = before
    expected[written] = slot_bits(source)[slots(theirs, 0, num_tokens)]
    # The slots behind the prompt in its last block hold what they held: a stale tail never travels.
    np.testing.assert_array_equal(slot_bits(target), expected)


async def test_many_handoffs_share_one_connection(transport: Transport) -> None:
    generator = np.random.default_rng(5)
    source, target = make_store(seed=12), make_store(seed=13)
    sizes = [1, 2, 3, 4, 5, 6, 7, 8]
    lengths = [int(generator.integers((size - 1) * BLOCK_SIZE + 1, size * BLOCK_SIZE + 1)) for size in sizes]
    theirs, ours = list(disjoint_blocks(generator, sizes)), list(disjoint_blocks(generator, sizes))
    async with (
        decode_worker(transport, store=target, credit_bytes=3 * (TOKEN_BYTES + ROW_BYTES)) as decode,
        prefill_worker(transport, store=source) as sender,
    ):
        granted = [decode.grant(blocks, length) for blocks, length in zip(ours, lengths, strict=True)]
        async with asyncio.TaskGroup() as transfers:
            for (_, lease), blocks, length in zip(granted, theirs, lengths, strict=True):
                transfers.create_task(hand_off(sender, lease, blocks, random_ends(generator, 0, length)))
        assert sender.num_connections == 1
        for (request_id, _), mine, blocks, length in zip(granted, ours, theirs, lengths, strict=True):
            assert await decode.handler.outcome(request_id) == FIRST_TOKENS
            np.testing.assert_array_equal(
                slot_bits(target)[slots(mine, 0, length)], slot_bits(source)[slots(blocks, 0, length)]
            )
        decode.assert_idle()
        assert sender.num_active == 0


async def test_cached_tokens_stay_where_they_are(transport: Transport) -> None:
    source, target = make_store(seed=14), make_store(seed=15)
    before = slot_bits(target).copy()
    async with decode_worker(transport, store=target) as decode, prefill_worker(transport, store=source) as sender:
        request_id, lease = decode.grant([5, 6, 7], 10, num_cached=8)
        async with sender.transfer(lease, routing=True) as transfer:
            # The prefill worker computed from position 0; those that the decode worker has are skipped.
            await transfer.send_range([BlockId(1), BlockId(2), BlockId(3)], 0, 6)
            await transfer.send_range([BlockId(1), BlockId(2), BlockId(3)], 0, 10)
            await transfer.finish(FIRST_TOKENS, 1)
            assert transfer.num_bytes_sent == 2 * (TOKEN_BYTES + ROW_BYTES)
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        # What it did not compute, it says with the last message: all but one.
        assert decode.handler.num_cached == {request_id: 9}
    before[slots([5, 6, 7], 8, 10)] = slot_bits(source)[slots([1, 2, 3], 8, 10)]
    np.testing.assert_array_equal(slot_bits(target), before)


async def test_a_prompt_that_is_cached_whole_needs_only_the_first_token(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport) as sender:
        request_id, lease = decode.grant([5, 6], 8, num_cached=8)
        await hand_off(sender, lease, [1, 2], [])
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        assert decode.receiver.bytes_received == 0


def numbered_logprobs(num_tokens: int, num_top: int) -> PromptLogprobs:
    """Every entry another one; zeros at position 0."""
    entries = empty(num_tokens, num_top)
    numbers = np.arange(entries.size).reshape(entries.shape)
    entries["token_id"], entries["logprob"], entries["rank"] = numbers, -numbers / 7, numbers + 1
    entries[0] = 0
    return entries


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("num_cached", [0, 8])
@pytest.mark.parametrize("routing", [True, False])
async def test_prompt_logprobs_arrive_in_order_and_before_the_first_tokens(
    transport: Transport, num_top: int, num_cached: int, routing: bool
) -> None:
    """Those of cached positions too; a credit of three tokens cuts them into many chunks."""
    source, target = make_store(seed=18), make_store(seed=19)
    entries = numbered_logprobs(10, num_top)
    async with (
        decode_worker(transport, store=target, credit_bytes=3 * (TOKEN_BYTES + ROW_BYTES)) as decode,
        prefill_worker(transport, store=source) as sender,
    ):
        request_id, lease = decode.grant([5, 6, 7], 10, num_cached=num_cached, routing=routing, num_top=num_top)
        async with sender.transfer(lease, routing=routing, num_top=num_top) as transfer:
            # As an engine tells them: with positions [0, e) come the entries of [0, e].
            await transfer.send_range([BlockId(1), BlockId(2), BlockId(3)], 0, 6, PromptLogprobs(entries[:7]))
            await transfer.send_range([BlockId(1), BlockId(2), BlockId(3)], 6, 10, PromptLogprobs(entries[7:]))
            await transfer.finish(FIRST_TOKENS, 1)
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        arrived = np.concatenate(decode.handler.logprobs[request_id])
        assert arrived.tobytes() == entries.tobytes()
        assert decode.receiver.bytes_received == transfer.num_bytes_sent
        decode.assert_idle()
    mine, theirs = slots([5, 6, 7], num_cached, 10), slots([1, 2, 3], num_cached, 10)
    if routing:
        np.testing.assert_array_equal(slot_bits(target)[mine], slot_bits(source)[theirs])


async def test_a_handoff_that_lacks_prompt_logprobs_is_rejected(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport) as sender:
        request_id, lease = decode.grant([5], 4, num_top=0)
        async with sender.transfer(lease, routing=True, num_top=0) as transfer:
            await transfer.send_range([BlockId(1)], 0, 4, PromptLogprobs(numbered_logprobs(4, 0)[:3]))
            with pytest.raises(HandoffCorruptError, match="logprobs of 3 of 4 positions"):
                await transfer.finish(FIRST_TOKENS, 1)
        assert isinstance(await decode.handler.outcome(request_id), HandoffCorruptError)
        decode.assert_idle()


async def test_first_tokens_of_weights_that_the_decode_worker_never_had_are_refused(transport: Transport) -> None:
    async with (
        decode_worker(transport, known_versions=["", "v0"]) as decode,
        prefill_worker(transport) as sender,
    ):
        request_id, lease = decode.grant([5], 4)
        with pytest.raises(HandoffRefusedError, match="weights 'v1'"):
            await hand_off(sender, lease, [1], [4])
        assert isinstance(await decode.handler.outcome(request_id), HandoffRefusedError)
        decode.assert_idle()


async def test_a_connection_outlives_new_weights_and_a_new_one_compares_them(transport: Transport) -> None:
    in_use = ["1"]

    def named(instance_id: str) -> HandoffIdentity:
        return identity(instance_id, weight_version=in_use[-1])

    async with (
        decode_worker(transport, me=lambda: named("decode-instance")) as decode,
        prefill_worker(transport, me=lambda: named("prefill-instance")) as sender,
        prefill_worker(transport, me=identity("other", weight_version="1")) as stale,
    ):
        for version in ("1", "2"):
            in_use.append(version)
            request_id, lease = decode.grant([5], 4)
            await hand_off(sender, lease, [1], [4])
            assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        _, lease = decode.grant([5], 4)
        with pytest.raises(HandoffRefusedError, match="weight_version: '2' here, '1' on the other side"):
            await hand_off(stale, lease, [1], [4])
        await decode.receiver.revoke(lease.transfer_id)


async def test_without_routing_no_rows_travel(transport: Transport) -> None:
    target = make_store(seed=16)
    rows = target.rows_SLK.copy()
    source = KVStore(target.layout, ROUTING, NUM_BLOCKS, torch.device("cpu"))  # no row was ever recorded in it
    async with decode_worker(transport, store=target) as decode, prefill_worker(transport, store=source) as sender:
        request_id, lease = decode.grant([3, 4], 7, routing=False)
        await hand_off(sender, lease, [1, 2], [3, 7], routing=False)
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        assert decode.receiver.bytes_received == 7 * TOKEN_BYTES
        assert decode.receiver.rows_received == 0
    np.testing.assert_array_equal(target.rows_SLK, rows)
    assert not target.kv_LCSGD[:, :, slots([3, 4], 0, 7)].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_large_payloads_go_through_threads_in_several_chunks(transport: Transport, dtype: torch.dtype) -> None:
    layout = KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, block_size=BLOCK_SIZE, dtype=dtype)
    source, target = make_store(seed=17, layout=layout), make_store(seed=18, layout=layout)
    async with (
        decode_worker(transport, store=target, credit_bytes=2**19) as decode,
        prefill_worker(transport, store=source) as sender,
    ):
        request_id, lease = decode.grant(range(1, 31), 119)
        await hand_off(sender, lease, range(9, 39), [119])
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        assert len(decode.handler.advanced[request_id]) > 1
    np.testing.assert_array_equal(
        slot_bits(target)[slots(range(1, 31), 0, 119)], slot_bits(source)[slots(range(9, 39), 0, 119)]
    )


async def test_leaving_half_way_aborts_the_handoff(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport) as sender:
        request_id, lease = decode.grant([3, 4], 8)

        async def broken() -> None:
            async with sender.transfer(lease, routing=True) as transfer:
                await transfer.send_range([BlockId(1), BlockId(2)], 0, 4)
                raise RuntimeError("the forward pass broke")

        with pytest.raises(RuntimeError, match="the forward pass broke"):
            await broken()
        outcome = await decode.handler.outcome(request_id)
        assert isinstance(outcome, HandoffError)
        assert "gave up" in outcome.message
        decode.assert_idle()
        assert sender.num_active == 0


async def test_cancelling_a_transfer_aborts_the_handoff(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport) as sender:
        request_id, lease = decode.grant([3, 4], 8)
        started = asyncio.Event()

        async def stuck() -> None:
            async with sender.transfer(lease, routing=True) as transfer:
                await transfer.send_range([BlockId(1), BlockId(2)], 0, 4)
                started.set()
                await asyncio.Event().wait()

        task = asyncio.ensure_future(stuck())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert isinstance(await decode.handler.outcome(request_id), HandoffError)
        decode.assert_idle()


async def test_a_transfer_leaves_no_task_behind(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport) as sender:
        counts = []
        for _ in range(5):
            _, lease = decode.grant([3], 4)
            await hand_off(sender, lease, [1], [4])
            await asyncio.sleep(0)  # a cancelled task ends in the next turn of the loop
            await asyncio.sleep(0)
            counts.append(len(asyncio.all_tasks()))
        assert len(set(counts)) == 1


async def test_cancelling_at_any_moment_leaves_nothing_behind(transport: Transport) -> None:
    generator = np.random.default_rng(24)
    source, target = make_store(seed=25), make_store(seed=26)
    async with (
        decode_worker(transport, store=target, credit_bytes=3 * (TOKEN_BYTES + ROW_BYTES)) as decode,
        prefill_worker(transport, store=source) as sender,
    ):
        for _ in range(40):
            _, lease = decode.grant([3, 4, 5, 6], 16)
            victim = asyncio.ensure_future(hand_off(sender, lease, [1, 2, 7, 8], random_ends(generator, 0, 16)))
            await asyncio.wait([victim], timeout=float(generator.uniform(0, 0.01)))
            victim.cancel()
            await asyncio.wait([victim])
            await decode.receiver.revoke(lease.transfer_id)
            # The same blocks at once for another request: whatever the victim still has under way must not reach them.
            request_id, lease = decode.grant([3, 4, 5, 6], 16)
            await hand_off(sender, lease, [11, 12, 13, 14], random_ends(generator, 0, 16))
            assert await decode.handler.outcome(request_id) == FIRST_TOKENS
            np.testing.assert_array_equal(
                slot_bits(target)[slots([3, 4, 5, 6], 0, 16)], slot_bits(source)[slots([11, 12, 13, 14], 0, 16)]
            )
            decode.assert_idle()
            assert (sender.num_active, sender.num_connections) == (0, 1)


async def test_leaving_without_the_first_token_aborts_the_handoff(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport) as sender:
        request_id, lease = decode.grant([3, 4], 8)
        async with sender.transfer(lease, routing=True):
            pass
        outcome = await decode.handler.outcome(request_id)
        assert isinstance(outcome, HandoffError)
        assert "never finished" in outcome.message


async def test_a_revoked_lease_takes_no_more_writes_and_tells_the_sender(transport: Transport) -> None:
    """The shape of the worst bug of this kind: blocks of an aborted handoff go to another request at once."""
    target = make_store(seed=19)
    async with decode_worker(transport, store=target) as decode, prefill_worker(transport) as sender:
        revoked_id, revoked = decode.grant([3, 4, 5], 12)
        async with sender.transfer(revoked, routing=True) as old:
            await old.send_range([BlockId(1), BlockId(2), BlockId(6)], 0, 6)
            await decode.handler.advance(revoked_id, 6)
            await decode.receiver.revoke(revoked.transfer_id)
            assert decode.receiver.num_active == 0
            request_id, lease = decode.grant([3, 4, 5], 12)
            await hand_off(sender, lease, [7, 8, 9], [12])
            after = slot_bits(target).copy()
            with pytest.raises(HandoffError, match="revoked"):
                await old.send_range([BlockId(1), BlockId(2), BlockId(6)], 6, 12)
        assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        assert revoked_id not in decode.handler.outcomes
        np.testing.assert_array_equal(slot_bits(target), after)
        decode.assert_idle()


async def test_revoking_a_lease_that_nobody_uses_or_that_is_gone_is_harmless(transport: Transport) -> None:
    async with decode_worker(transport) as decode:
        _, lease = decode.grant([3], 2)
        await decode.receiver.revoke(lease.transfer_id)
        await decode.receiver.revoke(lease.transfer_id)
        decode.assert_idle()


async def test_a_lease_that_nobody_uses_expires(transport: Transport) -> None:
    async with decode_worker(transport, timeout_s=SHORT_S) as decode, asyncio.timeout(LONG_S):
        request_id, _ = decode.grant([3], 2)
        assert isinstance(await decode.handler.outcome(request_id), HandoffTimeoutError)
        decode.assert_idle()


async def test_a_late_transfer_is_refused_and_writes_nothing(transport: Transport) -> None:
    target = make_store(seed=20)
    before = slot_bits(target).copy()
    async with decode_worker(transport, store=target) as decode, prefill_worker(transport) as sender:
        _, lease = decode.grant([3], 4)
        await decode.receiver.revoke(lease.transfer_id)
        with pytest.raises(HandoffRefusedError, match="no lease"):
            await hand_off(sender, lease, [1], [4])
        assert decode.receiver.num_discarded > 0
    np.testing.assert_array_equal(slot_bits(target), before)


async def test_a_prompt_that_waits_for_its_turn_keeps_its_lease(transport: Transport) -> None:
    async with decode_worker(transport, timeout_s=MEDIUM_S) as decode, prefill_worker(transport) as sender:
        waiting_id, waiting = decode.grant([3], 4)
        async with sender.transfer(waiting, routing=True) as transfer:
            # A lease that is not renewed marks the time: once it has expired, the other one was past its deadline too.
            unused_id, _ = decode.grant([4], 4)
            assert isinstance(await decode.handler.outcome(unused_id), HandoffTimeoutError)
            await transfer.send_range([BlockId(1)], 0, 4)
            await transfer.finish(FIRST_TOKENS, 1)
        assert await decode.handler.outcome(waiting_id) == FIRST_TOKENS


async def test_a_prefill_worker_that_closes_fails_its_handoffs_at_once(transport: Transport) -> None:
    async with decode_worker(transport, timeout_s=3 * LONG_S) as decode:
        request_id, lease = decode.grant([3, 4], 8)
        async with asyncio.timeout(LONG_S):
            async with prefill_worker(transport) as sender:
                context = sender.transfer(lease, routing=True)
                transfer = await context.__aenter__()
                await transfer.send_range([BlockId(1), BlockId(2)], 0, 4)
                await decode.handler.advance(request_id, 4)
            assert isinstance(await decode.handler.outcome(request_id), HandoffError)
        with pytest.raises(WorkerLostError):
            await transfer.send_range([BlockId(1), BlockId(2)], 4, 8)
        await context.__aexit__(None, None, None)
        decode.assert_idle()


async def test_a_decode_worker_that_goes_away_fails_its_handoffs_at_once(transport: Transport) -> None:
    async with prefill_worker(transport, timeout_s=3 * LONG_S) as sender:
        async with decode_worker(transport, timeout_s=3 * LONG_S) as decode:
            _, lease = decode.grant([3, 4], 8)
            context = sender.transfer(lease, routing=True)
            transfer = await context.__aenter__()
            await transfer.send_range([BlockId(1), BlockId(2)], 0, 4)
        with pytest.raises((WorkerLostError, HandoffError)):
            async with asyncio.timeout(LONG_S):
                await transfer.finish(FIRST_TOKENS, 1)
        await context.__aexit__(None, None, None)
        assert sender.num_active == 0


async def test_a_decode_worker_that_restarts_at_its_address_gets_the_next_handoff(transport: Transport) -> None:
    async with prefill_worker(transport) as sender:
        endpoint = None
        for number in range(5):
            me = identity(f"decode-instance-{number}")
            async with decode_worker(transport, endpoint=endpoint, me=me) as decode:
                request_id, lease = decode.grant([3, 4], 8)
                endpoint = lease.endpoint
                await hand_off(sender, lease, [1, 2], [8])
                assert await decode.handler.outcome(request_id) == FIRST_TOKENS
                assert sender.num_connections == 1


async def test_one_lease_takes_one_transfer(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport) as sender:
        _, lease = decode.grant([3, 4], 8)
        async with sender.transfer(lease, routing=True):
            with pytest.raises(HandoffRefusedError, match="in use"):
                await hand_off(sender, lease, [1, 2], [8])


async def test_a_missing_row_ends_the_handoff_on_both_sides(transport: Transport) -> None:
    source = make_store(seed=21)
    source.free_blocks([BlockId(2)])
    async with decode_worker(transport) as decode, prefill_worker(transport, store=source) as sender:
        request_id, lease = decode.grant([3, 4], 8)
        with pytest.raises(RoutingMissingError):
            await hand_off(sender, lease, [1, 2], [8])
        assert isinstance(await decode.handler.outcome(request_id), HandoffError)
        decode.assert_idle()


async def test_over_a_thousand_chunks_survive_a_receiver_that_stalls(transport: Transport) -> None:
    num_transfers, num_tokens = 40, 40
    source, target = make_store(seed=22), make_store(seed=23, num_blocks=401)
    theirs = [BlockId(block) for block in range(1, 11)]
    gate = asyncio.Event()
    gate.set()
    async with (
        decode_worker(transport, store=target, gate=gate) as decode,
        prefill_worker(transport, store=source) as sender,
    ):
        granted = [decode.grant(range(10 * n + 1, 10 * n + 11), num_tokens) for n in range(num_transfers)]
        stalled = asyncio.Barrier(num_transfers + 1)

        async def token_by_token(lease: LeaseRef) -> None:
            async with sender.transfer(lease, routing=True) as transfer:
                await stalled.wait()
                await stalled.wait()
                for end in range(1, num_tokens + 1):
                    if end == CREDIT_CHUNKS + 1:
                        await stalled.wait()
                    await transfer.send_range(theirs, end - 1, end)
                await transfer.finish(FIRST_TOKENS, 1)

        async with asyncio.TaskGroup() as transfers:
            for _, lease in granted:
                transfers.create_task(token_by_token(lease))
            await stalled.wait()
            gate.clear()
            await stalled.wait()
            await stalled.wait()
            assert not decode.handler.outcomes
            gate.set()
        assert num_transfers * CREDIT_CHUNKS > 1_000
        for request_id, _ in granted:
            assert await decode.handler.outcome(request_id) == FIRST_TOKENS
        decode.assert_idle()
    expected = np.tile(slot_bits(source)[BLOCK_SIZE : BLOCK_SIZE + num_tokens], (num_transfers, 1))
    np.testing.assert_array_equal(slot_bits(target)[BLOCK_SIZE:], expected)


async def test_too_small_a_credit_is_refused_in_words(transport: Transport) -> None:
    async with decode_worker(transport, credit_bytes=TOKEN_BYTES) as decode, prefill_worker(transport) as sender:
        _, lease = decode.grant([3], 4)
        with pytest.raises(HandoffRefusedError, match="handoff-credit-bytes"):
            await hand_off(sender, lease, [1], [4])


async def test_nobody_at_the_endpoint_is_a_lost_worker(transport: Transport) -> None:
    async with decode_worker(transport) as decode, prefill_worker(transport, timeout_s=3 * LONG_S) as sender:
        _, lease = decode.grant([3], 4)
        async with asyncio.timeout(LONG_S):
            with pytest.raises(WorkerLostError):
                await hand_off(sender, replace(lease, endpoint=transport.unused_endpoint()), [1], [4])
        assert sender.num_active == 0
