"""Messages of the decode worker: bounded, whole, and true to the row rule after each one."""

import numpy as np
import pytest

from common.messages import finish_from_pb, token_to_pb, tokens_from_pb
from common.pb import decode_pb2
from common.prompt_logprobs import empty
from common.sampling import Finish, FinishReason, SampledToken, TokenLogprob
from decode_worker.chunks import TOKEN_BYTES, Chunker, token_bytes
from decode_worker.outbox import Batch

LAYERS, TOP_K = 3, 2
ROW_BYTES = LAYERS * TOP_K
#: Fields of a message beside tokens and rows, and the tags and lengths of these.
FRAME_BYTES = 24
LENGTH = Finish(FinishReason.LENGTH)


def batch(num_tokens: int, num_rows: int, first_row: int, finish: Finish | None = None) -> Batch:
    """Tokens and rows that carry their own number."""
    numbers = np.arange(first_row, first_row + num_rows, dtype=np.uint8)
    rows = np.broadcast_to(numbers[:, None, None], (num_rows, LAYERS, TOP_K))
    return Batch(0, [SampledToken(t) for t in range(num_tokens)], [rows] if num_rows else [], [], finish)


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
    messages = sent(Chunker(rows_per_message * (TOKEN_BYTES + ROW_BYTES)), *batches)
    seen_tokens, seen_rows = 0, 0
    for message in messages:
        seen_tokens += len(tokens_from_pb(message))
        seen_rows += message.num_rows
        assert message.ByteSize() <= rows_per_message * (TOKEN_BYTES + ROW_BYTES) + FRAME_BYTES
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
    messages = sent(Chunker(2 * (TOKEN_BYTES + ROW_BYTES)), batch(0, 30, 0), batch(4, 3, 30, LENGTH))
    # 76 bytes hold 12 rows, or two tokens with their rows.
    assert [(len(tokens_from_pb(m)), m.num_rows) for m in messages] == [(0, 12), (0, 12), (0, 6), (2, 1), (2, 2)]


def test_without_routing_everything_is_one_message() -> None:
    [message] = sent(Chunker(), batch(50, 0, 0, Finish(FinishReason.STOP, 7)))
    assert (len(tokens_from_pb(message)), message.num_rows, message.stop_token_id) == (50, 0, 7)


def test_an_abort_has_neither() -> None:
    [message] = sent(Chunker(), Batch(3, finish=Finish(FinishReason.ABORT)))
    assert message.choice == 3
    assert not message.HasField("stop_token_id")
    assert finish_from_pb(message.finish_reason) is FinishReason.ABORT


def test_an_end_without_tokens_is_told_after_all_rows() -> None:
    messages = sent(Chunker(2 * ROW_BYTES), batch(0, 5, 0, Finish(FinishReason.ABORT)))
    assert [m.num_rows for m in messages] == [2, 2, 1, 0]
    assert [finish_from_pb(m.finish_reason) for m in messages] == [None, None, None, FinishReason.ABORT]


def large_token(num_masked: int, num_top: int) -> SampledToken:
    """The largest ids, and a label of some length."""
    logprob = TokenLogprob(2**32 - 1, -1.5, 2**32 - 1)
    return SampledToken(2**32 - 1, logprob, (logprob,) * num_top, b"\xff" * 4 * num_masked or None, "step-12345")


@pytest.mark.parametrize(("num_masked", "num_top"), [(0, 0), (0, 20), (2_000, 0), (2_000, 20)])
def test_masks_and_logprobs_count_too(num_masked: int, num_top: int) -> None:
    """One slow reader's backlog of large tokens: many messages, none larger than it may be."""
    token, limit = large_token(num_masked, num_top), 40_000
    assert token_to_pb(token).ByteSize() <= token_bytes(token)
    messages = sent(Chunker(limit), Batch(0, [token] * 500, [], [], LENGTH))
    assert sum(len(tokens_from_pb(m)) for m in messages) == 500
    assert max(m.ByteSize() for m in messages) <= limit + FRAME_BYTES + 4 * 500
    assert max(len(tokens_from_pb(m)) for m in messages) == min(500, limit // token_bytes(token))


def test_a_token_that_is_too_large_travels_alone() -> None:
    messages = sent(Chunker(100), Batch(0, [large_token(2_000, 0)] * 3, [], [], LENGTH))
    assert [len(tokens_from_pb(m)) for m in messages] == [1, 1, 1]


def test_prompt_logprobs_go_ahead_in_parts() -> None:
    entries = empty(10, 1)
    entries["rank"] = np.arange(20).reshape(10, 2)
    messages = sent(Chunker(4 * 24), Batch(0, [SampledToken(5)], [], [entries], LENGTH))
    assert [len(m.prompt_logprobs) // 24 for m in messages] == [4, 4, 2, 0]
    assert [len(tokens_from_pb(m)) for m in messages] == [0, 0, 0, 1]
    assert b"".join(m.prompt_logprobs for m in messages) == entries.tobytes()
    [whole] = sent(Chunker(), Batch(0, [SampledToken(5)], [], [entries], LENGTH))
    assert whole.prompt_logprobs == entries.tobytes()


@pytest.mark.parametrize("max_bytes", [1, 10_000])
def test_cached_tokens_are_told_with_the_first_token_only(max_bytes: int) -> None:
    """In one message and in many, some of them rows that go ahead."""
    first, second = batch(2, 5, 0), batch(2, 2, 5, LENGTH)
    first.num_cached = 32
    messages = sent(Chunker(max_bytes), first, second)
    told = [m.num_cached_tokens for m in messages if tokens_from_pb(m)]
    assert told == [32] + [0] * (len(told) - 1)
    assert sum(m.num_cached_tokens for m in messages) == 32


def test_tokens_that_ids_say_all_about_are_one_field() -> None:
    """Field 11, packed: 1, and 300 as a varint of two bytes; field 12: the label."""
    plain = [SampledToken(token, weight_version="7") for token in (1, 300)]
    [message] = sent(Chunker(), Batch(0, plain))
    assert message.SerializeToString() == b"\x5a\x03\x01\xac\x02\x62\x017"
    assert tokens_from_pb(message) == tuple(plain)


@pytest.mark.parametrize(
    "other",
    [
        SampledToken(300, weight_version="8"),
        SampledToken(300, mask=b"\x2c\x01\0\0", weight_version="7"),
        SampledToken(300, TokenLogprob(300, -1.5, 1), weight_version="7"),
    ],
)
def test_tokens_with_more_to_say_are_whole(other: SampledToken) -> None:
    tokens = [SampledToken(1, weight_version="7"), other]
    [message] = sent(Chunker(), Batch(0, tokens))
    assert (len(message.tokens), list(message.token_ids), message.weight_version) == (2, [], "")
    assert tokens_from_pb(message) == tuple(tokens)
