"""Decides who gets blocks and what the next step computes. Sans-I/O: no clock, no threads, no tensors.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.limits import EngineLimits
from common.engine.request import EngineLoad, EngineRequest, RequestId, Work
from common.engine.sequence import Phase, SequenceState
from common.kv.pool import BlockId, BlockPool


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, end) of one sequence, to be forwarded in the next step."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """The last known token is forwarded, so that the next one can be sampled."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: decoding sequences first, then prompt chunks, each in order of admission."""

    chunks: tuple[ScheduledChunk, ...]


class _Round:
    """One scheduling round: hands out the token budget. Thrown away when the batch is built."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._chunks: list[ScheduledChunk] = []

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Gives each sequence all tokens it can forward, or what is left of the budget."""
        for sequence in sequences:
            start = sequence.num_computed
            end = min(len(sequence.token_ids), start + self._budget)
            if start < end:
                self._budget -= end - start
                self._chunks.append(ScheduledChunk(sequence, start, end))

    def batch(self) -> ScheduledBatch | None:
        return ScheduledBatch(tuple(self._chunks)) if self._chunks else None


class Scheduler:
    """FIFO admission, then decodes before prompts.

    A request is admitted with all blocks it can ever need, so a running sequence never lacks one. Requests are checked
    before they come here (`common.engine.admission`): each fits into the empty pool, no two have one id.
    """

    def __init__(self, pool: BlockPool, limits: EngineLimits, *, block_size: int) -> None:
        self._pool = pool
        self._limits = limits
        self._block_size = block_size
        self._live: dict[RequestId, SequenceState] = {}
        self._waiting: deque[SequenceState] = deque()
        #: Sequences that take part in steps, or will without waiting again; in order of admission.
        self._seated: dict[RequestId, SequenceState] = {}

    def add(self, request: EngineRequest) -> None:
        """Puts the request at the end of the waiting line."""
        assert request.request_id not in self._live, f"{request.request_id!r} is live"
        sequence = self._live[request.request_id] = SequenceState(request)
        self._waiting.append(sequence)

    def find(self, request_id: RequestId) -> SequenceState | None:
        return self._live.get(request_id)

    @property
    def live(self) -> list[SequenceState]:
        return list(self._live.values())

    def admit(self) -> list[SequenceState]:
        """Gives seats and blocks to the head of the line, as far as they go; nobody overtakes.

        Returns:
            The sequences that are LEASED or PREFILLING from now on. Their blocks hold old data.
        """
        admitted = []
        while self._waiting and len(self._seated) < self._limits.num_seats:
            sequence = self._waiting[0]
            blocks = self._pool.try_allocate(self._num_blocks(sequence))
            if blocks is None:
                break
            self._waiting.popleft()
            sequence.blocks = tuple(blocks)
            sequence.phase = Phase.LEASED if sequence.request.work is Work.DECODE else Phase.PREFILLING
            self._seated[sequence.request.request_id] = sequence
            admitted.append(sequence)
        return admitted

    def _num_blocks(self, sequence: SequenceState) -> int:
        return -(-sequence.request.num_slots // self._block_size)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when only a command can make progress possible."""
        this_round = _Round(self._limits.max_num_batched_tokens)
        this_round.add(self._seated_in(Phase.DECODING))
        this_round.add(self._seated_in(Phase.PREFILLING))
        return this_round.batch()

    def _seated_in(self, phase: Phase) -> Iterable[SequenceState]:
        return (s for s in self._seated.values() if s.phase is phase)

    def start_decoding(self, sequence: SequenceState) -> None:
        """The prompt is computed, or arrived, and the first token is known."""
        sequence.phase = Phase.DECODING

    def hold(self, sequence: SequenceState) -> None:
        """The prompt is computed; blocks stay, the seat is free for somebody else."""
        sequence.phase = Phase.PREFILLED
        del self._seated[sequence.request.request_id]

    def remove(self, sequence: SequenceState) -> list[BlockId]:
        """Forgets the sequence, whatever its phase; returns the blocks that nobody holds any more."""
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        self._seated.pop(sequence.request.request_id, None)
        del self._live[sequence.request.request_id]
        return self._pool.release(sequence.blocks)

    def load(self) -> EngineLoad:
        phases = [s.phase for s in self._live.values()]
        return EngineLoad(
            running=phases.count(Phase.PREFILLING) + phases.count(Phase.DECODING),
            waiting=phases.count(Phase.WAITING),
            handoffs=phases.count(Phase.LEASED) + phases.count(Phase.PREFILLED),
            kv_blocks_used=self._pool.num_used,
            kv_blocks_total=self._pool.num_usable_blocks,
        )

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each; empty when all is well. Valid between steps."""
        live = self._live.values()
        found = self._pool.check_invariants(block for s in live for block in s.blocks)
        found += [sentence for s in live for sentence in s.violations(self._block_size)]
        if list(self._waiting) != [s for s in live if s.phase is Phase.WAITING]:
            found.append("the waiting line and the waiting sequences differ")
        if set(self._seated) != {s.request.request_id for s in live if s.phase not in _UNSEATED}:
            found.append("the seated and the running sequences differ")
        if len(self._seated) > self._limits.num_seats:
            found.append(f"{len(self._seated)} sequences are seated where {self._limits.num_seats} may be")
        return found


_UNSEATED = (Phase.WAITING, Phase.PREFILLED)
