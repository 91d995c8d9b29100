"""Which blocks are found for which prefix: by the tokens, whatever the digests say."""

import pytest
import xxhash

from common.kv.chain import Scope, TokenChain
from common.kv.pool import BlockId
from common.kv.prefix import PrefixIndex


def chain(tokens: str, scope: Scope = Scope("v")) -> TokenChain:  # noqa: B008 - frozen
    """Blocks of two tokens, each the code of a letter."""
    made = TokenChain(scope, 2)
    made.grow(list(tokens.encode()), len(tokens))
    return made


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


class Index(PrefixIndex):
    """Blocks above 50 have no rows."""

    def put(self, tokens: str, *ids: int, scope: Scope = Scope("v")) -> tuple[list[int], list[int]]:  # noqa: B008
        added, replaced = self.insert(chain(tokens, scope), blocks(*ids), lambda block: block <= 50)
        assert self.check_invariants() == []
        return [*added], [*replaced]

    def get(self, tokens: str, max_blocks: int = 99, *, rows: bool = True, scope: Scope = Scope("v")) -> list[int]:  # noqa: B008
        return [*self.match(chain(tokens, scope), max_blocks, rows=rows)]


def test_the_longest_prefix_is_found() -> None:
    index = Index()
    assert index.put("aabbcc", 1, 2, 3) == ([1, 2, 3], [])
    assert index.get("aabbccdd") == [1, 2, 3]
    assert index.get("aabbxx") == [1, 2]
    assert index.get("aab") == [1]
    assert index.get("xxbbcc") == []
    assert index.get("aabbcc", 2) == [1, 2]
    assert index.get("") == []


def test_scopes_share_nothing() -> None:
    index, salted, newer = Index(), Scope("v", "s"), Scope("w")
    index.put("aabb", 1, 2)
    assert index.get("aabb", scope=salted) == index.get("aabb", scope=newer) == []
    index.put("aa", 3, scope=salted)
    assert index.get("aabb", scope=salted) == [3]
    assert index.get("aabb") == [1, 2]


def test_what_is_cached_stays_in_its_block() -> None:
    index = Index()
    index.put("aabb", 1, 2)
    assert index.put("aabbcc", 4, 5, 6) == ([6], [])
    assert index.get("aabbcc") == [1, 2, 6]


def test_no_more_blocks_than_are_given_are_cached() -> None:
    index = Index()
    assert index.put("aabbcc", 1) == ([1], [])
    assert index.put("aabbcc", 1, 2, 3) == ([2, 3], [])


def test_blocks_without_rows_are_not_for_those_who_want_rows() -> None:
    index = Index()
    index.put("aabbcc", 1, 52, 3)
    assert index.get("aabbcc", rows=False) == [1, 52, 3]
    assert index.get("aabbcc") == [1]


def test_a_block_with_rows_takes_the_place_of_one_without() -> None:
    index = Index()
    index.put("aabb", 51, 52)
    index.put("aabbcc", 51, 52, 53)
    assert index.put("aabb", 1, 2) == ([1, 2], [51, 52])
    assert index.get("aabb") == [1, 2]
    assert index.get("aabbcc", rows=False) == [1, 2, 53]
    assert index.blocks == {1, 2, 53}


def test_what_follows_a_forgotten_block_is_forgotten_too() -> None:
    index = Index()
    index.put("aabbcc", 1, 2, 3)
    index.put("aabbdd", 1, 2, 4)
    index.put("aaxx", 1, 5)
    gone = index.remove(BlockId(2))
    assert sorted(gone) == [2, 3, 4]
    assert gone[-1] == 2
    assert index.check_invariants() == []
    assert index.get("aabbcc") == [1]
    assert index.get("aaxx") == [1, 5]
    assert index.remove(BlockId(1)) == [5, 1]
    assert index.blocks == set()
    assert index.check_invariants() == []


def test_a_sequence_caches_its_blocks_again_after_their_beginning_was_forgotten() -> None:
    index = Index()
    index.put("aabb", 1, 2)
    index.put("aabbcc", 7, 8, 9)  # 9 stands behind the blocks of another sequence
    index.remove(BlockId(1))
    assert index.put("aabbccdd", 7, 8, 9, 10) == ([7, 8, 9, 10], [])
    assert index.get("aabbccdd") == [7, 8, 9, 10]


def test_clear_forgets_everything() -> None:
    index = Index()
    index.put("aabb", 1, 2)
    index.put("aa", 3, scope=Scope("v", "s"))
    assert sorted(index.clear()) == [1, 2, 3]
    assert index.get("aabb") == []
    assert index.check_invariants() == []


@pytest.fixture
def one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefix of every scope has one digest, as an attacker would like it."""
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: b"\0" * 16)


@pytest.mark.usefixtures("one_digest")
def test_prefixes_of_one_digest_are_told_apart_by_their_tokens() -> None:
    """openvinotoolkit/openvino.genai#3722: a collision costs a hit, never an answer."""
    index = Index()
    index.put("aabb", 1, 2)
    assert index.put("aacc", 5, 6) == ([], [])  # found behind block 1, where "bb" has the digest already
    assert index.get("aacc") == [1]
    assert index.put("xxbb", 7, 8) == ([], [])
    assert index.get("xxbb") == []
    assert index.get("aabb") == [1, 2]
    assert index.get("aabb", scope=Scope("v", "s")) == []
    index.put("xxbb", 7, 8, scope=Scope("v", "s"))
    assert index.get("xxbb", scope=Scope("v", "s")) == [7, 8]
