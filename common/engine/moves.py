"""Carries out on the memory what the scheduler decided about blocks."""

from collections.abc import Iterable

from common.engine.faults import OUT_OF_MEMORY, Failure, memory_failure
from common.engine.preemption import BlockChanges, Preemption
from common.engine.preemption_log import PreemptionLog
from common.engine.request import RequestId
from common.engine.saved import SavedRange, save
from common.engine.sequence import SequenceState
from common.engine.stats import EngineStats
from common.errors import MoerelayError
from common.kv.pool import BlockId, BlockPool
from common.kv.store import KVStore

#: What leaves more room for copies, and for what is computed beside the KV cache.
_HOST = "lower --swap-space, or give the worker more host memory"
_DEVICE = "lower --kv-cache-memory or --num-kv-blocks, so that more of the device's memory is left"


#: By request, blocks and end: what the choices of one prompt keep of it.
Copies = dict[tuple[RequestId, tuple[BlockId, ...], int], tuple[SavedRange, ...]]


class BlockMover:
    """Copies, forgets and blanks blocks. Failures are returned, for whoever can end a request."""

    def __init__(self, store: KVStore, pool: BlockPool, stats: EngineStats, log: PreemptionLog) -> None:
        self._store = store
        self._pool = pool
        self._stats = stats
        self._log = log

    def carry_out(self, changes: BlockChanges, admitted: Iterable[SequenceState] = ()) -> list[Failure]:
        """All of it, in the only right order: a block is copied before it is forgotten, and forgotten before it is
        made blank for its next owner, who may be the one that it was taken from.
        """
        copies: Copies = {}
        failures = [f for p in changes.preempted if (f := self._save(p, copies)) is not None]
        self._store.free_blocks([*changes.freed, *self._pool.take_evicted()])
        failures += self._blank(changes.grown)
        return failures + [f for s in admitted if (f := self._fill(s)) is not None]

    def _save(self, preemption: Preemption, copies: Copies) -> Failure | None:
        """Copies what a preempted sequence keeps of the blocks that it had; choices of one prompt share `copies`."""
        sequence, end = preemption.sequence, preemption.end
        self._stats.preemptions_beyond_bound += preemption.exceeds
        if not end:
            self._stats.preemptions_recomputed += 1
            self._log.preempted(preemption)
            return None
        # The blocks' numbers alone do not do: they may have had another owner in the same round.
        key = sequence.request.request_id, preemption.blocks, end
        try:
            if key not in copies:
                copies[key] = save(self._store, preemption.blocks, end, routing=sequence.wants_rows)
                self._stats.swapped_tokens += end
        except MoerelayError as error:
            return sequence, error
        except OUT_OF_MEMORY as error:
            return memory_failure(sequence, f"copying the KV of {end} positions to host memory", _HOST, error)
        sequence.saved = (*copies[key], *sequence.saved)
        self._stats.preemptions_swapped += 1
        self._log.preempted(preemption)
        return None

    def _blank(self, grown: list[tuple[SequenceState, BlockId]]) -> list[Failure]:
        """Makes the blocks blank into which sequences grow."""
        if not grown:
            return []
        try:
            self._store.clear_blocks([block for _, block in grown])
        except OUT_OF_MEMORY as error:
            return [memory_failure(s, f"preparing one of {len(grown)} KV blocks", _DEVICE, error) for s, _ in grown]
        return []

    def _fill(self, sequence: SequenceState) -> Failure | None:
        """Makes the blocks that a sequence came in with blank, but for what it shares or has saved."""
        start = sequence.num_shared * self._store.layout.block_size
        try:
            self._store.clear_blocks(sequence.blocks[sequence.num_shared :])
            for saved in sequence.saved:
                saved.write(self._store, sequence.blocks, start)
        except OUT_OF_MEMORY as error:
            return memory_failure(sequence, f"preparing {len(sequence.blocks)} KV blocks", _DEVICE, error)
        sequence.saved = ()
        return None
