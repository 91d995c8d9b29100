"""Prefix index and block pool together: what is cached stays until it is needed, and nothing is lost or held twice."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kv.cache import PrefixCache
from common.kv.chain import TokenChain
from common.kv.pool import BlockId, BlockPool


class Bench:
    """A pool of eight blocks of two tokens; sequences that write what they are told."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.pool = BlockPool(9)
        self.rowless: set[BlockId] = set()
        self.cache = PrefixCache(self.pool, 2, lambda block: block not in self.rowless, enabled=enabled)
        self.held: list[list[BlockId]] = []

    def chain(self, tokens: str, salt: str = "") -> TokenChain:
        chain = self.cache.chain(salt)
        chain.grow(list(tokens.encode()), len(tokens))
        return chain

    def find(self, tokens: str, max_tokens: int = 99) -> list[BlockId]:
        return self.cache.find(self.chain(tokens), max_tokens, rows=True)

    def serve(self, tokens: str, *, cache: bool = True) -> list[BlockId] | None:
        """Blocks of a sequence that takes what is cached, computes the rest, and caches it; None if it does not fit."""
        chain = self.chain(tokens)
        hits = self.cache.find(chain, len(tokens), rows=True)
        self.pool.share(hits)
        own = self.pool.try_allocate(len(tokens) // 2 - len(hits))
        if own is None:
            self.pool.release(hits)
            return None
        blocks = hits + own
        if cache:
            self.cache.add(chain, blocks)
        self.held.append(blocks)
        return blocks

    def end(self, blocks: list[BlockId]) -> list[BlockId]:
        self.held.remove(blocks)
        return self.pool.release(blocks)

    def check(self) -> None:
        assert self.pool.check_invariants(block for blocks in self.held for block in blocks) == []
        assert self.cache.check_invariants() == []


def served(bench: Bench, tokens: str) -> list[BlockId]:
    blocks = bench.serve(tokens)
    assert blocks is not None
    bench.check()
    return blocks


def test_cached_blocks_outlive_their_sequence_and_count_as_available() -> None:
    bench = Bench()
    blocks = served(bench, "aabbcc")
    assert (bench.pool.num_used, bench.pool.num_cached, bench.pool.num_available) == (3, 0, 5)
    assert bench.end(blocks) == []
    assert (bench.pool.num_used, bench.pool.num_cached, bench.pool.num_available) == (0, 3, 8)
    assert bench.find("aabbccdd") == blocks
    again = served(bench, "aabbdd")
    assert again[:2] == blocks[:2]
    assert (bench.pool.num_used, bench.pool.num_cached, bench.pool.num_available) == (3, 1, 5)


def test_the_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    bench = Bench()
    old, new = served(bench, "aabbccdd"), served(bench, "xxyyzz")
    bench.end(old)
    bench.end(new)
    served(bench, "1122")  # one free block, and one of the eight cached ones
    assert bench.pool.take_evicted() == [old[3]]
    assert bench.find("aabbccdd") == old[:3]
    assert bench.find("xxyyzz") == new
    served(bench, "334455")
    assert bench.pool.take_evicted() == [old[2], old[1], old[0]]
    assert bench.find("xxyyzz") == new
    assert bench.pool.take_evicted() == []


def test_using_a_prefix_makes_it_young() -> None:
    bench = Bench()
    first, second = served(bench, "aabb"), served(bench, "ccdd")
    bench.end(first)
    bench.end(second)
    bench.end(served(bench, "aabb"))
    served(bench, "112233445566")
    assert bench.find("aabb") == first
    assert bench.find("ccdd") == []


def test_what_stands_behind_an_evicted_block_is_not_cached_any_more() -> None:
    """A sequence computed what another one had cached meanwhile; its later blocks stand behind those of the other."""
    bench = Bench()
    mine, other = bench.serve("aabb", cache=False), served(bench, "aabb")
    assert mine is not None
    extra = bench.pool.try_allocate(1) or []
    bench.held.append(extra)
    bench.cache.add(bench.chain("aabbcc"), mine + extra)
    bench.end(other)
    served(bench, "11223344")
    bench.check()
    assert bench.find("aabbcc") == other[:1]
    assert bench.end(extra) == extra  # free at once


def test_a_request_that_does_not_fit_evicts_nothing() -> None:
    bench = Bench()
    blocks = served(bench, "aabbcc")
    bench.end(blocks)
    keeps = served(bench, "112233")
    assert bench.pool.try_allocate(6) is None
    assert bench.find("aabbcc") == blocks
    bench.end(keeps)
    bench.check()


def test_a_flush_frees_what_nobody_holds_and_takes_the_rest_out() -> None:
    bench = Bench()
    idle, live = served(bench, "aabb"), served(bench, "ccdd")
    bench.end(idle)
    epoch = bench.cache.epoch
    assert sorted(bench.cache.flush()) == sorted(idle)
    assert bench.cache.epoch == epoch + 1
    assert bench.find("aabb") == bench.find("ccdd") == []
    assert sorted(bench.end(live)) == sorted(live)
    assert bench.pool.num_free == 8
    bench.check()


def test_a_cache_that_is_off_keeps_nothing() -> None:
    bench = Bench(enabled=False)
    blocks = served(bench, "aabb")
    assert sorted(bench.end(blocks)) == sorted(blocks)
    assert bench.find("aabb") == []


def test_missing_rows_and_strange_blocks_are_violations() -> None:
    bench = Bench()
    blocks = served(bench, "aabb")
    bench.rowless.add(blocks[0])
    assert bench.cache.check_invariants() == [f"block {blocks[0]} is cached with rows that are missing"]
    bench.rowless.clear()
    bench.pool.let_go([blocks[1]])
    assert bench.cache.check_invariants() == [
        "the blocks that the pool keeps and those that the prefix index knows differ"
    ]


class CacheMachine(RuleBasedStateMachine):
    """Whatever comes and goes: a block that is found holds exactly the tokens that it is found for."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.content: dict[BlockId, str] = {}

    @rule(tokens=st.text("ab", min_size=2, max_size=10), cache=st.booleans())
    def serve(self, tokens: str, cache: bool) -> None:
        tokens = tokens[: len(tokens) // 2 * 2]
        for at, block in enumerate(self.bench.find(tokens)):
            assert self.content[block] == tokens[: 2 * at + 2]
        blocks = self.bench.serve(tokens, cache=cache)
        if blocks is not None:
            self.content |= {block: tokens[: 2 * at + 2] for at, block in enumerate(blocks)}

    @precondition(lambda self: self.bench.held)
    @rule(which=st.integers(0, 20))
    def end(self, which: int) -> None:
        self.bench.end(self.bench.held[which % len(self.bench.held)])

    @rule()
    def flush(self) -> None:
        self.bench.cache.flush()

    @invariant()
    def is_consistent(self) -> None:
        self.bench.check()
        for block in self.bench.pool.take_evicted():
            assert block not in self.bench.pool.kept or any(block in blocks for blocks in self.bench.held)


TestCacheMachine = CacheMachine.TestCase
