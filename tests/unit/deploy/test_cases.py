"""The random requests of verify: repeatable, within the limits, and of every kind."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deploy.verify.cases import CaseLimits, Form, make_case

LIMITS = CaseLimits(vocab_size=300, max_model_len=128, max_prompt=500, max_output=64, eos_token_ids=frozenset({2}))
SOME = [make_case(7, index, LIMITS) for index in range(200)]


@given(
    seed=st.integers(0, 2**40),
    index=st.integers(0, 10_000),
    vocab_size=st.integers(3, 400),
    max_model_len=st.integers(2, 200),
    max_prompt=st.integers(1, 600),
)
def test_cases_are_legal_and_repeatable(
    seed: int, index: int, vocab_size: int, max_model_len: int, max_prompt: int
) -> None:
    limits = CaseLimits(vocab_size, max_model_len, max_prompt, 64, frozenset({2}))
    case = make_case(seed, index, limits)
    assert case == make_case(seed, index, limits)
    assert 1 <= len(case.prompt) <= max_prompt
    assert len(case.prompt) + case.sampling.max_tokens <= max_model_len
    assert 1 <= case.sampling.max_tokens <= case.asked_max_tokens
    assert case.sampling.min_tokens <= case.sampling.max_tokens
    assert 0 <= case.routing_start <= len(case.prompt)
    assert all(0 <= token_id < vocab_size for token_id in case.prompt)


def test_two_hundred_cases_cover_what_can_be_asked() -> None:
    assert {case.form for case in SOME} == set(Form)
    assert {case.sampling.logprobs for case in SOME} == {None, 0, 1, 5}
    for trait in (
        lambda case: case.sampling.temperature == 0,
        lambda case: case.sampling.temperature > 0 and case.sampling.top_k and case.sampling.min_p,
        lambda case: case.sampling.min_tokens > 1,
        lambda case: case.sampling.stop_token_ids,
        lambda case: case.sampling.logit_bias.get(2) == 100.0,
        lambda case: case.routing_start == len(case.prompt),
        lambda case: 0 < case.routing_start < len(case.prompt),
        lambda case: case.sampling.max_tokens < case.asked_max_tokens,
        lambda case: len(case.prompt) == 1,
    ):
        assert any(trait(case) for case in SOME)


def test_every_fifth_request_repeats_its_predecessor_in_another_form() -> None:
    repeats = [(a, b) for a, b in pairwise(SOME) if b.index % 5 == 4]
    assert len(repeats) == 40
    assert all((a.prompt, a.sampling) == (b.prompt, b.sampling) and a.form != b.form for a, b in repeats)
