"""Decides who gets blocks and what the next step computes. Sans-I/O: no clock, no threads, no tensors.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).
"""

import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.fork import PromptTail
from common.engine.group import ChoiceGroup
from common.engine.limits import EngineLimits
from common.engine.request import EngineLoad, EngineRequest, RequestId, Work
from common.engine.sequence import Phase, SequenceState
from common.kv.cache import PrefixCache
from common.kv.chain import TokenChain
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
    """Admission by priority and arrival, then decodes before prompts.

    A request is admitted with all blocks that its prompt and one choice can ever need, so a running sequence never
    lacks one. Its other choices are forked from the first when the prompt is there; they share the prompt's full blocks
    and wait, before everybody else, for a seat and blocks of their own. Nothing waits for ever: requests whose choices
    wait were all seated at one time, with as many blocks as each of their choices needs.

    Blocks that hold the beginning of a prompt already are taken from the prefix cache. They can only make a request
    smaller: whoever holds blocks would hold as many without it, and what nobody holds counts as free.

    Requests are checked before they come here (`common.engine.admission`): each fits into the empty pool, no two have
    one id.
    """

    def __init__(self, pool: BlockPool, limits: EngineLimits, cache: PrefixCache) -> None:
        self._pool = pool
        self._limits = limits
        self._cache = cache
        self._block_size = cache.block_size
        self._live: dict[RequestId, ChoiceGroup] = {}
        self._num_arrived = 0
        #: Requests that wait for their first blocks, by priority and arrival.
        self._waiting: list[ChoiceGroup] = []
        #: Choices that wait for blocks of their own, in the order in which they were forked.
        self._forked: deque[SequenceState] = deque()
        #: Sequences that take part in steps, or will without waiting again; in order of admission.
        self._seated: dict[SequenceState, None] = {}
        #: While set, nobody is admitted but prompts that other workers wait for.
        self.closed = False

    def add(self, request: EngineRequest) -> None:
        """Puts the request into the waiting line, behind those of its priority."""
        assert request.request_id not in self._live, f"{request.request_id!r} is live"
        self._num_arrived += 1
        group = ChoiceGroup(request, self._num_arrived, self._chain(request), self._cache.epoch)
        self._live[request.request_id] = group
        bisect.insort(self._waiting, group, key=_place)

    def find(self, request_id: RequestId) -> ChoiceGroup | None:
        return self._live.get(request_id)

    @property
    def live(self) -> list[ChoiceGroup]:
        return list(self._live.values())

    def admit(self) -> list[SequenceState]:
        """Gives seats and blocks to the head of the line, as far as they go; nobody overtakes.

        Returns:
            The sequences that are LEASED, PREFILLING or DECODING from now on. Their blocks hold old data, but for the
            first `num_shared`.
        """
        admitted = []
        while len(self._seated) < self._limits.num_seats and (sequence := self._head()) is not None:
            if not self._try_give_blocks(sequence):
                break
            self._leave_line(sequence)
            sequence.phase = _phase_at_admission(sequence)
            self._seated[sequence] = None
            admitted.append(sequence)
        return admitted

    def _try_give_blocks(self, sequence: SequenceState) -> bool:
        """Everything that the sequence will ever need, or nothing."""
        cached = self._find_cached(sequence) if sequence.phase is Phase.WAITING else []
        self._pool.share(cached)
        missing = sequence.num_blocks(self._block_size) - len(sequence.blocks) - len(cached)
        blocks = self._pool.try_allocate(missing)
        if blocks is None:
            self._pool.release(cached)
            return False
        if sequence.phase is Phase.WAITING:
            sequence.num_shared = len(cached)
            sequence.num_cached = sequence.num_computed = len(cached) * self._block_size
        sequence.blocks += (*cached, *blocks)
        return True

    def _find_cached(self, sequence: SequenceState) -> list[BlockId]:
        """Blocks of the cached prefix. At least the prompt's last token is forwarded, for what is sampled after it."""
        if sequence.epoch != self._cache.epoch:  # other weights came while it waited
            sequence.chain, sequence.epoch = self._chain(sequence.request), self._cache.epoch
        if sequence.request.sampling.prompt_logprobs is not None:
            return []  # every position's logits are wanted
        return self._cache.find(sequence.chain, sequence.num_prompt - 1, rows=sequence.wants_rows)

    def _chain(self, request: EngineRequest) -> TokenChain:
        """Names of the prompt's full blocks, under the weights in use."""
        chain = self._cache.chain(request.cache_salt)
        if self._cache.enabled:
            chain.grow(request.prompt, len(request.prompt))
        return chain

    def _head(self) -> SequenceState | None:
        if self.closed and not self._has_waiting_prefill():
            return None
        if self._forked:
            return self._forked[0]
        return self._waiting[0].prompt if self._waiting else None

    def _leave_line(self, sequence: SequenceState) -> None:
        """Takes a WAITING or FORKED sequence out of its line, wherever it stands."""
        if sequence.phase is Phase.FORKED:
            self._forked.remove(sequence)
        else:
            self._waiting.remove(self._live[sequence.request.request_id])

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when only a command can make progress possible."""
        this_round = _Round(self._limits.max_num_batched_tokens)
        this_round.add(self._seated_in(Phase.DECODING))
        this_round.add(self._seated_in(Phase.PREFILLING))
        return this_round.batch()

    def _seated_in(self, phase: Phase) -> Iterable[SequenceState]:
        return (s for s in self._seated if s.phase is phase)

    def start_decoding(self, sequence: SequenceState) -> None:
        """The prompt is computed, or arrived, and the first token is known."""
        sequence.phase = Phase.DECODING

    def fork(self, group: ChoiceGroup, choice: int, tail: PromptTail | None) -> SequenceState:
        """One more choice of a prompt that is there; it goes on when it has a seat and blocks of its own."""
        sequence = group.sequences[choice] = group.prompt.forked(choice, self._block_size, tail)
        self._pool.share(sequence.blocks)
        self._forked.append(sequence)
        return sequence

    def hold(self, sequence: SequenceState) -> None:
        """The prompt is computed; blocks stay, the seat is free for somebody else."""
        sequence.phase = Phase.PREFILLED
        del self._seated[sequence]

    def remove(self, sequence: SequenceState) -> list[BlockId]:
        """Forgets one sequence, whatever its phase; returns the blocks that nobody holds any more."""
        if sequence.phase in (Phase.WAITING, Phase.FORKED):
            self._leave_line(sequence)
        self._seated.pop(sequence, None)
        del self._live[sequence.request.request_id].sequences[sequence.choice]
        return self._pool.release(sequence.blocks)

    def remove_group(self, group: ChoiceGroup) -> list[BlockId]:
        """Forgets the request; returns the blocks that nobody holds any more."""
        freed = [block for s in list(group.sequences.values()) for block in self.remove(s)]
        del self._live[group.request.request_id]
        return freed

    def has_open_prompts(self) -> bool:
        """A prompt is being computed, is on its way here, or is waited for elsewhere."""
        return self._has_waiting_prefill() or any(s.phase in (Phase.PREFILLING, Phase.LEASED) for s in self._seated)

    def _has_waiting_prefill(self) -> bool:
        return bool(self._waiting) and self._waiting[0].request.work is Work.PREFILL

    def load(self) -> EngineLoad:
        phases = [s.phase for group in self._live.values() for s in group.sequences.values()]
        return EngineLoad(
            running=phases.count(Phase.PREFILLING) + phases.count(Phase.DECODING),
            waiting=phases.count(Phase.WAITING) + phases.count(Phase.FORKED),
            handoffs=phases.count(Phase.LEASED) + phases.count(Phase.PREFILLED),
            kv_blocks_used=self._pool.num_used,
            kv_blocks_cached=self._pool.num_cached,
            kv_blocks_total=self._pool.num_usable_blocks,
        )

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each; empty when all is well. Valid between steps."""
        groups = self._live.values()
        sequences = [s for group in groups for s in group.sequences.values()]
        found = self._pool.check_invariants(block for s in sequences for block in s.blocks)
        found += self._cache.check_invariants()
        found += [sentence for group in groups for sentence in group.violations(self._block_size)]
        waiting = [g for g in groups if Phase.WAITING in g.phases()]
        if self._waiting != sorted(waiting, key=_place):
            found.append("the waiting line and the waiting requests differ")
        if set(self._forked) != {s for s in sequences if s.phase is Phase.FORKED}:
            found.append("the line of forked choices and the forked choices differ")
        if set(self._seated) != {s for s in sequences if s.phase not in _UNSEATED}:
            found.append("the seated and the running sequences differ")
        if len(self._seated) > self._limits.num_seats:
            found.append(f"{len(self._seated)} sequences are seated where {self._limits.num_seats} may be")
        return found


def _place(group: ChoiceGroup) -> tuple[int, int]:
    """Where a request belongs in the waiting line."""
    return group.request.priority, group.arrival


def _phase_at_admission(sequence: SequenceState) -> Phase:
    if sequence.phase is Phase.FORKED:
        return Phase.DECODING
    return Phase.LEASED if sequence.request.work is Work.DECODE else Phase.PREFILLING


_UNSEATED = (Phase.WAITING, Phase.FORKED, Phase.PREFILLED)
