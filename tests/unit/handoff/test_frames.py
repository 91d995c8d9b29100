"""Whatever bytes arrive: a message, or HandoffCorruptError."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoffCorruptError, PayloadTooLargeError
from common.handoff.frames import (
    MAX_HEADER_BYTES,
    ChunkFrames,
    Frame,
    decode_from_decode,
    decode_from_prefill,
    encode,
)
from common.handoff.messages import Chunk, Close, Done, Generation, TransferId
from common.id_mask import pack_ids
from common.sampling import SampledToken, TokenLogprob
from tests.unit.handoff.test_messages import FROM_DECODE, FROM_PREFILL

CHUNK = Chunk(
    transfer_id=TransferId(1),
    generation=Generation(2),
    seq=0,
    start=0,
    end=1,
    kv_bytes=4,
    rows_bytes=2,
    scores_bytes=1,
    kv_checksum=0,
    rows_checksum=0,
    scores_checksum=0,
)
GOLDEN = [golden for _, golden in (*FROM_PREFILL, *FROM_DECODE)]


def decode_both_ways(frames: list[Frame]) -> None:
    """Either result will do; any other exception fails the test."""
    for decode in (decode_from_prefill, decode_from_decode):
        with suppress(HandoffCorruptError):
            decode(frames)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_random_frames_never_raise_anything_else(frames: list[Frame]) -> None:
    decode_both_ways(frames)


@settings(max_examples=300)
@given(
    st.sampled_from(GOLDEN),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 400),
    st.lists(st.binary(max_size=4), max_size=3),
)
def test_damaged_messages_never_raise_anything_else(
    golden: bytes, changes: list[tuple[int, int]], length: int, payloads: list[Frame]
) -> None:
    damaged = bytearray(golden)
    for position, value in changes:
        damaged[position % len(damaged)] = value
    decode_both_ways([bytes(damaged), *payloads])
    decode_both_ways([golden[:length], *payloads])


MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.sampled_from([msgspec.to_builtins(message) for message, _ in (*FROM_PREFILL, *FROM_DECODE)]),
    st.data(),
    MSGPACK,
)
def test_fields_of_the_wrong_kind_never_raise_anything_else(
    fields: dict[str, Any], data: st.DataObject, value: object
) -> None:
    name = data.draw(st.sampled_from([*fields, "unknown"]))
    decode_both_ways([msgspec.msgpack.encode({**fields, name: value}), b"", b"", b""])


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([], "no header"),
        ([*encode(CHUNK)], "1 frames where 4"),
        ([*encode(CHUNK, b"kvkv", b"rr")], "3 frames where 4"),
        ([*encode(CHUNK, b"kvkv", b"rr", b"s", b"")], "5 frames where 4"),
        ([*encode(CHUNK, b"kvk", b"rr", b"s")], r"declares 4 \+ 2 \+ 1 bytes but carries 3 \+ 2 \+ 1"),
        ([*encode(CHUNK, b"kvkv", b"", b"s")], r"declares 4 \+ 2 \+ 1 bytes but carries 4 \+ 0 \+ 1"),
        ([*encode(CHUNK, b"kvkv", b"rr", b"")], r"declares 4 \+ 2 \+ 1 bytes but carries 4 \+ 2 \+ 0"),
        ([*encode(FROM_PREFILL[0][0], b"")], "2 frames where 1"),
        ([*encode(Done(transfer_id=TransferId(1), generation=Generation(2)))], "cannot be decoded"),
        ([bytes(MAX_HEADER_BYTES + 1)], "more than"),
        ([b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 100_000], "cannot be decoded"),
        ([msgspec.msgpack.encode({**msgspec.to_builtins(CHUNK), "surprise": 1}), b"kvkv", b"rr", b"s"], "surprise"),
        ([msgspec.msgpack.encode({**msgspec.to_builtins(CHUNK), "end": -1}), b"kvkv", b"rr", b"s"], "end"),
    ],
)
def test_what_is_wrong_is_said(frames: list[Frame], complaint: str) -> None:
    with pytest.raises(HandoffCorruptError, match=complaint):
        decode_from_prefill(frames)


def test_payloads_are_views_not_copies() -> None:
    kv = bytearray(b"kvkv")
    message = decode_from_prefill([*encode(CHUNK), memoryview(kv), b"rr", b"s"])
    assert isinstance(message, ChunkFrames)
    kv[0] = ord("K")
    assert (bytes(message.kv), bytes(message.rows), bytes(message.scores)) == (b"Kvkv", b"rr", b"s")


def test_a_header_that_no_peer_would_take_is_not_sent() -> None:
    top = tuple(TokenLogprob(token, -1.0, token) for token in range(300_000))
    close = Close(
        transfer_id=TransferId(1),
        generation=Generation(2),
        num_chunks=1,
        num_computed=1,
        first_tokens=(SampledToken(1, top[0], top),) * 4,
    )
    with pytest.raises(PayloadTooLargeError, match="logprobs"):
        encode(close)


def test_the_logprobs_of_a_whole_large_vocabulary_fit() -> None:
    top = tuple(TokenLogprob(token, -12.345678, token) for token in range(152_000))
    close = Close(
        transfer_id=TransferId(1),
        generation=Generation(2),
        num_chunks=1,
        num_computed=1,
        first_tokens=(SampledToken(1, top[0], top),),
    )
    assert decode_from_prefill(encode(close)) == close


def test_the_sampling_masks_of_sixteen_choices_of_a_large_vocabulary_fit() -> None:
    token = SampledToken(1, mask=pack_ids(range(152_000)))
    close = Close(
        transfer_id=TransferId(1), generation=Generation(2), num_chunks=1, num_computed=1, first_tokens=(token,) * 16
    )
    assert decode_from_prefill(encode(close)) == close


def test_a_close_without_tokens_is_malformed() -> None:
    close = Close(transfer_id=TransferId(1), generation=Generation(2), num_chunks=1, num_computed=1, first_tokens=())
    with pytest.raises(HandoffCorruptError, match="length >= 1"):
        decode_from_prefill(encode(close))


@pytest.mark.parametrize("logprob", [float("-inf"), -0.1234567761182785, 0.0])
def test_logprobs_survive_bit_for_bit(logprob: float) -> None:
    close = Close(
        transfer_id=TransferId(1),
        generation=Generation(2),
        num_chunks=1,
        num_computed=1,
        first_tokens=(SampledToken(1, TokenLogprob(1, logprob, 1)),),
    )
    assert decode_from_prefill(encode(close)) == close
