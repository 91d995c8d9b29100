"""Cuts what the outbox holds into gRPC messages of bounded size, each of which keeps the row rule."""

from collections.abc import Iterator, Sequence

from common.messages import finish_to_pb, token_to_pb
from common.pb import decode_pb2
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken
from decode_worker.outbox import Batch

#: Rows per message: keeps one message far below the gRPC limit and the router responsive.
MAX_ROW_BYTES = 2**20


class Chunker:
    """The messages of one choice, in order.

    Once they hold g >= 1 tokens they hold p - start + g - 1 rows, after every one of them: rows of the prompt may go
    ahead, every later row travels with the token that its position's forward pass produced.
    """

    def __init__(self, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self._max_row_bytes = max_row_bytes
        self._has_tokens = False

    def cut(self, batch: Batch) -> Iterator[decode_pb2.TokenChunk]:
        """Everything in `batch`, in one message if it is small enough."""
        tokens, rows_TLK = batch.tokens, batch.rows_TLK
        limit = self._max_rows(rows_TLK)
        if rows_TLK is None or len(rows_TLK) <= limit:
            self._has_tokens |= bool(tokens)
            yield _message(tokens, rows_TLK, batch.finish)
            return
        num_with_tokens = max(0, len(tokens) - (not self._has_tokens))
        num_ahead = len(rows_TLK) - num_with_tokens
        for at in range(0, num_ahead, limit):
            yield _message((), rows_TLK[at : min(at + limit, num_ahead)], None)
        yield from self._cut_tokens(tokens, rows_TLK[num_ahead:], batch.finish, limit)

    def _cut_tokens(
        self, tokens: Sequence[SampledToken], rows_TLK: RoutingArray, finish: Finish | None, limit: int
    ) -> Iterator[decode_pb2.TokenChunk]:
        """Tokens with one row each, but for the very first token, which has none of its own."""
        at_token, at_row = 0, 0
        while at_token < len(tokens):
            num_tokens = min(limit, len(tokens) - at_token)
            num_rows = num_tokens - (not self._has_tokens)
            self._has_tokens = True
            end = at_token + num_tokens
            ends_here = finish if end == len(tokens) else None
            yield _message(tokens[at_token:end], rows_TLK[at_row : at_row + num_rows], ends_here)
            at_token, at_row = end, at_row + num_rows

    def _max_rows(self, rows_TLK: RoutingArray | None) -> int:
        return 1 if rows_TLK is None else max(1, self._max_row_bytes // rows_TLK[0].nbytes)


def _message(
    tokens: Sequence[SampledToken], rows_TLK: RoutingArray | None, finish: Finish | None
) -> decode_pb2.TokenChunk:
    return decode_pb2.TokenChunk(
        tokens=[token_to_pb(token) for token in tokens],
        routing_rows=b"" if rows_TLK is None else _little_endian(rows_TLK),
        num_rows=0 if rows_TLK is None else len(rows_TLK),
        finish_reason=finish_to_pb(None if finish is None else finish.reason),
        stop_token_id=None if finish is None else finish.stop_token_id,
    )


def _little_endian(rows_TLK: RoutingArray) -> bytes:
    return rows_TLK.astype(rows_TLK.dtype.newbyteorder("<"), order="C", copy=False).tobytes()
