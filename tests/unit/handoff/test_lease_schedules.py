"""Random schedules of the lease book: a block is never given to a second lease while the first may still write it."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.handoff.lease import Lease, LeaseState
from common.handoff.leases import Completed, Discarded, Failed, LeaseBook, Renewed, Verdict, WriteChunk
from common.handoff.messages import Abort, Chunk, Close, Generation, Renew
from common.kv.pool import BlockId
from common.sampling import SampledToken

TOKEN_BYTES, ROW_BYTES, BLOCK_SIZE, TIMEOUT_S = 10, 3, 4, 5.0
NUM_BLOCKS = 8
KINDS = ["renew", "close", "abort", "stale"]


class LeaseSchedules(RuleBasedStateMachine):
    """A sender that sends anything, a receiver that follows the rules, and a pool that reuses blocks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = LeaseBook(
            token_bytes=TOKEN_BYTES,
            row_bytes=ROW_BYTES,
            block_size=BLOCK_SIZE,
            max_chunk_bytes=100 * (TOKEN_BYTES + ROW_BYTES),
            timeout_s=TIMEOUT_S,
            known_versions=lambda: {""},
        )
        self.free = [BlockId(block) for block in range(1, NUM_BLOCKS + 1)]
        self.leases: list[Lease] = []
        #: Leases whose blocks have not gone back to the pool.
        self.holding: list[Lease] = []
        self.writing: list[tuple[Lease, int]] = []
        self.num_judged = 0
        self.num_discarded = 0

    def release(self, lease: Lease) -> None:
        assert lease in self.holding, "the lease ended twice"
        assert all(lease is not writer for writer, _ in self.writing), "blocks are free while they are written"
        self.holding.remove(lease)
        self.free += lease.blocks

    def any_lease(self, data: st.DataObject) -> Lease:
        return self.leases[data.draw(st.integers(0, len(self.leases) - 1))]

    def judge(self, message: Renew | Chunk | Close | Abort, lease: Lease, peer: bytes) -> Verdict | None:
        """What a receiver does with one message; it hands in none for a lease that it is writing into."""
        if lease.writing and lease.state is LeaseState.OPEN and lease.peer == peer:
            return None
        verdict = self.book.receive(message, peer, self.now)
        if isinstance(verdict, WriteChunk):
            assert isinstance(message, Chunk)
            self.writing.append((lease, message.end))
        elif isinstance(verdict, Completed | Failed):
            self.release(lease)
        elif isinstance(verdict, Discarded):
            self.num_discarded += 1
        return verdict

    @precondition(lambda self: self.free)
    @rule(data=st.data(), routing=st.booleans())
    def grant(self, data: st.DataObject, routing: bool) -> None:
        blocks = [self.free.pop() for _ in range(data.draw(st.integers(1, len(self.free))))]
        lease = self.book.grant(
            "request",
            blocks,
            num_tokens=data.draw(st.integers(1, len(blocks) * BLOCK_SIZE)),
            num_cached=0,
            routing=routing,
            generation=Generation(data.draw(st.integers(0, 3))),
            now=self.now,
        )
        self.leases.append(lease)
        self.holding.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), peer=st.sampled_from([b"p", b"q"]), honest=st.booleans())
    def send_chunk(self, data: st.DataObject, peer: bytes, honest: bool) -> None:
        lease = self.any_lease(data)
        if honest and lease.position < lease.num_tokens:
            seq, start = lease.next_seq, lease.position
            end = data.draw(st.integers(start + 1, lease.num_tokens))
        else:
            seq, start, end = (data.draw(st.integers(0, 40)) for _ in range(3))
        num_tokens = max(0, end - start)
        message = Chunk(
            transfer_id=lease.transfer_id,
            generation=lease.generation,
            seq=seq,
            start=start,
            end=end,
            kv_bytes=num_tokens * TOKEN_BYTES,
            rows_bytes=num_tokens * ROW_BYTES * lease.routing,
            scores_bytes=0,
            kv_checksum=0,
            rows_checksum=0,
            scores_checksum=0,
        )
        before = (lease.state, lease.position, lease.next_seq, lease.peer)
        verdict = self.judge(message, lease, peer)
        fits = (seq, start) == (before[2], before[1]) and start < end <= lease.num_tokens
        if isinstance(verdict, WriteChunk):
            assert fits
            assert before[0] is LeaseState.OPEN
            assert before[3] in (None, peer)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def finish_write(self, data: st.DataObject) -> None:
        lease, end = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        was_open = lease.state is LeaseState.OPEN
        assert self.book.finish_write(lease, end, self.now) == was_open
        if not was_open:
            self.release(lease)

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(), peer=st.sampled_from([b"p", b"q"]), kind=st.sampled_from(["renew", "close", "abort", "stale"])
    )
    def send_control(self, data: st.DataObject, peer: bytes, kind: str) -> None:
        lease = self.any_lease(data)
        address: dict[str, Any] = {"transfer_id": lease.transfer_id, "generation": lease.generation}
        message: Renew | Close | Abort
        if kind == "close":
            message = Close(num_chunks=lease.next_seq, num_computed=1, first_tokens=(SampledToken(1),), **address)
        elif kind == "abort":
            message = Abort(reason="enough", **address)
        elif kind == "stale":
            message = Renew(transfer_id=lease.transfer_id, generation=Generation(lease.generation + 1))
        else:
            message = Renew(**address)
        verdict = self.judge(message, lease, peer)
        if kind == "stale":
            assert verdict is None or isinstance(verdict, Discarded)
        if isinstance(verdict, Completed):
            assert kind == "close"
            assert lease.position == lease.num_tokens
        if isinstance(verdict, Renewed):
            assert lease.deadline == self.now + TIMEOUT_S

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = self.holding[data.draw(st.integers(0, len(self.holding) - 1))]
        if lease.state is LeaseState.OPEN and self.book.end(lease, None):
            self.release(lease)

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.book.expire(self.now):
            assert lease.deadline <= self.now
            if not lease.writing:
                self.release(lease)
        assert all(lease.deadline > self.now for lease in self.holding if lease.state is LeaseState.OPEN)

    @rule(peer=st.sampled_from([b"p", b"q"]))
    def lose_peer(self, peer: bytes) -> None:
        for lease in self.book.lose_peer(peer):
            if not lease.writing:
                self.release(lease)

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        assert self.book.check_invariants() == []
        assert len(self.book) == len(self.holding)
        assert self.book.num_discarded == self.num_discarded
        held = [block for lease in self.holding for block in lease.blocks]
        assert sorted([*held, *self.free]) == list(range(1, NUM_BLOCKS + 1))
        assert {id(lease) for lease, _ in self.writing} == {id(lease) for lease in self.holding if lease.writing}


TestLeaseSchedules = LeaseSchedules.TestCase
TestLeaseSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
