"""The random requests of verify: repeatable, within the limits, and of every kind."""

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deploy.verify.case import Case, CaseLimits, Form
from deploy.verify.cases import continued, conversations, make_case
from deploy.verify.grammars import GRAMMARS
from tests.fakes.arithmetic_model import fake_vocabulary

PIECES = fake_vocabulary().pieces
LIMITS = CaseLimits(
    vocab_size=300,
    max_model_len=128,
    max_prompt=500,
    max_output=64,
    eos_token_ids=frozenset({2}),
    pieces=PIECES,
    grammars=tuple(GRAMMARS),
)
SOME = [make_case(7, index, LIMITS) for index in range(200)]


@given(
    seed=st.integers(0, 2**40),
    index=st.integers(0, 10_000),
    vocab_size=st.integers(3, 400),
    max_model_len=st.integers(2, 200),
    max_prompt=st.integers(1, 600),
    num_pieces=st.integers(0, 30),
)
def test_cases_are_legal_and_repeatable(
    seed: int, index: int, vocab_size: int, max_model_len: int, max_prompt: int, num_pieces: int
) -> None:
    limits = CaseLimits(
        vocab_size, max_model_len, max_prompt, 64, frozenset({2}), PIECES[: min(num_pieces, vocab_size)], ("json",)
    )
    case = make_case(seed, index, limits)
    assert case == make_case(seed, index, limits)
    assert 1 <= len(case.prompt) <= max_prompt
    assert len(case.prompt) + case.sampling.max_tokens <= max_model_len
    assert 1 <= case.sampling.max_tokens <= case.asked_max_tokens
    assert case.sampling.min_tokens <= case.sampling.max_tokens
    assert 0 <= case.routing_start <= len(case.prompt)
    assert all(0 <= token_id < vocab_size for token_id in case.prompt)
    s, text = case.sampling, case.text
    assert s.prompt_logprobs is None or case.form is Form.WHOLE
    # Something that does not end the output is always left to sample.
    assert not s.allowed_token_ids or s.allowed_token_ids - s.stop_token_ids - {2}
    assert bool(s.allowed_token_ids) + bool(text.bad_words) + bool(text.stop) + bool(text.grammar) <= 1
    assert text.grammar is None or not (s.min_tokens or s.stop_token_ids)
    assert all(stop and not stop.startswith(" ") for stop in text.stop)


def test_two_hundred_cases_cover_what_can_be_asked() -> None:
    assert {case.form for case in SOME} == set(Form)
    assert {case.sampling.logprobs for case in SOME} == {None, 0, 1, 5}
    assert {case.text.grammar for case in SOME} == {None, *GRAMMARS}
    traits: list[Callable[[Case], object]] = [
        lambda case: case.sampling.temperature == 0,
        lambda case: case.sampling.temperature > 0 and case.sampling.top_k and case.sampling.min_p,
        lambda case: case.sampling.min_tokens > 1,
        lambda case: case.sampling.stop_token_ids,
        lambda case: case.sampling.logit_bias.get(2) == 100.0,
        lambda case: case.routing_start == len(case.prompt),
        lambda case: 0 < case.routing_start < len(case.prompt),
        lambda case: case.sampling.max_tokens < case.asked_max_tokens,
        lambda case: len(case.prompt) == 1,
        lambda case: case.sampling.n == 3,
        lambda case: case.sampling.n > 1 and case.form is not Form.WHOLE,
        lambda case: case.sampling.presence_penalty,
        lambda case: case.sampling.frequency_penalty,
        lambda case: case.sampling.repetition_penalty != 1,
        lambda case: case.sampling.prompt_logprobs,
        lambda case: case.sampling.sampling_mask and case.sampling.temperature > 0,
        lambda case: case.sampling.allowed_token_ids,
        lambda case: case.text.bad_words,
        lambda case: case.text.stop and case.sampling.n > 1,
        lambda case: case.text.stop and case.sampling.min_tokens > 1,
        lambda case: not case.text.skip_special_tokens,
        lambda case: case.wire.rows_format == "dict" and case.form is Form.DELTA and case.routing_start,
        lambda case: not case.wire.wants_rows,
        lambda case: case.wire.return_token_ids,
        lambda case: case.wire.max_event_bytes,
        lambda case: case.wire.cache_salt,
        lambda case: case.wire.priority,
    ]
    for trait in traits:
        assert any(trait(case) for case in SOME)


def test_every_fifth_request_repeats_its_predecessor_in_another_form() -> None:
    repeats = [(a, b) for a, b in pairwise(SOME) if b.index % 5 == 4]
    assert len(repeats) == 40
    for a, b in repeats:
        assert (a.prompt, a.text, a.wire, a.routing_start) == (b.prompt, b.text, b.wire, b.routing_start)
        assert dataclasses.replace(a.sampling, prompt_logprobs=None) == b.sampling or b.form is Form.WHOLE
        assert a.form != b.form


def test_conversations_hold_every_request_once_and_in_order() -> None:
    asked = list(conversations(7, 25, LIMITS))
    assert [case.index for turns in asked for case in turns] == list(range(25))
    assert [[case.index for case in turns] for turns in asked if len(turns) > 1] == [[6, 7], [16, 17]]
    assert len(list(conversations(7, 7, LIMITS))[-1]) == 1


def test_the_second_turn_goes_on_where_the_first_ended() -> None:
    first = dataclasses.replace(make_case(7, 6, LIMITS), prompt=(5, 6, 7), routing_start=1)
    rows_TLK = np.zeros((4, 2, 2), np.uint8)
    user_turns = set()
    for index in range(7, 200, 10):
        second = continued(make_case(7, index, LIMITS), 7, first, [8, 9], rows_TLK, LIMITS)
        assert second.prompt[:5] == (5, 6, 7, 8, 9)
        assert second.routing_start == 4
        assert second.rows_from == 1
        assert len(second.prompt) + second.sampling.max_tokens <= LIMITS.max_model_len
        user_turns.add(len(second.prompt) - 5)
    assert user_turns == {0, 1, 8}


def test_a_conversation_that_fills_the_context_has_no_second_turn() -> None:
    first = dataclasses.replace(make_case(7, 6, LIMITS), prompt=tuple(range(127)))
    case = make_case(7, 7, LIMITS)
    assert continued(case, 7, first, [8], None, LIMITS) is case
