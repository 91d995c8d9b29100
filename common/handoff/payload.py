"""KV, routing rows and prompt logprobs as raw bytes, and back into the store: the payload frames of a chunk.

KV is the contiguous tensor [L, C, n, G, D], rows are ids [n, L, K], both little-endian; rows are empty when the request
wants no routing. (L layers, C planes, n tokens, G KV heads, D head size, K experts per token.) Prompt logprobs are
packed as in `common.prompt_logprobs`; they do not go into the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from common.handoff.frames import TARGET_PAYLOAD_BYTES, ChunkFrames
from common.handoff.staging import Staging
from common.kv.copies import SlotArray
from common.kv.pool import BlockId
from common.kv.store import KVStore, slots_of
from common.prompt_logprobs import PromptLogprobs

#: Copies up to this size take less time than handing them to another thread, and only few chunks are larger: a single
#: token of a very large model.
OFFLOAD_BYTES = TARGET_PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class Payload:
    """The payload frames of one chunk and their checksums."""

    kv: memoryview
    rows: memoryview
    scores: memoryview
    kv_checksum: int
    rows_checksum: int
    scores_checksum: int


def checksum(frame: memoryview | bytes) -> int:
    """xxh3-64, seed 0."""
    return xxhash.xxh3_64_intdigest(frame)


def read_payload(
    store: KVStore,
    blocks: Sequence[BlockId],
    start: int,
    end: int,
    *,
    routing: bool,
    scores: PromptLogprobs | None = None,
    staging: Staging | None = None,
) -> Payload:
    """Copies KV, and rows if `routing`, of positions [start, end) of the sequence that owns `blocks`; packs `scores`.

    `staging`: where memory for KV comes from, if a buffer of it is large enough.

    Raises:
        RoutingMissingError: a position has no routing row.
    """
    slots = slots_of(blocks, start, end, store.layout.block_size)
    kv = _read_kv(store, slots, staging)
    rows = memoryview(b"")
    if routing:
        rows_NLK = store.read_rows(slots)
        little_endian = np.ascontiguousarray(rows_NLK, rows_NLK.dtype.newbyteorder("<"))
        rows = little_endian.reshape(-1).view(np.uint8).data
    packed = memoryview(b"" if scores is None else scores.tobytes())
    return Payload(kv, rows, packed, checksum(kv), checksum(rows), checksum(packed))


def is_offloaded(store: KVStore, num_bytes: int) -> bool:
    """Whether a copy of so much KV belongs on another thread: it is long, or would wait for a device."""
    return num_bytes > OFFLOAD_BYTES or not store.is_on_host


def _read_kv(store: KVStore, slots: SlotArray, staging: Staging | None) -> memoryview:
    num_bytes = len(slots) * store.layout.token_bytes
    if staging is not None and 0 < num_bytes <= staging.buffer_bytes:
        buffer = staging.lend(num_bytes)
    else:
        buffer = np.empty(num_bytes, np.uint8)
    store.read_kv_bytes(slots, buffer)
    return buffer.data


def write_payload(store: KVStore, blocks: Sequence[BlockId], frames: ChunkFrames) -> str | None:
    """Stores KV and rows of a chunk whose sizes have been checked.

    If a checksum, that of the prompt logprobs included, is wrong: nothing is stored; says which one.
    """
    chunk = frames.header
    for name, frame, declared in (
        ("KV", frames.kv, chunk.kv_checksum),
        ("routing rows", frames.rows, chunk.rows_checksum),
        ("prompt logprobs", frames.scores, chunk.scores_checksum),
    ):
        if checksum(frame) != declared:
            return f"chunk {chunk.seq}: the checksum of the {name} is {checksum(frame):#x}, not {declared:#x}"
    if chunk.start == chunk.end:
        return None
    slots = slots_of(blocks, chunk.start, chunk.end, store.layout.block_size)
    store.write_kv_bytes(slots, frames.kv)
    if frames.rows.nbytes:
        store.write_rows(slots, store.routing.from_bytes(frames.rows, len(slots)))
    return None
