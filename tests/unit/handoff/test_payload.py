"""The bytes of a chunk, against a layout written down by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import RoutingMissingError
from common.handoff.frames import ChunkFrames
from common.handoff.messages import Chunk, Generation, TransferId
from common.handoff.payload import Payload, checksum, read_payload, write_payload
from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore
from common.prompt_logprobs import empty
from common.routing.record import RoutingLayout

BLOCK_SIZE = 2


def make_store(dtype: torch.dtype = torch.float32, num_experts: int = 300) -> KVStore:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype=dtype)
    return KVStore(layout, RoutingLayout(num_layers=2, top_k=1, num_experts=num_experts), 4, torch.device("cpu"))


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(block) for block in ids]


def frames(payload: Payload, start: int, end: int) -> ChunkFrames:
    header = Chunk(
        transfer_id=TransferId(1),
        generation=Generation(1),
        seq=0,
        start=start,
        end=end,
        kv_bytes=payload.kv.nbytes,
        rows_bytes=payload.rows.nbytes,
        scores_bytes=payload.scores.nbytes,
        kv_checksum=payload.kv_checksum,
        rows_checksum=payload.rows_checksum,
        scores_checksum=payload.scores_checksum,
    )
    return ChunkFrames(header, payload.kv, payload.rows, payload.scores)


def with_payload(sent: ChunkFrames, name: str, payload: memoryview) -> ChunkFrames:
    payloads = {"kv": sent.kv, "rows": sent.rows, "scores": sent.scores, name: payload}
    return ChunkFrames(sent.header, **payloads)


def test_kv_travels_layer_by_layer_keys_before_values() -> None:
    store = make_store()
    # Positions 1 and 2 of a sequence in blocks 3 and 1 are slots 7 and 2.
    for layer in range(2):
        for kind in range(2):
            store.kv_LCSGD[layer, kind, 7] = 100 * layer + 10 * kind + 1
            store.kv_LCSGD[layer, kind, 2] = 100 * layer + 10 * kind + 2
    payload = read_payload(store, blocks(3, 1), 1, 3, routing=False)
    expected = np.array([1, 2, 11, 12, 101, 102, 111, 112], "<f4").tobytes()
    assert (bytes(payload.kv), bytes(payload.rows)) == (expected, b"")


def test_bfloat16_travels_as_its_two_bytes() -> None:
    store = make_store(torch.bfloat16)
    store.kv_LCSGD[0, 0, 2] = 1.0
    assert bytes(read_payload(store, blocks(1), 0, 1, routing=False).kv) == b"\x80\x3f" + bytes(6)


@pytest.mark.parametrize(
    ("num_experts", "expected"),
    [(256, b"\x05\x06"), (300, b"\x05\x00\x2b\x01"), (70_000, b"\x05\x00\x00\x00\x70\x11\x01\x00")],
)
def test_rows_travel_little_endian_in_the_models_dtype(num_experts: int, expected: bytes) -> None:
    store = make_store(num_experts=num_experts)
    last = {256: 6, 300: 299, 70_000: 70_000}[num_experts]
    store.write_rows(np.array([2]), np.array([[[5], [last]]]).astype(store.routing.dtype))
    assert bytes(read_payload(store, blocks(1), 0, 1, routing=True).rows) == expected


def test_a_row_that_was_never_recorded_does_not_travel() -> None:
    with pytest.raises(RoutingMissingError):
        read_payload(make_store(), blocks(1), 0, 1, routing=True)


def test_the_checksum_is_xxh3_64() -> None:
    # Published test value of XXH3_64bits for no input and seed 0.
    assert checksum(b"") == 0x2D06800538D394C2


def test_prompt_logprobs_travel_as_twelve_bytes_per_entry() -> None:
    scores = empty(2, 0)
    scores[1, 0] = (300, -0.5, 7)
    payload = read_payload(make_store(), blocks(1), 0, 1, routing=False, scores=scores)
    assert bytes(payload.scores) == bytes(12) + b"\x2c\x01\x00\x00\x00\x00\x00\xbf\x07\x00\x00\x00"


def test_a_chunk_of_prompt_logprobs_alone_writes_nothing() -> None:
    store = make_store()
    store.kv_LCSGD.fill_(1)
    payload = read_payload(store, blocks(1), 2, 2, routing=False, scores=empty(2, 0))
    assert (payload.kv.nbytes, payload.rows.nbytes, payload.scores.nbytes) == (0, 0, 24)
    assert write_payload(store, blocks(1), frames(payload, 2, 2)) is None
    assert store.kv_LCSGD.eq(1).all()


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_read_can_be_written_elsewhere(dtype: torch.dtype, readonly: bool) -> None:
    source, target = make_store(dtype), make_store(dtype)
    source.kv_LCSGD.copy_(torch.arange(source.kv_LCSGD.numel()).view(source.kv_LCSGD.shape))
    rows = np.arange(source.rows_SLK.size).reshape(source.rows_SLK.shape).astype(source.routing.dtype)
    source.write_rows(np.arange(len(rows)), rows)
    payload = read_payload(source, blocks(3, 1), 1, 3, routing=True)
    sent = frames(payload, 1, 3)
    if readonly:
        sent = replace(sent, kv=memoryview(bytes(sent.kv)), rows=memoryview(bytes(sent.rows)))
    assert write_payload(target, blocks(2, 3), sent) is None
    # Positions 1 and 2 in blocks 2 and 3 are slots 5 and 6; they came from slots 7 and 2.
    assert torch.equal(target.kv_LCSGD[:, :, [5, 6]], source.kv_LCSGD[:, :, [7, 2]])
    assert not target.kv_LCSGD[:, :, [0, 1, 2, 3, 4, 7]].any()
    np.testing.assert_array_equal(target.read_rows(np.array([5, 6])), rows[[7, 2]])
    with pytest.raises(RoutingMissingError):
        target.read_rows(np.array([4]))


def test_one_compressed_vector_per_token_travels_alone() -> None:
    """Latent attention: one plane, half of what keys and values need."""
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=3, block_size=2, dtype=torch.float32, num_planes=1)
    source, target = (KVStore(layout, RoutingLayout(2, 1, 300), 4, torch.device("cpu")) for _ in range(2))
    # Positions 1 and 2 of a sequence in blocks 3 and 1 are slots 7 and 2.
    source.kv_LCSGD[:, 0, 7, 0] = torch.tensor([[1.0, 2, 3], [11, 12, 13]])
    source.kv_LCSGD[:, 0, 2, 0] = torch.tensor([[4.0, 5, 6], [14, 15, 16]])
    payload = read_payload(source, blocks(3, 1), 1, 3, routing=False)
    assert bytes(payload.kv) == np.array([1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16], "<f4").tobytes()
    assert payload.kv.nbytes == 2 * layout.token_bytes
    assert write_payload(target, blocks(2, 3), frames(payload, 1, 3)) is None
    assert torch.equal(target.kv_LCSGD[:, :, [5, 6]], source.kv_LCSGD[:, :, [7, 2]])
    assert not target.kv_LCSGD[:, :, [0, 1, 2, 3, 4, 7]].any()


@pytest.mark.parametrize("damaged", ["kv", "rows", "scores"])
def test_one_flipped_bit_is_found_before_anything_is_written(damaged: str) -> None:
    source, target = make_store(), make_store()
    source.kv_LCSGD.fill_(1)
    source.write_rows(np.arange(8), np.ones((8, 2, 1), source.routing.dtype))
    sent = frames(read_payload(source, blocks(1), 0, 2, routing=True, scores=empty(2, 1)), 0, 2)
    damage = bytearray(getattr(sent, damaged))
    damage[3] ^= 1
    complaint = write_payload(target, blocks(1), with_payload(sent, damaged, memoryview(damage)))
    assert complaint is not None
    assert "checksum" in complaint
    assert not target.kv_LCSGD.any()
    with pytest.raises(RoutingMissingError):
        target.read_rows(np.array([2]))
