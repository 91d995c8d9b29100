"""The lease book, race by race and under random schedules. Time is a number here."""

import msgspec
import pytest

from common.handoff.lease import Failure, Lease, LeaseState
from common.handoff.leases import Completed, Discarded, Failed, LeaseBook, Renewed, WriteChunk
from common.handoff.messages import Abort, Chunk, Close, FailureKind, Generation, Renew, TransferId
from common.kv.pool import BlockId
from common.sampling import SampledToken

TOKEN_BYTES, ROW_BYTES, BLOCK_SIZE, TIMEOUT_S = 10, 3, 4, 5.0
PEER, OTHER_PEER = b"p", b"q"
REVOKED = None


def make_book() -> LeaseBook:
    return LeaseBook(
        token_bytes=TOKEN_BYTES,
        row_bytes=ROW_BYTES,
        block_size=BLOCK_SIZE,
        max_chunk_bytes=6 * (TOKEN_BYTES + ROW_BYTES),
        timeout_s=TIMEOUT_S,
        known_versions=lambda: {"", "v1"},
    )


def grant(
    book: LeaseBook,
    *,
    blocks: tuple[int, ...] = (3, 4),
    num_tokens: int = 8,
    num_cached: int = 0,
    routing: bool = True,
    num_top: int | None = None,
) -> Lease:
    return book.grant(
        "request",
        [BlockId(block) for block in blocks],
        num_tokens=num_tokens,
        num_cached=num_cached,
        routing=routing,
        num_top=num_top,
        generation=Generation(99),
        now=0.0,
    )


def chunk(lease: Lease, start: int, end: int, *, seq: int | None = None, scores_bytes: int = 0) -> Chunk:
    return Chunk(
        transfer_id=lease.transfer_id,
        generation=lease.generation,
        seq=lease.next_seq if seq is None else seq,
        start=start,
        end=end,
        kv_bytes=(end - start) * TOKEN_BYTES,
        rows_bytes=(end - start) * ROW_BYTES if lease.routing else 0,
        scores_bytes=scores_bytes,
        kv_checksum=0,
        rows_checksum=0,
        scores_checksum=0,
    )


def close(lease: Lease, num_chunks: int, num_computed: int = 1) -> Close:
    return Close(
        transfer_id=lease.transfer_id,
        generation=lease.generation,
        num_chunks=num_chunks,
        num_computed=num_computed,
        first_tokens=(SampledToken(1),),
    )


def renew(lease: Lease) -> Renew:
    return Renew(transfer_id=lease.transfer_id, generation=lease.generation)


def write(book: LeaseBook, lease: Lease, start: int, end: int, now: float = 0.0) -> None:
    assert book.receive(chunk(lease, start, end), PEER, now) == WriteChunk(lease)
    assert book.finish_write(lease, end, now)


def failure_of(verdict: object) -> Failure:
    assert isinstance(verdict, Failed)
    assert verdict.lease.failure is not None
    return verdict.lease.failure


def test_a_handoff_in_two_chunks_completes() -> None:
    book = make_book()
    lease = grant(book, num_tokens=7)
    write(book, lease, 0, 4)
    write(book, lease, 4, 7)
    assert book.receive(close(lease, 2), PEER, 0.0) == Completed(lease)
    assert len(book) == 0
    assert lease.failure is None


def test_transfer_ids_are_never_reused() -> None:
    book = make_book()
    seen = []
    for _ in range(3):
        lease = grant(book)
        seen.append(lease.transfer_id)
        book.end(lease, REVOKED)
    assert len(set(seen)) == 3


def test_without_routing_a_chunk_must_not_bring_rows() -> None:
    book = make_book()
    lease = grant(book, routing=False)
    write(book, lease, 0, 4)
    with_rows = msgspec.structs.replace(chunk(lease, 4, 8), rows_bytes=4 * ROW_BYTES)
    assert failure_of(book.receive(with_rows, PEER, 0.0)).kind is FailureKind.CORRUPT


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seq": 0}, "chunk 1 belongs"),
        ({"seq": 2}, "chunk 1 belongs"),
        ({"start": 3}, "must start at 4"),
        ({"start": 5}, "must start at 4"),
        ({"end": 4, "kv_bytes": 0, "rows_bytes": 0}, "covers [4, 4) and brings nothing"),
        ({"scores_bytes": 12}, "declares 12 bytes of prompt logprobs"),
        ({"end": 3}, "end by 8"),
        ({"end": 9}, "end by 8"),
        ({"end": 2**64 - 1}, "end by 8"),
        ({"kv_bytes": 19}, "declares 19 + 6 bytes where 20 + 6 belong"),
        ({"rows_bytes": 0}, "declares 20 + 0 bytes where 20 + 6 belong"),
    ],
)
def test_a_chunk_that_does_not_fit_ends_the_lease(changes: dict[str, int], complaint: str) -> None:
    book = make_book()
    lease = grant(book)
    write(book, lease, 0, 4)
    verdict = book.receive(msgspec.structs.replace(chunk(lease, 4, 6), **changes), PEER, 0.0)
    assert failure_of(verdict).kind is FailureKind.CORRUPT
    assert complaint in failure_of(verdict).reason
    assert len(book) == 0


def test_a_chunk_larger_than_the_credit_ends_the_lease() -> None:
    book = make_book()
    assert "credit" in failure_of(book.receive(chunk(grant(book), 0, 7), PEER, 0.0)).reason


@pytest.mark.parametrize(("received", "num_chunks"), [(0, 0), (4, 1), (8, 1), (8, 3)])
def test_a_close_that_does_not_fit_ends_the_lease(received: int, num_chunks: int) -> None:
    book = make_book()
    lease = grant(book)
    for start in range(0, received, 4):
        write(book, lease, start, start + 4)
    assert failure_of(book.receive(close(lease, num_chunks), PEER, 0.0)).kind is FailureKind.CORRUPT


def test_logprobs_of_all_positions_come_before_the_close() -> None:
    """Also those of cached positions, in chunks of their own. One position takes 12 bytes for itself and each other."""
    book = make_book()
    lease = grant(book, num_cached=4, num_top=1)
    assert book.receive(chunk(lease, 4, 4, scores_bytes=3 * 24), PEER, 0.0) == WriteChunk(lease)
    assert book.finish_write(lease, 4, 0.0)
    assert book.receive(chunk(lease, 4, 8, scores_bytes=24), PEER, 0.0) == WriteChunk(lease)
    assert book.finish_write(lease, 8, 0.0)
    early = close(lease, 2)
    assert "logprobs of 4 of 8 positions" in failure_of(book.receive(early, PEER, 0.0)).reason
    lease = grant(book, num_cached=8, num_top=0)
    assert book.receive(chunk(lease, 8, 8, scores_bytes=6 * 12), PEER, 0.0) == WriteChunk(lease)
    assert book.finish_write(lease, 8, 0.0)
    assert book.receive(chunk(lease, 8, 8, scores_bytes=2 * 12), PEER, 0.0) == WriteChunk(lease)
    assert book.finish_write(lease, 8, 0.0)
    assert book.receive(close(lease, 2), PEER, 0.0) == Completed(lease)


@pytest.mark.parametrize("scores_bytes", [1, 12, 25, 9 * 24])
def test_logprobs_that_do_not_fit_end_the_lease(scores_bytes: int) -> None:
    book = make_book()
    lease = grant(book, num_top=1)
    failure = failure_of(book.receive(chunk(lease, 0, 1, scores_bytes=scores_bytes), PEER, 0.0))
    assert failure.kind is FailureKind.CORRUPT
    assert "8 times 24 are missing" in failure.reason


def test_logprobs_count_against_the_credit() -> None:
    book = make_book()
    lease = grant(book, num_top=1)
    assert (
        "more than the credit of 78"
        in failure_of(book.receive(chunk(lease, 0, 3, scores_bytes=2 * 24), PEER, 0.0)).reason
    )


@pytest.mark.parametrize(("version", "known"), [("", True), ("v1", True), ("v2", False)])
def test_a_first_token_of_weights_that_were_never_used_here_is_refused(version: str, known: bool) -> None:
    book = make_book()
    lease = grant(book, num_cached=8)
    tokens = (SampledToken(1), SampledToken(2, weight_version=version))
    verdict = book.receive(msgspec.structs.replace(close(lease, 0), first_tokens=tokens), PEER, 0.0)
    if known:
        assert verdict == Completed(lease)
    else:
        assert failure_of(verdict).kind is FailureKind.REFUSED
        assert "weights 'v2'" in failure_of(verdict).reason
    assert len(book) == 0


@pytest.mark.parametrize("num_computed", [0, 9])
def test_a_prompt_of_which_nothing_or_too_much_was_computed_is_corrupt(num_computed: int) -> None:
    book = make_book()
    lease = grant(book, num_cached=8)
    failure = failure_of(book.receive(close(lease, 0, num_computed), PEER, 0.0))
    assert failure == Failure(
        FailureKind.CORRUPT, f"the closing message says that {num_computed} of 8 tokens were computed"
    )
    assert len(book) == 0


def test_an_abort_ends_the_lease_with_the_senders_words() -> None:
    book = make_book()
    lease = grant(book)
    abort = Abort(transfer_id=lease.transfer_id, generation=lease.generation, reason="out of coffee")
    failure = failure_of(book.receive(abort, PEER, 0.0))
    assert failure == Failure(FailureKind.ABORTED, "the prefill worker gave up: out of coffee")


def test_messages_of_ended_leases_and_other_generations_are_discarded_and_counted() -> None:
    book = make_book()
    ended, living = grant(book), grant(book, blocks=(5, 6))
    late: list[Renew | Chunk | Close] = [chunk(ended, 0, 4), close(ended, 0), renew(ended)]
    book.end(ended, REVOKED)
    stale: list[Renew | Chunk | Close] = [
        msgspec.structs.replace(chunk(living, 0, 4), generation=Generation(98)),
        msgspec.structs.replace(renew(living), transfer_id=TransferId(77)),
    ]
    for number, message in enumerate([*late, *stale], start=1):
        assert isinstance(book.receive(message, PEER, 0.0), Discarded)
        assert book.num_discarded == number
    write(book, living, 0, 4)


def test_the_first_message_binds_the_lease_to_its_connection() -> None:
    book = make_book()
    lease = grant(book)
    assert book.receive(renew(lease), PEER, 0.0) == Renewed()
    assert isinstance(book.receive(chunk(lease, 0, 4), OTHER_PEER, 0.0), Discarded)
    write(book, lease, 0, 4)


def test_progress_of_every_kind_extends_the_deadline() -> None:
    book = make_book()
    lease = grant(book)
    assert book.expire(TIMEOUT_S - 0.1) == []
    book.receive(renew(lease), PEER, 4.0)
    assert book.expire(8.9) == []
    assert book.receive(chunk(lease, 0, 4), PEER, 8.0) == WriteChunk(lease)
    assert book.expire(12.9) == []
    book.finish_write(lease, 4, 12.0)
    assert book.expire(16.9) == []
    assert book.expire(17.0) == [lease]
    assert lease.failure == Failure(FailureKind.TIMEOUT, "nothing arrived for 5 s")


def test_discarded_messages_do_not_extend_the_deadline() -> None:
    book = make_book()
    lease = grant(book)
    book.receive(msgspec.structs.replace(renew(lease), generation=Generation(1)), PEER, 4.0)
    assert book.expire(TIMEOUT_S) == [lease]


@pytest.mark.parametrize("how", ["revoked", "expired", "lost", "all"])
def test_a_lease_that_ends_during_a_write_drains(how: str) -> None:
    book = make_book()
    lease = grant(book)
    assert book.receive(chunk(lease, 0, 4), PEER, 0.0) == WriteChunk(lease)
    if how == "revoked":
        assert not book.end(lease, REVOKED)
    elif how == "expired":
        assert book.expire(100.0) == [lease]
    elif how == "lost":
        assert book.lose_peer(PEER) == [lease]
    else:
        assert book.end_all("closing") == [lease]
    assert lease.state is LeaseState.DRAINING
    assert len(book) == 1
    assert isinstance(book.receive(renew(lease), PEER, 0.0), Discarded)
    assert book.expire(200.0) == []
    assert not book.finish_write(lease, 4, 0.0)
    assert len(book) == 0
    assert (lease.failure is None) == (how == "revoked")


def test_a_lost_connection_ends_its_own_leases_only() -> None:
    book = make_book()
    mine, theirs, unused = grant(book), grant(book, blocks=(5, 6)), grant(book, blocks=(7, 8))
    book.receive(renew(mine), PEER, 0.0)
    book.receive(renew(theirs), OTHER_PEER, 0.0)
    assert book.lose_peer(PEER) == [mine]
    assert book.find(theirs.transfer_id) is theirs
    assert book.find(unused.transfer_id) is unused


def test_two_writers_of_one_block_are_a_violation_but_sharing_a_cached_one_is_not() -> None:
    book = make_book()
    grant(book, blocks=(3, 4), num_cached=4)
    grant(book, blocks=(3, 5), num_cached=4)
    assert book.check_invariants() == []
    grant(book, blocks=(3, 5), num_cached=4)
    assert book.check_invariants() == ["block 5 is leased to 2 and 3"]


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(9, 0), (4, 5), (8, 3)])
def test_a_lease_that_makes_no_sense_is_our_own_bug(num_tokens: int, num_cached: int) -> None:
    with pytest.raises(AssertionError):
        grant(make_book(), num_tokens=num_tokens, num_cached=num_cached)
