"""`python -m tests.fakes.paced_worker`: a decode worker without an engine, in a process of its own, so that nothing but
the router stands between its pace and the client. Prints its address.

Short prompts get a token every PACE_S; a prompt of LARGE tokens gets all of its rows (50 MB) and one token at once.
"""

import asyncio
from collections.abc import Iterator

from common.pb import decode_pb2, types_pb2
from tests.fakes.fake_feed import FollowingContext
from tests.fakes.fake_workers import Context, FakeWorker, Script, description, serving

PACE_S = 0.1
NUM_LAYERS, TOP_K = 48, 8
ROW_BYTES = NUM_LAYERS * TOP_K
#: Prompt tokens whose rows have 50 MB.
LARGE = 50_000_000 // ROW_BYTES + 1
#: Rows per message of a large prompt, as of a real worker: 2 MiB.
_CHUNK_ROWS = 2 * 2**20 // ROW_BYTES

MODEL = description(num_layers=NUM_LAYERS, top_k=TOP_K, num_experts=128, max_model_len=2 * LARGE)


class PacedWorker(FakeWorker):
    """Streams at a pace instead of by a script."""

    async def answer(self, request: decode_pb2.GenerateRequest, context: Context | FollowingContext) -> None:
        num_prompt, num_tokens = len(request.token_ids), request.sampling.max_tokens
        if num_prompt >= LARGE:
            for chunk in _large(num_prompt, request.routing.enabled):
                await context.write(decode_pb2.GenerateEvent(chunk=chunk))
            return
        loop = asyncio.get_running_loop()
        due = loop.time()
        for at in range(num_tokens):
            await asyncio.sleep(due - loop.time())
            num_rows = (1 if at else num_prompt) * request.routing.enabled
            await context.write(decode_pb2.GenerateEvent(chunk=_chunk(num_rows, at, last=at == num_tokens - 1)))
            due += PACE_S


def _large(num_rows: int, routing: bool) -> Iterator[decode_pb2.TokenChunk]:
    for first in range(0, (num_rows - 1) * routing, _CHUNK_ROWS):
        num_more = min(_CHUNK_ROWS, num_rows - 1 - first)
        yield decode_pb2.TokenChunk(routing_rows=bytes(num_more * ROW_BYTES), num_rows=num_more)
    yield _chunk(int(routing), 0, last=True)


def _chunk(num_rows: int, token_id: int, *, last: bool) -> decode_pb2.TokenChunk:
    return decode_pb2.TokenChunk(
        tokens=[types_pb2.SampledToken(token_id=token_id % 300, weight_version="7")],
        routing_rows=bytes(num_rows * ROW_BYTES),
        num_rows=num_rows,
        finish_reason=types_pb2.FINISH_REASON_LENGTH if last else types_pb2.FINISH_REASON_UNSPECIFIED,
    )


async def main() -> None:
    async with serving(PacedWorker("decode-0", types_pb2.ROLE_BOTH, Script(MODEL))) as worker:
        print(worker.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
