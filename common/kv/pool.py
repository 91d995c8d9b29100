"""Reference-counted KV blocks. Sans-I/O: ids in, ids out; the memory itself is in `common.kv.store`."""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import NewType

BlockId = NewType("BlockId", int)

#: Block 0 is never handed out: block tables are padded with it, and its slots stay zero.
NULL_BLOCK = BlockId(0)


class BlockPool:
    """Owns which blocks are free, referenced, or only cached. One owner thread; not locked.

    A block that is kept does not become free with its last reference: it stays cached, until it is referenced again,
    let go, or evicted because a free one is needed. Evicted is who was referenced least recently; of those that were
    released together the last one, because blocks are released in the order of their positions and a prefix is worth
    more than what follows it.

    `num_blocks` counts the null block, so `num_usable_blocks` is one less.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        #: Told of a cached block that is wanted for something else; returns the kept blocks that are worthless from
        #: then on, itself included.
        self.on_evict: Callable[[BlockId], Iterable[BlockId]] = _itself
        # Last freed, first used: recently touched memory is still in the processor's cache.
        self._free = [BlockId(b) for b in range(num_blocks - 1, NULL_BLOCK, -1)]
        self._references = [0] * num_blocks
        self._kept: set[BlockId] = set()
        #: Kept blocks without a reference, in the order in which they are evicted.
        self._cached: dict[BlockId, None] = {}
        self._evicted: list[BlockId] = []

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of value."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that `try_allocate` could hand out: free, or only cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Kept blocks that nobody references."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_usable_blocks - self.num_available

    @property
    def kept(self) -> Set[BlockId]:
        """Blocks that stay, or are, cached without a reference."""
        return self._kept

    def num_references(self, block: BlockId) -> int:
        """How many hold the block."""
        return self._references[block]

    def try_allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each, or None (and no change) when fewer are available."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evicted += self.let_go(self.on_evict(next(iter(self._cached))))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def take_evicted(self) -> list[BlockId]:
        """Blocks that were evicted since the last call. Some may have been handed out again."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each block, which is referenced or cached."""
        for block in blocks:
            assert self._references[block] or block in self._cached, f"block {block} is shared while free"
            self._references[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Drops one reference from each block; returns those that became free."""
        freed = []
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released while free"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._kept:
                self._cached[block] = None
            else:
                freed.append(block)
        self._free.extend(freed)
        return freed

    def keep(self, blocks: Iterable[BlockId]) -> None:
        """These referenced blocks stay cached when their last reference goes."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is kept while free"
            self._kept.add(block)

    def let_go(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """These blocks are worth nothing to the cache any more; returns those that became free."""
        freed = []
        for block in blocks:
            self._kept.remove(block)
            if block in self._cached:
                del self._cached[block]
                freed.append(block)
        self._free.extend(freed)
        return freed

    def check_invariants(self, held: Iterable[BlockId]) -> list[str]:
        """Violations, one sentence each, given every reference (with repeats) that anybody holds."""
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        found = [
            f"block {b} has {have} references but {want} holders"
            for b, (have, want) in enumerate(zip(self._references, counts, strict=True))
            if have != want
        ]
        free = set(self._free)
        if len(free) != len(self._free):
            found.append("the free list repeats a block")
        found += [f"block {b} is free and referenced" for b in free if self._references[b]]
        found += [f"block {b} is free and kept" for b in free & self._kept]
        found += [f"block {b} is cached and referenced" for b in self._cached if self._references[b]]
        found += [f"block {b} is cached and not kept" for b in self._cached.keys() - self._kept]
        if len(free) + len(self._cached) + sum(r > 0 for r in self._references) != self.num_usable_blocks:
            found.append("free, cached and referenced blocks do not add up to the pool")
        return found


def _itself(block: BlockId) -> Iterable[BlockId]:
    return (block,)
