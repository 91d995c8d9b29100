"""Sampling parameters that the sampler could not take."""

import math
from typing import Any

import pytest

from common.engine.bounds import check_sampling
from common.errors import InvalidRequestError
from common.sampling import SamplingParams

VOCAB = 50


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n", 0, "[1, 65536], got 0"),
        ("n", 2**16 + 1, "[1, 65536], got 65537"),
        ("top_k", -1, "at least 0, got -1"),
        ("presence_penalty", 2.1, "[-2, 2], got 2.1"),
        ("presence_penalty", math.nan, "got nan"),
        ("frequency_penalty", -2.1, "[-2, 2], got -2.1"),
        ("frequency_penalty", math.inf, "got inf"),
        ("repetition_penalty", 0.0, "[0.01, 2], got 0.0"),
        ("repetition_penalty", 2.5, "[0.01, 2], got 2.5"),
        ("repetition_penalty", math.nan, "got nan"),
        ("allowed_token_ids", frozenset({VOCAB}), f"{VOCAB} is outside the vocabulary [0, {VOCAB})"),
        ("allowed_token_ids", frozenset({-1}), "-1 is outside"),
        ("bad_words", ((1, VOCAB),), f"{VOCAB} is outside"),
        ("bad_words", ((),), "no tokens"),
        ("logprobs", VOCAB + 1, f"[0, {VOCAB}], got {VOCAB + 1}"),
        ("prompt_logprobs", VOCAB + 1, f"[0, {VOCAB}], got {VOCAB + 1}"),
        ("prompt_logprobs", -1, "got -1"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_sampling(SamplingParams(1, **{field: value}), VOCAB)
    assert refused.value.param == field
    assert words in refused.value.message


def test_the_bounds_themselves_are_let_in() -> None:
    check_sampling(
        SamplingParams(
            1,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            repetition_penalty=2.0,
            allowed_token_ids=frozenset({0, VOCAB - 1}),
            bad_words=((VOCAB - 1,),),
            logprobs=VOCAB,
            prompt_logprobs=0,
        ),
        VOCAB,
    )
