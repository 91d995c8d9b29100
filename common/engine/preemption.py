"""Blocks for the next token of every decoding sequence, taken from the least urgent ones if need be. Sans-I/O."""

from collections.abc import Collection
from dataclasses import dataclass, field

from common.engine.line import WaitingLine, urgency_of
from common.engine.sequence import Phase, SequenceState
from common.engine.swap import SwapSpace
from common.engine.victims import Victims
from common.kv.cache import PrefixCache
from common.kv.pool import BlockId, BlockPool


@dataclass(frozen=True, slots=True)
class Preemption:
    """One sequence that lost all of its blocks."""

    sequence: SequenceState
    #: Those that it had; somebody else may own them by now.
    blocks: tuple[BlockId, ...]
    #: Positions [0, end) of them are to be copied; 0: nothing is kept, and all is computed again.
    end: int
    #: Positions that it had.
    num_computed: int
    #: The copy does not fit into the swap space, and is needed all the same.
    exceeds: bool


@dataclass(slots=True)
class BlockChanges:
    """What has to be done to the memory, in this order, before the blocks are used in their new places."""

    #: To be copied.
    preempted: list[Preemption] = field(default_factory=list)
    #: Held by nobody for a moment at least: to be forgotten.
    freed: list[BlockId] = field(default_factory=list)
    #: Each with a block that is new: to be made blank.
    grown: list[tuple[SequenceState, BlockId]] = field(default_factory=list)


class Preemptor:
    """Gives decoding sequences the blocks that they grow into, and puts others back into the line for it.

    Victims are the least urgent among those that compute generated tokens and the choices that wait for a seat. Prompts
    never are: they hold what they need, and other parties read or write their blocks. So a sequence loses its blocks to
    a more urgent one, or because prompts, leases and held prefills have taken the rest of the pool.

    Args:
        seated, line: those of the scheduler; victims are moved from one to the other.
        exact: see `EngineLimits`.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        swap: SwapSpace,
        seated: dict[SequenceState, None],
        line: WaitingLine,
        *,
        exact: bool,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._swap = swap
        self._seated = seated
        self._line = line
        self._exact = exact
        #: The engine is about to freeze: whoever is preempted keeps a copy, and nobody who is computed again is.
        self.settling = False
        self._changes = BlockChanges()

    def take_changes(self) -> BlockChanges:
        """What has changed since the last call."""
        changes, self._changes = self._changes, BlockChanges()
        return changes

    def grow(self) -> None:
        """Every decoding sequence has blocks for all tokens that it knows, or is put back into the line."""
        size = self._cache.block_size
        lacking = [s for s in self._seated if s.phase is Phase.DECODING and len(s.token_ids) > len(s.blocks) * size]
        if len(lacking) > self._pool.num_available:
            self._grow_by_urgency(lacking)
        else:
            for sequence in lacking:
                self._add_block(sequence)
        self._grow_ahead()

    def _grow_by_urgency(self, lacking: list[SequenceState]) -> None:
        """Not all of them can have a block without taking it from others."""
        victims = Victims(self._pool, self._preemptible(), self._line)
        for sequence in sorted(lacking, key=urgency_of):
            # Or a more urgent one has just taken its blocks; it may be the last victim itself.
            while sequence.phase is Phase.DECODING and not self._pool.num_available:
                self.try_preempt(victims)
            if sequence.phase is Phase.DECODING:
                self._add_block(sequence)

    def _grow_ahead(self) -> None:
        """Whose blocks are full with the token that is forwarded next gets one more, so that the step after the next
        one can be prepared; as long as more are left than the seated sequences will soon need.
        """
        size = self._cache.block_size
        for sequence in self._seated:
            if self._pool.num_available <= len(self._seated):
                return
            is_full = len(sequence.token_ids) == len(sequence.blocks) * size
            if is_full and sequence.phase is Phase.DECODING and len(sequence.blocks) < sequence.max_blocks(size):
                self._add_block(sequence)

    def _add_block(self, sequence: SequenceState) -> None:
        blocks = self._pool.try_allocate(1)
        assert blocks is not None, f"{sequence.name} grows while no block is available"
        sequence.blocks += tuple(blocks)
        self._changes.grown += [(sequence, block) for block in blocks]

    def victims_for(
        self, head: SequenceState, cached: Collection[BlockId], spared: Collection[SequenceState]
    ) -> Victims:
        """Whose blocks, or seat, may keep the head of the line waiting, which would share `cached`."""
        seated = [s for s in self._preemptible() if s not in spared] if self.settling else ()
        return Victims(self._pool, seated, self._line, {*head.blocks, *cached})

    def _preemptible(self) -> list[SequenceState]:
        """Seated sequences that compute generated tokens, and may be stopped."""
        phases = (Phase.DECODING,) if self.settling else (Phase.DECODING, Phase.RECOMPUTING)
        return [s for s in self._seated if s.phase in phases]

    def try_preempt(self, victims: Victims, *, only_seated: bool = False) -> bool:
        """Takes the blocks of the least urgent of them; False if none is left."""
        if (victim := victims.pop(only_seated=only_seated)) is None:
            return False
        self._preempt(victim, victims)
        return True

    def _preempt(self, victim: SequenceState, victims: Victims) -> None:
        """Takes all blocks of a sequence and puts it into the line, with a copy of what was in them or without."""
        num_computed, in_blocks = victim.num_computed, victim.num_computed
        if victim.phase is Phase.FORKED:
            in_blocks = victim.num_shared * self._cache.block_size
        else:
            del self._seated[victim]
            self._line.add(victim)
        if not self._try_keep(victim):
            victim.num_computed, victim.saved, in_blocks = 0, (), 0
        exceeds = in_blocks > 0 and self._swap.used_bytes > self._swap.limit_bytes
        self._changes.preempted.append(Preemption(victim, victim.blocks, in_blocks, num_computed, exceeds))
        self._changes.freed += self._pool.release(victim.blocks)
        victims.took(victim)
        victim.phase, victim.blocks, victim.num_shared = Phase.PREEMPTED, (), 0

    def _try_keep(self, victim: SequenceState) -> bool:
        """Room for a copy of what was computed: if there is some, or if computing again is wrong or takes too long."""
        if victim.num_computed and self._swap.try_take(victim):
            return True
        if self._exact and victim.weights == self._cache.num_weight_changes and not self.settling:
            return False
        self._swap.take(victim)
        return True
