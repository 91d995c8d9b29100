"""Order, credit and end of a transfer on the prefill side."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import HandoffCorruptError, HandoffError, HandoffRefusedError, HandoffTimeoutError, WorkerLostError
from common.handoff.channel import HIGH_WATER_MARK
from common.handoff.messages import Credit, Done, FailureKind, Generation, Reject, TransferId
from common.handoff.outgoing import (
    CONTROL_MESSAGES,
    CREDIT_CHUNKS,
    MAX_TRANSFERS,
    Cut,
    OutgoingState,
    OutgoingTransfer,
)

TRANSFER, GENERATION = TransferId(1), Generation(2)


def outgoing(
    *,
    start: int = 0,
    credit_bytes: int = 100,
    credit_chunks: int = 4,
    token_bytes: int = 10,
    target_bytes: int = 1_000,
    score_bytes: int = 0,
) -> OutgoingTransfer:
    return OutgoingTransfer(
        start=start,
        credit_bytes=credit_bytes,
        credit_chunks=credit_chunks,
        token_bytes=token_bytes,
        target_bytes=target_bytes,
        score_bytes=score_bytes,
    )


def credit(num_bytes: int, num_chunks: int = 1) -> Credit:
    return Credit(transfer_id=TRANSFER, generation=GENERATION, num_bytes=num_bytes, num_chunks=num_chunks)


def done() -> Done:
    return Done(transfer_id=TRANSFER, generation=GENERATION)


def reject(kind: FailureKind) -> Reject:
    return Reject(transfer_id=TRANSFER, generation=GENERATION, kind=kind, reason="because")


def test_credit_keeps_every_queue_below_its_mark() -> None:
    assert MAX_TRANSFERS * (CREDIT_CHUNKS + CONTROL_MESSAGES) < HIGH_WATER_MARK


@given(
    start=st.integers(0, 50),
    length=st.integers(0, 200),
    token_bytes=st.integers(1, 30),
    target_bytes=st.integers(1, 100),
    credit_bytes=st.integers(30, 300),
)
def test_chunks_cover_the_range_once_and_each_fits_the_credit(
    start: int, length: int, token_bytes: int, target_bytes: int, credit_bytes: int
) -> None:
    transfer = outgoing(start=start, credit_bytes=credit_bytes, token_bytes=token_bytes, target_bytes=target_bytes)
    ends = [cut.end for cut in transfer.split(start + length)]
    assert (ends[-1] if ends else start) == start + length
    for begin, end in pairwise([start, *ends]):
        assert begin < end
        assert (end - begin) * token_bytes <= credit_bytes
        assert end - begin == 1 or (end - begin) * token_bytes <= target_bytes


@given(
    start=st.integers(0, 50),
    length=st.integers(0, 60),
    num_scores=st.integers(0, 100),
    score_bytes=st.integers(1, 30),
    target_bytes=st.integers(1, 100),
    credit_bytes=st.integers(60, 300),
)
def test_logprobs_and_positions_travel_once_and_each_chunk_fits_the_credit(
    start: int, length: int, num_scores: int, score_bytes: int, target_bytes: int, credit_bytes: int
) -> None:
    transfer = outgoing(
        start=start,
        credit_bytes=credit_bytes,
        credit_chunks=200,
        token_bytes=30,
        target_bytes=target_bytes,
        score_bytes=score_bytes,
    )
    cuts = transfer.split(start + length, num_scores)
    assert sum(cut.num_scores for cut in cuts) == num_scores
    position = start
    for cut in cuts:
        assert position <= cut.end
        assert cut.end > position or cut.num_scores
        num_bytes = (cut.end - position) * 30 + cut.num_scores * score_bytes
        assert num_bytes <= max(min(target_bytes, credit_bytes), 30 + score_bytes)
        position = cut.end
    assert position == start + length


def test_the_chunks_of_a_range_are_equally_large() -> None:
    # 85 tokens fit into a chunk, so that 256 need four.
    transfer = outgoing(token_bytes=12, target_bytes=1024, credit_bytes=10_000)
    assert [cut.end for cut in transfer.split(256)] == [64, 128, 192, 256]
    assert [cut.end for cut in outgoing(token_bytes=12, target_bytes=1024, credit_bytes=600).split(101)] == [
        34,
        68,
        101,
    ]


def test_logprobs_use_credit_too() -> None:
    transfer = outgoing(credit_bytes=50, score_bytes=5)
    transfer.take(Cut(2, 4))
    assert transfer.num_bytes == 40
    assert transfer.has_credit(Cut(3))
    assert not transfer.has_credit(Cut(3, 1))
    assert transfer.has_credit(Cut(2, 2))
    with pytest.raises(HandoffRefusedError, match="less than one token's 51"):
        outgoing(credit_bytes=50, score_bytes=41)


def test_chunks_are_numbered_and_follow_one_another() -> None:
    transfer = outgoing(start=16)
    assert [transfer.take(Cut(18)), transfer.take(Cut(19))] == [(0, 16), (1, 18)]
    assert (transfer.position, transfer.num_chunks, transfer.num_bytes) == (19, 2, 30)


def test_bytes_of_credit_run_out_and_come_back() -> None:
    transfer = outgoing(credit_bytes=50)
    transfer.take(Cut(4))
    assert transfer.has_credit(Cut(5))
    assert not transfer.has_credit(Cut(6))
    transfer.on_message(credit(40))
    assert transfer.has_credit(Cut(9))
    assert not transfer.has_credit(Cut(10))


def test_chunks_of_credit_run_out_and_come_back() -> None:
    transfer = outgoing(credit_chunks=2)
    transfer.take(Cut(1))
    transfer.take(Cut(2))
    assert not transfer.has_credit(Cut(3))
    transfer.on_message(credit(10))
    assert transfer.has_credit(Cut(3))


def test_a_credit_smaller_than_one_token_is_refused() -> None:
    with pytest.raises(HandoffRefusedError, match="100 bytes is less than one token's 101"):
        outgoing(token_bytes=101)


@pytest.mark.parametrize(("num_bytes", "num_chunks"), [(11, 1), (10, 2)])
def test_more_credit_than_was_used_fails_the_transfer(num_bytes: int, num_chunks: int) -> None:
    transfer = outgoing()
    transfer.take(Cut(1))
    transfer.on_message(credit(num_bytes, num_chunks))
    assert isinstance(transfer.error, HandoffCorruptError)


def test_an_acknowledgement_ends_a_closed_transfer() -> None:
    transfer = outgoing()
    states = [transfer.state]
    transfer.close()
    states.append(transfer.state)
    transfer.on_message(done())
    states.append(transfer.state)
    assert states == [OutgoingState.OPEN, OutgoingState.CLOSING, OutgoingState.DONE]


def test_an_acknowledgement_before_the_close_fails_the_transfer() -> None:
    transfer = outgoing()
    transfer.on_message(done())
    assert isinstance(transfer.error, HandoffCorruptError)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.REFUSED, HandoffRefusedError),
        (FailureKind.CORRUPT, HandoffCorruptError),
        (FailureKind.TIMEOUT, HandoffTimeoutError),
        (FailureKind.ABORTED, HandoffError),
    ],
)
def test_a_rejection_becomes_the_error_of_its_kind(kind: FailureKind, error: type[HandoffError]) -> None:
    transfer = outgoing()
    transfer.on_message(reject(kind))
    assert type(transfer.error) is error
    assert transfer.state is OutgoingState.FAILED


def test_the_first_end_is_the_end() -> None:
    failed = outgoing()
    failed.fail(WorkerLostError("first"))
    failed.on_message(reject(FailureKind.CORRUPT))
    failed.fail(HandoffTimeoutError("second"))
    assert isinstance(failed.error, WorkerLostError)
    finished = outgoing()
    finished.close()
    finished.on_message(done())
    finished.on_message(reject(FailureKind.CORRUPT))
    finished.fail(WorkerLostError("late"))
    assert (finished.state, finished.error) == (OutgoingState.DONE, None)
