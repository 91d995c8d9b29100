"""The sampler against a second implementation in plain Python, and against literals."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.distribution import uniform
from common.engine.sampler import SampleSpec, sample
from common.errors import InternalError, InvalidRequestError
from common.model.scores import best_first
from common.sampling import SampledToken, SamplingParams

SIXTY_FOUR = 2**64 - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 as its paper describes it."""
    x, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [(right >> 64) ^ x[1] ^ k[0], right & SIXTY_FOUR, (left >> 64) ^ x[3] ^ k[1], left & SIXTY_FOUR]
        k = [(k[0] + 0x9E3779B97F4A7C15) & SIXTY_FOUR, (k[1] + 0xBB67AE8584CAA73B) & SIXTY_FOUR]
    return x


def expected_uniform(seed: int, choice: int, position: int) -> float:
    """NumPy counts up before it draws."""
    return (philox4x64([position + 1, 0, 0, 0], [seed & SIXTY_FOUR, choice])[0] >> 11) / 2**53


def expected_token(logits: list[float], params: SamplingParams, position: int) -> int:
    """Filter best first, one candidate at a time; then walk up the cumulative sum by id."""
    best = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = [math.exp((logit - logits[best[0]]) / params.temperature) for logit in logits]
    best = best[: params.top_k or None]
    total, mass, kept = sum(weights[i] for i in best), 0.0, list[int]()
    for token in best:
        if kept and (mass >= params.top_p * total or weights[token] < params.min_p):
            break
        mass += weights[token]
        kept.append(token)
    target, below = expected_uniform(params.seed, 0, position) * mass, 0.0
    for token in sorted(kept):
        below += weights[token]
        if target < below:
            return token
    raise AssertionError("the target lies below the total")


def spec_at(params: SamplingParams, position: int, banned: frozenset[int] = frozenset()) -> SampleSpec:
    """Nothing but a position comes before the token."""
    return SampleSpec(params, 0, position, banned, token_ids=(), num_prompt=0)


def draw(logits: list[float], params: SamplingParams, position: int = 0) -> SampledToken:
    [result] = sample(torch.tensor([logits]), [spec_at(params, position)])
    assert isinstance(result, SampledToken)
    return result


def support(logits: list[float], params: SamplingParams) -> set[int]:
    """Every token that 500 positions bring."""
    rows = torch.tensor([logits]).expand(500, -1)
    results = sample(rows, [spec_at(params, position) for position in range(500)])
    return {r.token_id for r in results if isinstance(r, SampledToken)}


def of_probabilities(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


# --- random numbers


def test_the_second_implementation_knows_the_published_answer() -> None:
    assert philox4x64([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(("choice", "position"), [(0, 0), (0, 1), (127, 131_071), (1, 0)])
def test_uniform_is_philox_of_seed_choice_and_position(seed: int, choice: int, position: int) -> None:
    assert uniform(seed, choice, position) == expected_uniform(seed, choice, position)


# --- drawing

COARSE_LOGITS = st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=1, max_size=24)


@settings(max_examples=300, deadline=None)
@given(
    logits=COARSE_LOGITS,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 7, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 10_000),
)
def test_draws_equal_the_plain_computation(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert draw(logits, params, position).token_id == expected_token(logits, params, position)


def test_frequencies_follow_the_softmax() -> None:
    probabilities = [0.5, 0.25, 0.15, 0.1]
    rows = torch.tensor([of_probabilities(*probabilities)]).expand(5_000, -1)
    results = sample(rows, [spec_at(SamplingParams(1, seed=7), i) for i in range(5_000)])
    counts = Counter(r.token_id for r in results if isinstance(r, SampledToken))
    chi_squared = sum((counts[i] - 5_000 * p) ** 2 / (5_000 * p) for i, p in enumerate(probabilities))
    assert chi_squared < 16.27  # 99.9 % quantile, three degrees of freedom


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(1), {0, 1, 2, 3}),
        (SamplingParams(1, top_k=2), {1, 3}),
        (SamplingParams(1, top_p=0.69), {1, 3}),
        (SamplingParams(1, top_p=0.71), {0, 1, 3}),
        (SamplingParams(1, top_p=0.01), {3}),
        (SamplingParams(1, min_p=0.5), {1, 3}),
        (SamplingParams(1, min_p=0.45), {0, 1, 3}),
        (SamplingParams(1, top_k=2, top_p=0.5), {3}),  # 0.4 of 0.7 is more than half of what top-k left
        (SamplingParams(1, temperature=1e-300), {3}),
        (SamplingParams(1, logit_bias={2: 100.0}), {2}),
        (SamplingParams(1, logit_bias={3: -100.0}), {0, 1, 2}),
    ],
)
def test_filters_leave_exactly_these_tokens(params: SamplingParams, expected: set[int]) -> None:
    assert support(of_probabilities(0.19, 0.3, 0.11, 0.4), params) == expected


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.999999])
def test_a_nucleus_may_be_larger_than_the_part_that_is_sorted_first(top_p: float) -> None:
    logits = np.random.default_rng(1).permutation(np.linspace(-1, 1, 30_000, dtype=np.float32)).tolist()
    params = SamplingParams(1, top_p=top_p, seed=4)
    for position in range(3):
        assert draw(logits, params, position).token_id == expected_token(logits, params, position)


def test_among_equal_logits_lower_ids_survive_the_filters() -> None:
    assert support([1.0, 3.0, 3.0, 3.0, 0.0], SamplingParams(1, top_k=2)) == {1, 2}
    assert draw([1.0, 3.0, 3.0, 0.0], SamplingParams(1, temperature=0)).token_id == 1
    assert draw([-0.0, 0.0], SamplingParams(1, top_k=1)).token_id == 0


@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), count=st.integers(1, 50))
def test_best_first_is_a_stable_descending_sort(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:count]
    assert best_first(np.array(values, np.float32), count).tolist() == expected


# --- batches


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits_NV = torch.from_numpy(np.random.default_rng(3).standard_normal((40, 4000), np.float32))
    kinds = [
        SamplingParams(1, temperature=0, logprobs=3),
        SamplingParams(1, seed=11, logprobs=0),
        SamplingParams(1, seed=-4, top_p=0.8, top_k=50),
        SamplingParams(1, temperature=0.7, min_p=0.1, logit_bias={9: 5.0}, logprobs=5),
    ]
    specs = [spec_at(kinds[i % 4], i, frozenset({1, 2}) if i % 3 else frozenset()) for i in range(40)]
    together = sample(logits_NV, specs)
    alone = [sample(logits_NV[i : i + 1].clone(), [spec])[0] for i, spec in enumerate(specs)]
    assert together == alone


def test_the_logits_are_left_as_they_were() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 3.0]])
    sample(logits_NV, [spec_at(SamplingParams(1, logit_bias={0: 9.0}), 0, frozenset({1}))])
    assert logits_NV.tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_fail_their_row_only(bad: float) -> None:
    greedy = spec_at(SamplingParams(1, temperature=0), 0)
    random = spec_at(SamplingParams(1, seed=5), 0)
    results = sample(torch.tensor([[1.0, bad], [1.0, 0.0], [bad, 1.0]]), [greedy, greedy, random])
    assert [type(r) for r in results] == [InternalError, SampledToken, InternalError]


# --- bans


def test_stop_and_eos_ids_are_banned_until_min_tokens_were_generated() -> None:
    params = SamplingParams(9, min_tokens=2, stop_token_ids=frozenset({5}), ignore_eos=True)
    specs = [SampleSpec.of(params, frozenset({2}), token_ids=range(4 + n), num_prompt=4) for n in range(4)]
    assert [spec.banned for spec in specs] == [{2, 5}, {2, 5}, set(), set()]
    assert [spec.position for spec in specs] == [4, 5, 6, 7]


def test_banned_ids_are_never_drawn() -> None:
    spec = spec_at(SamplingParams(1, temperature=0, logit_bias={1: 50.0}), 0, frozenset({1, 9_999}))
    [greedy] = sample(torch.tensor([[0.0, 9.0, 1.0]]), [spec])
    assert greedy == SampledToken(2)
    specs = [spec_at(SamplingParams(1), i, frozenset({1})) for i in range(200)]
    drawn = sample(torch.tensor([[0.0, 3.0, 0.0]]).expand(200, -1), specs)
    assert {r.token_id for r in drawn if isinstance(r, SampledToken)} == {0, 2}


def test_a_row_with_everything_banned_is_refused() -> None:
    spec = spec_at(SamplingParams(1), 0, frozenset({0, 1}))
    [result] = sample(torch.tensor([[0.0, 3.0]]), [spec])
    assert isinstance(result, InvalidRequestError)


# --- logprobs


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(1, temperature=0, logit_bias={3: 100.0}, logprobs=2)
    token = draw(of_probabilities(0.2, 0.3, 0.4, 0.1), params)
    assert token.logprob is not None
    assert (token.token_id, token.logprob.rank) == (3, 4)
    assert token.logprob.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [(t.token_id, t.rank) for t in token.top] == [(2, 1), (1, 2)]
    assert [t.logprob for t in token.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


def test_logprobs_equal_torchs_log_softmax_bit_for_bit() -> None:
    logits_NV = torch.from_numpy(np.random.default_rng(5).standard_normal((3, 1000), np.float32))
    specs = [spec_at(SamplingParams(1, temperature=0, logprobs=0), 0)] * 3
    want = torch.log_softmax(logits_NV, dim=-1).max(dim=1).values.tolist()
    got = [r.logprob.logprob for r in sample(logits_NV, specs) if isinstance(r, SampledToken) and r.logprob]
    assert got == want


def test_equally_likely_ids_share_a_rank_and_lower_ids_come_first() -> None:
    token = draw([1.0, 2.0, 2.0, 1.0], SamplingParams(1, temperature=0, logprobs=4))
    assert [(t.token_id, t.rank) for t in token.top] == [(1, 1), (2, 1), (0, 3), (3, 3)]


def test_how_many_alternatives_are_told() -> None:
    logits = [0.0] * 3
    none = draw(logits, SamplingParams(1, temperature=0))
    zero = draw(logits, SamplingParams(1, temperature=0, logprobs=0))
    all_of_them = draw(logits, SamplingParams(1, temperature=0, logprobs=20))
    assert none == SampledToken(0)
    assert zero == msgspec.structs.replace(all_of_them, top=())
    assert zero.logprob is not None
    assert zero.logprob.logprob == pytest.approx(-math.log(3))
    assert len(all_of_them.top) == 3
