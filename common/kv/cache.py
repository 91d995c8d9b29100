"""The prefix cache of one engine: full blocks stay in the pool, with their rows, for whoever begins with the same."""

from collections.abc import Callable, Sequence

from common.kv.chain import Scope, TokenChain
from common.kv.pool import BlockId, BlockPool
from common.kv.prefix import PrefixIndex


class PrefixCache:
    """Joins the index of prefixes with the pool that owns the blocks. One owner thread; not locked.

    Args:
        has_rows: whether every slot of a block has its routing row.
        enabled: nothing is found, and nothing is cached, otherwise.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, has_rows: Callable[[BlockId], bool], *, enabled: bool = True
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        #: Label of the weights in use.
        self.weight_version = ""
        #: KV that was computed under another count is of other weights, whatever their label.
        self.num_weight_changes = 0
        #: Counts flushes. KV of an earlier epoch may be of other weights and must not come in.
        self.epoch = 0
        self._pool = pool
        self._has_rows = has_rows
        self._index = PrefixIndex()
        pool.on_evict = self._index.remove

    def chain(self, salt: str) -> TokenChain:
        """An empty chain under the weights in use."""
        return TokenChain(Scope(self.weight_version, salt), self.block_size)

    def find(self, chain: TokenChain, max_tokens: int, *, rows: bool) -> list[BlockId]:
        """Blocks of the longest cached prefix of at most `max_tokens`; with `rows`: of those whose rows are there."""
        return self._index.match(chain, max_tokens // self.block_size, rows=rows)

    def add(self, chain: TokenChain, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Caches the first blocks of a sequence, which are full and referenced; returns blocks that became free."""
        if not self.enabled:
            return []
        added, replaced = self._index.insert(chain, blocks, self._has_rows)
        self._pool.keep(added)
        return self._pool.let_go(replaced)

    def use_weights(self, version: str) -> list[BlockId]:
        """Other weights are in use from now on; forgets everything, and returns the blocks that became free."""
        self.weight_version = version
        self.num_weight_changes += 1
        return self.flush()

    def flush(self) -> list[BlockId]:
        """Forgets everything, also for sequences that are live; returns the blocks that became free."""
        self.epoch += 1
        return self._pool.let_go(self._index.clear())

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each."""
        found = self._index.check_invariants()
        if self._pool.kept != self._index.blocks:
            found.append("the blocks that the pool keeps and those that the prefix index knows differ")
        found += [
            f"block {b} is cached with rows that are missing"
            for b in self._index.blocks_with_rows()
            if not self._has_rows(b)
        ]
        return found
