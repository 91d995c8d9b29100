"""Refusals: by what can never fit, by duplicate id, by a full line, by a stopped engine."""

import math

import pytest

from common.engine.admission import Admission
from common.engine.request import EngineRequest, RequestId, Work
from common.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from common.sampling import SamplingParams
from tests.fakes.fake_runner import VOCAB_SIZE
from tests.unit.engine.rig import greedy, limits, make_request


def admission(*, num_usable_blocks: int = 4, max_waiting: int = 2, max_model_len: int = 128) -> Admission:
    bounds = limits(max_waiting=max_waiting, max_model_len=max_model_len)
    return Admission(bounds, num_usable_blocks=num_usable_blocks, block_size=4)


def named(name: str) -> EngineRequest:
    return make_request(name, [5, 6], greedy(3))


def test_a_live_id_is_refused_until_its_request_left() -> None:
    door = admission()
    door.enter(named("a"))
    with pytest.raises(DuplicateRequestError, match="'a'"):
        door.enter(named("a"))
    door.leave(RequestId("a"))
    door.enter(named("a"))


def test_only_waiting_requests_count_against_the_line() -> None:
    door = admission(max_waiting=2)
    door.enter(named("a"))
    door.enter(named("b"))
    with pytest.raises(OverloadedError, match="2 requests wait"):
        door.enter(named("c"))
    door.seat(RequestId("a"))
    door.enter(named("c"))


def test_the_first_wish_to_end_a_live_request_counts() -> None:
    door = admission()
    assert not door.try_begin_end(RequestId("a"))
    door.enter(named("a"))
    assert door.try_begin_end(RequestId("a"))
    assert not door.try_begin_end(RequestId("a"))


def test_the_end_of_the_request_follows_that_of_a_choice_and_not_the_other_way_round() -> None:
    door = admission()
    door.enter(named("a"))
    assert door.try_begin_end(RequestId("a"), 1)
    assert not door.try_begin_end(RequestId("a"), 1)
    assert door.try_begin_end(RequestId("a"), 0)
    assert door.try_begin_end(RequestId("a"))
    assert not door.try_begin_end(RequestId("a"), 2)
    door.leave(RequestId("a"))
    door.enter(named("a"))
    assert door.try_begin_end(RequestId("a"), 1)


def test_closing_names_the_orphans_and_lets_nobody_in() -> None:
    door = admission()
    door.enter(named("b"))
    door.enter(named("a"))
    assert door.close() == ["a", "b"]
    assert door.close() == []
    with pytest.raises(UnavailableError):
        door.enter(named("c"))


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        (make_request("a", [], greedy(3)), "token_ids", "empty"),
        (make_request("a", [5, VOCAB_SIZE], greedy(3)), "token_ids", f"0, {VOCAB_SIZE}"),
        (make_request("a", [-1], greedy(3)), "token_ids", "vocabulary"),
        (make_request("a", [5], greedy(0)), "max_tokens", "at least 1, got 0"),
        (make_request("a", [5], SamplingParams(3, logit_bias={VOCAB_SIZE: 1.0})), "logit_bias", "vocabulary"),
        (make_request("a", [5], SamplingParams(3, logit_bias={1: math.nan})), "logit_bias", "[-100, 100]"),
        (make_request("a", [5], SamplingParams(3, logit_bias={1: 1e300})), "logit_bias", "[-100, 100]"),
        (make_request("a", [5], SamplingParams(3, temperature=math.nan)), "temperature", "nan"),
        (make_request("a", [5], SamplingParams(3, temperature=math.inf)), "temperature", "inf"),
        (make_request("a", [5], SamplingParams(3, temperature=-0.1)), "temperature", "-0.1"),
        (make_request("a", [5], SamplingParams(3, top_p=0.0)), "top_p", "(0, 1]"),
        (make_request("a", [5], SamplingParams(3, top_p=math.nan)), "top_p", "nan"),
        (make_request("a", [5], SamplingParams(3, min_p=2.0)), "min_p", "[0, 1]"),
        (make_request("a", [5], SamplingParams(3, min_p=math.nan)), "min_p", "nan"),
        (make_request("a", [5, 6], greedy(3), start=3), "routed_experts_prompt_start", "[0, 2], got 3"),
        (make_request("a", [5, 6], greedy(3), start=-1), "routed_experts_prompt_start", "got -1"),
        (make_request("a", [5] * 100, greedy(29)), "max_tokens", "100 prompt tokens and max_tokens 29"),
        (make_request("a", [5] * 10, greedy(8)), "max_tokens", "need 5 KV blocks, but this worker has 4"),
    ],
)
def test_what_can_never_be_served_is_refused_in_numbers(request_: EngineRequest, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        admission().enter(request_)
    assert refused.value.param == param
    assert words in refused.value.message


def test_what_just_fits_is_let_in() -> None:
    admission().enter(make_request("pool", [5] * 10, greedy(7)))
    admission(num_usable_blocks=32).enter(make_request("context", [5] * 100, greedy(28)))
    admission().enter(make_request("start", [5, 6], greedy(3), start=2))
    admission().enter(make_request("prompt only", [5] * 16, greedy(50), work=Work.PREFILL))
