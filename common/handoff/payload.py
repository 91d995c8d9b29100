"""KV, routing rows and prompt logprobs as raw bytes, and back into the store: the payload frames of a chunk.

KV is the contiguous tensor [L, C, n, G, D], rows are ids [n, L, K], both little-endian; rows are empty when the request
wants no routing. (L layers, C planes, n tokens, G KV heads, D head size, K experts per token.) Prompt logprobs are
packed as in `common.prompt_logprobs`; they do not go into the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from common.handoff.frames import ChunkFrames
from common.kv.pool import BlockId
from common.kv.store import KVStore, slots_of
from common.prompt_logprobs import PromptLogprobs

#: Copies below this size take less time than handing them to another thread.
OFFLOAD_BYTES = 64 * 2**10


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
) -> Payload:
    """Copies KV, and rows if `routing`, of positions [start, end) of the sequence that owns `blocks`; packs `scores`.

    Raises:
        RoutingMissingError: a position has no routing row.
    """
    slots = slots_of(blocks, start, end, store.layout.block_size)
    kv = store.read_kv(slots).reshape(-1).view(torch.uint8).numpy().data
    rows = memoryview(b"")
    if routing:
        rows_NLK = store.read_rows(slots)
        little_endian = np.ascontiguousarray(rows_NLK, rows_NLK.dtype.newbyteorder("<"))
        rows = little_endian.reshape(-1).view(np.uint8).data
    packed = memoryview(b"" if scores is None else scores.tobytes())
    return Payload(kv, rows, packed, checksum(kv), checksum(rows), checksum(packed))


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
    layout, kv = store.layout, frames.kv
    # torch wants memory that it could write to; transports give such memory, but for very small frames.
    flat = torch.frombuffer(bytearray(kv) if kv.readonly else kv, dtype=layout.dtype)
    shape = (layout.num_layers, layout.num_planes, len(slots), layout.num_kv_heads, layout.head_dim)
    store.write_kv(slots, flat.view(shape))
    if frames.rows.nbytes:
        store.write_rows(slots, store.routing.from_bytes(frames.rows, len(slots)))
    return None
