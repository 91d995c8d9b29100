"""Blocks for whoever comes in: shared with the prefix cache as far as it goes, and new ones for the rest. Sans-I/O."""

from common.engine.request import EngineRequest
from common.engine.sequence import Phase, SequenceState
from common.engine.swap import SwapSpace
from common.kv.cache import PrefixCache
from common.kv.chain import TokenChain
from common.kv.pool import BlockId, BlockPool


class Allotment:
    """Gives a sequence the blocks of all tokens that are known, or none.

    Args:
        exact: see `EngineLimits`.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache, swap: SwapSpace, *, exact: bool) -> None:
        self._pool = pool
        self._cache = cache
        self._swap = swap
        self._exact = exact

    def try_give(self, sequence: SequenceState, reserve: int) -> bool:
        """False, and no change, unless at least `reserve` blocks are left.

        Nor does whoever waits renew the blocks that it would share: asking is no use of them.
        """
        available = self._pool.num_available
        if available <= reserve:  # at least one block is missing: the one of the last known token
            return False
        cached = self.find_cached(sequence)
        available -= sum(not self._pool.num_references(block) for block in cached)
        missing = sequence.num_blocks(self._cache.block_size) - len(sequence.blocks) - len(cached)
        if available - missing < reserve:
            return False
        self._pool.share(cached)
        self._take_over(sequence, cached)
        sequence.blocks += (*cached, *(self._pool.try_allocate(missing) or ()))
        return True

    def _take_over(self, sequence: SequenceState, cached: list[BlockId]) -> None:
        """Counts what is in the blocks, or is copied into them, when the sequence comes in."""
        num_cached = len(cached) * self._cache.block_size
        if sequence.phase is Phase.WAITING:
            sequence.num_cached = sequence.num_computed = num_cached
        if sequence.phase is Phase.PREEMPTED:
            self._swap.give_back(sequence)
            sequence.num_computed = max(sequence.num_computed, num_cached)
        if sequence.phase is not Phase.FORKED:
            sequence.num_shared = len(cached)

    def find_cached(self, sequence: SequenceState) -> list[BlockId]:
        """Blocks of the cached prefix. At least the last known token is forwarded, for what is sampled after it."""
        if sequence.phase is Phase.WAITING:
            self._begin_under_weights_in_use(sequence)
            if sequence.request.sampling.prompt_logprobs is not None:
                return []  # every position's logits are wanted
        elif sequence.phase is Phase.PREEMPTED and not self._exact:
            return []  # its rows are those of the pass that computed its own KV, which it has kept
        elif sequence.phase is Phase.FORKED or sequence.epoch != self._cache.epoch:
            return []
        if not self._cache.enabled:
            return []
        max_tokens = len(sequence.token_ids) - 1
        sequence.chain.grow(sequence.token_ids, max_tokens)
        return self._cache.find(sequence.chain, max_tokens, rows=sequence.wants_rows)

    def _begin_under_weights_in_use(self, prompt: SequenceState) -> None:
        prompt.weights = self._cache.num_weight_changes
        if prompt.epoch != self._cache.epoch:  # other weights came while it waited
            prompt.chain, prompt.epoch = self.chain(prompt.request), self._cache.epoch

    def chain(self, request: EngineRequest) -> TokenChain:
        """Names of the prompt's full blocks, under the weights in use."""
        chain = self._cache.chain(request.cache_salt)
        if self._cache.enabled:
            chain.grow(request.prompt, len(request.prompt))
        return chain
