"""Decides who gets blocks and what the next step computes. Sans-I/O: no clock, no threads, no tensors.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024).
"""

from collections.abc import Collection

from common.engine.allotment import Allotment
from common.engine.backlog import Backlog
from common.engine.batch import Round, ScheduledBatch
from common.engine.forecast import forecast
from common.engine.group import ChoiceGroup
from common.engine.limits import EngineLimits
from common.engine.line import WaitingLine, urgency_of
from common.engine.pace import Pace
from common.engine.preemption import BlockChanges, Preemptor
from common.engine.request import EngineLoad, EngineRequest, RequestId, Work
from common.engine.saved import SavedRange
from common.engine.sequence import Phase, SequenceState
from common.engine.short_first import OpenPrompt, ShortFirst
from common.engine.step_times import StepWork
from common.engine.swap import SwapSpace
from common.kv.cache import PrefixCache
from common.kv.pool import BlockId, BlockPool
from common.model.batch import Chunk


class Scheduler:
    """Everybody in one order of urgency: priority, then arrival, then choice. Decodes before prompts in every step.

    Prompts that are being computed share a step in that order too, but for short ones: as a part of all tokens they go
    before others, and where these are long the step is kept short (`ShortFirst`).

    A sequence comes in with blocks for the tokens that are known, and grows block by block. When none is left the least
    urgent decoding sequence loses its blocks and goes back into the line (`Preemptor`); it comes back with blocks for
    all that it knows. What is in them then is shared with the prefix cache, copied back, or computed again.

    One line of prompts, forked choices and preempted sequences; its head comes in, or nobody. Whoever comes in leaves
    one block for each seated sequence that still grows, and one for itself: so between two preemptions all of them get
    about as many steps as a block has slots.

    Nothing waits for ever. A step in which somebody decodes brings a token, of which there are finitely many; in steps
    without one nobody is preempted, and prompts come to their end. A lease and a held prefill end by themselves,
    because whoever reads or writes their blocks gives up at some time. So with nobody overtaking the head, all seats
    become empty some day, if it is not let in before; then forked choices lose their blocks to it, and since each
    request fits into the empty pool (`common.engine.admission`) the head comes in.

    While `closed` only what a freeze waits for comes in, without leaving anything for others: prompts that are awaited
    elsewhere and sequences that lack KV. It takes seats and blocks from decoding sequences and idle choices, which keep
    a copy, beyond the bound if need be, and so need nothing more before the freeze; it is computed before they decode,
    and is not preempted itself. So nothing comes to have to be computed again, every step brings a whole budget of
    tokens of what must be, or ends all of it that has a seat, and whoever holds seats or blocks that cannot be taken
    (prompts, leases, held prefills, what is recomputed) ends by itself or becomes a decoding sequence.

    Cached blocks can only make a request smaller: whoever holds some would hold as many without the cache, and what
    nobody holds counts as free.

    Where streams have an objective, `Pace` bounds the prompt tokens beside decodes and the seats of those that decode.
    At least one seat is always there, and some prompt tokens, so all of the above holds.
    """

    def __init__(self, pool: BlockPool, limits: EngineLimits, cache: PrefixCache, swap: SwapSpace, pace: Pace) -> None:
        self._pool = pool
        self._limits = limits
        self._cache = cache
        self._swap = swap
        self._pace = pace
        least_chunk = limits.max_mixed_prefill_tokens or 0
        self._short_first = ShortFirst(pace, limits.max_num_batched_tokens, least_chunk)
        self._allotment = Allotment(pool, cache, swap, exact=limits.exact)
        self._block_size = cache.block_size
        self._live: dict[RequestId, ChoiceGroup] = {}
        self._num_arrived = 0
        #: Sequences that are PREFILLED.
        self._num_held = 0
        self._line = WaitingLine()
        #: Sequences that take part in steps, or will without waiting again; in order of admission.
        self._seated: dict[SequenceState, None] = {}
        self._preemptor = Preemptor(pool, cache, swap, self._seated, self._line, exact=limits.exact)

    def add(self, request: EngineRequest) -> None:
        """Puts the request into the waiting line, behind those of its priority."""
        assert request.request_id not in self._live, f"{request.request_id!r} is live"
        self._num_arrived += 1
        group = ChoiceGroup(request, self._num_arrived, self._allotment.chain(request), self._cache.epoch)
        self._live[request.request_id] = group
        self._line.add(group.prompt)

    def find(self, request_id: RequestId) -> ChoiceGroup | None:
        return self._live.get(request_id)

    @property
    def live(self) -> list[ChoiceGroup]:
        return list(self._live.values())

    # --- admission

    @property
    def closed(self) -> bool:
        """The engine is about to freeze: only what has to be finished before is admitted, and goes first."""
        return self._preemptor.settling

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._preemptor.settling = closed

    def admit(self) -> list[SequenceState]:
        """Gives seats and blocks to the head of the line, as far as they go; nobody overtakes.

        Returns:
            The sequences that are LEASED, PREFILLING, RECOMPUTING or DECODING from now on. Their blocks hold old data,
            but for the first `num_shared`; `saved` belongs into them. Before, `take_changes` has to be carried out.
        """
        admitted: list[SequenceState] = []
        while (sequence := self._head()) is not None and self._try_admit(sequence, admitted):
            admitted.append(sequence)
        return admitted

    def _head(self) -> SequenceState | None:
        if not self.closed:
            return self._line.head
        return next((s for s in self._line if _lacks_kv(s) or _is_awaited(s)), None)

    def _try_admit(self, sequence: SequenceState, admitted: Collection[SequenceState]) -> bool:
        if not (self._try_give(sequence) or self._try_make_room(sequence, admitted)):
            return False
        self._line.remove(sequence)
        sequence.phase = _phase_at_admission(sequence)
        self._seated[sequence] = None
        return True

    @property
    def _seats_are_full(self) -> bool:
        return len(self._seated) >= self._limits.num_seats

    def _try_give(self, sequence: SequenceState) -> bool:
        """Blocks, if there is a seat too."""
        if self._seats_are_full or not self._is_in_time(sequence):
            return False
        return self._allotment.try_give(sequence, self._reserve(sequence))

    def _is_in_time(self, sequence: SequenceState) -> bool:
        """Those that decode still keep to their objective with one more, as far as can be told; or that is tried."""
        if self.closed or not self._seated or sequence.request.work is Work.PREFILL or not self._pace.bounds_decodes:
            return True
        contexts = [len(s.token_ids) for s in self._seated]
        decodes = StepWork(decode_tokens=len(contexts), decode_pairs=sum(contexts))
        return self._pace.has_room(decodes, len(sequence.token_ids))

    def _try_make_room(self, sequence: SequenceState, admitted: Collection[SequenceState]) -> bool:
        """The same at the cost of others, where nobody is going to leave, or before a freeze.

        Not of `admitted`: what belongs into their blocks is not there yet.
        """
        if self._seated and not self.closed:
            return False
        victims = self._preemptor.victims_for(sequence, self._allotment.find_cached(sequence), admitted)
        while self._preemptor.try_preempt(victims, only_seated=self._seats_are_full):
            if self._try_give(sequence):
                return True
        return False

    def _reserve(self, sequence: SequenceState) -> int:
        """Blocks that must be left when `sequence` comes in, lest somebody is preempted at once."""
        if self.closed or not self._seated:
            return 0
        size = self._block_size
        growing = sum(len(s.blocks) < s.max_blocks(size) for s in self._seated)
        return growing + (sequence.num_blocks(size) < sequence.max_blocks(size))

    # --- steps

    def grow(self) -> None:
        """Gives each decoding sequence a block for its next token; `take_changes` tells what that took."""
        self._preemptor.grow()

    def take_changes(self) -> BlockChanges:
        """What `admit` and `grow` did to blocks since the last call."""
        return self._preemptor.take_changes()

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when only a command can make progress possible."""
        decoding: list[SequenceState] = []
        computing: list[OpenPrompt] = []
        for sequence in self._seated:
            if sequence.phase is Phase.DECODING:
                decoding.append(sequence)
            elif sequence.phase is not Phase.LEASED:
                computing.append((sequence, sequence.num_computed))
        this_round = Round(self._limits.max_num_batched_tokens)
        if self.closed:
            this_round.add_prompts(computing, this_round.budget)
            this_round.add_decodes(decoding)
        else:
            this_round.add_decodes(decoding)
            if computing:
                portion = self._short_first.portion(computing, this_round.work, this_round.budget)
                this_round.add_prompts(portion.prompts, portion.budget)
                self._short_first.took(portion, this_round.work.prompt_tokens)
        return this_round.batch()

    def forecast(self, batch: ScheduledBatch) -> list[Chunk]:
        """What the step after this one will probably compute."""
        budget = self._limits.max_num_batched_tokens
        return forecast(batch, self._seated, budget, self._block_size, self._short_first)

    def advance(self, sequence: SequenceState, end: int) -> None:
        """A step has computed the positions up to `end`."""
        sequence.num_computed = end
        if sequence.phase is Phase.RECOMPUTING and end >= sequence.num_forwarded:
            sequence.phase = Phase.DECODING

    def start_decoding(self, sequence: SequenceState) -> None:
        """The prompt is computed, or arrived, and the first token is known."""
        sequence.phase = Phase.DECODING

    def fork(self, group: ChoiceGroup, choice: int, tail: tuple[SavedRange, ...]) -> SequenceState:
        """One more choice of a prompt that is there; it goes on when it has a seat and blocks of its own."""
        sequence = group.sequences[choice] = group.prompt.forked(choice, self._block_size, tail)
        self._pool.share(sequence.blocks)
        self._line.add(sequence)
        return sequence

    def hold(self, sequence: SequenceState) -> None:
        """The prompt is computed; blocks stay, the seat is free for somebody else."""
        sequence.phase = Phase.PREFILLED
        self._num_held += 1
        del self._seated[sequence]

    # --- ends

    def remove(self, sequence: SequenceState) -> list[BlockId]:
        """Forgets one sequence, whatever its phase; returns the blocks that nobody holds any more."""
        if sequence.phase in _IN_LINE:
            self._line.remove(sequence)
        elif sequence.phase is Phase.PREFILLED:
            self._num_held -= 1
        if sequence.phase is Phase.PREEMPTED:
            self._swap.give_back(sequence)
        self._seated.pop(sequence, None)
        del self._live[sequence.request.request_id].sequences[sequence.choice]
        return self._pool.release(sequence.blocks)

    def remove_group(self, group: ChoiceGroup) -> list[BlockId]:
        """Forgets the request; returns the blocks that nobody holds any more."""
        freed = [block for s in list(group.sequences.values()) for block in self.remove(s)]
        del self._live[group.request.request_id]
        return freed

    # --- observation

    def backlog(self) -> Backlog:
        """What stands between a prompt that comes now and its first token."""
        contexts = [len(s.token_ids) for s in self._seated if s.phase is Phase.DECODING]
        decodes = StepWork(decode_tokens=len(contexts), decode_pairs=sum(contexts))
        token_s = self._pace.prompt_token_s(decodes, self._limits.max_num_batched_tokens)
        computing = [s for s in self._seated if s.phase in (Phase.PREFILLING, Phase.RECOMPUTING)]
        return Backlog(sum(len(s.token_ids) - s.num_computed for s in computing), token_s)

    def has_open_prompts(self) -> bool:
        """A prompt is being computed, is on its way here, or is waited for elsewhere; or a sequence is recomputed."""
        return self.has_recomputation() or any(
            s.phase in (Phase.PREFILLING, Phase.LEASED) or _is_awaited(s) for s in (*self._seated, *self._line)
        )

    def has_recomputation(self) -> bool:
        """A sequence is, or will be, computed again, which takes the weights that it was computed with."""
        return any(s.phase is Phase.RECOMPUTING for s in self._seated) or any(_lacks_kv(s) for s in self._line)

    def load(self) -> EngineLoad:
        num_leased = sum(s.phase is Phase.LEASED for s in self._seated)
        return EngineLoad(
            running=len(self._seated) - num_leased,
            waiting=len(self._line),
            preempted=sum(s.phase is Phase.PREEMPTED for s in self._line),
            handoffs=num_leased + self._num_held,
            kv_blocks_used=self._pool.num_used,
            kv_blocks_cached=self._pool.num_cached,
            kv_blocks_total=self._pool.num_usable_blocks,
            swap_bytes_used=self._swap.used_bytes,
            swap_bytes_total=self._swap.limit_bytes,
        )

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each; empty when all is well. Valid between steps."""
        groups = self._live.values()
        sequences = [s for group in groups for s in group.sequences.values()]
        found = self._pool.check_invariants(block for s in sequences for block in s.blocks)
        found += self._cache.check_invariants() + self._swap.check_invariants(sequences)
        found += [sentence for group in groups for sentence in group.violations(self._block_size)]
        if list(self._line) != sorted((s for s in sequences if s.phase in _IN_LINE), key=urgency_of):
            found.append("the waiting line and the waiting sequences differ")
        if set(self._seated) != {s for s in sequences if s.phase in (*_COMPUTING, Phase.LEASED)}:
            found.append("the seated and the running sequences differ")
        if self._num_held != sum(s.phase is Phase.PREFILLED for s in sequences):
            found.append(f"{self._num_held} sequences count as held for a handoff, which is not so")
        if len(self._seated) > self._limits.num_seats:
            found.append(f"{len(self._seated)} sequences are seated where {self._limits.num_seats} may be")
        return found


def _is_awaited(sequence: SequenceState) -> bool:
    """A prompt without blocks that another worker waits for."""
    return sequence.phase is Phase.WAITING and sequence.request.work is Work.PREFILL


def _lacks_kv(sequence: SequenceState) -> bool:
    """It was preempted, and has no copy of some positions: they are computed again."""
    return sequence.phase is Phase.PREEMPTED and sequence.num_computed < sequence.num_forwarded


def _phase_at_admission(sequence: SequenceState) -> Phase:
    """For a sequence whose blocks have been given."""
    if sequence.phase is Phase.WAITING:
        return _phase_of_prompt(sequence)
    return Phase.DECODING if sequence.num_computed == sequence.num_forwarded else Phase.RECOMPUTING


def _phase_of_prompt(prompt: SequenceState) -> Phase:
    """Work.DECODE computes it here if it is so short that a handoff costs more."""
    missing = prompt.num_prompt - prompt.num_cached
    if prompt.request.work is Work.DECODE and missing > prompt.request.local_prefill_max_tokens:
        return Phase.LEASED
    return Phase.PREFILLING


_IN_LINE = (Phase.WAITING, Phase.FORKED, Phase.PREEMPTED)
_COMPUTING = (Phase.PREFILLING, Phase.DECODING, Phase.RECOMPUTING)
