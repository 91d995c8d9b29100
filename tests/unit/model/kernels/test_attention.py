"""Attention over the paged cache against a textbook softmax in double precision."""

import pytest
import torch

from common.model.kernels.interface import Kernels
from tests.unit.model.kernels.bounds import draw
from tests.unit.model.kernels.paged import Heads, PagedCache, Queries

#: Beside the logits of keys, far below and far above them, one per head of the default shape.
_SINKS = [[0.3, -1.2, 2.5, 0.9, 0.0, -0.4], [-40.0, -1e4, 0.0, -7.0, -1e30, 3.0], [60.0, 12.0, -3.0, 25.0, 1e4, 1.0]]


def _check(
    cache: PagedCache, batch: list[Queries], window: int | None = None, sinks_N: torch.Tensor | None = None
) -> None:
    for own, actual in zip(batch, cache.attend(batch, window=window, sinks_N=sinks_N), strict=True):
        cache.expected(own, window=window, sinks_N=sinks_N).check(actual)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 63, 64, 65, 130, 257])
def test_every_token_of_a_prompt_sees_itself_and_what_is_before(
    kernels: Kernels, dtype: torch.dtype, length: int
) -> None:
    cache = PagedCache(kernels, dtype)
    _check(cache, [cache.sequence(length).tokens(0, length)])


@pytest.mark.parametrize("start", [1, 63, 64, 100, 250])
@pytest.mark.parametrize("size", [2, 17, 40])
def test_a_chunk_sees_what_was_computed_before_it(kernels: Kernels, dtype: torch.dtype, start: int, size: int) -> None:
    cache = PagedCache(kernels, dtype)
    # There is more in its blocks already, which it must not see.
    _check(cache, [cache.sequence(start + size + 5).tokens(start, start + size)])


def test_decode_steps_of_sequences_of_all_lengths(kernels: Kernels, dtype: torch.dtype) -> None:
    cache = PagedCache(kernels, dtype)
    lengths = (513, 300, 257, 256, 255, 129, 128, 127, 65, 64, 63, 33, 17, 16, 15, 2, 1)
    _check(cache, [cache.sequence(length).tokens(length - 1, length) for length in lengths])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("sinks", [None, *_SINKS], ids=["", "sinks", "low-sinks", "high-sinks"])
def test_a_batch_of_decode_steps_and_chunks(
    kernels: Kernels, dtype: torch.dtype, window: int | None, sinks: list[float] | None
) -> None:
    cache = PagedCache(kernels, dtype)
    decodes = [cache.sequence(length).tokens(length - 1, length) for length in (200, 66, 3)]
    chunks = [cache.sequence(length).tokens(start, length) for length, start in ((90, 0), (150, 120), (300, 290))]
    _check(cache, decodes + chunks, window, None if sinks is None else torch.tensor(sinks))


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100, 1000])
def test_a_window_cuts_off_at_its_own_length(kernels: Kernels, dtype: torch.dtype, window: int) -> None:
    cache = PagedCache(kernels, dtype)
    decode, chunk = cache.sequence(205), cache.sequence(200)
    _check(cache, [decode.tokens(204, 205), chunk.tokens(60, 200)], window)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_block_size(kernels: Kernels, dtype: torch.dtype, block_size: int) -> None:
    cache = PagedCache(kernels, dtype, Heads(block_size=block_size))
    decode, chunk = cache.sequence(270), cache.sequence(140)
    _check(cache, [decode.tokens(269, 270), chunk.tokens(50, 140)])


@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), [(5, 22, 16), (16, 40, 34), (2, 70, 64), (1, 6, 2)])
@pytest.mark.parametrize("window", [None, 70])
def test_one_plane_whose_leading_dimensions_are_the_value(
    kernels: Kernels, dtype: torch.dtype, num_heads: int, key_dim: int, value_dim: int, window: int | None
) -> None:
    """As in latent attention: all heads read one cached vector."""
    cache = PagedCache(kernels, dtype, Heads(num_heads, 1, key_dim, value_dim))
    decode, chunk = cache.sequence(150), cache.sequence(130)
    _check(cache, [decode.tokens(149, 150), chunk.tokens(40, 130)], window)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "key_dim"),
    [(1, 1, 2), (4, 4, 64), (6, 3, 32), (12, 6, 16), (8, 1, 32), (32, 4, 128), (64, 1, 16)],
)
def test_every_grouping_of_heads(
    kernels: Kernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int, key_dim: int
) -> None:
    cache = PagedCache(kernels, dtype, Heads(num_heads, num_kv_heads, key_dim), num_slots=1024)
    decode, chunk = cache.sequence(100), cache.sequence(70)
    _check(cache, [decode.tokens(99, 100), chunk.tokens(60, 70)])


def test_large_scores_neither_overflow_nor_lose_the_rest(kernels: Kernels, dtype: torch.dtype) -> None:
    """exp(1e4) is beyond every float; one key takes all, or two that are equal share it."""
    cache = PagedCache(kernels, dtype, Heads(1, 1, 2, block_size=4), num_slots=64)
    sequence = cache.sequence(5)
    sequence.q_TND[:] = torch.tensor([100.0, 0.0])
    kv = torch.tensor(
        [[[100.0, 0], [-100, 0], [100, 0], [0, 0], [-100, 0]], [[1.0, 2], [9, 9], [3, 4], [9, 9], [9, 9]]]
    )
    sequence.kv_CTGD[:] = kv[:, :, None]
    cache.rewrite(sequence)
    (out,) = cache.attend([sequence.tokens(4, 5)])
    assert out.flatten().tolist() == [2.0, 3.0]


def test_no_cached_key_that_a_query_does_not_see_matters(kernels: Kernels, dtype: torch.dtype) -> None:
    """Of other sequences' blocks nothing is read at all (they hold NaN here); own later keys weigh exactly nothing."""
    cache = PagedCache(kernels, dtype)
    sequence = cache.sequence(100)
    (before,) = cache.attend([sequence.tokens(30, 70)], window=20)
    sequence.kv_CTGD[:, 70:] = draw(2, 30, 2, 18, dtype=dtype, seed=9) * 50
    sequence.kv_CTGD[:, :11] = draw(2, 11, 2, 18, dtype=dtype, seed=9) * 50
    cache.rewrite(sequence)
    (after,) = cache.attend([sequence.tokens(30, 70)], window=20)
    assert torch.equal(before, after)
