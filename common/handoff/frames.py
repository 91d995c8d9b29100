"""Headers and payloads as the frames of one multipart message, and back. Pure functions; nothing here is trusted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from common.errors import HandoffCorruptError, PayloadTooLargeError
from common.handoff.messages import (
    Abort,
    Chunk,
    Close,
    DecodeMessage,
    Hello,
    PrefillMessage,
    Refuse,
    Reject,
    Renew,
    shortened,
)

Frame = bytes | memoryview

#: A header is small, but for the first tokens: a client may ask for the logprobs of a whole vocabulary, and each choice
#: may have a sampling mask of that size.
MAX_HEADER_BYTES = 32 * 2**20
#: Payload at which a chunk is cut: large enough to hide the cost of a message (copies drive Python's own data out of
#: the processor's caches, so that it costs 0.2 ms however small it is), small enough that copying it at once keeps
#: nobody waiting for long, and that the first one is being written while the next one is gathered.
TARGET_PAYLOAD_BYTES = 4 * 2**20
#: No frame is larger; one token's KV must fit. ZMQ delivers a message only when all its frames are there, so this
#: bounds a frame and not a message: who may connect at all is for the network, or later for CURVE, to decide.
MAX_FRAME_BYTES = 64 * 2**20

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()
_from_prefill: msgspec.msgpack.Decoder[PrefillMessage] = msgspec.msgpack.Decoder(PrefillMessage)
_from_decode: msgspec.msgpack.Decoder[DecodeMessage] = msgspec.msgpack.Decoder(DecodeMessage)


@dataclass(frozen=True, slots=True)
class ChunkFrames:
    """A chunk's header and its payload frames, whose sizes are those that the header declares."""

    header: Chunk
    kv: memoryview
    rows: memoryview
    scores: memoryview


FromPrefill = Hello | Renew | ChunkFrames | Close | Abort


def encode(message: PrefillMessage | DecodeMessage, *payloads: Frame) -> list[Frame]:
    """Header frame, then the payload frames as they are.

    Raises:
        PayloadTooLargeError: the header exceeds MAX_HEADER_BYTES.
    """
    if isinstance(message, Refuse | Reject | Abort):
        message = msgspec.structs.replace(message, reason=shortened(message.reason))
    header = _encoder.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise PayloadTooLargeError(
            f"a handoff header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}; ask for fewer logprobs or choices"
        )
    return [header, *payloads]


def decode_from_prefill(frames: Sequence[Frame]) -> FromPrefill:
    """The message that a prefill worker sent. Raises HandoffCorruptError on anything that is not exactly one."""
    message = _decode_header(_from_prefill, frames)
    if not isinstance(message, Chunk):
        _check_frame_count(frames, 1)
        return message
    _check_frame_count(frames, 4)
    payloads = [_bytes_view(frame) for frame in frames[1:]]
    declared = [message.kv_bytes, message.rows_bytes, message.scores_bytes]
    carried = [payload.nbytes for payload in payloads]
    if carried != declared:
        raise HandoffCorruptError(f"a chunk declares {_sum(declared)} bytes but carries {_sum(carried)}")
    return ChunkFrames(message, *payloads)


def decode_from_decode(frames: Sequence[Frame]) -> DecodeMessage:
    """The message that a decode worker sent. Raises HandoffCorruptError on anything that is not exactly one."""
    message = _decode_header(_from_decode, frames)
    _check_frame_count(frames, 1)
    return message


def _sum(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def _decode_header(decoder: "msgspec.msgpack.Decoder[MessageT]", frames: Sequence[Frame]) -> MessageT:
    if not frames:
        raise HandoffCorruptError("a handoff message has no header frame")
    header = _bytes_view(frames[0])
    if header.nbytes > MAX_HEADER_BYTES:
        raise HandoffCorruptError(f"a handoff header has {header.nbytes} bytes, more than {MAX_HEADER_BYTES}")
    try:
        return decoder.decode(header)
    # Maps nested without end inside an unknown field exhaust the decoder's recursion limit.
    except (msgspec.DecodeError, RecursionError) as error:
        raise HandoffCorruptError(shortened(f"a handoff header cannot be decoded: {error}")) from error


def _check_frame_count(frames: Sequence[Frame], expected: int) -> None:
    if len(frames) != expected:
        raise HandoffCorruptError(f"a handoff message has {len(frames)} frames where {expected} belong")


def _bytes_view(frame: Frame) -> memoryview:
    return memoryview(frame).cast("B")
