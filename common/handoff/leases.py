"""Which blocks a decode worker (D) has reserved for which handoff, and what may still be written into them. Sans-I/O.

Life of a lease: OPEN → gone when the handoff is complete, or when it ends early and nothing is being written;
OPEN → DRAINING → gone when it ends early during a write: its blocks are not free before that write has returned.
Messages that carry the number or generation of a lease that is not open are discarded and counted.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from common.handoff.lease import PEER_GONE, Failure, Lease, LeaseState
from common.handoff.messages import Abort, Chunk, Close, FailureKind, Generation, Renew, TransferId
from common.kv.pool import BlockId


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """The chunk fits: write it, then call `finish_write`."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Completed:
    """The handoff is complete; the lease is gone and its blocks belong to the request."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Renewed:
    """The sender is alive."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The message ends the lease, which is gone; `lease.failure` says why."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Discarded:
    """The message belongs to no open lease of its sender."""

    reason: str


Verdict = WriteChunk | Completed | Renewed | Failed | Discarded


class LeaseBook:
    """All leases of one decode worker. One owner thread; the caller finishes a write before the lease's next message.

    Args:
        token_bytes, row_bytes: what one token's KV and routing row occupy in a payload.
        max_chunk_bytes: payload that one chunk may carry; the credit, since a chunk must fit into it.
        timeout_s: how long a lease lives without progress.
        known_versions: labels of all weights that were in use here; a first token may come from any of them.
    """

    def __init__(
        self,
        *,
        token_bytes: int,
        row_bytes: int,
        block_size: int,
        max_chunk_bytes: int,
        timeout_s: float,
        known_versions: Callable[[], Collection[str]],
    ) -> None:
        self.timeout_s = timeout_s
        self.num_discarded = 0
        self._token_bytes = token_bytes
        self._row_bytes = row_bytes
        self._block_size = block_size
        self._max_chunk_bytes = max_chunk_bytes
        self._known_versions = known_versions
        self._leases: dict[TransferId, Lease] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        request_id: str,
        blocks: Sequence[BlockId],
        *,
        num_tokens: int,
        num_cached: int,
        routing: bool,
        num_top: int | None = None,
        generation: Generation,
        now: float,
    ) -> Lease:
        """Reserves `blocks` for positions [num_cached, num_tokens). `num_cached` is a multiple of the block size.

        `num_top`: alternatives in each entry of prompt logprobs, which travel for all positions; None: none travel.
        """
        assert 0 <= num_cached <= num_tokens <= len(blocks) * self._block_size, "the blocks do not cover the prompt"
        assert num_cached % self._block_size == 0, "only whole blocks are cached"
        self._last_id += 1
        lease = Lease(
            transfer_id=TransferId(self._last_id),
            generation=generation,
            request_id=request_id,
            blocks=tuple(blocks),
            num_cached=num_cached,
            num_tokens=num_tokens,
            routing=routing,
            num_top=num_top,
            deadline=now + self.timeout_s,
            position=num_cached,
        )
        self._leases[lease.transfer_id] = lease
        return lease

    def find(self, transfer_id: TransferId) -> Lease | None:
        """The lease, open or draining."""
        return self._leases.get(transfer_id)

    def receive(self, message: Renew | Chunk | Close | Abort, peer: bytes, now: float) -> Verdict:
        """Judges one message and changes the lease accordingly. Payloads have not been looked at yet."""
        lease = self._leases.get(message.transfer_id)
        if lease is None or lease.generation != message.generation or lease.state is not LeaseState.OPEN:
            self.num_discarded += 1
            return Discarded(f"no lease {message.transfer_id} of this generation is open; it ended or never was")
        if lease.peer not in (None, peer):
            self.num_discarded += 1
            return Discarded(f"lease {message.transfer_id} is used by another connection")
        assert not lease.writing, "a message was handed in during the lease's own write"
        lease.peer = peer
        lease.deadline = now + self.timeout_s
        if isinstance(message, Renew):
            return Renewed()
        if isinstance(message, Chunk):
            return self._on_chunk(lease, message, now)
        if isinstance(message, Close):
            return self._on_close(lease, message)
        return self._failed(lease, FailureKind.ABORTED, f"the prefill worker gave up: {message.reason}")

    def _on_chunk(self, lease: Lease, chunk: Chunk, now: float) -> Verdict:
        violation = self._violation(lease, chunk)
        if violation:
            return self._failed(lease, FailureKind.CORRUPT, f"chunk {chunk.seq} {violation}")
        lease.next_seq += 1
        lease.began = now if lease.began is None else lease.began
        lease.num_scored += 0 if lease.num_top is None else chunk.scores_bytes // lease.score_bytes
        lease.writing = True
        return WriteChunk(lease)

    def _violation(self, lease: Lease, chunk: Chunk) -> str | None:
        if chunk.seq != lease.next_seq:
            return f"arrived where chunk {lease.next_seq} belongs"
        if chunk.start != lease.position or not chunk.start <= chunk.end <= lease.num_tokens:
            return (
                f"covers [{chunk.start}, {chunk.end}) but must start at {lease.position} and end by {lease.num_tokens}"
            )
        num_tokens = chunk.end - chunk.start
        expected = (num_tokens * self._token_bytes, num_tokens * self._row_bytes if lease.routing else 0)
        if (chunk.kv_bytes, chunk.rows_bytes) != expected:
            return f"declares {chunk.kv_bytes} + {chunk.rows_bytes} bytes where {expected[0]} + {expected[1]} belong"
        if complaint := _scores_violation(lease, chunk):
            return complaint
        num_bytes = sum(expected) + chunk.scores_bytes
        if num_bytes > self._max_chunk_bytes:
            return f"has {num_bytes} bytes, more than the credit of {self._max_chunk_bytes}"
        return None

    def _on_close(self, lease: Lease, close: Close) -> Verdict:
        if close.num_chunks != lease.next_seq or lease.position != lease.num_tokens:
            reason = (
                f"the closing message follows {lease.next_seq} chunks up to position {lease.position}, "
                f"but {close.num_chunks} chunks up to {lease.num_tokens} belong before it"
            )
            return self._failed(lease, FailureKind.CORRUPT, reason)
        if lease.num_top is not None and lease.num_scored != lease.num_tokens:
            reason = f"the closing message follows the logprobs of {lease.num_scored} of {lease.num_tokens} positions"
            return self._failed(lease, FailureKind.CORRUPT, reason)
        if not 0 < close.num_computed <= lease.num_tokens:
            reason = f"the closing message says that {close.num_computed} of {lease.num_tokens} tokens were computed"
            return self._failed(lease, FailureKind.CORRUPT, reason)
        known = self._known_versions()
        if strange := [t.weight_version for t in close.first_tokens if t.weight_version not in known]:
            reason = f"the first token comes from weights {strange[0]!r}, which this worker never had in use"
            return self._failed(lease, FailureKind.REFUSED, reason)
        del self._leases[lease.transfer_id]
        return Completed(lease)

    def _failed(self, lease: Lease, kind: FailureKind, reason: str) -> Failed:
        self.end(lease, Failure(kind, reason))
        return Failed(lease)

    def finish_write(self, lease: Lease, end: int, now: float) -> bool:
        """A write has returned: positions up to `end` are there. False: the lease ended meanwhile and is gone now."""
        assert lease.writing, "no write was under way"
        lease.writing = False
        if lease.state is LeaseState.DRAINING:
            del self._leases[lease.transfer_id]
            return False
        lease.position = end
        lease.deadline = now + self.timeout_s
        return True

    def end(self, lease: Lease, failure: Failure | None) -> bool:
        """Ends an open lease early. True: it is gone; False: a write is under way and `finish_write` removes it."""
        assert lease.state is LeaseState.OPEN, "the lease ended before"
        lease.failure = failure
        if lease.writing:
            lease.state = LeaseState.DRAINING
            return False
        del self._leases[lease.transfer_id]
        return True

    def expire(self, now: float) -> list[Lease]:
        """Ends every open lease whose deadline has passed; returns them. Those still `writing` are draining."""
        failure = Failure(FailureKind.TIMEOUT, f"nothing arrived for {self.timeout_s:g} s")
        return self._end_where(lambda lease: lease.deadline <= now, failure)

    def lose_peer(self, peer: bytes, failure: Failure = PEER_GONE) -> list[Lease]:
        """Ends every open lease of a connection; returns them. Those still `writing` are draining."""
        return self._end_where(lambda lease: lease.peer == peer, failure)

    def end_all(self, reason: str) -> list[Lease]:
        """Ends every open lease; returns them. Those still `writing` are draining."""
        return self._end_where(lambda lease: True, Failure(FailureKind.ABORTED, reason))

    def _end_where(self, condition: Callable[[Lease], bool], failure: Failure) -> list[Lease]:
        leases = [lease for lease in self._leases.values() if lease.state is LeaseState.OPEN and condition(lease)]
        for lease in leases:
            self.end(lease, failure)
        return leases

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each."""
        found = []
        writers: dict[BlockId, TransferId] = {}
        for lease in self._leases.values():
            name = f"lease {lease.transfer_id}"
            if not lease.num_cached <= lease.position <= lease.num_tokens:
                found.append(f"{name} is at position {lease.position} outside its range")
            if lease.state is LeaseState.DRAINING and not lease.writing:
                found.append(f"{name} drains but nothing is being written")
            for block in lease.blocks[lease.num_cached // self._block_size :]:
                if block in writers:
                    found.append(f"block {block} is leased to {writers[block]} and {lease.transfer_id}")
                writers[block] = lease.transfer_id
        return found


def _scores_violation(lease: Lease, chunk: Chunk) -> str | None:
    size, missing = lease.score_bytes, lease.num_tokens - lease.num_scored
    if chunk.scores_bytes > size * missing or (size and chunk.scores_bytes % size):
        return f"declares {chunk.scores_bytes} bytes of prompt logprobs where {missing} times {size} are missing"
    if chunk.start == chunk.end and not chunk.scores_bytes:
        return f"covers [{chunk.start}, {chunk.end}) and brings nothing"
    return None
