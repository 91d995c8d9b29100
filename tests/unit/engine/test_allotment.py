"""What a sequence gets when it comes in, and what asking for it leaves as it was."""

import pytest

from common.engine.allotment import Allotment
from common.engine.sequence import SequenceState
from common.engine.swap import SwapSpace
from common.kv.cache import PrefixCache
from common.kv.pool import BlockId, BlockPool
from tests.unit.engine.rig import greedy, make_request

OLD, NEW = [5, 6, 7, 8], [9, 10, 11, 12]


class Bench:
    """5 blocks of four tokens: one caches OLD, one NEW, and three are free."""

    def __init__(self) -> None:
        self.pool = BlockPool(6)
        self.cache = PrefixCache(self.pool, 4, lambda block: True)
        self.allotment = Allotment(self.pool, self.cache, SwapSpace(0, 16, 4), exact=True)
        self.old, self.new = (self._cached(tokens) for tokens in (OLD, NEW))

    def _cached(self, tokens: list[int]) -> BlockId:
        blocks = self.pool.try_allocate(1)
        assert blocks is not None
        chain = self.cache.chain("")
        chain.grow(tokens, 4)
        self.cache.add(chain, blocks)
        self.pool.release(blocks)
        return blocks[0]

    def sequence(self, tokens: list[int]) -> SequenceState:
        request = make_request("a", tokens, greedy(2))
        return SequenceState(request, 1, self.allotment.chain(request), self.cache.epoch)


@pytest.mark.parametrize(("reserve", "given"), [(0, True), (2, True), (3, False), (4, False), (9, False)])
def test_a_shared_block_is_not_available_to_others_any_more(reserve: int, given: bool) -> None:
    """5 blocks are available; of the 3 that are needed one is shared."""
    bench = Bench()
    sequence = bench.sequence([*OLD, 1, 1, 1, 1, 1])
    assert bench.allotment.try_give(sequence, reserve) == given
    assert bench.pool.num_available == (2 if given else 5)
    assert (sequence.num_shared, sequence.blocks[:1]) == ((1, (bench.old,)) if given else (0, ()))


def test_a_block_that_somebody_holds_costs_nothing_to_share() -> None:
    bench = Bench()
    bench.pool.share([bench.old])
    assert bench.pool.num_available == 4
    assert bench.allotment.try_give(bench.sequence([*OLD, 1]), 3)


@pytest.mark.parametrize("reserve", [4, 5])
def test_whoever_waits_does_not_renew_what_it_would_share(reserve: int) -> None:
    """The block that was used least recently is still the first to be evicted."""
    bench = Bench()
    assert not bench.allotment.try_give(bench.sequence([*OLD, 1]), reserve)
    assert bench.pool.try_allocate(4) is not None
    assert bench.pool.take_evicted() == [bench.old]
