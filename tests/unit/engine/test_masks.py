"""What may not be sampled."""

import math

import pytest
import torch

from common.engine.masks import asks_for_mask, bad_word_ends, mask_row, nothing_left
from common.sampling import SamplingParams

NOTHING = frozenset[int]()


def open_ids(params: SamplingParams, generated: list[int], early: frozenset[int] = NOTHING) -> list[int]:
    row_V = torch.zeros(6)
    mask_row(row_V, params, early, generated, None)
    values: list[float] = row_V.tolist()
    assert set(values) <= {0.0, -math.inf}
    return [i for i, value in enumerate(values) if value == 0.0]


@pytest.mark.parametrize(
    ("generated", "banned"),
    [
        ([], [9]),
        ([1], [2, 9]),
        ([1, 2], [3, 9]),
        ([2], [9]),
        ([3, 1, 2], [3, 9]),
        ([1, 2, 4], [9]),
        ([1, 1], [2, 1, 9]),
    ],
)
def test_a_bad_word_is_cut_short_before_its_last_id(generated: list[int], banned: list[int]) -> None:
    assert bad_word_ends([(1, 2), (1, 2, 3), (1, 1, 1), (9,)], generated) == banned


def test_masks_leave_what_every_one_of_them_allows() -> None:
    assert open_ids(SamplingParams(1, allowed_token_ids=frozenset({1, 2, 4})), []) == [1, 2, 4]
    assert open_ids(SamplingParams(1, bad_words=((3,), (0, 5))), [0]) == [0, 1, 2, 4]
    assert open_ids(SamplingParams(1), [], frozenset({2, 77})) == [0, 1, 3, 4, 5]
    together = SamplingParams(1, allowed_token_ids=frozenset({1, 2, 4}), bad_words=((2,),))
    assert open_ids(together, [], frozenset({4})) == [1]


def test_only_rows_that_ask_are_touched() -> None:
    assert not asks_for_mask(SamplingParams(1), NOTHING, None)
    assert asks_for_mask(SamplingParams(1), frozenset({1}), None)
    assert asks_for_mask(SamplingParams(1, bad_words=((1,),)), NOTHING, None)
    assert asks_for_mask(SamplingParams(1, allowed_token_ids=frozenset({1})), NOTHING, None)


def test_when_nothing_is_left_the_causes_are_named() -> None:
    early = nothing_left(SamplingParams(1, min_tokens=1), frozenset({0}), None)
    assert early.param == "min_tokens"
    assert "every token of the vocabulary is a stop token" in early.message
    both = nothing_left(SamplingParams(1, allowed_token_ids=frozenset({1}), bad_words=((1,),)), NOTHING, None)
    assert both.param == "allowed_token_ids"
    assert "allowed_token_ids, bad_words together leave no token" in both.message
