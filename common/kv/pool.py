"""Reference-counted KV blocks. Sans-I/O: ids in, ids out; the memory itself is in `common.kv.store`."""

from collections.abc import Iterable
from typing import NewType

BlockId = NewType("BlockId", int)

#: Block 0 is never handed out: block tables are padded with it, and its slots stay zero.
NULL_BLOCK = BlockId(0)


class BlockPool:
    """Owns which blocks are free. One owner thread; not locked.

    `num_blocks` counts the null block, so `num_usable_blocks` is one less.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        # Last freed, first used: recently touched memory is still in the cache.
        self._free = [BlockId(b) for b in range(num_blocks - 1, NULL_BLOCK, -1)]
        self._references = [0] * num_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable_blocks - len(self._free)

    def try_allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each, or None (and no change) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each allocated block."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is shared while free"
            self._references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Drops one reference from each block; returns those that became free."""
        freed = []
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released while free"
            self._references[block] -= 1
            if not self._references[block]:
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
        if len(free) + sum(r > 0 for r in self._references) != self.num_usable_blocks:
            found.append("free and referenced blocks do not add up to the pool")
        return found
