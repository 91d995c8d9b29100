"""Cuts what the outbox holds into gRPC messages of bounded size, each of which keeps the row rule."""

from collections.abc import Iterator, Sequence

from common.messages import finish_to_pb, put_tokens
from common.pb import decode_pb2
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken
from decode_worker.outbox import Batch

#: Of one message, unless a single token or position has more: far below the gRPC limit, and the router stays
#: responsive.
MAX_MESSAGE_BYTES = 2**20

#: Upper bounds of what protobuf makes of a token without its lists and mask, and of one log probability.
TOKEN_BYTES, LOGPROB_BYTES = 32, 24


class Chunker:
    """The messages of one choice, in order.

    Once they hold g >= 1 tokens they hold p - start + g - 1 rows, after every one of them: rows of the prompt may go
    ahead, every later row travels with the token that its position's forward pass produced. Prompt logprobs go ahead
    of all that came with them.
    """

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._has_tokens = False

    def cut(self, batch: Batch) -> Iterator[decode_pb2.TokenChunk]:
        """Everything in `batch`, in one message if it is small enough."""
        rows_TLK, logprobs = batch.rows_TLK, batch.prompt_logprobs
        if _num_bytes(batch, rows_TLK, logprobs) <= self._max_bytes:
            self._has_tokens |= bool(batch.tokens)
            yield _message(batch.choice, batch.tokens, rows_TLK, batch.finish, logprobs, batch.num_cached)
            return
        if logprobs is not None:
            for part in self._slices(len(logprobs), logprobs[0].nbytes):
                yield _message(batch.choice, (), None, None, PromptLogprobs(logprobs[part]))
        num_ahead = 0
        if rows_TLK is not None:
            num_ahead = len(rows_TLK) - max(0, len(batch.tokens) - (not self._has_tokens))
            for part in self._slices(num_ahead, rows_TLK[0].nbytes):
                yield _message(batch.choice, (), rows_TLK[part], None)
        yield from self._cut_tokens(batch, None if rows_TLK is None else rows_TLK[num_ahead:])

    def _slices(self, length: int, item_bytes: int) -> Iterator[slice]:
        """[0, length) in parts that each fit into a message, or hold one item."""
        step = max(1, self._max_bytes // item_bytes)
        for begin in range(0, length, step):
            yield slice(begin, min(begin + step, length))

    def _cut_tokens(self, batch: Batch, rows_TLK: RoutingArray | None) -> Iterator[decode_pb2.TokenChunk]:
        """Tokens with one row each, but for the very first token, which has none of its own."""
        row_bytes = 0 if rows_TLK is None or not len(rows_TLK) else rows_TLK[0].nbytes
        at_token, at_row = 0, 0
        while at_token < len(batch.tokens):
            end = self._end_of_message(batch.tokens, at_token, row_bytes)
            end_row = at_row + (end - at_token) - (not self._has_tokens)
            self._has_tokens = True
            rows = None if rows_TLK is None else rows_TLK[at_row:end_row]
            finish = batch.finish if end == len(batch.tokens) else None
            num_cached = 0 if at_token else batch.num_cached
            yield _message(batch.choice, batch.tokens[at_token:end], rows, finish, num_cached=num_cached)
            at_token, at_row = end, end_row
        if batch.finish is not None and not batch.tokens:
            yield _message(batch.choice, (), None, batch.finish)

    def _end_of_message(self, tokens: Sequence[SampledToken], begin: int, row_bytes: int) -> int:
        """End of the tokens from `begin` on that fit into one message with their rows: at least one."""
        end, room = begin, self._max_bytes
        while end < len(tokens) and (room := room - token_bytes(tokens[end]) - row_bytes) >= 0:
            end += 1
        return max(end, begin + 1)


def token_bytes(token: SampledToken) -> int:
    """Upper bound of what a token takes in a message."""
    num_logprobs = len(token.top) + (token.logprob is not None)
    version = len(token.weight_version.encode())
    return TOKEN_BYTES + version + LOGPROB_BYTES * num_logprobs + len(token.mask or b"")


def _num_bytes(batch: Batch, rows_TLK: RoutingArray | None, logprobs: PromptLogprobs | None) -> int:
    arrays = sum(array.nbytes for array in (rows_TLK, logprobs) if array is not None)
    return arrays + sum(token_bytes(token) for token in batch.tokens)


def _message(
    choice: int,
    tokens: Sequence[SampledToken],
    rows_TLK: RoutingArray | None,
    finish: Finish | None,
    logprobs: PromptLogprobs | None = None,
    num_cached: int = 0,
) -> decode_pb2.TokenChunk:
    message = decode_pb2.TokenChunk(
        choice=choice,
        routing_rows=b"" if rows_TLK is None else _little_endian(rows_TLK),
        num_rows=0 if rows_TLK is None else len(rows_TLK),
        prompt_logprobs=b"" if logprobs is None else logprobs.tobytes(),
        finish_reason=finish_to_pb(None if finish is None else finish.reason),
        stop_token_id=None if finish is None else finish.stop_token_id,
        num_cached_tokens=num_cached,
    )
    put_tokens(message, tokens)
    return message


def _little_endian(rows_TLK: RoutingArray) -> bytes:
    return rows_TLK.astype(rows_TLK.dtype.newbyteorder("<"), order="C", copy=False).tobytes()
