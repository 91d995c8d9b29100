"""What a decode worker streams, and what the router passes on: plain records."""

from dataclasses import dataclass

from common.messages import finish_from_pb, token_from_pb
from common.pb import decode_pb2
from common.sampling import Finish, FinishReason, SampledToken


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and rows of one choice. `rows` are C-order little-endian [num_rows, L, K] bytes."""

    tokens: tuple[SampledToken, ...] = ()
    rows: bytes = b""
    num_rows: int = 0
    finish: Finish | None = None
    num_cached_tokens: int = 0


#: How a choice ends that was aborted before any worker heard of it.
ABORTED = Chunk(finish=Finish(FinishReason.ABORT))


def chunk_from_pb(message: decode_pb2.TokenChunk) -> Chunk:
    reason = finish_from_pb(message.finish_reason)
    stop = message.stop_token_id if message.HasField("stop_token_id") else None
    return Chunk(
        tokens=tuple(token_from_pb(token) for token in message.tokens),
        rows=message.routing_rows,
        num_rows=message.num_rows,
        finish=None if reason is None else Finish(reason, stop),
        num_cached_tokens=message.num_cached_tokens,
    )
