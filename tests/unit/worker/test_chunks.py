"""Messages of the decode worker: bounded, whole, and true to the row rule after each one."""

import numpy as np
import pytest

from common.messages import finish_from_pb
from common.pb import decode_pb2
from common.sampling import Finish, FinishReason, SampledToken
from decode_worker.chunks import Chunker
from decode_worker.outbox import Batch

LAYERS, TOP_K = 3, 2
ROW_BYTES = LAYERS * TOP_K
LENGTH = Finish(FinishReason.LENGTH)


def batch(num_tokens: int, num_rows: int, first_row: int, finish: Finish | None = None) -> Batch:
    """Tokens and rows that carry their own number."""
    numbers = np.arange(first_row, first_row + num_rows, dtype=np.uint8)
    rows = np.broadcast_to(numbers[:, None, None], (num_rows, LAYERS, TOP_K))
    return Batch([SampledToken(t) for t in range(num_tokens)], [rows] if num_rows else [], finish)


def sent(chunker: Chunker, *batches: Batch) -> list[decode_pb2.TokenChunk]:
    return [message for one in batches for message in chunker.cut(one)]


@pytest.mark.parametrize("rows_per_message", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("prompt", "counts"),
    [(20, [30]), (20, [1, 29]), (20, [5, 1, 24]), (0, [30]), (1, [1, 1, 28]), (3, [2, 28]), (100, [1])],
)
def test_every_message_keeps_the_row_rule(prompt: int, counts: list[int], rows_per_message: int) -> None:
    """However tokens coalesced, and however small a message may be; `prompt` counts the prompt rows that are wanted."""
    batches, num_rows = [], 0
    for index, count in enumerate(counts):
        new = count + (prompt - 1 if index == 0 else 0)
        finish = LENGTH if index == len(counts) - 1 else None
        batches.append(batch(count, new, num_rows, finish))
        num_rows += new
    messages = sent(Chunker(rows_per_message * ROW_BYTES), *batches)
    seen_tokens, seen_rows = 0, 0
    for message in messages:
        seen_tokens += len(message.tokens)
        seen_rows += message.num_rows
        assert message.num_rows <= rows_per_message
        assert len(message.routing_rows) == message.num_rows * ROW_BYTES
        if seen_tokens:
            assert seen_rows == prompt + seen_tokens - 1
        else:
            assert seen_rows <= prompt
    assert (seen_tokens, seen_rows) == (sum(counts), prompt + sum(counts) - 1)
    joined = np.frombuffer(b"".join(m.routing_rows for m in messages), np.uint8)
    assert joined.reshape(-1, LAYERS, TOP_K)[:, 0, 0].tolist() == list(range(num_rows))
    assert [finish_from_pb(m.finish_reason) for m in messages] == [None] * (len(messages) - 1) + [FinishReason.LENGTH]


def test_rows_ahead_then_tokens() -> None:
    """Prompt rows that went ahead leave the first token without a row of its own."""
    messages = sent(Chunker(2 * ROW_BYTES), batch(0, 5, 0), batch(4, 3, 5, LENGTH))
    assert [(len(m.tokens), m.num_rows) for m in messages] == [(0, 2), (0, 2), (0, 1), (2, 1), (2, 2)]


def test_without_routing_everything_is_one_message() -> None:
    [message] = sent(Chunker(1), batch(50, 0, 0, Finish(FinishReason.STOP, 7)))
    assert (len(message.tokens), message.num_rows, message.stop_token_id) == (50, 0, 7)


def test_an_abort_has_neither() -> None:
    [message] = sent(Chunker(), Batch(finish=Finish(FinishReason.ABORT)))
    assert not message.HasField("stop_token_id")
    assert finish_from_pb(message.finish_reason) is FinishReason.ABORT
