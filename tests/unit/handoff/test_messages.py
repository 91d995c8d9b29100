"""Every message of the handoff protocol, byte for byte: a change here is a change of the protocol."""

import msgspec
import pytest

from common.handoff.frames import decode_from_decode, decode_from_prefill, encode
from common.handoff.messages import (
    HANDOFF_PROTOCOL_VERSION,
    Abort,
    Chunk,
    Close,
    Credit,
    DecodeMessage,
    Done,
    FailureKind,
    Generation,
    HandoffIdentity,
    Hello,
    PrefillMessage,
    Ready,
    Refuse,
    Reject,
    Renew,
    TransferId,
    first_difference,
)
from common.sampling import SampledToken, TokenLogprob

IDENTITY = HandoffIdentity(
    instance_id="i",
    fingerprint="f",
    weight_version="0",
    numerics="n",
    dtype="bfloat16",
    block_size=16,
    num_layers=48,
    num_kv_planes=2,
    num_kv_heads=4,
    head_dim=128,
    routing_dtype="uint8",
    top_k=8,
    num_experts=128,
    routing_enabled=True,
    max_model_len=40_960,
)
IDENTITY_BYTES = (
    b"\xde\x00\x10"
    b"\xabinstance_id\xa1i"
    b"\xb0protocol_version\x05"
    b"\xabfingerprint\xa1f"
    b"\xaeweight_version\xa10"
    b"\xa8numerics\xa1n"
    b"\xa5dtype\xa8bfloat16"
    b"\xaablock_size\x10"
    b"\xaanum_layers\x30"
    b"\xadnum_kv_planes\x02"
    b"\xacnum_kv_heads\x04"
    b"\xa8head_dim\xcc\x80"
    b"\xadrouting_dtype\xa5uint8"
    b"\xa5top_k\x08"
    b"\xabnum_experts\xcc\x80"
    b"\xafrouting_enabled\xc3"
    b"\xadmax_model_len\xcd\xa0\x00"
)
ADDRESS_BYTES = b"\xabtransfer_id\x07\xaageneration\xcf\xff\xee\xdd\xcc\xbb\xaa\x99\x88"
TRANSFER, GENERATION = TransferId(7), Generation(0xFFEEDDCCBBAA9988)

BEST = TokenLogprob(5, -0.5, 1)

FROM_PREFILL: list[tuple[PrefillMessage, bytes]] = [
    (Hello(identity=IDENTITY), b"\x82\xa4type\xa5hello\xa8identity" + IDENTITY_BYTES),
    (Renew(transfer_id=TRANSFER, generation=GENERATION), b"\x83\xa4type\xa5renew" + ADDRESS_BYTES),
    (
        Chunk(
            transfer_id=TRANSFER,
            generation=GENERATION,
            seq=1,
            start=16,
            end=20,
            kv_bytes=3,
            rows_bytes=2,
            scores_bytes=1,
            kv_checksum=2**63,
            rows_checksum=255,
            scores_checksum=128,
        ),
        b"\x8c\xa4type\xa5chunk" + ADDRESS_BYTES + b"\xa3seq\x01\xa5start\x10\xa3end\x14\xa8kv_bytes\x03"
        b"\xaarows_bytes\x02\xacscores_bytes\x01\xabkv_checksum\xcf\x80\x00\x00\x00\x00\x00\x00\x00"
        b"\xadrows_checksum\xcc\xff\xafscores_checksum\xcc\x80",
    ),
    (
        Close(
            transfer_id=TRANSFER, generation=GENERATION, num_chunks=2, num_computed=3, first_tokens=(SampledToken(5),)
        ),
        b"\x86\xa4type\xa5close" + ADDRESS_BYTES + b"\xaanum_chunks\x02\xacnum_computed\x03"
        b"\xacfirst_tokens\x91\x85\xa8token_id\x05\xa7logprob\xc0\xa3top\x90\xa4mask\xc0\xaeweight_version\xa0",
    ),
    (
        Close(
            transfer_id=TRANSFER,
            generation=GENERATION,
            num_chunks=0,
            num_computed=1,
            first_tokens=(SampledToken(5),),
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        b"\x87\xa4type\xa5close" + ADDRESS_BYTES + b"\xaanum_chunks\x00\xacnum_computed\x01"
        b"\xacfirst_tokens\x91\x85\xa8token_id\x05\xa7logprob\xc0\xa3top\x90\xa4mask\xc0\xaeweight_version\xa0"
        b"\xabtraceparent\xd9\x3700-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    (
        Close(
            transfer_id=TRANSFER,
            generation=GENERATION,
            num_chunks=2,
            num_computed=300,
            first_tokens=(
                SampledToken(
                    5,
                    TokenLogprob(5, -0.5, 1),
                    (TokenLogprob(5, -0.5, 1), TokenLogprob(300, -2.0, 2)),
                    b"\5\0\0\0\x2c\1\0\0",
                    "v",
                ),
                SampledToken(6),
            ),
        ),
        b"\x86\xa4type\xa5close"
        + ADDRESS_BYTES
        + b"\xaanum_chunks\x02\xacnum_computed\xcd\x01\x2c\xacfirst_tokens\x92\x85\xa8token_id\x05"
        b"\xa7logprob\x83\xa8token_id\x05\xa7logprob\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\xa4rank\x01"
        b"\xa3top\x92\x83\xa8token_id\x05\xa7logprob\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\xa4rank\x01"
        b"\x83\xa8token_id\xcd\x01\x2c\xa7logprob\xcb\xc0\x00\x00\x00\x00\x00\x00\x00\xa4rank\x02"
        b"\xa4mask\xc4\x08\x05\x00\x00\x00\x2c\x01\x00\x00\xaeweight_version\xa1v"
        b"\x85\xa8token_id\x06\xa7logprob\xc0\xa3top\x90\xa4mask\xc0\xaeweight_version\xa0",
    ),
    (
        Abort(transfer_id=TRANSFER, generation=GENERATION, reason="gone"),
        b"\x84\xa4type\xa5abort" + ADDRESS_BYTES + b"\xa6reason\xa4gone",
    ),
]

FROM_DECODE: list[tuple[DecodeMessage, bytes]] = [
    (
        Ready(identity=IDENTITY, credit_bytes=2**26, credit_chunks=32),
        b"\x84\xa4type\xa5ready\xa8identity"
        + IDENTITY_BYTES
        + b"\xaccredit_bytes\xce\x04\x00\x00\x00\xadcredit_chunks\x20",
    ),
    (Refuse(reason="no"), b"\x82\xa4type\xa6refuse\xa6reason\xa2no"),
    (
        Credit(transfer_id=TRANSFER, generation=GENERATION, num_bytes=5, num_chunks=1),
        b"\x85\xa4type\xa6credit" + ADDRESS_BYTES + b"\xa9num_bytes\x05\xaanum_chunks\x01",
    ),
    (Done(transfer_id=TRANSFER, generation=GENERATION), b"\x83\xa4type\xa4done" + ADDRESS_BYTES),
    (
        Reject(transfer_id=TRANSFER, generation=GENERATION, kind=FailureKind.CORRUPT, reason="bad"),
        b"\x85\xa4type\xa6reject" + ADDRESS_BYTES + b"\xa4kind\xa7corrupt\xa6reason\xa3bad",
    ),
]


def test_the_version_is_pinned_with_the_bytes() -> None:
    assert HANDOFF_PROTOCOL_VERSION == 5


@pytest.mark.parametrize(("message", "golden"), FROM_PREFILL, ids=lambda value: type(value).__name__)
def test_golden_bytes_from_prefill(message: PrefillMessage, golden: bytes) -> None:
    payloads = (b"kvk", b"rr", b"s") if isinstance(message, Chunk) else ()
    assert encode(message, *payloads) == [golden, *payloads]
    decoded = decode_from_prefill([golden, *payloads])
    assert getattr(decoded, "header", decoded) == message


@pytest.mark.parametrize(("message", "golden"), FROM_DECODE, ids=lambda value: type(value).__name__)
def test_golden_bytes_from_decode(message: DecodeMessage, golden: bytes) -> None:
    assert encode(message) == [golden]
    assert decode_from_decode([golden]) == message


def test_every_message_has_golden_bytes() -> None:
    assert {type(message) for message, _ in FROM_PREFILL} == {Hello, Renew, Chunk, Close, Abort}
    assert {type(message) for message, _ in FROM_DECODE} == {Ready, Refuse, Credit, Done, Reject}


def test_failure_kinds_are_pinned() -> None:
    assert [kind.value for kind in FailureKind] == ["refused", "corrupt", "timeout", "aborted"]


def test_workers_that_differ_in_their_instance_only_fit() -> None:
    assert first_difference(IDENTITY, msgspec.structs.replace(IDENTITY, instance_id="j")) is None


def test_the_first_difference_is_a_sentence_with_both_values() -> None:
    other = msgspec.structs.replace(IDENTITY, top_k=4, max_model_len=1)
    assert first_difference(IDENTITY, other) == "the workers differ in top_k: 8 here, 4 on the other side"


def test_another_version_is_named_before_anything_else() -> None:
    other = msgspec.structs.replace(IDENTITY, protocol_version=1, fingerprint="g")
    assert first_difference(IDENTITY, other) == "the workers differ in protocol_version: 5 here, 1 on the other side"
