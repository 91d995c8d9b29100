"""`python -m benchmarks.stream_source`: a decode worker without a model, whose streams cost it next to nothing.

The prompt says how to stream: `[tokens per chunk, milliseconds between chunks, …]`; 0 milliseconds mean as fast as they
are taken. Chunks are made once and sent as bytes; every stream that runs at the same pace gets its chunk at the same
moment, as from the steps of an engine. Every token brings one row of 12 layers and 4 experts.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import numpy as np

from benchmarks.stream_feed import StreamFeeds, varint
from common.pb import decode_pb2, types_pb2, worker_pb2
from common.rpc import PROTOCOL_VERSION, channel_options

NUM_LAYERS, TOP_K, NUM_EXPERTS = 12, 4, 32
VOCAB_SIZE = 32_000
WEIGHT_VERSION = "7"
Context = grpc.aio.ServicerContext[decode_pb2.GenerateRequest, bytes]


class Pacer:
    """Wakes everybody who waits for the same interval at the same moments."""

    def __init__(self) -> None:
        self._ticks: dict[float, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def next(self, interval_s: float) -> None:
        """Returns at the interval's next tick."""
        if interval_s not in self._ticks:
            self._ticks[interval_s] = asyncio.Event()
            self._tasks.append(asyncio.create_task(self._run(interval_s)))
        await self._ticks[interval_s].wait()

    async def _run(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + interval_s, loop.time())
            await asyncio.sleep(due - loop.time())
            tick, self._ticks[interval_s] = self._ticks[interval_s], asyncio.Event()
            tick.set()


def description() -> types_pb2.ModelDescription:
    return types_pb2.ModelDescription(
        family="qwen3_moe",
        fingerprint="benchmark",
        weight_version=WEIGHT_VERSION,
        dtype="bfloat16",
        numerics="none",
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        vocab_size=VOCAB_SIZE,
        max_model_len=2**20,
        block_size=16,
        num_kv_planes=2,
        num_kv_heads=4,
        head_dim=64,
        routing_dtype="uint8",
        routing_enabled=True,
        eos_token_ids=[2],
    )


class Source:
    """A worker of role both: what the router needs of it."""

    def __init__(self) -> None:
        self._pacer = Pacer()
        self.feeds = StreamFeeds()
        self.address = ""

    async def describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(
            worker_id="source",
            instance_id="source-1",
            role=types_pb2.ROLE_BOTH,
            address=self.address,
            exact=True,
            model=description(),
            protocol_version=PROTOCOL_VERSION,
            pause=worker_pb2.PAUSE_STATE_RUNNING,
        )

    async def generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:
        """Decode.Generate, with chunks that are bytes already."""
        chunk_tokens, interval_ms = request.token_ids[:2]
        pace: Callable[[], Awaitable[None]] | None = None
        if interval_ms:
            interval_s = interval_ms / 1000

            async def pace() -> None:
                await self._pacer.next(interval_s)

        feed = self.feeds.get(request.feed_id)
        follower = None if feed is None else feed.follower(request.tag)
        for chunk in chunks(request, chunk_tokens):
            if pace:
                await pace()
            if follower is not None:
                await follower.write(chunk)
            else:
                await context.write(_event(chunk))
        if feed is not None:
            await feed.written()


def chunks(request: decode_pb2.GenerateRequest, chunk_tokens: int) -> Iterator[bytes]:
    """`max_tokens` in chunks of `chunk_tokens`; the first one brings the rows of the prompt, too."""
    num_chunks = -(-request.sampling.max_tokens // chunk_tokens)
    num_lead = len(request.token_ids) - request.routing.start - 1
    yield _chunk(chunk_tokens, chunk_tokens + num_lead)
    middle = _chunk(chunk_tokens, chunk_tokens)
    for _ in range(num_chunks - 2):
        yield middle
    yield _chunk(chunk_tokens, chunk_tokens, types_pb2.FINISH_REASON_LENGTH)


def _chunk(num_tokens: int, num_rows: int, finish: types_pb2.FinishReason.ValueType = 0) -> bytes:  # type: ignore[assignment]
    ids = np.random.default_rng(0).integers(1000, VOCAB_SIZE, num_tokens).tolist()
    rows = np.random.default_rng(1).integers(0, NUM_EXPERTS, (num_rows, NUM_LAYERS, TOP_K), np.uint8)
    chunk = decode_pb2.TokenChunk(
        token_ids=ids,
        weight_version=WEIGHT_VERSION,
        routing_rows=rows.tobytes(),
        num_rows=num_rows,
        finish_reason=finish,
    )
    return chunk.SerializeToString()


def _event(chunk: bytes) -> bytes:
    """A GenerateEvent with the encoded chunk."""
    return b"\x12" + varint(len(chunk)) + chunk


def _handlers(source: Source) -> list[grpc.GenericRpcHandler]:
    describe = grpc.unary_unary_rpc_method_handler(
        source.describe, worker_pb2.DescribeRequest.FromString, worker_pb2.WorkerStatus.SerializeToString
    )
    generate: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        source.generate, decode_pb2.GenerateRequest.FromString, None
    )
    follow: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
        source.feeds.follow, decode_pb2.FollowRequest.FromString, None
    )
    grant = grpc.unary_unary_rpc_method_handler(
        source.feeds.grant, decode_pb2.GrantRequest.FromString, decode_pb2.GrantReply.SerializeToString
    )
    return [
        grpc.method_handlers_generic_handler("moerelay.v1.Worker", {"Describe": describe}),
        grpc.method_handlers_generic_handler(
            "moerelay.v1.Decode", {"Generate": generate, "Follow": follow, "Grant": grant}
        ),
    ]


async def serve(port: int) -> None:
    """Serves until it is cancelled."""
    source = Source()
    server = grpc.aio.server(options=channel_options(64 * 2**20))
    server.add_generic_rpc_handlers(_handlers(source))
    source.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream_source", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args().port))
