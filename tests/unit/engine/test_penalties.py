"""Bias and penalties against NumPy in float32, in the same order of operations, bit for bit."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.bounds import MIN_REPETITION_PENALTY, check_sampling
from common.engine.penalties import asks_for_penalty, penalize_row
from common.engine.sampler import SampleSpec, sample
from common.errors import InternalError, InvalidRequestError
from common.sampling import SampledToken, SamplingParams

F32 = np.float32
VOCAB = 12


def penalized(logits: list[float], params: SamplingParams, token_ids: list[int], num_prompt: int) -> list[float]:
    row_V = torch.tensor(logits)
    penalize_row(row_V, params, token_ids, num_prompt)
    values: list[float] = row_V.tolist()
    return values


def expected(
    logits: list[float], params: SamplingParams, token_ids: list[int], num_prompt: int
) -> npt.NDArray[np.float32]:
    values = [F32(v) for v in logits]
    for token_id, bias in params.logit_bias.items():
        values[token_id] += F32(bias)
    if params.repetition_penalty != 1:
        for token_id in set(token_ids):
            positive = values[token_id] > 0
            penalty = F32(params.repetition_penalty)
            values[token_id] = values[token_id] / penalty if positive else values[token_id] * penalty
    for token_id, count in Counter(token_ids[num_prompt:]).items():
        values[token_id] -= F32(count) * F32(params.frequency_penalty)
        values[token_id] -= F32(params.presence_penalty)
    return np.array(values, F32)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.floats(-40, 40, width=32) | st.just(-np.inf), min_size=VOCAB, max_size=VOCAB),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.01, 2),
    token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    data=st.data(),
)
def test_penalties_equal_the_plain_computation(
    logits: list[float],
    bias: dict[int, float],
    presence: float,
    frequency: float,
    repetition: float,
    token_ids: list[int],
    data: st.DataObject,
) -> None:
    num_prompt = data.draw(st.integers(1, len(token_ids)))
    params = SamplingParams(
        1,
        logit_bias=bias,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    want = expected(logits, params, token_ids, num_prompt)
    np.testing.assert_array_equal(np.array(penalized(logits, params, token_ids, num_prompt), F32), want)


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits, history = [2.0, 2.0, -2.0, 2.0], [0, 1, 1, 2]  # the prompt is [0, 1], generated are [1, 2]
    assert penalized(logits, SamplingParams(1, repetition_penalty=2.0), history, 2) == [1.0, 1.0, -4.0, 2.0]
    assert penalized(logits, SamplingParams(1, presence_penalty=0.5), history, 2) == [2.0, 1.5, -2.5, 2.0]
    assert penalized(logits, SamplingParams(1, frequency_penalty=0.5), [*history, 1], 2) == [2.0, 1.0, -2.5, 2.0]


def test_bias_comes_before_the_repetition_penalty() -> None:
    params = SamplingParams(1, logit_bias={0: -3.0}, repetition_penalty=2.0)
    assert penalized([2.0, 0.0], params, [0], 1) == [-2.0, 0.0]


def test_a_tiny_penalty_leaves_finite_logits() -> None:
    values = penalized([3.0, 0.0, -3.0], SamplingParams(1, repetition_penalty=1e-60), [0, 1, 2], 3)
    assert values[0] == float(np.finfo(F32).max)
    assert values[1:] == [0.0, 0.0]


def test_the_smallest_penalty_leaves_forbidden_ids_forbidden() -> None:
    """0 times -inf would be NaN, and NaN would be sampled."""
    logits_NV = torch.tensor([[3.0, 2.0, 1.0, -1.0]])
    for penalty in (MIN_REPETITION_PENALTY, 1e-46):
        params = SamplingParams(1, temperature=0, repetition_penalty=penalty, allowed_token_ids=frozenset({3}))
        [result] = sample(logits_NV, [SampleSpec.of(params, frozenset(), token_ids=[0, 1, 3], num_prompt=3)])
        if penalty == MIN_REPETITION_PENALTY:
            assert isinstance(result, SampledToken)
            assert result.token_id == 3
        else:  # what the bounds keep away still ends only its own row
            assert isinstance(result, InternalError)
    with pytest.raises(InvalidRequestError, match="repetition_penalty"):
        check_sampling(SamplingParams(1, repetition_penalty=1e-46), 4)


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {1: 1.0}}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}],
)
def test_only_rows_that_ask_are_touched(fields: dict[str, Any]) -> None:
    assert asks_for_penalty(SamplingParams(1, **fields))
    assert not asks_for_penalty(SamplingParams(1))
