"""Names of prefixes: the same in every process, and no two prefixes spelled the same."""

import subprocess
import sys

import pytest
import xxhash

from common.kv.chain import Scope, TokenChain


def chain(tokens: list[int], block_size: int = 2, version: str = "v", salt: str = "") -> TokenChain:
    made = TokenChain(Scope(version, salt), block_size)
    made.grow(tokens, len(tokens))
    return made


def test_a_digest_is_xxh3_over_the_one_before_and_four_bytes_per_id() -> None:
    root = xxhash.xxh3_128(b"\x01\0\0\0\0\0\0\0v\x04\0\0\0\0\0\0\0salt").digest()
    first = xxhash.xxh3_128(root + b"\x01\0\0\0\x02\x01\0\0").digest()
    second = xxhash.xxh3_128(first + b"\xff\xff\x00\0\0\0\x01\0").digest()
    got = chain([1, 258, 65535, 65536, 7], salt="salt")
    assert got.digests == [first, second]
    assert got.tokens == [b"\x01\0\0\0\x02\x01\0\0", b"\xff\xff\x00\0\0\0\x01\0"]


def test_another_process_gives_the_same_names() -> None:
    code = (
        "from common.kv.chain import Scope, TokenChain\n"
        "chain = TokenChain(Scope('v', 'päppel'), 2)\n"
        "chain.grow((5, 6, 7, 8), 4)\n"
        "print(chain.digests[-1].hex())\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {chain([5, 6, 7, 8], salt="päppel").digests[-1].hex()}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chain([1, 2]), chain([258, 0])),
        (chain([1, 2]), chain([2, 1])),
        (chain([1, 23]), chain([12, 3])),
        (chain([1, 2, 3, 4]), chain([3, 4, 3, 4])),
        (chain([1, 2]), chain([1, 2], version="w")),
        (chain([1, 2]), chain([1, 2], salt="s")),
        (chain([1, 2], version="ab", salt="c"), chain([1, 2], version="a", salt="bc")),
        (chain([2**31 - 1, 2**31 - 2]), chain([2**31 - 2, 2**31 - 1])),
    ],
)
def test_what_a_weak_hash_confuses_has_different_names(one: TokenChain, other: TokenChain) -> None:
    """openvinotoolkit/openvino.genai#3722, vllm-project/vllm#12621: ids joined as text or bytes, order, -1 and -2."""
    assert one.digests[-1] != other.digests[-1]


def test_a_chain_grows_with_its_sequence_and_ignores_a_block_that_is_not_full() -> None:
    grown, tokens = TokenChain(Scope("v"), 2), [1, 2, 3, 4, 5, 6]
    for end, num_full in ((1, 0), (2, 1), (3, 1), (3, 1), (5, 2), (6, 3)):
        grown.grow(tokens, end)
        assert len(grown) == num_full
    assert grown.digests == chain(tokens).digests


def test_forks_go_on_by_themselves() -> None:
    stem = chain([1, 2, 3, 4])
    branch = stem.fork(1)
    branch.grow([1, 2, 9, 9], 4)
    stem.grow([1, 2, 3, 4, 5, 6], 6)
    assert branch.digests == chain([1, 2, 9, 9]).digests
    assert stem.digests == chain([1, 2, 3, 4, 5, 6]).digests
