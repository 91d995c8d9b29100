"""The feed of a decode worker in the router: whoever follows gets its own, in order, or an error."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from common.errors import InternalError, MoerelayError, WorkerLostError
from common.messages import sampling_to_pb
from common.pb import decode_pb2, types_pb2
from common.sampling import SamplingParams
from router.calls import task_group
from router.chunk import Chunk
from router.decode_stream import DecodeStream
from router.feed import WINDOW_CHUNKS
from router.keys import FLEET, LIVE
from router.worker import Worker
from tests.fakes.fake_workers import FakeWorker, Script, description, expected_rows, expected_tokens, serving
from tests.unit.router.cluster import (
    GENERATE,
    HEARTBEAT_S,
    all_opened,
    choice_events,
    joined_rows,
    joined_tokens,
    opened,
    parse_events,
    running,
    split_events,
    strict_json,
)

PROMPT = list(range(3, 40))
LONG = description(max_model_len=4096)
#: A prompt's rows of this model do not fit into a chunk for the feed.
BIG = description(num_layers=48, top_k=8, num_experts=128, max_model_len=4096)


def body(max_tokens: int, **more: object) -> dict[str, object]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": max_tokens, "ignore_eos": True, **more}}


@pytest.mark.parametrize("model", [LONG, BIG], ids=["small", "large first"])
@pytest.mark.parametrize("both", [True, False])
async def test_streams_through_a_feed_hold_what_others_do(model: types_pb2.ModelDescription, both: bool) -> None:
    """`n` choices at once, more chunks than the window has; the rows of the prompt may be too large for the feed."""
    num_tokens = WINDOW_CHUNKS + 10
    async with running(Script(model), both=both) as cluster:
        await all_opened(cluster)
        events = parse_events(await cluster.stream(body(num_tokens, n=2)))
        [feed] = cluster.decode[0].feeds
        num_large = 2 if model is BIG else 0
        assert feed.num_chunks == 2 * num_tokens - num_large
    for index in range(2):
        choices = choice_events(events, index)
        assert joined_tokens(choices) == expected_tokens(PROMPT, num_tokens, index)
        np.testing.assert_array_equal(joined_rows(choices), expected_rows(0, len(PROMPT) + num_tokens - 1, model))


async def test_workers_without_feeds_are_served_as_well() -> None:
    async with running(Script(LONG)) as cluster:
        cluster.decode[0].serves_feeds = False
        cluster.decode[0].end_feeds()
        [worker] = [w for w in cluster.app[FLEET].workers if w.side == "decode"]
        async with asyncio.timeout(30):
            while worker.feed.is_open:
                await worker.heartbeat(HEARTBEAT_S)
        choices = choice_events(parse_events(await cluster.stream(body(5))))
        assert joined_tokens(choices) == expected_tokens(PROMPT, 5)


async def test_a_feed_that_ends_fails_who_follows_and_opens_again() -> None:
    script = Script(hold_after=3)
    async with running(script, both=True) as cluster:
        [decode] = cluster.decode
        await all_opened(cluster)
        async with cluster.http.post(GENERATE, json=body(9) | {"stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            decode.serves_feeds = False
            decode.end_feeds()
            events = split_events(await response.read())
        last = strict_json(events[-1].decode())
        assert (last["error"]["type"], last["error"]["code"]) == ("WorkerLostError", 502)
        await asyncio.wait_for(cluster.app[LIVE].wait_empty(), 10)
        await decode.wait_until(lambda: not decode.live)
        assert len(decode.cancelled) == 1
        script.hold_after, decode.serves_feeds = None, True
        await all_opened(cluster)
        num_feeds = len(decode.feeds)
        await cluster.canary()
        assert decode.feeds[num_feeds - 1].num_chunks > 0


async def test_a_worker_that_does_not_know_the_feed_sends_everything_in_the_call() -> None:
    """The router hears that its feed has ended only after it has asked for it."""
    async with running(Script(LONG, hold_after=1)) as cluster:
        await all_opened(cluster)
        [decode] = cluster.decode
        decode.forget_feeds()
        request = asyncio.ensure_future(cluster.stream(body(5)))
        await decode.wait_until(lambda: decode.num_chunks == 1)
        decode.serves_feeds = False
        decode.end_feeds()
        await decode.until_no_feed()
        decode.script.release.set()
        assert joined_tokens(choice_events(parse_events(await request))) == expected_tokens(PROMPT, 5)


class Bystander:
    """Follows a feed beside others; `take` raises."""

    def __init__(self) -> None:
        self.error: MoerelayError | None = None

    def take(self, message: decode_pb2.TokenChunk) -> None:
        raise ValueError("no such token")

    def fail(self, error: MoerelayError) -> None:
        self.error = error

    def lose(self, error: WorkerLostError) -> None:
        raise AssertionError("the feed goes on")


async def test_a_chunk_that_cannot_be_read_ends_its_request_alone() -> None:
    async with decode_worker(Script(LONG)) as (_, worker), task_group() as group:
        bystander = Bystander()
        with worker.feed.joined(bystander) as place:
            assert place is not None
            bad = request("bad", 3)
            bad.feed_id, bad.tag = place.feed_id, place.tag
            call = worker.decode.Generate(bad)
            with (stream := DecodeStream(worker)).opened(request("good", 5), group):
                assert await read(stream) == expected_tokens(PROMPT, 5)
            await asyncio.wait_for(call.read(), 10)
        assert isinstance(bystander.error, InternalError)


async def test_a_feed_that_was_closed_is_opened_by_no_heartbeat() -> None:
    async with decode_worker(Script(LONG)) as (_, worker):
        await worker.feed.close()
        await worker.heartbeat(HEARTBEAT_S)
        assert not worker.feed.is_open
        assert worker.feed._running is not None
        assert worker.feed._running.done()


async def test_a_grant_that_is_lost_is_repeated() -> None:
    num_tokens = 3 * WINDOW_CHUNKS
    async with running(Script(LONG), both=True) as cluster:
        await all_opened(cluster)
        cluster.decode[0].num_grants_to_lose = 2
        choices = choice_events(parse_events(await cluster.stream(body(num_tokens))))
        assert joined_tokens(choices) == expected_tokens(PROMPT, num_tokens)
        assert cluster.decode[0].num_grants_to_lose == 0


@asynccontextmanager
async def decode_worker(script: Script) -> AsyncIterator[tuple[FakeWorker, Worker]]:
    """A fake one, and how the router sees it; its feed is open."""
    async with serving(FakeWorker("decode-0", types_pb2.ROLE_BOTH, script)) as fake:
        worker = Worker(fake.address, "decode", max_message_bytes=2**26, silence_limit_s=60)
        try:
            await opened(worker)
            yield fake, worker
        finally:
            await worker.close()


def request(request_id: str, max_tokens: int) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=PROMPT,
        sampling=sampling_to_pb(SamplingParams(max_tokens=max_tokens, ignore_eos=True)),
        prefill_site=decode_pb2.PREFILL_SITE_LOCAL,
    )


async def read(stream: DecodeStream) -> list[int]:
    """To the end."""
    tokens: list[int] = []
    while True:
        chunk = await stream.next()
        assert isinstance(chunk, Chunk)
        tokens += [token.token_id for token in chunk.tokens]
        if chunk.finish:
            await stream.ended()
            return tokens


async def test_who_does_not_read_keeps_a_window_and_holds_up_nobody() -> None:
    num_tokens = 5 * WINDOW_CHUNKS
    async with decode_worker(Script(LONG)) as (fake, worker), task_group() as group:
        slow, fast = DecodeStream(worker), DecodeStream(worker)
        with slow.opened(request("slow", num_tokens), group), fast.opened(request("fast", num_tokens), group):
            assert await asyncio.wait_for(read(fast), 20) == expected_tokens(PROMPT, num_tokens)
            [feed] = fake.feeds
            await fake.wait_until(lambda: feed.num_sent[1] == WINDOW_CHUNKS)
            assert feed.num_sent == {1: WINDOW_CHUNKS, 2: num_tokens}
            assert await asyncio.wait_for(read(slow), 20) == expected_tokens(PROMPT, num_tokens)


async def test_what_is_not_passed_on_at_once_comes_in_order() -> None:
    """Chunks are offered while `next` waits for them; the others, and those that were refused, it returns."""
    num_tokens = 2 * WINDOW_CHUNKS
    told: list[int] = []
    num_passed_on = 0

    def pass_on_now(chunk: Chunk) -> bool:
        nonlocal num_passed_on
        if len(told) % 3 == 2 or chunk.finish:
            return False
        told.extend(token.token_id for token in chunk.tokens)
        num_passed_on += 1
        return True

    async with decode_worker(Script(LONG)) as (fake, worker), task_group() as group:
        stream = DecodeStream(worker, pass_on_now)
        with stream.opened(request("r", num_tokens), group):
            while True:
                chunk = await asyncio.wait_for(stream.next(), 10)
                assert isinstance(chunk, Chunk)
                told += [token.token_id for token in chunk.tokens]
                if chunk.finish:
                    break
        [feed] = fake.feeds
        assert feed.num_chunks == num_tokens
    assert told == expected_tokens(PROMPT, num_tokens)
    assert num_passed_on > 0


async def test_an_error_in_mid_stream_ends_that_request_and_not_the_feed() -> None:
    script = Script(LONG, hold_after=3, missing_rows=1, missing_at=5)
    async with running(script, both=True) as cluster:
        await all_opened(cluster)
        with_rows, without = body(20) | {"stream": True}, body(20, return_routed_experts=False) | {"stream": True}
        async with (
            cluster.http.post(GENERATE, json=with_rows) as broken,
            cluster.http.post(GENERATE, json=without) as whole,
        ):
            await broken.content.readuntil(b"\n\n")
            first = await whole.content.readuntil(b"\n\n")
            script.release.set()
            error = strict_json(split_events(await broken.read())[-1].decode())["error"]
            choices = choice_events(parse_events(split_events(first + await whole.read())))
        assert "routing rows after 6 tokens" in error["message"]
        assert joined_tokens(choices) == expected_tokens(PROMPT, 20)
        assert len(cluster.decode[0].feeds) == 1
        await asyncio.wait_for(cluster.app[LIVE].wait_empty(), 10)


async def test_what_came_before_the_feed_broke_is_told_before_the_error() -> None:
    async with decode_worker(Script(LONG, hold_after=4)) as (fake, worker), task_group() as group:
        stream = DecodeStream(worker)
        with stream.opened(request("r", 9), group):
            tokens = [await stream.next() for _ in range(3)]
            [feed] = fake.feeds
            await asyncio.wait_for(feed.written(1), 10)
            fake.serves_feeds = False
            fake.end_feeds()
            tokens.append(await stream.next())
            assert [t.tokens[0].token_id for t in tokens if isinstance(t, Chunk)] == expected_tokens(PROMPT, 4)
            with pytest.raises(WorkerLostError, match="feed"):
                await stream.next()


async def test_a_router_that_stops_ends_its_feeds() -> None:
    async with decode_worker(Script(LONG)) as (fake, worker):
        await worker.close()
        await asyncio.wait_for(fake.until_no_feed(), 10)
